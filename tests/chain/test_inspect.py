"""``kiln inspect``: what is shown is what was admitted, marked so that trained text can be told from the rest."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from kiln_stages.seeing.html_page import html_page
from kiln_stages.seeing.page import Header
from kiln_stages.seeing.shown_rows import Token
from syrupy.assertion import SnapshotAssertion
from tiny_model import CHATML, RUN, Kiln, Outcome

from kiln_cli import app
from kiln_cli.manifests import content_sha256, document, read_manifest
from kiln_cli.receipts import FileRef
from kiln_cli.stage_manifests import AdmitManifest
from kiln_cli.text import block

Copy = Callable[..., Path]
HOSTILE = "a\x1b[31mred\x1b]8;;http://evil\x07 <script>alert(1)</script> & \"q\" 'q' \u202egnp ⟦b⟧ é☃😀 <|im_end|>"


def corpus(run: Path, split: str = "corpus") -> list[dict[str, Any]]:
    return pl.read_parquet(run / "admit" / f"{split}.parquet").to_dicts()


def shown(kiln: Kiln, run: Path, name: object, *options: str) -> dict[str, Any]:
    done = kiln("inspect", run, str(name), "--json", *options)
    assert done.code == 0, done.err
    value: dict[str, Any] = json.loads(done.out)
    assert value["schema"] == "kiln.inspection.v1"
    return value


def trained_text(row: dict[str, Any]) -> str:
    return "".join(row["text"][start:end] for start, end in row["spans"])


def admit_chats(kiln: Kiln, tmp_path: Path, model: Path, rows: list[Any], *options: str) -> Path:
    """The run of an admission of chat rows (values, or lines as they are) under ``skip``."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    (tmp_path / "chats.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    done = kiln(
        "admit", "--file", tmp_path / "chats.jsonl", "--model", model, "--out", tmp_path / RUN,
        "--invalid-row-policy", "skip", *options,
    )  # fmt: skip
    assert done.code == 0, done.err
    return tmp_path / RUN


def chat(question: str, *answers: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    for number, answer in enumerate(answers):
        messages += [{"role": "user", "content": f"more {number}"}] if number else []
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, kiln: Kiln) -> Path:
    """A run over chat rows: plain, hostile, two turns, a row twice, and rows that are rejected."""
    rows = [
        chat("One?", "1"),
        chat(HOSTILE, HOSTILE),
        chat("Two turns?", "first\nline", "second"),
        chat("One?", "1"),
        "no json",
        {"messages": [{"role": "user", "content": "nobody answers"}]},
        chat("x" * 800, "long"),
        chat("marks \ufdd0", "blocks"),
    ]
    return admit_chats(kiln, tmp_path_factory.mktemp("chats"), tiny_model, rows)


# ---- what is shown is what was admitted


@pytest.mark.parametrize("split", ["corpus", "heldout"])
def test_tokens_are_the_corpus_and_their_texts_the_row(admitted: Path, kiln: Kiln, split: str) -> None:
    run = admitted / RUN
    for row in corpus(run, split):
        found = shown(kiln, run, row["row_index"], "--split", split)
        assert [found[name] for name in ("row_sha256", "example_id", "line", "split")] == [
            row["row_sha256"], row["example_id"], row["line"], split,
        ]  # fmt: skip
        tokens = found["tokens"]
        assert [token["id"] for token in tokens] == row["input_ids"]
        assert [token["id"] if token["label"] == "trained" else -100 for token in tokens] == row["labels"]
        assert "".join(token["text"] for token in tokens) == found["text"]
        assert "".join(token["text"] for token in tokens if token["label"] == "trained") == trained_text(found)
        assert found["rejected"] is None and found["proven"]


def test_rows_of_a_file_with_characters_of_several_tokens(chats: Path, kiln: Kiln) -> None:
    for row in corpus(chats):
        found = shown(kiln, chats, row["row_index"])
        assert [token["id"] for token in found["tokens"]] == row["input_ids"]
        assert "".join(token["text"] for token in found["tokens"]) == found["text"]
        assert trained_text(found).count("<|im_end|>\n") == len(found["spans"])
    hostile = shown(kiln, chats, 2)
    assert trained_text(hostile) == HOSTILE + "<|im_end|>\n"
    assert any(token["text"] == "" for token in hostile["tokens"])  # the later bytes of a character


def test_control_tokens_are_told_from_their_text(chats: Path, kiln: Kiln) -> None:
    """The hostile row writes <|im_end|> in both turns; two real ones end the turns."""
    found = shown(kiln, chats, 2)
    control = [token["text"] for token in found["tokens"] if token.get("control")]
    assert control == ["<|im_start|>", "<|im_end|>"] * 2
    assert len(found["notes"]) == 2
    for note in found["notes"]:
        place = int(re.fullmatch(r"<\|im_end\|> at token (\d+) is row text, not the control token", note)[1])  # type: ignore[index]
        assert found["tokens"][place]["text"].endswith("<") and "control" not in found["tokens"][place]


def test_each_name_of_a_row(admitted: Path, kiln: Kiln) -> None:
    run = admitted / RUN
    row = corpus(run)[4]
    expected = shown(kiln, run, row["row_index"])
    sha256 = row["row_sha256"]
    for name in (row["example_id"], sha256, sha256[7:], sha256[:20], sha256[7:20], f"row:{row['row_index']}"):
        assert shown(kiln, run, name) == expected
    assert shown(kiln, run, f"line:{row['line']}") == shown(kiln, run, f"data/train.jsonl:{row['line']}") == expected
    held = corpus(run, "heldout")[0]
    assert shown(kiln, run, held["row_sha256"])["split"] == "heldout"
    assert shown(kiln, run, held["row_index"])["split"] == "corpus"


def test_a_row_that_is_not_there(admitted: Path, kiln: Kiln) -> None:
    for name in ("17", "raw:110", "sha256:" + "0" * 64):  # sixteen rows; dropped by prepare; nobody's
        done = kiln("inspect", admitted / RUN, name)
        assert done.code == 1 and "KLN106" in done.err and "data/train.jsonl" in done.err
    done = kiln("inspect", admitted / RUN, "raw:")
    assert done.code == 2 and "names 21 rows" in done.err  # sixteen, and five that are held out


def test_equal_rows_are_named(chats: Path, kiln: Kiln) -> None:
    assert shown(kiln, chats, 1)["same_as"] == []
    by_hash = shown(kiln, chats, corpus(chats)[0]["row_sha256"])
    assert (by_hash["row_index"], by_hash["same_as"]) == (1, [4])


# ---- rejected rows


def test_a_rejected_row_has_its_code_and_its_text(admitted: Path, kiln: Kiln) -> None:
    lines = (admitted / RUN / "admit/rejected.jsonl").read_bytes().splitlines()
    for told in map(json.loads, lines):
        found = shown(kiln, admitted / RUN, told["row_index"], "--split", told["split"])
        assert found["rejected"] == {"code": told["code"], "detail": told["detail"], "pointer": told["pointer"]}
        assert told["code"] == "over_length" and f"{len(found['tokens'])} tokens" in told["detail"]
        assert found["proven"] and trained_text(found).endswith("<|im_end|>\n")


def test_rejected_rows_show_as_much_as_there_is(chats: Path, kiln: Kiln) -> None:
    broken, unanswered, long, marks = (shown(kiln, chats, number) for number in (5, 6, 7, 8))
    assert broken["rejected"]["code"] == "invalid_json" and broken["text"] is None and broken["tokens"] == []
    assert unanswered["rejected"]["code"] == "no_assistant_message"
    assert unanswered["text"] == "<|im_start|>user\nnobody answers<|im_end|>\n"
    assert {token["label"] for token in unanswered["tokens"]} == {"context"} and not unanswered["proven"]
    assert long["rejected"]["code"] == "over_length" and trained_text(long) == "long<|im_end|>\n"
    assert marks["rejected"]["code"] == "mask_disagreement" and "marks \ufdd0" in marks["text"] and not marks["spans"]
    text = kiln("inspect", chats, "8").out
    assert "rejected" in text and "labels not found" in text and "\\ufdd0" in text and "\ufdd0" not in text
    assert "none: the template does not print the row" in kiln("inspect", chats, "5").out


# ---- what is not what was admitted is refused


def refused(kiln: Kiln, project: Path, *words: str) -> None:
    done = kiln("inspect", project / RUN, "1")
    assert done.code == 2, done.out
    assert "KLN207" in done.err and done.out == ""
    for word in words:
        assert word in done.err


def test_a_template_that_changed_is_refused(admitted: Path, copy_of: Copy, kiln: Kiln) -> None:
    project = copy_of(admitted, own_model=True)
    path = project / "model" / "chat_template.jinja"
    old = read_manifest(project / RUN, AdmitManifest).details.template.sha256
    path.write_text(path.read_text() + " ")
    refused(kiln, project, "template", old, "kiln admit")


def test_a_tokenizer_that_changed_is_refused(admitted: Path, copy_of: Copy, kiln: Kiln) -> None:
    project = copy_of(admitted, own_model=True)
    path = project / "model" / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    refused(kiln, project, "tokenizer.json was", "is now")


def test_rows_that_changed_are_refused(admitted: Path, copy_of: Copy, kiln: Kiln) -> None:
    project = copy_of(admitted)
    path = project / RUN / "data/train.jsonl"
    path.write_text(path.read_text().replace("city number 1", "city number 2"))
    refused(kiln, project, "data/train.jsonl")


def forge_corpus(run: Path, change: Callable[[pl.DataFrame], pl.DataFrame]) -> None:
    """Another corpus, vouched for by a manifest that was computed again."""
    path = run / "admit/corpus.parquet"
    change(pl.read_parquet(path)).write_parquet(path)
    data = path.read_bytes()
    manifest = read_manifest(run, AdmitManifest)
    refs = []
    for ref in manifest.outputs:
        values = msgspec.structs.asdict(ref)
        if ref.path == "admit/corpus.parquet":
            values |= {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        refs.append(FileRef(**values))
    manifest.outputs = refs
    manifest.content_sha256 = content_sha256(manifest)
    (run / "admit_manifest.json").write_bytes(document(manifest))


def test_labels_and_ids_that_were_forged_are_refused(admitted: Path, copy_of: Copy, kiln: Kiln) -> None:
    first = corpus(admitted / RUN)[0]
    start, end = first["label_spans"]
    last = first["input_ids"][-1]

    def other(column: str, values: list[int]) -> Callable[[pl.DataFrame], pl.DataFrame]:
        def change(frame: pl.DataFrame) -> pl.DataFrame:
            return frame.with_columns(pl.Series(column, [values, *frame[column].to_list()[1:]], frame.schema[column]))

        return change

    shorter = other("label_spans", [start, end - 1])
    swapped = other("input_ids", [*first["input_ids"][:-1], last + 1])
    for name, change, place in (("a", shorter, end - 1), ("b", swapped, len(first["input_ids"]) - 1)):
        project = copy_of(admitted, name)
        forge_corpus(project / RUN, change)
        refused(kiln, project, f"at {place}", "was", "is now")


# ---- on a terminal, and off it


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(*arguments: str | Path) -> Outcome:
    out, err = Tty(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = app.run([str(argument) for argument in arguments])
    return Outcome(int(code), out.getvalue(), err.getvalue())


@pytest.fixture
def colours(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return monkeypatch


def styled(text: str) -> list[tuple[str, str]]:
    """(style, text) of each stretch."""
    parts = re.split(r"\x1b\[([0-9;]+)m", text)
    return [("0", parts[0]), *zip(parts[1::2], parts[2::2], strict=True)]


def test_colours_mark_what_is_trained(chats: Path, kiln: Kiln, colours: pytest.MonkeyPatch) -> None:
    for number in (1, 2, 3):
        found = shown(kiln, chats, number)
        text = on_a_terminal("inspect", chats, str(number)).out
        _, _, body = text.partition("\n\n")[2].partition("\n\n")  # behind the facts and the legend
        green = "".join(part for style, part in styled(body) if "32" in style.split(";"))
        assert green.replace("↵\n", "\n").rstrip("↵") == block(trained_text(found)).removesuffix("\n")
        control = [part for style, part in styled(body) if style in ("36", "1;4;32")]
        assert control == [token["text"] for token in found["tokens"] if token.get("control")]
        assert "⟦" not in body or number == 2


def test_no_colours_where_they_are_not_wanted(chats: Path, kiln: Kiln, colours: pytest.MonkeyPatch) -> None:
    plain = kiln("inspect", chats, "1").out
    assert "\x1b" not in plain and "⟦1<|im_end|>\n⟧" in plain
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with colours.context() as patch:
            patch.setenv(name, value)
            assert on_a_terminal("inspect", chats, "1").out == plain
    assert "\x1b[" in on_a_terminal("inspect", chats, "1").out


def test_brackets_enclose_what_is_trained_and_nothing_else(chats: Path, kiln: Kiln) -> None:
    """A bracket of the row itself is an escape, so that those that are seen are marks."""
    for number in (1, 2, 3):
        found = shown(kiln, chats, number)
        done = kiln("inspect", chats, str(number))
        body = done.out.split("\n\n", 2)[2]
        inside = re.findall("⟦(.*?)⟧", body, re.DOTALL)
        written = [
            found["text"][start:end].replace("⟦", "\\u27e6").replace("⟧", "\\u27e7") for start, end in found["spans"]
        ]
        assert inside == [block(text) for text in written]
        without = body.replace("⟦", "").replace("⟧", "").removesuffix("\n")
        assert without == block(found["text"].replace("⟦", "\\u27e6").replace("⟧", "\\u27e7"))
        assert all(line.isprintable() for line in (done.out + done.err).split("\n"))


def test_ids_are_a_line_a_token(chats: Path, kiln: Kiln) -> None:
    found = shown(kiln, chats, 2)
    done = kiln("inspect", chats, "2", "--ids")
    lines = done.out.split("\n")
    head = next(number for number, line in enumerate(lines) if re.fullmatch(r" *token +id  label    text", line))
    rows = [
        re.fullmatch(r' *(\d+) +(\d+)  (context|trained)  (".*")(  control)?', line) for line in lines[head + 1 : -1]
    ]
    assert len(rows) == len(found["tokens"])
    for place, (row, token) in enumerate(zip(rows, found["tokens"], strict=True)):
        assert row is not None
        assert (int(row[1]), int(row[2]), row[3]) == (place, token["id"], token["label"])
        assert bool(row[5]) == token.get("control", False)
    assert all(line.isprintable() for line in lines)


# ---- the page


class Page(HTMLParser):
    """What a browser makes of a page: its elements, and the text of the row with the marks and without."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = self.trained = self.marked = ""
        self.titles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in ("meta",):
            self.open.append((tag, dict(attrs)))
        if tag == "span" and "title" in dict(attrs):
            self.titles.append(str(dict(attrs)["title"]))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open[-1][0] != tag:
            assert self.open.pop()[0] in ("html",), tag  # nothing else is left open
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not any(tag == "pre" for tag, _ in self.open):
            return
        classes = {name for _, attrs in self.open for name in (attrs.get("class") or "").split()}
        self.marked += data
        if "mark" not in classes:
            self.text += data
            self.trained += data if "trained" in classes else ""


def read_page(data: bytes) -> Page:
    page = Page()
    page.feed(data.decode("utf-8"))
    return page


@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_the_page_holds_the_row_and_nothing_that_acts(chats: Path, tmp_path: Path, kiln: Kiln, number: int) -> None:
    found = shown(kiln, chats, number)
    path = tmp_path / "row.html"
    done = kiln("inspect", chats, str(number), "--html", path)
    assert done.code == 0 and done.out == "" and str(path) in done.err
    data = path.read_bytes()
    page = read_page(data)
    assert page.text == block(found["text"]) and page.trained == block(trained_text(found))
    assert page.marked.replace("⟦", "").replace("⟧", "").replace("↵", "") == page.text.replace("⟦", "").replace("⟧", "")
    assert page.marked.count("⟦") - page.text.count("⟦") == len(found["spans"])
    assert not page.tags & {"script", "link", "img", "iframe", "object", "a", "form", "base", "svg"}
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href", "style")]
    assert b"url(" not in data and b"@import" not in data and b"prefers-color-scheme: dark" in data
    assert all(line.isprintable() for line in data.decode("utf-8").split("\n"))
    for title, (place, token) in zip(
        page.titles, ((p, t) for p, t in enumerate(found["tokens"]) if t["text"]), strict=True
    ):
        assert title == f"token {place}, id {token['id']}, {token['label']}"


SCRIPT = "</span></pre><script>alert('1')</script>&lt;\"onload=\"x\x1b[2J\u202e"


def test_whatever_the_page_is_given_stays_text() -> None:
    """A whole tag in one token, in the title, in a fact and in the table of tokens."""
    tokens = [Token(id=1, text=SCRIPT, label=label, control=label == "context") for label in ("context", "trained")]
    header = Header(title=SCRIPT, facts=[(SCRIPT, SCRIPT), ("note", SCRIPT)])
    data = html_page(header, tokens, ids=True)
    page = read_page(data)
    assert page.text == block(SCRIPT) * 2 and page.trained == block(SCRIPT)
    assert "script" not in page.tags and not [name for name, _ in page.attributes if name == "onload"]
    assert data.decode().count("&lt;script&gt;") == 2 + 3 + 2 + 2  # titles, facts, the row, the table
    assert all(line.isprintable() for line in data.decode("utf-8").split("\n"))


def test_the_page_tells_ids_when_asked(chats: Path, tmp_path: Path, kiln: Kiln) -> None:
    path = tmp_path / "row.html"
    assert kiln("inspect", chats, "2", "--html", path).code == 0
    assert "table" not in read_page(path.read_bytes()).tags
    assert kiln("inspect", chats, "2", "--html", path, "--ids").code == 0
    cells = re.findall(r"<tr><td>(\d+)</td><td>(\d+)</td><td>(context|trained)", path.read_text())
    tokens = shown(kiln, chats, 2)["tokens"]
    assert cells == [(str(place), str(token["id"]), token["label"]) for place, token in enumerate(tokens)]


# ---- another template

OTHER_END = CHATML.replace("'<|im_end|>'", "(' over' if message['role'] == 'assistant' else '<|im_end|>')")
WITHOUT_END = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% generation %}{{ message['content'] if message['role'] == 'assistant' }}{% endgeneration %}"
    "{{ (message['content'] if message['role'] != 'assistant' else '') + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PRINTS_TOOLS = (
    "{% if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NO_SYSTEM = CHATML.replace(
    "{{ '<|im_start|>'", "{% if message['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}{{ '<|im_start|>'"
)


def compare(kiln: Kiln, run: Path, template: object, *options: str) -> tuple[int, dict[str, Any]]:
    done = kiln("inspect", run, "--diff", str(template), "--json", *options)
    assert done.code in (0, 1), done.err
    return done.code, json.loads(done.out)


@pytest.mark.parametrize("template", ["model", "chatml"])
def test_an_equal_template_changes_nothing(admitted: Path, kiln: Kiln, template: str) -> None:
    """ChatML under its registered name has the text of the tiny model's own template."""
    code, found = compare(kiln, admitted / RUN, template)
    assert code == 0
    assert found["rows_compared"] == 16 and found["rows_changed"] == 0 and found["rows"] == []
    assert {kind: count for kind, count in found["counts"].items() if count} == {"same": 13, "rejected_by_both": 3}
    assert "13" in kiln("inspect", admitted / RUN, "--diff", template).out


def test_the_first_difference_is_where_the_turn_ends(admitted: Path, tmp_path: Path, kiln: Kiln) -> None:
    """The answer is the last turn, so its end is the last token but the line feed behind it."""
    (tmp_path / "other.jinja").write_text(OTHER_END)
    code, found = compare(kiln, admitted / RUN, tmp_path / "other.jinja", "--limit", "3")
    assert code == 1
    assert found["counts"]["tokens"] == found["rows_changed"] == 13 and len(found["rows"]) == 3
    assert found["here"]["name"] == "model" and found["there"]["name"] == "other.jinja"
    for row, kept in zip(found["rows"], corpus(admitted / RUN), strict=False):
        assert row["row_sha256"] == kept["row_sha256"] and row["kind"] == "tokens"
        assert row["position"] == len(kept["input_ids"]) - 2
        here, there = row["here"]["token"], row["there"]["token"]
        assert here == {"id": kept["input_ids"][-2], "text": "<|im_end|>", "label": "trained", "control": True}
        assert row["here"]["behind"] == [{"id": kept["input_ids"][-1], "text": "\n", "label": "trained"}]
        assert there["label"] == "trained" and "control" not in there
        assert "".join(token["text"] for token in [there, *row["there"]["behind"]]) == " over\n"
        for side in ("here", "there"):
            assert "".join(token["text"] for token in row[side]["before"]).endswith('"}}')
    text = kiln("inspect", admitted / RUN, "--diff", tmp_path / "other.jinja", "--limit", "3").out
    assert "<|im_end|>\\n⟧" in text and " over\\n⟧" in text and "10 more rows change" in text


def test_labels_can_differ_where_the_tokens_do_not(admitted: Path, tmp_path: Path, kiln: Kiln) -> None:
    """Generation blocks around the answer alone leave the end of the turn to the context."""
    (tmp_path / "blocks.jinja").write_text(WITHOUT_END)
    code, found = compare(kiln, admitted / RUN, tmp_path / "blocks.jinja", "--split", "heldout")
    kept = corpus(admitted / RUN, "heldout")
    assert code == 1 and found["split"] == "heldout"
    assert found["counts"]["labels"] == len(kept) == 4
    for row, written in zip(found["rows"], kept, strict=True):
        assert row["position"] == written["label_spans"][1] - 2
        here, there = row["here"]["token"], row["there"]["token"]
        assert here["id"] == there["id"] and (here["label"], there["label"]) == ("trained", "context")


def test_rows_that_one_template_refuses(admitted: Path, tmp_path: Path, kiln: Kiln) -> None:
    (tmp_path / "no-system.jinja").write_text(NO_SYSTEM)
    code, found = compare(kiln, admitted / RUN, tmp_path / "no-system.jinja", "--limit", "1")
    assert code == 1 and found["counts"]["rejected_there"] == 13 and found["counts"]["other_code"] == 3
    (row,) = found["rows"]
    assert row["position"] is None and row["there"]["code"] == "template_error" and "code" not in row["here"]
    rows = [chat("fine", "yes"), {"messages": [{"role": "system", "content": "s"}, *chat("q", "a")["messages"]]}]
    run = admit_chats(
        kiln, tmp_path, (admitted / "model").resolve(), rows, "--template", str(tmp_path / "no-system.jinja")
    )
    code, found = compare(kiln, run, "model")
    assert code == 1
    assert {kind: count for kind, count in found["counts"].items() if count} == {"same": 1, "kept_there": 1}


def test_tools_come_to_each_template_in_its_own_way(admitted: Path, tmp_path: Path, kiln: Kiln) -> None:
    """The tiny model's template prints no tools, so they are text there; one that prints them gets them as they are."""
    (tmp_path / "tools.jinja").write_text(PRINTS_TOOLS)
    code, found = compare(kiln, admitted / RUN, tmp_path / "tools.jinja", "--limit", "1")
    assert code == 1 and (found["here"]["tools"], found["there"]["tools"]) == ("system", "native")
    (row,) = found["rows"]
    assert (row["kind"], row["position"]) == ("tokens", 1)  # behind the first control token, before the role
    text = kiln("inspect", admitted / RUN, "--diff", tmp_path / "tools.jinja").out
    assert "tools: system under model, native under tools.jinja" in text


def test_chat_rows_are_shown_as_the_config_has_them_rendered(tmp_path: Path, tiny_model: Path, kiln: Kiln) -> None:
    """With tools as text and the system turn folded, kept and rejected rows alike."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Call f."}]
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
    rows = [
        {"messages": [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": tools},
        {"messages": asked},
    ]
    options = ["--set", "admit.tools=system", "--set", "admit.system_turn=fold"]
    run = admit_chats(kiln, tmp_path, tiny_model, rows, *options)
    kept, unanswered = shown(kiln, run, 1), shown(kiln, run, 2)
    assert trained_text(kept) == '{"name":"f","arguments":{"a":1}}<|im_end|>\n'
    assert "system" not in re.findall(r"<\|im_start\|>(\w+)", kept["text"])
    assert unanswered["text"] == "<|im_start|>user\nBe brief.\n\nCall f.<|im_end|>\n"
    assert compare(kiln, run, "chatml")[0] == 0


def test_a_template_that_is_none_is_refused(admitted: Path, tmp_path: Path, kiln: Kiln) -> None:
    assert "KLN212" in kiln("inspect", admitted / RUN, "--diff", "nothing").err
    (tmp_path / "broken.jinja").write_text("{% for %}")
    assert "KLN213" in kiln("inspect", admitted / RUN, "--diff", tmp_path / "broken.jinja").err


# ---- the command line


@pytest.mark.parametrize(
    "options", [[], ["1", "--diff", "chatml"], ["--diff", "chatml", "--ids"], ["--diff", "chatml", "--html", "x.html"]]
)
def test_usage(admitted: Path, kiln: Kiln, options: list[str]) -> None:
    done = kiln("inspect", admitted / RUN, *options)
    assert done.code == 2 and "KLN201" in done.err and done.out == ""


def test_a_run_without_held_out_rows(chats: Path, kiln: Kiln) -> None:
    assert kiln("inspect", chats, "1", "--split", "heldout").code == 1
    done = kiln("inspect", chats, "--diff", "model", "--split", "heldout")
    assert done.code == 2 and "heldout" in done.err and "corpus" in done.err


@pytest.mark.parametrize("options", [["3"], ["7"], ["--diff", "OTHER", "--limit", "1"]], ids=" ".join)
def test_the_account(
    admitted: Path, tmp_path: Path, kiln: Kiln, snapshot: SnapshotAssertion, options: list[str]
) -> None:
    """``pytest --snapshot-update`` writes new texts; read the difference before you commit it."""
    (tmp_path / "other.jinja").write_text(OTHER_END)
    arguments = [str(tmp_path / "other.jinja") if option == "OTHER" else option for option in options]
    assert kiln("inspect", admitted / RUN, *arguments).out == snapshot


@pytest.mark.parametrize("options", [["1", "--ids"], ["2"], ["5"]], ids=" ".join)
def test_the_account_of_chat_rows(chats: Path, kiln: Kiln, snapshot: SnapshotAssertion, options: list[str]) -> None:
    assert kiln("inspect", chats, *options).out.replace(str(chats.parent), "DIRECTORY") == snapshot
