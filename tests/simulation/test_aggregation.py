"""Sums under secure aggregation: ideal and real give the same bits, lost clients and clamps are counted."""

import jax
import numpy as np
import pytest

from dither import models
from dither.errors import SpecError
from dither.methods import baselines, dp_scaffold, secure_fedavg
from dither.secagg.encoding import FixedPoint, decode, encode, traced_decode, traced_encode
from dither.simulation import engine
from dither.simulation.aggregation import Aggregation
from tests.conftest import make_federation, make_plan, make_records

SIZES = [12, 30, 17, 9, 25, 14]
IDEAL = Aggregation("ideal", FixedPoint.fitting(6))
REAL = IDEAL._replace(mode="real")
WIDE = Aggregation("ideal", FixedPoint.fitting(6, scale_bits=20, modulus_bits=64))


def problem():
    x, y = make_records(sum(SIZES) + 50)
    n = sum(SIZES)
    return engine.problem(x[:n], y[:n], make_federation(SIZES), x[n:], y[n:])


def train(aggregation=None, *, paper=secure_fedavg, rounds=5, runs=1, first_round="all", **arguments):
    model = models.logistic(6)
    options = {"first_round": first_round} if paper is secure_fedavg else arguments.pop("options")
    changes = (
        {} if paper is secure_fedavg else {"clip": "example", "unit": "run", "noise": "none", "lr_decay": 0.0}
    )
    plan = make_plan(SIZES, cohort_size=4, options=options, **changes)
    prepared = paper.prepare(model, plan)
    return engine.simulate(
        prepared.build,
        model,
        problem(),
        num_rounds=rounds,
        cohort_size=prepared.cohort_size_at,
        seeds=list(range(runs)),
        hyper={name: np.stack([np.asarray(value)] * runs) for name, value in prepared.hyper.items()},
        eval_every=rounds,
        aggregation=aggregation,
        **arguments,
    )


def bits(result):
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result.params))


def flat(result):
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(result.params)])


def test_ideal_and_real_give_identical_parameters_and_nearly_those_of_a_plain_sum():
    plain, ideal, real, wide = (train(which, runs=2) for which in (None, IDEAL, REAL, WIDE))
    assert bits(ideal) == bits(real) == bits(wide)
    np.testing.assert_allclose(flat(plain), flat(ideal), atol=5 * 6 * 2.0**-20)
    assert bits(plain) != bits(ideal)


def test_exact_sums_are_the_same_in_every_ring_and_nearly_those_of_floats():
    """Noisy integers (R9): one sum modulo 2^32 or 2^64, masked or not, lost clients included."""
    model = models.logistic(6)
    changes = {"clip": "example", "unit": "run", "noise": "given", "noise_std": 0.05, "lr_decay": 0.1, "l2": 0.01}
    plan = make_plan(SIZES, cohort_size=4, options={"equal_credit": False}, local_steps=1, **changes)
    plan = plan._replace(exact_noise=True, aggregation="ideal", batch_sampling="full")
    prepared = baselines.prepare_dp_sgd(model, plan)
    assert prepared.plan.exact_sums
    assert not baselines.prepare_dp_sgd(model, plan._replace(max_norm=1.0)).plan.exact_sums
    assert not baselines.prepare_dp_sgd(model, plan._replace(noise_scale=(1.0,) * 6)).plan.exact_sums
    rings = [FixedPoint.fitting(6, scale_bits=0, modulus_bits=bits) for bits in (32, 64)]
    results = [
        engine.simulate(
            prepared.build,
            model,
            problem(),
            num_rounds=5,
            cohort_size=4,
            hyper={name: np.asarray(value)[None] for name, value in prepared.hyper.items()},
            eval_every=5,
            aggregation=aggregation,
            dropout=0.1,
        )
        for aggregation in (None, Aggregation("ideal", rings[0]), Aggregation("real", rings[1]))
    ]
    plain, ideal, real = results
    assert bits(ideal) == bits(real)
    np.testing.assert_allclose(flat(plain), flat(ideal), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", [pytest.param("vmap", marks=pytest.mark.slow), "loop"])
def test_lost_clients_change_both_alike(layout):
    lossy = {"dropout": 0.3, "min_clients": 2, "layout": layout, "rounds": 8, "first_round": "cohort"}
    ideal, real = train(IDEAL, **lossy), train(REAL, **lossy)
    assert bits(ideal) == bits(real)
    if layout == "loop":
        return
    lost = np.asarray(ideal.state.lost)
    assert lost.sum() > 0
    assert np.array_equal(lost, np.asarray(real.state.lost))
    assert 0 < int(ideal.state.missing[0]) <= 4 - 2
    assert bits(ideal) != bits(train(IDEAL, layout=layout, rounds=8, first_round="cohort"))


def test_control_variates_travel_in_the_same_sum():
    options = {key: default for key, (default, *_) in dp_scaffold.OPTIONS.items()}
    arguments = {"paper": dp_scaffold, "options": options}
    assert bits(train(IDEAL, **dict(arguments))) == bits(train(REAL, **dict(arguments)))


def test_a_round_with_too_few_clients_is_void():
    nobody = train(IDEAL, dropout=0.9, min_clients=4, rounds=6)
    start = train(IDEAL, dropout=0.9, min_clients=4, rounds=1)
    assert int(nobody.state.void[0]) == 6
    assert bits(nobody) == bits(start)  # the model stays where it began
    assert (
        nobody.participation.sum() == 6 + 5 * 4
    )  # whoever was chosen may have sent: they are charged all the same
    assert bits(nobody) == bits(train(REAL, dropout=0.9, min_clients=4, rounds=6))


@pytest.mark.slow
def test_clamped_coordinates_are_counted_alike():
    tight = FixedPoint(scale_bits=20, modulus_bits=32, bound=0.01, num_clients=6)
    ideal, real = train(Aggregation("ideal", tight)), train(Aggregation("real", tight))
    assert int(ideal.state.clamped[0]) == int(real.state.clamped[0]) > 0
    assert bits(ideal) == bits(real)
    assert int(train(IDEAL).state.clamped[0]) == 0


def test_compiled_encoding_is_the_encoding():
    how = FixedPoint.fitting(10)
    rng = np.random.default_rng(0)
    values = np.concatenate(
        [rng.normal(size=4000) * scale for scale in (1e-6, 1e-3, 1.0, 300.0)]
        + [[0.5 * 2**-20, 1.5 * 2**-20, -0.0]]
    ).astype(np.float32)
    words, clamped = encode(values, how)
    traced, count = jax.jit(lambda v: traced_encode(v, how))(values)
    assert np.array_equal(words.view(np.int32), np.asarray(traced))
    assert int(count) == clamped > 0
    total = (words.astype(np.uint64) * 3).astype(np.uint32)
    back = np.asarray(traced_decode(total.view(np.int32), how))
    assert np.array_equal(back, decode(total, how).astype(np.float32))


def test_the_fitting_bound_is_the_largest_power_of_two():
    for clients in (2, 3, 10, 31, 32, 100, 1000):
        for bits_, scale in ((32, 20), (64, 40)):
            how = FixedPoint.fitting(clients, scale_bits=scale, modulus_bits=bits_)
            with pytest.raises(SpecError, match="beyond"):
                how._replace(bound=how.bound * 2).check()


def test_discrete_noise_in_the_sum_has_the_std_it_is_asked_for():
    """The same runs with and without: what differs is a sum of 6 clients' noise, each with its weight."""
    std, runs = 0.5, 60
    quiet = train(IDEAL._replace(noise_std=lambda index, client, size: 0.0), rounds=1, runs=runs)
    noisy = train(IDEAL._replace(noise_std=lambda index, client, size: std), rounds=1, runs=runs)
    weights = np.array(SIZES) / sum(SIZES)  # all six take part in the first round
    scaled = (flat(noisy) - flat(quiet)) / (std * np.sqrt(np.sum(weights**2)))
    assert abs(np.mean(scaled)) < 4.5 / np.sqrt(scaled.size)
    assert abs(np.var(scaled) - 1) < 4.5 * np.sqrt(2 / scaled.size)


def test_a_bound_is_checked_as_the_compiled_rounds_clamp():
    with pytest.raises(SpecError, match="beyond"):
        FixedPoint(20, 32, 1023.99999, 2).check()  # 1024 in float32, so that two of them reach 2^31


def test_unknown_mode_is_refused():
    with pytest.raises(SpecError, match="mode='masked'"):
        train(Aggregation("masked", FixedPoint()))
