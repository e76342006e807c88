"""``train/loss.svg``: a sound picture of the loss log, the same for a run that was cut and resumed."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from kiln_stages import report, resume, train, verify_receipt
from kiln_stages.training import loop
from kiln_stages.training.loss_curve import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Curve, draw, nice_ticks
from training.admitted_run import admitted_run

from kiln_cli.config import load_config
from kiln_cli.files import hash_file
from kiln_cli.manifests import document, read_receipt
from kiln_cli.plugins import Plugins

SVG = "{http://www.w3.org/2000/svg}"
FALLING = [4.0 - 0.02 * step for step in range(100)]


def parts(curve: Curve) -> ElementTree.Element:
    return ElementTree.fromstring(draw(curve))


def points(svg: ElementTree.Element, kind: str) -> list[tuple[float, float]]:
    (line,) = [found for found in svg.iter(f"{SVG}polyline") if found.get("class") == kind]
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.get("points", "").split())]


def test_every_step_has_its_place() -> None:
    svg = parts(Curve("a", [4.0, 2.0, 3.0, 1.0], {}, 4))
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    labels = [float(text.text or "") for text in svg.iter(f"{SVG}text") if text.get("text-anchor") == "end"]
    low, high = min(labels), max(labels)
    assert low <= 1.0 and high >= 4.0
    for step, (loss, (x, y)) in enumerate(zip([4.0, 2.0, 3.0, 1.0], points(svg, "step"), strict=True), start=1):
        assert x == pytest.approx(LEFT + step / 4 * width, abs=0.06)
        assert y == pytest.approx(TOP + (high - loss) / (high - low) * height, abs=0.06)


def test_the_mean_is_that_of_the_steps_around() -> None:
    """Of a straight line it is the line itself, but for the ends."""
    svg = parts(Curve("a", FALLING, {}, 50))
    steps = dict(points(svg, "step"))
    means = points(svg, "mean")
    assert len(means) == 96 and all(steps[x] == pytest.approx(y, abs=0.11) for x, y in means)
    assert [text.text for text in svg.iter(f"{SVG}text")].count("mean of 5 steps") == 1


def test_held_out_points_are_marked_and_told() -> None:
    svg = parts(Curve("tool-calls", FALLING, {0: 4.5, 50: 3.25, 100: 2.5}, 50))
    assert len(list(svg.iter(f"{SVG}polygon"))) == 3 and len(points(svg, "held")) == 3
    assert svg.get("role") == "img" and svg.get("aria-labelledby") == "title description"
    title, description = svg.find(f"{SVG}title"), svg.find(f"{SVG}desc")
    assert title is not None and title.text == "Loss of tool-calls, nats a supervised token"
    assert description is not None and description.text is not None
    assert description.text.startswith(
        "100 steps, 50 an epoch. The loss is 4.0000 at the first step and 2.0200 at the last"
    )
    assert description.text.endswith("4.5000 after step 0, 3.2500 after step 50, 2.5000 after step 100.")
    assert len([line for line in svg.iter(f"{SVG}line") if line.get("class") == "epoch"]) == 1


def test_both_grounds_have_colours_and_nothing_is_fetched() -> None:
    text = draw(Curve("a", FALLING, {0: 1.0}, 50)).decode()
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    for kind in ("ground", "step", "mean", "held", "grid"):
        assert re.search(rf"\.{kind} {{[^}}]*#", light) and re.search(rf"\.{kind} {{[^}}]*#", dark), kind
    assert text.count("http") == 1, "the name space alone"


def test_a_long_log_is_thinned_and_keeps_its_ends() -> None:
    losses = [2.0 + (step % 7) / 10 for step in range(50_000)]
    losses[12_345], losses[33_333] = 9.0, 0.5
    data = draw(Curve("a", losses, {}, 50_000))
    places = [y for _, y in points(ElementTree.fromstring(data), "step")]
    assert len(data) < 60_000
    height = HEIGHT - TOP - BOTTOM  # of losses from 0 to 10
    assert min(places) == pytest.approx(TOP + 0.1 * height, abs=0.1)
    assert max(places) == pytest.approx(TOP + 0.95 * height, abs=0.1)


@pytest.mark.parametrize("losses", [[1.5], [0.0, 0.0], [1e-9, 2e-9], [5e8, 7e8]])
def test_odd_logs_are_drawn(losses: list[float]) -> None:
    assert points(parts(Curve("a", losses, {}, 1)), "step")


@pytest.mark.parametrize("low, high", [(0.0, 1.0), (0.37, 5.2), (2.0, 2.0), (-1.0, 3e-3), (1e-7, 3e-7)])
def test_ticks_are_round_and_hold_the_range(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high and 2 <= len(ticks) <= 9
    assert all(len(f"{tick:g}") <= 8 for tick in ticks)


def test_a_training_leaves_it_and_the_report_names_it(tmp_path: Path, plugins: Plugins) -> None:
    config, out = admitted_run(tmp_path)
    train.run(config.replace("train", heldout_interval=5), out, plugins)
    svg = ElementTree.fromstring((out / "train" / "loss.svg").read_bytes())
    assert len(points(svg, "step")) == 12 and len(points(svg, "held")) == 4  # before, 5, 10, after
    assert report.run(out).loss_curve == str(out / "train" / "loss.svg")
    page, losses = report.page(report.run(out)), report.run(out).held_out_losses
    assert f"loss curve: {out}/train/loss.svg" in page
    assert [step for step, _ in losses] == [5, 10]
    assert all(re.search(rf"^  after step {step} +{loss:.4f}$", page, re.MULTILINE) for step, loss in losses)


def test_a_curve_of_other_losses_fails_even_under_a_sealed_receipt(tmp_path: Path, plugins: Plugins) -> None:
    config, out = admitted_run(tmp_path)
    train.run(config, out, plugins)
    path, receipt = out / "train" / "loss.svg", read_receipt(out / "train_receipt.json")
    path.write_bytes(path.read_bytes().replace(b"The loss is 5.", b"The loss is 2."))
    receipt.outputs[4] = msgspec.structs.replace(receipt.outputs[4], sha256=hash_file(path)[0])
    receipt.seal()
    (out / "train_receipt.json").write_bytes(document(receipt))
    failing = [line.name for line in verify_receipt.run(out).claims if line.status == "fails"]
    assert failing == ["the loss curve is that of the loss log"]


def test_a_cut_training_draws_what_it_has_and_a_resumed_one_the_same_as_an_uncut_one(
    tmp_path: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_config, whole = admitted_run(tmp_path / "whole")
    train.run(whole_config, whole, plugins)
    config, out = admitted_run(tmp_path / "cut")
    commit = loop.LoopState.commit

    def commit_and_signal(state: loop.LoopState, *arguments: object) -> None:
        commit(state, *arguments)  # type: ignore[arg-type]
        if state.global_step == 7:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(loop.LoopState, "commit", commit_and_signal)
        train.run(config, out, plugins)
    curve = out / "train" / "loss.svg"
    assert len(points(ElementTree.fromstring(curve.read_bytes()), "step")) == 7
    resume.run(load_config(out / "config.resolved.toml"), out, plugins)
    assert curve.read_bytes() == (whole / "train" / "loss.svg").read_bytes()


def test_of_many_held_out_losses_the_report_shows_a_few_and_the_lowest() -> None:
    losses = [(step, abs(step - 370) / 100) for step in range(10, 1000, 10)]
    shown = report._shown(losses)
    assert len(shown) <= report.SHOWN + 1 and (370, 0.0) in shown and losses[0] in shown
    assert shown == sorted(shown) and set(shown) <= set(losses)
    assert report._shown(losses[:8]) == losses[:8]
