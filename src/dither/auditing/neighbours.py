"""Neighbouring data sets on which one record, the canary, reveals as much as possible.

A proof holds for all data sets, so an attack may choose them. All records of the target client are alike except
the canary. The neighbour has another record in its place, a blank one, or none. The adversary also chooses the
model that is broadcast.

saturated   logistic and softmax models: the bias makes class 0 certain, so that a record (v, class 1) has the
            gradient of its features wherever training goes, and (-v, class 1) the opposite; (0, class 0) has none
flipped     any model: the record (v, class 1) against (v, class 0), started where both are equally likely: their
            gradients are opposite, and of any length where nothing clips them

The client's other records either have no gradient ("silent", "empty") or repeat the neighbour's record
("opposing": with a batch of fixed size, another record replaces an unused one; errata G3).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dither.models import Model
from dither.privacy.sampling import ADD_REMOVE, ZERO_OUT
from dither.types import Array, Params

CANARY_NORM = 20.0  # of a saturated record: within 0.2% its gradient is its own direction, the rest the bias
_SURE = 25.0  # log-odds at which a class is certain


class Example(NamedTuple):
    """One record."""

    x: np.ndarray
    y: int


class NeighbouringPair(NamedTuple):
    """Two data sets of one client that differ in one record, the other clients' records, and the broadcast."""

    name: str
    canary: Example
    neighbour: Example | None  # None: the record is absent (add/remove); a label below 0: blank (zero-out)
    others: tuple[Example, ...]  # the client's other records, repeated in turn
    other_clients: tuple[Example, ...]  # what the other clients hold, repeated in turn
    start: Params

    def dataset(self, size: int, rows: int, *, inside: bool, positions: np.ndarray) -> TrialData:
        """The data set with the canary at `positions` (inside), or with its neighbour there."""
        examples = [self.others[i % len(self.others)] for i in range(rows)]
        example = self.canary if inside else self.neighbour
        if example is None:
            size -= len(positions)
        else:
            for position in positions:
                examples[int(position)] = example
        elsewhere = [self.other_clients[i % len(self.other_clients)] for i in range(rows)]
        return TrialData(*stack(examples), jnp.int32(size), *stack(elsewhere))


class TrialData(NamedTuple):
    """One data set of a pair: the target's rows and how many of them count, and the other clients' rows."""

    x: Any
    y: Any
    size: Any
    other_x: Any
    other_y: Any


def stack(examples: list[Example]) -> tuple[Array, Array]:
    """Features and labels as two arrays."""
    x = np.stack([example.x for example in examples]).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(np.array([example.y for example in examples], np.int32))


class PairSetting(NamedTuple):
    """What the choice of a pair depends on."""

    adjacency: str
    movement: float  # how far training may carry the model along what the adversary sees
    clip: str
    clip_norm: float
    batch_size: int = 1
    norm_bound: float | None = None  # public bound on a record's norm, for proofs that rest on one (G7b)
    seed: int = 0

    def neighbour(self, other: Example) -> Example | None:
        """What stands in the canary's place."""
        if self.adjacency == ADD_REMOVE:
            return None
        # `local.train` gives a blank record no weight: its gradient counts as zero
        return Example(np.zeros_like(other.x), -1) if self.adjacency == ZERO_OUT else other


def neighbouring_pairs(model: Model, num_features: int, setting: PairSetting) -> list[NeighbouringPair]:
    """The pairs that an audit tries. A clipped linear model is attacked at points where its gradients stay at
    the clip, other models by flipping labels."""
    start = model.init(jax.random.key(setting.seed))
    if _is_linear(model) and setting.norm_bound is None and setting.clip != "none":
        return _saturated_pairs(model, num_features, setting, start)
    return _flipped_pairs(model, num_features, setting, start)


def _saturated_pairs(
    model: Model, num_features: int, setting: PairSetting, start: Params
) -> list[NeighbouringPair]:
    unit = np.ones(num_features) / math.sqrt(num_features)
    silent = Example(np.zeros(num_features), 0)
    # Where the batch's mean is clipped as a whole, the canary must outweigh all others in it to turn it round.
    norm = CANARY_NORM * (min(2 * setting.batch_size, 500) if setting.clip == "batch" else 1)
    certain = _favour_class_0(start, model, _SURE + norm * setting.movement)
    canary, mirrored, opposing = (Example(r * unit, 1) for r in (norm, -norm, -CANARY_NORM))
    pairs = [
        NeighbouringPair(
            "saturated, others silent", canary, setting.neighbour(mirrored), (silent,), (silent,), certain
        )
    ]
    if setting.adjacency != ADD_REMOVE:
        pairs.append(
            NeighbouringPair(
                "saturated, others opposing", canary, setting.neighbour(opposing), (opposing,), (silent,), certain
            )
        )
    return pairs


def _flipped_pairs(model: Model, num_features: int, setting: PairSetting, start: Params) -> list[NeighbouringPair]:
    unit = np.ones(num_features) / math.sqrt(num_features)
    # Where the parameters themselves are clipped, large biases would leave no room for anything else.
    start = start if setting.clip == "none" else _only_two_classes(start, model)
    empty = (Example(np.zeros(num_features), 0), Example(np.zeros(num_features), 1))
    # Other clients whose own steps contract their noise as much as a clip allows: G7b's worst case.
    short = min(2.0 * setting.clip_norm, setting.norm_bound or math.inf, math.sqrt(num_features))
    contracting = (Example(short * unit, 0), Example(short * unit, 1))
    norms = {"in range": setting.norm_bound or math.sqrt(num_features)}
    if _is_linear(model) and setting.clip == "none":
        norms["large"] = 1e6  # a network would overflow
    pairs = []
    for size, norm in norms.items():
        canary, opposite = Example(norm * unit, 1), Example(norm * unit, 0)
        others = {"empty": empty} | ({} if setting.adjacency == ADD_REMOVE else {"opposing": (opposite,)})
        for kind, examples in others.items():
            name = f"flipped {size}, others {kind}"
            pairs.append(NeighbouringPair(name, canary, setting.neighbour(opposite), examples, contracting, start))
    return pairs


def _is_linear(model: Model) -> bool:
    return model.name in ("logistic", "softmax")


def _last_layer(model: Model) -> str:
    return model.layers[-1].name if model.layers else "out"


def _favour_class_0(params: Params, model: Model, log_odds: float) -> Params:
    """Class 0 certain: its bias raised, or for one sigmoid output the bias lowered."""
    name = _last_layer(model)
    bias = params[name]["b"]
    raised = jnp.full((1,), -log_odds) if bias.shape == (1,) else jnp.zeros_like(bias).at[0].set(log_odds)
    return {**params, name: {**params[name], "b": raised}}


def _only_two_classes(params: Params, model: Model) -> Params:
    """Classes beyond the first two ruled out, if the model's last bias is known."""
    name = _last_layer(model)
    if not isinstance(params, dict) or name not in params or params[name]["b"].shape[0] <= 2:
        return params
    bias = jnp.full_like(params[name]["b"], -_SURE).at[:2].set(0.0)
    return {**params, name: {**params[name], "b": bias}}


def certain_start(model: Model, movement: float) -> Params:
    """A model that is certain of class 0 and stays so while training moves it by `movement`."""
    return _favour_class_0(model.init(jax.random.key(0)), model, _SURE + CANARY_NORM * movement)
