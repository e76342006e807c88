"""What rows are admitted under: a model's tokenizer, a chat template, and the settings, put together once.

Everything that reads or repeats an admission (`admit`, `train`, `inspect`) builds it here, from the config.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from kiln_cli.config import AdmitConfig, LoadedConfig
from kiln_cli.plugins import Plugins
from kiln_cli.stage_manifests import ToolsShown
from kiln_stages.admitting.admission import Admission
from kiln_stages.admitting.model_files import ModelFiles, TemplateChoice, choose_template, load_model_files
from kiln_stages.admitting.prepared_rows import TOOL_PROMPT_NAME, ToolsMode, choose_mode, tool_prompt_sha256
from kiln_stages.admitting.row_views import RowView
from kiln_stages.contamination.index import Index
from kiln_stages.labelling.labels import LabelFinder
from kiln_stages.labelling.markers import printed_markers
from kiln_stages.labelling.rendering import ChatTemplate
from kiln_stages.labelling.tokens import RowTokenizer


class Terms(NamedTuple):
    """The texts of the contract, read and not yet compiled."""

    files: ModelFiles
    choice: TemplateChoice


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """``prepared_mode``: how prepared examples become conversations. ``chat_mode``: how tools and calls
    of chat rows are rendered. ``max_tokens`` is None where nothing caps it."""

    settings: AdmitConfig
    files: ModelFiles
    choice: TemplateChoice
    finder: LabelFinder
    tokenizer: RowTokenizer
    prepared_mode: ToolsMode
    chat_mode: ToolsMode
    max_tokens: int | None

    def admission(self, source_reasons: Iterable[str] = (), held_out: Index | None = None) -> Admission:
        return Admission(self.finder, self.tokenizer, self.max_tokens, self.settings, source_reasons, held_out)

    def details(self, mode: ToolsMode) -> dict[str, Any]:
        """What the manifest says of it: fields of :class:`AdmitDetails`."""
        return {
            "system_turn": self.settings.system_turn,
            "max_tokens": self.max_tokens,
            "template": self.choice.used(),
            "tokenizer": self.files.file_digests(),
            "tools": ToolsShown(
                mode=mode,
                prompt=TOOL_PROMPT_NAME if mode == "system" else None,
                prompt_sha256=tool_prompt_sha256() if mode == "system" else None,
            ),
        }


def load_terms(config: LoadedConfig, plugins: Plugins, template: str | None = None) -> Terms:
    """Reads the files of the contract; ``template`` takes the place of the config's.

    Raises KilnError: KLN302 for missing model files, KLN212 for a template that is unknown.
    """
    files = load_model_files(config.model_dir())
    wanted = template or config.run.admit.template
    return Terms(files, choose_template(wanted, files, plugins.templates, config.base_dir))


def build_contract(config: LoadedConfig, terms: Terms) -> Contract:
    """Makes the terms work. Raises KilnError: KLN302 for a damaged tokenizer, KLN213 for an unusable template."""
    settings, (files, choice) = config.run.admit, terms
    template = ChatTemplate(choice.source, choice.name, files.special_tokens, settings.date)
    chat_mode: ToolsMode = "system" if settings.tools == "system" else "native"
    view = RowView(chat_mode, settings.system_turn)
    plain = LabelFinder(template)
    return Contract(
        settings=settings,
        files=files,
        choice=choice,
        finder=plain if view == RowView() else LabelFinder(template, view),
        tokenizer=RowTokenizer(
            files.tokenizer_json,
            files.special_tokens.get("bos_token"),
            {*files.special_tokens.values(), *printed_markers(template)},
        ),
        # The public server has no field for tools, so that under compat they are text.
        prepared_mode=choose_mode("system" if settings.compat else settings.tools, plain),
        chat_mode=chat_mode,
        max_tokens=settings.max_tokens or files.positions,
    )
