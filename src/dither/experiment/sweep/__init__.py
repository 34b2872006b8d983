"""Sweeps: a grid of specs becomes a folder with tables, curves and a picture.

run       the grid, training what is missing, proofs         batches   which runs train side by side
result    runs, tables, the folder, the picture
"""

from dither.experiment.sweep.batches import Outcome
from dither.experiment.sweep.result import Sweep
from dither.experiment.sweep.run import parse_vary, sweep

__all__ = ["Outcome", "Sweep", "parse_vary", "sweep"]
