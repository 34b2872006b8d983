"""A sweep: its grid; its folder, interrupted and continued to the same bits; proofs as for single runs."""

import csv
import importlib
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import dither
from dither import data
from dither.accounting import accountant
from dither.accounting.ledger.runs import Budget, Ledger
from dither.errors import BudgetExhausted, RunExists, SpecError
from dither.experiment import build, sweep
from dither.experiment.account import NOT_HERE
from dither.experiment.build import choose
from dither.experiment.plan.records import synthetic_data
from dither.experiment.report import LedgerCharge, SpentPart
from dither.experiment.sweep import batches
from dither.experiment.sweep.result import draw_sweep
from dither.experiment.sweep.run import differing, product
from dither.simulation import engine
from dither.spec import Spec
from dither.types import epsilon_text

DATASET = synthetic_data(160, 3).dataset._replace(name="adult")
BASE = Spec.from_preset("adult").with_values(
    {"num_clients": 8, "cohort_size": 4, "num_rounds": 4, "eval_every": 2, "batch_size": 2, "compare": False}
    | {
        "privacy.noise": "given",
        "privacy.noise_std": 1.0,
        "data.name": "adult",
        "local_steps": 1,
        "privacy.adjacency": "zero-out",
    }
)
PRESET = Spec.from_preset("secure-fedavg")
VARY = {"privacy.noise_std": [0.5, 2.0], "seed": [0, 1, 2]}


class Stopped(Exception):
    pass


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same sweep twice, three runs a batch: undisturbed, and stopped in its second batch and continued."""
    place = tmp_path_factory.mktemp("sweeps")
    patch = pytest.MonkeyPatch()
    patch.setattr(batches, "_MOST_RUNS", {"cpu": 3, "gpu": 3})
    program, made = engine.Simulation, []
    patch.setattr(  # all sweeps here are one program: compiled once
        engine, "Simulation", lambda *a, **k: made[0] if made else made.append(program(*a, **k)) or made[0]
    )
    arguments = {"dataset": DATASET}
    whole = sweep.sweep(BASE, VARY, out=place / "whole", **arguments)

    def stop(done, total, text):
        if text == "3/6 runs" and done > 0.6 * total:
            raise Stopped

    with pytest.raises(Stopped):
        sweep.sweep(BASE, VARY, out=place / "stopped", on_progress=stop, **arguments)
    left = {path.name for path in (place / "stopped").iterdir()}
    trained = []
    genuine = engine.train
    patch.setattr(engine, "train", lambda *a, **k: trained.append(1) or genuine(*a, **k))
    again = sweep.sweep(BASE, VARY, out=place / "stopped", **arguments)
    patch.undo()
    return place, whole, again, left, len(trained)


def test_a_stopped_sweep_continues_to_the_same_bits(folders):
    place, whole, again, left, trained = folders
    assert left == {"sweep.json", "batches"}  # no table of half a sweep
    assert trained == 1  # of two batches
    assert (place / "whole" / "curves.csv").read_bytes() == (place / "stopped" / "curves.csv").read_bytes()
    assert [one.metrics for one in whole] == [two.metrics for two in again]
    assert [one.claim for one in whole] == [two.claim for two in again]
    assert not list(place.rglob("*.tmp"))


def test_the_folder_says_what_the_sweep_returned(folders):
    place, whole, *_ = folders
    with open(place / "whole" / "runs.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(float(row["privacy.noise_std"]), int(row["seed"])) for row in rows] == [
        (std, seed) for std in VARY["privacy.noise_std"] for seed in VARY["seed"]
    ]
    assert [float(row["test_accuracy"]) for row in rows] == [one.metrics[-1]["test_accuracy"] for one in whole]
    summary = json.loads((place / "whole" / "sweep.json").read_text())
    assert summary["complete"]
    assert summary["programs"] == 1
    assert summary["batches"] == [3, 3]
    assert {"compile", "start_up", "rounds", "evaluation"} <= set(summary["timing"])
    first = summary["settings"][0]
    of_first = [float(row["loss"]) for row in rows[:3]]
    assert first["loss"] == pytest.approx(np.mean(of_first))
    assert first["loss_error"] == pytest.approx(np.std(of_first, ddof=1) / np.sqrt(3))
    assert (place / "whole" / "plot.png").read_bytes()[:4] == b"\x89PNG"
    assert f"trivial predictor {whole[0].metrics[-1]['trivial']:.3f}" in (place / "whole" / "plot.svg").read_text()
    lines = (place / "whole" / "curves.csv").read_text().splitlines()
    assert len(lines) == 1 + 6 * 2 * (len(whole[0].metrics[0]) - 1)


def test_runs_without_noise_are_a_line(folders, tmp_path):
    _, whole, *_ = folders
    values = [{"privacy.epsilon": epsilon, "seed": seed} for epsilon in (1.0, 2.0, np.inf) for seed in (0, 1)]
    runs = tuple(replace(run, spec=BASE.with_values(each)) for run, each in zip(whole, values, strict=True))
    draw_sweep(replace(whole, runs=runs, keys=("privacy.epsilon", "seed")), tmp_path / "plot.png")
    assert "dashed: without noise" in (tmp_path / "plot.svg").read_text()


def test_each_run_is_proved_as_it_would_be_alone(folders):
    _, whole, *_ = folders
    for run in whole:
        spec = run.spec
        rows = build.build_experiment(spec, dataset=DATASET).accountant().table()
        (alone,) = (
            row
            for row in rows
            if (row.view, row.adjacency, row.unit) == (spec.privacy.view, spec.adjacency, "run")
        )
        assert run.proven.value == alone.value
        assert np.isfinite(alone.value)


def test_alike_runs_are_one_question(monkeypatch):
    monkeypatch.setattr(accountant, "_ANSWERS", answers := {})
    everyone = BASE.with_values({"cohort_size": 8})  # then every seed has the same participations
    experiments = [
        build.build_experiment(everyone.with_values({"seed": seed}), dataset=DATASET) for seed in range(3)
    ]
    values = [experiment.proven_epsilon() for experiment in experiments]
    assert len(answers) == 1
    assert len(set(values)) == 1
    louder = everyone.with_values({"privacy.noise_std": 3.0})
    assert build.build_experiment(louder, dataset=DATASET).proven_epsilon() < values[0]
    assert len(answers) == 2


def test_another_grid_does_not_get_into_the_folder(folders):
    place, *_ = folders
    with pytest.raises(RunExists, match="another vary"):
        sweep.sweep(BASE, {"seed": [0, 1]}, out=place / "whole", dataset=DATASET)
    with pytest.raises(RunExists, match="another spec"):
        sweep.sweep(BASE, VARY, values={"client_lr": 0.3}, out=place / "whole", dataset=DATASET)
    (place / "taken").mkdir()
    (place / "taken" / "letter.txt").write_text("mine")
    with pytest.raises(RunExists, match="is not a sweep"):
        sweep.sweep(BASE, VARY, out=place / "taken", dataset=DATASET)


def test_a_list_of_specs_is_a_sweep_without_a_folder(monkeypatch):
    specs = [BASE.with_values({"seed": seed}) for seed in range(2)]
    made = {n: batches.Outcome(spec, [{"round": 1}], None, np.zeros(1)) for n, spec in enumerate(specs)}
    monkeypatch.setattr(batches, "train_batches", lambda plan, *, on_batch, **_: on_batch(made))
    found = dither.sweep(specs, dataset=DATASET)
    assert [run.spec for run in found] == specs
    assert [run.metrics for run in found] == [[{"round": 1}]] * 2
    assert found.keys == ("seed",)
    assert [run.proven for run in found] == [None, None]


# The grid


def test_values_and_ranges():
    found = sweep.parse_vary(["privacy.epsilon=0.1,inf", "seed=0:3,7", "model.hidden=[8],[8, 4]", "method=a.b"])
    assert found == {
        "privacy.epsilon": [0.1, float("inf")],
        "seed": [0, 1, 2, 7],
        "model.hidden": [[8], [8, 4]],
        "method": ["a.b"],
    }
    assert sweep.parse_vary(["num_rounds=10:40:10"]) == {"num_rounds": [10, 20, 30]}


def test_the_product_has_every_combination_once_the_last_key_fastest():
    specs = product(PRESET, {"privacy.epsilon": [0.5, 1], "seed": range(3)}, {"num_rounds": 5})
    assert [(s.privacy.epsilon, s.seed) for s in specs] == [(e, s) for e in (0.5, 1.0) for s in (0, 1, 2)]
    assert {spec.num_rounds for spec in specs} == {5}
    assert differing(specs) == ["seed", "privacy.epsilon"]


@pytest.mark.parametrize(
    ("vary", "values", "message"),
    [
        ({"privacy.epsilonn": [1]}, {}, "unknown key 'privacy.epsilonn'; did you mean 'privacy.epsilon'?"),
        ({"method_options.sensitivty": ["clip"]}, {}, "method_options.sensitivty"),
        ({"privacy.epsilon": [1, -1]}, {}, "privacy.epsilon=-1.0 must be above 0"),
        ({"seed": ["many"]}, {}, "seed='many' must be a whole number"),
        ({"cohort_size": [10, 101]}, {}, "cohort_size=101 exceeds num_clients=100"),
        ({}, {}, "nothing varies"),
        ({"seed": []}, {}, "seed has no value to take"),
        ({"seed": [1, 2, 1]}, {}, "runs 0 and 2 of the sweep are the same"),
        ({"privacy.epsilon": [1, 1.0]}, {}, "are the same"),
        ({"seed": [1]}, {"seed": 2}, "seed is both set and varied"),
    ],
)
def test_what_is_refused(vary, values, message):
    with pytest.raises(SpecError) as error:
        product(PRESET, vary, values)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["seed"], "not of the form"),
        (["seed="], "not of the form"),
        (["seed=1,,2"], "an empty value"),
        (["seed=5:5"], "empty range"),
        (["seed=5:0"], "empty range"),
        (["seed=0:2", "seed=3"], "given twice"),
    ],
)
def test_what_vary_refuses(texts, message):
    with pytest.raises(SpecError) as error:
        sweep.parse_vary(texts)
    assert message in str(error.value)


def own_records(tmp_path):
    rng = np.random.default_rng(0)
    rows = [f"{rng.normal():.5f},{'ab'[int(rng.random() < 0.5)]}" for _ in range(120)]
    for name, part in (("mine.csv", rows[:90]), ("test.csv", rows[90:])):
        (tmp_path / name).write_text("\n".join(["x,y", *part]) + "\n")
    return {
        "data.path": str(tmp_path / "mine.csv"),
        "data.label": "y",
        "num_clients": 2,
        "num_rounds": 2,
        "local_steps": 1,
        "eval_every": 2,
    }


def test_private_runs_that_cannot_be_compared_or_kept_are_refused_before_anything_is_made(tmp_path):
    values = own_records(tmp_path)
    with pytest.raises(SpecError, match="compared on test records"):
        sweep.sweep(values, {"seed": [0, 1]}, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    public_test = {"data.test_path": str(tmp_path / "test.csv"), "data.test_public": True}
    with pytest.raises(SpecError, match="give out=FOLDER"):
        sweep.sweep({**values, **public_test}, {"seed": [0, 1]})
    with pytest.raises(SpecError, match="train side by side are not charged"):
        batches.train_specs([choose(values).spec])


def test_own_records_are_not_swept_uncharged_as_a_given_data_set(tmp_path):
    """The spec names a set of the catalogue, so that nothing was private, and nothing was charged."""
    own = data.load(path=own_records(tmp_path)["data.path"], label="y")
    with pytest.raises(SpecError, match="your own records"):
        sweep.sweep(BASE, VARY, dataset=own)
    table = pd.read_csv(tmp_path / "mine.csv")
    several = data.load(records=[table[:30], table[30:]], label="y")
    with pytest.raises(SpecError, match="your own records"):
        sweep.sweep([BASE, BASE.with_values({"seed": 1})], dataset=several)
    by_hand = own._replace(record_hashes=None)  # as of Dataset(...): nothing is known of where they come from
    for values in ({}, {"data.path": str(tmp_path / "mine.csv"), "data.public": True, "data.label": "y"}):
        with pytest.raises(SpecError, match="your own records"):
            sweep.sweep(BASE, VARY, values=values, dataset=by_hand)


def test_runs_are_not_compared_on_test_records_that_nobody_called_public(tmp_path):
    values = own_records(tmp_path) | {"data.public": True, "data.test_path": str(tmp_path / "test.csv")}
    with pytest.raises(SpecError, match="compared on test records"):
        sweep.sweep(values, {"seed": [0, 1]})


def test_of_several_data_sets_the_one_that_spent_most_is_named(monkeypatch):
    """Where the path varies: "about the same records", with what was spent on the last one."""
    spent, specs = {"a.csv": 2.0, "b.csv": 0.5}, ["a.csv", "a.csv", "b.csv", "b.csv"]
    module = importlib.import_module("dither.experiment.sweep.run")

    def parts(report, ledger):
        return (SpentPart("together", spent[report.ledger.dataset], 1e-5, "terms", ("gap",)),)

    monkeypatch.setattr(module, "_place", lambda folder, spec: spec)
    monkeypatch.setattr(module, "load", lambda path: SimpleNamespace(ledger=LedgerCharge("ledger", path)))
    monkeypatch.setattr(module, "spent_parts", parts)
    said = [
        "the 4 runs are about 2 data sets: all that was charged for the one that spent most comes to ε = 2 at δ = "
        "1e-05 (terms)",
        "of that ε not covered: gap",
    ]
    assert module._spent_note(specs, None, None) == said
    assert (
        "2 runs are about the same records: all that was charged for these comes to ε = 0.5 at"
        in (module._spent_note(specs[2:], None, None)[0])
    )
    one = SpentPart("together", 0.7, 1e-5, "terms", (NOT_HERE,))  # with a private schema, or without
    for split in ((), (one,)):
        monkeypatch.setattr(module, "spent_parts", lambda report, ledger, split=split: split)
        (said,) = module._spent_note(specs, None, None)
        assert said.startswith("the ε of the 4 runs adds up")
        assert "0.7" not in said


@pytest.mark.slow
def test_each_run_of_a_private_sweep_is_charged(tmp_path):
    ledger = tmp_path / "ledger.sqlite"
    values = own_records(tmp_path) | {"data.test_path": str(tmp_path / "test.csv"), "data.test_public": True}
    result = sweep.sweep(values, {"privacy.epsilon": [0.5, 1.0]}, out=tmp_path / "out", ledger=ledger)
    assert [round(row["proven_epsilon"], 2) for row in result.table()] == [0.5, 1.0]
    book = Ledger(ledger)
    (dataset,) = book.datasets()
    assert len(book.spent(dataset)[0].runs) == 2
    assert 1.0 < book.spent(dataset)[0].epsilon < 1.5
    assert f"comes to ε = {epsilon_text(book.spent(dataset)[0].epsilon, digits=4)}" in result.warnings()[0]
    assert "train_loss" not in (tmp_path / "out" / "curves.csv").read_text()
    again = sweep.sweep(values, {"privacy.epsilon": [0.5, 1.0]}, out=tmp_path / "out", ledger=ledger)
    assert again.table() == result.table()
    assert len(book.spent(dataset)[0].runs) == 2  # nothing was trained again
    book.set_budget(dataset, Budget(1.3, 1e-3, "upload", "zero-out"))
    with pytest.raises(BudgetExhausted):
        sweep.sweep(values, {"privacy.epsilon": [2.0]}, out=tmp_path / "more", ledger=ledger)


@pytest.mark.slow
def test_records_that_are_declared_public_are_swept_without_a_charge(tmp_path, monkeypatch):
    monkeypatch.setenv("DITHER_LEDGER", str(tmp_path / "ledger.sqlite"))
    values = own_records(tmp_path) | {"data.public": True}
    assert len(sweep.sweep(values, {"seed": [0, 1]})) == 2
    assert not (tmp_path / "ledger.sqlite").exists()
    dither.run({**values, "data.public": False}, out=tmp_path / "private")
    with pytest.raises(SpecError, match=r"was charged to .* as private"):
        dither.run(values, out=tmp_path / "public")
    with pytest.raises(SpecError, match=r"was charged to .* as private"):
        sweep.sweep(values, {"seed": [0, 1]})
