"""Tests of `dither.account` and of how results show themselves."""

import numpy as np
import pandas as pd
import pytest

import dither
from dither import data
from dither.accounting.ledger import Ledger
from dither.experiment import build
from dither.experiment.report import Overview

VALUES = {
    "num_rounds": 4,
    "num_clients": 4,
    "cohort_size": 4,
    "data.name": "breast-cancer",
    "data.features": "all",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return dither.run("cpfed", values=VALUES, out=tmp_path_factory.mktemp("account") / "run")


def test_account_takes_what_run_takes(tmp_path, finished):
    spec = dither.Spec.from_any("cpfed").with_values(VALUES)
    (tmp_path / "spec.toml").write_text(spec.to_toml())
    expected = dither.account("cpfed", values=VALUES)
    assert dither.account(spec) == expected
    assert dither.account(tmp_path / "spec.toml") == expected
    assert dither.account(spec.to_dict()) == expected
    assert dither.account(finished.folder).epsilon == finished.epsilon
    assert expected.epsilon.proven().value == pytest.approx(finished.epsilon.proven().value, rel=1e-9)


def test_the_same_question_is_answered_from_the_cache_and_another_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("DITHER_ACCOUNT_CACHE", str(tmp_path / "answers"))
    first = dither.account("cpfed", values=VALUES)
    (kept,) = (tmp_path / "answers").glob("*.json")
    monkeypatch.setattr(build, "build_experiment", None)  # nothing can be computed any more
    assert dither.account("cpfed", values=VALUES) == first
    with pytest.raises(TypeError):
        dither.account("cpfed", values={**VALUES, "privacy.delta": 1e-6})
    kept.write_text(kept.read_text()[:50])
    with pytest.raises(TypeError):
        dither.account("cpfed", values=VALUES)


def test_answers_for_your_own_records_are_never_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("DITHER_ACCOUNT_CACHE", str(tmp_path / "answers"))
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x=rng.normal(size=(80, 3)).astype(np.float32), y=rng.integers(0, 2, 80))
    own = {**VALUES, "data.name": "", "batch_size": 8, "data.path": str(tmp_path / "own.npz")}
    assert dither.account("cpfed", values=own).epsilon.table
    assert not (tmp_path / "answers").exists()


def test_every_bound_is_listed_when_asked_for(finished):
    assert not dither.account(finished.folder).tried
    report = dither.account(finished.folder, every_recipe=True, ex_ante=True)
    assert len(report.tried) > len(report.epsilon.table)
    assert report.ex_ante


def test_results_fit_a_screen(finished):
    results = [finished, dither.account(finished.folder), dither.sweep("cpfed", {"seed": [0, 1]}, values=VALUES)]
    for result in results:
        assert isinstance(result, Overview)
        lines = repr(result).splitlines()
        assert 2 <= len(lines) <= 24
        assert max(map(len, lines)) <= 100
        assert "proven" in repr(result)
        assert result._repr_html_().startswith("<table>")


def test_every_public_name_can_be_had():
    for name in dither.__all__:
        assert getattr(dither, name) is not None


def test_an_interrupted_run_of_a_method_that_stops_early_is_accounted(tmp_path):
    values = {
        **VALUES, "method": "dp-scaffold", "randomness": "os", "eval_every": 1, "batch_size": 16,
        "batch_sampling": "fixed", "privacy.noise": "given", "privacy.noise_std": 0.5, "model.name": "logistic",
        "method_options.stop_at_budget": "proven",
    }  # fmt: skip
    budget = build.build_experiment(dither.Spec().with_values(values)).proven_epsilon() * 1.001  # of four rounds
    spec = dither.Spec().with_values(values | {"num_rounds": 30, "privacy.epsilon": budget})

    def killed(row):
        if row["round"] == 2:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        dither.run(spec, out=tmp_path / "run", checkpoint_seconds=1e9, on_evaluation=killed)
    experiment = build.build_experiment(spec)
    assert build.planned_rounds(experiment) == 4
    again = experiment.proven_epsilon(begun=[(0, 2), (0, 4)])  # without a checkpoint all is made again
    assert dither.account(tmp_path / "run").epsilon.proven().value == again > experiment.proven_epsilon()


def test_every_bound_is_listed_beside_all_that_was_spent(tmp_path):
    """Rounds that a kill undid, and other charges, were left out of what came to everything together."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"age": rng.integers(20, 90, 200), "sick": rng.choice(["no", "yes"], 200)})
    table.to_csv(tmp_path / "own.csv", index=False)
    label, age = data.Label("sick", ("no", "yes")), data.Numeric.with_bounds("age", (0.0, 100.0), "private")
    schema = data.Schema(label, (age,), privacy=data.schema.SchemaPrivacy(0.5, 1e-6))
    schema.save(tmp_path / "schema.toml")
    values = {
        **VALUES, "data.name": "", "data.path": str(tmp_path / "own.csv"), "batch_size": 8, "eval_every": 1,
        "data.schema": str(tmp_path / "schema.toml"), "privacy.noise": "proven", "privacy.epsilon": 1.0,
    }  # fmt: skip
    book = Ledger(tmp_path / "ledger.sqlite")
    options = {"ledger": book.path, "checkpoint_seconds": 1e9}

    def killed(row):
        if row["round"] == 3:
            raise RuntimeError("killed")

    spec = dither.Spec.from_any("cpfed").with_values(values)
    with pytest.raises(RuntimeError, match="killed"):
        dither.run(spec, out=tmp_path / "run", on_evaluation=killed, **options)
    run = dither.run(spec, resume=tmp_path / "run", **options)
    assert run.repeated_rounds == 3
    plain = dither.account(run.folder).split
    assert dither.account(run.folder, every_recipe=True).split == plain
    assert plain[-1].epsilon > 1.01
    moved = dither.account(run.folder, every_recipe=True, ledger=tmp_path / "gone.sqlite").split
    assert moved[-1].epsilon > 0.5 + plain[-1].epsilon - 0.01
