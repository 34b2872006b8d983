"""The grid of a sweep: which keys vary, over which values, and the specs of their product."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dither.errors import SpecError
from dither.spec import Spec, parse_setting

_RANGE = re.compile(r"(-?\d+):(-?\d+)(?::(-?\d+))?")


def parse_vary(texts: Sequence[str]) -> dict[str, list[Any]]:
    """`key=value,value` or `key=first:end` of --vary, by key; an `end` is left out, as in Python."""
    found: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.strip()
        if not equals or not key or not values.strip():
            raise SpecError(f"--vary {text!r} is not of the form key=value,value or key=first:end")
        if key in found:
            raise SpecError(f"--vary {key} is given twice; put all its values into one, {key}=value,value")
        found[key] = [value for part in _split(values) for value in _values(key, part.strip())]
    return found


def _split(text: str) -> list[str]:
    """At commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[]":
            depth += 1 if letter == "[" else -1
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _values(key: str, text: str) -> list[Any]:
    span = _RANGE.fullmatch(text)
    if span is None:
        if not text:
            raise SpecError(f"--vary {key} has an empty value; remove the comma too many")
        return [parse_setting(f"{key}={text}")[1]]
    first, end, step = int(span[1]), int(span[2]), int(span[3] or 1)
    values = list(range(first, end, step)) if step else []
    if not values:
        raise SpecError(f"--vary {key}={text} is an empty range; first:end counts from first up to end - 1")
    return values


def product(
    what: Spec | str | Path | Mapping[str, Any], vary: Mapping[str, Sequence[Any]], values: Mapping[str, Any]
) -> list[Spec]:
    """Every combination of the varied values on top of a spec, the last key fastest. All are checked here."""
    base = Spec.from_any(what).with_values(values)
    if not vary:
        raise SpecError("nothing varies: give at least one --vary key=value,value, or use `dither run`")
    for key in vary:
        if key in values:
            raise SpecError(f"{key} is both set and varied; leave one out")
    columns = {key: list(column) for key, column in vary.items()}
    specs = [
        base.with_values(dict(zip(columns, row, strict=True))) for row in itertools.product(*columns.values())
    ]
    if not specs:
        empty = next(key for key, column in columns.items() if not column)
        raise SpecError(f"{empty} has no value to take; give at least one")
    refuse_twins(specs)
    return specs


def refuse_twins(specs: Sequence[Spec]) -> None:
    """The same run twice would count as two that agree."""
    seen: dict[str, int] = {}
    for number, spec in enumerate(specs):
        twin = seen.setdefault(spec.digest(), number)
        if twin != number:
            raise SpecError(f"runs {twin} and {number} of the sweep are the same; give each value once")


def differing(specs: Sequence[Spec]) -> list[str]:
    """Keys in which specs differ, in the order of a spec."""
    flat = [flatten(spec) for spec in specs]
    keys = dict.fromkeys(key for one in flat for key in one)
    return [key for key in keys if any(one.get(key) != flat[0].get(key) for one in flat[1:])]


def flatten(spec: Spec) -> dict[str, Any]:
    """A spec's values by dotted key."""
    found: dict[str, Any] = {}
    for key, value in spec.to_dict().items():
        inner = {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {}
        found |= inner or ({} if isinstance(value, dict) else {key: value})
    return found
