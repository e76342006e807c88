"""Whether a tokenizer has the control tokens that a template prints.

A template of another model renders, and its labels can even be found; but its markers come out as a handful of ordinary
tokens that the model has never seen to mean anything. So before a row is admitted under a template that is not the
model's own, every marker that the template prints must be one token.
"""

from __future__ import annotations

from collections.abc import Iterable

from kiln_cli.errors import KilnError
from kiln_cli.text import printable
from kiln_stages.admitting.contract import Contract
from kiln_stages.labelling.markers import bracketed_in, markers_in, plain_renders
from kiln_stages.labelling.rendering import ChatTemplate
from kiln_stages.labelling.tokens import RowTokenizer


def require_markers(contract: Contract) -> None:
    """Raises KilnError KLN213 with the first marker that is not one token, and an example of what would be trained."""
    own = contract.choice.source == contract.files.chat_template  # what the model was trained on
    if own or contract.settings.unknown_markers == "text":
        return
    template, tokenizer = contract.finder.template, contract.tokenizer
    missing = missing_marker(template, tokenizer, contract.files.special_tokens.values())
    if missing is None:
        return
    example = max(plain_renders(template), key=len)
    parts = ", ".join(repr(part) for part in tokenizer.pieces(missing))
    name = printable(template.name)
    raise KilnError(
        "KLN213",
        f"the chat template {name} prints {printable(missing)}, which the tokenizer has not as one token but as "
        f"{parts}\nan example of a row under it, of which 0 of {len(tokenizer.pieces(example))} tokens are admitted:\n"
        f"{printable(example, limit=2000)}",
        hint='use the model\'s own template ([admit] template = "model"), or add the token to the tokenizer; '
        '[admit] unknown_markers = "text" admits rows with the marker as ordinary tokens',
        details={"template": template.name, "token": missing, "example": example},
    )


def missing_marker(template: ChatTemplate, tokenizer: RowTokenizer, special_texts: Iterable[str]) -> str | None:
    """The first marker or special text that the template prints and the tokenizer splits, None where there is none.

    A template that refuses the plainest conversations prints nothing here; it will refuse the rows, too.
    """
    printed = "\n".join(plain_renders(template))
    markers = {*markers_in(printed), *(text for text in special_texts if text and text in printed)}
    bracketed = set(bracketed_in(printed))
    if any(len(tokenizer.pieces(marker)) == 1 for marker in bracketed):
        markers |= bracketed
    ordered = sorted(markers, key=printed.index)
    return next((marker for marker in ordered if len(tokenizer.pieces(marker)) != 1), None)
