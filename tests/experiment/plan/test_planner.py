"""`dither.plan`: theory where the bound says something, measurement where it does not, words where nothing can."""

import dataclasses

import numpy as np
import pytest

import dither
from dither import data
from dither.cli import plans
from dither.errors import SpecError
from dither.experiment import build
from dither.experiment.folder import Unfinished
from dither.experiment.plan import Infeasible, Trial, estimate, records
from dither.experiment.plan.candidates import FIRST_SEED, Trainer
from dither.experiment.plan.planner import draw_plan
from dither.spec import Spec

# A loss for which Theorem 2 of CPFed says something: strongly convex, far from its minimum.
FRIENDLY = {
    "smoothness": 1.0,
    "pl_constant": 0.5,
    "example_lipschitz": 1.0,
    "gradient_variance": 0.5,
    "initial_gap": 50.0,
}
SYNTHETIC = {"records": 4000, "dim": 4, "clients": 4, "delta": 1e-5}
FEW = {"model": "logistic", "extras": False, "grid": {"local_steps": [1, 4], "num_rounds": [10, 80]}}


@pytest.fixture(scope="module")
def by_theory():
    return dither.plan("cpfed", epsilon=4.0, constants=FRIENDLY, **FEW, **SYNTHETIC)


@pytest.fixture(scope="module")
def measured():
    """Breast-cancer records, half of them declared public: the bound is vacuous, so the plan is measured."""
    return dither.plan(
        "cpfed",
        epsilon=8.0,
        clients=4,
        model="logistic",
        proxy="breast-cancer",
        public_fraction=0.5,
        values={"data.features": "all"},
        grid={
            "num_rounds": [5, 20],
            "cohort_size": [4],
            "local_steps": [1],
            "batch_size": [56],
            "privacy.clip_norm": [1.0],
        },
        effort="quick",
        seeds=2,
    )


def test_theory_decides_where_its_bound_says_something(by_theory):
    bounds = by_theory.bounds
    assert by_theory.mode == "theory"
    assert not bounds.vacuous
    assert by_theory.score == np.nanmin(bounds.total) < bounds.trivial
    np.testing.assert_allclose(sum(bounds.terms.values()), bounds.total)
    assert {"optimisation", "privacy_noise", "gradient_variance"} <= set(bounds.terms)
    assert 0.998 * 4.0 < by_theory.proven_epsilon <= 4.0
    assert all(holds for text, holds in by_theory.conditions if "5ηL" in text)
    assert by_theory.constants.sources["smoothness"] == "given"
    assert "synthetic" in by_theory.constants.sources["lipschitz"]
    assert any("synthetic" in note for note in by_theory.notes)


def test_a_vacuous_bound_gives_way_to_measurement(measured):
    assert measured.mode == "empirical"
    assert measured.bounds.vacuous
    assert "the bound is vacuous" in measured.notes[0]
    assert "measurement" in measured.notes[1]
    best = measured.search.best
    assert best.score("accuracy") == max(
        t.score("accuracy") for t in measured.search.trials if len(t.accuracy) == 2
    )
    assert best.mean_accuracy > 0.8
    assert measured.seconds > 0
    assert {trial.epsilon for trial in measured.frontier} == {2.0, 4.0, 16.0, 32.0}
    front = measured.pareto()
    assert len(front) > 1
    assert [trial.epsilon for trial in front] == sorted(trial.epsilon for trial in front)


@pytest.mark.slow
def test_the_plan_runs_unchanged_within_its_budget(measured, tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text(measured.to_toml(), encoding="utf-8")
    assert Spec.from_any(file) == measured.spec
    run = dither.run(file, out=tmp_path / "run")
    rows = [
        row
        for row in run.summary["epsilon"]["proven"]
        if row["view"] == "upload" and row["adjacency"] == "replace-one" and row["unit"] == "run"
    ]
    assert rows[0]["value"] <= 8.0
    assert rows[0]["value"] == pytest.approx(measured.proven_epsilon, rel=1e-3)
    assert any("private part" in note for note in build.load_data(measured.spec).notes)


def test_the_picture_is_drawn(measured, by_theory, tmp_path):
    for number, made in enumerate((measured, by_theory)):
        draw_plan(made, tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").read_bytes()[:4] == b"\x89PNG"
    drawn = (tmp_path / "0.svg").read_text()
    assert f"the choice without noise {measured.search.without_noise:.3f}" in drawn


def test_the_tables_say_what_was_chosen_and_why(measured, by_theory, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    plans.print_plan(measured)
    shown = capsys.readouterr().out
    for words in (
        "measured on the proxy",
        "the bound is vacuous",
        "claimed ε",
        "proven ε",
        "uploads",
        "time",
        "Pareto front",
    ):
        assert words in shown
    plans.print_plan(by_theory)
    shown = capsys.readouterr().out
    for words in ("theorem", "optimisation", "privacy noise", "smoothness", "given", "its neighbours", "share"):
        assert words in shown
    report = by_theory.to_dict()
    assert sum(report["terms"].values()) == pytest.approx(by_theory.score)
    assert float(report["neighbours"][0]["bound"]) == pytest.approx(by_theory.score, rel=1e-3)
    assert len(report["neighbours"]) > 2


def test_private_records_are_refused():
    with pytest.raises(SpecError, match="would have to be charged"):
        dither.plan("cpfed", epsilon=1.0)
    own = {"data.path": "private.csv", "data.name": "", "data.label": "y"}
    with pytest.raises(SpecError, match=r"own private data.*public-fraction"):
        dither.plan("cpfed", epsilon=1.0, proxy="private.csv", records=100, values=own)


def test_a_share_of_a_file_needs_a_schema(tmp_path):
    rng = np.random.default_rng(0)
    lines = ["a,b,y", *(f"{u:.3f},{v:.3f},{int(u > v)}" for u, v in rng.random((200, 2)))]
    (tmp_path / "own.csv").write_text("\n".join(lines))
    with pytest.raises(SpecError, match="has no schema"):
        dither.plan(
            "cpfed",
            epsilon=1.0,
            proxy=str(tmp_path / "own.csv"),
            public_fraction=0.5,
            values={"data.label": "y", "data.features": "all"},
        )


def test_the_impossible_is_answered_in_words():
    with pytest.raises(
        Infeasible, match=r"leaves no signal: .* nearest feasible: epsilon=\d.*clients of 1000 records"
    ):
        dither.plan(
            "nbafl",
            epsilon=0.01,
            mode="empirical",
            model="logistic",
            values={"data.partition": "iid"},
            effort="quick",
            **SYNTHETIC,
        )
    with pytest.raises(Infeasible, match="cohort_size=9 exceeds the 4 clients; nearest feasible: cohort_size=4"):
        dither.plan("cpfed", epsilon=1.0, model="logistic", values={"cohort_size": 9}, **SYNTHETIC)
    with pytest.raises(Infeasible, match="nearest feasible: batch_size=1000"):
        dither.plan(
            "cpfed", epsilon=1.0, mode="empirical", model="logistic", grid={"batch_size": [5000]}, **SYNTHETIC
        )
    with pytest.raises(Infeasible, match="3 records cannot be dealt to 4 clients"):
        dither.plan("cpfed", epsilon=1.0, model="logistic", records=3, dim=4, clients=4)
    quick = {"mode": "empirical", "effort": "quick", "adjacency": "add/remove"}
    with pytest.raises(Infeasible, match="no noise has a proven ε"):
        dither.plan("cpfed", epsilon=1.0, model="logistic", **quick, **SYNTHETIC)


def test_bad_requests_are_named():
    for words, arguments in {
        "mode='guess'": {"mode": "guess"},
        "metric='luck'": {"metric": "luck"},
        "epsilon=inf": {"epsilon": float("inf")},
        "unknown constant 'smothness'; did you mean 'smoothness'": {"constants": {"smothness": 1.0}},
        "dim=5 does not fit": {"model": "softmax", "dim": 5},
        "needs a --proxy": {"model": "mlp"},
    }.items():
        asked = {"epsilon": 1.0, "model": "logistic", **SYNTHETIC, **arguments}
        with pytest.raises(SpecError, match=words):
            dither.plan("cpfed", **asked)


def test_constants_of_a_known_loss():
    """On records whose Hessian is known: x uniform on the axes, so that L is the largest mean square over 4."""
    material = records.synthetic_data(2000, 3)
    spec = Spec.from_preset("cpfed").with_values({"model.name": "logistic", "num_clients": 4, "cohort_size": 4})
    found = estimate(spec, material)
    ones = np.concatenate([material.dataset.x_train, np.ones((2000, 1))], axis=1)
    largest = np.linalg.eigvalsh(ones.T @ ones / 2000)[-1] / 4
    assert found.smoothness == pytest.approx(largest, rel=0.03)  # fewer records are looked at
    assert found.example_lipschitz <= np.linalg.norm(ones, axis=1).max()
    assert 0 < found.strong_convexity <= found.smoothness
    assert found.pl_constant <= found.smoothness * 1.01
    assert found.dissimilarity >= 1
    assert found.initial_gap > 0
    assert set(found.sources) == {f.name for f in dataclasses.fields(found)} - {"sources"}


def test_a_proxy_is_brought_to_the_size_of_the_private_records():
    known = data.load("breast-cancer")
    small = records.proxy_data(known, 100, "a proxy").dataset
    large = records.proxy_data(known, 1000, "a proxy").dataset
    assert (len(small.y_train), len(large.y_train)) == (100, 1000)
    assert len(np.unique(small.x_train, axis=0)) == 100  # no repeats where there are enough
    for made in (small, large):  # no record is both trained on and scored
        trained = {row.tobytes() for row in made.x_train}
        assert not trained & {row.tobytes() for row in made.x_test}
        assert len(made.y_test) == round(0.2 * len(known.y_train))
    assert not np.shares_memory(small.x_test, known.x_test)


def test_the_search_finds_the_better_rate_and_uses_its_own_seeds(measured):
    good, bad = (
        Trial(
            dataclasses.replace(
                measured.candidate,
                spec=measured.spec.with_values({"client_lr": rate}),
                point={**measured.candidate.point, "client_lr": rate},
            )
        )
        for rate in (0.5, 1e-9)
    )
    trainer = Trainer(records.synthetic_data(228, 4).dataset, Unfinished(None, "plan", 0))
    trials = trainer.run([bad, good], range(2))
    assert [len(trial.accuracy) for trial in trials] == [2, 2]
    assert trials[1].mean_loss < trials[0].mean_loss
    assert trials[0].mean_loss == pytest.approx(np.log(2), abs=1e-3)
    assert FIRST_SEED > 10**5
