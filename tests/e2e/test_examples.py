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
    run = load("natural_partition").main(tmp_path, num_rounds=10)
    assert run.summary["num_clients"] == 5
    (row,) = [
        row
        for row in run.summary["epsilon"]["proven"]
        if (row["view"], row["unit"], row["adjacency"]) == ("upload", "run", "zero-out")
    ]
    assert 0.99 <= row["value"] <= 1.0
    assert not any("preprocessing" in text for text in row["not_covered"])  # every bound is public


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["equinox", "torch"])
def test_a_network_of_yours_on_mnist_over_ten_institutions(framework, tmp_path, monkeypatch):
    """PyTorch: `make test-torch`, in an environment of its own."""
    pytest.importorskip(framework, reason="make test-torch")
    monkeypatch.chdir(EXAMPLES.parent)
    small = {"num_rounds": 4, "eval_every": 4, "data.records_per_client": 600, "batch_size": 30}
    values = {**small, "model.name": f"examples/{framework}_model.py:cnn"}
    report = dither.run(EXAMPLES / "mnist.toml", values=values, out=tmp_path / "run", ledger=tmp_path / "ledger")
    assert report.num_clients == 10
    assert report.num_params == (64 + 1) * 16 + (16 * 16 + 1) * 32 + (512 + 1) * 32 + (32 + 1) * 10
    assert 2.99 <= report.epsilon.main[0].value <= 3.0
    assert report.ledger is not None
    assert report.test_accuracy > 0.15
    images = np.random.default_rng(0).random((4, 784), np.float32)
    assert dither.load(tmp_path / "run").predict(images).shape == (4,)
    if framework == "torch":
        module = load("torch_model").cnn((28, 28, 1), 10)
        module.load_state_dict({name: torch_of(leaf) for name, leaf in report.params.items()})
        theirs = module(torch_of(images).reshape(4, 1, 28, 28)).detach().numpy()
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
