"""What a plan is for and what it may look at: the spec with its budget, and records that are not private.

The accountant needs counts only. Constants and measurements need records, which are public (a proxy) or synthetic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dither import data
from dither.accounting import FLOAT_NOISE
from dither.data import Dataset, blank_features, stream
from dither.data.tables import TABLE_SUFFIXES
from dither.errors import DataError, SpecError
from dither.experiment.build import load_data, partition_of, refuse_charged
from dither.experiment.plan.candidates import INTEGER_KEYS, Infeasible, clip_key, proxy_spec
from dither.spec import Spec

VALIDATION = 0.2  # share of a proxy's records that candidates are scored on
_FEWEST = 10


class PlanningData(NamedTuple):
    """Records to plan on, and a description of their source."""

    dataset: Dataset
    source: str
    public: bool  # False: synthetic


# The spec

PROVEN_NOISE: dict[str, Any] = {  # constant, and set by the accountant for the whole run
    "privacy.unit": "run",
    "privacy.noise": "proven",
    "privacy.noise_std": 0.0,
    "privacy.noise_schedule": "constant",
    "privacy.noise_decay": 1.0,
    "privacy.noise_decay_start": 0,
}


def base_spec(
    what: Any, facts: Mapping[str, Any], values: Mapping[str, Any], grid: Mapping[str, tuple[Any, ...]]
) -> tuple[Spec, dict[str, tuple[Any, ...]]]:
    """The spec with the asked budget and facts, and the values that the user gives, by key.

    `facts` are spec keys with their values: the budget, clients, model, view and neighbours; None if not given.
    """
    base, values, given = Spec.from_any(what), dict(values), dict(grid)
    asked = {
        **PROVEN_NOISE,
        "data.split": "given",
        "data.records_per_client": 0,
        "lr_decay": 0.0,
        "sampling_rate": 0.0,  # batches of the planned size
        "compare": False,
        **{key: value for key, value in facts.items() if value is not None},
    }
    clients = asked.setdefault("num_clients", values.get("num_clients", base.num_clients))
    if clients < 1:
        raise Infeasible(f"clients={clients} must be at least 1; nearest feasible: clients=1")
    if "cohort_size" in values:
        given.setdefault("cohort_size", (values.pop("cohort_size"),))
    asked["cohort_size"] = min(base.cohort_size, clients)
    if asked.get("model.name") in ("logistic", "softmax"):
        asked["model.hidden"] = []
    base = base.with_values({**asked, **values})
    base = base.with_values({"privacy.adjacency": base.adjacency})  # the path of a proxy must not decide it
    for key in (*INTEGER_KEYS, "client_lr", clip_key(base.method)):
        if key in values:
            given.setdefault(key, (values[key],))
    return base, given


def smallest_client(base: Spec, records: int) -> int:
    """The number of records of the smallest client."""
    if records < base.num_clients:
        raise Infeasible(
            f"{records} records cannot be dealt to {base.num_clients} clients; nearest feasible: "
            f"{records} clients of one record"
        )
    if base.data.partition == "iid":
        return records // base.num_clients
    try:
        counts = counts_only(records, 1, ("0", "1"))
        return int(partition_of(proxy_spec(base), counts, base.seed).size.min())
    except DataError as reason:
        raise Infeasible(f"{reason}; nearest feasible: data.partition='iid'") from reason


# The records


def planning_data(
    base: Spec,
    records: int | None,
    dim: int | None,
    proxy: str,
    public_fraction: float,
    data_dir: str | Path | None,
) -> tuple[Spec, PlanningData, int]:
    """The spec with its data, records to plan on (never private ones), and the number of private records."""
    for name, value in (("records", records), ("dim", dim)):
        if value is not None and value < 1:
            raise SpecError(f"{name}={value} must be at least 1")
    if not proxy:
        if public_fraction:
            raise SpecError(f"public_fraction={public_fraction:g} is a share of --proxy; give --proxy too")
        if records is None or dim is None:
            raise SpecError(
                "without --proxy, give --records and --dim: the plan's own records are private, and an estimate "
                "on them would have to be charged to their budget"
            )
        return base, synthetic_data(records, _features(base, dim)), records
    is_file = Path(proxy).suffix.lower() in (*TABLE_SUFFIXES, ".npz") or bool(data.table_files(proxy))
    where = {"data.path": proxy, "data.name": ""} if is_file else {"data.name": proxy, "data.path": ""}
    private = base.data.path and _places(base.data.paths) & _places(proxy)
    if is_file and private and not public_fraction:
        raise SpecError(
            f"{proxy!r} is the plan's own private data: an estimate on it would have to be charged to its budget; "
            "declare a share of it public (--public-fraction), or give other public data"
        )
    everything = base.with_values({**where, "data.part": "all", "data.public_fraction": public_fraction})
    dataset, source = load_data(everything, data_dir=data_dir), proxy
    for file in (dataset.sources or [dataset]) if is_file else []:  # as they were read
        refuse_charged(str(getattr(file, "path", proxy)), file.record_hashes)
    if public_fraction:
        base = base.with_values({**where, "data.public_fraction": public_fraction, "data.part": "private"})
        total = len(dataset.y_train)
        dataset = data.public_part(
            dataset, "public", public_fraction
        )  # of the private part, only the count is used
        source = f"the public {public_fraction:.0%} of {proxy}"
        if not dataset.covered:
            raise SpecError(
                f"{proxy!r} has no schema, so its encoding would be read from the private records too; write one "
                "with `dither data schema` and give it as --set data.schema=FILE"
            )
        records = total - len(dataset.y_train) if records is None else records
    if records is None:
        raise SpecError("give --records, the number of private training records that the plan is for")
    return base, proxy_data(dataset, records, source), records


def _places(path: str | tuple[str, ...]) -> set[Path]:
    """The files and the folder that a path stands for."""
    listed = [path] if isinstance(path, str) else path
    return {Path(each).expanduser().resolve() for each in (*listed, *data.table_files(path))}


def _features(base: Spec, dim: int) -> int:
    """The number of features of a two-class linear model with `dim` parameters."""
    outputs = {"logistic": 1, "softmax": 2}.get(base.model.name)
    if outputs is None:
        raise SpecError(f"model.name={base.model.name!r} needs a --proxy: --dim does not describe its layers")
    features = dim // outputs - 1
    if features < 1 or dim % outputs:
        raise SpecError(
            f"dim={dim} does not fit a {base.model.name} model of two classes: {outputs}·(features + 1)"
        )
    return features


def counts_only(num_records: int, num_features: int, classes: tuple[str, ...]) -> Dataset:
    """A data set of zeros with the right shape, for the accountant, which needs counts only."""
    x = blank_features(num_records, num_features)
    y = (np.arange(num_records) % len(classes)).astype(np.int32)
    return Dataset(
        name="counts",
        x_train=x,
        y_train=y,
        x_test=x[:0],
        y_test=y[:0],
        classes=classes,
        feature_names=tuple(f"feature {i}" for i in range(num_features)),
        covered=True,
    )


def synthetic_data(num_records: int, num_features: int, *, num_classes: int = 2, seed: int = 0) -> PlanningData:
    """Records with features in [0, 1], like min-max encoded columns, labelled by a noisy linear rule."""
    rng = stream(seed, "synthetic records")
    total = num_records + max(_FEWEST, round(VALIDATION * num_records))
    x = rng.random((total, num_features)).astype(np.float32)
    rule = rng.normal(size=(num_features, num_classes)) * np.sqrt(12.0 / num_features)
    scores = (x - 0.5) @ rule * 2.0 + rng.gumbel(size=(total, num_classes))  # a softmax model is the truth
    y = scores.argmax(1).astype(np.int32)
    classes = tuple(str(number) for number in range(num_classes))
    dataset = counts_only(num_records, num_features, classes)._replace(
        name="synthetic",
        x_train=x[:num_records],
        y_train=y[:num_records],
        x_test=x[num_records:],
        y_test=y[num_records:],
    )
    return PlanningData(dataset, f"synthetic records, {num_features} features in [0, 1], a softmax rule", False)


def proxy_data(dataset: Dataset, num_records: int, source: str) -> PlanningData:
    """A public data set instead of `num_records` private records.

    A fifth of its training records is kept for scoring. The rest is sampled to exactly the private number (with
    repeats only if it is too small), so rates, noise and steps are those of the real run. Its own test
    records are not used.
    """
    total = len(dataset.y_train)
    held_out = round(VALIDATION * total)
    if held_out < _FEWEST:
        raise SpecError(f"{source} has {total} records; a proxy needs at least {round(_FEWEST / VALIDATION)}")
    train, scored = data.stratified_split(dataset.y_train, held_out, 0)
    rng = stream(0, "proxy records")
    if len(train) >= num_records:
        rows = rng.permutation(train)[:num_records]
    else:
        rows = np.concatenate([train, rng.choice(train, num_records - len(train))])
    resized = dataset._replace(
        x_train=dataset.x_train[rows],
        y_train=dataset.y_train[rows],
        x_test=dataset.x_train[scored],
        y_test=dataset.y_train[scored],
        groups=None if dataset.groups is None else dataset.groups[rows],
        sources=(),  # whose rows are no longer these
    )
    return PlanningData(resized, f"{source}: {len(train):,} records to train on, {held_out:,} to score", True)


def digest(dataset: Dataset) -> str:
    """SHA-256 of the records that candidates are trained and scored on."""
    sha = hashlib.sha256()
    for array in (dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test):
        sha.update(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


def planned_gaps(spec: Spec) -> list[str]:
    """What computing with numbers leaves uncovered: nothing for exact noise against a server that sees uploads."""
    exact = spec.source_of_randomness == "os" and spec.privacy.view == "upload"
    return [] if exact else [FLOAT_NOISE]
