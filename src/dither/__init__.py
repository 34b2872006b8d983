"""Dither: differentially private federated learning that says what its privacy is worth.

>>> import dither
>>> report = dither.run("adult", values={"num_rounds": 50}, out="runs/first")
>>> report.accuracy, report.epsilon.claimed.value, report.epsilon.proven("server sees uploads").value
>>> dither.load("runs/first").predict("people.csv")
>>> dither.account("adult")                                     # claimed and proven ε, without training
>>> dither.sweep("adult", {"privacy.epsilon": [0.1, 1.0], "seed": range(5)}).table()
>>> dither.plan("cpfed", epsilon=1.0, proxy="adult", public_fraction=0.5).spec
>>> dither.audit("secure-fedavg")                               # a lower bound on ε, by attack
>>> dither.reproduce("nbafl/fig2", scale="quick", out="reproduced")

A run is described by a preset's name, a TOML file, a mapping or a `dither.Spec`. Everything heavy (JAX, pandas,
scikit-learn, matplotlib) is imported when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dither.types import __version__

if sys.platform == "win32":
    raise ImportError("Dither needs Linux or macOS: its ledger locks files as these do. On Windows, use WSL.")

# The room of each public name. Kept lazy so that `dither --help` never waits for JAX.
_ROOMS = {
    "auditing": ("Audit", "audit"),
    "data": ("ClientPartition", "Dataset"),
    "errors": ("DitherError",),
    "experiment.account": ("PrivacyReport", "account"),
    "experiment.check": ("Check", "check"),
    "experiment.estimators": ("PrivateFederatedClassifier", "PrivateFederatedRegressor"),
    "experiment.plan": ("Plan", "plan"),
    "experiment.report": ("Report", "load"),
    "experiment.start": ("Project", "start"),
    "experiment.statistics": ("Statistics", "statistics"),
    "experiment.statement": ("Statement", "statement"),
    "experiment.sweep": ("Sweep", "sweep"),
    "experiment.train": ("run",),
    "models": ("Model",),
    "reproduction.running": ("Reproduction", "reproduce"),
    "simulation.engine": ("simulate",),
    "spec": ("Spec",),
    "types": ("Algorithm", "ClientResult", "Cohort", "Records", "Release", "Round", "Sampling"),
}
_EXPORTS = {name: f"dither.{room}" for room, names in _ROOMS.items() for name in names}

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from dither.auditing import Audit as Audit
    from dither.auditing import audit as audit
    from dither.data import ClientPartition as ClientPartition
    from dither.data import Dataset as Dataset
    from dither.errors import DitherError as DitherError
    from dither.experiment.account import PrivacyReport as PrivacyReport
    from dither.experiment.account import account as account
    from dither.experiment.check import Check as Check
    from dither.experiment.check import check as check
    from dither.experiment.estimators import PrivateFederatedClassifier as PrivateFederatedClassifier
    from dither.experiment.estimators import PrivateFederatedRegressor as PrivateFederatedRegressor
    from dither.experiment.plan import Plan as Plan
    from dither.experiment.plan import plan as plan
    from dither.experiment.report import Report as Report
    from dither.experiment.report import load as load
    from dither.experiment.start import Project as Project
    from dither.experiment.start import start as start
    from dither.experiment.statement import Statement as Statement
    from dither.experiment.statement import statement as statement
    from dither.experiment.statistics import Statistics as Statistics
    from dither.experiment.statistics import statistics as statistics
    from dither.experiment.sweep import Sweep as Sweep
    from dither.experiment.sweep import sweep as sweep
    from dither.experiment.train import run as run
    from dither.models import Model as Model
    from dither.reproduction.running import Reproduction as Reproduction
    from dither.reproduction.running import reproduce as reproduce
    from dither.simulation.engine import simulate as simulate
    from dither.spec import Spec as Spec
    from dither.types import Algorithm as Algorithm
    from dither.types import ClientResult as ClientResult
    from dither.types import Cohort as Cohort
    from dither.types import Records as Records
    from dither.types import Release as Release
    from dither.types import Round as Round
    from dither.types import Sampling as Sampling


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'dither' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
