"""Private evaluation: how good a model is on records that institutions hold, with an ε of its own.

Each institution counts its records by label and score, with noise (`experiment.counting`). Accuracy, AUC,
calibration and the errors of a regression follow from the sums. A record touches few cells: a small ε suffices.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import expit

from dither import models
from dither.data import NOT_COVERED, row_split
from dither.experiment import counting
from dither.experiment.counting import Counter, Counting, Question
from dither.experiment.folder import to_json
from dither.experiment.metrics import NAMES, probabilities_of
from dither.experiment.report import Report, decode
from dither.experiment.statistics import Estimate, Range, power_range, zoom
from dither.privacy.discrete import Words, os_words

_BINS = 32  # of the probability of the predicted class, where there are several
_SHARES = {"survey": 0.03, "zoom": 0.03, "confusion": 0.07, "curve": 0.32, "ranks": 0.4, "losses": 0.15}  # of μ²
_POSSIBLE = {**dict.fromkeys(("accuracy", "auc", "f1", "brier"), (0.0, 1.0)), "log_loss": (0.0, math.inf)}
_POSSIBLE |= {"r2": (-math.inf, 1.0), "rmse": (0.0, math.inf), "mae": (0.0, math.inf)}
_COMMON = (-8.0, 8.0)  # log-odds, where nothing stands out of the noise
_WIDE = 2.2  # standard deviations: some more than 1.96, as scores are ratios of noisy counts
_REDRAWN = 200  # times that the noise is drawn again, for the intervals


@dataclass(frozen=True)
class PrivateScores:
    """Scores with intervals that include the noise, and the trivial predictor's beside them."""

    model: Mapping[str, Estimate]
    trivial: Mapping[str, Estimate]
    calibration: tuple[tuple[float, Estimate], ...]  # predicted probability, how often it was right
    records: int  # public: how many there are (zero-out)
    epsilon: float
    delta: float
    not_covered: tuple[str, ...] = ()  # what else of the training records the scores follow from

    def to_json(self) -> str:
        return to_json(self, indent=2)

    @classmethod
    def from_json(cls, text: str) -> PrivateScores:
        return decode(cls, json.loads(text))

    def rows(self) -> list[dict[str, str]]:
        """One line for the model and one for the trivial predictor."""

        def text(name: str, estimate: Estimate | None) -> str:
            if estimate is not None and (estimate.low, estimate.high) == _POSSIBLE.get(name):
                return "hidden by the noise"
            return str(estimate or "")

        return [
            {"": who, **{NAMES[name]: text(name, scores.get(name)) for name in self.model}}
            for who, scores in (("the model", self.model), ("a constant", self.trivial))
        ]


# reason: keyword options of a public function
def evaluate_privately(
    report: Report,
    data: Sequence[str | Path],
    *,
    epsilon: float,
    delta: float = 1e-5,
    ledger: str | Path | None = None,
    new_ledger: bool = False,
    held_out: bool = False,
    words: Words | Sequence[Words] = os_words,
) -> PrivateScores:
    """Scores of a trained run on the labelled records of several institutions, one file each; with `held_out` on
    those of each file that training left out by their row numbers (data.split = "rows"). Every file is charged
    before anything is counted."""
    counting.check_budget(epsilon, delta)
    contents = counting.digests(data)
    tables = [scored_table(report, path, held_out=held_out) for path in data]
    options: dict[str, Any] = {"what": "evaluation", "lists_names": False, "new_ledger": new_ledger}
    counting.charge(ledger, data, contents, epsilon, delta, **options)
    counter = Counting(tables, epsilon, delta, words, lists_names=False)
    scores = private_scores(counter, report.classes, report.label.bounds, epsilon, delta)
    # Bounds that were read from the training records scale what is scored, and the errors of a regression.
    return replace(scores, not_covered=tuple(note for note in report.notes if note.startswith(NOT_COVERED)))


def private_scores(
    counter: Counter, classes: Sequence[str], bounds: tuple[float, float] | None, epsilon: float, delta: float
) -> PrivateScores:
    """Scores from the counts of scored tables (`scored_table`)."""
    counted = _classification(counter, len(classes)) if classes else _regression(counter, bounds or (0.0, 1.0))
    return PrivateScores(*counted, counter.records, epsilon, delta)


def scored_table(report: Report, path: str | Path, *, held_out: bool = False) -> pd.DataFrame:
    """What a model says of each record of a file, and the truth. What is not finite counts as no knowledge."""
    outputs, y = report.outputs(path)
    if held_out:
        kept = row_split(len(y), report.spec.data.test_fraction, report.spec.seed)[1]
        outputs, y = outputs[kept], y[kept]
    return score_columns(outputs, y, report.model.task, len(report.classes))


def score_columns(outputs: np.ndarray, y: np.ndarray, task: str, num_classes: int) -> pd.DataFrame:
    """Of each record: a score (of two classes the log-odds of the second, of more the probability of the predicted
    one), the predicted class and the true one; of a regression truth and error. A blank (a label below 0) is
    counted nowhere: outside the classes no score would look at it, but a server."""
    if not num_classes:
        predicted = np.clip(np.nan_to_num(np.asarray(models.predict(outputs, task), np.float64), nan=0.5), 0, 1)
        truth = np.where(y >= 0, np.clip(np.asarray(y, np.float64), 0.0, 1.0), np.nan)
        return pd.DataFrame({"error": np.abs(predicted - truth), "truth": truth})
    best = probabilities_of(outputs).argmax(axis=1)
    told = pd.DataFrame({"predicted": np.where(y >= 0, best, np.nan), "truth": y})
    if num_classes == 2:
        odds = np.asarray(outputs if outputs.ndim == 1 else outputs[:, 1] - outputs[:, 0], np.float64)
        return told.assign(score=np.where(y >= 0, odds, np.nan))
    score = probabilities_of(outputs).max(axis=1)
    return told.assign(score=np.where(y >= 0, score, np.nan), right=(y == best).astype(int))


def _estimates(
    counts: Sequence[np.ndarray], stds: Sequence[float | np.ndarray], scores: Callable[..., Mapping[str, Estimate]]
) -> dict[str, Estimate]:
    """Scores of noisy counts. Their intervals hold what the bins leave open (`scores` says it), and the noise:
    by drawing the same noise again on top, which costs no ε."""
    rng = np.random.default_rng(0)  # of the interval's width, nothing that is released
    again = [
        scores(*(part + std * rng.standard_normal(part.shape) for part, std in zip(counts, stds, strict=True)))
        for _ in range(_REDRAWN)
    ]

    def widened(name: str, at: Estimate) -> Estimate:
        _, low, high = _WIDE * np.std([each[name] for each in again], axis=0)
        low, high = at.low - low, at.high + high
        return Estimate(*np.clip([at.value, low, high], *_POSSIBLE.get(name, (-np.inf, np.inf))).tolist())

    return {name: widened(name, at) for name, at in scores(*counts).items()}


def _known(value: float, error: float = 0.0) -> Estimate:
    """A value, up to what the bins leave open."""
    return Estimate(value, value - error, value + error)


# Classes


Calibration = tuple[tuple[float, Estimate], ...]
_Counted = tuple[dict[str, Estimate], dict[str, Estimate], Calibration]  # of the model, of a constant


def _classification(counter: Counter, num_classes: int) -> _Counted:
    binary, names = num_classes == 2, tuple(map(str, range(num_classes)))
    share = _SHARES["confusion"] if binary else 0.5
    confusion = Question(
        counting.CATEGORIES, ("predicted",), share, categories=(names,), label="truth", classes=names
    )
    (table,), std = counter.total(confusion)
    table = table[:num_classes, :num_classes].astype(np.float64)
    trivial = _estimates([table.sum(axis=1)], [std * math.sqrt(num_classes)], _majority)
    if binary:
        model, calibration = _binary(counter, table, std)
    else:
        model = _estimates([table], [std], _class_scores)
        curve = Question(
            counting.HISTOGRAM, ("score",), 0.5, ((0.0, 1.0),), bins=_BINS, label="right", classes=("0", "1")
        )
        (cells,), cell_std = counter.total(curve)
        calibration = _calibration(cells[:2], cell_std, (np.arange(_BINS) + 0.5) / _BINS)
    return model, trivial, calibration


def _binary(counter: Counter, table: np.ndarray, table_std: float) -> tuple[dict[str, Estimate], Calibration]:
    """Scores of two classes. AUC is the average rank of the records of one class among those of the other. Ranks
    follow from noisy counts of both in equal parts of the log-odds. An institution adds up those of its records of
    the rarer class: one sum, whose noise does not grow with the number of parts. The losses are such sums too."""
    (powers,), std = counter.total(Question(counting.SURVEY, ("score",), _SHARES["survey"]))
    outer = _both_sides(power_range(powers[0], std, _COMMON))
    # In which nearly all log-odds lie
    range = _both_sides(zoom(counter, {"score": outer}, _SHARES["zoom"])["score"])
    curve = Question(counting.HISTOGRAM, ("score",), _SHARES["curve"], (range,), label="truth", classes=("0", "1"))
    (cells,), cell_std = counter.total(curve)
    cells = cells[:2].astype(np.float64)
    edges = np.linspace(*range, counting.BINS + 1)
    rare = int(cells[1].sum() < cells[0].sum())
    ranks, rows = _ranks(cells[1 - rare]), np.zeros((2, 2, counting.BINS))
    rows[0, rare], rows[1, rare] = 1.0, 2 * ranks - 1
    ranked, ranked_std = _weighted(counter, "ranks", range, list(rows), [1.0, 1.0])
    # Of each class and part the losses at both ends: a record's own is between them.
    ends = [
        np.array([[f(edges[:-1]), f(edges[1:])], [f(-edges[:-1]), f(-edges[1:])]]) for f in (_log_loss, _brier)
    ]
    scales = [float(ends[0].max()), 2.0]  # half of its worst for the Brier score, which needs less
    losses, losses_std = _weighted(counter, "losses", range, [each.mean(axis=1) for each in ends], scales)
    unsure = [np.abs(np.diff(each, axis=1))[:, 0] / 2 for each in ends]
    shares = cells[rare] / _positive(cells[rare].sum())

    def scores(
        cells: np.ndarray, table: np.ndarray, ranked: np.ndarray, losses: np.ndarray
    ) -> dict[str, Estimate]:
        total, (first, second) = _positive(table.sum()), cells
        ties = max(0.0, float(first @ second) / (_positive(first.sum()) * _positive(second.sum())))
        count, rank = ranked.tolist()
        above = 0.5 * rank / _positive(count) + float(shares @ (_ranks(cells[1 - rare]) - ranks))
        open_log_loss, open_brier = (max(0.0, float(np.sum(cells * each))) / total for each in unsure)
        return {
            "accuracy": _known(float(np.trace(table)) / total),
            # Between ties that are all wrong and all right
            "auc": _known(0.5 + (above if rare else -above), ties / 2),
            "log_loss": _known(losses[0] / total, open_log_loss),
            "brier": _known(losses[1] / total, open_brier),
        }

    stds: list[float | np.ndarray] = [cell_std, table_std, ranked_std, losses_std]
    model = _estimates([cells, table, ranked, losses], stds, scores)
    if ranked[0] < 4 * ranked_std[0] or cells[1 - rare].sum() < 4 * cell_std * math.sqrt(counting.BINS):
        model["auc"] = Estimate(0.5, 0.0, 1.0)  # a class that does not stand out of its noise
    return model, _calibration(cells, cell_std, expit((edges[:-1] + edges[1:]) / 2))


def _both_sides(range: Range) -> Range:
    """The range, with its mirror image if it lies on one side of 0: where one class alone, or a bin by chance,
    stands out of the noise, the others' log-odds would be cut off, and no interval would tell."""
    reach = max(map(abs, range))
    return range if range[0] < 0 < range[1] else (-reach, reach)


def _weighted(
    counter: Counter, what: str, range: Range, rows: Sequence[np.ndarray], scales: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Sums over all records of what each row says of their class and part, and the standard deviation of each."""
    weights = tuple(tuple((row / scale).ravel().tolist()) for row, scale in zip(rows, scales, strict=True))
    question = Question(
        counting.WEIGHTS, ("score",), _SHARES[what], (range,), label="truth", classes=("0", "1"), weights=weights
    )
    (sums,), std = counter.total(question)
    unit = np.array(scales) / counting.UNITS
    return sums[0] * unit, std * unit


def _ranks(counts: np.ndarray) -> np.ndarray:
    """Of each part the share of these records below it, half of those inside it included."""
    below: np.ndarray = (np.cumsum(counts) - counts / 2) / _positive(counts.sum())
    return below.clip(0.0, 1.0)


def _log_loss(odds: np.ndarray) -> np.ndarray:
    """Of a record of the first class; of the second with the sign turned. No probability is below 2^-52."""
    return np.asarray(np.logaddexp(0.0, np.minimum(odds, -math.log(np.finfo(np.float64).eps))))


def _brier(odds: np.ndarray) -> np.ndarray:
    return np.asarray(expit(odds) ** 2)


def _class_scores(table: np.ndarray) -> dict[str, Estimate]:
    hits = np.diag(table).astype(np.float64)
    both = np.maximum(1.0, table.sum(axis=0) + table.sum(axis=1))
    accuracy = float(hits.sum()) / _positive(table.sum())
    return {"accuracy": _known(accuracy), "f1": _known(float(np.mean(2 * hits / both)))}


def _majority(per_class: np.ndarray) -> dict[str, Estimate]:
    """Of always saying the class that most records have."""
    return {"accuracy": _known(float(per_class.max()) / _positive(per_class.sum()))}


def _calibration(cells: np.ndarray, std: float, predicted: np.ndarray) -> Calibration:
    """How often a prediction was right, in eighths of the score's range, where counts stand out of their noise."""
    width = len(predicted) // 8
    spread = 1.96 * std * math.sqrt(width)
    described = []
    for part in range(8):
        here = slice(width * part, width * (part + 1))
        wrong, right = cells[:, here].sum(axis=1).astype(np.float64).tolist()
        total = wrong + right
        if total > 4 * spread:
            share, error = min(1.0, max(0.0, right / total)), spread / total
            weights = np.maximum(cells[:, here].sum(axis=0), 0.0)
            said = float(weights @ predicted[here] / weights.sum())
            described.append((said, Estimate(share, max(0.0, share - error), min(1.0, share + error))))
    return tuple(described)


def _positive(value: float) -> float:
    return max(1.0, float(value))


# Numbers


def _regression(counter: Counter, bounds: tuple[float, float]) -> _Counted:
    width, count = bounds[1] - bounds[0], _positive(counter.records)
    parts, std = counter.total(Question(counting.SUMS, ("error", "truth"), 1.0, ((0.0, 1.0), (0.0, 1.0))))

    def scores(units: np.ndarray) -> dict[str, Estimate]:
        absolute, square, truth, truth_square = (units / (counting.UNITS * count)).tolist()
        return {
            "r2": _known(1 - square / max(truth_square - truth**2, 1e-12)),
            "rmse": _known(width * math.sqrt(max(0.0, square))),
            "mae": _known(width * absolute),
        }

    def constant(units: np.ndarray) -> dict[str, Estimate]:
        _, _, truth, truth_square = (units / (counting.UNITS * count)).tolist()
        return {"r2": _known(0.0), "rmse": _known(width * math.sqrt(max(0.0, truth_square - truth**2)))}

    totals = np.concatenate([part[0] for part in parts])
    return _estimates([totals], [std], scores), _estimates([totals], [std], constant), ()
