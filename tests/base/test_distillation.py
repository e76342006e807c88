"""Settings of distillation as a config has them: defaults, what excludes what, and how many candidates are taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiln_cli.config import load_config
from kiln_cli.distillation import DistillConfig, EchoConfig, resolve_top_k
from kiln_cli.errors import KilnError


def load(tmp_path: Path, text: str) -> DistillConfig:
    path = tmp_path / "kiln.toml"
    path.write_text(f'schema = "kiln.config.v1"\n{text}', encoding="utf-8")
    return load_config(path).run.distill


@pytest.mark.parametrize(
    ("requested", "source_max", "vocabulary", "expected"),
    [
        (32, 32, 64, 32),
        (32, 31, 64, 16),
        (31, 64, 64, 16),
        (64, 64, 64, 32),
        (10**9, 10**9, 10**9, 32),
        (32, 32, 31, 16),
        (16, 16, 16, 16),
        (15, 64, 64, None),
        (32, 15, 64, None),
        (32, 32, 15, None),
    ],
)
def test_candidates_are_the_larger_of_two_sizes_that_fits(
    requested: int, source_max: int, vocabulary: int, expected: int | None
) -> None:
    assert resolve_top_k(requested, source_max, vocabulary) == expected


def test_echo_is_off_where_its_table_is_left_out(tmp_path: Path) -> None:
    assert load(tmp_path, "[distill]\ntop_k = 16\n").echo is None
    assert load(tmp_path, "[distill.echo]\n").echo == EchoConfig()
    assert load(tmp_path, "[distill.echo]\nlambda = 0.5\n").echo == EchoConfig(lambda_=0.5)
    assert load(tmp_path, "[distill]\nstable_opd = 'off'\n") == DistillConfig()


def test_faults_of_echo_are_named_with_their_line(tmp_path: Path) -> None:
    with pytest.raises(KilnError) as caught:
        load(tmp_path, "[distill.echo]\nlambda = 'x'\nmask = 1\n")
    assert "kiln.toml:3: distill.echo.lambda = 'x': expected" in caught.value.message
    assert "kiln.toml:4: distill.echo.mask is no key" in caught.value.message


@pytest.mark.parametrize(
    "setting",
    [
        "dataset = 'x'",
        "source = 'messages'",
        "map = { user = 'a', assistant = 'b' }",
        "strict = true",
        "compat = 'kiln'",
        "invalid_row_policy = 'skip'",
    ],
)
def test_a_scored_corpus_has_one_shape_and_no_policy(tmp_path: Path, setting: str) -> None:
    with pytest.raises(KilnError) as caught:
        load(tmp_path, f"[admit]\nkind = 'opd'\n{setting}\n")
    name = setting.partition(" ")[0]
    assert f"admit.{name} = " in caught.value.message
    assert "is not for kind = 'opd'" in caught.value.message


def test_settings_of_sampling_are_said_to_change_nothing(tmp_path: Path) -> None:
    assert list(DistillConfig().warnings()) == []
    found = load(tmp_path, "[distill]\ntemperature = 0.7\nmax_tokens = 10\n")
    assert [text.split(" ")[0] for text in found.warnings()] == ["distill.temperature", "distill.max_tokens"]


@pytest.mark.parametrize("text", ["[admit]\nkind = 'opd'\n", "[distill]\nteacher = 't'\n"])
def test_scored_rows_have_other_defaults_of_training(text: str, tmp_path: Path) -> None:
    path = tmp_path / "kiln.toml"
    path.write_text(f'schema = "kiln.config.v1"\n{text}', encoding="utf-8")
    train = load_config(path).run.train
    assert (train.loss, train.epochs, train.checkpoint_interval, train.rate) == ("teacher_top_k", 1, 25, 2e-3)
    assert load_config(path, ["train.optimizer=adam_w"]).run.train.rate == 1e-5
    changed = load_config(path, ["train.epochs=3", "train.checkpoint_interval=7", "train.learning_rate=0.5"]).run.train
    assert (changed.epochs, changed.checkpoint_interval, changed.rate) == (3, 7, 0.5)
    assert list(changed.warnings())
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.resolved.toml").write_bytes(load_config(path).resolved_toml(run))
    assert load_config(run / "config.resolved.toml").run.train == train


@pytest.mark.parametrize("text", ["", "[admit]\nkind = 'sft'\n[distill]\nteacher = 't'\n"])
def test_conversations_keep_theirs(text: str, tmp_path: Path) -> None:
    path = tmp_path / "kiln.toml"
    path.write_text(f'schema = "kiln.config.v1"\n{text}', encoding="utf-8")
    train = load_config(path).run.train
    assert (train.loss, train.epochs, train.checkpoint_interval, train.rate) == ("cross_entropy", 3, None, 1e-3)
