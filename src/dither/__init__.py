"""Dither: differentially private federated learning that says what its privacy is worth.

>>> import dither
>>> run = dither.run("secure-fedavg")            # a preset, a TOML file or a dither.Spec
>>> run.summary["test_accuracy"], run.summary["epsilon"]["claimed"]

Everything heavy (JAX, scikit-learn, matplotlib) is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dither.types import __version__

# Public name -> the module that holds it. Kept lazy so that `dither --help` never waits for JAX.
_EXPORTS = {
    "Algorithm": "dither.types",
    "ClientResult": "dither.types",
    "Cohort": "dither.types",
    "Records": "dither.types",
    "Release": "dither.types",
    "Round": "dither.types",
    "Sampling": "dither.types",
    "DitherError": "dither.errors",
    "Model": "dither.models",
    "Dataset": "dither.data",
    "ClientPartition": "dither.data",
    "Spec": "dither.spec",
    "audit": "dither.api",
    "load": "dither.api",
    "plan": "dither.api",
    "run": "dither.api",
    "simulate": "dither.simulation.engine",
    "sweep": "dither.api",
}

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from dither.api import audit as audit
    from dither.api import load as load
    from dither.api import plan as plan
    from dither.api import run as run
    from dither.api import sweep as sweep
    from dither.data import ClientPartition as ClientPartition
    from dither.data import Dataset as Dataset
    from dither.errors import DitherError as DitherError
    from dither.models import Model as Model
    from dither.simulation.engine import simulate as simulate
    from dither.spec import Spec as Spec
    from dither.types import Algorithm as Algorithm
    from dither.types import ClientResult as ClientResult
    from dither.types import Cohort as Cohort
    from dither.types import Records as Records
    from dither.types import Release as Release
    from dither.types import Round as Round
    from dither.types import Sampling as Sampling


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'dither' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
