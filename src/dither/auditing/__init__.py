"""Attacked ε: what an adversary can show to have leaked, on the code path of a run.

attack           `audit`: claimed, proven and attacked ε for each view
neighbours       neighbouring data sets that differ in one canary
trials           thousands of trials in one compiled program, or many canaries in one run
likelihood       the test statistic, fitted to pilot trials
bounds           lower bounds on ε with a stated confidence
fuzz             random specs, each attacked: `dither audit --fuzz`
report           rows, audit.json and the pictures
"""

from dither.auditing.attack import audit
from dither.auditing.report import Audit
from dither.auditing.trials import VIEWS

__all__ = ["VIEWS", "Audit", "audit"]
