"""The papers' figures, drawn from runs of this code, with each finding judged.

>>> from dither.reproduction import reproduce
>>> result = reproduce("secure-fedavg/fig1", scale="quick", out="reproduced")
>>> [(claim.id, claim.printed.status) for claim in result.claims]

papers/     the figures of each paper, as TOML            secure_fedavg, nbafl, dp_scaffold, cpfed: their panels
figure      what a figure is: grid, panels, criteria                  and judges (cpfed: concentrated too)
judging     criteria as statistics over seeds             drawing     pictures and CSV
cache       finished runs and proven ε on disk            report      one self-contained page
running     computes, judges, draws
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dither.reproduction.running import Reproduction as Reproduction
    from dither.reproduction.running import reproduce as reproduce

__all__ = ["Reproduction", "reproduce"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # loaded on first use: listing figures needs neither JAX nor Matplotlib
        return getattr(import_module("dither.reproduction.running"), name)
    raise AttributeError(f"module 'dither.reproduction' has no attribute {name!r}")
