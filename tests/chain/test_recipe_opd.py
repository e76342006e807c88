"""A recipe with a step of distillation: sft, then opd on top of it, then the merged model, all on tiny models."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from dataset_rows import write_rows
from kiln_stages.recipes.record import RecipeManifest, read_recipe_manifest
from recipe_runs import OUT, Killed, cut, edit, killed, looks, make, make_file, receipt, run, states
from scored_corpus import ALIAS, register_teacher, teacher_identity
from scored_run import scored_project
from tiny_model import Kiln

from kiln_cli.manifests import document

SCORED_ROWS = 4
RECIPE = f"""name = "forecast"
[model]
path = "model"
id = "tiny-llama"
[train]
lora_rank = 2
lora_alpha = 4.0
learning_rate = 0.01
checkpoint_interval = 2
threads = 1

[[steps]]
kind = "sft"
name = "manners"
examples_from = {{ file = "rows.jsonl" }}
config = {{ epochs = 1 }}

[[steps]]
kind = "opd"
name = "distilled"
dataset_path = "teacher.jsonl"
teacher = "{ALIAS}"
[steps.config]
training_mode = "off_policy"
top_k = 16
epochs = 2
echo = {{ env_mask_mode = "full_obs" }}

[[steps]]
kind = "merge"
name = "model-of-both"
"""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``recipe.toml``, rows, a scored corpus, its registered teacher and the model; nothing has run."""
    project = tmp_path_factory.mktemp("recipe-opd") / "project"
    scored_project(project, SCORED_ROWS)
    (project / "kiln.toml").unlink()
    (project / "recipe.toml").write_text(RECIPE)
    rows = [
        {"messages": [{"role": "user", "content": f"City {number}?"}, {"role": "assistant", "content": "It rains."}]}
        for number in range(3)
    ]
    write_rows(project / "rows.jsonl", rows)
    return project


@pytest.fixture(scope="module")
def carried_out(fresh: Path, kiln: Kiln) -> Path:
    """The recipe carried out. Copy it before changing it."""
    project = Path(shutil.copytree(fresh, fresh.parent / "carried-out"))
    done = run(kiln, project)
    assert done.code == 0, done.err
    return project


def test_the_receipts_are_a_chain(carried_out: Path) -> None:
    first, second = receipt(carried_out, "manners"), receipt(carried_out, "distilled")
    assert second["adapters"]["base"] == {
        **first["adapters"]["output"],
        "path": f"{OUT}/manners/train/adapter",
        "receipt": {"path": f"{OUT}/manners/train_receipt.json", "content_sha256": first["content_sha256"]},
    }
    assert (second["hyperparameters"]["mode"], second["steps"]) == ("opd", 2 * SCORED_ROWS)
    assert second["opd"]["teacher_id"] == ALIAS and second["echo"] is not None
    manifest = read_recipe_manifest(carried_out / OUT)
    assert manifest is not None
    assert [(step.name, step.kind, step.step) for step in manifest.steps] == [
        ("manners", "sft", None),
        ("distilled", "opd", "manners"),
        ("model-of-both", "merge", "distilled"),
    ]
    assert manifest.steps[2].receipt_content_sha256 == second["content_sha256"]


def test_the_whole_recipe_verifies(carried_out: Path, kiln: Kiln) -> None:
    done = kiln("verify-receipt", carried_out / OUT, "--require-all")
    assert done.code == 0, done.out
    for line in (
        "distilled began with the adapter of step manners",
        "model-of-both is the model of step distilled",
        f"distilled: the base adapter is that of the training of {OUT}/manners/train_receipt.json",
    ):
        assert f"ok    {line}\n" in done.out


def test_a_manifest_that_calls_the_training_another_kind_does_not_verify(
    carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    project = copy_of(carried_out)
    path = project / OUT / "recipe_manifest.json"
    manifest = msgspec.json.decode(path.read_bytes(), type=RecipeManifest)
    manifest.steps[1] = msgspec.structs.replace(manifest.steps[1], kind="sft")
    manifest.content_sha256 = manifest.content_digest()
    path.write_bytes(document(manifest))
    done = kiln("verify-receipt", project / OUT)
    assert done.code == 1
    assert "FAIL  distilled has the receipt and adapter of the manifest: its kind of training is" in done.out


def test_the_plan_names_corpus_and_teacher(carried_out: Path, kiln: Kiln) -> None:
    assert kiln("recipe", "check", carried_out / "recipe.toml").code == 0
    done = kiln("recipe", "plan", carried_out / "recipe.toml", "--out", carried_out / OUT)
    assert done.code == 0, done.err
    (line,) = (line for line in done.out.splitlines() if line.startswith("  distilled "))
    assert line.split()[1] == "opd" and "adapter of manners" in line and line.endswith("done")
    assert f"file teacher.jsonl, scored by {ALIAS} ({SCORED_ROWS} kept)" in line


def test_a_second_run_touches_nothing(carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]) -> None:
    project = copy_of(carried_out)
    before = looks(project)
    done = run(kiln, project)
    assert done.code == 0 and done.err.count("left as it is") == 3, done.err
    assert looks(project) == before


def test_a_distillation_that_was_killed_goes_on_from_its_checkpoint(
    fresh: Path, carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    project = copy_of(fresh)
    with cut(3, killed, of=2), pytest.raises(Killed):
        run(kiln, project)
    assert states(kiln, project) == ["done", "unfinished", "to do"]
    done = run(kiln, project)
    assert done.code == 0, done.err
    assert "manners: left as it is" in done.err and "distilled: resumed" in done.err
    for name in ("manners", "distilled"):
        assert receipt(project, name)["content_sha256"] == receipt(carried_out, name)["content_sha256"]


def test_other_settings_of_the_distillation_are_made_again_on_demand(
    carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    project = copy_of(carried_out)
    edit(project, 'echo = { env_mask_mode = "full_obs" }\n', "")
    done = run(kiln, project)
    assert done.code == 2
    assert "KLN208: step 'distilled' (2 of 3) was begun with something else:\n  settings of admission: " in done.err
    first = looks(project / OUT / "manners")
    done = run(kiln, project, "--fresh")
    assert done.code == 0, done.err
    assert looks(project / OUT / "manners") == first
    assert not receipt(project, "distilled")["echo"]["enabled"]
    assert list((project / OUT / "distilled").glob("train.*")), "the old distillation lies aside"
    assert kiln("verify-receipt", project / OUT, "--require-all").code == 0


def test_a_teacher_that_is_another_now_is_named(carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]) -> None:
    project = copy_of(carried_out)
    identity = teacher_identity(project / "model", base_model_sha256="b" * 64)
    register_teacher(project / ".kiln", identity)
    done = run(kiln, project)
    assert done.code == 2
    then = receipt(project, "distilled")["opd"]["teacher_content_revision"]
    assert f"\n  teacher's revision: {then}, now {identity.content_revision()}" in done.err


def test_a_teacher_that_nobody_registered_stops_it_before_anything_is_trained(
    fresh: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    project = copy_of(fresh)
    edit(project, ALIAS, "nobody")
    done = run(kiln, project)
    assert done.code == 2
    assert "kiln: KLN212: step 'distilled' (2 of 3): " in done.err
    assert not (project / OUT / "manners" / "train").exists()


def test_a_loss_that_is_not_for_its_rows_stops_it_before_anything_is_trained(
    fresh: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    project = copy_of(fresh)
    edit(project, "[train]\n", '[train]\nloss = "cross_entropy"\n')
    done = run(kiln, project)
    assert done.code == 2
    assert "kiln: KLN203: step 'distilled' (2 of 3): [train] loss = 'cross_entropy' is not for a scored" in done.err
    assert not (project / OUT / "manners" / "train").exists()


def test_a_fault_in_the_corpus_stops_it_before_anything_is_trained(
    fresh: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    project = copy_of(fresh)
    corpus = project / "teacher.jsonl"
    corpus.write_text(corpus.read_text().replace('"teacher_response":"It', '"teacher_response":"That', 1))
    done = run(kiln, project)
    assert done.code == 1
    assert "kiln: KLN112: step 'distilled' (2 of 3): teacher.jsonl:2" in done.err
    assert not (project / OUT / "manners" / "train").exists()


def test_make_gives_the_same_and_nothing_twice(
    fresh: Path, carried_out: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    project = copy_of(fresh)
    make_file(kiln, project)
    done = make(project)
    assert done.returncode == 0, done.stderr
    for name in ("manners", "distilled"):
        assert receipt(project, name)["content_sha256"] == receipt(carried_out, name)["content_sha256"]
    done = make(project)
    assert done.returncode == 0 and "kiln_cli.app" not in done.stdout, done.stdout
    assert states(kiln, project) == ["done", "done", "unfinished"], "no record tells of a model that Make merged"
    (project / ".kiln" / "teachers.json").touch()
    done = make(project)
    assert "admit out/distilled.toml" in done.stdout and "export" not in done.stdout, "it looks at the teacher again"
