"""Attacked ε: what an adversary can show to have leaked, on the code path of a run.

bounds           lower bounds on ε with a stated confidence
designs          constructed neighbouring datasets
worlds           thousands of paired worlds in one compiled program
scores           likelihood ratios learnt from pilot trials
attack           `audit`: claimed, proven and attacked ε for each view
one_run          many canaries in one run
"""

from .attack import Audit, audit

__all__ = ["Audit", "audit"]
