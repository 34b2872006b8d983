"""The papers' figures, drawn from real data by this code, with each finding judged.

>>> from dither.reproduction import reproduce
>>> result = reproduce("secure-fedavg/fig1", scale="quick", out="reproduced")
>>> [(claim["id"], claim["printed"]["status"]) for claim in result.claims]

figure      what a figure is: grid, panels, claims        figures/    the 27 of them, one small file each
judging     claims as statistics over seeds               constants   NbAFL's constants, estimated
cache       finished runs on disk                         computing   missing runs, in batches
accounts    claimed and proven ε of the settings          tables      numbers the papers print
drawing     pictures and CSV                              report      one self-contained page
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_EXPORTS = {"Result": "running", "reproduce": "running", "names": "figures", "select": "figures"}

__all__ = list(_EXPORTS)

if TYPE_CHECKING:
    from dither.reproduction.figures import names as names
    from dither.reproduction.figures import select as select
    from dither.reproduction.running import Result as Result
    from dither.reproduction.running import reproduce as reproduce


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"dither.reproduction.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'dither.reproduction' has no attribute {name!r}")
