"""The tokenizer and the chat template beside the adapter: whoever uses it must encode and render as it was trained.

Three files, whatever the model's own directory has. The template is the one that rows were admitted under, which need
not be the model's; a template inside ``tokenizer_config.json`` is left out, so that the folder holds one and no other.
"""

from __future__ import annotations

import json
from pathlib import Path

from kiln_cli.errors import KilnError
from kiln_cli.files import write_file
from kiln_cli.manifests import reference
from kiln_cli.receipts import FileRef
from kiln_cli.stage_manifests import TemplateUsed
from kiln_stages.admitting.contract import Terms
from kiln_stages.admitting.model_files import tokenizer_settings

# By their names in the folder, the kinds of file that a receipt names them by.
KINDS = {"chat_template.jinja": "chat_template", "tokenizer.json": "tokenizer", "tokenizer_config.json": "tokenizer"}


def write_tokenizer(terms: Terms, admitted: TemplateUsed, adapter: Path, out: Path) -> list[FileRef]:
    """Writes the three files into the adapter's folder. ``admitted``: the template of the admission.

    Raises KilnError KLN207 for a template that is no longer the admitted one.
    """
    if terms.choice.sha256 != admitted.sha256:
        raise KilnError(
            "KLN207",
            f"the chat template {terms.choice.name} changed after `kiln admit`: {terms.choice.sha256}, "
            f"expected {admitted.sha256}",
            hint="run `kiln admit` again",
        )
    settings = json.dumps(tokenizer_settings(terms.files.directory), ensure_ascii=False, indent=2, sort_keys=True)
    contents = {
        "chat_template.jinja": terms.choice.source,
        "tokenizer.json": terms.files.tokenizer_json,
        "tokenizer_config.json": settings + "\n",
    }
    return [
        reference(write_file(adapter / name, contents[name].encode("utf-8")), out, kind) for name, kind in KINDS.items()
    ]
