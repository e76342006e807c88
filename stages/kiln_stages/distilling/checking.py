"""A scored corpus by itself, without a student: its manifest line, the shape of its examples, and their scores.

Which tokens the scores belong to is admission's to say: that takes a tokenizer and a chat template.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kiln_cli.distillation import TOP_K_SIZES, resolve_top_k
from kiln_cli.errors import RowFault
from kiln_cli.files import open_input
from kiln_cli.lines import Line, LineReader
from kiln_stages.distilling.corpus import CorpusFault, FirstRecord, Phase, fault_of, first_record
from kiln_stages.distilling.examples import LINE_CAP, Example, first_logprob, parse_line, to_example, trimmed_line
from kiln_stages.distilling.identity import MAX_VOCABULARY, IdentityFault, TeacherIdentity, is_manifest, parse_manifest
from kiln_stages.distilling.scores import candidate_fault, narrowed


def corpus_faults(path: Path) -> Iterator[CorpusFault | None]:
    """None for each example, and each fault behind it, in the order of the lines.

    Raises KilnError KLN204 for a file that cannot be read.
    """
    with open_input(path) as stream:
        record = first_record(stream)
        if record is None:
            return
        identity = None
        if record.is_manifest:
            try:
                identity = parse_manifest(record.line)
            except IdentityFault as fault:
                yield fault_of(Phase.MANIFEST, record.number, 0, RowFault("manifest_invalid", str(fault)))
        else:
            missing = RowFault("manifest_missing", "the first record is no manifest line")
            yield fault_of(Phase.UNNAMED, record.number, 0, missing)
        yield from _of_lines(stream, record, identity)


def _of_lines(stream: BinaryIO, record: FirstRecord, identity: TeacherIdentity | None) -> Iterator[CorpusFault | None]:
    stream.seek(0)
    vocabulary = MAX_VOCABULARY if identity is None else identity.vocab_size
    offered = TOP_K_SIZES[-1] if identity is None else identity.max_top_k
    top_k = resolve_top_k(TOP_K_SIZES[0], offered, vocabulary) or min(offered, vocabulary)
    examples = 0
    for line in LineReader(stream, cap=LINE_CAP, hashed=False):
        text = None if line.text is None else trimmed_line(line.text)
        if text == b"" or (record.is_manifest and line.offset == record.offset):
            continue
        try:
            value = parse_line(text, line.length)
            if is_manifest(value):
                raise RowFault("manifest_not_first", "it is not the first record")
            examples += 1
            yield None
            if not record.is_manifest and (pointer := first_logprob(value)) is not None:
                raise RowFault("logprobs_without_manifest", "a score, and no manifest line names the teacher", pointer)
            example = to_example(value, top_k)
        except RowFault as fault:
            yield fault_of(Phase.LINE, line.number, examples, fault)
            continue
        yield from _of_example(example, line, examples, top_k, vocabulary)


def _of_example(example: Example, line: Line, number: int, top_k: int, vocabulary: int) -> Iterator[CorpusFault | None]:
    for empty, code, pointer in (
        (not example.messages, "empty_messages", "/messages"),
        (not example.response, "empty_teacher_response", "/teacher_response"),
        (not example.entries, "no_teacher_tokens", "/teacher_tokens"),
    ):
        if empty:
            fault = RowFault(
                code, "there are none" if code != "empty_teacher_response" else "the text is empty", pointer
            )
            yield fault_of(Phase.EXAMPLE, line.number, number, fault)
    for at, entry in enumerate(example.entries):
        broken = candidate_fault(entry, narrowed(entry), at, top_k, vocabulary)
        if broken is not None:
            yield fault_of(Phase.EXAMPLE, line.number, number, broken)
