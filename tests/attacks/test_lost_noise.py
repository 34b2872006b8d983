"""Noise that is rounded away, or cut in the one coordinate that nobody thought of, hides no other client of a sum.

400 clients each add a twentieth of the noise that their sum needs. With a small rate or many clients that is less
than a step of the encoding: the others send zeros, and the sum is the target's upload.
"""

import numpy as np
import pytest
from scipy.special import ndtr
from scipy.stats import beta

from dither import accounting
from dither.data import ClientPartition, Dataset
from dither.errors import SpecError
from dither.experiment.build import assemble, engine_options
from dither.simulation import engine
from dither.spec import Spec

pytestmark = pytest.mark.usefixtures("compiled_as_in_use")

CLIENTS, RUNS = 400, 200
NOISE = 0.195  # of one client, over the distance of neighbours; ε = 0.95 by the noise of all
STEP = 2.0**-20
VALUES = {
    "method": "cpfed",
    "num_clients": CLIENTS,
    "cohort_size": CLIENTS,
    "num_rounds": 1,
    "local_steps": 1,
    "batch_sampling": "full",
    "model.name": "logistic",
    "privacy.noise": "given",
    "privacy.view": "sum",
    "privacy.adjacency": "zero-out",
    "secagg.mode": "ideal",
}
SMALL = STEP / 2 / 4.2 / NOISE * CLIENTS  # of such a rate, half a step is 4.2 deviations


def worlds(x, y, values):
    """The experiments whose first record is there, or blanked; clients hold equal parts of the records."""
    clients = {**VALUES, **values}["num_clients"]
    size, names = len(y) // clients, tuple(map(str, range(clients)))
    partition = ClientPartition(np.arange(len(y)), np.arange(clients) * size, np.full(clients, size), names)
    for label in (y[0], -1):
        labels = np.append(label, y[1:]).astype(np.int32)
        dataset = Dataset("made", x, labels, x[:1], y[-1:], ("a", "b"), ("one", "two"))
        problem = engine.problem(x, labels, partition, x[:1], y[-1:])
        yield assemble(Spec().with_values({**VALUES, **values}), dataset, partition, problem)


def after_a_round(both):
    """The server's state after one round of many runs, in each world."""
    first = both[0]
    simulation = engine.Simulation(
        first.model, first.prepared.build, num_clients=CLIENTS, cohort_size_at=lambda index: CLIENTS,
        **{**engine_options(first), "randomness": "seeded"},
    )  # fmt: skip
    hyper = {name: np.stack([np.asarray(value)] * RUNS) for name, value in first.prepared.hyper.items()}
    for each in both:
        inputs = simulation.inputs(each.problem, seeds=list(range(RUNS)), hyper=hyper)
        yield simulation.advance(simulation.start(inputs), inputs, 0, 1).server


def one_record_each():
    """All records but the target's are blank."""
    return np.full((CLIENTS, 2), [100.0, 0.0], np.float32), np.append(1, np.full(CLIENTS - 1, -1)).astype(np.int32)


def test_noise_below_a_step_of_the_encoding_hides_nobody_else():
    """Proved at 0.95; a model that has moved by a step shows at least 2 (3.0 with 500 runs)."""
    both = list(worlds(*one_record_each(), {"privacy.noise_std": NOISE, "client_lr": SMALL}))
    moved = [int(np.sum(np.asarray(state["out"]["w"])[:, 0, 0] >= STEP)) for state in after_a_round(both)]
    least, most = beta.ppf(1e-4, moved[0], RUNS - moved[0] + 1), beta.ppf(1 - 1e-4, moved[1] + 1, RUNS - moved[1])
    row = both[0].accountant().proven()
    assert 2 < np.log((least - row.delta) / most) <= row.value


FINER = {"secagg.scale_bits": 28, "secagg.modulus_bits": 64}


@pytest.mark.parametrize("change", [{"client_lr": 200 * SMALL}, FINER])
def test_noise_above_four_steps_counts(change):
    (experiment, _) = worlds(*one_record_each(), {"privacy.noise_std": NOISE, "client_lr": SMALL, **change})
    assert experiment.accountant().epsilon("sum") < 1 < experiment.accountant().epsilon("upload")


@pytest.mark.parametrize(("std", "sound"), [(4.0, True), (0.2, False)])
def test_a_sum_of_rounded_noise_hides_what_its_gaussian_hides(std, sound):
    """By the exact law of three rounded uploads, wherever between two integers they are (docs/privacy.md, R6)."""
    rng, integers = np.random.default_rng(0), np.arange(-60, 61)
    excess = []
    for _ in range(20):
        starts, moved = rng.uniform(-0.5, 0.5, 3), rng.uniform(0.2, 3.0) * std

        def law(first, starts=starts):
            laws = [np.diff(ndtr((np.append(integers, 61) - 0.5 - at) / std)) for at in (first, *starts[1:])]
            return np.convolve(np.convolve(laws[0], laws[1]), laws[2])

        p, q = law(starts[0]), law(starts[0] + moved)
        for epsilon in (0.0, 0.5, 1.0, 2.0):
            shown = max(np.maximum(a - np.exp(epsilon) * b, 0).sum() for a, b in ((p, q), (q, p)))
            excess.append(shown - accounting.gaussian_delta(epsilon, moved / (std * np.sqrt(3))))
    assert (max(excess) < 1e-12) == sound


def test_noise_is_not_set_for_a_sum_that_rounds_it_away():
    values = {"privacy.noise": "proven", "client_lr": SMALL}
    with pytest.raises(SpecError, match=r"round away the noise .* raise secagg\.scale_bits"):
        list(worlds(*one_record_each(), values))
    list(worlds(*one_record_each(), {**values, "privacy.view": "upload"}))  # which counts on nobody else's


def test_a_falling_noise_is_as_loud_as_in_the_last_round():
    falling = {"privacy.noise_schedule": "rounds", "privacy.noise_decay": 0.01, "num_rounds": 4}
    values = {"privacy.noise_std": NOISE, "client_lr": 200 * SMALL, **falling}
    accountant = next(worlds(*one_record_each(), values)).accountant()
    assert accountant.epsilon("sum") == accountant.epsilon("upload")


def test_the_count_of_an_adaptive_clip_is_not_cut():
    """Nearly all records of the others are unclipped, so that their counts, of 1 and little noise, are cut at 0.5;
    half of the target's are clipped. Proved at 0.96 for sums; the counts alone show at least 1.6."""
    size = 20
    x, y = np.full((CLIENTS * size, 2), [0.1, 0.0], np.float32), np.ones(CLIENTS * size, np.int32)
    x[: size // 2] = 100.0
    bits = {"secagg.modulus_bits": 64, "secagg.scale_bits": 40, "secagg.bound": 0.5 / CLIENTS}
    values = {"privacy.noise_std": NOISE / size, "privacy.clip_quantile": 0.5, "client_lr": 4e-4, **bits}
    both = list(worlds(x, y, values))
    counts = [-np.log(np.asarray(state["clip"], float)) for state in after_a_round(both)]
    shift, spread = abs(np.mean(counts[0] - counts[1])), np.std(counts[0], ddof=1) * (1 + 4 / np.sqrt(2 * RUNS))
    row = both[0].accountant().proven()
    assert 1.6 < accounting.gaussian_epsilon(float(shift / spread), row.delta) <= row.value
    roomy = next(worlds(x, y, {**values, "secagg.bound": 2.5 / CLIENTS})).accountant()
    assert roomy.epsilon("sum") < 1


def test_long_batches_may_be_cut_where_they_are_sent():
    """A Poisson batch of 8192 records over a divisor of 1 is 8192 clips long, and an upload is cut at 2^40."""
    x, y = np.full((2 * 8192, 2), [100.0, 0.0], np.float32), np.ones(2 * 8192, np.int32)
    values = {"batch_sampling": "poisson", "sampling_rate": 1.0, "secagg.mode": "off", "privacy.noise_std": 1.0}
    near, far = (
        next(worlds(x, y, {**values, "num_clients": 2, "cohort_size": 2, "client_lr": rate})).accountant()
        for rate in (2.0**20, 2.0**29)
    )
    assert near.epsilon("sum") < near.epsilon("upload") == far.epsilon("sum") == far.epsilon("upload")
