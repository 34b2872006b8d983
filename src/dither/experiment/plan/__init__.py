"""Plans: rounds, cohort, local steps, batch, clip and learning rate for a proven budget.

planner      `plan`, the choice, and its picture           records   spec and budget; public or synthetic records
candidates   the search space, the noise of each of its    bounds    the papers' bounds and the constants they need
             points, successive halving on public records
"""

from dither.experiment.plan.bounds import ProblemConstants, estimate
from dither.experiment.plan.candidates import Infeasible, Search, Trial
from dither.experiment.plan.planner import Plan, plan

__all__ = ["Infeasible", "Plan", "ProblemConstants", "Search", "Trial", "estimate", "plan"]
