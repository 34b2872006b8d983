"""The examples run and say what they promise."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_data_with_a_natural_partition(tmp_path):
    run = load("natural_partition").main(tmp_path, rounds=10)
    assert run.summary["num_clients"] == 5
    (row,) = [
        row
        for row in run.summary["epsilon"]["proven"]
        if (row["view"], row["unit"], row["adjacency"]) == ("upload", "run", "zero-out")
    ]
    assert 0.99 <= row["value"] <= 1.0
    assert not any("preprocessing" in text for text in row["not_covered"])  # every bound is public


@pytest.mark.slow
def test_a_model_of_equinox():
    pytest.importorskip("equinox", reason="pip install 'dither[examples]'")
    accuracy, epsilon = load("equinox_model").main(rounds=10)
    assert 3.99 <= epsilon <= 4.0
    assert accuracy > 0.3  # ten classes


@pytest.mark.slow
def test_the_notebook_runs():
    nbformat = pytest.importorskip("nbformat", reason="pip install 'dither[examples]'")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)  # kept without outputs
    done = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    texts = [out.get("text", "") for cell in done.cells if cell.cell_type == "code" for out in cell.outputs]
    assert any("proven ε" in text for text in texts)
