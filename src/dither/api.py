"""What the command line and a Python user share.

run = dither.run("adult", values={"num_rounds": 50}, out="runs/first")     # training
dither.load("runs/first").predict(table)
outcomes = api.sweep([spec.with_values({"seed": s}) for s in range(5)])       # sweeps
dither.plan("cpfed", epsilon=1.0, proxy="adult", public_fraction=0.5).spec    # plan: knobs for a proven budget
api.accounted(spec)                                                           # tasks: claimed and proven ε
api.reproduce("nbafl/fig2", scale="quick", out="reproduced")                    # the papers' figures
api.audit(spec)                                                               # audit: attacked ε
"""

from dither.audit import VIEWS as AUDIT_VIEWS
from dither.audit import Audit, audit
from dither.planning import Plan, plan
from dither.reproduce.running import Result as Reproduction
from dither.reproduce.running import reproduce
from dither.sweeps import Outcome, sweep
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
