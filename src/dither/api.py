"""What the command line and a Python user share.

run = dither.run("adult", values={"num_rounds": 50}, out="runs/first")     # experiment.train
dither.load("runs/first").predict(table)
dither.sweep("adult", {"privacy.epsilon": [0.1, 1.0], "seed": range(5)}).table()   # a grid of runs
dither.plan("cpfed", epsilon=1.0, proxy="adult", public_fraction=0.5).spec    # knobs for a proven budget
api.accounted(spec)                                                           # claimed and proven ε
api.reproduce("nbafl/fig2", scale="quick", out="reproduced")                    # the papers' figures
api.audit(spec)                                                               # attacked ε

Each name is imported when it is first used: a run starts without the auditor, the planner and what they need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dither.auditing import VIEWS as AUDIT_VIEWS
    from dither.auditing import Audit, audit
    from dither.experiment.build import (
        Experiment,
        accounted,
        build_experiment,
        deal,
        load_data,
        planned_rounds,
    )
    from dither.experiment.plan import Plan, plan
    from dither.experiment.report import Report, load
    from dither.experiment.sweep import Outcome, Sweep, sweep
    from dither.experiment.train import resume, run
    from dither.reproduction.running import Reproduction, reproduce

__all__ = [
    "AUDIT_VIEWS",
    "Audit",
    "Experiment",
    "Outcome",
    "Plan",
    "Report",
    "Reproduction",
    "Sweep",
    "accounted",
    "audit",
    "build_experiment",
    "deal",
    "load",
    "load_data",
    "plan",
    "planned_rounds",
    "reproduce",
    "resume",
    "run",
    "sweep",
]

_ROOMS = {
    "auditing": ("Audit", "audit"),
    "experiment.plan": ("Plan", "plan"),
    "reproduction.running": ("reproduce",),
    "experiment.report": ("Report", "load"),
    "experiment.sweep": ("Outcome", "Sweep", "sweep"),
    "experiment.train": ("resume", "run"),
}
_WHERE = {name: (f"dither.{room}", name) for room, names in _ROOMS.items() for name in names} | {
    "AUDIT_VIEWS": ("dither.auditing", "VIEWS"),
    "Reproduction": ("dither.reproduction.running", "Reproduction"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'dither.api' has no attribute {name!r}")
    room, inner = _WHERE.get(name, ("dither.experiment.build", name))
    value = getattr(import_module(room), inner)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
