"""Which rounds, cohort, local steps, batch, clip and learning rate to train with, under a proven budget.

knobs       what may be chosen, and the values tried
shapes      data to plan on: counts alone, synthetic records, proxies brought to size
pricing     a point's noise by the accountant, its claim, its communication, the signal left
constants   what bounds ask of a loss, estimated with the source of each
theory      the papers' bounds over priced points
empirical   successive halving on public records
pareto      points that no other beats
request     what is planned for: budget, public facts, public records
planner     `plan`, which puts these together
pictures    the plan drawn
"""

from dither.experiment.plan.constants import Constants, estimate
from dither.experiment.plan.empirical import Search, Trial
from dither.experiment.plan.knobs import Impossible
from dither.experiment.plan.planner import Plan, plan

__all__ = ["Constants", "Impossible", "Plan", "Search", "Trial", "estimate", "plan"]
