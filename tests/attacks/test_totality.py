"""One finite record that overflows inside the model: the run must go on as without it, and name nobody.

Two data sets differ in one record of float32's largest numbers. If one of the runs aborts, leaves a client out or
names it, whoever sees that tells the two apart with certainty, at any ε.
"""

import jax
import numpy as np
import pytest

import dither
from dither import models
from dither.errors import SpecError
from dither.federation import engines
from dither.federation.party import Party
from dither.methods import prepare
from dither.privacy import clipping
from dither.simulation import devices, engine
from dither.spec import METHODS
from tests.conftest import make_federation, make_records
from tests.methods.test_conformance import SIZES, spec_of

pytestmark = pytest.mark.usefixtures("compiled_as_in_use")

LARGEST = np.float32(3e38) * np.array([1, -1, 1, -1, 1, -1], np.float32)
QUICK = ("secure-fedavg", "nbafl", "dp-scaffold", "cpfed")
PRIVATE = sorted(set(METHODS) - {"fedavg", "fedprox", "scaffold"})


def records():
    x, y = make_records(int(SIZES.sum()))
    other = x.copy()
    other[17] = LARGEST
    return x, other, y


@pytest.mark.parametrize(
    "name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in PRIVATE]
)
def test_a_record_that_overflows_stays_inside_its_clip(name):
    """All rounds of every method on both data sets: everybody counts in all of them, and the model is finite."""
    spec, model = spec_of(name, cohort_size=6), models.logistic(6)
    prepared = prepare(spec, model, client_sizes=SIZES, num_params=7)
    simulation = engine.Simulation(
        model, prepared.build, num_clients=6, cohort_size_at=prepared.cohort_size_at, layout="vmap"
    )
    x, other, y = records()
    for these in (x, other):
        inputs = simulation.inputs(
            engine.problem(these, y, make_federation(SIZES), x[:5], y[:5]),
            seeds=[0],
            hyper={key: np.asarray(value)[None] for key, value in prepared.hyper.items()},
            cohorts=None if prepared.plan.design is None else [prepared.plan.design],
        )
        state = simulation.advance(simulation.start(inputs), inputs, 0, 4)
        assert not np.asarray(state.refused).any()
        assert int(state.missing[0]) == int(state.void[0]) == 0
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.server, state.clients)))


def test_two_files_that_differ_in_one_record_end_alike(tmp_path):
    x, other, y = records()
    summaries = []
    for number, these in enumerate((x, other)):
        path = tmp_path / f"{number}.npz"
        np.savez(path, x_train=these, y_train=y, x_test=x[:9], y_test=y[:9], classes=np.array(["a", "b"]))
        spec = {
            "method": "cpfed",
            "data.path": str(path),
            "num_clients": 6,
            "cohort_size": 3,
            "num_rounds": 4,
            "local_steps": 2,
            "batch_size": 4,
            "model.name": "logistic",
            "eval_every": 2,
        }
        book = tmp_path / f"{number}.sqlite"
        run = dither.run(spec, out=tmp_path / f"run {number}", ledger=book, new_ledger=True)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.params))
        summaries.append(run.summary)
    one, two = summaries
    assert "refused" not in two
    assert one.keys() == two.keys()
    for key in ("rounds", "participation", "notes"):
        assert one[key] == two[key]
    assert one["epsilon"]["proven"] == two["epsilon"]["proven"]


@pytest.mark.parametrize(
    "name", ["secure-fedavg", *(pytest.param(each, marks=pytest.mark.slow) for each in ("nbafl", "dp-scaffold"))]
)
def test_a_server_that_sends_huge_numbers_gets_a_finite_upload(name):
    """A hostile server may send any finite model, and ask about any record by it."""
    spec, model = spec_of(name, cohort_size=6), models.logistic(6)
    prepared = prepare(spec, model, client_sizes=SIZES, num_params=7)
    simulation = engine.Simulation(model, prepared.build, num_clients=6, cohort_size_at=prepared.cohort_size_at)
    x, other, y = records()
    signs = np.array([1, -1, 1, 1, -1, 1, 1], np.float32)
    for these in (x, other):
        settings = engines.RunSettings(simulation, 0, dict(prepared.hyper))
        client = engines.ClientEngine(settings, these[12:24], y[12:24], client=1)
        own = client.start()
        for index, size in enumerate((3.4e38, 1e30, 1e19, -3.4e38, 1e-45)):
            message = [
                np.resize(np.float32(size) * signs, shape).astype(dtype) for shape, dtype in client.message_shapes
            ]
            answer = client.answer(message, own, index)
            assert answer.finite
            assert np.isfinite(answer.row).all()
            own = answer.state
            assert all(np.isfinite(leaf).all() for leaf in own)


@pytest.mark.parametrize("key", ["privacy.clip_norm", "method_options.update_clip", "method_options.param_clip"])
def test_a_clip_whose_squares_float32_loses_is_refused(key):
    """A vector of length 1e-20 has no norm in float32, and would pass a clip of 1e-25 as it is; the proof of
    exact noise asks for more than that."""
    passed = clipping.clip(np.full(4, 1e-20, np.float32), 1e-25)
    assert np.max(passed) > 1e-25
    name = {"method_options.update_clip": "dp-fedavg", "method_options.param_clip": "nbafl"}.get(key, "cpfed")
    with pytest.raises(SpecError, match=f"{key}=9e-07 is below 1e-06"):
        spec_of(name, **{key: 9e-7})


@pytest.mark.parametrize(
    "flag",
    [
        *("--xla_cpu_enable_fast_math=true", "--xla_cpu_enable_fast_math", "--xla_gpu_enable_bf16_3way_gemm=true"),
        *("--xla_gpu_default_to_alg_dot_bf16_bf16_f32=true", "--xla_gpu_detect_nan=fail"),
    ],
)
def test_a_compiler_that_knows_no_nan_is_refused(flag, monkeypatch):
    """With --xla_cpu_fast_math_honor_nans=false beside it, one record moved the integers of a protected client by
    300,000 clips: checks for finite numbers were gone from the compiled program."""
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=/tmp {flag}")
    with pytest.raises(SpecError, match="IEEE 754"):
        engine.Simulation(models.logistic(6), lambda hyper: None, num_clients=1, cohort_size_at=lambda index: 1)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    devices.set_up()


def test_a_file_of_compiler_flags_is_refused(tmp_path, monkeypatch):
    """XLA also reads its flags from a file that XLA_FLAGS names. With fast math in it, random bits as records made
    every model's clipped sum infinite."""
    (tmp_path / "flags").write_text("--xla_cpu_enable_fast_math=true")
    monkeypatch.setenv("XLA_FLAGS", f" {tmp_path}/flags")
    with pytest.raises(SpecError, match="a file of flags"):
        devices.set_up()


@pytest.mark.parametrize("name", ["jax_debug_nans", "jax_debug_infs"])
def test_no_computation_stops_at_a_record(name, tmp_path):
    """JAX's debugging modes stop where a compiled function returns what is not finite, such as a norm that NbAFL
    reports for its owner: a party refused a round because of one finite record."""
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        with pytest.raises(SpecError, match=f"{name.upper()} is set"):
            engine.Simulation(
                models.logistic(6), lambda hyper: None, num_clients=1, cohort_size_at=lambda index: 1
            )
        with pytest.raises(SpecError, match=f"{name.upper()} is set"):  # before it reads a record
            Party(tmp_path, None, ledger=None, approve=lambda terms, experiment: "test")
    finally:
        jax.config.update(name, before)
