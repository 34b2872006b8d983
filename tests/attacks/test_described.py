"""`dither check` of training that it did not run: no description gets a smaller ε than what it describes."""

import json
import math

import dp_accounting as dp
import numpy as np
import pytest
from scipy.stats import norm

from dither.accounting import gaussian_delta, gaussian_epsilon
from dither.errors import NoProof, SpecError
from dither.experiment.check import check

STEP = {"noise_multiplier": 4.825, "steps": 400, "sampling": "poisson", "clipping": "example"}


@pytest.mark.parametrize("count", [1, 1000])
def test_gaussians_on_one_sampled_batch_see_the_same_record(count):
    """With probability q the record is in all of them: counted as batches of their own, ε was 1.83 for 592."""
    rate, gaussian = 0.01, dp.GaussianDpEvent(1.0)
    event = dp.PoissonSampledDpEvent(rate, dp.SelfComposedDpEvent(gaussian, count))
    row, mu = check(event).proven("zero-out"), math.sqrt(count)
    x = np.linspace(-10, mu + 10, 2001)  # the output is beyond x: with the record, and without
    seen, unseen = rate * norm.sf(x - mu) + (1 - rate) * norm.sf(x), norm.sf(x)
    assert 0.99 * row.delta < np.max(seen - np.exp(row.value) * unseen) <= row.delta * (1 + 1e-9)


def test_sampling_inside_sampling_has_no_recipe():
    inner = dp.SampledWithoutReplacementDpEvent(100, 10, dp.GaussianDpEvent(1.0))
    both = dp.ComposedDpEvent([dp.GaussianDpEvent(1.0), inner])
    with pytest.raises(NoProof, match="another sampled event"):
        check(dp.PoissonSampledDpEvent(0.1, both))


def test_a_rate_that_follows_from_the_record_count_has_no_proof_for_add_remove(tmp_path):
    """The example in docs/privacy.md shows 1.087 for such a rate, where 0.9995 is proved for a public one."""
    path = tmp_path / "opacus.json"
    path.write_text(json.dumps({"history": [[4.825, 128 / 2035, 400]]}))
    for counted in (check({**STEP, "batch_size": 128, "records": 2035}), check(path, {"sampling": "poisson"})):
        assert counted.proven("zero-out").value == pytest.approx(0.9995, abs=1e-4)
        assert math.isinf(counted.proven("add/remove").value)
    public = check(path, {"sampling": "poisson", "public_rate": True})
    assert public.proven("add/remove").value == public.proven("zero-out").value


def test_a_claim_for_unnamed_neighbours_must_hold_for_all():
    described = {**STEP, "sampling_rate": 0.01}
    largest = check(described).proven("replace-one").value
    assert check({**described, "claimed_epsilon": largest}).supported
    short = check({**described, "claimed_epsilon": 0.9 * largest})
    assert short.proven("zero-out").value < 0.9 * largest
    assert not short.supported
    assert any("claimed_adjacency" in text for text in short.fixes)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sampling_rate": 0.001, "batch_size": 128, "records": 2035}, "is not batch_size/records"),
        ({"sampling_rate": 0.01, "exact_noise": "false"}, "exact_noise='false' must be true or false"),
    ],
)
def test_contradictions_and_words_for_switches_are_refused(more, message):
    with pytest.raises(SpecError, match=message):
        check({**STEP, **more})


def test_a_history_of_broken_steps_is_refused(tmp_path):
    path = tmp_path / "opacus.json"
    path.write_text(json.dumps({"history": [[1.0, 0.01, 999.9]]}))
    with pytest.raises(SpecError, match=r"steps=999.9"):
        check(path)


def test_epochs_may_begin_anew_with_every_kind_of_step():
    """Half an epoch at one noise and half at another: nobody says that it is the same epoch. If it is not, a
    record may be in both halves. One use was counted: 4.38 for 6.57."""
    half = {"steps": 5, "sampling": "shuffled", "sampling_rate": 0.1, "clipping": "example"}
    halves = [{**half, "noise_multiplier": noise} for noise in (1.0, 1.0001)]
    twice = check({"noise_multiplier": 1.0, "steps": 2, "sampling": "full", "clipping": "example"})
    for relation in ("zero-out", "replace-one"):
        shown, both = check({"releases": halves}).proven(relation).value, twice.proven(relation).value
        assert shown == pytest.approx(both, rel=1e-3)
    assert check({"releases": halves[:1]}).proven("add/remove").value == math.inf


def test_a_batch_of_two_epochs_may_hold_a_record_twice():
    """Epochs of 5 records run into each other: the third batch of 2 has the last of one and the first of the next,
    with probability 1/25 the same record, which then moves it twice as far."""
    described = {"noise_multiplier": 1.0, "steps": 5, "batch_size": 2, "records": 5, "clipping": "example"}
    described |= {"delta": 1e-7, "claimed_epsilon": 1.0, "claimed_adjacency": "zero-out"}
    apart, joined = (check({**described, "sampling": kind}).proven().value for kind in ("shuffled", "stream"))
    shown = 0.04 * gaussian_delta(apart, 2.0)
    assert shown > 3e-7, "that of epochs whose batches are apart"
    assert joined == pytest.approx(gaussian_epsilon(2.0, 1e-7))
    with pytest.raises(SpecError, match="batch_size=6 exceeds records=5"):
        check({**described, "sampling": "stream", "batch_size": 6})


def test_a_proof_of_more_supports_no_claim():
    """A thousandth more was taken for a proof of the claim."""
    described = {"noise_multiplier": 1.0, "steps": 5, "sampling": "full", "clipping": "example"}
    proven = check(described).proven().value
    described |= {"claimed_adjacency": "zero-out"}
    assert check({**described, "claimed_epsilon": proven}).supported
    assert not check({**described, "claimed_epsilon": proven * 0.9999}).supported
