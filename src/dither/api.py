"""What the command line and a Python user share.

run = dither.run("adult", values={"num_rounds": 50}, out="runs/first")     # training
dither.load("runs/first").predict(table)
dither.sweep("adult", {"privacy.epsilon": [0.1, 1.0], "seed": range(5)}).table()   # sweeping: a grid of runs
dither.plan("cpfed", epsilon=1.0, proxy="adult", public_fraction=0.5).spec    # plan: knobs for a proven budget
api.accounted(spec)                                                           # tasks: claimed and proven ε
api.reproduce("nbafl/fig2", scale="quick", out="reproduced")                    # the papers' figures
api.audit(spec)                                                               # audit: attacked ε

Each name is imported when it is first used: a run starts without the auditor, the planner and what they need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dither.audit import VIEWS as AUDIT_VIEWS
    from dither.audit import Audit, audit
    from dither.planning import Plan, plan
    from dither.reproduce.running import Result as Reproduction
    from dither.reproduce.running import reproduce
    from dither.sweeping import Sweep, sweep
    from dither.sweeps import Outcome
    from dither.tasks import (
        Task,
        accounted,
        build_task,
        circumstances,
        classes,
        deal,
        load_data,
        planned_rounds,
        proven,
        proven_so_far,
    )
    from dither.training import Run, load, resume, run

__all__ = [
    "AUDIT_VIEWS",
    "Audit",
    "Outcome",
    "Plan",
    "Reproduction",
    "Run",
    "Sweep",
    "Task",
    "accounted",
    "audit",
    "build_task",
    "circumstances",
    "classes",
    "deal",
    "load",
    "load_data",
    "plan",
    "planned_rounds",
    "proven",
    "proven_so_far",
    "reproduce",
    "resume",
    "run",
    "sweep",
]

_ROOMS = {
    "audit": ("Audit", "audit"),
    "planning": ("Plan", "plan"),
    "reproduce.running": ("reproduce",),
    "sweeping": ("Sweep", "sweep"),
    "sweeps": ("Outcome",),
    "training": ("Run", "load", "resume", "run"),
}
_WHERE = {name: (f"dither.{room}", name) for room, names in _ROOMS.items() for name in names} | {
    "AUDIT_VIEWS": ("dither.audit", "VIEWS"),
    "Reproduction": ("dither.reproduce.running", "Result"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'dither.api' has no attribute {name!r}")
    room, inner = _WHERE.get(name, ("dither.tasks", name))
    value = getattr(import_module(room), inner)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
