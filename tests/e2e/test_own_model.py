"""A model in a file of yours, or given as an object, everywhere a built-in one works."""

import hashlib
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import dither
from dither import models
from dither.cli import app
from dither.errors import FederationError, RunExists, SpecError
from dither.federation import agreement, messages
from dither.spec import code
from tests.federation.parties import Parties, assert_simulated, small_spec

FILE = """\
import equinox as eqx


def net(input_shape, num_outputs, key, width=4):
    return eqx.nn.MLP(input_shape[0], num_outputs, width, depth=1, key=key)
"""
VALUES = {
    "data.name": "breast-cancer",
    "num_clients": 3,
    "cohort_size": 3,
    "num_rounds": 2,
    "eval_every": 1,
    "batch_size": 8,
    "compare": False,
}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with my_model.py, which is where commands are given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model.py").write_text(FILE)
    return {**VALUES, "model.name": "my_model.py:net"}


@pytest.mark.slow
def test_a_file_of_yours_is_trained_proved_resumed_and_used(own, tmp_path):
    report = dither.run("adult", values=own, out="run", ledger="ledger.sqlite")
    assert report.num_params == 30 * 4 + 4 + 4 * 2 + 2
    assert report.epsilon.proven("server sees uploads").value <= 1
    assert dither.account("adult", values=own).epsilon.main[0].value == report.epsilon.main[0].value
    # What was trained is in the folder: the file may go.
    (tmp_path / "my_model.py").unlink()
    x = np.random.default_rng(0).random((5, 30), np.float32)
    assert dither.load("run").predict(x).shape == (5,)


@pytest.mark.slow
def test_every_command_that_takes_a_spec_takes_a_file_of_yours(own):
    """account, sweep, audit, an interrupted run and predictions, as for a model of Dither's."""

    def output(*command):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        return result.output

    def stop(row):
        raise KeyboardInterrupt

    settings = [
        word for key, value in own.items() for word in ("--set", f"{key}={value}".replace("False", "false"))
    ]
    assert "proven" in output("account", "adult", *settings)
    output("sweep", "adult", *settings, "--vary", "seed=0,1", "--out", "sweep")
    output("audit", "adult", *settings, "--trials", "200", "--rounds", "1")
    with pytest.raises(KeyboardInterrupt):
        dither.run("adult", values=own, out="run", on_evaluation=stop, checkpoint_seconds=0)
    output("run", "--resume", "run")
    dataset = dither.data.load("breast-cancer")
    np.savez("records.npz", x=dataset.x_test)
    output("predict", "run", "--data", "records.npz", "--out", "predictions.csv")
    assert len(Path("predictions.csv").read_text().splitlines()) == len(dataset.x_test) + 1


@pytest.mark.slow
def test_a_changed_file_does_not_continue_a_run(own, tmp_path):
    def stop(row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dither.run("adult", values=own, out="run", on_evaluation=stop, checkpoint_seconds=0)
    (tmp_path / "my_model.py").write_text(FILE.replace("depth=1", "depth=1, use_bias=False"))
    with pytest.raises(RunExists, match=r"another (spec|model)"):
        dither.run("adult", values=own, resume="run")
    (tmp_path / "my_model.py").write_text(FILE)
    assert dither.run("adult", values=own, resume="run").rounds == 2


@pytest.mark.slow
def test_an_object_is_trained_and_loaded_again(tmp_path):
    model = models.mlp(30, 2, (4,))
    first = dither.run("adult", values=VALUES, model=model, out=tmp_path / "object")
    built_in = {**VALUES, "model.name": "mlp", "model.hidden": [4]}
    second = dither.run("adult", values=built_in, out=tmp_path / "name")
    for ours, theirs in zip(jax.tree.leaves(first.params), jax.tree.leaves(second.params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert len(dither.sweep("adult", {"seed": [0, 1]}, values=VALUES, model=model)) == 2
    code._objects.clear()  # as in another process
    with pytest.raises(SpecError, match=r"given as a Python object: give it again \(model=...\)"):
        dither.load(tmp_path / "object")
    assert dither.load(tmp_path / "object", model=model).params.keys() == first.params.keys()


@pytest.mark.slow
def test_a_federation_trains_the_file_that_its_parties_approved(own, tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "_LOOK_SECONDS", 0.0)
    spec = small_spec(**{"model.name": "my_model.py:net", "secagg.mode": "real"})
    parties = Parties(tmp_path, spec)
    coordinator = parties.coordinator()
    coordinator.run()
    assert_simulated(coordinator, parties)
    name = coordinator.agreement.spec.model.name
    assert name == f"my_model.py#{hashlib.sha256(FILE.encode()).hexdigest()}:net"


def test_a_party_takes_no_file_that_its_owner_did_not_approve(own, monkeypatch):
    spec = agreement.federated_spec(small_spec(**{"model.name": "my_model.py:net"}), 4, "x")
    terms = agreement.Agreement(
        federation="f", run="r1", spec=spec, schema=None, classes=("0", "1"), num_features=30, image_shape=(),
        names=("a", "b", "c", "d"), sizes=(9,) * 4,
    ).to_dict()  # fmt: skip
    assert agreement.Agreement.from_dict(terms).spec.model == spec.model
    monkeypatch.setattr(code, "_approved", {})  # as on a machine whose owner approved nothing
    with pytest.raises(FederationError, match="approve your own file with --model FILE"):
        agreement.Agreement.from_dict(terms)
    terms["spec"]["model"]["name"] = "my_model.py:net"  # a path on the party's machine is no approval
    with pytest.raises(FederationError, match="not one of Dither's"):
        agreement.Agreement.from_dict(terms)
    with pytest.raises(SpecError, match="needs its model as a file"):
        agreement.federated_spec(small_spec(**{"model.name": models.softmax(3, 2)}), 4, "x")
