"""Every error a user can meet: one code, one exit code, one page of explanation.

Raise ``KilnError("KLN204", "what is wrong, with both values", hint="the next thing to do")``. The exit code comes from
the catalogue, so a code can never carry two of them. ``kiln explain CODE`` prints an entry.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Exit(IntEnum):
    """Process exit codes. 130 and 143 follow SIGINT and SIGTERM and have no catalogue entry."""

    DONE = 0
    FAULTS_FOUND = 1
    USER_INPUT = 2
    ENVIRONMENT = 3
    RESOURCE = 4
    BUG = 5


class Entry(NamedTuple):
    exit_code: Exit
    title: str
    cause: str
    remedy: str


CATALOGUE: dict[str, Entry] = {
    "KLN101": Entry(
        Exit.FAULTS_FOUND,
        "an invalid row under the policy `fail`",
        "A row breaks a rule of admission and `invalid_row_policy` is `fail` (the default).",
        'Mend the row that the message names, or set `[admit] invalid_row_policy = "skip"` to count it and go on.',
    ),
    "KLN102": Entry(
        Exit.FAULTS_FOUND,
        "no row is left",
        "Every row was refused, so there is nothing to train on. This is an error under both policies.",
        "Read the counts by reason in the message and the rows in `admit/rejected.jsonl`.",
    ),
    "KLN103": Entry(
        Exit.FAULTS_FOUND,
        "a claim does not hold",
        "A receipt, a manifest or a file it names is not what it was when the evidence was written.",
        "The failing lines name the file and both values. Restore the file, or run the stage again.",
    ),
    "KLN104": Entry(
        Exit.FAULTS_FOUND,
        "training stopped",
        "The loss or a gradient is not finite, a gradient is missing or too many, or the loss diverged.",
        "Lower `[train] learning_rate`, or look at the row that the message names. With `detect_anomaly` the run names "
        "the operation that first made a NaN or an Inf.",
    ),
    "KLN105": Entry(
        Exit.FAULTS_FOUND,
        "faults found",
        "`kiln validate` found lines that break the contract of their kind.",
        "Each fault is printed with its place, what was found and what was expected.",
    ),
    "KLN106": Entry(
        Exit.FAULTS_FOUND,
        "no such row",
        "No row of the run goes by the number, hash or id that was given, or no correction by the request id.",
        "The message lists what was searched. `kiln why RUN line:N` looks a row up by its line in the raw file.",
    ),
    "KLN107": Entry(
        Exit.FAULTS_FOUND,
        "no rows",
        "The input is empty, or holds nothing but blank lines; or of the corrections none is active.",
        "Check the path, and the step that was to write the file. `kiln corrections list` tells why none is active.",
    ),
    "KLN108": Entry(
        Exit.FAULTS_FOUND,
        "a replay differs",
        "`kiln resume --prove` trained steps again and got another loss, tensor or state than the checkpoint has.",
        "The message names the first difference. Resume from an older checkpoint, or train again with `--fresh`.",
    ),
    "KLN109": Entry(
        Exit.FAULTS_FOUND,
        "held-out rows among the rows to train on",
        "A row to train on is a row that `[admit] held_out` names, has its prompt and answer, or shares its group or "
        "session; near duplicates too where they are asked for. Nothing was written.",
        "Take the rows that the message names out of one side, or leave them out and count them with "
        "`--drop-contaminated`.",
    ),
    "KLN110": Entry(
        Exit.FAULTS_FOUND,
        "an empty split",
        "No row of the data set is in the split that was asked for. No other split is taken in its place.",
        "Name another split with `--split`, add rows, or split by other percentages with `kiln dataset split`.",
    ),
    "KLN111": Entry(
        Exit.FAULTS_FOUND,
        "a leak",
        "`kiln leak` found rows, groups or near duplicates that stand in two sets of rows which must be apart.",
        "The table counts them by rule, and the lines below it name both rows. Take them out of one of the two, or "
        "keep them out of a training with `kiln admit --held-out`.",
    ),
    "KLN112": Entry(
        Exit.FAULTS_FOUND,
        "a scored corpus is refused",
        "A corpus that a teacher scored breaks a rule: its manifest line, the teacher's identity, the tokenizer, the "
        "number or ids of its tokens, or a score. There is no skipping of rows: shifted scores would train in silence.",
        "The message names line, position and both values; `kiln admit --report` lists every fault. Mend the corpus, "
        "or score it again with `kiln teacher score`.",
    ),
    "KLN113": Entry(
        Exit.FAULTS_FOUND,
        "rows cannot be scored",
        "A row has no targets that a teacher could score, or the scores of it cannot be used: they are of other "
        "tokens, too few, or stand-ins for a score.",
        "The message names line, position and both values. What was scored before is kept; mend or remove the row and "
        "run the same command again.",
    ),
    "KLN201": Entry(
        Exit.USER_INPUT,
        "usage",
        "The command line is not understood.",
        "`kiln COMMAND --help` shows the forms.",
    ),
    "KLN202": Entry(
        Exit.USER_INPUT,
        "the config cannot be read",
        'The file is missing, is no TOML or JSON, or lacks `schema = "kiln.config.v1"`.',
        "Mend the file at the place that the message names.",
    ),
    "KLN203": Entry(
        Exit.USER_INPUT,
        "faults in the config",
        "Keys are unknown, have the wrong type, are out of bounds or contradict each other. All are listed.",
        "Mend each listed key. docs/config.md lists every key with its bounds.",
    ),
    "KLN204": Entry(
        Exit.USER_INPUT,
        "an input cannot be read",
        "The path does not exist, or is no regular file.",
        "Check the path; relative paths in a config count from the config file.",
    ),
    "KLN205": Entry(
        Exit.USER_INPUT,
        "too few rows for the splits",
        "After checks and deduplication fewer rows are left than the splits ask for. Nothing was written.",
        "Lower `[data] n_train`, `n_validation` or `n_test`, or bring more rows.",
    ),
    "KLN206": Entry(
        Exit.USER_INPUT,
        "an artifact is missing or not what it claims",
        "A stage's input is absent, is damaged, or has another schema.",
        "Run the stage before this one again.",
    ),
    "KLN207": Entry(
        Exit.USER_INPUT,
        "evidence and file disagree",
        "A file changed after the manifest that vouches for it was written.",
        "Run the stages from that file on again; both digests are in the message.",
    ),
    "KLN208": Entry(
        Exit.USER_INPUT,
        "the run holds another training",
        "A run directory holds one training; this one was made from another corpus or another config.",
        "Use another --out, or --fresh, which moves the old training aside.",
    ),
    "KLN209": Entry(
        Exit.USER_INPUT,
        "the run cannot be resumed here",
        "Something that the checkpoint is bound to differs. Every difference is listed.",
        "Restore what differs, or start a new training in another run directory.",
    ),
    "KLN210": Entry(
        Exit.USER_INPUT,
        "plugins conflict",
        "Two plugins use one name, or a plugin implements a hook that does not exist.",
        "Remove or rename one of the two that the message names. `KILN_PLUGINS=` limits what is loaded.",
    ),
    "KLN211": Entry(
        Exit.USER_INPUT,
        "not built",
        "The command, option or value is named by the design but this version does not have it.",
        "CHANGELOG.md says what this version does.",
    ),
    "KLN212": Entry(
        Exit.USER_INPUT,
        "unknown name",
        "No source, template, loss or drop reason has this name, or the registry has no such data set or teacher.",
        "`kiln plugins` lists what is loaded, `kiln dataset list` the data sets, `kiln teacher list` the teachers.",
    ),
    "KLN213": Entry(
        Exit.USER_INPUT,
        "the chat template cannot be used",
        "It is missing, does not compile, or asks for something that is refused (the clock, say).",
        "Name another with `[admit] template`, or mend it.",
    ),
    "KLN214": Entry(
        Exit.USER_INPUT,
        "the model cannot be trained by this profile",
        "It has none of the target layers, or its head does not give the same logits for gathered positions.",
        "The message lists what the model has; `[train] target_modules` names other layers.",
    ),
    "KLN215": Entry(
        Exit.USER_INPUT,
        "a checkpoint cannot be loaded",
        "It is incomplete, damaged, or no exact checkpoint.",
        "Name another with --checkpoint; `ls RUN/train` lists them.",
    ),
    "KLN216": Entry(
        Exit.USER_INPUT,
        "the directory holds other files",
        "An export makes a directory of its own; this one holds something else, or is there already (`--merged`).",
        "Name another directory, or move the old one away.",
    ),
    "KLN217": Entry(
        Exit.USER_INPUT,
        "the base adapter does not fit",
        "It is no plain LoRA, or its rank, alpha, target layers, tensor shapes or dtype are not those of the training. "
        "Every difference is listed, and nothing is converted.",
        "Set `[train] lora_rank`, `lora_alpha`, `target_modules` and `dtype` as the base adapter has them.",
    ),
    "KLN218": Entry(
        Exit.USER_INPUT,
        "a signature that does not hold",
        "ssh-keygen does not sign with the key, or the signature is not of these bytes or of nobody on the list.",
        "The message has what ssh-keygen said, and the key. Ask the signer for the receipt as it was signed.",
    ),
    "KLN219": Entry(
        Exit.USER_INPUT,
        "the alias is pinned to another teacher",
        "An alias stands for one identity; every field of the two that differs is listed.",
        "Take another alias, or `--replace` the old one: corpora that it scored are then refused.",
    ),
    "KLN220": Entry(
        Exit.USER_INPUT,
        "the teacher's server cannot be used",
        "The server refuses the request or the key, redirects, answers for another model, or answers in another shape "
        "than vLLM's completions with prompt logprobs.",
        "The message has what the server said, without the key. Register the server's own address, and the key by "
        "`--key-env` or `--key-file`.",
    ),
    "KLN221": Entry(
        Exit.USER_INPUT,
        "a teacher does not fit",
        "The rows' tokenizer has another vocabulary than the teacher's, more candidates are asked for than "
        "it gives, or its adapter was trained on another model.",
        "Take a teacher of the same tokenizer, the `--top-k` in the message, or the model of the adapter.",
    ),
    "KLN301": Entry(
        Exit.ENVIRONMENT,
        "a package is missing",
        "This command needs an optional dependency that is not installed.",
        "Install the extra that the message names.",
    ),
    "KLN302": Entry(
        Exit.ENVIRONMENT,
        "model files are missing",
        "`[model] path` does not exist, or lacks a file that the stage needs.",
        "For the default model run `python fixtures/fetch_model.py`.",
    ),
    "KLN401": Entry(
        Exit.RESOURCE,
        "the run is in use",
        "Another kiln process holds the lock of this run directory.",
        "Wait for it, or use another --out.",
    ),
    "KLN402": Entry(
        Exit.RESOURCE,
        "a file could not be written",
        "The disk is full, the directory is not writable, or the device failed. Nothing half-written is left.",
        "Free space or mend permissions, then run the same command again.",
    ),
    "KLN403": Entry(
        Exit.RESOURCE,
        "out of memory",
        "The device or the machine has too little memory for this step.",
        "Lower `[admit] max_tokens`, or use a machine with more memory.",
    ),
    "KLN404": Entry(
        Exit.RESOURCE,
        "the teacher's server does not answer",
        "It cannot be reached, or kept failing over several tries.",
        "See that it runs. What was scored so far is kept, and the same command goes on from there.",
    ),
    "KLN501": Entry(
        Exit.BUG,
        "a bug in kiln or in a plugin",
        "Something happened that should be impossible.",
        "Run again with --debug and report what it prints.",
    ),
}


class KilnError(Exception):
    """A fault that the user can act on.

    ``message`` names the file, line or option and both values, in lower case, on one line (tables may follow on
    further lines); ``hint`` is the next thing to do. ``details`` is machine-readable and goes out with ``--json``.
    """

    def __init__(self, code: str, message: str, *, hint: str = "", details: object = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.details = details

    @property
    def exit_code(self) -> Exit:
        return CATALOGUE[self.code].exit_code

    def as_json(self) -> dict[str, object]:
        error: dict[str, object] = {"code": self.code, "message": self.message, "hint": self.hint}
        if self.details is not None:
            error["details"] = self.details
        return {"error": error}


class RowFault(Exception):
    """One row breaks one rule. Stages turn it into a counted outcome; it never ends a run by itself.

    ``reason`` is a declared code (``template_lost_content``), ``detail`` says what was found and expected, ``pointer``
    is the JSON pointer of the field within the row, ``offset`` the byte of its text where the fault was seen (-1 if
    unknown).
    """

    def __init__(self, reason: str, detail: str, pointer: str = "", offset: int = -1) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.pointer = pointer
        self.offset = offset


def not_built(what: str, instead: str = "") -> KilnError:
    """A thing the design names and this version lacks: refused by name, never half done."""
    return KilnError("KLN211", f"{what} is not built in this version", hint=instead)
