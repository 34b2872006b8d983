"""Methods by name: the papers' files, and any Python file of yours with OPTIONS and prepare."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import types
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from dither.errors import SpecError, did_you_mean
from dither.types import Prepared, PrivacyPlan

METHODS = {
    "secure-fedavg": "dither.methods.secure_fedavg",
    "nbafl": "dither.methods.nbafl",
    "dp-scaffold": "dither.methods.dp_scaffold",
    "cpfed": "dither.methods.cpfed",
    "concentrated": "dither.methods.concentrated",
    "fedavg": "dither.methods.baselines:fedavg",
    "fedprox": "dither.methods.baselines:fedprox",
    "scaffold": "dither.methods.baselines:scaffold",
    "dp-sgd": "dither.methods.baselines:dp_sgd",
    "dp-dsgd": "dither.methods.baselines:dp_dsgd",
    "dp-fedavg": "dither.methods.baselines:dp_fedavg",
}


class Method(NamedTuple):
    """A method as its file gives it: its factory, and its own constants as name -> (default, help)."""

    prepare: Callable[[Any, PrivacyPlan], Prepared]
    options: Mapping[str, tuple[Any, str]]
    pilot_metric: str = ""
    why: str = ""  # why its claimed and its proven ε differ, with errata ids
    aggregates: bool = False  # its paper has the server learn sums alone
    values: tuple[str, ...] = ()  # options that only set numbers: specs that differ in them are one program


_approved: dict[str, bytes] = {}  # name#digest -> the file's content


def approve(path: str | Path) -> str:
    """Let a file of this machine be a method under a name that says nothing of paths: its own, and its SHA-256.
    An agreement names methods in this way, and is heard only where the owner approved that content."""
    try:
        content = Path(path).read_bytes()
    except OSError:
        raise SpecError(f"no file {str(path)!r} for a method") from None
    name = f"{Path(path).name}#{hashlib.sha256(content).hexdigest()}"
    _approved[name] = content
    return name


def known(name: object) -> bool:
    """Whether a method can be named without a path: it comes with Dither, or was approved here. Opens no file."""
    return isinstance(name, str) and (name in METHODS or name in _approved)


def method(name: str) -> Method:
    """The method of that name, or of a Python file: any file with OPTIONS and prepare is a method."""
    if name in _approved:
        return _as_method(_module_of_content(name))
    if name.endswith(".py"):
        return _as_method(_module_of_file(name))
    if name not in METHODS:
        raise SpecError(f"unknown method={name!r}{did_you_mean(name, METHODS)}")
    where, _, which = METHODS[name].partition(":")
    module = import_module(where)
    if which:
        prefix = which.upper()
        prepare, options = getattr(module, f"prepare_{which}"), getattr(module, f"{prefix}_OPTIONS")
        return Method(prepare, options, values=getattr(module, f"{prefix}_VALUES", ()))
    return _as_method(module)


def _as_method(module: Any) -> Method:
    missing = [name for name in ("prepare", "OPTIONS") if not hasattr(module, name)]
    if missing:
        raise SpecError(f"{module.__file__!r} is not a method: it has no {' and no '.join(missing)}")
    return Method(
        module.prepare,
        module.OPTIONS,
        pilot_metric=getattr(module, "PILOT_METRIC", ""),
        why=getattr(module, "WHY", ""),
        aggregates=getattr(module, "SECURE_AGGREGATION", False),
        values=getattr(module, "VALUES", ()),
    )


def _module_of_file(path: str) -> Any:
    if not Path(path).is_file():
        raise SpecError(f"no file {path!r} for method={path!r}")
    spec = importlib.util.spec_from_file_location(f"dither_method_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise SpecError(f"method={path!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def _module_of_content(name: str) -> Any:
    module = types.ModuleType(f"dither_method_{name.partition('#')[2][:16]}")
    module.__file__ = name
    # The content that the owner approved, not what the file holds by now.
    exec(compile(_approved[name], name, "exec"), module.__dict__)  # noqa: S102
    return module
