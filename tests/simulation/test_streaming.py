"""Records from the disk: the bits of the same records in memory, few of them at a time, and read ahead."""

import threading
from concurrent.futures import CancelledError

import jax
import numpy as np
import pytest

from dither import models
from dither.data import ClientPartition, MappedArray, dataset
from dither.errors import SpecError
from dither.methods import cpfed, dp_scaffold, secure_fedavg
from dither.secagg.encoding import FixedPoint
from dither.simulation import arrays, engine, streaming
from dither.simulation.aggregation import Aggregation
from dither.simulation.arrays import ONE_DEVICE, Problem, Shards
from dither.types import PrivacyPlan
from tests.conftest import make_plan, make_records

SIZES = np.array([12, 30, 17, 9, 25, 14, 21, 10, 28, 16], np.int32)
ROUNDS, TEST = 7, 5000  # more test records than are scored at a time
FEATURES = 6


def problem_of(tmp_path, rng=0):
    """The same records in memory and on the disk, everybody's scattered over the file."""
    count = int(SIZES.sum())
    x, y = make_records(count + TEST, FEATURES)
    np.save(tmp_path / "x.npy", x)
    order = np.random.default_rng(rng).permutation(count).astype(np.int32)
    start = (np.cumsum(SIZES) - SIZES).astype(np.int32)
    federation = ClientPartition(order, start, SIZES, tuple(f"client {i}" for i in range(len(SIZES))))
    weights = np.random.default_rng(1).random(TEST)
    in_memory = Problem(
        x,
        y,
        [federation],
        [np.arange(count, count + TEST)],
        [weights / weights.sum()],
        [np.sort(order)],
    )
    return in_memory, in_memory._replace(x=MappedArray([np.load(tmp_path / "x.npy", mmap_mode="r")]))


def setting_of(options=None, **changes) -> PrivacyPlan:
    given = {"cohort_size": 3, "num_rounds": ROUNDS, "noise": "given", "noise_std": 0.1, "lr_decay": 0.0}
    return make_plan(SIZES, **{**given, "options": options or {}, **changes})


def defaults(paper, **changes):
    return {name: default for name, (default, *_) in paper.OPTIONS.items()} | changes


def prepared_by(name):
    """A method, and what a simulation of it needs besides."""
    model = models.logistic(FEATURES)
    if name == "cpfed":
        sampled = {"batch_sampling": "fixed", "clip": "example"}
        return model, cpfed.prepare(model, setting_of(defaults(cpfed), **sampled)), {}
    if name == "dp-scaffold":
        options = defaults(dp_scaffold, stop_at_budget="no")
        return model, dp_scaffold.prepare(model, setting_of(options, batch_sampling="shuffled")), {}
    how = Aggregation("ideal", FixedPoint.fitting(3))
    options = defaults(secure_fedavg, first_round="cohort")
    plan = setting_of(options, noise="paper", batch_sampling="poisson", sampling_rate=0.2, clip="example")
    return model, secure_fedavg.prepare(model, plan), {"aggregation": how}


def simulation_of(name, shards=ONE_DEVICE):
    model, prepared, options = prepared_by(name)
    simulation = engine.Simulation(
        model,
        prepared.build,
        num_clients=len(SIZES),
        cohort_size_at=prepared.cohort_size_at,
        shards=shards,
        **options,
    )
    hyper = {key: np.asarray(value)[None] for key, value in prepared.hyper.items()}
    who = engine.planned_cohorts(
        5, num_clients=len(SIZES), cohort_size_at=prepared.cohort_size_at, design=None, num_rounds=ROUNDS
    )
    return simulation, hyper, who


def train(rounds, simulation, problem, hyper, *, stops=(3, ROUNDS)):
    """All leaves of the state and all metrics, after each stop."""
    inputs = rounds.inputs(problem, seeds=[5], hyper=hyper)
    state, done, found = simulation.start(inputs), 0, []
    for stop in stops:
        state = rounds.advance(state, inputs, done, stop)
        found.append({name: np.asarray(value).tobytes() for name, value in rounds.evaluate(state, inputs).items()})
        found.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)])
        done = stop
    return found


# Client states and shuffled epochs; sums of integers and Poisson batches; blocks of one or two rounds, and longer.
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("dp-scaffold", 90),
        ("secure-fedavg", 90),
        pytest.param("cpfed", 90, marks=pytest.mark.slow),
        pytest.param("dp-scaffold", 150, marks=pytest.mark.slow),
        pytest.param("cpfed", 182, marks=pytest.mark.slow),
    ],
)
def test_streamed_rounds_have_the_bits_of_rounds_in_memory(tmp_path, name, rows):
    in_memory, on_disk = problem_of(tmp_path)
    simulation, hyper, who = simulation_of(name)
    expected = train(simulation, simulation, in_memory, hyper)
    streamed = streaming.Streamed(simulation, on_disk, who, streaming.Room(rows, 1))
    assert train(streamed, simulation, on_disk, hyper) == expected
    report = streamed.report()
    assert report["blocks"] > {90: 3, 150: 1, 182: 0}[rows]
    assert report["records_scored"] == 2 * (TEST + SIZES.sum())


@pytest.mark.slow
def test_streamed_rounds_on_two_devices_have_the_bits_of_two_devices(tmp_path):
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices (tests/conftest.py asks for them)")
    in_memory, on_disk = problem_of(tmp_path)
    simulation, hyper, who = simulation_of("cpfed", Shards(1, 2))  # cohorts of 3: one place is padding
    expected = train(simulation, simulation, in_memory, hyper)
    streamed = streaming.Streamed(simulation, on_disk, who, streaming.Room(100, 1))
    assert train(streamed, simulation, on_disk, hyper) == expected


class Watched:
    """Reads of blocks, in their order, and a gate before the second."""

    def __init__(self, monkeypatch, fail_at=None):
        self.spans, self.started, self.go_on = [], threading.Event(), threading.Event()
        load = streaming.Streamed._load

        def watched(streamed, first, x, common):
            self.spans.append(first)
            if len(self.spans) == 2:
                self.started.set()
                assert self.go_on.wait(20)
            if fail_at == len(self.spans):
                raise OSError("the disk is gone")
            return load(streamed, first, x, common)

        monkeypatch.setattr(streaming.Streamed, "_load", watched)


def test_the_next_block_is_read_while_this_one_computes_and_no_third(tmp_path, monkeypatch):
    _, on_disk = problem_of(tmp_path)
    simulation, hyper, who = simulation_of("cpfed")
    watched = Watched(monkeypatch)
    streamed = streaming.Streamed(simulation, on_disk, who, streaming.Room(100, 1))
    inputs = streamed.inputs(on_disk, seeds=[5], hyper=hyper)
    state = streamed.advance(simulation.start(inputs), inputs, 0, 1)
    # The first round is done, and the second block is being read without anybody having asked for its rounds.
    assert watched.started.wait(20)
    assert len(watched.spans) == 2
    assert watched.spans[1] >= 1
    watched.go_on.set()
    streamed.advance(state, inputs, 1, watched.spans[1])
    streamed._reader.submit(int).result()
    assert len(watched.spans) == 2, "a third block was read while the first was in use"
    assert streamed.report()["blocks"] == 2


def test_what_goes_wrong_while_reading_ahead_is_raised_where_the_block_is_needed(tmp_path, monkeypatch):
    _, on_disk = problem_of(tmp_path)
    simulation, hyper, who = simulation_of("cpfed")
    watched = Watched(monkeypatch, fail_at=2)
    watched.go_on.set()
    streamed = streaming.Streamed(simulation, on_disk, who, streaming.Room(100, 1))
    inputs = streamed.inputs(on_disk, seeds=[5], hyper=hyper)
    state = streamed.advance(simulation.start(inputs), inputs, 0, 1)
    with pytest.raises(OSError, match="the disk is gone"):
        streamed.advance(state, inputs, 1, ROUNDS)


def test_closing_gives_up_what_is_being_read(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "_ROWS", 4)
    _, on_disk = problem_of(tmp_path)
    simulation, hyper, who = simulation_of("cpfed")
    streamed = streaming.Streamed(simulation, on_disk, who, streaming.Room(100, 1))
    inputs = streamed.inputs(on_disk, seeds=[5], hyper=hyper)
    taken, started, go_on = [], threading.Event(), threading.Event()

    def watched(file, rows, out):
        taken.append(len(rows))
        started.set()
        assert go_on.wait(20)

    monkeypatch.setattr(dataset._File, "take", watched)
    asked = streamed._ask(0, inputs)
    assert started.wait(20)
    threads = list(streamed._reader._threads)
    streamed.close()  # does not wait
    go_on.set()
    with pytest.raises(CancelledError):
        asked.result(20)
    assert sum(taken) <= 4 * dataset._READERS < SIZES[who[0]].sum()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_blocks_hold_whole_rounds_and_a_client_once():
    sizes = np.array([4, 3, 5, 2], np.int32)
    streamed = object.__new__(streaming.Streamed)
    streamed._partition = ClientPartition(np.arange(14), np.array([0, 4, 7, 12]), sizes, ())
    streamed._cohorts = [np.array(c) for c in ([0, 1], [1, 0], [1, 3], [2, 3], [2, 0])]
    assert (streamed._span(0, 9)[0], streamed._span(0, 9)[1].tolist()) == (3, [0, 1, 3])
    assert (streamed._span(3, 9)[0], streamed._span(3, 9)[1].tolist()) == (4, [2, 3])
    assert (streamed._span(4, 9)[0], streamed._span(4, 9)[1].tolist()) == (5, [0, 2])


@pytest.mark.parametrize("shards", [ONE_DEVICE, Shards(1, 2)])
@pytest.mark.parametrize(("features", "memory"), [(113, 1e9), (784, 3e7), (10, 5e6)])
def test_what_is_held_stays_within_the_memory(features, memory, shards):
    held = streaming.room(memory, features=features, shards=shards, wanted=10**9, scored=10**9)
    row = streaming.row_bytes(features)
    taken = row * (streaming.copies(shards) * held.rows + 2 * held.pieces * arrays.SCORED_ROWS)
    assert 0.9 * memory < taken <= memory
    # As much as an error message asks for is enough.
    needed = streaming.memory_for(held.rows, features=features, shards=shards)
    again = streaming.room(needed, features=features, shards=shards, wanted=10**9, scored=10**9)
    assert again.rows >= held.rows


def test_no_more_room_is_taken_than_the_rounds_can_use():
    held = streaming.room(1e9, features=10, shards=ONE_DEVICE, wanted=500, scored=300)
    assert held == streaming.Room(500, 1)


def test_too_little_room_and_records_in_memory_are_refused(tmp_path):
    in_memory, on_disk = problem_of(tmp_path)
    simulation, _, who = simulation_of("cpfed")
    with pytest.raises(SpecError, match=r"a round has [0-9]+ records, a block only holds 10"):
        streaming.Streamed(simulation, on_disk, who, streaming.Room(10, 1))
    with pytest.raises(SpecError, match="not on ndarray"):
        streaming.Streamed(simulation, in_memory, who, streaming.Room(1000, 1))
