"""Data for planning: a stand-in that has only a shape, synthetic records, and proxies brought to the right size.

Nothing here looks at private records. The accountant needs counts alone; a bound's constants and a measured sweep
need records, which are public (a proxy) or made up (synthetic).
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from dither import data
from dither.data import Dataset, stream
from dither.errors import SpecError
from dither.spec import Spec

VALIDATION = 0.2  # share of a proxy's records that candidates are scored on
_LEAST = 10


class Material(NamedTuple):
    """Records to plan on, and in words where they come from."""

    dataset: Dataset
    source: str
    public: bool  # False: synthetic


def digest(dataset: Dataset) -> str:
    """SHA-256 of the records that candidates are trained and scored on."""
    found = hashlib.sha256()
    for array in (dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test):
        found.update(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def stand_in(num_records: int, num_features: int, classes: tuple[str, ...]) -> Dataset:
    """A data set of zeros of the right shape, held once: for the accountant, which asks for counts only."""
    x = np.broadcast_to(np.zeros((1, num_features), np.float32), (num_records, num_features))
    y = (np.arange(num_records) % len(classes)).astype(np.int32)
    return Dataset(
        name="counts",
        x_train=x,
        y_train=y,
        x_test=x[:0],
        y_test=y[:0],
        classes=classes,
        feature_names=tuple(f"feature {i}" for i in range(num_features)),
        image_shape=(),
        schema=None,
        groups=None,
        groups_test=None,
        notes=(),
        covered=True,
    )


def synthetic(num_records: int, num_features: int, *, num_classes: int = 2, seed: int = 0) -> Material:
    """Records whose class a noisy linear rule decides: features in [0, 1] like min-max encoded columns."""
    rng = stream(seed, "synthetic records")
    total = num_records + max(_LEAST, round(VALIDATION * num_records))
    x = rng.random((total, num_features)).astype(np.float32)
    rule = rng.normal(size=(num_features, num_classes)) * np.sqrt(12.0 / num_features)
    scores = (x - 0.5) @ rule * 2.0 + rng.gumbel(size=(total, num_classes))  # a softmax model is the truth
    y = scores.argmax(1).astype(np.int32)
    classes = tuple(str(number) for number in range(num_classes))
    made = stand_in(num_records, num_features, classes)
    dataset = made._replace(
        name="synthetic",
        x_train=x[:num_records],
        y_train=y[:num_records],
        x_test=x[num_records:],
        y_test=y[num_records:],
    )
    return Material(dataset, f"synthetic records, {num_features} features in [0, 1], a softmax rule", False)


def proxy(dataset: Dataset, num_records: int, words: str) -> Material:
    """A public data set as a rehearsal for `num_records` private ones.

    A fifth of its training records is kept for scoring; the others are taken as often as it needs (at random, with
    repeats only where they are too few) to be exactly as many as the private records: rates, noise and steps are
    then those of the real run. Its own test records are left alone.
    """
    total = len(dataset.y_train)
    held = round(VALIDATION * total)
    if held < _LEAST:
        raise SpecError(f"{words} has {total} records; a proxy needs at least {round(_LEAST / VALIDATION)}")
    train, scored = data.stratified_split(dataset.y_train, held, 0)
    rng = stream(0, "proxy records")
    if len(train) >= num_records:
        rows = rng.permutation(train)[:num_records]
    else:
        rows = np.concatenate([train, rng.choice(train, num_records - len(train))])
    fitted = dataset._replace(
        x_train=dataset.x_train[rows],
        y_train=dataset.y_train[rows],
        x_test=dataset.x_train[scored],
        y_test=dataset.y_train[scored],
        groups=None if dataset.groups is None else dataset.groups[rows],
    )
    return Material(fitted, f"{words}: {len(train):,} records to train on, {held:,} to score", True)


def rehearsal(spec: Spec) -> Spec:
    """The spec as it is tried on a proxy: the same in all but where the records come from."""
    partition = "iid" if spec.data.partition == "column" else spec.data.partition
    return spec.with_values(
        {
            "data.name": "adult",  # any: the records are handed over
            "data.path": "",
            "data.test_path": "",
            "data.label": "",
            "data.schema": "",
            "data.part": "all",
            "data.partition": partition,
            "data.column": "",
            "data.split": "given",
            "randomness": "seeded",
        }
    )
