"""Warnings that a colleague would give after a run: what went wrong, and which key of the spec to change.

Advice that is released rests on public test records and the released model alone. Where test records are not
public it rests on the clients' records: it is then exact, stays in `local/` and is shown to the owner only. That
training diverged is then told by what the released model says of made-up records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dither.experiment import metrics
from dither.experiment.metrics import TestScores

if TYPE_CHECKING:
    from dither.experiment.build import Experiment
    from dither.models import Model
    from dither.spec import Spec
    from dither.types import Params

DIVERGED, TRIVIAL, CLIPPED, RISING = "diverged", "no better than trivial", "clipped", "rising loss"
_DIVERGED_LOSS = 10.0  # times that of a constant prediction
_WILD_SCORE = 1000.0  # of made-up records: a probability is 0 or 1 to float32 from 100 on
_RISEN = 1.1  # times the smallest loss of the run
_MOSTLY_CLIPPED, _CLASS_CLIPPED = 0.75, 0.9
_LEAST_GAIN = 0.01  # of what a trivial predictor leaves to gain
_MOST_RECORDS = 5000  # that gradients, or local scores, are computed for
_MOST_GENERIC = 512  # where each gradient is formed
_SCORED_AT_ONCE = 16_384
_LEAST_OF_CLASS = 10


@dataclass(frozen=True)
class Advice:
    """One warning: its kind, the key of the spec to change, and a sentence."""

    kind: str
    key: str
    text: str


class Evidence(NamedTuple):
    """What advice rests on, on one set of records."""

    spec: Spec
    records: str  # what they are, in words
    rounds: Sequence[int]
    losses: Sequence[float]  # at each evaluation
    trivial_loss: float  # of the best constant prediction
    scores: TestScores
    norms: (
        np.ndarray
    )  # of the records' gradients at the final model; empty where records are not clipped one by one
    y: np.ndarray
    classes: Sequence[str]


class Labelled(NamedTuple):
    """Some rows of encoded records, in memory or on disk."""

    x: Any
    y: np.ndarray
    rows: np.ndarray
    name: str  # what they are, in words

    def pieces(self) -> Iterator[np.ndarray]:
        """The records, some at a time, in the order of `rows`."""
        for at in range(0, len(self.rows), _SCORED_AT_ONCE):
            rows = self.rows[at : at + _SCORED_AT_ONCE]
            if isinstance(self.x, np.ndarray):
                yield self.x[rows]
                continue
            ascending = np.argsort(rows)
            read, piece = (np.empty((len(rows), self.x.shape[1]), np.float32) for _ in range(2))
            self.x.read(rows[ascending], read)
            piece[ascending] = read
            yield piece


class Judgement(NamedTuple):
    """Scores of a finished run, and advice."""

    scores: TestScores
    advice: tuple[Advice, ...]


def judge_run(
    experiment: Experiment, params: Params, evaluations: Sequence[Mapping[str, Any]], *, local: bool = False
) -> Judgement | None:
    """Scores and advice on the public test records of a run; with `local` on some of the clients' own training
    records. None where there are no such records."""
    problem = experiment.problem
    rows = experiment.partition.order[:_MOST_RECORDS] if local else problem.test_rows[0]
    rows = rows[np.asarray(problem.y)[rows] >= 0]  # without blanks
    records = Labelled(problem.x, problem.y, rows, "your records" if local else "public test records")
    name = "train_loss" if local else "loss"
    losses = [(row["round"], float(row[name])) for row in evaluations]  # "inf" and "nan" are text in a folder
    return judge(experiment, params, losses, records) if len(rows) else None


def diverged_model(experiment: Experiment, params: Params) -> Advice | None:
    """Whether the released model itself tells that training diverged: what it says of made-up records."""
    x = np.random.default_rng(0).random((64, experiment.problem.x.shape[1]), np.float32)
    size = float(np.median(np.abs(np.asarray(experiment.model.apply(params, x)))))
    if size <= _WILD_SCORE:  # also False for NaN
        return None
    return Advice(
        DIVERGED,
        "client_lr",
        f"training diverged: the model gives made-up records scores of about {size:.3g}, where 10 is certainty; "
        f"lower client_lr (now {experiment.spec.client_lr:g})",
    )


def final_scores(experiment: Experiment, params: Params) -> dict[str, float]:
    """Scores on the public test records that evaluations do not have."""
    problem = experiment.problem
    rows = problem.test_rows[0]
    if not len(rows) or not experiment.spec.scored:
        return {}
    _, scores = _scored(experiment, params, Labelled(problem.x, problem.y, rows, "public test records"))
    return scores.beside_evaluations()


def _scored(experiment: Experiment, params: Params, records: Labelled) -> tuple[np.ndarray, TestScores]:
    """What the model says of each record, and how good that is."""
    model, dataset, y = experiment.model, experiment.dataset, records.y[records.rows]
    outputs = np.concatenate([np.asarray(model.apply(params, x)) for x in records.pieces()])
    bounds = dataset.label_bounds
    return outputs, metrics.evaluate(model, outputs, y, classes=dataset.classes, label_bounds=bounds)


def judge(
    experiment: Experiment, params: Params, losses: Sequence[tuple[int, float]], records: Labelled
) -> Judgement:
    """Scores and advice for a model on given records; `losses` are those of its evaluations, with their rounds."""
    model, spec, dataset = experiment.model, experiment.spec, experiment.dataset
    y = records.y[records.rows]
    outputs, scores = _scored(experiment, params, records)
    norms = np.zeros(0)
    if spec.privacy.clip == "example" and spec.privacy.noise != "none":
        some = records._replace(rows=records.rows[:_MOST_RECORDS])
        norms = gradient_norms(model, params, next(some.pieces()), y[:_MOST_RECORDS])
    evidence = Evidence(
        spec=spec,
        records=records.name,
        rounds=[number for number, _ in losses],
        losses=[loss for _, loss in losses],
        trivial_loss=trivial_loss(model, outputs, y),
        scores=scores,
        norms=norms,
        y=y[: len(norms)],
        classes=dataset.classes,
    )
    return Judgement(scores, advise(evidence))


def advise(evidence: Evidence) -> tuple[Advice, ...]:
    """All warnings, the gravest first. A run that diverged needs no other."""
    found = _diverged(evidence)
    if found is not None:
        return (found,)
    clipped = _clipped(evidence)
    all_of_them = (_trivial(evidence, clipped), clipped, _rising(evidence))
    return tuple(each for each in all_of_them if each is not None)


def _diverged(e: Evidence) -> Advice | None:
    loss = e.losses[-1]
    if loss <= _DIVERGED_LOSS * e.trivial_loss:  # also False for NaN
        return None
    return Advice(
        DIVERGED,
        "client_lr",
        f"training diverged: the loss on {e.records} is {loss:.3g}, that of a constant prediction "
        f"{e.trivial_loss:.3g}; lower client_lr (now {e.spec.client_lr:g})",
    )


def _trivial(e: Evidence, clipped: Advice | None) -> Advice | None:
    name = "accuracy" if e.classes else "r2"
    if name not in e.scores.model:
        return None
    value, trivial = e.scores.model[name], e.scores.trivial[name]
    noise = float(np.sqrt(trivial * (1 - trivial) / e.scores.records)) if e.classes else 0.0
    if value - trivial > max(_LEAST_GAIN * (1 - trivial), noise):
        return None
    key, fix = _fix_for_trivial(e, clipped)
    others = e.scores.text() if e.classes else f"RMSE {e.scores.model['rmse']:.4g}"
    return Advice(
        TRIVIAL,
        key,
        f"the model is no better than a constant ({e.scores.trivial_predictor}): {metrics.NAMES[name]} "
        f"{value:.4f} against {trivial:.4f} on {e.records} ({others}); {fix}",
    )


def _fix_for_trivial(e: Evidence, clipped: Advice | None) -> tuple[str, str]:
    if clipped is not None:
        return clipped.key, f"raise {clipped.key}, see the next warning"
    quarter = len(e.losses) // 4
    if quarter and e.losses[-1] < 0.99 * e.losses[-1 - quarter]:
        return "num_rounds", f"the loss still falls: raise num_rounds (now {e.spec.num_rounds}) or client_lr"
    share = e.scores.trivial["accuracy"] if e.classes else 0.0
    if share > 0.8 and not e.spec.model.class_weight and not e.spec.model.class_counts:
        return (
            "model.class_counts",
            "give the public shares of the classes as model.class_counts, or judge it by AUC",
        )
    return "privacy.epsilon", "use more records or a larger privacy.epsilon, or fewer features"


def _clipped(e: Evidence) -> Advice | None:
    clip_norm = e.spec.privacy.clip_norm
    if not len(e.norms):
        return None
    share = float(np.mean(e.norms > clip_norm))
    if share > _MOSTLY_CLIPPED:
        better, whose = float(np.quantile(e.norms, 0.9)), f"{share:.0%} of the gradients"
    else:
        shares = {
            number: float(np.mean(e.norms[e.y == number] > clip_norm))
            for number in range(len(e.classes))
            if np.sum(e.y == number) >= _LEAST_OF_CLASS
        }
        worst = max(shares, key=lambda number: shares[number], default=None)
        if worst is None or shares[worst] < _CLASS_CLIPPED or min(shares.values()) > _CLASS_CLIPPED / 2:
            return None
        better = float(np.median(e.norms[e.y == worst]))
        whose = f"{shares[worst]:.0%} of the gradients of class {e.classes[worst]!r}, {share:.0%} of all,"
    return Advice(
        CLIPPED,
        "privacy.clip_norm",
        f"{whose} are clipped ({e.records}, final model), so they count less than they should; try "
        f"privacy.clip_norm={better:.2g} (now {clip_norm:g})",
    )


def _rising(e: Evidence) -> Advice | None:
    lowest = int(np.argmin(e.losses))
    if len(e.losses) < 4 or lowest > 0.8 * (len(e.losses) - 1) or e.losses[-1] <= _RISEN * e.losses[lowest]:
        return None
    return Advice(
        RISING,
        "client_lr",
        f"the loss on {e.records} rose from {e.losses[lowest]:.4g} after round {e.rounds[lowest]} to "
        f"{e.losses[-1]:.4g}; lower client_lr (now {e.spec.client_lr:g}) or num_rounds, or set lr_decay",
    )


# Figures


def trivial_loss(model: Model, scores: np.ndarray, y: np.ndarray) -> float:
    """The loss of the best constant prediction, for labels like these."""
    if model.task == "regression":
        constant = np.full(len(y), y.mean(), np.float32)
    else:
        num_classes = 2 if scores.ndim == 1 else scores.shape[1]
        logs = np.log(np.maximum(np.bincount(y, minlength=num_classes) / len(y), 1e-6)).astype(np.float32)
        constant = np.broadcast_to(logs, (len(y), num_classes))
        constant = constant[:, 1] - constant[:, 0] if scores.ndim == 1 else constant
    return max(float(np.mean(np.asarray(model.loss(constant, y)))), 1e-9)


def gradient_norms(model: Model, params: Params, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The norm of each record's gradient, before any clip."""
    import jax
    import jax.numpy as jnp

    from dither.models import losses
    from dither.privacy import clipping

    if len(model.layers) == 1:  # an outer product: the loss's slope in the scores, times (record, 1)
        slope = jax.jit(jax.grad(lambda scores, y: jnp.sum(model.loss(scores, y))))
        slopes = np.asarray(slope(model.apply(params, x), y), float)
        squares = np.square(slopes).reshape(len(y), -1).sum(axis=1)
        norms: np.ndarray = np.sqrt(squares * (1 + np.square(x, dtype=float).sum(axis=1)))
        return norms

    def one(record: tuple[Any, Any]) -> Any:
        features, label = record
        return clipping.norm(jax.grad(lambda p: jnp.sum(losses(model, p, features[None], label[None])))(params))

    some = (jnp.asarray(x[:_MOST_GENERIC]), jnp.asarray(y[:_MOST_GENERIC]))
    return np.asarray(jax.lax.map(one, some, batch_size=32))
