"""The shapes of evidence: references to files, drop summaries, ingestion and train receipts.

``docs/artifacts.md`` explains every field. Unknown fields are refused on read, so nothing rides along unverified.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kiln_cli.identity import Domain, canonical_json, corpus_sha256, domain_json_sha256, is_hash, sha256_hex
from kiln_cli.plugins import LoadedPlugin

INGESTION_SCHEMA = "kiln.sft-ingestion.v1"
DROP_SUMMARY_SCHEMA = "sommelier.drop_summary.v2"
# The closed set of the data policy, in its order; a drop summary's `counts` holds these and no others.
SIXTEEN = (
    "missing_query",
    "missing_tools",
    "missing_answers",
    "query_too_short",
    "query_too_long",
    "invalid_tools_json",
    "invalid_tool_shape",
    "invalid_answers_json",
    "invalid_answer_shape",
    "multi_call_answer",
    "duplicate_query",
    "missing_source_example",
    "duplicate_source_example",
    "pair_tools_mismatch",
    "pair_answers_mismatch",
    "cross_split_duplicate",
)
RECEIPT_TYPE = "kiln_train_receipt"
RECEIPT_VERSION = 1
INGESTION_SOURCES = ("inline", "dataset_path", "named_dataset", "corrections", "recipe", "rust_api")
INGESTION_REASONS = ("invalid_json", "empty_messages", "invalid_role", "tokenization_error")


class FileRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file by content. ``base``: ``path`` counts from the run directory, or from the config file's directory."""

    path: str
    base: Literal["run", "config"]
    kind: str
    schema: str | None = None
    sha256: str
    bytes: int
    rows: int | None = None


class ManifestRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The manifest of the stage before, by content: the same work done at another time is the same evidence."""

    path: str
    content_sha256: str


Policy = Annotated[str, Meta(pattern=r"\A(fail|skip)\Z")]
Reason = Annotated[str, Meta(pattern=rf"\A({'|'.join(INGESTION_REASONS)})\Z")]
Size = Annotated[int, Meta(ge=0)]


class RejectedRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    row_index: Size
    row_sha256: str
    reason: Reason


class IngestionReceipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``kiln.sft-ingestion.v1``: which rows were kept and which were not, by hash, in order.

    On read, unknown fields and what a field's type does not admit are refused before ``faults`` is asked.
    """

    schema: str = INGESTION_SCHEMA
    source: str
    source_locator: str | UnsetType = UNSET
    invalid_row_policy: Policy
    rows_read: Size
    rows_kept: Size
    rows_rejected: Size
    kept_row_hashes: list[str]
    rejected_rows: list[RejectedRow]
    kept_corpus_sha256: str

    def faults(self) -> Iterator[str]:
        """What contradicts what, in the contract's order; nothing for a sound receipt."""
        if self.schema != INGESTION_SCHEMA:
            yield f"schema is {self.schema!r}, expected {INGESTION_SCHEMA!r}"
        if self.source not in INGESTION_SOURCES:
            yield f"source is {self.source!r}, expected one of {', '.join(INGESTION_SOURCES)}"
        if isinstance(self.source_locator, str) and not self.source_locator.strip():
            yield "source_locator is blank"
        yield from self._count_faults()
        kept = [index for index, text in enumerate(self.kept_row_hashes) if not is_hash(text)]
        if kept:
            yield f"kept_row_hashes[{kept[0]}] is no hash"
        yield from self._rejected_faults()
        if not is_hash(self.kept_corpus_sha256):
            yield "kept_corpus_sha256 is no hash"
        if not kept and self.kept_corpus_sha256 != (aggregate := corpus_sha256(self.kept_row_hashes)):
            yield f"kept_corpus_sha256 is {self.kept_corpus_sha256}, the kept hashes give {aggregate}"

    def identity(self) -> str:
        """What checkpoints are bound to: SHA-256 of the canonical JSON, without a domain."""
        return "sha256:" + sha256_hex(canonical_json(self))

    def summary(self) -> dict[str, Any]:
        """What checkpoints hold beside the identity, so that a difference from it has a name."""
        return {
            "invalid_row_policy": self.invalid_row_policy,
            "rejected_rows_sha256": "sha256:" + sha256_hex(canonical_json(self.rejected_rows)),
            "rows_read": self.rows_read,
            "rows_rejected": self.rows_rejected,
        }

    def _count_faults(self) -> Iterator[str]:
        if self.rows_read != self.rows_kept + self.rows_rejected:
            yield f"rows_read is {self.rows_read}, not {self.rows_kept} kept + {self.rows_rejected} rejected"
        if self.rows_kept == 0:
            yield "no row is kept"
        if self.rows_kept != len(self.kept_row_hashes):
            yield f"rows_kept is {self.rows_kept}, and there are {len(self.kept_row_hashes)} kept hashes"
        if self.rows_rejected != len(self.rejected_rows):
            yield f"rows_rejected is {self.rows_rejected}, and there are {len(self.rejected_rows)} rejected rows"

    def _rejected_faults(self) -> Iterator[str]:
        previous = 0
        for number, row in enumerate(self.rejected_rows):
            if not previous < row.row_index <= self.rows_read:
                yield f"rejected_rows[{number}].row_index is {row.row_index}, not in {previous + 1}..{self.rows_read}"
            if not is_hash(row.row_sha256):
                yield f"rejected_rows[{number}].row_sha256 is no hash"
            previous = row.row_index


class LanguageDrops(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One language of a drop summary: the sixteen reasons, zeroes included, and the sizes that follow from them."""

    counts: dict[str, int]
    valid_rows: int
    deduplicated_rows: int
    split_sizes: dict[str, int]


class KilnDrops(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Beside the sixteen: faults of lines, reasons of plugins, and the account rows_read = kept + dropped + unused.

    ``lost_keys``: keys of tools and calls that an example does not hold, by kept rows that had them.
    """

    counts: dict[str, int]
    rows_read: int
    kept: int
    dropped: int
    unused: int
    blank_lines: int
    byte_order_marks: int
    lost_keys: dict[str, int] = {}


class DropSummary(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    schema_version: str = DROP_SUMMARY_SCHEMA
    languages: dict[str, LanguageDrops]
    requested: dict[str, int]
    kiln: dict[str, KilnDrops]


class ReceiptData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The account of the rows. examples_trained == rows kept x epochs after a complete run.

    The receipt of the admission of conversations, or of a scored corpus (``kiln.scored-ingestion.v1``): one is there.
    """

    examples_read: int
    examples_filtered: int
    examples_trained: int
    sft_ingestion: IngestionReceipt | UnsetType = UNSET
    scored_ingestion: dict[str, Any] | UnsetType = UNSET

    @property
    def examples_kept(self) -> int:
        return self.examples_read - self.examples_filtered

    def conversations(self) -> IngestionReceipt:
        """The receipt of the admission of conversations. Raises ValueError for a distillation, which has none."""
        if isinstance(self.sft_ingestion, IngestionReceipt):
            return self.sft_ingestion
        raise ValueError("data.sft_ingestion is absent: the training is no one on conversations")


class Alignment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of how many scored tokens the corpus itself names the id, which admission held against the target."""

    proven: int
    of: int


class Coverage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Means over a step's action tokens, at the first step and at the last: the teacher's mass within its top K, and
    the student's mass outside of it."""

    teacher_mass_top_k: tuple[float, float]
    student_mass_outside: tuple[float, float]


class OpdBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A distillation, as the public server's receipt has it; ``alignment``, ``tail_bucket`` and ``coverage`` are ours.

    Losses are the reverse KL, in nats an action token, of the first step and of the last; ECHO is not in them.
    """

    training_mode: str
    objective: str
    loss_granularity: str
    teacher_id: str
    teacher_content_revision: str
    teacher_identity: dict[str, Any]
    top_k: int
    samples_per_prompt: int
    action_tokens: int
    env_tokens: int
    echo_combined: bool
    echo_lambda: float | None
    initial_opd_loss: float | None
    final_opd_loss: float | None
    alignment: Alignment
    tail_bucket: bool
    coverage: Coverage | None


class EchoBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``enabled``: whether ECHO was added to a step at all; ``dropped_reason`` says why not. The cross-entropies are of
    the first step and of the last that had observed tokens: the sum over them / all observation tokens, in nats."""

    enabled: bool
    lambda_: float | None = msgspec.field(name="lambda")
    env_mask_mode: str | None
    warning_filter: bool | None
    initial_env_ce: float | None
    final_env_ce: float | None
    dropped_reason: str | UnsetType = UNSET


class Held(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out loss in nats per supervised token, before the first step and after the last. Of scored rows it is the
    reverse KL."""

    rows: int
    supervised_tokens: int
    loss_before: float
    loss_after: float


class CheckpointRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    step: int
    manifest_sha256: str


class DeltaNorms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """L2 norms of the trained adapter under one module name: ``pair_count`` pairs of A and B, and a bound on how far
    their layers' weights moved."""

    module: str
    pair_count: int
    a_l2_mean: float
    a_l2_max: float
    b_l2_mean: float
    b_l2_max: float
    delta_l2_upper_bound_mean: float
    delta_l2_upper_bound_max: float


class LoraGradNorms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """L2 norms of the gradients under one module name, a sample for each leaf and step."""

    module: str
    sample_count: int
    min: float
    mean: float
    max: float


# Why a training failed; the set is closed. Those of policy training (groups, env tokens) never stand in a receipt here.
FAILURE_REASONS = (
    "data_schema_error",
    "adapter_load_failed",
    "zero_groups",
    "zero_action_tokens",
    "zero_env_tokens",
    "cancelled",
    "unsupported_loss_config",
    "nan_loss",
    "oom",
    "shape_mismatch",
    "unsafe_lora_scale",
    "base_adapter_missing",
    "training_error",
)


class TrainReceipt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``kiln_train_receipt``: what was trained, from what, with what, and what came out. ``docs/artifacts.md`` has a
    line a field. A failed training has the same fields; what it did not come to is null or empty.

    ``content_sha256`` leaves out ``produced`` (times, durations, place), ``checkpoints`` (they hold times, and a run
    that was cut has other ones) and both digests: two runs are compared by it. ``receipt_sha256`` covers all the rest.
    """

    schema_version: int = RECEIPT_VERSION
    receipt_type: str = RECEIPT_TYPE
    adapter_name: str
    status: Literal["success", "failed"]
    failure_reason: str | None = None
    failure_message: str | None = None
    kiln: dict[str, Any]
    plugins: list[LoadedPlugin]
    model: dict[str, Any]
    tokenizer: dict[str, Any]
    adapters: dict[str, Any]
    training_data: dict[str, Any]
    hyperparameters: dict[str, Any]
    data: ReceiptData
    token_counts: dict[str, int]
    opd: OpdBlock | UnsetType = UNSET
    echo: EchoBlock | UnsetType = UNSET
    steps: int
    loss_log_sha256: str | None
    held_out: Held | None
    lora_delta_norms: list[DeltaNorms]
    lora_grad_norms: list[LoraGradNorms]
    execution: dict[str, Any] | None
    execution_provenance: dict[str, Any] | None = None
    adapter_smoke_test: dict[str, Any] | None = None
    config: dict[str, Any]
    config_sha256: str
    previous: ManifestRef
    inputs: list[FileRef]
    outputs: list[FileRef]
    checkpoints: list[CheckpointRef]
    produced: dict[str, Any] = {}
    content_sha256: str = ""
    receipt_sha256: str = ""

    def held_out_loss(self) -> str:
        """What ``held_out`` holds, in a word."""
        return "held-out reverse KL" if isinstance(self.opd, OpdBlock) else "held-out loss"

    def tokens(self) -> int:
        """Tokens that the committed steps went over, each as often as its row was visited."""
        return sum(self.token_counts.get(name, 0) for name in ("action_tokens", "context_tokens", "env_tokens"))

    def seal(self) -> None:
        """Fills in both digests."""
        self.content_sha256 = self.content_digest()
        self.receipt_sha256 = self.whole_digest()

    def content_digest(self) -> str:
        value = msgspec.to_builtins(self)
        for name in ("produced", "checkpoints", "content_sha256", "receipt_sha256"):
            del value[name]
        return domain_json_sha256(Domain.RECEIPT_CONTENT, value)

    def whole_digest(self) -> str:
        value = msgspec.to_builtins(self)
        del value["receipt_sha256"]
        return domain_json_sha256(Domain.RECEIPT, value)
