"""Attacked ε: what an adversary can show to have leaked, on the code path of a run.

bounds           lower bounds on ε with a stated confidence
designs          constructed neighbouring datasets
worlds           thousands of paired worlds in one compiled program
scores           likelihood ratios learnt from pilot trials
attack, rows     `audit`: claimed, proven and attacked ε for each view
one_run          many canaries in one run
exhibits         pairs of datasets that refute a claim by being shown
membership       LiRA: who was trained on, from the final model
reconstruction   a record read off one upload
report           audit.json and the pictures
"""

import sys
from types import ModuleType
from typing import Any

from dither.auditing.attack import Audit, audit
from dither.auditing.worlds import VIEWS

__all__ = ["VIEWS", "Audit", "audit"]


class _Callable(ModuleType):
    """So that `dither.auditing(spec)` works whether or not this package was imported before."""

    def __call__(self, *arguments: Any, **named: Any) -> Audit:
        return audit(*arguments, **named)


sys.modules[__name__].__class__ = _Callable
