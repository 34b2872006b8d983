"""Finished runs on disk: an interruption loses a batch, a change recomputes what changed."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from dither.experiment.sweep import batches
from dither.reproduction import judging, running
from dither.reproduction.cache import Accounts, Cache
from dither.reproduction.figure import FinishedRun, Scale, load
from dither.types import Claim

FIGURE = load("secure-fedavg/fig1")


def missing(points, cache):
    return [point for point in points if point.key not in cache]


@pytest.fixture
def trained(monkeypatch):
    """Training replaced by a number made of the spec, two runs a batch; the specs that were trained."""
    seen = []

    def train_specs(specs, *, on_batch, **_):
        for at in range(0, len(specs), 2):
            batch = {}
            for number in range(at, min(at + 2, len(specs))):
                value = specs[number].seed + 0.25
                row = {"round": 1, "test_accuracy": value, "train_loss": value, "loss": value, "clipped": 0.0}
                batch[number] = batches.Outcome(specs[number], [row], Claim(1.0, "run", 1e-4, ""), np.zeros(1))
            seen.extend(batch.values())
            on_batch(batch)
        return []

    monkeypatch.setattr(batches, "train_specs", train_specs)
    return seen


def test_a_second_time_nothing_is_computed(tmp_path, trained):
    points = running.points([FIGURE], "smoke")
    running.compute(points, Cache(tmp_path))
    assert len(trained) == len(points)
    assert missing(points, Cache(tmp_path)) == []


def test_an_interruption_keeps_the_finished_batches(tmp_path, trained, monkeypatch):
    points = running.points([FIGURE], "smoke")
    put, kept = Cache.put, []

    def interrupted(self, key, record):
        if len(kept) == 4:
            raise KeyboardInterrupt
        kept.append(key)
        put(self, key, record)

    monkeypatch.setattr(Cache, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        running.compute(points, Cache(tmp_path))
    monkeypatch.setattr(Cache, "put", put)
    left = missing(points, Cache(tmp_path))
    assert len(left) == len(points) - 4
    trained.clear()
    running.compute(left, Cache(tmp_path))
    assert len(trained) == len(left)
    assert missing(points, Cache(tmp_path)) == []


def test_a_changed_figure_recomputes_only_what_changed(tmp_path, trained):
    running.compute(running.points([FIGURE], "smoke"), Cache(tmp_path))
    smoke = FIGURE.scales["smoke"]
    wider = Scale(smoke.seeds, {**smoke.grid, "epsilon": (0.5, 1.0, float("inf"))}, smoke.values)
    changed = replace(FIGURE, scales={**FIGURE.scales, "smoke": wider})
    left = missing(running.points([changed], "smoke"), Cache(tmp_path))
    assert {point.spec.privacy.epsilon for point in left} == {1.0}
    assert len(left) == smoke.seeds * 2 * 2  # both Q, both views


def test_figures_share_runs():
    both = running.points([load("nbafl/fig2"), load("nbafl/fig7")], "full")
    alone = [running.points([load(name)], "full") for name in ("nbafl/fig2", "nbafl/fig7")]
    assert len(both) == sum(map(len, alone)) - 5 * 3  # T = 25 at ε 50, 60 and 100


@pytest.mark.parametrize(("status", "twins"), [(judging.HOLDS, 1), (judging.INCONCLUSIVE, 0)])
def test_twins_without_noise_are_computed_where_they_can_change_a_verdict(tmp_path, trained, status, twins):
    def judge(view):
        view.final({"privacy.epsilon": 0.5}, "test_accuracy")
        return judging.Verdict(status, "")

    view = FIGURE.views("smoke", Cache(tmp_path))[0]
    criterion = FIGURE.criteria[0]._replace(judge=judge, control=True)
    assert len(criterion.needs(view)) == 1
    running.Work(Cache(tmp_path), [(view, [criterion])]).compute(data_dir=None, on_progress=None, deadline=1e12)
    assert [run.spec.privacy.epsilon for run in trained] == [0.5, float("inf")][: 1 + twins]


@pytest.mark.parametrize("changed", [False, True])
def test_undecided_criteria_get_more_seeds(tmp_path, trained, changed):
    """The accuracy of these runs is their seed, whatever ε is: never decided, so all 30 seeds are computed, also
    with an open setting changed."""
    smoke, (batch,) = FIGURE.scales["smoke"], [setting for setting in FIGURE.open if setting.name == "batches"]
    more = replace(smoke, seeds=5, max_seeds=30, proven_seeds=0)
    figure = replace(FIGURE, scales={"full": smoke if changed else more, "robust": more}, open=[batch])
    work = running.Work.of_figures([figure], "full", "robust" if changed else "", Cache(tmp_path), None)
    work.compute(data_dir=None, on_progress=None, deadline=float("inf"))
    sampling = "disjoint" if changed else FIGURE.views("smoke")[0].base.batch_sampling
    assert {run.spec.seed for run in trained if run.spec.batch_sampling == sampling} == set(range(30))
    verdict = running.settled(figure.criteria[0], figure.views("robust", Cache(tmp_path))[0])
    assert {row["seeds"] for row in verdict.numbers} == {30}


def test_work_stops_at_its_deadline_and_continues(tmp_path, trained):
    def compute(deadline):
        work = running.Work.of_figures([FIGURE], "smoke", "", Cache(tmp_path), None)
        return work.compute(data_dir=None, on_progress=None, deadline=deadline)[1]

    points = running.points([FIGURE], "smoke")
    assert compute(deadline=0.0) == 0
    with pytest.raises(running._OutOfTime):  # after the first batch, which is kept
        batches.train_specs(
            [point.spec for point in points], on_batch=running._keeper(points, Cache(tmp_path), 0.0)
        )
    assert len(Cache(tmp_path)) == 2
    assert compute(deadline=float("inf")) == len(points) - 2
    assert missing(points, Cache(tmp_path)) == []


def test_a_damaged_file_counts_as_missing(tmp_path):
    cache = Cache(tmp_path)
    record = FinishedRun({"round": [1], "loss": [0.5]}, {"value": 1.0, "unit": "run"}, 0.1, "cpu", {"jax": "0"})
    cache.put("ab" * 32, record)
    assert Cache(tmp_path)["ab" * 32] == record
    path = cache.path("ab" * 32)
    path.write_bytes(path.read_bytes()[:-9])
    assert "ab" * 32 not in Cache(tmp_path)


def test_accounted_numbers_are_kept(tmp_path, monkeypatch):
    printed, _ = FIGURE.views("smoke")
    spec = printed.spec({"privacy.epsilon": 0.5, "local_steps": 1, "num_rounds": 4}, 0)
    first = Accounts(Cache(tmp_path)).proven_epsilon(spec, "message")
    monkeypatch.setattr(Accounts, "_experiment", None)  # asked again it would fail
    assert Accounts(Cache(tmp_path)).proven_epsilon(spec, "message") == first
    assert first > 0


@pytest.mark.slow
def test_killed_twice_it_still_ends_with_the_same_numbers(tmp_path):
    """Ctrl-C, then kill -9, then to the end: the same runs as without interruption (to the rounding of float32,
    because what was left is batched otherwise)."""

    def start(folder):
        command = [
            sys.executable,
            "-m",
            "dither.reproduction",
            "secure-fedavg",
            "--scale",
            "smoke",
            "--only-compute",
        ]
        return subprocess.Popen([*command, "--cache", str(folder)], stdout=subprocess.DEVNULL)

    folder = tmp_path / "cut"
    for number, sign in enumerate((signal.SIGINT, signal.SIGKILL)):
        process = start(folder)
        before = len(Cache(folder))
        while len(Cache(folder)) <= before and process.poll() is None:
            time.sleep(0.02)
        os.kill(process.pid, sign)
        assert process.wait(60) != 0, f"it ended before interruption {number}"
    assert start(folder).wait(300) == 0
    assert start(tmp_path / "whole").wait(300) == 0
    cut, whole = Cache(folder), Cache(tmp_path / "whole")
    assert sorted(cut) == sorted(whole)
    for key in whole:
        for name, column in whole[key].metrics.items():
            np.testing.assert_allclose(cut[key].metrics[name], column, rtol=1e-4)
