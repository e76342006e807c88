"""What is in the wheel: three import packages and the metadata, nothing of the checkout beside them."""

from __future__ import annotations

import configparser
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"kiln_cli": "kiln_cli", "kiln_stages": "stages/kiln_stages", "kiln_plugins": "plugins/kiln_plugins"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built with the build backend itself, which is a part of the ``dev`` extra: pip would fetch one for itself."""
    out = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def _info(wheel: zipfile.ZipFile) -> str:
    (info,) = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    return info


def test_exact_top_level_names(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert tops == {*PACKAGES, _info(wheel)}
    assert _info(wheel).startswith("kiln_toolkit-")


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_whole_and_typed(wheel: zipfile.ZipFile, package: str) -> None:
    source = ROOT / PACKAGES[package]
    modules = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    packed = {name.removeprefix(f"{package}/") for name in wheel.namelist() if name.startswith(f"{package}/")}
    assert packed == modules | {"py.typed"}


def test_nothing_of_the_checkout_comes_along(wheel: zipfile.ZipFile) -> None:
    unwanted = {"tests", "fixtures", "models", "runs", "bench", "docs", "downloaded", "__pycache__"}
    for name in wheel.namelist():
        assert unwanted.isdisjoint(PurePosixPath(name).parts), name


def test_the_script_is_kiln(wheel: zipfile.ZipFile) -> None:
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel.read(f"{_info(wheel)}/entry_points.txt").decode("utf-8"))
    assert {section: dict(entry_points[section]) for section in entry_points.sections()} == {
        "console_scripts": {"kiln": "kiln_cli.app:main"}
    }


def test_the_metadata_names_license_python_and_extras(wheel: zipfile.ZipFile) -> None:
    metadata = Parser().parsestr(wheel.read(f"{_info(wheel)}/METADATA").decode("utf-8"))
    assert metadata["Name"] == "kiln-toolkit"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"train", "demo", "dev"} <= set(metadata.get_all("Provides-Extra", []))
    heavy = ("torch", "transformers", "peft")
    for requirement in metadata.get_all("Requires-Dist", []):
        if requirement.startswith(heavy):
            assert "extra ==" in requirement, f"{requirement} is no part of the plain installation"
    assert f"{_info(wheel)}/licenses/LICENSE" in wheel.namelist()
