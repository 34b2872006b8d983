"""How many runs train side by side: the bytes and the seconds of one run, estimated before it is made."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from dither.errors import SpecError
from dither.experiment.build import Experiment
from dither.experiment.compiled import sharing, step_numbers
from dither.simulation import devices
from dither.spec import Spec

BATCH_BYTES = {"cpu": 1.0e9, "gpu": 3.0e10}
_BATCH_SECONDS = 40.0  # on a CPU a batch is kept about this short: a kill loses no more
_MOST_RUNS = {"cpu": 40, "gpu": 80}
_SCORED = 4096  # records scored at a time (engines.scoring)


def runs_at_once(experiment: Experiment, kind: str, max_bytes: float | None = None) -> int:
    """How many runs like this one train side by side: bounded by memory, and on a CPU by time."""
    within = BATCH_BYTES[kind] if max_bytes is None else max_bytes - shared_bytes(experiment, kind)
    most = int(min(_MOST_RUNS[kind], max(within, 0.0) / run_bytes(experiment, kind)))
    if kind == "cpu":
        # A run that fills a core's caches by itself is no faster in company there.
        large = devices.one_by_one(step_numbers(experiment))
        wanted = devices.at_once() if large else math.ceil(_BATCH_SECONDS / seconds(experiment.spec, kind))
        most = min(most, wanted)
    return max(1, most)


def run_bytes(experiment: Experiment, kind: str) -> float:
    """Bytes that one more run of a batch takes at most, records that all share apart (docs/sweep.md compares it
    with measurements)."""
    sizes = experiment.partition.size
    # Everybody's state before and after some rounds; who holds which records and what is scored, here and there.
    held = (
        4.0 * experiment.num_params * len(sizes)
        + 6.0 * int(sizes.sum())
        + 6.0 * len(experiment.problem.test_rows[0])
    )
    return 4.0 * held + (0.0 if _apart(experiment) else _work_bytes(experiment, kind))


def shared_bytes(experiment: Experiment, kind: str) -> float:
    """Bytes that a batch takes however many its runs are: a copy of the records a device and one on the host,
    what scores them, and the clients at work where a device makes its runs one after the other."""
    records = float(np.asarray(experiment.problem.x).nbytes)
    copies = 1 + devices.usable(int(records))
    work = _work_bytes(experiment, kind) if _apart(experiment) else 0.0
    return copies * (records + 4.0 * 3 * _SCORED * _width(experiment) + work)


def _work_bytes(experiment: Experiment, kind: str) -> float:
    """Model, gradient, optimiser, noise and upload of each client at work in one run, and its batch."""
    spec, params = experiment.spec, experiment.num_params
    side_by_side = 1 if kind == "cpu" and devices.one_by_one(step_numbers(experiment)) else spec.cohort_size
    records = int(experiment.partition.size.max()) if spec.batch_sampling == "full" else spec.batch_size
    return 4.0 * side_by_side * (12.0 * params + 4.0 * records * _width(experiment))


def _apart(experiment: Experiment) -> bool:
    """Whether a device makes the runs of a batch one after the other."""
    return bool(sharing(experiment, 2).get("runs_apart"))


def _width(experiment: Experiment) -> float:
    """Numbers of one record on its way through the model."""
    features = float(np.prod(experiment.problem.x.shape[1:]))
    hidden = float(sum(experiment.spec.model.hidden))
    return features + (hidden * features if experiment.spec.model.name == "cnn" else hidden)


def seconds(spec: Spec, kind: str) -> float:
    """A rough estimate of one run's time among others like it, for bars and for the length of a batch.

    Fitted to a machine with two CPU cores and to an NVIDIA H200; only the ratios matter for a bar."""
    features, classes, records = _SHAPES.get(spec.data.name, (100, 2, 50_000))
    widths = [features, *spec.model.hidden, classes if spec.model.name != "logistic" else 1]
    params = float(sum(a * b for a, b in pairwise(widths)))
    own = spec.data.records_per_client or records // max(spec.num_clients, 1)
    batch = own if spec.batch_sampling == "full" else spec.batch_size
    steps = float(spec.num_rounds * spec.local_steps)
    flops = 6.0 * params * batch * steps * spec.cohort_size
    evaluations = spec.num_rounds / spec.eval_every
    scored = 2.0 * params * evaluations * (own * spec.num_clients + records / 6)
    if kind == "cpu":
        return 0.02 + flops / 1.1e11 + scored / 1e11 + 1.5e-5 * steps * spec.cohort_size + 2e-3 * evaluations
    return 0.02 + flops / 8e12 + scored / 2e12 + 4e-6 * steps + 1e-3 * evaluations


_SHAPES = {
    "adult": (103, 2, 48_842),
    "mnist": (784, 10, 60_000),
    "emnist-bymerge": (784, 47, 100_000),
    "digits": (64, 10, 1_438),
    "breast-cancer": (30, 2, 569),
}

_UNITS = {"": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40}


def parse_bytes(text: str) -> float:
    """`4GB`, `500 MB`, `1.5GiB` or a number of bytes."""
    letters = text.strip().lstrip("0123456789.eE+")
    number, unit = text.strip()[: len(text.strip()) - len(letters)], letters.strip().upper()
    try:
        value = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise SpecError(f"{text!r} is not an amount of memory; write 500MB, 4GB or 1.5GiB")
    return value
