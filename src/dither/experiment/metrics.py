"""How good a model is on labelled records, beside the best constant prediction.

The metrics are scikit-learn's, and tests hold them to it; they are computed here because its import takes longer
than a small run. Scores on public test records follow from the released model and are released with it; scores on
anybody's private records are exact and stay local.

The second half gives the warnings that a colleague would give after a run: what went wrong, and which key of the
spec to change. Advice that is released rests on public test records and the released model alone. Where test
records are not public it rests on the clients' records, and stays local too; whether training diverged is then
told by what the released model says of made-up records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from dither.experiment.build import Experiment
    from dither.models import Model
    from dither.spec import Spec
    from dither.types import Params

NAMES = {
    "accuracy": "accuracy",
    "auc": "AUC",
    "average_precision": "average precision",
    "f1": "F1",
    "log_loss": "log loss",
    "brier": "Brier",
    "r2": "R²",
    "rmse": "RMSE",
    "mae": "MAE",
}
_MAIN = ("accuracy", "r2")
_MOST_CONFUSED = 50  # classes up to which the confusion matrix is kept
_CALIBRATION_BINS = 10


@dataclass(frozen=True)
class CalibrationBin:
    """Records whose predicted probability is about the same: its mean, and how often the prediction was right."""

    predicted: float
    observed: float
    records: int


@dataclass(frozen=True)
class TestScores:
    """Scores of a model, and of the trivial predictor, on the same records. Metrics that are not defined there
    (such as AUC where all records have one class) are left out.

    Two classes: AUC, average precision, F1, Brier score and calibration are those of the second class. More
    classes: means over classes (one against the rest), the multi-class Brier score, calibration of the predicted
    class. `confusion[i][j]` counts records of class i that were predicted as class j.
    """

    __test__ = False  # no class of tests, whatever its name

    records: int
    model: dict[str, float]
    trivial: dict[str, float]
    trivial_predictor: str
    confusion: tuple[tuple[int, ...], ...] = ()
    calibration: tuple[CalibrationBin, ...] = ()

    def beside_evaluations(self) -> dict[str, float]:
        """What an evaluation does not have: metrics but accuracy and R², and the trivial predictor's score."""
        score = next((self.trivial[name] for name in _MAIN if name in self.trivial), math.nan)
        return {**{name: value for name, value in self.model.items() if name not in _MAIN}, "trivial": score}

    def text(self, predictor: str = "model") -> str:
        """All metrics but accuracy and R² in one line, of the "model" or the "trivial" predictor."""
        values = getattr(self, predictor)
        return ", ".join(
            f"{text} {values[name]:.4g}" for name, text in NAMES.items() if name in values and name not in _MAIN
        )


def classification_scores(probabilities: np.ndarray, y: np.ndarray, classes: Sequence[str]) -> TestScores:
    """Scores of class probabilities `[n, classes]` against class numbers."""
    # A network that diverged may give NaN: no class is then more likely than another.
    probabilities = np.where(np.isfinite(probabilities), probabilities, 1 / len(classes)).astype(np.float64)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    shares = np.bincount(y, minlength=len(classes)) / len(y)
    constant = np.broadcast_to(shares, probabilities.shape)
    predicted = probabilities.argmax(axis=1)
    confusion: tuple[tuple[int, ...], ...] = ()
    if len(classes) <= _MOST_CONFUSED:
        confusion = tuple(tuple(row) for row in _confusion(y, predicted, len(classes)).tolist())
    return TestScores(
        records=len(y),
        model=_class_metrics(probabilities, y),
        trivial=_class_metrics(constant, y),
        trivial_predictor=f"always {classes[int(shares.argmax())]!r}",
        confusion=confusion,
        calibration=_calibration(probabilities, y),
    )


def _confusion(y: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    return np.bincount(y * num_classes + predicted, minlength=num_classes**2).reshape(num_classes, num_classes)


def _class_metrics(probabilities: np.ndarray, y: np.ndarray) -> dict[str, float]:
    num_classes = probabilities.shape[1]
    binary = num_classes == 2
    truth, table = np.eye(num_classes)[y], _confusion(y, probabilities.argmax(axis=1), num_classes)
    right, actual, claimed = table.diagonal(), table.sum(axis=1), table.sum(axis=0)
    values = {"accuracy": right.sum() / len(y)}
    present = np.flatnonzero(actual)
    if len(present) > 1:  # classes that are not there have no curve
        curves = [_curve_areas(truth[:, k], probabilities[:, k]) for k in ([1] if binary else present)]
        values["auc"], values["average_precision"] = np.mean(curves, axis=0)
    f1 = 2 * right / np.maximum(actual + claimed, 1)
    values["f1"] = f1[1] if binary else f1[actual + claimed > 0].mean()
    likely = np.clip(probabilities[np.arange(len(y)), y], np.finfo(np.float64).eps, 1 - np.finfo(np.float64).eps)
    values["log_loss"] = -np.log(likely).mean()
    squares = np.square(probabilities - truth)
    values["brier"] = squares[:, 1].mean() if binary else squares.sum(axis=1).mean()
    return {name: float(value) for name, value in values.items()}


def _curve_areas(truth: np.ndarray, scores: np.ndarray) -> tuple[float, float]:
    """AUC and average precision of one class: sums over the distinct scores, from the highest down."""
    distinct, place = np.unique(-scores, return_inverse=True)
    hits = np.cumsum(np.bincount(place, weights=truth, minlength=len(distinct)))
    false = np.cumsum(np.bincount(place, weights=1 - truth, minlength=len(distinct)))
    new_hits, new_false = np.diff(hits, prepend=0), np.diff(false, prepend=0)
    auc = np.sum(new_false * (hits - new_hits / 2)) / (hits[-1] * false[-1])
    precision = np.sum(new_hits * hits / (hits + false)) / hits[-1]
    return float(auc), float(precision)


def _calibration(probabilities: np.ndarray, y: np.ndarray) -> tuple[CalibrationBin, ...]:
    if probabilities.shape[1] == 2:
        predicted, right = probabilities[:, 1], y == 1
    else:
        predicted, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == y
    place = np.minimum((predicted * _CALIBRATION_BINS).astype(int), _CALIBRATION_BINS - 1)
    return tuple(
        CalibrationBin(float(predicted[here].mean()), float(right[here].mean()), int(here.sum()))
        for here in (place == number for number in range(_CALIBRATION_BINS))
        if here.any()
    )


def regression_scores(predicted: np.ndarray, labels: np.ndarray) -> TestScores:
    """Scores of predicted numbers, in the unit of the labels."""
    predicted, labels = (np.asarray(values, np.float64) for values in (predicted, labels))
    mean, median = float(labels.mean()), float(np.median(labels))
    trivial = _number_metrics(np.full(len(labels), mean), labels)
    trivial["mae"] = _number_metrics(np.full(len(labels), median), labels)["mae"]
    return TestScores(
        records=len(labels),
        model=_number_metrics(predicted, labels),
        trivial=trivial,
        trivial_predictor=f"always the mean, {mean:.4g} (MAE: the median, {median:.4g})",
    )


def _number_metrics(predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    errors = predicted - labels
    squares, spread = np.square(errors).sum(), np.square(labels - labels.mean()).sum()
    values = {"rmse": np.sqrt(squares / len(labels)), "mae": np.abs(errors).mean()}
    if len(labels) > 1:
        values["r2"] = 1 - squares / spread if spread else float(squares == 0)
    return {name: float(value) for name, value in values.items()}


def probabilities_of(scores: np.ndarray) -> np.ndarray:
    """Class probabilities `[n, classes]`, in float64: float32 reaches 0 and 1, where the log loss ends."""
    from scipy.special import softmax

    both = np.stack([np.zeros_like(scores), scores], axis=1) if scores.ndim == 1 else scores
    probabilities: np.ndarray = softmax(both, axis=1)
    return probabilities


def evaluate(
    model: Model,
    scores: np.ndarray,
    y: np.ndarray,
    *,
    classes: Sequence[str],
    label_bounds: tuple[float, float] | None,
) -> TestScores:
    """Scores of a model from what it says of each record, and the encoded labels; without blanks (below 0)."""
    from dither import models

    scores, y = scores[y >= 0], y[y >= 0]
    if label_bounds is None:
        return classification_scores(probabilities_of(scores.astype(np.float64)), y, classes)
    low, high = label_bounds
    predicted = np.nan_to_num(np.asarray(models.predict(scores, model.task)), nan=0.5)
    return regression_scores(low + (high - low) * predicted, low + (high - low) * y)


# Advice

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
    norms: np.ndarray  # of the records' gradients at the final model; empty if records are not clipped one by one
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
    records. None if there are no such records."""
    problem = experiment.problem
    rows = experiment.partition.order[:_MOST_RECORDS] if local else problem.test_rows[0]
    rows = rows[np.asarray(problem.y)[rows] >= 0]  # without blanks
    records = Labelled(problem.x, problem.y, rows, "your records" if local else "public test records")
    name = "train_loss" if local else "loss"
    losses = [(row["round"], float(row[name])) for row in evaluations]  # "inf" and "nan" are text in a folder
    return judge(experiment, params, losses, records) if len(rows) else None


def diverged_model(experiment: Experiment, params: Params) -> Advice | None:
    """Whether the released model itself shows that training diverged, by its scores on made-up records."""
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
    return outputs, evaluate(model, outputs, y, classes=dataset.classes, label_bounds=bounds)


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
        f"the model is no better than a constant ({e.scores.trivial_predictor}): {NAMES[name]} "
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
