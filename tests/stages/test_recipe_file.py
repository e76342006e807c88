"""Recipes as files: what each step becomes, and every fault with its line before anything runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from kiln_stages.recipes.makefile import LONGEST_LINE, makefile
from kiln_stages.recipes.placing import Training, place_steps
from kiln_stages.recipes.recipe_file import KINDS, REFUSED_KINDS, Merge, Recipe, Train, read_recipe

from kiln_cli.config import load_config
from kiln_cli.errors import KilnError

HEAD = """name = "demo"
[model]
path = "model"
[train]
lora_rank = 4
lora_alpha = 8.0
"""
ROWS = 'examples_from = { file = "rows.jsonl" }\n'
FIRST = f'[[steps]]\nkind = "sft"\nname = "first"\n{ROWS}'
Read = Callable[..., Recipe]


@pytest.fixture
def read(make_run: Callable[..., Path]) -> Read:
    """``read(text, *assignments, name="recipe.toml")``: the recipe of this text, with ``rows.jsonl`` beside it."""

    def reads(text: str, *assignments: str, name: str = "recipe.toml") -> Recipe:
        root = make_run({name: text, "rows.jsonl": "{}\n", "adapter/adapter_config.json": "{}"})
        return read_recipe(root / name, assignments)

    return reads


def faults(read: Read, text: str, **options: str) -> list[str]:
    """The faults, each behind its line: ``"7: steps[0]..."``."""
    with pytest.raises(KilnError) as caught:
        read(text, **options)
    assert caught.value.code == "KLN203"
    lines = caught.value.message.split("\n")[1:]
    return [line.partition(options.get("name", "recipe.toml") + ":")[2] for line in lines]


def test_what_the_steps_become(read: Read) -> None:
    recipe = read(
        HEAD
        + FIRST
        + """[[steps]]
kind = "sft"
name = "second"
[steps.examples_from]
examples = [{ messages = [] }]
[steps.config]
epochs = 7
seed = "18446744073709551615"
invalid_row_policy = "skip"
[[steps]]
kind = "sft"
name = "third"
base_adapter = "first"
examples_from = { dataset = "greetings", dataset_split = "holdout" }
[[steps]]
kind = "sft"
name = "fourth"
base_adapter = "adapter"
examples_from = { dataset = "corrections:active" }
[[steps]]
kind = "merge"
name = "model"
[[steps]]
kind = "merge"
name = "other"
step = "second"
"""
    )
    first, second, third, fourth, model, other = recipe.steps
    assert (
        isinstance(first, Train)
        and isinstance(second, Train)
        and isinstance(third, Train)
        and isinstance(fourth, Train)
    )
    assert [step.base for step in (first, second, third, fourth)] == [None, "first", "first", None]
    assert [step.config.run.train.adapter for step in (first, second)] == ["first", "second"]
    assert [step.config.run.train.base_adapter for step in (first, fourth)] == [None, "adapter"]
    assert second.examples == [{"messages": []}] and second.config.run.train.epochs == 7
    assert second.config.run.project.seed == 2**64 - 1 and second.config.run.admit.invalid_row_policy == "skip"
    assert first.config.run.train.epochs == 3 and first.config.run.admit.file == "rows.jsonl"
    assert third.config.run.admit.dataset == "greetings" and third.config.run.admit.dataset_split == "holdout"
    assert {step.config.run.train.lora_rank for step in (first, second, third, fourth)} == {4}
    assert (model, other) == (Merge(name="model", of="fourth"), Merge(name="other", of="second"))


def test_a_recipe_in_json_is_the_same_recipe(read: Read) -> None:
    value = {
        "name": "demo",
        "description": None,
        "model": {"path": "model"},
        "train": {"lora_rank": 4, "lora_alpha": 8.0},
        "steps": [{"kind": "sft", "name": "first", "examples_from": {"file": "rows.jsonl"}}],
    }
    del value["description"]
    one, other = read(HEAD + FIRST), read(json.dumps(value), name="recipe.json")
    assert one.sha256 == other.sha256
    assert isinstance(one.steps[0], Train) and isinstance(other.steps[0], Train)
    assert one.steps[0].config.run == other.steps[0].config.run


def test_a_recipe_of_the_public_server_needs_a_model_alone(read: Read) -> None:
    """Its form: no kiln tables, ``output_name`` passed over since the name of the step stands for it."""
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    step = {
        "kind": "sft",
        "name": "one",
        "examples_from": {"examples": rows},
        "config": {"training_profile": "native_online_lora_v1", "output_name": "another", "epochs": 2},
    }
    text = json.dumps({"name": "demo", "description": "d", "steps": [step]})
    recipe = read(text, "model.path=model", name="recipe.json")
    (one,) = recipe.steps
    assert isinstance(one, Train) and one.config.run.model.path == "model"
    assert one.config.run.train.adapter == "one"
    assert recipe.warnings == ["steps[0].config.output_name is passed over: the adapter is named 'one'"]


def test_the_page_has_a_recipe_and_every_refused_kind(read: Read) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    recipe = read(example.replace("manners.jsonl", "rows.jsonl").replace("teacher.jsonl", "rows.jsonl"))
    assert [(step.name, step.kind) for step in recipe.steps] == [
        ("manners", "sft"),
        ("product", "sft"),
        ("tone", "opd"),
        ("support-model", "merge"),
    ]
    for kind, reason in REFUSED_KINDS.items():
        assert f"| `{kind}` | {reason} |" in page


@pytest.mark.parametrize("name", ["recipe.yaml", "recipe.yml"])
def test_yaml_is_refused_by_name(name: str, read: Read) -> None:
    with pytest.raises(KilnError, match="is refused: YAML reads one text as several types") as caught:
        read("name: demo\n", name=name)
    assert caught.value.code == "KLN202"


@pytest.mark.parametrize("kind", REFUSED_KINDS)
def test_a_kind_that_is_not_there_is_refused_with_its_reason(kind: str, read: Read) -> None:
    found = faults(read, HEAD + f'[[steps]]\nkind = "{kind}"\nname = "x"\n')
    assert found == [f"8: steps[0].kind = '{kind}' is refused: {REFUSED_KINDS[kind]}"]


@pytest.mark.parametrize(
    ("step", "found"),
    [
        ('kind = "stf"\nname = "x"', "8: steps[0].kind = 'stf' is no kind of step; did you mean 'sft'?"),
        (
            'kind = "distill"\nname = "x"',
            "8: steps[0].kind = 'distill' is no kind of step; did you mean 'distill_self'?",
        ),
        ('kind = "zzz"\nname = "x"', f"8: steps[0].kind = 'zzz' is no kind of step; there are {', '.join(KINDS)}"),
        ('kind = ["sft"]\nname = "x"', "8: steps[0].kind = ['sft'] is no kind of step; did you mean 'sft'?"),
        ('name = "x"', "7: steps[0].kind is missing"),
        ('type = "sft"\nname = "x"', "8: steps[0].type is refused: the key is kind"),
        (f'kind = "sft"\n{ROWS}', "7: steps[0].name is missing"),
        ('kind = "sft"\nname = "x"', "7: steps[0].examples_from is missing"),
        (
            'kind = "sft"\nname = "x"\nexamples_from = {}',
            "10: steps[0].examples_from.dataset, examples or file: one must be given, found none",
        ),
        (
            'kind = "sft"\nname = "x"\nexamples_from = { file = "rows.jsonl", dataset = "d" }',
            "10: steps[0].examples_from.dataset, examples or file: one must be given, found dataset and file",
        ),
        (
            'kind = "sft"\nname = "x"\nexamples_from = { file = "none.jsonl" }',
            "10: steps[0].examples_from.file = 'none.jsonl': there is no such file",
        ),
        (
            'kind = "sft"\nname = "x"\nexamples_from = { examples = [] }',
            "10: steps[0].examples_from.examples = []: expected array of length >= 1",
        ),
        (
            'kind = "sft"\nname = "x"\nexamples_from = { dataset = "d", dataset_split = "test" }',
            "10: steps[0].examples_from.dataset_split = 'test': expected one of: train, validation, holdout",
        ),
        (f'kind = "sft"\nname = "x"\ndataset = "d"\n{ROWS}', "10: steps[0].dataset is refused: it stands under"),
        (f'kind = "sft"\nname = "x"\nexample_from = 1\n{ROWS}', "10: steps[0].example_from is no key; did you mean"),
        (
            f'kind = "sft"\nname = "x"\nbase_adapter = "none"\n{ROWS}',
            "10: steps[0].base_adapter = 'none' is neither a step of kind sft or opd before this one nor the directory",
        ),
        (
            f'kind = "sft"\nname = "x"\nbase_adapter = "x"\n{ROWS}',
            "10: steps[0].base_adapter = 'x' is neither a step of kind sft or opd before this one nor the directory",
        ),
        (f'kind = "sft"\nname = "../x"\n{ROWS}', "9: steps[0].name = '../x' is no name of a step"),
        (f'kind = "sft"\nname = "x.json"\n{ROWS}', "9: steps[0].name = 'x.json' is no name of a step"),
        (f'kind = "sft"\nname = "x"\n{ROWS}config = {{ epochs = 0 }}', "11: steps[0].config.epochs = 0: expected int"),
        (
            f'kind = "sft"\nname = "x"\n{ROWS}config = {{ epoch = 1 }}',
            "11: steps[0].config.epoch is no key; did you mean 'epochs'?",
        ),
        (
            f'kind = "sft"\nname = "x"\n{ROWS}config = {{ batch_size = 1 }}',
            "11: steps[0].config.batch_size is refused: native_online_lora_v1 takes one conversation a step",
        ),
        (
            f'kind = "sft"\nname = "x"\n{ROWS}config = {{ lora_alpha = 9.0 }}',
            "11: steps[0].config.lora_alpha / lora_rank = 2.25 is above 2",
        ),
        (
            f'kind = "sft"\nname = "x"\n{ROWS}config = {{ base_adapter = "adapter" }}',
            "11: steps[0].config.base_adapter is refused: the step itself has base_adapter",
        ),
        (
            f'kind = "sft"\nname = "x"\n{ROWS}config = {{ post_eval = {{}} }}',
            "11: steps[0].config.post_eval is refused: not built in this version",
        ),
        ('kind = "merge"\nname = "x"', "7: steps[0]: no step of kind sft or opd stands before this one"),
        (
            'kind = "merge"\nname = "x"\nstep = "y"',
            "10: steps[0].step = 'y' is no step of kind sft or opd before this one",
        ),
        (
            'kind = "sft"\nname = "x"\n[steps.examples_from]\nexamples = [1, 2020-01-01]',
            "11: steps[0].examples_from.examples[1] is a date; write it as text",
        ),
    ],
)
def test_a_fault_of_a_step(step: str, found: str, read: Read) -> None:
    (fault,) = faults(read, HEAD + "[[steps]]\n" + step + "\n")
    assert fault.startswith(found)


OPD = 'kind = "opd"\nname = "x"\n'
CORPUS = 'dataset_path = "rows.jsonl"\nteacher = "large"\n'


@pytest.mark.parametrize(
    ("step", "found"),
    [
        ('dataset_path = "rows.jsonl"\n', ["7: steps[0].teacher is missing"]),
        ('teacher = "large"\n', ["7: steps[0].dataset_path is missing"]),
        ('dataset_path = "no"\nteacher = "large"\n', ["10: steps[0].dataset_path = 'no': there is no such file"]),
        (f"{CORPUS}{ROWS}", ["12: steps[0].examples_from is refused: the scored corpus is a file"]),
        (f'{CORPUS}dataset = "d"\n', ["12: steps[0].dataset is refused: the scored corpus is a file"]),
        (f"{CORPUS}techer = 1\n", ["12: steps[0].techer is no key; did you mean 'teacher'?"]),
        (f"{CORPUS}config = {{ topk = 16 }}\n", ["12: steps[0].config.topk is no key; did you mean 'top_k'?"]),
        (
            f"{CORPUS}config = {{ invalid_row_policy = 'skip' }}\n",
            ["12: steps[0].config.invalid_row_policy is refused: "],
        ),
        (f"{CORPUS}config = {{ top_k = 8 }}\n", ["12: steps[0].config.top_k = 8: the loss takes 16 or 32"]),
        (f"{CORPUS}config = {{ echo = {{ lamda = 1 }} }}\n", ["12: steps[0].config.echo.lamda is no key"]),
        (f"{CORPUS}config = {{ base_adapter = 'a' }}\n", ["12: steps[0].config.base_adapter is refused: the step"]),
        (CORPUS, ["7: steps[0].config.training_mode = 'on_policy' is not built in this version"]),
    ],
)
def test_a_fault_of_a_step_of_distillation(step: str, found: list[str], read: Read) -> None:
    mode = step.replace("config = {", 'config = { training_mode = "off_policy",')
    if "config" not in step and step != CORPUS:
        mode += 'config = { training_mode = "off_policy" }\n'
    there = faults(read, HEAD + "[[steps]]\n" + OPD + mode)
    assert [fault[: len(start)] for fault, start in zip(there, found, strict=True)] == found


def test_a_shared_setting_that_no_scored_corpus_has_is_named_where_it_stands(read: Read) -> None:
    text = HEAD.replace("[train]", '[admit]\ninvalid_row_policy = "skip"\n[train]') + FIRST
    assert len(read(text).steps) == 1
    step = f'[[steps]]\n{OPD}{CORPUS}config = {{ training_mode = "off_policy" }}\n'
    (fault,) = faults(read, text + step)
    assert fault.startswith("5: admit.invalid_row_policy = 'skip' is not for kind = 'opd': ")
    assert fault.endswith(" (steps[1])")


def test_what_a_step_of_distillation_becomes(read: Read) -> None:
    step = f"""[[steps]]\n{OPD}{CORPUS}
[steps.config]
training_mode = "off_policy"
top_k = 16
temperature = 0.5
echo = {{ lambda = 0.1 }}
epochs = 3
"""
    recipe = read(HEAD + FIRST + step)
    first, second = recipe.steps
    assert isinstance(first, Train) and isinstance(second, Train)
    assert (second.kind, second.base, second.examples) == ("opd", "first", None)
    run = second.config.run
    assert (run.admit.kind, run.admit.file, run.distill.teacher) == ("opd", "rows.jsonl", "large")
    assert run.distill.top_k == 16 and run.distill.echo is not None and run.distill.echo.lambda_ == 0.1
    assert (run.train.loss, run.train.epochs, run.train.checkpoint_interval) == ("teacher_top_k", 3, 25)
    assert (first.config.run.train.loss, first.config.run.train.lora_rank) == ("cross_entropy", run.train.lora_rank)
    assert len(recipe.warnings) == 1
    assert recipe.warnings[0].startswith("steps[1].config.temperature = 0.5 changes nothing: ")


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_makefile_writes_what_a_reader_of_scored_rows_would_not_take_for_granted(epochs: int, read: Read) -> None:
    step = f'{OPD}{CORPUS}config = {{ training_mode = "off_policy", epochs = {epochs} }}\n'
    recipe = read(HEAD + "[[steps]]\n" + step)
    (one,) = recipe.steps
    assert isinstance(one, Train)
    written = re.findall(r"^\t    '(.*)'(?: \\| >> .*)$", makefile(recipe, Path("out")), re.MULTILINE)
    config = recipe.base_dir / "one.toml"
    config.write_text("\n".join(line for line in written if not line.startswith("base_dir")))
    assert load_config(config).run == one.config.run


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('config = "kiln.toml"\n', "1: config is refused: what all steps share stands in [project]"),
        ("datasets = []\n", "1: datasets is refused: each step has its rows under examples_from"),
        ("[admit]\nfile = 'x'\n", "2: admit.file is refused: each step has its rows"),
        ("[admit]\ndataset = 'x'\n", "2: admit.dataset is refused: each step has its rows"),
        ("[train]\nadapter = 'x'\n", "2: train.adapter is refused: the adapter has the name of its step"),
        ("[train]\nbase_adapter = 'x'\n", "2: train.base_adapter is refused: a step has base_adapter"),
        ("[train]\nepochs = 0\n", "2: train.epochs = 0: expected int >= 1"),
        ("[train]\nlearning_rat = 1\n", "2: train.learning_rat is no key; did you mean 'learning_rate'?"),
        ("schema = 'kiln.recipe.v2'\n", "1: schema = 'kiln.recipe.v2': expected one of: kiln.recipe.v1"),
        ("nam = 'x'\n", "1: nam is no key; did you mean 'name'?"),
    ],
)
def test_a_fault_of_what_the_steps_share_is_named_once(text: str, found: str, read: Read) -> None:
    step = FIRST.replace("first", "second")
    shared = text if text.startswith("[") else text + "[model]\npath = 'm'\n"
    first = faults(read, shared + FIRST + step + "\n")
    assert [fault for fault in first if not fault.endswith("name is missing")] == [
        fault for fault in first if fault.startswith(found)
    ]
    assert len([fault for fault in first if fault.startswith(found)]) == 1


def test_all_faults_are_gathered(read: Read) -> None:
    second = '[[steps]]\nkind = "sft"\nname = "first"\n' + ROWS
    third = '[[steps]]\nkind = "sft"\nname = "third"\nexamples_from = { file = "no" }\nconfig = { lora_rank = 8 }\n'
    found = faults(read, HEAD.replace("lora_rank", "lora_rnk") + second + third + '[[steps]]\nkind = "evaluate"\n')
    assert [fault.partition(":")[0] for fault in found] == ["5", "14", "17"]


def test_two_steps_of_one_name(read: Read) -> None:
    (fault,) = faults(read, HEAD + FIRST + FIRST)
    assert fault == "13: steps[1].name = 'first': another step before it has this name"
    (fault,) = faults(read, HEAD + FIRST + '[[steps]]\nkind = "merge"\nname = "First"\n')
    assert fault.startswith(
        "13: steps[1].name = 'First': another step before it has the name 'first', which differs in"
    )


@pytest.mark.parametrize("setting", ["lora_rank = 8", "lora_alpha = 4.0"])
def test_an_adapter_that_would_not_fit_is_refused_before_the_one_before_is_trained(setting: str, read: Read) -> None:
    name = setting.partition(" ")[0]
    (fault,) = faults(read, HEAD + FIRST + FIRST.replace('"first"', '"second"') + f"config = {{ {setting} }}\n")
    assert fault.startswith(f"15: steps[1].config.{name} = ")
    assert "it begins with the adapter of step 'first', which has" in fault


def test_lines_in_json(read: Read) -> None:
    text = '{"name": "demo",\n "steps": [\n {"kind": "sft",\n "name": "a",\n "examples_from": {"file":\n "no"}}]}'
    assert faults(read, text, name="recipe.json") == [
        "5: steps[0].examples_from.file = 'no': there is no such file",
    ]


@pytest.mark.parametrize("text", ["name = ", '{"name": 1, "name": 2}'])
def test_what_is_no_toml_or_json(text: str, read: Read) -> None:
    with pytest.raises(KilnError, match="cannot be parsed") as caught:
        read(text, name="recipe.json" if text.startswith("{") else "recipe.toml")
    assert caught.value.code == "KLN202"


def test_base_adapters_have_relative_paths_wherever_the_directory_was_named_from(read: Read, tmp_path: Path) -> None:
    recipe = read(HEAD + FIRST + FIRST.replace("first", "second"))
    for out in (tmp_path / "out", tmp_path / "project" / ".." / "out"):
        second = place_steps(recipe, out)[1]
        assert isinstance(second, Training)
        assert second.config.run.train.base_adapter == "../out/first/train/adapter"


def test_what_a_makefile_cannot_hold(read: Read, tmp_path: Path) -> None:
    recipe = read(HEAD + FIRST)
    with pytest.raises(KilnError, match="cannot stand in a Makefile"):
        makefile(recipe, tmp_path / "a b")
    long = json.dumps([{"messages": [{"role": "user", "content": "x" * LONGEST_LINE}]}])
    step = {"kind": "sft", "name": "a", "examples_from": {"examples": json.loads(long)}}
    recipe = read(json.dumps({"name": "d", "steps": [step]}), name="recipe.json")
    with pytest.raises(KilnError, match=r"line 1 of .*a.rows.jsonl has 100,.* more than the 100,000"):
        makefile(recipe, tmp_path / "out")
