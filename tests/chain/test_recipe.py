"""``kiln recipe`` end to end on the tiny model: a chain of receipts, stops and what goes on behind them, and Make."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from dataset_rows import write_rows
from kiln_stages.recipes.record import RecipeManifest, read_recipe_manifest
from recipe_runs import OUT, Killed, cut, edit, killed, looks, make, make_file, receipt, run, states
from tiny_model import Kiln

from kiln_cli.files import run_lock
from kiln_cli.manifests import document, read_receipt

RECIPE = """name = "weather"
[model]
path = "model"
id = "tiny-llama"
[train]
epochs = 2
lora_rank = 2
lora_alpha = 4.0
learning_rate = 0.01
checkpoint_interval = 2
threads = 1

[[steps]]
kind = "sft"
name = "first"
examples_from = { file = "rows.jsonl" }

[[steps]]
kind = "sft"
name = "second"
[steps.examples_from]
examples = [
  { messages = [{ role = "user", content = "It's $5 in city 17?" }, { role = "assistant", content = "city 17" }] },
  { messages = [{ role = "user", content = "And today?" }, { role = "assistant", content = "city number 17" }] },
]
[steps.config]
epochs = 3

[[steps]]
kind = "merge"
name = "model-of-both"
"""
FIRST_STEPS, SECOND_STEPS = 6, 6


def row(number: int) -> dict[str, Any]:
    question = {"role": "user", "content": f"What is the weather like in city number {number} today?"}
    return {"messages": [question, {"role": "assistant", "content": f"city {number}"}]}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """``recipe.toml``, its rows and the model; nothing has run. Copy it before changing it."""
    project = tmp_path_factory.mktemp("recipe") / "project"
    project.mkdir()
    shutil.copytree(tiny_model, project / "model")
    (project / "recipe.toml").write_text(RECIPE)
    write_rows(project / "rows.jsonl", (row(number) for number in range(3)))
    return project


@pytest.fixture(scope="module")
def carried_out(fresh: Path, kiln: Kiln) -> Path:
    """The recipe carried out. Copy it before changing it."""
    project = Path(shutil.copytree(fresh, fresh.parent / "carried-out"))
    done = kiln("recipe", "run", project / "recipe.toml", "--out", project / OUT)
    assert done.code == 0, done.err
    return project


def receipts(project: Path) -> list[dict[str, Any]]:
    return [receipt(project, name) for name in ("first", "second")]


def test_the_receipts_are_a_chain(carried_out: Path, kiln: Kiln) -> None:
    first, second = receipts(carried_out)
    assert first["adapters"]["base"] is None
    assert second["adapters"]["base"] == {
        **first["adapters"]["output"],
        "path": f"{OUT}/first/train/adapter",
        "receipt": {"path": f"{OUT}/first/train_receipt.json", "content_sha256": first["content_sha256"]},
    }
    assert [one["adapter_name"] for one in (first, second)] == ["first", "second"]
    assert (first["steps"], second["steps"]) == (FIRST_STEPS, SECOND_STEPS)
    for name in ("first", "second"):
        done = kiln("verify-receipt", carried_out / OUT / name, "--require-all")
        assert done.code == 0, done.out
    assert f"ok    the base adapter is that of the training of {OUT}/first/train_receipt.json" in done.out
    manifest = read_recipe_manifest(carried_out / OUT)
    assert manifest is not None
    assert [(step.name, step.kind, step.step) for step in manifest.steps] == [
        ("first", "sft", None),
        ("second", "sft", "first"),
        ("model-of-both", "merge", "second"),
    ]
    assert [step.receipt_content_sha256 for step in manifest.steps] == [
        first["content_sha256"],
        second["content_sha256"],
        second["content_sha256"],
    ]
    assert {file.path for file in manifest.steps[2].files} >= {"config.json", "model.safetensors", "README.md"}


def test_the_whole_recipe_verifies(carried_out: Path, kiln: Kiln) -> None:
    done = kiln("verify-receipt", carried_out / OUT, "--require-all")
    assert done.code == 0, done.out
    for line in (
        "second began with the adapter of step first",
        "model-of-both is the model of step second",
        "model-of-both/model.safetensors has its digest",
        "first: the corpus holds the rows and tokens of the receipt",
        f"second: the base adapter is that of the training of {OUT}/first/train_receipt.json",
    ):
        assert f"ok    {line}\n" in done.out
    assert kiln("verify-receipt", carried_out / OUT, "--allowed-signers", carried_out / "none").code == 2


def put(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Sets ``steps.1.name`` of the manifest, say."""

    def edit_value(manifest: Any) -> None:
        *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
        for part in parents:
            manifest = manifest[part]
        manifest[last] = value

    return edit_value


HASH = "sha256:" + "0" * 64
MANIFEST_CLAIM = "recipe_manifest.json is a recipe's manifest in canonical form, with its own content_sha256"


@pytest.mark.parametrize(
    ("edit_value", "failing"),
    [
        (put("steps.0.receipt_content_sha256", HASH), "first has the receipt and adapter of the manifest"),
        (put("steps.1.adapter_content_sha256", HASH), "second has the receipt and adapter of the manifest"),
        (put("steps.1.step", "nothing"), "second began with the adapter of step nothing"),
        (put("steps.2.step", "first"), "model-of-both is the model of step first"),
        (put("steps.2.files.0.sha256", "0" * 64), "model-of-both/README.md has its digest"),
        (put("steps.2.files", []), "model-of-both.merge.json says the same"),
        (put("steps.0.name", "../first"), MANIFEST_CLAIM),
    ],
)
def test_a_manifest_that_was_changed_and_sealed_again_does_not_verify(
    edit_value: Callable[[dict[str, Any]], None],
    failing: str,
    carried_out: Path,
    kiln: Kiln,
    copy_of: Callable[..., Path],
) -> None:
    project = copy_of(carried_out)
    path = project / OUT / "recipe_manifest.json"
    value = json.loads(path.read_bytes())
    edit_value(value)
    manifest = msgspec.convert(value, RecipeManifest)
    path.write_bytes(document(manifest))
    done = kiln("verify-receipt", project / OUT)
    assert done.code == 1 and f"FAIL  {MANIFEST_CLAIM}: " in done.out, "its digest is of what it said before"
    manifest.content_sha256 = manifest.content_digest()
    path.write_bytes(document(manifest))
    done = kiln("verify-receipt", project / OUT)
    assert done.code == 1
    assert f"FAIL  {failing}: " in done.out


def test_what_is_gone_is_not_checkable(carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]) -> None:
    project = copy_of(carried_out)
    shutil.rmtree(project / OUT / "first")
    done = kiln("verify-receipt", project / OUT)
    assert done.code == 0, done.out
    assert "n/a   first has the receipt and adapter of the manifest: train_receipt.json is not here" in done.out


def test_rows_of_the_recipe_are_kept_and_rows_of_a_file_are_not(carried_out: Path) -> None:
    first, second = (one["data"]["sft_ingestion"] for one in receipts(carried_out))
    assert (first["source"], first["source_locator"]) == ("dataset_path", "rows.jsonl")
    assert (second["source"], second["source_locator"]) == ("recipe", "weather/second")
    assert not (carried_out / OUT / "first" / "admit" / "rows.jsonl").exists()
    lines = (carried_out / OUT / "second" / "admit" / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["messages"][0]["content"] for line in lines] == ["It's $5 in city 17?", "And today?"]
    manifest = json.loads((carried_out / OUT / "second" / "admit_manifest.json").read_bytes())
    assert manifest["details"]["rows"]["from"] == "recipe"


def test_the_adapter_of_a_step_is_that_of_the_stages_by_hand(carried_out: Path, kiln: Kiln, tmp_path: Path) -> None:
    config = tmp_path / "second.toml"
    rows = tmp_path / "rows.jsonl"
    shutil.copy(carried_out / OUT / "second" / "admit" / "rows.jsonl", rows)
    train = RECIPE.partition("[train]")[2].partition("[[steps]]")[0].replace("epochs = 2", "epochs = 3")
    config.write_text(
        f'schema = "kiln.config.v1"\n[model]\npath = "{carried_out}/model"\nid = "tiny-llama"\n'
        f'[admit]\nfile = "rows.jsonl"\n[train]\nadapter = "second"{train}'
    )
    base = carried_out / OUT / "first" / "train" / "adapter"
    for command in (["admit", config], ["train", config, "--base-adapter", base]):
        done = kiln(*command, "--out", tmp_path / "run")
        assert done.code == 0, done.err
    by_hand = json.loads((tmp_path / "run" / "train_receipt.json").read_bytes())
    second = receipts(carried_out)[1]
    assert by_hand["adapters"]["output"] == second["adapters"]["output"]
    assert by_hand["training_data"]["sha256"] == second["training_data"]["sha256"]


def test_a_second_run_touches_nothing(carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]) -> None:
    project = copy_of(carried_out)
    before = looks(project)
    done = run(kiln, project)
    assert done.code == 0, done.err
    assert looks(project) == before
    assert done.err.count("left as it is") == 3 and f"unchanged: {project / OUT}/recipe_manifest.json" in done.err
    assert states(kiln, project) == ["done"] * 3


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_it_and_the_next_run_goes_on(
    number: signal.Signals, code: int, fresh: Path, carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    project = copy_of(fresh)
    with cut(3, lambda: os.kill(os.getpid(), number), of=2):
        done = run(kiln, project)
    assert done.code == code
    assert "step 2 of 3, second: stopped" in done.err
    assert f"next: kiln recipe run {project}/recipe.toml --out {project}/out" in done.err
    assert states(kiln, project) == ["done", "unfinished", "to do"]
    assert not (project / OUT / "recipe_manifest.json").exists()
    first = looks(project / OUT / "first")
    done = run(kiln, project)
    assert done.code == 0, done.err
    assert "step 1 of 3, first: left as it is" in done.err and "step 2 of 3, second: resumed" in done.err
    assert looks(project / OUT / "first") == first
    assert [one["content_sha256"] for one in receipts(project)] == [
        one["content_sha256"] for one in receipts(carried_out)
    ]


def test_a_signal_behind_the_last_step_of_a_training_stops_before_the_next(
    fresh: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    project = copy_of(fresh)
    with cut(FIRST_STEPS, lambda: os.kill(os.getpid(), signal.SIGTERM), of=1):
        done = run(kiln, project)
    assert done.code == 143, done.err
    assert states(kiln, project) == ["done", "admitted", "to do"]
    assert run(kiln, project).code == 0


def test_a_training_that_was_killed_goes_on_from_its_checkpoint(
    fresh: Path, carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    project = copy_of(fresh)
    with cut(5, killed, of=1), pytest.raises(Killed):
        run(kiln, project)
    assert states(kiln, project) == ["unfinished", "admitted", "to do"]
    done = run(kiln, project)
    assert done.code == 0, done.err
    assert "step 1 of 3, first: resumed" in done.err
    assert [one["content_sha256"] for one in receipts(project)] == [
        one["content_sha256"] for one in receipts(carried_out)
    ]


def test_one_that_was_killed_before_a_checkpoint_begins_again(
    fresh: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    project = copy_of(fresh)
    with cut(1, killed, of=1), pytest.raises(Killed):
        run(kiln, project)
    assert states(kiln, project) == ["unfinished", "admitted", "to do"]
    done = run(kiln, project)
    assert done.code == 0, done.err
    assert "step 1 of 3, first: trained" in done.err


def test_a_refused_row_stops_it_before_anything_is_trained(
    fresh: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    project = copy_of(fresh)
    edit(project, '{ role = "assistant", content = "city 17" }', '{ role = "oracle", content = "city 17" }')
    done = run(kiln, project)
    assert done.code == 1
    assert "kiln: KLN101: step 'second' (2 of 3): corpus row 1 (line 1) sha256:" in done.err
    assert f"then `kiln recipe run {project}/recipe.toml --out {project}/out` goes on with this step" in done.err
    assert not (project / OUT / "first" / "train").exists()
    edit(project, '"oracle"', '"assistant"')
    done = run(kiln, project)
    assert done.code == 0, done.err


def test_a_step_that_fails_stops_the_rest(fresh: Path, kiln: Kiln, copy_of: Callable[..., Path]) -> None:
    project = copy_of(fresh)
    edit(project, "epochs = 3\n", "epochs = 3\nlearning_rate = 1e30\n")
    done = run(kiln, project)
    assert done.code == 1
    assert "kiln: KLN104: step 'second' (2 of 3): " in done.err
    assert not (project / OUT / "model-of-both").exists() and not (project / OUT / "recipe_manifest.json").exists()
    first = looks(project / OUT / "first")
    edit(project, "learning_rate = 1e30", "learning_rate = 0.02")
    done = run(kiln, project)
    assert done.code == 2
    assert "kiln: KLN208: step 'second' (2 of 3) was begun with something else:" in done.err
    assert "\n  training settings: sha256:" in done.err and "--fresh" in done.err
    done = run(kiln, project, "--fresh")
    assert done.code == 0, done.err
    assert looks(project / OUT / "first") == first
    assert list((project / OUT / "second").glob("train.*")), "the failed training lies aside"


def test_a_changed_step_and_what_depends_on_it_is_made_again_on_demand(
    carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    project = copy_of(carried_out)
    edit(project, "learning_rate = 0.01", "learning_rate = 0.02")
    before = looks(project)
    done = run(kiln, project)
    assert done.code == 2
    assert "KLN208: step 'first' (1 of 3) was begun with something else:\n  training settings: sha256:" in done.err
    assert looks(project) == before
    assert states(kiln, project)[:2] == ["changed", "changed"]
    done = run(kiln, project, "--fresh")
    assert done.code == 0, done.err
    assert done.err.count(": trained") == 2 and "model-of-both: merged" in done.err
    old, new = receipts(carried_out), receipts(project)
    assert old[0]["adapters"]["output"] != new[0]["adapters"]["output"]
    assert new[1]["adapters"]["base"]["receipt"]["content_sha256"] == new[0]["content_sha256"]
    for name in ("first", "second"):
        (aside,) = (project / OUT / name).glob("train.*")
        assert (aside / "train_receipt.json").exists()
    (aside,) = (path for path in (project / OUT).glob("model-of-both.*") if path.is_dir())
    assert (aside / "model.safetensors").exists() and aside.with_name(aside.name + ".merge.json").exists()


def test_a_step_whose_base_changed_alone_is_made_again(
    carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    """The first step has other rows; the second one's own settings and rows are as they were."""
    project = copy_of(carried_out)
    write_rows(project / "rows.jsonl", (row(number) for number in (5, 6, 7)))
    assert states(kiln, project) == ["changed", "waits", "waits"]
    done = run(kiln, project)
    assert done.code == 2 and "\n  rows: ['" in done.err
    admitted = (project / OUT / "second" / "admit_manifest.json").read_bytes()
    done = run(kiln, project, "--fresh")
    assert done.code == 0, done.err
    assert (project / OUT / "second" / "admit_manifest.json").read_bytes() == admitted
    assert states(kiln, project) == ["done"] * 3
    for name in ("first", "second"):
        assert kiln("verify-receipt", project / OUT / name).code == 0


def test_a_first_step_that_comes_out_the_same_leaves_the_second_as_it_is(
    carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    project = copy_of(carried_out)
    shutil.rmtree(project / OUT / "first")
    assert states(kiln, project) == ["to do", "waits", "waits"]
    second = looks(project / OUT / "second")
    done = run(kiln, project)
    assert done.code == 0, done.err
    assert "first: trained" in done.err and "second: left as it is" in done.err
    assert looks(project / OUT / "second") == second


def test_other_held_out_rows_are_named(fresh: Path, kiln: Kiln, copy_of: Callable[..., Path]) -> None:
    project = copy_of(fresh)
    held = project / "held.jsonl"
    held.write_text(json.dumps(row(90)) + "\n")
    edit(project, "[train]\n", '[admit]\nheld_out = ["held.jsonl"]\n[train]\n')
    done = run(kiln, project)
    assert done.code == 0, done.err
    assert states(kiln, project) == ["done"] * 3
    held.write_text(json.dumps(row(2)) + "\n")
    done = run(kiln, project)
    assert done.code == 2 and "\n  held-out rows: as they were admitted against, now the held-out rows of" in done.err
    done = run(kiln, project, "--fresh")
    assert done.code != 0 and "step 'first' (1 of 3): " in done.err, "a row of the step is one of them"


def test_another_base_model_is_named(carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]) -> None:
    project = copy_of(carried_out)
    weights = project / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    done = run(kiln, project)
    assert done.code == 2 and "\n  base model: sha256:" in done.err
    weights.write_bytes((carried_out / "model" / "model.safetensors").read_bytes())
    template = project / "model" / "chat_template.jinja"
    template.write_text(template.read_text() + "{# another #}")
    done = run(kiln, project)
    assert done.code == 2 and "\n  chat template: sha256:" in done.err


def test_an_adapter_that_was_damaged_is_made_again_from_its_checkpoint(
    carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    project = copy_of(carried_out)
    adapter = project / OUT / "second" / "train" / "adapter" / "adapter_model.safetensors"
    sound = adapter.read_bytes()
    adapter.write_bytes(sound[:-1] + b"\1")
    assert states(kiln, project) == ["done", "unfinished", "waits"]
    done = run(kiln, project)
    assert done.code == 0, done.err
    assert adapter.read_bytes() == sound and "model-of-both: left as it is" in done.err


def test_a_merged_model_without_its_record_is_moved_aside(
    carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    """The process died between the two, or the directory is someone else's: it is kept either way."""
    project = copy_of(carried_out)
    (project / OUT / "model-of-both.merge.json").unlink()
    assert states(kiln, project) == ["done", "done", "unfinished"]
    done = run(kiln, project)
    assert done.code == 0, done.err
    assert (project / OUT / "model-of-both.unknown" / "config.json").exists()


def test_plan_without_a_directory_tells_no_state(fresh: Path, kiln: Kiln) -> None:
    done = kiln("recipe", "plan", fresh / "recipe.toml")
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "recipe weather",
        "  step           kind   rows             begins with        directory",
        "  first          sft    file rows.jsonl  -                  DIR/first",
        "  second         sft    2 of the recipe  adapter of first   DIR/second",
        "  model-of-both  merge  -                adapter of second  DIR/model-of-both",
    ]


def test_check_says_what_it_read(fresh: Path, kiln: Kiln, copy_of: Callable[..., Path]) -> None:
    done = kiln("recipe", "check", fresh / "recipe.toml", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["recipe"] == "weather"
    assert "recipe weather: 3 steps, no fault" in done.err
    project = copy_of(fresh)
    edit(project, 'kind = "merge"', 'kind = "evaluate"')
    edit(project, "lora_rank = 2", "lora_rnk = 2")
    done = kiln("recipe", "check", project / "recipe.toml")
    assert done.code == 2
    assert "has 2 faults:" in done.err and "recipe.toml:7: train.lora_rnk is no key" in done.err
    assert "recipe.toml:30: steps[2].kind = 'evaluate' is refused" in done.err


def test_two_at_once_are_refused(carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]) -> None:
    project = copy_of(carried_out)
    with run_lock(project / OUT, "kiln recipe run", nested=False):
        done = run(kiln, project)
    assert done.code == 4 and "KLN401" in done.err


def test_the_lock_sweeps_no_run_of_another_process(carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]) -> None:
    project = copy_of(carried_out)
    others = project / OUT / "second" / "train" / ".kiln-tmp-of-a-running-training"
    others.write_bytes(b"")
    own = project / OUT / ".kiln-tmp-of-a-dead-recipe"
    own.write_bytes(b"")
    assert run(kiln, project).code == 0
    assert others.exists() and not own.exists()


def test_settings_of_the_command_line_are_part_of_what_to_type_next(
    fresh: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    project = copy_of(fresh)
    settings = ["--set", "train.epochs=1", "--set", "steps.1.config.epochs=1"]
    with cut(1, lambda: os.kill(os.getpid(), signal.SIGTERM), of=1):
        done = run(kiln, project, *settings)
    assert done.code == 143
    again = f"kiln recipe run {project}/recipe.toml {' '.join(settings)} --out {project}/out"
    assert done.err.splitlines()[-1] == f"next: {again}"
    done = run(kiln, project)
    assert done.code == 2 and "KLN208: step 'first'" in done.err, "without them it is another recipe"
    done = kiln(*again.split()[1:])
    assert done.code == 0, done.err
    assert done.err.splitlines()[-1] == f"next: kiln verify-receipt {project}/out"
    planned = kiln("recipe", "plan", *again.split()[3:])
    assert planned.err.splitlines()[-1] == f"next: kiln verify-receipt {project}/out"


def test_json_has_the_manifest(carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]) -> None:
    done = run(kiln, copy_of(carried_out), "--json")
    value = json.loads(done.out)
    assert value["unchanged"] and value["manifest"]["recipe"] == "weather"
    assert [step["what"] for step in value["steps"]] == ["left as it is"] * 3


def test_a_step_on_an_adapter_that_lies_elsewhere(carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]) -> None:
    project = copy_of(carried_out)
    edit(project, 'name = "first"\n', 'name = "third"\nbase_adapter = "out/second/train/adapter"\n')
    done = kiln("recipe", "run", project / "recipe.toml", "--out", project / "more")
    assert done.code == 0, done.err
    third = read_receipt(project / "more" / "third" / "train_receipt.json")
    assert third.adapters["base"]["receipt"]["content_sha256"] == receipts(project)[1]["content_sha256"]
    held = kiln("verify-receipt", project / "more" / "second").out
    for name in ("more/third", "out/second", "out/first"):
        assert f"ok    the base adapter is that of the training of {name}/train_receipt.json" in held


# ---- rows of the registry


def registered(kiln: Kiln, project: Path) -> None:
    """A data set ``greetings`` and two corrections in ``.kiln``, and a recipe of a step for each."""
    rows = project / "greetings.jsonl"
    write_rows(rows, (row(number) for number in range(30, 40)))
    options = ["--registry", project / ".kiln"]
    assert kiln("dataset", "add", "greetings", rows, *options).code == 0
    for number in (1, 2):
        fields = ["--request-id", f"r{number}", "--user", f"Is it {number}?", "--ideal", f"city {number}"]
        assert kiln("corrections", "add", *fields, *options).code == 0
    head = RECIPE.partition("[[steps]]")[0].replace("epochs = 2", "epochs = 1")
    steps = (("named", "greetings"), ("corrected", "corrections:active"))
    (project / "recipe.toml").write_text(
        head
        + "".join(
            f'[[steps]]\nkind = "sft"\nname = "{name}"\nexamples_from = {{ dataset = "{dataset}" }}\n'
            for name, dataset in steps
        )
    )


def active(kiln: Kiln, project: Path) -> int:
    listed = kiln("corrections", "list", "--registry", project / ".kiln", "--json")
    return int(json.loads(listed.out)["counts"]["active"])


def test_rows_of_the_registry(fresh: Path, kiln: Kiln, copy_of: Callable[..., Path]) -> None:
    """A named data set, then the active corrections: they are marked by the step that trained on them."""
    project = copy_of(fresh)
    registered(kiln, project)
    assert active(kiln, project) == 2
    done = run(kiln, project)
    assert done.code == 0, done.err
    assert "corrections: 2 marked as trained into corrected" in done.err
    assert active(kiln, project) == 0
    named, corrected = (receipt(project, name)["data"]["sft_ingestion"] for name in ("named", "corrected"))
    assert (named["source"], corrected["source"]) == ("named_dataset", "corrections")
    assert corrected["rows_kept"] == 2
    before = looks(project / OUT)
    done = run(kiln, project)
    assert done.code == 0, done.err
    assert looks(project / OUT) == before, "corrections that ended change nothing of a step that is done"


def test_a_data_set_that_grew_is_named(fresh: Path, kiln: Kiln, copy_of: Callable[..., Path]) -> None:
    project = copy_of(fresh)
    registered(kiln, project)
    assert run(kiln, project).code == 0
    more = project / "more.jsonl"
    write_rows(more, (row(number) for number in range(50, 60)))
    assert kiln("dataset", "add", "greetings", more, "--append", "--registry", project / ".kiln").code == 0
    done = run(kiln, project)
    assert done.code == 2
    assert "KLN208: step 'named' (1 of 2) was begun with something else:\n  rows: [" in done.err
    done = run(kiln, project, "--fresh")
    assert done.code == 0, done.err
    corrected = read_receipt(project / OUT / "corrected" / "train_receipt.json")
    assert corrected.data.sft_ingestion.rows_kept == 2, "the corrections are those that it was admitted with"


def test_a_data_set_that_is_not_there_is_an_error_of_its_step(
    fresh: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    project = copy_of(fresh)
    registered(kiln, project)
    edit(project, '"greetings"', '"greeting"')
    done = run(kiln, project)
    assert done.code == 2
    assert "KLN212: step 'named' (1 of 2): " in done.err
    assert not (project / OUT / "corrected" / "train").exists()


# ---- Make


@pytest.fixture(scope="module")
def made(fresh: Path, kiln: Kiln) -> Path:
    """The recipe carried out by Make, from a directory that knows nothing of recipes."""
    project = Path(shutil.copytree(fresh, fresh.parent / "made"))
    printed = make_file(kiln, project)
    dry = make(project, "-n")
    assert dry.returncode == 0, dry.stderr
    assert "train out/second.toml --out out/second --fresh" in dry.stdout and not (project / OUT).exists()
    assert printed.startswith("# The steps of recipe weather")
    done = make(project)
    assert done.returncode == 0, done.stderr
    return project


def test_make_gives_the_same_adapters(made: Path, carried_out: Path) -> None:
    theirs, ours = receipts(made), receipts(carried_out)
    assert [one["adapters"]["output"] for one in theirs] == [one["adapters"]["output"] for one in ours]
    assert [one["training_data"]["sha256"] for one in theirs] == [one["training_data"]["sha256"] for one in ours]
    assert theirs[0]["content_sha256"] == ours[0]["content_sha256"]
    assert (made / OUT / "model-of-both" / "model.safetensors").read_bytes() == (
        carried_out / OUT / "model-of-both" / "model.safetensors"
    ).read_bytes()


def test_make_does_nothing_twice(made: Path) -> None:
    done = make(made)
    assert done.returncode == 0 and "kiln_cli.app" not in done.stdout, done.stdout


def test_make_looks_again_where_rows_are_newer(made: Path, copy_of: Callable[..., Path]) -> None:
    """Rows that are the same for all that: admit and train find their work done, and nothing behind them runs."""
    project = copy_of(made)
    (project / "rows.jsonl").touch()
    done = make(project)
    assert done.returncode == 0, done.stderr
    assert "admit out/first.toml" in done.stdout and "export" not in done.stdout


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_make_looks_again_where_a_tokenizer_file_is_newer(made: Path, copy_of: Callable[..., Path], name: str) -> None:
    project = copy_of(made)
    (project / "model" / name).touch()
    done = make(project)
    assert done.returncode == 0, done.stderr
    assert all(f"admit out/{step}.toml" in done.stdout for step in ("first", "second"))
    assert " train " not in done.stdout and "export" not in done.stdout


def test_make_looks_again_where_a_template_is_newer(fresh: Path, kiln: Kiln, copy_of: Callable[..., Path]) -> None:
    project = copy_of(fresh)
    (project / "model" / "chat_template.jinja").rename(project / "own.jinja")
    edit(project, 'id = "tiny-llama"\n', 'id = "tiny-llama"\n[admit]\ntemplate = "own.jinja"\n')
    make_file(kiln, project)
    goal = "out/first/admit_manifest.json"
    assert [make(project, goal).returncode for _ in range(2)] == [0, 0]
    assert "admit " not in make(project, goal).stdout
    before = admit_manifest(project)
    text = (project / "own.jinja").read_text()
    (project / "own.jinja").write_text("{# another #}" + text)
    done = make(project, goal)
    assert done.returncode == 0 and "admit out/first.toml" in done.stdout, done.stderr
    assert admit_manifest(project) != before


def admit_manifest(project: Path) -> bytes:
    return (project / OUT / "first" / "admit_manifest.json").read_bytes()


def test_make_trains_again_on_another_adapter_of_no_step(
    carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    project = copy_of(carried_out)
    shutil.copytree(project / OUT / "first" / "train" / "adapter", project / "given")
    second = project / OUT / "second" / "train" / "adapter" / "adapter_model.safetensors"
    another = second.read_bytes()
    shutil.rmtree(project / OUT)
    edit(project, 'name = "first"\n', 'name = "first"\nbase_adapter = "given"\n')
    make_file(kiln, project)
    goal = "out/first/train_receipt.json"
    done = make(project, goal)
    assert done.returncode == 0, done.stderr
    assert " train " not in make(project, goal).stdout
    before = receipt(project, "first")["adapters"]
    (project / "given" / "adapter_model.safetensors").write_bytes(another)
    done = make(project, goal)
    assert done.returncode == 0 and " train " in done.stdout, done.stderr
    now = receipt(project, "first")["adapters"]
    assert now["base"]["content_sha256"] != before["base"]["content_sha256"]
    assert now["output"]["content_sha256"] != before["output"]["content_sha256"]


def test_a_recipe_goes_on_with_what_make_has_done(made: Path, kiln: Kiln, copy_of: Callable[..., Path]) -> None:
    """Rows that lie in a file are the same to both; those of the recipe itself are a file to Make."""
    project = copy_of(made)
    assert states(kiln, project)[:2] == ["done", "changed"]
    for path in (project / OUT).iterdir():
        if path.name not in ("first", "first.toml"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    first = looks(project / OUT / "first")
    done = run(kiln, project)
    assert done.code == 0, done.err
    assert "first: left as it is" in done.err and looks(project / OUT / "first") == first


def test_make_does_nothing_twice_with_rows_of_the_registry(
    fresh: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    """Corrections end when they are trained into, and their training stays what it is."""
    project = copy_of(fresh)
    registered(kiln, project)
    make_file(kiln, project)
    done = make(project)
    assert done.returncode == 0, done.stderr
    assert active(kiln, project) == 0
    before = [receipt(project, name) for name in ("named", "corrected")]
    done = make(project)
    assert done.returncode == 0, done.stderr
    assert "admit out/named.toml" in done.stdout, "it looks at the data set"
    assert "corrected" not in done.stdout and " train " not in done.stdout
    assert [receipt(project, name) for name in ("named", "corrected")] == before


DATASETS = """import json
from pathlib import Path

def load_from_disk(path):
    return [json.loads(line) for line in (Path(path) / "rows.arrow").read_text().splitlines()]
"""


def test_make_looks_into_a_directory_of_rows(
    fresh: Path, kiln: Kiln, copy_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file within that is written in place leaves the directory's own time as it was. A stand-in for the package
    datasets reads the directory."""
    project = copy_of(fresh)
    (project / "packages").mkdir()
    (project / "packages" / "datasets.py").write_text(DATASETS)
    monkeypatch.syspath_prepend(project / "packages")
    saved = project / "saved"
    saved.mkdir()
    (saved / "state.json").write_text("{}")
    (project / "rows.jsonl").rename(saved / "rows.arrow")
    edit(project, 'file = "rows.jsonl"', 'file = "saved"')
    make_file(kiln, project)
    done = make(project, "out/first/train_receipt.json")
    assert done.returncode == 0, done.stderr
    before = receipt(project, "first")
    done = make(project, "out/first/train_receipt.json")
    assert done.returncode == 0 and " train " not in done.stdout, done.stderr
    assert receipt(project, "first") == before
    with (saved / "rows.arrow").open("a") as stream:
        stream.write(json.dumps(row(9)) + "\n")
    done = make(project, "out/first/train_receipt.json")
    assert done.returncode == 0, done.stderr
    kept = [each["data"]["sft_ingestion"]["rows_kept"] for each in (before, receipt(project, "first"))]
    assert kept == [3, 4]
