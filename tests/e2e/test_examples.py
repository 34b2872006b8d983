"""The examples run and say what they promise."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import dither

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
def test_a_model_of_equinox(tmp_path):
    report = load("equinox_model").main(rounds=10, out=tmp_path / "run")
    assert 3.99 <= report.epsilon.main[0].value <= 4.0
    assert report.test_accuracy > 0.3  # ten classes


@pytest.mark.slow
def test_a_model_of_torch(tmp_path):
    """`make test-torch`, in an environment of its own."""
    pytest.importorskip("torch", reason="make test-torch")
    name = f"{EXAMPLES / 'torch_model.py'}:cnn"
    values = {"data.name": "digits", "num_clients": 4, "cohort_size": 4, "num_rounds": 5, "batch_size": 32}
    report = dither.run("adult", values={**values, "model.name": name, "compare": False}, out=tmp_path / "run")
    assert report.num_params == 16 * 9 + 16 + 2 * 16 + 16 * 16 * 10 + 10
    assert report.epsilon.main[0].value <= 1
    images = np.random.default_rng(0).random((4, 64), np.float32)
    weights = {name: torch_of(leaf) for name, leaf in report.params.items()}
    module = load("torch_model").cnn((8, 8, 1), 10)
    module.load_state_dict(weights)
    theirs = module(torch_of(images).reshape(4, 1, 8, 8)).detach().numpy()
    np.testing.assert_allclose(report.model.apply(report.params, images), theirs, rtol=1e-4, atol=1e-4)


def torch_of(array):
    import torch

    return torch.from_numpy(np.array(array))


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


def test_the_notebook_is_stored_with_its_outputs():
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    shown = [cell["outputs"] for cell in cells if cell["cell_type"] == "code"]
    kinds = {output["output_type"] for outputs in shown for output in outputs}
    assert kinds == {"stream", "display_data", "execute_result"}
    assert not any(output["output_type"] == "error" for outputs in shown for output in outputs)
