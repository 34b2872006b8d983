"""A sweep over private records: each of its runs is a run of its own, charged to the ledger before it begins.

Many runs are many releases: the ledger adds them up, and a budget ends the sweep where it ends. Runs do not train
side by side, and what a run's folder keeps local stays there: the sweep's tables hold only what its runs release.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dither.errors import BudgetExhausted, SpecError
from dither.experiment import train
from dither.experiment.report import Report
from dither.experiment.sweep.batches import Outcome
from dither.experiment.sweep.result import SweepFolder, SweepRun
from dither.simulation import devices, distributed
from dither.spec import Spec


class ChargedTo(NamedTuple):
    """Where the runs of a sweep are charged; see `dither.run`."""

    ledger: str | Path | None = None
    new_ledger: bool = False


def check(specs: Sequence[Spec], folder: str | Path | None) -> None:
    """`SpecError` where the runs of a sweep over private records could not be compared, or not be kept."""
    path = specs[0].data.title
    if distributed.count() > 1:
        raise SpecError(f"{path!r} holds private records, whose runs {distributed.count()} processes cannot share")
    if not all(spec.scored for spec in specs):
        raise SpecError(
            f"the runs of a sweep are compared on test records, but those of {path!r} are private; give public "
            "ones (data.test_path and data.test_public = true)"
        )
    if folder is None:
        raise SpecError(f"{path!r} holds private records: give out=FOLDER, where each charged run is kept")


def train_runs(
    specs: Sequence[Spec],
    finished: Mapping[int, SweepRun],
    folder: SweepFolder,
    charged: ChargedTo,
    on_progress: Callable[[float, float, str], None] | None,
) -> dict[int, SweepRun]:
    """Train what is not finished, one run after the other, and keep each. An interrupted run goes on."""
    environment = {**devices.versions(), "device": devices.device()}
    runs: dict[int, SweepRun] = {}
    for number, spec in enumerate(specs):
        if number in finished:
            continue
        if on_progress:
            done = len(finished) + len(runs)
            on_progress(done, len(specs), f"{done}/{len(specs)} runs")
        place, started = folder.path / "runs" / spec.digest()[:16], time.perf_counter()
        if (place / "spec.toml").is_file():
            report = train.resume(place, ledger=charged.ledger, new_ledger=charged.new_ledger)
        else:
            report = train.run(spec, out=place, ledger=charged.ledger, new_ledger=charged.new_ledger)
        if report.stopped:
            raise BudgetExhausted(
                f"{report.stopped}; {len(finished) + len(runs)} of {len(specs)} runs are finished in "
                f"{str(folder.path)!r}"
            )
        seconds = time.perf_counter() - started
        runs[number] = SweepRun(_outcome(spec, report), report.epsilon.proven(), seconds, environment)
        folder.save_batch([runs[number]])
    return runs


def _outcome(spec: Spec, report: Report) -> Outcome:
    """What the run released, as a sweep keeps it."""
    rows = [dict(row) for row in report.evaluations]
    rows[-1] |= {} if report.scores is None else report.scores.beside_evaluations()
    return Outcome(spec, rows, report.epsilon.claimed, np.zeros(0, np.int64))
