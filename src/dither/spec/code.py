"""Code that a spec names: methods and models in Python files, and models that a program gives as objects."""

from __future__ import annotations

import functools
import hashlib
import itertools
import sys
import traceback
import types
from pathlib import Path
from typing import Any

from dither.errors import SpecError

_approved: dict[str, bytes] = {}  # name#digest -> the file's content
_objects: dict[str, Any] = {}  # object:name -> the model or its factory


def approve(path: str | Path) -> str:
    """Let a file of this machine be used under a name without its folder: the file's name and its SHA-256. An
    agreement names methods and models in this way, and a party follows it only if its owner approved that
    content."""
    content = file_content(str(path))
    name = f"{Path(path).name}#{hashlib.sha256(content).hexdigest()}"
    _approved[name] = content
    return name


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


@functools.cache
def module_of_content(name: str, content: bytes, required: tuple[str, ...], kind: str) -> types.ModuleType:
    """The module that a file's content makes, with the `required` names in it."""
    module = types.ModuleType(f"dither_{kind}_{hashlib.sha256(content).hexdigest()[:16]}")
    module.__file__ = name
    sys.modules[module.__name__] = module  # dataclasses, and so Equinox modules, look their module up
    try:
        exec(compile(content, name, "exec"), module.__dict__)  # noqa: S102
    except Exception as error:  # whatever a user's file does
        raise failed(name, error) from error
    missing = [each for each in required if not hasattr(module, each)]
    if missing:
        raise SpecError(f"{name!r} is not a {kind}: it has no {' and no '.join(missing)}")
    return module


def failed(name: str, error: Exception) -> SpecError:
    """What to say of an exception that a user's file raised: the file's line, and the exception's first."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
    where = f"line {lines[-1]} of {name!r}" if lines else repr(name)
    what = (str(error).strip().splitlines() or [""])[0]
    return SpecError(f"{where} fails: {type(error).__name__}: {what}")


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
