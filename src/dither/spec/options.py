"""The methods by name, with their own options, as methods.toml declares them.

A method in a Python file of yours declares its own: OPTIONS maps each name to `(default, help)` or to an `Option`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import re
import sys
import tomllib
import types
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from dither.errors import SpecError, did_you_mean


class Option(NamedTuple):
    """A key of the spec: its default, one line of help, and what its value must satisfy."""

    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    traced: bool = False  # it only sets numbers: specs that differ in it share one compiled program

    @property
    def described(self) -> str:
        """The help, with the choices."""
        return self.help + (f" ({', '.join(map(str, self.choices))})" if self.choices else "")

    def check(self, name: str, value: Any) -> None:
        """Raise `SpecError` with the value and what is allowed, unless it is."""
        if self.choices and value not in self.choices:
            raise SpecError(f"{name}={value!r} is not one of {', '.join(map(repr, self.choices))}")
        if isinstance(value, float) and math.isnan(value):
            raise SpecError(f"{name}={value} is not a number")
        if self.above is not None and not value > self.above:
            raise SpecError(f"{name}={value} must be above {self.above}")
        if self.at_least is not None and not value >= self.at_least:
            raise SpecError(f"{name}={value} must be at least {self.at_least}")
        if self.below is not None and not value < self.below:
            raise SpecError(f"{name}={value} must be below {self.below}")
        if self.at_most is not None and not value <= self.at_most:
            raise SpecError(f"{name}={value} must be at most {self.at_most}")


class Declaration(NamedTuple):
    """What a spec knows of a method: where its `prepare` is, its options, and whether its paper sums uploads by
    secure aggregation."""

    module: str
    options: Mapping[str, Option]
    aggregates: bool = False


def _read_methods() -> dict[str, Declaration]:
    text = files("dither").joinpath("spec", "methods.toml").read_text(encoding="utf-8")
    methods = {}
    for name, entry in tomllib.loads(text).items():
        options = {
            key: Option(**{**option, "choices": tuple(option.get("choices", ()))})
            for key, option in entry.get("options", {}).items()
        }
        methods[name] = Declaration(entry["module"], options, entry.get("aggregates", False))
    return methods


METHODS = _read_methods()


def declared(name: str) -> Declaration:
    """The declaration of a method, by its name or in its Python file."""
    if name in METHODS:
        return METHODS[name]
    module = module_of_file(name)
    traced = getattr(module, "VALUES", ())
    options = {key: Option(*entry) for key, entry in module.OPTIONS.items()}
    options = {key: entry._replace(traced=entry.traced or key in traced) for key, entry in options.items()}
    return Declaration(name, options, aggregates=getattr(module, "SECURE_AGGREGATION", False))


# Methods and models in Python files, and models that a program gives as objects

_approved: dict[str, bytes] = {}  # name#digest -> the file's content
_objects: dict[str, Any] = {}  # object:name -> the model or its factory
_MODEL_FILE = re.compile(r"(?P<file>.+\.py(#[0-9a-f]{64})?):(?P<factory>[A-Za-z_]\w*)")


def approve(path: str | Path) -> str:
    """Let a file of this machine be used under a name without its folder: the file's name and its SHA-256. An
    agreement names methods and models in this way, and a party follows it only where its owner approved that
    content."""
    content = file_content(str(path))
    name = f"{Path(path).name}#{hashlib.sha256(content).hexdigest()}"
    _approved[name] = content
    return name


def is_available(name: object) -> bool:
    """Whether a method can be named without a path: it comes with Dither, or was approved here. Opens no file."""
    return isinstance(name, str) and (name in METHODS or name in _approved)


def is_approved(name: object) -> bool:
    """Whether the content of a file was approved here under that name."""
    return name in _approved


def file_content(name: str) -> bytes:
    """What a file holds, or what was approved under that name: not what the file holds by now."""
    if name in _approved:
        return _approved[name]
    try:
        return Path(name).read_bytes()
    except OSError:
        raise SpecError(f"no file {name!r}") from None


def module_of_file(name: str) -> types.ModuleType:
    """The module of a method's Python file, or of the content that was approved under that name."""
    if name not in _approved and not name.endswith(".py"):
        raise SpecError(f"unknown method={name!r}{did_you_mean(name, METHODS)}")
    return module_of_content(name, file_content(name), ("prepare", "OPTIONS"), "method")


@functools.cache
def module_of_content(name: str, content: bytes, required: tuple[str, ...], kind: str) -> types.ModuleType:
    """The module that a file's content makes, with the `required` names in it."""
    module = types.ModuleType(f"dither_{kind}_{hashlib.sha256(content).hexdigest()[:16]}")
    module.__file__ = name
    sys.modules[module.__name__] = module  # dataclasses, and so Equinox modules, look their module up
    exec(compile(content, name, "exec"), module.__dict__)  # noqa: S102
    missing = [each for each in required if not hasattr(module, each)]
    if missing:
        raise SpecError(f"{name!r} is not a {kind}: it has no {' and no '.join(missing)}")
    return module


def model_file(name: str) -> tuple[str, str] | None:
    """The file and the factory of model.name = "my_model.py:factory"; None for other names."""
    match = _MODEL_FILE.fullmatch(name)
    return (match["file"], match["factory"]) if match else None


def register_model(model: Any, name: str = "") -> str:
    """A name for a model that a program gives as an object, for model.name; it is known in this process alone."""
    if not name:
        plain = getattr(model, "__name__", type(model).__name__)
        names = (f"object:{plain}" + f"-{number}" * (number > 1) for number in itertools.count(1))
        name = next(each for each in names if _objects.get(each, model) is model)
    _objects[name] = model
    return name


def registered_model(name: str) -> Any:
    """The object that was registered under that name."""
    if name not in _objects:
        raise SpecError(
            f"model.name={name!r} was given as a Python object: give it again (model=...), or write it as a file, "
            "model.name='my_model.py:factory'"
        )
    return _objects[name]
