"""The vectors of the row contract through ``kiln admit``, and one row through every way in.

Sections 1.7 and 11 of the contract give bytes and hashes; here the command reads them and writes receipts. Nothing in
the model's template matters for a hash: a row that is rejected after it parsed keeps the hash of what it says.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import zstandard
from kiln_stages import admit
from tests_support import shared_path
from tiny_model import Kiln

from kiln_cli.config import load_config
from kiln_cli.plugins import load_plugins

V1_TEXT = '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}'
V1 = "sha256:c8629e6809a8733fc0af19c1a28c81b15fcc8e0a964d77eb5625e8273280ad42"
V4_TEXT = (
    '{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":null,"tool_calls":'
    '[{"type":"function","id":"1","function":{"name":"calc","arguments":"{\\"x\\":1}"}}]}]}'
)
V4 = "sha256:4ff148af7e2928000bd026ba7ccd86ab9a0dc663a58f43e193aeac8b03dfb479"
V6_TEXT = (
    '{"messages":[{"role":"user","content":"caf\\u00e9 \\u2603 \\ud83d\\ude00 / tab\\t"},'
    '{"role":"assistant","content":[{"type":"text","text":"o"},%s{"type":"output_text","text":"k"}]}]}'
)
V6 = "sha256:11eb756e611bec8880ac7e5bd16f2644f7732550e8f47fbe016d5347cbe32703"
IMAGE = '{"type":"image_url","image_url":{"url":"x"}},'
X1_TEXT = (
    '{"messages":[{"content":"a","role":"user"},{"content":"b","role":"assistant"}],"tools":[{"function":'
    '{"description":"","name":"f","parameters":{"properties":{},"type":"object"}},"type":"function"}]}'
)
EMPTY = "sha256:0edcdd22ce7caad9a25dec7f8df859a6f23b1507472900f3c2d49c71a68abaa8"
K_V1 = "sha256:2b80f65f459b911c245099e6aa4f83390ac3eaa73e376f08fe6544ae271a6d40"
K_V1_V4 = "sha256:344a512020487ddaaf0255592e5b47f0381fd51b80208da128158692ac8537b0"
K_V1_V1 = "sha256:09df9bcf3a59da9e284afb00ee6b8817a39f6abdb17fec887192da1c55568629"

# What becomes of a row is the template's affair where the contract does not say it.
ANY = "any"
Vector = tuple[str, str, str, str | None]
# The vector, its bytes, its hash, and the reason that it is rejected for.
VECTORS: list[Vector] = [
    ("V1", V1_TEXT, V1, None),
    (
        "V2",
        '  {"messages": [ {"content":"a","role":"user","weight":0}, '
        '{"content":["b"],"role":"assistant","name":null} ], "id":7}\r',
        V1,
        None,
    ),
    ("V3", '{"messages":[]}', EMPTY, "empty_messages"),
    ("V3 of no field", "{}", EMPTY, "empty_messages"),
    ("V4", V4_TEXT, V4, None),
    (
        "V5",
        '{"messages":[{"role":"developer","content":"x"}]}',
        "sha256:ae5246df524bc691bbfb83da53832464adf17fd915790f019057d633e3fdd9c5",
        "invalid_role",
    ),
    ("V6 without the image", V6_TEXT % "", V6, None),
    (
        "V7",
        '{"messages":[{"role":"assistant","content":"","tool_calls":'
        '[{"n":1.0,"m":-3,"z":true,"y":null,"arguments":{"b":2,"a":1}}]}]}',
        "sha256:3c6a3adb5898cdfa8c1a9ca2fe6e28dd657db8f5c270a45c36dbf3b34ba6fcd1",
        ANY,
    ),
    (
        "V8",
        '{"messages":[{"role":"user","content":"a","tool_calls":[]}]}',
        "sha256:6bdd0a543ecb0c2ac3f7abaf9c67b3b55e6a3df86e0f0e32b55e5e2e7306ccd4",
        ANY,
    ),
    (
        "V9",
        '{"messages":[{"role":"user"}]}',
        "sha256:cf1d42b896d54054b8f1acc57e36eb5752bc73cde58596d50c2cd8a1015d8418",
        ANY,
    ),
    (
        "V10",
        '{"messages":[{"role":"assistant","tool_calls":[{"n":[1e16,1.5e20,1e15,1e-5,1e-6,-0,18446744073709551615]}]}]}',
        "sha256:05d48e781b4b59be934ef2dfcfd15e8c0656145fa2bee40e0eebf0dafb68c4f8",
        ANY,
    ),
    (
        "R1",
        "  not-json \t\r",
        "sha256:550db40f8208f3ee0e238a811627c3e4f4817581038b2868a4f6ac860d61d113",
        "invalid_json",
    ),
    (
        "R2",
        '{"messages":null}',
        "sha256:8e453b82d749576159b1425b2978776e626b8d8f5db5035a9d1fceabc8363578",
        "invalid_json",
    ),
    (
        "R3",
        '{"messages":[{"content":"x"}]}',
        "sha256:2297bf3ee3f8061ad107950b68cae6a7989faafc6da4fe7649870d634583a2e1",
        "invalid_json",
    ),
]
EXTENDED: list[Vector] = [
    ("X1", X1_TEXT, "sha256:1cc4a34b7af110a596cc924de2381c8575e5906d2c067a40cb942baace1d14b5", None),
    (
        "X2",
        '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"x","weight":0.0},'
        '{"role":"user","content":"c"},{"role":"assistant","content":"b","weight":1}]}',
        "sha256:afcdff64dcdc1fb08abf486bfc5dee6bf8395f91447035d57540d63562749165",
        None,
    ),
    (
        "X3",
        '{"messages":[{"content":"a","role":"user"},{"content":"b","reasoning_content":"r","role":"assistant"}]}',
        "sha256:e53d76a6ba8ede996f433908d60020c6829d52f6c842d74320d821952bc0456c",
        None,
    ),
    (
        "X4",
        '{"tools":[{"name":"f"}]}',
        "sha256:5008db03879b355cf5c2160c18597e1cea0068697ebb9348a514e834f9b35e28",
        "empty_messages",
    ),
    (
        "N1",
        '{"messages":[{"role":"user","content":"a","weight":0},'
        '{"role":"assistant","content":"b","weight":1,"reasoning_content":""}],"tools":[]}',
        V1,
        None,
    ),
]
IMAGE_LINE = V6_TEXT % IMAGE
# What is refused when read strictly, and a row for the public server; its hash there, and the reason if rejected.
COMPAT: list[Vector] = [
    ("V6", IMAGE_LINE, V6, None),
    ("a key twice", '{"id":1,"id":2,' + V1_TEXT[1:], V1, None),
    ("positional", '[[["user","a"],["assistant","b"]]]', V1, None),
    ("an empty array", "[]", EMPTY, "empty_messages"),
    ("X1 without its tools", X1_TEXT, V1, None),
    ("a lone surrogate dropped", '{"x":"\\ud800",' + V1_TEXT[1:], V1, None),
]


@pytest.fixture(scope="module")
def template() -> Path:
    """Qwen2.5: its turns are ChatML, as the tiny model's tokenizer knows it, and it writes tools and tool calls."""
    return shared_path("data/templates/trl/qwen2_5.jinja")


@pytest.fixture
def admitted(tmp_path: Path, tiny_model: Path, kiln: Kiln) -> Callable[..., dict[str, Any]]:
    """``admitted(data, *options)``: the ingestion receipt of a file of these bytes, rejected rows counted and left."""

    def admits(data: bytes, *options: str | Path, code: int = 0) -> dict[str, Any]:
        rows, run = tmp_path / "rows.jsonl", tmp_path / "run"
        rows.write_bytes(data)
        done = kiln(
            "admit", "--file", rows, "--model", tiny_model, "--invalid-row-policy", "skip", "--out", run, *options
        )
        assert done.code == code, done.err
        return receipt_of(run) if code == 0 else {"err": done.err}

    return admits


def receipt_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "admit" / "sft_ingestion.json").read_bytes())
    return found


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "admit" / "rejected.jsonl").read_bytes().splitlines()]


def outcomes(receipt: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Hash and reason of every row in order, from the receipt alone; the reason of a kept row is None."""
    rejected = {row["row_index"]: (row["row_sha256"], row["reason"]) for row in receipt["rejected_rows"]}
    kept = iter(receipt["kept_row_hashes"])
    found = [rejected.get(index) or (next(kept), None) for index in range(1, receipt["rows_read"] + 1)]
    assert next(kept, None) is None
    return found


def expect(receipt: dict[str, Any], vectors: list[Vector]) -> None:
    found = outcomes(receipt)
    assert len(found) == len(vectors)
    for (name, _, digest, reason), (row_sha256, given) in zip(vectors, found, strict=True):
        assert row_sha256 == digest, name
        assert reason in (ANY, given), name


def file_of(vectors: list[Vector]) -> bytes:
    return b"".join(text.encode() + b"\n" for _, text, _, _ in vectors)


# --- vectors


def test_vectors_of_the_five_fields(admitted: Callable[..., dict[str, Any]], template: Path) -> None:
    receipt = admitted(file_of(VECTORS), "--source", "messages", "--template", template)
    expect(receipt, VECTORS)


def test_vectors_of_extended_rows(admitted: Callable[..., dict[str, Any]]) -> None:
    template = shared_path("data/templates/trl/qwen3.jinja")  # it writes tools and reasoning
    receipt = admitted(file_of(EXTENDED), "--source", "messages", "--template", template)
    expect(receipt, EXTENDED)


def test_v6_with_the_image_is_refused_by_its_bytes(admitted: Callable[..., dict[str, Any]]) -> None:
    receipt = admitted(file_of([("V1", V1_TEXT, V1, None), ("V6", IMAGE_LINE, "", None)]))
    raw = "sha256:" + hashlib.sha256(b"kiln.sft-raw-row.v1\x00" + IMAGE_LINE.encode()).hexdigest()
    assert outcomes(receipt) == [(V1, None), (raw, "invalid_json")]


def test_vectors_under_compat(admitted: Callable[..., dict[str, Any]], template: Path) -> None:
    vectors = [*VECTORS, *COMPAT]
    receipt = admitted(file_of(vectors), "--compat", "kiln", "--template", template)
    expect(receipt, vectors)
    strict = admitted(file_of(COMPAT[:4] + COMPAT[5:]) + V1_TEXT.encode(), "--source", "messages")
    assert [reason for _, reason in outcomes(strict)] == ["invalid_json"] * 5 + [None]


def test_compat_says_what_it_drops(admitted: Callable[..., dict[str, Any]], tmp_path: Path, template: Path) -> None:
    """``tools`` change what is trained, so that a row that loses them is no silent matter."""
    weighed = X1_TEXT.replace('"content":"b"', '"content":[{"type":"image"},"b"],"weight":0')
    receipt = admitted(weighed.encode(), "--compat", "kiln", "--template", template)
    assert outcomes(receipt) == [(V1, None)]
    manifest = json.loads((tmp_path / "run" / "admit_manifest.json").read_bytes())
    names = ("messages[].content[]", "messages[].weight", "tools")
    assert manifest["counts"]["corpus"]["ignored_fields"] == dict.fromkeys(names, 1)
    strict = admitted(b"\n".join([weighed.encode(), V1_TEXT.encode()]), "--compat", "kiln", "--strict")
    assert [reason for _, reason in outcomes(strict)] == ["invalid_json", None]


def test_compat_takes_arguments_that_are_no_json(
    admitted: Callable[..., dict[str, Any]], tmp_path: Path, template: Path
) -> None:
    data = V4_TEXT.replace('{\\"x\\":1}', "x=1").encode() + b"\n" + V1_TEXT.encode()
    assert b'"arguments":"x=1"' in data
    admitted(data, "--template", template)
    assert [row["code"] for row in lines_of(tmp_path / "run")] == ["tool_arguments_invalid_json"]
    receipt = admitted(data, "--template", template, "--compat", "kiln")
    assert [reason for _, reason in outcomes(receipt)] == [None, None]


def test_prepared_rows_under_compat(project: Path, kiln: Kiln, template: Path) -> None:
    """The template would render tools natively; the server's rows have no field for them."""
    config, run = project / "kiln.toml", project / "run"
    assert kiln("prepare", config, "--out", run).code == 0
    modes = []
    for options in ((), ("--compat", "kiln")):
        done = kiln("admit", config, "--out", run, "--template", template, "--set", "admit.max_tokens=999", *options)
        assert done.code == 0, done.err
        modes.append(json.loads((run / "admit_manifest.json").read_bytes())["details"]["tools"]["mode"])
    assert modes == ["native", "system"]
    done = kiln("admit", config, "--out", run, "--compat", "kiln", "--set", "admit.tools=native")
    assert (done.code, "compat has no field for tools" in done.err) == (2, True)


@pytest.mark.parametrize("text", ['{"id":1,"id":2,' + V1_TEXT[1:], '[[\n["user","a"],["assistant","b"]]]', V1_TEXT])
def test_a_row_of_the_command_line_under_compat(tmp_path: Path, tiny_model: Path, kiln: Kiln, text: str) -> None:
    run = tmp_path / "run"
    done = kiln("admit", "--row", text, "--model", tiny_model, "--compat", "kiln", "--out", run)
    assert done.code == 0, done.err
    assert outcomes(receipt_of(run)) == [(V1, None)]


@pytest.mark.parametrize("options", [(), ("--compat", "kiln")], ids=["strict", "compat"])
@pytest.mark.parametrize("policy", ["fail", "skip"])
@pytest.mark.parametrize("text", ["not-json", "", '{"messages":[]', "{} {}", "{'a':1}", '{"a":NaN}'])
def test_a_row_of_the_command_line_that_is_no_json(
    tmp_path: Path, tiny_model: Path, kiln: Kiln, text: str, policy: str, options: tuple[str, ...]
) -> None:
    """Then it is the request that is malformed, not a row that could be skipped."""
    done = kiln("admit", "--row", V1_TEXT, "--row", text, "--model", tiny_model, "--out", tmp_path / "run",
                "--invalid-row-policy", policy, *options)  # fmt: skip
    assert (done.code, "KLN204" in done.err, "row 2" in done.err) == (2, True, True)
    assert not (tmp_path / "run" / "admit").exists()


L1 = (
    b'\n \t\r\n{}\r\n\x0c{"messages":[]}\x0c\n\x0b\n\xc2\xa0{}\n'
    b'\xef\xbb\xbf{}\n{"a":"\xe2\x80\xa8"}\n{}\r{}\n\xff\n' + V1_TEXT.encode()
)


@pytest.mark.parametrize("options", [("--source", "messages"), ("--compat", "kiln")], ids=["strict", "compat"])
def test_file_l1(admitted: Callable[..., dict[str, Any]], tmp_path: Path, options: tuple[str, ...]) -> None:
    assert hashlib.sha256(L1).hexdigest() == "ab3de120558da45ba924a55fd13a0e0b845103a8bb388b23676387f49092223a"
    receipt = admitted(L1, *options)
    assert [(row["row_index"], row["line"], row["reason"]) for row in lines_of(tmp_path / "run")] == [
        (1, 3, "empty_messages"),
        (2, 4, "empty_messages"),
        (3, 5, "invalid_json"),
        (4, 6, "invalid_json"),
        (5, 7, "invalid_json"),
        (6, 8, "empty_messages"),
        (7, 9, "invalid_json"),
        (8, 10, "invalid_json"),
    ]
    assert (receipt["rows_read"], receipt["rows_kept"], receipt["kept_row_hashes"]) == (9, 1, [V1])
    assert receipt["kept_corpus_sha256"] == K_V1
    raw = [b"\x0b", b"\xc2\xa0{}", b"\xef\xbb\xbf{}", b"{}\r{}", b"\xff"]
    assert [row["row_sha256"] for row in receipt["rejected_rows"] if row["reason"] == "invalid_json"] == [
        "sha256:" + hashlib.sha256(b"kiln.sft-raw-row.v1\x00" + text).hexdigest() for text in raw
    ]


def test_aggregates(admitted: Callable[..., dict[str, Any]], template: Path) -> None:
    for texts, aggregate in (
        ([V1_TEXT], K_V1),
        ([V1_TEXT, V4_TEXT], K_V1_V4),
        ([V1_TEXT, V1_TEXT], K_V1_V1),
        ([V1_TEXT, "{}", V1_TEXT], K_V1_V1),
    ):
        data = "\n".join(texts).encode()
        assert admitted(data, "--template", template)["kept_corpus_sha256"] == aggregate


@pytest.mark.parametrize("policy", ["skip", "fail"])
def test_k0_is_never_written(tmp_path: Path, tiny_model: Path, kiln: Kiln, policy: str) -> None:
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run"
    for data in (b"", b"\n \n", b"{}\n", b"not-json\n"):
        rows.write_bytes(data)
        done = kiln("admit", "--file", rows, "--source", "messages", "--model", tiny_model, "--out", run,
                    "--invalid-row-policy", policy)  # fmt: skip
        assert done.code == 1, (data, done.err)
        assert not (run / "admit" / "sft_ingestion.json").exists()
        assert not (run / "admit_manifest.json").exists()


def test_p1(admitted: Callable[..., dict[str, Any]], template: Path) -> None:
    """Row r01 of vector B of the contract of prepare, as it is after prepare."""
    example = {
        "schema_version": "sommelier.prepared_example.v2",
        "example_id": "r01",
        "source_id": "r01",
        "language": "en",
        "source_example_id": None,
        "query": "Root query number 01 please",
        "tools": [{"name": "f", "description": "d", "parameters": {}}],
        "gold_calls": [{"name": "f", "arguments": {"x": 1}}],
        "split": "test",
        "query_sha256": "0" * 64,
        "source_revision": "v",
    }
    receipt = admitted(json.dumps(example).encode(), "--template", template)
    digest = "sha256:980dac7a0ec00a1be1d75ee6c46a6d2d6f72b54d0fc7e0b4a4f66411cb892454"
    assert outcomes(receipt) == [(digest, None)]


# --- one row through every way in

ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "five fields": (
        {
            "messages": [
                {"role": "system", "content": "Reply with one JSON object – nothing else."},
                {"role": "user", "content": "What is the weather like in city number 17 today? \u2028 é 😀"},
                {"role": "assistant", "content": '{"name":"get_weather","arguments":{"city":"city 17"}}'},
            ]
        },
        "kiln.sft-parsed-row.v1",
    ),
    "extended": (
        {
            "messages": [
                {"role": "user", "content": "What is the weather like?", "weight": None},
                {"role": "assistant", "content": "In which city?", "weight": 0},
                {"role": "user", "content": "city 17", "weight": None},
                {"role": "assistant", "content": "city 17 today", "weight": None},
            ]
        },
        "kiln-cli.sft-extended-row.v1",
    ),
}


def row_hash(row: dict[str, Any], domain: str) -> str:
    """From the contract's words: null fields are absent, keys sorted, compact UTF-8, the domain and NUL in front."""
    messages = [{key: value for key, value in message.items() if value is not None} for message in row["messages"]]
    text = json.dumps({"messages": messages}, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(domain.encode() + b"\x00" + text.encode()).hexdigest()


class Way:
    """One way in: what it writes beside the run, and what it is called with."""

    def __init__(self, root: Path, model: Path, kiln: Kiln, row: dict[str, Any]) -> None:
        self.root, self.model, self.kiln, self.row = root, model, kiln, row
        self.text = json.dumps(row, ensure_ascii=False)

    def file(self, name: str, data: bytes) -> list[str | Path]:
        path = self.root / name
        path.write_bytes(data)
        return ["--file", path, "--model", self.model]

    def jsonl(self) -> list[str | Path]:
        return self.file("rows.jsonl", b"\n" + self.text.encode() + b"\r\n\n")

    def spaced_jsonl(self) -> list[str | Path]:
        text = json.dumps(dict(reversed(self.row.items())), ensure_ascii=True, separators=(" , ", " : "))
        return self.file("spaced.jsonl", b"\xef\xbb\xbf\t" + text.encode())

    def json_array(self) -> list[str | Path]:
        return self.file("rows.json", json.dumps([self.row], indent=2, ensure_ascii=False).encode())

    def gz(self) -> list[str | Path]:
        return self.file("rows.jsonl.gz", gzip.compress(self.text.encode()))

    def zst(self) -> list[str | Path]:
        return self.file("rows.jsonl.zst", zstandard.ZstdCompressor().compress(self.text.encode()))

    def parquet(self) -> list[str | Path]:
        path = self.root / "rows.parquet"
        pl.DataFrame([self.row]).write_parquet(path)
        return ["--file", path, "--model", self.model]

    def option(self) -> list[str | Path]:
        return ["--row", self.text, "--model", self.model]

    def config(self) -> list[str | Path]:
        self.jsonl()
        path = self.root / "kiln.toml"
        path.write_text(
            f'schema = "kiln.config.v1"\n[model]\npath = "{self.model}"\n[admit]\nfile = "rows.jsonl"\n',
            encoding="utf-8",
        )
        return [path]

    def request(self) -> list[str | Path]:
        self.jsonl()
        path = self.root / "request.json"
        path.write_text(json.dumps({"dataset_path": "rows.jsonl", "config": {}}), encoding="utf-8")
        return [path, "--model", self.model]

    def request_with_rows(self) -> list[str | Path]:
        path = self.root / "request.json"
        path.write_text(json.dumps({"examples": [self.row]}), encoding="utf-8")
        return [path, "--model", self.model]


BY_OPTION = [
    Way.jsonl, Way.spaced_jsonl, Way.json_array, Way.gz, Way.zst, Way.parquet, Way.option, Way.config, Way.request,
    Way.request_with_rows,
]  # fmt: skip
INLINE = {"option", "request_with_rows", "stdin", "python"}


def evidence(run: Path) -> dict[str, Any]:
    """All that a way in must not change: hashes, tokens, labels, digests."""
    receipt, corpus = receipt_of(run), pl.read_parquet(run / "admit" / "corpus.parquet")
    manifest = json.loads((run / "admit_manifest.json").read_bytes())
    return {
        "kept_row_hashes": receipt["kept_row_hashes"],
        "kept_corpus_sha256": receipt["kept_corpus_sha256"],
        "policy": receipt["invalid_row_policy"],
        "admitted": manifest["details"]["admitted_sha256"],
        "tokens": manifest["counts"]["corpus"]["tokens"],
        **{name: corpus[name].to_list() for name in ("row_sha256", "input_ids", "label_spans", "labels")},
    }


@pytest.mark.parametrize("name", ROWS)
def test_same_row_same_hash_through_each_way(name: str, tmp_path: Path, tiny_model: Path, kiln: Kiln) -> None:
    row, domain = ROWS[name]
    runs: dict[str, Path] = {}
    for way in BY_OPTION:
        root = tmp_path / way.__name__
        root.mkdir()
        done = kiln("admit", *way(Way(root, tiny_model, kiln, row)), "--out", root / "run")
        assert done.code == 0, (way.__name__, done.err)
        runs[way.__name__] = root / "run"
    text = json.dumps(row).encode()
    runs["stdin"] = tmp_path / "stdin" / "run"
    done = subprocess.run(
        [sys.executable, "-m", "kiln_cli.app", "admit", "--file", "-", "--model", tiny_model, "--out", runs["stdin"]],
        input=text,
        env=os.environ,
        check=False,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    runs["python"] = tmp_path / "python" / "run"
    settings = load_config(None, [f"model.path={tiny_model}"])
    admit.run(settings, runs["python"], load_plugins(), rows=[row])

    found = {way: evidence(run) for way, run in runs.items()}
    assert len(found) == 12
    expected = found["jsonl"]
    assert expected["kept_row_hashes"] == expected["row_sha256"] == [row_hash(row, domain)]
    assert any(label != -100 for label in expected["labels"][0])
    for way, value in found.items():
        assert value == expected, way
    for way, run in runs.items():
        receipt = receipt_of(run)
        assert receipt["source"] == ("inline" if way in INLINE else "dataset_path"), way
        assert ("source_locator" in receipt) == (way not in INLINE), way


# --- the policy


@pytest.mark.parametrize("policy", ["true", "1", "Skip", "", "FAIL", "skip "])
def test_other_policies_are_refused(tmp_path: Path, tiny_model: Path, kiln: Kiln, policy: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(V1_TEXT)
    common = ["admit", "--file", rows, "--model", tiny_model, "--out", tmp_path / "run"]
    for option in (["--invalid-row-policy", policy], ["--set", f"admit.invalid_row_policy={policy}"]):
        done = kiln(*common, *option)
        if option[0] == "--set" and policy == "skip ":
            continue  # --set trims, so this one is the value "skip"
        assert done.code == 2, (option, done.err)
        assert "invalid_row_policy" in done.err
        assert not (tmp_path / "run" / "admit").exists()


def test_an_omitted_policy_gives_the_bytes_of_fail(tmp_path: Path, tiny_model: Path, kiln: Kiln) -> None:
    (tmp_path / "rows.jsonl").write_text(V1_TEXT)
    trees = []
    for name, option in (
        ("a", []),
        ("b", ["--invalid-row-policy", "fail"]),
        ("c", ["--set", "admit.invalid_row_policy=fail"]),
    ):
        run = tmp_path / name
        done = kiln("admit", "--file", tmp_path / "rows.jsonl", "--model", tiny_model, "--out", run, *option)
        assert done.code == 0, done.err
        trees.append(
            {path.relative_to(run).as_posix(): _comparable(path) for path in run.rglob("[!.]*") if path.is_file()}
        )
    assert "admit/sft_ingestion.json" in trees[0]
    assert trees[0] == trees[1] == trees[2]


def _comparable(path: Path) -> bytes:
    if path.name != "admit_manifest.json":
        return path.read_bytes()
    value = json.loads(path.read_bytes())
    del value["produced"]
    return json.dumps(value).encode()
