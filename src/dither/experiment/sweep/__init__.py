"""Sweeps as a person asks for them: a grid of specs in, a folder with tables, curves and a picture out.

grid       values of the varied keys, their product       running    training what is missing, batch by batch
folder     finished batches on disk                       result     runs, curves, one row a setting
accounts   proven ε of many alike runs                    drawing    the picture
"""

from dither.experiment.sweep.grid import parse_vary
from dither.experiment.sweep.result import Sweep
from dither.experiment.sweep.running import Progress, default_folder, sweep

__all__ = ["Progress", "Sweep", "default_folder", "parse_vary", "sweep"]
