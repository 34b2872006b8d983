"""Membership inference from the final model: LiRA with shadow models that the engine trains side by side.

N. Carlini et al., "Membership Inference Attacks From First Principles", IEEE S&P 2022. Records come in pairs, and
a coin decides which of each pair a model is trained on: all models see as many records, and each pair is an
independent coin, so that what one model gives away is also a one-run audit (Steinke, Nasr, Jagielski 2023) under
replace-one: the bound on ε needs no assumption on how the attack works.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from scipy.stats import norm

from dither import models
from dither.auditing import bounds
from dither.data import ClientPartition, Dataset
from dither.errors import SpecError
from dither.experiment.build import Experiment, build_experiment, load_data
from dither.simulation import engine
from dither.simulation.arrays import Problem
from dither.spec import Spec
from dither.types import Params


class Membership(NamedTuple):
    """Scores of members and of others over all models, and the bound from the model that tells most."""

    scores_in: np.ndarray
    scores_out: np.ndarray
    auc: float
    tpr_at: dict[float, float]  # false positive rate -> true positive rate
    bound: bounds.LowerBound
    experiment: Experiment
    accuracy: float  # of the models, on held-out records


def lira(
    spec: Spec,
    *,
    shadows: int = 200,
    judged: int = 16,
    confidence: float = 0.95,
    seed: int = 0,
    dataset: Dataset | None = None,
) -> Membership:
    """Train `shadows` models in one program and attack each with the others as its shadows.

    The bound is the largest over the first `judged` models, each at a level that keeps `confidence` for all.
    """
    if spec.data.split != "given":
        raise SpecError(f"data.split={spec.data.split!r}: membership inference needs the set's own split")
    if not 1 <= judged <= shadows or shadows < 16:
        raise SpecError(f"shadows={shadows} and judged={judged}: give at least 16 shadows, and fewer judged")
    whole = dataset if dataset is not None else load_data(spec)
    if not whole.classes:
        raise SpecError("membership inference reads class probabilities, but the label is a number")
    rng = np.random.default_rng([seed, 0x117A])
    pairs = rng.permutation(len(whole.y_train))[: len(whole.y_train) // 2 * 2].reshape(-1, 2)
    half = whole._replace(x_train=whole.x_train[pairs[:, 0]], y_train=whole.y_train[pairs[:, 0]])
    experiment = build_experiment(spec, dataset=half)
    coins = rng.integers(0, 2, (shadows, len(pairs)))
    params = _train(experiment, whole, pairs, coins, rng)
    confidences, accuracy = _confidences(experiment, params, whole)
    ratios = _likelihood_ratios(confidences, _members(pairs, coins, len(whole.y_train)))

    rows = np.arange(len(pairs))
    inside = np.stack([ratios[s, pairs[rows, coins[s]]] for s in range(shadows)])
    outside = np.stack([ratios[s, pairs[rows, 1 - coins[s]]] for s in range(shadows)])
    first = np.stack([ratios[s, pairs[:, 0]] - ratios[s, pairs[:, 1]] for s in range(judged)])
    shares = (0.02, 0.1, 0.3)
    each = 1 - (1 - confidence) / (judged * len(shares))
    lower_bounds = [
        bounds.one_run_bound(
            bounds.count_guesses(first[s], coins[s] == 0, share), delta=spec.privacy.delta, confidence=each
        )
        for s in range(judged)
        for share in shares
    ]
    best = max(lower_bounds, key=lambda b: b.value)
    scores_in, scores_out = inside.ravel(), outside.ravel()
    return Membership(
        scores_in,
        scores_out,
        _auc(scores_in, scores_out),
        {fpr: float(np.mean(scores_in > np.quantile(scores_out, 1 - fpr))) for fpr in (0.001, 0.01, 0.1)},
        best._replace(confidence=confidence),
        experiment,
        accuracy,
    )


def _train(
    experiment: Experiment, whole: Dataset, pairs: np.ndarray, coins: np.ndarray, rng: np.random.Generator
) -> Params:
    """All models in one sweep: they share data, method and cohorts, and differ in who is in and in their seed."""
    prepared, shadows = experiment.prepared, len(coins)
    chosen = pairs[np.arange(len(pairs))[None], coins]  # [shadows, pairs]: rows of the whole set
    partitions = [
        ClientPartition(rows[experiment.partition.order].astype(np.int32), *experiment.partition[1:])
        for rows in chosen
    ]
    count = len(whole.y_train)
    problem = Problem(
        np.concatenate([whole.x_train, whole.x_test]),
        np.concatenate([whole.y_train, whole.y_test]),
        partitions,
        [np.arange(count, count + 1)],
        [np.ones(1)],
    )
    return engine.simulate(
        prepared.build,
        experiment.model,
        problem,
        num_rounds=len(experiment.cohorts),
        cohort_size=prepared.cohort_size_at,
        seeds=rng.integers(0, 2**32, shadows, dtype=np.uint32).tolist(),
        hyper={name: np.stack([np.asarray(value)] * shadows) for name, value in prepared.hyper.items()},
        cohorts=[np.stack(experiment.cohorts)] if len({len(c) for c in experiment.cohorts}) == 1 else None,
        eval_every=len(experiment.cohorts),
    ).params


def _confidences(experiment: Experiment, params: Params, whole: Dataset) -> tuple[np.ndarray, float]:
    """ln p/(1-p) of the true class, `[models, records]`, and the mean accuracy on test records."""

    @jax.jit
    def one(trained: Params) -> tuple[jax.Array, jax.Array]:
        probabilities = models.probabilities(experiment.model.apply(trained, whole.x_train))
        right = models.predict(experiment.model.apply(trained, whole.x_test)) == whole.y_test
        return probabilities[np.arange(len(whole.y_train)), whole.y_train], right.mean()

    probabilities_of_truth, accuracy = jax.lax.map(one, params)
    sure = np.clip(np.asarray(probabilities_of_truth, np.float64), 1e-12, 1 - 1e-12)
    return np.log(sure) - np.log1p(-sure), float(np.mean(np.asarray(accuracy)))


def _members(pairs: np.ndarray, coins: np.ndarray, count: int) -> np.ndarray:
    members = np.zeros((len(coins), count), bool)
    for is_member, row in zip(members, coins, strict=True):
        is_member[pairs[np.arange(len(pairs)), row]] = True
    return members


def _likelihood_ratios(values: np.ndarray, members: np.ndarray) -> np.ndarray:
    """ln N(value; in)/N(value; out), Gaussians fitted for each record to all models but the one that is judged."""
    logs = []
    for inside in (members, ~members):
        weight = inside.astype(float)
        count, total, square = weight.sum(0), (weight * values).sum(0), (weight * values**2).sum(0)
        count, total, square = count - weight, total - weight * values, square - weight * values**2
        mean = total / np.maximum(count, 1)
        std = np.sqrt(np.maximum(square / np.maximum(count, 1) - mean**2, 1e-6))
        logs.append(norm.logpdf(values, mean, std))
    return np.asarray(logs[0] - logs[1])


def _auc(inside: np.ndarray, outside: np.ndarray) -> float:
    ranks = np.searchsorted(np.sort(outside), inside)
    return float(np.mean(ranks) / len(outside))
