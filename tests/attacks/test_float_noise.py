"""H3: float32 noise has a lattice. Added to a value, it leaves the value's last bits in the upload.

Near zero a float32 is much finer than near the value g that a record adds. So an upload fl(g + fl(σz)) that
comes near zero is a multiple of ulp(g), while the same upload without the record has finer bits: seen on the
client function of the default job. Protected noise is on a lattice of its own (R7): what is released has the
same bits in both worlds. Seeded noise, for research, is float32 still, and no row may hide it
(`test_every_float_row_says_so`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dither import accounting, models
from dither.experiment import build
from dither.methods import prepare
from dither.privacy import noise
from dither.privacy.entropy import OsEntropy
from dither.spec import Spec
from dither.types import Keys, Records, Round
from tests.auditing.grid import small_dataset, small_spec

pytestmark = pytest.mark.usefixtures("compiled_as_in_use")

TRIALS = 20_000
G = np.float32(-0.5) / np.float32(128)  # coordinate 0 of the record's clipped gradient, over the divisor


def noisy_gradients(randomness):
    """(first feature, seed, noise, trials) -> coordinate 0 of noisy first-round gradients of the default
    job's client, one a trial."""
    spec = (
        Spec.from_preset("adult")
        .with_values(
            {"local_steps": 1, "sampling_rate": 1.0, "privacy.noise": "given", "privacy.noise_std": 0.0375}
        )
        .with_values({"randomness": randomness})
    )
    x = np.zeros((64, 3), np.float32)
    x[:, 1] = 1.0
    x[0, 1] = 0.3
    y = (np.arange(64) % 2).astype(np.int32)
    y[0] = 1
    model = models.make("logistic", num_features=3, num_classes=2, hidden=(), image_shape=())
    prepared = prepare(spec, model, client_sizes=np.full(16, 64), num_params=4)
    method = prepared.build({name: jnp.asarray(value, jnp.float32) for name, value in prepared.hyper.items()})
    start = model.init(jax.random.key(0))

    def one(feature, seed, source, number):
        records = Records(
            jnp.asarray(x).at[0, 0].set(feature), jnp.asarray(y), jnp.arange(64), jnp.int32(0), jnp.int32(64)
        )
        roots = {"batch": seed, "epoch": seed, "noise": source}
        keys = Keys(*(noise.for_client(noise.stream(roots[name], name), number) for name in Keys._fields))
        round = Round(jnp.int32(0), jnp.int32(0), jnp.int32(16))
        upload = method.client(keys, start, method.client_init(start), records, round).upload
        return upload["out"]["w"][0, 0] / (-2.0 / 16)  # learning rate over cohort: a power of two, so exact

    return jax.jit(jax.vmap(one, (None, None, None, 0)))


def test_an_uploads_low_bits_do_not_tell_whether_a_record_is_there():
    near, apart = abs(float(G)) / 8, {}
    for name, source in (("os", OsEntropy()), ("seeded", jnp.uint32(7))):
        drawn, shares, counts = noisy_gradients(name), [], []
        for feature in (1.0, 0.0):
            trials = jnp.arange(TRIALS) + int(feature) * TRIALS
            seen = np.asarray(drawn(jnp.float32(feature), jnp.uint32(7), source, trials), np.float64)
            seen = seen[np.abs(seen) < near]
            shares.append(float(np.mean(seen % float(np.spacing(abs(G))) == 0)))
            counts.append(len(seen))
        assert min(counts) > 120
        apart[name] = abs(shares[0] - shares[1]) / np.sqrt(0.5 / min(counts))  # in standard deviations, at least
    assert apart["os"] < 8
    assert apart["seeded"] > 8  # the attack itself works: 0.70 against 0.05


def reachable(seen, std):
    """Whether a float32 is fl(G + fl(std·z)) for some float32 z: all that float noise can give with the record."""
    z = ((seen.astype(np.float64) - np.float64(G)) / np.float64(std)).astype(np.float32)
    near = (z, np.nextafter(z, np.float32(np.inf)), np.nextafter(z, np.float32(-np.inf)))
    return np.any([(std * value).astype(np.float32) + G == seen for value in near], axis=0)


def attacked_epsilon(draw, draws, piece=1_000_000):
    """A lower bound on ε at δ = 1e-5 from one coordinate, with the record and without: how often the release is
    reachable and near zero. Clopper-Pearson at 99.5% for each of five thresholds and both sides."""
    std = np.float32(0.0375)
    powers = np.arange(4, 9)
    hits = np.zeros((2, len(powers)), int)
    for world, value in enumerate((G, np.float32(0))):
        for number in range(draws // piece):
            seen = np.asarray(draw(jnp.full(piece, value), std, 2 * number + world))
            hit = reachable(seen, std)
            hits[world] += [int((hit & (np.abs(seen) < abs(G) * 2.0**-k)).sum()) for k in powers]
    bounds = []
    for a, b in (hits, hits[::-1]):
        low = stats.beta.ppf(0.0005, a, draws - a + 1)
        high = stats.beta.ppf(0.9995, b + 1, draws - b)
        bounds.append(np.log(np.maximum(np.nan_to_num(low) - 1e-5, 1e-300) / high).max())
    return max(bounds)


@pytest.mark.slow
def test_the_lattice_attack_fails_at_a_hundred_million_draws():
    """One coordinate moves by 0.104 standard deviations: the Gaussian bound at δ = 1e-5 is ε = 0.33."""
    allowed = accounting.gaussian_epsilon(abs(float(G)) / 0.0375, 1e-5)
    assert allowed < 0.5

    @jax.jit
    def protected(value, std, number):
        return noise.gaussian(noise.for_round(OsEntropy(), number), value, noise_std=std)

    @jax.jit
    def seeded(value, std, number):
        return noise.gaussian(noise.for_round(noise.key(3), number), value, noise_std=std)

    assert attacked_epsilon(seeded, 5_000_000) > 1.0  # the attack itself works
    assert attacked_epsilon(protected, 100_000_000) <= allowed


@pytest.mark.parametrize("method", ["cpfed", "concentrated", "dp-scaffold", "secure-fedavg", "nbafl"])
def test_every_float_row_says_so(method):
    own = {"method_options__param_clip": 1.0, "batch_sampling": "full"} if method == "nbafl" else {}
    experiment = build.build_experiment(small_spec(method, **own), dataset=small_dataset())
    assert all(accounting.FLOAT_NOISE in row.not_covered for row in experiment.accountant().table())


def test_discrete_noise_says_what_is_float_before_it():
    discrete = {
        "secagg__mode": "ideal",
        "secagg__noise": "discrete",
        "privacy__view": "sum",
        "privacy__clip": "batch",
    }
    rows = (
        build.build_experiment(small_spec("secure-fedavg", **discrete), dataset=small_dataset())
        .accountant()
        .table()
    )
    assert all(any("before the noise" in text for text in row.not_covered) for row in rows)
    assert not any(accounting.FLOAT_NOISE in row.not_covered for row in rows)
