"""A third party's distribution, installed with pip into a clean environment: all four kinds of plugin in one run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tiny_model import write_project

DISTRIBUTION, VERSION = "kiln-plugin-weather", "1.2.3"
PLUGIN = '''
"""Rows of a weather service: a source, a template, a loss and a drop reason."""
import kiln_cli


def _convert(record):
    return kiln_cli.ToolCallRow(
        query=record.get("question"), tools=record.get("functions"), answers=record.get("reply"), row_id=record["nr"]
    )


def _in_atlantis(candidate, limits):
    city = candidate.answers.value[0]["arguments"].get("city")
    return f"the city is {city}" if city == "Atlantis" else None


@kiln_cli.hookimpl
def kiln_sources():
    return [
        kiln_cli.Source(
            name="weather_rows",
            doc="question, functions, reply",
            yields="tool_calls",
            convert=_convert,
            recognise=lambda record: "has question and reply" if {"question", "reply"} <= set(record) else None,
        )
    ]


@kiln_cli.hookimpl
def kiln_templates():
    return [
        kiln_cli.Template(
            name="weather_chat",
            doc="ChatML that numbers its turns",
            source=(
                "{% for message in messages %}"
                "{{ '<|im_start|>' + message['role'] + ' ' + loop.index|string + '\\\\n' }}"
                "{{ message['content'] + '<|im_end|>\\\\n' }}"
                "{% endfor %}"
                "{% if add_generation_prompt %}"
                "{{ '<|im_start|>assistant ' + (messages|length + 1)|string + '\\\\n' }}"
                "{% endif %}"
            ),
        )
    ]


@kiln_cli.hookimpl
def kiln_losses():
    return [kiln_cli.Loss(name="weather_loss", doc="half of the usual one", target="kiln_plugin_weather_loss:half")]


@kiln_cli.hookimpl
def kiln_drop_reasons():
    return [
        kiln_cli.DropReason(
            name="city_is_a_myth", doc="the city never was", scope="row", order=96, pointer="/answers",
            check=_in_atlantis,
        )
    ]
'''
LOSS = """
import torch
import kiln_cli


def half(hidden, project, batch):
    logits = project(hidden).float()
    nll = torch.nn.functional.cross_entropy(logits, batch.targets)
    return kiln_cli.LossOut(loss=nll / 2, metrics={"whole": float(nll)}, counts={"seen": len(batch.targets)})
"""
CONFIG = """schema = "kiln.config.v1"
[project]
seed = 3
[model]
path = "model"
id = "tiny-llama"
[[datasets]]
path = "rows.jsonl"
source = "weather_rows"
[data]
n_train = 6
n_validation = 2
n_test = 2
[admit]
template = "weather_chat"
[train]
loss = "weather_loss"
epochs = 1
lora_rank = 2
lora_alpha = 4.0
threads = 1
"""


class Site:
    """A clean environment with the distribution in it, and a project whose config names all that it adds."""

    def __init__(self, python: Path, project: Path) -> None:
        self.python = python
        self.run = project / "run"
        self.config = project / "kiln.toml"

    def kiln(self, *arguments: str | Path, plugins: str | None = None) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("KILN_", "PYTHON"))}
        if plugins is not None:
            environment["KILN_PLUGINS"] = plugins
        return subprocess.run(
            [str(self.python), "-m", "kiln_cli.app", *map(str, arguments)],
            env=environment,
            cwd=self.config.parent,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def stage(self, name: str, plugins: str | None = None, out: Path | None = None) -> subprocess.CompletedProcess[str]:
        return self.kiln(name, self.config, "--out", out or self.run, plugins=plugins)

    def document(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.run / name).read_text(encoding="utf-8"))
        return value


def _build_wheel(directory: Path) -> Path:
    info = f"kiln_plugin_weather-{VERSION}.dist-info"
    files = {
        "kiln_plugin_weather.py": PLUGIN,
        "kiln_plugin_weather_loss.py": LOSS,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {VERSION}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: by-hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[kiln_cli.plugins]\nweather = kiln_plugin_weather\n",
    }
    path = directory / f"kiln_plugin_weather-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]))
    return path


def _environment(directory: Path) -> Path:
    """A new venv; kiln and the heavy packages are those of this interpreter, so that nothing is downloaded."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True, timeout=60)
    python = directory / "bin" / "python"
    ours = sysconfig.get_paths()["purelib"]
    theirs = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.strip()
    (Path(theirs) / "kiln_itself.pth").write_text(f"import site; site.addsitedir({ours!r})\n", encoding="utf-8")
    return python


def _rows() -> bytes:
    rows = []
    for number in range(12):
        city = "Atlantis" if number == 4 else f"town {number}"
        rows.append(
            {
                "nr": number,
                "question": f"What is the weather like in town number {number}?",
                "functions": json.dumps([{"name": "weather", "description": "", "parameters": {}}]),
                "reply": json.dumps([{"name": "weather", "arguments": {"city": city}}]),
            }
        )
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Site:
    root = tmp_path_factory.mktemp("third-party")
    python = _environment(root / "venv")
    wheel = _build_wheel(root)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True, timeout=120)
    project = write_project(root / "project", tiny_model, config=CONFIG).parent
    (project / "rows.jsonl").write_bytes(_rows())
    return Site(python, project)


@pytest.fixture(scope="module")
def prepared(site: Site) -> Site:
    for stage in ("prepare", "admit"):
        done = site.stage(stage)
        assert done.returncode == 0, done.stderr
    return site


@pytest.fixture(scope="module")
def trained(prepared: Site) -> Site:
    done = prepared.stage("train")
    assert done.returncode == 0, done.stderr
    return prepared


def _the_distribution(document: dict[str, Any]) -> dict[str, Any]:
    found = [plugin for plugin in document["plugins"] if plugin["distribution"] == DISTRIBUTION]
    assert len(found) == 1, document["plugins"]
    plugin: dict[str, Any] = found[0]
    return plugin


EXPECTED = {
    "distribution": DISTRIBUTION,
    "version": VERSION,
    "sources": ["weather_rows"],
    "templates": ["weather_chat"],
    "losses": ["weather_loss"],
    "drop_reasons": ["city_is_a_myth"],
}


def test_plugins_lists_all_four_with_their_distribution(site: Site) -> None:
    text = site.kiln("plugins").stdout
    for name in ("weather_rows", "weather_chat", "weather_loss", "city_is_a_myth"):
        (line,) = [line for line in text.splitlines() if name in line.split()]
        assert f"{DISTRIBUTION} {VERSION}" in line
    value = json.loads(site.kiln("plugins", "--json").stdout)
    assert _the_distribution(value) == EXPECTED


def test_the_drop_reason_is_in_force_and_counted(prepared: Site) -> None:
    summary = prepared.document("data/drop_summary.json")
    assert summary["kiln"]["en"]["counts"]["city_is_a_myth"] == 1
    assert "city_is_a_myth" not in summary["languages"]["en"]["counts"], "counts holds the sixteen of the policy only"
    (rejected,) = (prepared.run / "data" / "rejected.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(rejected) | {"reason": "city_is_a_myth", "row_index": 5, "pointer": "/answers"} == json.loads(
        rejected
    )


def test_the_data_manifest_names_source_reason_and_distribution(prepared: Site) -> None:
    manifest = prepared.document("data_manifest.json")
    assert _the_distribution(manifest) == EXPECTED
    assert manifest["details"]["datasets"][0]["source"] == "weather_rows"
    assert "city_is_a_myth" in manifest["details"]["drop_reasons"]
    assert manifest["counts"]["en"]["counts"]["city_is_a_myth"] == 1


def test_the_admit_manifest_names_template_and_distribution(prepared: Site) -> None:
    manifest = prepared.document("admit_manifest.json")
    assert _the_distribution(manifest) == EXPECTED
    assert manifest["details"]["template"]["name"] == "weather_chat"
    assert manifest["counts"]["corpus"]["rows_kept"] == 6


def test_the_receipt_names_loss_and_distribution(trained: Site) -> None:
    receipt = trained.document("train_receipt.json")
    assert _the_distribution(receipt) == EXPECTED
    assert receipt["config"]["train"]["loss"] == "weather_loss"


def test_the_loss_was_the_one_that_trained(trained: Site) -> None:
    lines = (trained.run / "train" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    assert len(steps) == 6
    for step in steps:
        assert step["loss"] == pytest.approx(step["metrics"]["whole"] / 2)
        assert step["counts"] == {"seen": step["supervised_tokens"]}


def test_the_run_verifies_with_and_without_the_distribution(trained: Site) -> None:
    for plugins in (None, "none"):
        done = trained.kiln("verify-receipt", trained.run, plugins=plugins)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("stage", "name"), [("prepare", "weather_rows"), ("admit", "weather_chat"), ("train", "weather_loss")]
)
def test_without_the_distribution_the_config_is_refused_by_name(prepared: Site, stage: str, name: str) -> None:
    out = prepared.run.parent / f"untrained-{stage}"
    shutil.copytree(prepared.run, out, ignore=shutil.ignore_patterns("train", "train_receipt.json"))
    done = prepared.stage(stage, plugins="none", out=out)
    assert done.returncode == 2, done.stderr
    assert "KLN212" in done.stderr
    assert repr(name) in done.stderr


def test_limiting_to_the_distribution_keeps_it(site: Site) -> None:
    value = json.loads(site.kiln("plugins", "--json", plugins=DISTRIBUTION).stdout)
    assert _the_distribution(value) == EXPECTED
    value = json.loads(site.kiln("plugins", "--json", plugins="none").stdout)
    assert [plugin["distribution"] for plugin in value["plugins"]] == ["kiln-toolkit"]


def test_the_plugin_imports_nothing_of_kiln_but_its_api() -> None:
    imports = [line for text in (PLUGIN, LOSS) for line in text.splitlines() if line.startswith(("import", "from"))]
    assert imports == ["import kiln_cli", "import torch", "import kiln_cli"]
