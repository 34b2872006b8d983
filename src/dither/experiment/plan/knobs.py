"""What a plan may choose: the knobs, the values tried for each, and the spec of one choice.

A point is a mapping of spec keys to values, ready for `Spec.with_values`. Learning rates are tried by *reach*: how
far the model can move in a whole run when every gradient is as long as its clip, rounds × steps × rate × clip. The
best reach depends far less on the other knobs than the best rate does: few need to be tried at each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dither.errors import SpecError, did_you_mean
from dither.spec import Spec

Point = dict[str, Any]

# Spec key -> what people call it. The clip of NbAFL is on parameters, that of the others on gradients.
NAMES = {
    "num_rounds": "rounds",
    "cohort_size": "clients a round",
    "local_steps": "local steps",
    "batch_size": "batch",
    "privacy.clip_norm": "clip",
    "method_options.param_clip": "clip",
    "client_lr": "learning rate",
}
WHOLE = ("num_rounds", "cohort_size", "local_steps", "batch_size")


class Impossible(SpecError):
    """What was asked for cannot be had; the message names the nearest point that can."""


class Ranges(NamedTuple):
    """The values that are tried, by spec key; `reach` in place of learning rates where none are given."""

    values: Mapping[str, Sequence[Any]]
    reach: Sequence[float]


def clip_key(method: str) -> str:
    """The key of the clip that the method's sensitivity rests on."""
    return "method_options.param_clip" if method == "nbafl" else "privacy.clip_norm"


def ranges(base: Spec, smallest: int, given: Mapping[str, Sequence[Any]], *, effort: str = "search") -> Ranges:
    """Values for every knob, from public facts alone: clients, the records of the smallest client, the method.

    effort "bound" is fine in what a bound depends on, for which a point costs nothing but its noise; "search" is
    coarse, since every point is trained (the search refines it); "quick" is coarser still. `given` replaces the
    values of a knob; a single value fixes it.
    """
    key = clip_key(base.method)
    known = {*WHOLE, "client_lr", key}
    for name in given:
        if name not in known:
            raise SpecError(f"unknown knob {name!r}{did_you_mean(name, known)}")
    clients = base.num_clients
    fine, quick = effort == "bound", effort == "quick"
    tried: dict[str, Sequence[Any]] = {
        "num_rounds": (5, 10, 20, 40, 80, 160) if fine else (10, 40) if quick else (10, 30, 100),
        "cohort_size": (max(1, clients // 2), clients) if fine else (clients,),
        "local_steps": (1, 2, 5, 10) if fine else (1,) if quick else (1, 4),
        "batch_size": _batches(base, smallest, effort),
        key: (0.5, 2.0) if quick else (0.5, 1.0, 2.0),
    }
    reach: Sequence[float] = (16.0, 64.0) if quick else (8.0, 32.0, 128.0)
    if base.method == "secure-fedavg" and not fine and not quick:  # a round reveals little: more of them
        tried["num_rounds"] = (30, 100, 300)
    if base.method == "nbafl":  # no gradient is clipped: the rate is Adam's or SGD's own
        tried |= {"client_lr": (0.005, 0.02, 0.08), key: (0.5, 2.0, 8.0), "local_steps": (5, 20)}
        tried["num_rounds"] = (1, 2, 4, 8, 16, 32) if fine else (1, 5) if quick else (1, 2, 5, 20)
    tried |= {name: tuple(values) for name, values in given.items()}
    _check(base, smallest, tried)
    return Ranges(tried, (math.nan,) if "client_lr" in tried else reach)


def _batches(base: Spec, smallest: int, effort: str) -> Sequence[int]:
    if base.method == "nbafl" or base.batch_sampling == "full":
        return (smallest,)
    if base.method == "secure-fedavg":  # its sensitivity does not shrink with the batch (E4): small batches
        shares = [size / smallest for size in ((1, 4, 16) if effort == "bound" else (1, 4))]
    else:
        shares = [1 / 32, 1 / 8, 1.0] if effort == "bound" else [1 / 16, 1.0]
    if effort == "quick":
        shares = shares[-1:] if base.method != "secure-fedavg" else shares[:1]
    return tuple(sorted({min(smallest, max(1, round(share * smallest))) for share in shares}))


def _check(base: Spec, smallest: int, tried: Mapping[str, Sequence[Any]]) -> None:
    for name, values in tried.items():
        whole = name in WHOLE
        bad = [v for v in values if not v > 0 or not math.isfinite(v) or (whole and int(v) != v)]
        if bad or not values:
            kind = "whole numbers" if whole else "numbers"
            raise SpecError(f"{name}={list(values)} must be {kind} above 0")
    clients = base.num_clients
    if min(tried["cohort_size"]) > clients:
        raise Impossible(
            f"cohort_size={min(tried['cohort_size'])} exceeds the {clients} clients; nearest feasible: "
            f"cohort_size={clients}"
        )
    if min(tried["batch_size"]) > smallest:
        wanted = min(tried["batch_size"])
        fewer = max(1, clients * smallest // wanted)
        raise Impossible(
            f"batch_size={wanted} exceeds the {smallest} records of the smallest of {clients} clients; nearest "
            f"feasible: batch_size={smallest}, or the same records over at most {fewer} clients"
        )


def points(base: Spec, chosen: Ranges, smallest: int) -> list[Point]:
    """Every combination that the facts allow, the noise aside."""
    key = clip_key(base.method)
    names = [*WHOLE, key, *(["client_lr"] if "client_lr" in chosen.values else [])]
    found = []
    for values in itertools.product(*(chosen.values[name] for name in names)):
        one = dict(zip(names, values, strict=True))
        if one["cohort_size"] > base.num_clients or one["batch_size"] > smallest:
            continue
        found += [completed(base, one, reach, smallest) for reach in chosen.reach]
    return found


def completed(base: Spec, point: Mapping[str, Any], reach: float, smallest: int) -> Point:
    """The point with its learning rate from `reach` (unless it has one) and the sampler its batch asks for."""
    one = dict(point)
    if "client_lr" not in one:
        one["client_lr"] = reach / (one["num_rounds"] * one["local_steps"] * one[clip_key(base.method)])
    # A batch of all records needs no drawing; whatever the sampler, it is the full batch.
    one["batch_sampling"] = "full" if one["batch_size"] >= smallest else base.batch_sampling
    return one


def shape(point: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the compiled program and the accountant depend on: everything but clip and rate."""
    return (*(point[name] for name in WHOLE), point["batch_sampling"])


def neighbours(base: Spec, point: Point, smallest: int, fixed: Iterable[str] = ()) -> list[Point]:
    """Points one step away: each knob doubled or halved (rounds with the rate's reach kept)."""
    key, still = clip_key(base.method), set(fixed)
    found = []
    for name in (*WHOLE, key, "client_lr"):
        if name in still:
            continue
        for factor in (0.5, 2.0):
            one = {**point, name: point[name] * factor}
            if name in WHOLE:
                one[name] = max(1, round(one[name]))
            if name in ("num_rounds", "local_steps", key) and "client_lr" not in still and base.method != "nbafl":
                one["client_lr"] = point["client_lr"] * point[name] / one[name]
            one["cohort_size"] = min(one["cohort_size"], base.num_clients)
            one["batch_size"] = min(one["batch_size"], smallest)
            one = completed(base, one, math.nan, smallest)
            if one != point and one not in found:
                found.append(one)
    return found
