"""The noise that a privacy budget needs, fast enough to follow a slider: a few evaluations of the accountant.

The plan assumes a server that sees every upload, equally many records for every client, logistic regression, and
Poisson batches if the method takes them. If only some clients take part in a round, the cohorts are not drawn yet:
the plan counts the number of participations that, with 95% probability, no client exceeds. The copied spec has
`privacy.noise = "proven"`, so the run solves for the noise of the cohorts that it draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binom

from dither import accounting, models
from dither.accounting.accountant import scaled
from dither.accounting.pld import COARSE
from dither.errors import NoProof, SpecError
from dither.experiment.plan import bounds as theory
from dither.experiment.plan.bounds import ProblemConstants, estimate
from dither.experiment.plan.candidates import INTEGER_KEYS, Candidate, clip_key
from dither.experiment.plan.records import PROVEN_NOISE, planned_gaps, synthetic_data
from dither.methods import prepare
from dither.spec import Spec
from dither.types import Prepared, Release, RoundInfo

METHODS = {
    "cpfed": "CPFed: noise in every local step",
    "concentrated": "Concentrated DP-FL: shuffled epochs",
    "dp-scaffold": "DP-SCAFFOLD: control variates",
    "secure-fedavg": "Secure FedAvg: noise on the upload",
    "nbafl": "NbAFL: noise on clipped parameters",
}
_POISSON = ("cpfed", "dp-scaffold")
_SAMPLED = ("poisson", "fixed", "poisson-round", "fixed-round")  # kinds of sampling that amplify
# What a slider may be set to: (least, most). Anything else is refused, so that no request can take long.
LIMITS = {
    "epsilon": (0.05, 50.0),
    "delta": (1e-9, 1e-2),
    "clients": (1, 1000),
    "records": (100, 10_000_000),
    "rounds": (1, 1000),
    "share": (0.01, 1.0),
    "steps": (1, 50),
    "batch": (1, 10_000),
    "features": (2, 2000),
}
ADJACENCIES = (accounting.ZERO_OUT, accounting.REPLACE_ONE)  # with add/remove a plan could show no count
_CONFIDENCE = 0.95
_PARAM_CLIP = 20.0  # of NbAFL, which clips parameters
_TOLERANCE = 0.005  # the proven ε is at most the target and within this share of it


class PlanRequest(NamedTuple):
    """The positions of the sliders."""

    method: str = "cpfed"
    epsilon: float = 1.0
    delta: float = 1e-5
    clients: int = 16
    records: int = 32_561
    rounds: int = 100
    share: float = 1.0
    steps: int = 4
    batch: int = 128
    features: int = 105
    adjacency: str = "zero-out"

    @property
    def cohort(self) -> int:
        """Clients per round."""
        return max(1, min(self.clients, round(self.share * self.clients)))

    @property
    def each(self) -> int:
        """Records of each client."""
        return self.records // self.clients


class RequiredNoise(NamedTuple):
    """The noise of a plan, and the proven ε that it gives."""

    noise_std: float
    multiplier: float
    proven: float
    recipe: str
    participations: int
    evaluations: int


def parse(sliders: Mapping[str, str]) -> PlanRequest:
    """The sliders of a request; a value that none of them can have is a `SpecError` that names it."""
    values: dict[str, Any] = {}
    for name, text in sliders.items():
        if name in ("method", "adjacency"):
            offered = METHODS if name == "method" else ADJACENCIES
            if text not in offered:
                raise SpecError(f"{name}={text[:40]!r} must be one of {', '.join(offered)}")
            values[name] = text
        elif name in LIMITS:
            low, high = LIMITS[name]
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not low <= value <= high:
                raise SpecError(f"{name}={text[:40]!r} must be a number from {low:g} to {high:g}")
            values[name] = value if name in ("epsilon", "delta", "share") else round(value)
    request = PlanRequest(**values)
    if request.each < 1:
        raise SpecError(
            f"records={request.records} for clients={request.clients}: each client needs at least one record"
        )
    return request._replace(batch=min(request.batch, request.each))


def spec_of(request: PlanRequest) -> Spec:
    """The request as a spec: what "Copy spec" gives, and what is accounted for."""
    values = {
        "num_clients": request.clients,
        "cohort_size": request.cohort,
        "num_rounds": request.rounds,
        "local_steps": request.steps,
        "batch_size": request.batch,
        "eval_every": max(1, request.rounds // 20),
        "privacy.epsilon": request.epsilon,
        "privacy.delta": request.delta,
        **PROVEN_NOISE,
        "privacy.view": "upload",
        "privacy.adjacency": request.adjacency,
        "data.name": "adult",
        "data.encoding": "standard",
        "data.features": "all",
        "data.partition": "iid",
        "data.split": "given",
        "data.records_per_client": 0,
        "model.name": "logistic",
        "model.hidden": [],
        "secagg.mode": "off",
    }
    if request.method in _POISSON:
        values |= {"batch_sampling": "poisson", "sampling_rate": min(1.0, request.batch / request.each)}
    if request.method == "nbafl":
        values |= {"batch_size": 1, "method_options.param_clip": _PARAM_CLIP}
    else:
        values |= {"privacy.clip": "example", "privacy.clip_norm": 1.0}
    if request.method == "secure-fedavg":
        values |= {"model.l2": 1e-4, "lr_decay": 0.0}
    if request.method == "dp-scaffold":
        values |= {"method_options.stop_at_budget": "no", "client_lr": 0.5}
    return _preset(request.method).with_values(values)


@lru_cache(maxsize=len(METHODS))
def _preset(method: str) -> Spec:
    return Spec.from_preset(method)


# The required noise


class _Basis(NamedTuple):
    """What a request fixes but the noise: the spec, the method, and what one participation releases."""

    spec: Spec
    prepared: Prepared
    releases: tuple[Release, ...]


@lru_cache(maxsize=256)
def _basis(request: PlanRequest) -> _Basis:
    spec = spec_of(request)
    sizes = np.full(request.clients, request.each)
    model = models.make("logistic", num_features=2, num_classes=2, hidden=(), image_shape=())
    prepared = prepare(spec, model, client_sizes=sizes, num_params=3)
    releases = prepared.releases(RoundInfo(0, 0, request.each, request.cohort))
    if not releases or not all(release.noise_std > 0 for release in releases):
        raise NoProof(f"{request.method} releases something without noise at this setting")
    return _Basis(spec, prepared, releases)


def required_noise(request: PlanRequest) -> RequiredNoise:
    """The least noise (to half a percent) whose proven ε of the whole run is at most the requested one."""
    return _required_noise(_of_any_model(request))


def _of_any_model(request: PlanRequest) -> PlanRequest:
    """Noise on a coordinate does not depend on how many there are."""
    return request._replace(features=PlanRequest().features)


@lru_cache(maxsize=4096)
def _required_noise(request: PlanRequest) -> RequiredNoise:
    _, prepared, releases = _basis(request)
    count = _participations(request, prepared)
    conditions = prepared.plan.conditions()._replace(num_rounds=request.rounds)  # no cohort is drawn yet

    def at(factor: float) -> accounting.ProvenRow:
        # On the coarse grid ε is still an upper bound, larger by at most a few parts in a thousand.
        return accounting.proven(
            scaled([(releases, count)], factor),
            request.delta,
            conditions,
            view="upload",
            adjacency=request.adjacency,
            resolution=COARSE,
        )

    factor, proven, evaluations = solve(at, request.epsilon, guess=_guess(releases[0], count, request))
    first = releases[0]
    return RequiredNoise(
        noise_std=first.noise_std * factor,
        multiplier=first.noise_std * factor / first.sensitivity,
        proven=proven.value,
        recipe=proven.recipe,
        participations=count,
        evaluations=evaluations,
    )


def solve(
    at: Callable[[float], accounting.ProvenRow], epsilon: float, guess: float
) -> tuple[float, accounting.ProvenRow, int]:
    """A factor on the noise whose proven ε is at most `epsilon` and within half a percent of it, and how many
    evaluations it took: regula falsi (the Illinois variant) on ln ε over ln factor."""
    goal = math.log(epsilon * (1 - _TOLERANCE / 2))
    ends: dict[bool, tuple[float, float]] = {}  # by whether the noise is enough: ln factor, and ln ε - goal there
    best: tuple[float, accounting.ProvenRow] | None = None
    x, stride, enough_before = math.log(guess), 1.0, False
    evaluations = 0
    while evaluations < 60:
        evaluations += 1
        proven = at(math.exp(x))
        excess = min(max(math.log(max(proven.value, 1e-12)) - goal, -3.0), 3.0)
        enough = proven.value <= epsilon
        if enough:
            best = (math.exp(x), proven)
            if proven.value >= epsilon * (1 - _TOLERANCE):
                break
        elif x > math.log(guess) + 30:
            raise NoProof(f"no noise has a proven ε of {epsilon:.15g} here: {proven.detail}")
        if len(ends) == 2 and enough == enough_before:  # the other end stays: give it less weight
            ends[not enough] = (ends[not enough][0], ends[not enough][1] / 2)
        ends[enough], enough_before = (x, excess), enough
        if len(ends) == 2:
            (low, above), (high, below) = ends[False], ends[True]
            if high - low < 1e-6:  # ε jumps past the budget here
                break
            x = low + (high - low) * above / (above - below)
        else:  # ε of one Gaussian is about 1 / noise
            x, stride = x + stride * excess, min(2 * stride, 8.0)
    if best is None:
        raise NoProof(f"no noise was found for ε = {epsilon:.15g}")
    return *best, evaluations


def _participations(request: PlanRequest, prepared: Prepared) -> int:
    if prepared.plan.design is not None:
        return int(np.bincount(prepared.plan.design.ravel(), minlength=request.clients).max())
    if request.cohort == request.clients:
        return request.rounds
    quantile = 1 - (1 - _CONFIDENCE) / request.clients  # so that no client exceeds it
    full = sum(prepared.cohort_size_at(index) == request.clients for index in range(request.rounds))
    drawn = binom.ppf(quantile, request.rounds - full, request.cohort / request.clients)
    return int(min(request.rounds, max(1, full + drawn)))


def _guess(release: Release, count: int, request: PlanRequest) -> float:
    """Where to start: between the limits of many small losses (a Gaussian) and of few large ones (a union)."""
    steps = max(1.0, count * release.uses)
    rate = release.sampling.rate if release.sampling.kind in _SAMPLED else 1.0
    epsilon, delta = request.epsilon, request.delta
    many = rate * math.sqrt(steps) * accounting.gaussian_noise_multiplier(epsilon, delta)
    few = accounting.gaussian_noise_multiplier(
        math.log1p(math.expm1(epsilon) / rate), min(delta / (steps * rate), 0.1)
    )
    return float((many**2.5 + few**2.5) ** 0.4 * release.sensitivity / release.noise_std)


# What the page asks


def limits(request: PlanRequest) -> dict[str, Any]:
    """What the sliders and menus offer, and where they start."""
    return {"limits": LIMITS, "methods": METHODS, "defaults": request._asdict()}


def answer(request: PlanRequest) -> dict[str, Any]:
    """The plan for one position of the sliders."""
    noise = required_noise(request)
    spec = _basis(_of_any_model(request)).spec
    claim = _candidate(request, noise).claimed
    return {
        "request": {**request._asdict(), "cohort": request.cohort, "each": request.each},
        **noise._asdict(),
        "not_covered": planned_gaps(spec),
        "certain": request.cohort == request.clients or request.method == "concentrated",
        "claimed": {"value": claim.value, "unit": claim.unit, "source": claim.source},
        "averaged_std": noise.noise_std / math.sqrt(request.cohort),
        "clip": _clip(spec),
        "bytes": 4.0 * (request.features + 1) * request.cohort * request.rounds,
        "spec": spec.to_toml(),
    }


def curve(request: PlanRequest) -> dict[str, Any]:
    """The noise for other budgets, and for other numbers of rounds, the other sliders as they are."""
    low, high = LIMITS["epsilon"]
    budgets = [request.epsilon * factor for factor in (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)]
    budgets = [value for value in budgets if low <= value <= high]
    rounds = _multiples(request.rounds, (0.1, 0.25, 0.5, 1.0, 2.0, 4.0))
    return {
        "epsilon": budgets,
        "by_epsilon": [required_noise(request._replace(epsilon=value)).multiplier for value in budgets],
        "rounds": rounds,
        "by_rounds": [required_noise(request._replace(rounds=value)).multiplier for value in rounds],
    }


def bound(request: PlanRequest) -> dict[str, Any]:
    """The paper's bound over rounds at the noise that the budget needs, term by term."""
    rounds = _multiples(request.rounds, (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0))
    requests = [request._replace(rounds=each) for each in rounds]
    candidates = [_candidate(each, required_noise(each)) for each in requests]
    constants = _constants(request.method, request.features)
    bounds = theory.bounds(spec_of(request), candidates, constants, request.each)
    source = f"estimated on synthetic records with {request.features} features in [0, 1]"
    return bound_json(bounds, rounds) | {"constants": source}


def bound_json(bounds: theory.BoundGrid, rounds: Sequence[int]) -> dict[str, Any]:
    """A convergence bound over rounds, term by term, as the page draws it."""
    return {
        "source": bounds.source,
        "rounds": list(rounds),
        "terms": {name: term.tolist() for name, term in bounds.terms.items()},
        "total": bounds.total.tolist(),
        "initial_gap": bounds.trivial,
        "vacuous": bool(not np.nanmin(bounds.total) < bounds.trivial),
    }


def _multiples(rounds: int, factors: Sequence[float]) -> list[int]:
    multiples = {max(1, round(rounds * factor)) for factor in factors}
    return sorted(value for value in multiples if value <= LIMITS["rounds"][1])


@lru_cache(maxsize=64)
def _constants(method: str, features: int) -> ProblemConstants:
    return estimate(spec_of(PlanRequest(method=method, records=2000, clients=10)), synthetic_data(2000, features))


def _clip(spec: Spec) -> float:
    return _PARAM_CLIP if spec.method == "nbafl" else spec.privacy.clip_norm


def _candidate(request: PlanRequest, noise: RequiredNoise) -> Candidate:
    spec, prepared, releases = _basis(_of_any_model(request))
    point = {name: getattr(spec, name) for name in INTEGER_KEYS} | {clip_key(spec.method): _clip(spec)}
    factor = noise.noise_std / releases[0].noise_std
    hyper = {
        name: np.asarray(value) * factor if name in prepared.plan.noise_names else value
        for name, value in prepared.hyper.items()
    }
    return Candidate(
        point=point | {"client_lr": spec.client_lr},
        spec=spec,
        noise_std=noise.noise_std,
        claimed=prepared.reclaim(hyper) if prepared.reclaim else prepared.claim,
        uploads=request.rounds * request.share,
        num_params=request.features + 1,
    )
