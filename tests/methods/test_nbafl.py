"""NbAFL's noise and releases, from a plan."""

import math

import jax
import numpy as np
import pytest

from dither import methods, models
from dither.errors import SpecError
from dither.methods import nbafl
from dither.types import RoundInfo
from tests.conftest import make_plan

SIZES = [10, 6, 12, 8]
CLIP, BUDGET = 3.0, {"epsilon": 2.0, "delta": 1e-3}


def prepared(*, sensitivity="clip", scheduling="printed", **changes):
    options = {
        "param_clip": CLIP, "proximal": 0.0, "optimizer": "sgd", "exposures": 2,
        "scheduling": scheduling, "sensitivity": sensitivity,
    }  # fmt: skip
    plan = make_plan(SIZES, **{"num_rounds": 40, "cohort_size": 2, **BUDGET, **changes}, options=options)
    return nbafl.prepare(models.logistic(6), plan)


@pytest.mark.parametrize("scheduling", ["uncredited", "corrected"])
def test_the_repaired_lemma_4_adds_what_the_uploads_noise_leaves_missing(scheduling):
    """σ_A = c·2C/(mK ε0), of which the K uploads bring σ_U/√K: ε0 is ε/T, or ln(1 + (N/K)(e^{ε/T} - 1))."""
    hyper = prepared(scheduling=scheduling).hyper
    each = 2.0 / 40
    base = each if scheduling == "uncredited" else math.log1p(4 / 2 * math.expm1(each))
    needed = methods.gaussian_constant(1e-3) * 2 * CLIP / (6 * 2 * base)
    assert math.hypot(hyper["downlink_std"], hyper["uplink_std"] / math.sqrt(2)) == pytest.approx(needed)
    assert hyper["downlink_std"] > 0


def test_an_assumed_sensitivity_is_that_of_the_paper_and_says_so():
    info = RoundInfo(0, 1, 6, 2)
    proven, assumed = (prepared(sensitivity=which) for which in ("clip", "paper"))
    (up, down), (up_assumed, down_assumed) = (each.releases(info) for each in (proven, assumed))
    assert (up.sensitivity, down.sensitivity) == pytest.approx((2 * CLIP, 2 * CLIP / 2))
    assert (up_assumed.sensitivity, down_assumed.sensitivity) == pytest.approx((2 * CLIP / 6, 2 * CLIP / 6 / 2))
    assert "assumed" in up_assumed.source
    assert "assumed" not in up.source
    assert (proven.plan.assumed, assumed.plan.assumed) == (False, True)


@pytest.mark.parametrize(("size", "factor"), [(2, 1.0), (1, 2.0), (0, 2.0)])
def test_the_servers_noise_grows_with_the_weight_of_uploads_that_are_left(size, factor):
    """Updates that are left out leave the others a larger share of the mean, and a record with them."""
    ready = prepared(noise="paper")
    algorithm = ready.build({**ready.hyper, "downlink_std": 2.0})
    state = {"w": np.zeros(20_000, np.float32)}
    cohort = type("Cohort", (), {"size": np.int32(size)})
    sent = algorithm.server(jax.random.key(0), state, {"w": np.ones(20_000, np.float32)}, cohort)["w"]
    assert float(np.mean(sent)) == pytest.approx(1.0, abs=0.1)
    assert float(np.std(sent)) == pytest.approx(2.0 * factor, rel=0.03)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"noise_schedule": "rounds"}, "noise_schedule='rounds'"),
        ({"noise_scale": (1.0,) * 4}, "noise_scale is for"),
    ],
)
def test_what_only_noise_on_gradients_has_is_refused(changes, said):
    with pytest.raises(SpecError, match=f"{said}.* not nbafl"):
        prepared(**changes)
