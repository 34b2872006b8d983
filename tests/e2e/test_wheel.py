"""The wheel: what it holds, and that it runs where only it and its dependencies are."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import dither

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT)], capture_output=True, text=True
    )
    if built.returncode and "No matching distribution found for hatchling" in built.stdout + built.stderr:
        pytest.skip("the build backend cannot be fetched here")
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


def run_in(environment, folder):
    command = environment / "bin" / "dither"
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True, cwd=folder)
    assert version.stdout.strip() == dither.__version__
    quick = ["--set", "data.name=breast-cancer", "--set", "num_rounds=3", "--set", "batch_size=8", "--json"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    trained = subprocess.run(
        [command, "run", "adult", *quick, "--out", "run"],
        capture_output=True, text=True, check=True, cwd=folder, env=clean,
    )  # fmt: skip
    assert json.loads(trained.stdout)["rounds"] == 3
    where = subprocess.run(
        [environment / "bin" / "python", "-c", "import dither; print(dither.__file__)"],
        capture_output=True, text=True, check=True, cwd=folder, env=clean,
    )  # fmt: skip
    assert str(environment) in where.stdout  # the wheel's own copy, not the checkout


def test_it_holds_types_presets_and_schemas_and_names_its_extras(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith("METADATA"))
        text = archive.read(metadata).decode()
    assert "dither/py.typed" in names
    assert {f"dither/spec/presets/{name}.toml" for name in ("adult", "secure-fedavg", "nbafl", "cpfed")} <= names
    assert "dither/data/schemas/adult.toml" in names
    assert not any(name.startswith("tests/") for name in names)
    assert f"Version: {dither.__version__}" in text
    for extra in ("deploy", "web", "gpu", "dev"):
        assert f"Provides-Extra: {extra}" in text
    assert "Apache-2.0" in text


@pytest.mark.slow
def test_it_runs_beside_its_dependencies(wheel, tmp_path):
    """A new environment that sees this one's dependencies through a .pth file: quick, and offline."""
    environment = tmp_path / "env"
    venv.create(environment, with_pip=True)
    install = [environment / "bin" / "python", "-m", "pip", "install", "-qq", "--no-deps", str(wheel)]
    subprocess.run(install, check=True)
    where = [environment / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    site = Path(subprocess.check_output(where, text=True).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    run_in(environment, tmp_path)


@pytest.mark.slow
def test_it_installs_into_an_empty_environment(wheel, tmp_path):
    environment = tmp_path / "env"
    venv.create(environment, with_pip=True)
    subprocess.run([environment / "bin" / "python", "-m", "pip", "install", "-qq", str(wheel)], check=True)
    run_in(environment, tmp_path)
