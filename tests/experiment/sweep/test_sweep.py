"""A sweep's folder: interrupted and continued to the same bits, proofs as for single runs, tables that agree."""

import csv
import json

import numpy as np
import pytest

from dither import api
from dither.accounting import accountant
from dither.errors import RunExists, SpecError
from dither.experiment import build, sweep
from dither.experiment.plan.records import synthetic_data
from dither.experiment.sweep import batches
from dither.simulation import engine, timing
from dither.spec import Spec

DATASET = synthetic_data(160, 3).dataset
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
    lines = (place / "whole" / "curves.csv").read_text().splitlines()
    assert len(lines) == 1 + 6 * 2 * (len(whole[0].metrics[0]) - 1)


def test_each_run_is_proved_as_it_would_be_alone(folders):
    _, whole, *_ = folders
    for run in whole.runs:
        spec = run.outcome.spec
        rows = build.build_experiment(spec, dataset=DATASET).accountant().table()
        (alone,) = (
            row
            for row in rows
            if (row["view"], row["adjacency"], row["unit"]) == (spec.privacy.view, spec.adjacency, "run")
        )
        assert run.proven.value == alone["value"]
        assert np.isfinite(alone["value"])


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


def test_memory_splits_a_sweep():
    experiment = build.build_experiment(BASE, dataset=DATASET)
    each, shared = batches.run_bytes(experiment, "cpu"), batches.shared_bytes(experiment, "cpu")
    assert batches.runs_at_once(experiment, "cpu", shared + 3.5 * each) == 3
    assert batches.runs_at_once(experiment, "cpu", shared / 2) == 1  # one run is made whatever it takes
    assert batches.parse_bytes("4GB") == 4e9
    assert batches.parse_bytes("1.5 GiB") == 1.5 * 2**30
    assert batches.parse_bytes("2e9") == 2e9
    for bad in ("", "much", "-1GB", "0", "4XB", "nan"):
        with pytest.raises(SpecError, match="amount of memory"):
            batches.parse_bytes(bad)


def test_a_list_of_specs_is_a_sweep_without_a_folder(monkeypatch):
    specs = [BASE.with_values({"seed": seed}) for seed in range(2)]
    made = {n: batches.Outcome(spec, [{"round": 1}], None, np.zeros(1)) for n, spec in enumerate(specs)}
    monkeypatch.setattr(batches, "train_batches", lambda plan, *, on_batch, **_: on_batch(made))
    found = api.sweep(specs, dataset=DATASET)
    assert list(found) == list(made.values())
    assert found.keys == ("seed",)
    assert [run.proven for run in found.runs] == [None, None]


def test_spans_inside_others_count_once(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing, "_covered", [])
    clock = timing.Clock()
    with clock("rounds"):
        for moment, event, seconds in (
            (102.0, "/jax/core/compile/jaxpr_trace_duration", 1.0),  # 101 to 102
            (104.0, "/jax/core/compile/jaxpr_trace_duration", 3.5),  # 100.5 to 104, around it
            (104.5, "/jax/compilation_cache/cache_retrieval_time_sec", 0.4),  # not compiling by itself
            (105.0, "/jax/core/compile/backend_compile_duration", 1.0),  # 104 to 105
        ):
            now[0] = moment
            timing._heard(event, seconds)
        now[0] = 110.0
    assert clock.report() == {"compile": 4.5, "rounds": 5.5}
