"""scikit-learn estimators: private federated training behind `fit` and `predict`.

    model = PrivateFederatedClassifier(epsilon=1.0, feature_bounds=(0, 1), classes=["no", "yes"])
    model.fit(X, y, groups=hospital)        # one institution for each value of groups
    model.predict_proba(X_new), model.epsilon_, model.report_

Every institution takes a noisy gradient step on all its records in each round, and the server averages (CPFed's
algorithm). Noise is set for a proven ε of the whole fit against a server that sees every upload, and each fit is
charged to a ledger, as `dither.run` does. Bounds of the features (and of the label) and the classes must be
public: values outside the bounds are clamped.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from dither import models
from dither.accounting.gaussian import gaussian_mu
from dither.accounting.ledger import Ledger
from dither.data.hashing import hash_arrays
from dither.errors import SpecError
from dither.experiment import metrics
from dither.experiment.build import refuse_charged
from dither.experiment.report import Report, load
from dither.experiment.train import run
from dither.spec import DataSpec, Spec

_MANY_RECORDS = 10_000  # of an institution: the noise then allows more rounds


@dataclass(kw_only=True, eq=False, repr=False)  # scikit-learn wants every parameter in the signature
class _PrivateFederated(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What the classifier and the regressor share."""

    _default_lr = 2.0
    _default_clip = 1.0
    _most_drift = 0.2  # of a parameter by noise alone, over all rounds: limits the rate where records are few

    epsilon: float = 1.0
    delta: float = 1e-5
    feature_bounds: Any = None
    num_rounds: int | None = None
    client_lr: float | None = None
    clip_norm: float | None = None
    hidden: tuple[int, ...] = ()
    values: Any = None
    random_state: Any = None
    ledger: Any = None
    new_ledger: bool = False
    out: Any = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = True  # noise from the operating system, unless random_state is set
        return tags

    def _train(self, given: tuple[np.ndarray, Any], y: np.ndarray, groups: Any, about: dict[str, Any]) -> None:
        """Train on records and encoded labels, with all of `dither.run`: ledger, proof, notes."""
        x = self._encode(given[0])
        if groups is not None and len(groups) != len(x):
            raise SpecError(f"groups has {len(groups)} entries for {len(x)} records; give one for each record")
        sizes = np.array([len(x)]) if groups is None else np.unique(np.asarray(groups), return_counts=True)[1]
        with tempfile.TemporaryDirectory(prefix="dither-fit-") as place:
            folder = Path(place) / "records"
            folder.mkdir()
            np.save(folder / "x.npy", x)
            np.save(folder / "y.npy", y)
            np.save(folder / "x_test.npy", np.zeros_like(x[:1]))  # nothing is held out, and nothing is scored
            np.save(folder / "y_test.npy", np.zeros_like(y[:1]))
            if groups is not None:
                np.save(folder / "groups.npy", np.asarray(groups).astype(str))
            if "classes" in about:
                (folder / "classes.json").write_text(json.dumps(about["classes"]), encoding="utf-8")
            spec = self._spec(folder, sizes, about["values"])
            spec = spec.with_values({"data.id": self._account(*given, spec.data)})
            out = Path(place) / "run" if self.out is None else self.out
            report = run(spec, out=out, ledger=self.ledger, new_ledger=self.new_ledger)
            self._params = load(out).params
        self.report_: Report = report
        self.epsilon_ = report.epsilon.proven().value
        self.delta_ = report.epsilon.proven().delta
        self.n_iter_ = report.rounds

    def _account(self, x: np.ndarray, y: Any, asked: DataSpec) -> str:
        """The account of the records as they were given: other bounds scale them to other numbers."""
        rows = hash_arrays(x, np.asarray(y))
        if asked.public:
            refuse_charged("X", rows)
            return asked.id
        book = Ledger(self.ledger or Ledger.default_path())
        dataset = book.fingerprint(np.sort(rows.whole[0]))
        book.identify(dataset, lambda: rows, file="records", name=asked.id, new_ledger=self.new_ledger)
        return dataset

    def _spec(self, folder: Path, sizes: np.ndarray, about: dict[str, Any]) -> Spec:
        clip_norm = self._default_clip if self.clip_norm is None else self.clip_norm
        few = float(np.mean(sizes)) < _MANY_RECORDS
        num_rounds = (100 if few else 500) if self.num_rounds is None else self.num_rounds
        rate = self._default_lr if self.client_lr is None else self.client_lr
        if self.client_lr is None and not math.isinf(self.epsilon):
            # From public numbers: smaller if the noise of so few records would carry the model away.
            multiplier = math.sqrt(num_rounds) / gaussian_mu(self.epsilon, self.delta)
            noise = multiplier * clip_norm / (float(np.mean(sizes)) * math.sqrt(len(sizes)))
            rate = min(rate, self._most_drift / (noise * math.sqrt(num_rounds)))
        values = {
            "method": "cpfed",
            "num_clients": len(sizes),
            "cohort_size": len(sizes),
            "num_rounds": num_rounds,
            "eval_every": num_rounds,
            "batch_sampling": "full",
            "client_lr": rate,
            "randomness": "os" if self.random_state is None else "seeded",
            "seed": int(check_random_state(self.random_state).randint(2**31 - 1)),
            "secagg.mode": "off",
            "federation.min_clients": 1,
            "privacy.epsilon": self.epsilon,
            "privacy.delta": self.delta,
            "privacy.clip_norm": clip_norm,
            "data.name": "",
            "data.path": str(folder),
            "data.stream": "no",
            "data.partition": "iid" if len(sizes) == 1 else "column",
            "model.hidden": list(self.hidden),
            **about,
        }
        return Spec.from_any(values).with_values(self.values or {})

    def _encode(self, x: np.ndarray) -> np.ndarray:
        """Features clamped to their public bounds and scaled by them to [-1, 1]; those of bounds (0, 1) stay."""
        if self.feature_bounds is None:
            raise SpecError(
                f"{type(self).__name__} needs feature_bounds=(low, high), public numbers or one for each feature: "
                "bounds read from X would reveal its records"
            )
        low, high = (np.broadcast_to(np.asarray(bound, float), (x.shape[1],)) for bound in self.feature_bounds)
        if not np.all(low < high):
            raise SpecError("feature_bounds: every low must be below its high")
        inside = (np.clip(x, low, high) - low) / (high - low)
        unit = (low == 0) & (high == 1)  # one-hot columns stay sparse
        encoded: np.ndarray = np.ascontiguousarray(np.where(unit, inside, 2 * inside - 1), np.float32)
        return encoded

    def _scores(self, x: Any) -> np.ndarray:
        check_is_fitted(self)
        x = validate_data(self, x, reset=False)
        num_classes = len(self.report_.classes)
        model = models.from_spec(self.report_.spec.model, x.shape[1], num_classes, ())
        return np.asarray(model.apply(self._params, self._encode(x)), np.float64)


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateFederatedClassifier(ClassifierMixin, _PrivateFederated):  # type: ignore[misc]
    """Private federated classification: logistic or softmax regression, or a network with `hidden` layers.

    epsilon, delta   proven privacy of one fit, for one record that is blanked
    feature_bounds   (low, high), public: numbers, or one for each feature
    classes          public class names; None reads them from y, and the report says that no ε covers it
    num_rounds, client_lr, clip_norm   None: chosen from public numbers
    values           further keys of the spec, such as {"model.class_counts": [900, 100]}
    random_state     None: noise of the operating system; a seed is for tests, not for protection
    ledger, new_ledger, out   as in `dither.run`

    After `fit`: `epsilon_`, `delta_`, `report_`, `classes_`. `fit` takes `groups`, the institution of each record.
    """

    classes: Any = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # a proven ε on a few dozen records leaves little to learn
        return tags

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Train on records X, labels y and, for each record, its institution."""
        X, y = validate_data(self, X, y)
        check_classification_targets(y)
        self.classes_ = np.unique(y) if self.classes is None else np.asarray(self.classes)
        if len(self.classes_) < 2:
            raise SpecError(f"y has 1 class ({self.classes_[0]!r}); at least 2 are needed to train")
        if not np.isin(y, self.classes_).all():
            raise SpecError(f"y has a label that is not in classes={list(self.classes_)}")
        numbers = np.argsort(self.classes_)[np.searchsorted(np.sort(self.classes_), y)].astype(np.int64)
        name = "mlp" if self.hidden else "logistic" if len(self.classes_) == 2 else "softmax"
        about: dict[str, Any] = {"values": {"model.name": name, "task": "classification"}}
        if self.classes is not None:  # else the run itself reads them from the labels, and says so
            about["classes"] = [str(each) for each in self.classes_]
        self._train((X, y), numbers, groups, about)
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Log-odds of the second of two classes; scores of each class if there are more."""
        scores = self._scores(X)
        two_of_two = len(self.classes_) == 2 and scores.ndim == 2
        decision: np.ndarray = scores[:, 1] - scores[:, 0] if two_of_two else scores
        return decision

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities `[n, classes]`."""
        return metrics.probabilities_of(self._scores(X))

    def predict(self, X: Any) -> np.ndarray:
        """The class of each record."""
        best = self.predict_proba(X).argmax(axis=1)
        predicted: np.ndarray = self.classes_[best]
        return predicted


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateFederatedRegressor(RegressorMixin, _PrivateFederated):  # type: ignore[misc]
    """Private federated regression: linear, or a network with `hidden` layers; squared loss, or Huber's.

    label_bounds     (low, high) of the label, public: labels outside are clamped, predictions lie within
    loss             "squared" or "huber"

    The other parameters are those of `PrivateFederatedClassifier`.
    """

    _default_lr = 0.3
    _default_clip = 0.25
    _most_drift = 0.05

    label_bounds: Any = None
    loss: str = "squared"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True
        return tags

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Train on records X, labels y and, for each record, its institution."""
        X, y = validate_data(self, X, y, y_numeric=True)
        if self.label_bounds is None:
            raise SpecError(
                f"{type(self).__name__} needs label_bounds=(low, high) that are public: bounds read from y would "
                "reveal its values"
            )
        low, high = (float(bound) for bound in self.label_bounds)
        values = {
            "model.name": "mlp" if self.hidden else "linear",
            "model.loss": self.loss,
            "task": "regression",
            "data.label_bounds": [low, high],
        }
        self._train((X, y), np.asarray(y, float), groups, {"values": values})
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The label of each record, within its bounds."""
        low, high = self.report_.spec.data.label_bounds if hasattr(self, "report_") else (0.0, 1.0)
        predicted: np.ndarray = low + (high - low) * np.clip(self._scores(X), 0.0, 1.0)
        return predicted
