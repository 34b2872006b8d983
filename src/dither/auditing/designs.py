"""Constructed neighbours: datasets on which one record shows as much as it can.

A proof speaks of all datasets, so the attack may choose them. The target client holds records that are all alike
but one, the canary; the neighbour has another record in its place, a blank or none. What the adversary may choose
as well is the model that is broadcast.

saturated   logistic and softmax models: class 0 is made certain by its bias, so that a record (v, class 1) has the
            gradient of its features wherever training goes, and (-v, class 1) its opposite; (0, class 0) has none
flipped     any model: the record (v, class 1) against (v, class 0), started where both are equally likely: their
            gradients are opposite, and of any length where nothing clips them
others      the other records of the client: "opposing" are the neighbour's record over and over (errata G3: with a
            batch of fixed size an unused record is replaced by another one), "silent" have no gradient
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dither.models import Model
from dither.privacy.sampling import ADD_REMOVE, ZERO_OUT
from dither.types import Params

REACH = 20.0  # norm of a saturated record: within 0.2% of its gradient is its own direction, the rest the bias
_SURE = 25.0  # log-odds at which a class is certain


class Record(NamedTuple):
    """One record."""

    x: np.ndarray
    y: int


class Design(NamedTuple):
    """A pair of neighbouring datasets of one client, what the other clients hold, and the model broadcast."""

    name: str
    canary: Record
    neighbour: Record | None  # None: the record is absent (add/remove); a label below 0: blanked (zero-out)
    others: tuple[Record, ...]  # the client's other records, repeated in turn
    strangers: tuple[Record, ...]  # what the other clients hold, repeated in turn
    start: Params


class World(NamedTuple):
    """One dataset of a pair as arrays: the target's rows and how many count, and the other clients' rows."""

    x: Any
    y: Any
    size: Any
    strange_x: Any
    strange_y: Any


def world(design: Design, size: int, rows: int, *, inside: bool, positions: np.ndarray) -> World:
    """The dataset with the canary at `positions` (inside), or with its neighbour there."""
    held = [design.others[i % len(design.others)] for i in range(rows)]
    count = size
    record = design.canary if inside else design.neighbour
    if record is None:
        count = size - len(positions)
    else:
        for position in positions:
            held[int(position)] = record
    x, y = stack(held)
    strange_x, strange_y = stack([design.strangers[i % len(design.strangers)] for i in range(rows)])
    return World(jnp.asarray(x), jnp.asarray(y), jnp.int32(count), jnp.asarray(strange_x), jnp.asarray(strange_y))


def stack(records: list[Record]) -> tuple[np.ndarray, np.ndarray]:
    return np.stack([r.x for r in records]).astype(np.float32), np.array([r.y for r in records], np.int32)


def designs(
    model: Model,
    num_features: int,
    *,
    adjacency: str,
    movement: float,
    clip: str,
    clip_norm: float,
    batch_size: int = 1,
    norm_bound: float | None = None,
    seed: int = 0,
) -> list[Design]:
    """The pairs that an audit tries.

    A clipped linear model is attacked where its gradients stay at the clip, others where labels are flipped;
    `movement` is how far training may carry the model in what the adversary sees of it. `norm_bound` keeps
    records within a public bound on their norm, for proofs that rest on one (G7b).
    """
    start = model.init(jax.random.key(seed))
    ones = np.ones(num_features) / math.sqrt(num_features)
    found = []
    blank = Record(np.zeros(num_features), -1)  # `local.train` gives it no weight: its gradient counts as zero

    def instead(other: Record) -> Record | None:
        return None if adjacency == ADD_REMOVE else blank if adjacency == ZERO_OUT else other

    linear = model.name in ("logistic", "softmax")
    silent = Record(np.zeros(num_features), 0)
    if linear and norm_bound is None and clip != "none":
        # Where the batch's mean is clipped as a whole, the canary must outweigh all others in it to turn it round.
        reach = REACH * (min(2 * batch_size, 500) if clip == "batch" else 1)
        certain = _favour(start, model, _SURE + reach * movement)
        canary, mirrored, against = (Record(r * ones, 1) for r in (reach, -reach, -REACH))
        found.append(Design("saturated, others silent", canary, instead(mirrored), (silent,), (silent,), certain))
        if adjacency != ADD_REMOVE:
            found.append(
                Design("saturated, others opposing", canary, instead(against), (against,), (silent,), certain)
            )
        return found
    # Where the parameters themselves are clipped, large biases would leave no room for anything else.
    even = start if clip == "none" else _only_two_classes(start, model)
    empty = (Record(np.zeros(num_features), 0), Record(np.zeros(num_features), 1))
    # Other clients whose own steps contract their noise as much as a clip allows: G7b's worst case.
    short = min(2.0 * clip_norm, norm_bound or math.inf, math.sqrt(num_features))
    contracting = (Record(short * ones, 0), Record(short * ones, 1))
    # A network would overflow with features that large.
    norms = [norm_bound or math.sqrt(num_features)] + ([1e6] if linear and clip == "none" else [])
    for norm in norms:
        canary, opposite = Record(norm * ones, 1), Record(norm * ones, 0)
        size = "large" if norm > 1e3 else "in range"
        found.append(Design(f"flipped {size}, others empty", canary, instead(opposite), empty, contracting, even))
        if adjacency != ADD_REMOVE:
            found.append(
                Design(
                    f"flipped {size}, others opposing", canary, instead(opposite), (opposite,), contracting, even
                )
            )
    return found


def _last_bias(params: Params, model: Model) -> str:
    return model.layers[-1].name if model.layers else "out"


def _favour(params: Params, model: Model, log_odds: float) -> Params:
    """Class 0 certain: its bias raised, or for one sigmoid output the bias lowered."""
    name = _last_bias(params, model)
    bias = params[name]["b"]
    raised = jnp.full((1,), -log_odds) if bias.shape == (1,) else jnp.zeros_like(bias).at[0].set(log_odds)
    return {**params, name: {**params[name], "b": raised}}


def _only_two_classes(params: Params, model: Model) -> Params:
    """Classes beyond the first two ruled out, where the model's last bias is known."""
    name = _last_bias(params, model)
    if not isinstance(params, dict) or name not in params or params[name]["b"].shape[0] <= 2:
        return params
    bias = jnp.full_like(params[name]["b"], -_SURE).at[:2].set(0.0)
    return {**params, name: {**params[name], "b": bias}}


def certain_start(model: Model, movement: float, *, seed: int) -> Params:
    """A model that is certain of class 0 and stays so while training moves it by `movement`."""
    return _favour(model.init(jax.random.key(seed)), model, _SURE + REACH * movement)
