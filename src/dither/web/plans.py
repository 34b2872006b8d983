"""The noise that a budget asks for, fast enough to follow a slider: the accountant itself, a few evaluations each.

What is fixed: the server sees every upload, all clients hold equally many records, logistic regression, Poisson
batches where the method takes them. Where only some clients take part in a round, nobody is drawn: the plan counts
as many participations as no client exceeds with 95% probability. The copied spec says `privacy.noise = "proven"`,
so that the run itself solves for the noise of what really happens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binom

from dither import accounting, models
from dither.errors import NoProof, SpecError
from dither.experiment.plan import theory
from dither.experiment.plan.constants import Constants, estimate
from dither.experiment.plan.knobs import WHOLE, clip_key
from dither.experiment.plan.pricing import Price
from dither.experiment.plan.shapes import synthetic
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
NEIGHBOURS = (accounting.ZERO_OUT, accounting.REPLACE_ONE)  # with add/remove a plan could show no count
_SURE = 0.95
_CLOSE = 0.005  # the proven ε is at most the target and within this share of it


class Wish(NamedTuple):
    """The sliders."""

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
        """Clients a round."""
        return max(1, min(self.clients, round(self.share * self.clients)))

    @property
    def each(self) -> int:
        """Records of a client."""
        return self.records // self.clients


class Needed(NamedTuple):
    """The noise, and what it is for."""

    noise_std: float
    multiplier: float
    proven: float
    recipe: str
    detail: str
    participations: int
    evaluations: int


def wish(given: Mapping[str, str]) -> Wish:
    """The sliders of a request; a value that is none of theirs is a `SpecError` that names it."""
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name in ("method", "adjacency"):
            known = METHODS if name == "method" else NEIGHBOURS
            if text not in known:
                raise SpecError(f"{name}={text[:40]!r} is not one of {', '.join(known)}")
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
    made = Wish(**values)
    if made.each < 1:
        raise SpecError(f"records={made.records} for clients={made.clients}: each needs at least one record")
    return made._replace(batch=min(made.batch, made.each))


def spec_of(w: Wish, values: Mapping[str, Any] | None = None) -> Spec:
    """The wish as a spec: what "copy spec" gives, and what is priced."""
    own = {
        "num_clients": w.clients,
        "cohort_size": w.cohort,
        "num_rounds": w.rounds,
        "local_steps": w.steps,
        "batch_size": w.batch,
        "eval_every": max(1, w.rounds // 20),
        "privacy.epsilon": w.epsilon,
        "privacy.delta": w.delta,
        "privacy.unit": "run",
        "privacy.noise": "proven",
        "privacy.noise_std": 0.0,
        "privacy.noise_schedule": "constant",
        "privacy.noise_decay": 1.0,
        "privacy.noise_decay_start": 0,
        "privacy.view": "upload",
        "privacy.adjacency": w.adjacency,
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
    if w.method in _POISSON:
        own |= {"batch_sampling": "poisson", "sampling_rate": min(1.0, w.batch / w.each)}
    if w.method == "nbafl":
        own |= {"batch_size": 1, "method_options.param_clip": 20.0}
    else:
        own |= {"privacy.clip": "example", "privacy.clip_norm": 1.0}
    if w.method == "secure-fedavg":
        own |= {"model.l2": 1e-4, "lr_decay": 0.0}
    if w.method == "dp-scaffold":
        own |= {"method_options.stop_at_budget": "no", "client_lr": 0.5}
    return Spec.from_preset(w.method).with_values(_known(w.method, own) | dict(values or {}))


def _known(method: str, values: dict[str, Any]) -> dict[str, Any]:
    options = Spec.from_preset(method).method_options
    prefix = "method_options."
    return {
        key: value
        for key, value in values.items()
        if not key.startswith(prefix) or key.removeprefix(prefix) in options
    }


def needed(w: Wish) -> Needed:
    """The least noise (to half a percent) whose proven ε of the whole run is at most the wish's."""
    return _needed(w._replace(features=0), w.features)


@lru_cache(maxsize=4096)
def _needed(w: Wish, features: int) -> Needed:
    del features  # noise on a coordinate does not depend on how many there are
    prepared, released = _released(w)
    count = _participations(w, prepared)
    facts = accounting.Facts(
        cohort_size=w.cohort,
        client_state=prepared.client_state,
        own_epochs=prepared.own_epochs,
        exposures=prepared.exposures,
        num_rounds=w.rounds,
    )

    def at(factor: float) -> accounting.Proven:
        louder = tuple(release._replace(noise_std=release.noise_std * factor) for release in released)
        return accounting.proven([(louder, count)], w.delta, facts, view="upload", adjacency=w.adjacency)

    best, found, tried = solve(at, w.epsilon, guess=_guess(released, count, w))
    first = released[0]
    return Needed(
        noise_std=first.noise_std * best,
        multiplier=first.noise_std * best / first.sensitivity,
        proven=found.value,
        recipe=found.recipe,
        detail=found.detail,
        participations=count,
        evaluations=tried,
    )


def solve(at: Any, epsilon: float, guess: float) -> tuple[float, accounting.Proven, int]:
    """A factor whose ε is at most `epsilon` and within half a percent of it: secants of ln ε over ln factor."""
    target = math.log(epsilon * (1 - _CLOSE / 2))
    quiet, loud = -math.inf, math.inf  # ln factors known to be too small, and enough
    best: tuple[float, accounting.Proven] | None = None
    x, slope, before, tried = math.log(guess), -1.0, None, 0
    while tried < 40:
        found = at(math.exp(x))
        tried += 1
        y = math.log(min(max(found.value, 1e-12), 1e12))
        if found.value <= epsilon:
            loud = min(loud, x)
            if best is None or x <= best[0]:
                best = (x, found)
            if found.value >= epsilon * (1 - _CLOSE) or loud - quiet < 1e-6:
                break
        else:
            quiet = max(quiet, x)
            if math.isinf(found.value) and x > math.log(guess) + 30:
                raise NoProof(f"no noise has a proven ε here: {found.detail}")
        if before is not None and abs(x - before[0]) > 1e-9:
            slope = min(max((y - before[1]) / (x - before[0]), -4.0), -0.2)
        before = (x, y)
        x = x + min(max((target - y) / slope, -5.0), 5.0)
        if not quiet < x < loud:  # a bend in the curve: close in by halves
            x = quiet + 1.0 if loud == math.inf else loud - 1.0 if quiet == -math.inf else (quiet + loud) / 2
    if best is None:
        raise NoProof(f"no noise was found for ε = {epsilon:g}")
    return math.exp(best[0]), best[1], tried


def _released(w: Wish) -> tuple[Prepared, tuple[Release, ...]]:
    spec = spec_of(w)
    size = np.full(w.clients, w.each)
    model = models.make("logistic", num_features=2, num_classes=2, hidden=(), image_shape=())
    prepared = prepare(spec, model, client_sizes=size, num_params=3)
    released = prepared.build(prepared.hyper).releases(RoundInfo(0, 0, w.each, w.cohort))
    if not released or not all(release.noise_std > 0 for release in released):
        raise NoProof(f"{w.method} releases something without noise at this setting")
    return prepared, released


def _participations(w: Wish, prepared: Prepared) -> int:
    if prepared.cohorts is not None:
        return int(np.bincount(prepared.cohorts.ravel(), minlength=w.clients).max())
    if w.cohort == w.clients:
        return w.rounds
    each = 1 - (1 - _SURE) / w.clients  # no client of all of them exceeds it
    certain = sum(prepared.cohort_size_at(index) == w.clients for index in range(w.rounds))  # rounds with everyone
    drawn = binom.ppf(each, w.rounds - certain, w.cohort / w.clients)
    return int(min(w.rounds, max(1, certain + drawn)))


def _guess(released: tuple[Release, ...], count: int, w: Wish) -> float:
    """Where to start: a Gaussian of the same number of steps, thinned by the sampling rate."""
    first = released[0]
    steps = max(1.0, count * first.uses)
    rate = first.sampling.rate if first.sampling.kind in ("poisson", "fixed") else 1.0
    multiplier = max(rate * math.sqrt(steps), 0.3) * accounting.gaussian_noise_multiplier(w.epsilon, w.delta)
    return max(multiplier * first.sensitivity / first.noise_std, 1e-9)


# What the noise means


def answer(w: Wish) -> dict[str, Any]:
    """The plan for one position of the sliders."""
    found = needed(w)
    spec = spec_of(w)
    priced = _price(w, spec, found)
    params = w.features + 1
    return {
        "wish": {**w._asdict(), "cohort": w.cohort, "each": w.each},
        "noise_std": found.noise_std,
        "multiplier": found.multiplier,
        "proven": found.proven,
        "recipe": found.recipe,
        "detail": found.detail,
        "not_covered": [accounting.FLOAT_NOISE],
        "participations": found.participations,
        "sure": w.cohort == w.clients or spec.method == "concentrated",
        "evaluations": found.evaluations,
        "claimed": {"value": priced.claimed.value, "unit": priced.claimed.unit, "source": priced.claimed.source},
        "averaged_std": found.noise_std / math.sqrt(w.cohort),
        "clip": 20.0 if w.method == "nbafl" else spec.privacy.clip_norm,
        "bytes": 4.0 * params * w.cohort * w.rounds,
        "spec": spec.to_toml(),
    }


def curve(w: Wish) -> dict[str, Any]:
    """The noise for other budgets, and for other numbers of rounds, at the wish's other sliders."""
    low, high = LIMITS["epsilon"]
    budgets = [w.epsilon * factor for factor in (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)]
    rounds = sorted({max(1, round(w.rounds * factor)) for factor in (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)})
    budgets = [value for value in budgets if low <= value <= high]
    rounds = [value for value in rounds if value <= LIMITS["rounds"][1]]
    return {
        "epsilon": budgets,
        "by_epsilon": [needed(w._replace(epsilon=value)).multiplier for value in budgets],
        "rounds": rounds,
        "by_rounds": [needed(w._replace(rounds=value)).multiplier for value in rounds],
    }


def bound(w: Wish) -> dict[str, Any]:
    """The paper's bound over rounds at the noise that the budget asks for, term by term."""
    constants = _constants(w.method, w.features)
    grid = sorted({max(1, round(w.rounds * factor)) for factor in (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)})
    grid = [rounds for rounds in grid if rounds <= LIMITS["rounds"][1]]
    prices = []
    for rounds in grid:
        there = w._replace(rounds=rounds)
        prices.append(_price(there, spec_of(there), needed(there)))
    found = theory.bounds(spec_of(w), prices, constants, w.each)
    return {
        "source": found.source,
        "rounds": grid,
        "terms": {name: term.tolist() for name, term in found.terms.items()},
        "total": found.total.tolist(),
        "initial_gap": found.trivial,
        "vacuous": found.vacuous,
        "constants": f"estimated on synthetic records with {w.features} features in [0, 1]",
    }


@lru_cache(maxsize=64)
def _constants(method: str, features: int) -> Constants:
    spec = spec_of(Wish(method=method, records=2000, clients=10, features=features))
    return estimate(spec, synthetic(2000, features))


def _price(w: Wish, spec: Spec, found: Needed) -> Price:
    clip = 20.0 if w.method == "nbafl" else spec.privacy.clip_norm
    point = {name: getattr(spec, name) for name in WHOLE} | {clip_key(w.method): clip}
    point |= {"client_lr": spec.client_lr}
    prepared, released = _released(w)
    factor = found.noise_std / released[0].noise_std
    hyper = {
        name: np.asarray(value) * factor if name in prepared.noise_names else value
        for name, value in prepared.hyper.items()
    }
    return Price(
        point=point,
        spec=spec,
        noise_std=found.noise_std,
        printed_noise_std=math.nan,
        claimed=prepared.reclaim(hyper) if prepared.reclaim else prepared.claim,
        participations=found.participations,
        uploads=w.rounds * w.share,
        num_params=w.features + 1,
        signal_to_noise=math.nan,
    )
