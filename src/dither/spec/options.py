"""The methods by name, with their own options: declared here so that a spec is checked without importing a method.

A method in a Python file of yours declares its own: OPTIONS maps each name to `(default, help)` or to an `Option`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import re
import sys
import types
from collections.abc import Mapping
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


_PROXIMAL = "μ of the proximal term (μ/2)|w - w_global|^2"
_AGGREGATION_CREDIT = Option(
    True, "credit the other clients' noise under secure aggregation (Theorem 1)", traced=True
)

SECURE_FEDAVG = {
    "first_round": Option("all", "who takes part in round 0: 'all' as printed (S_0 = [N])", ("all", "cohort")),
}
NBAFL = {
    "param_clip": Option(
        20.0,
        "C, bound on the norm of all parameters; 0: the median norm of a non-private pilot",
        at_least=0.0,
        traced=True,
    ),
    "proximal": Option(0.01, _PROXIMAL, at_least=0.0, traced=True),
    "exposures": Option(1, "L, how many uploads of one client an outsider may see", at_least=0, traced=True),
    "sensitivity": Option(
        "clip", "what proofs rest on: 2C (proved) or 2C/m (only assumed: N2)", ("clip", "paper"), traced=True
    ),
    "optimizer": Option("adam", "local optimiser", ("sgd", "adam")),
    "scheduling": Option(
        "printed",
        "downlink noise with K < N: by Lemma 4, by Lemma 4 corrected (N4), or without sampling credit",
        ("printed", "corrected", "uncredited"),
        traced=True,
    ),
}
DP_SCAFFOLD = {
    "alpha_mode": Option(
        "optimised",
        "Rényi order of the claimed ε; the printed numbers use a fixed one",
        ("optimised", "fixed"),
        traced=True,
    ),
    "alpha": Option(2.5, "the order for alpha_mode='fixed'", above=1.0, traced=True),
    "capped": Option(False, "keep the optimised order within the theorem's range (S5)", traced=True),
    "const": Option(24.0, "constant of the leakage formula: 24 as printed in Theorem 1", above=0.0, traced=True),
    "stop_at_budget": Option(
        "claimed",
        "with noise='given', which ε must stay within privacy.epsilon",
        ("claimed", "proven", "no"),
        traced=True,
    ),
}
CPFED = {"aggregation_credit": _AGGREGATION_CREDIT}
CONCENTRATED = {
    "aggregation_credit": _AGGREGATION_CREDIT,
    "participation": Option(
        "balanced",
        "who takes part when: floor or ceil of T·r/n rounds each, exactly T·r/n each, or drawn every round",
        ("balanced", "equal", "uniform"),
    ),
    "participations": Option(
        0.0,
        "C_i for the noise; 0: the largest of the design (12.5 reproduces the paper)",
        at_least=0.0,
        traced=True,
    ),
    "exact_epochs": Option(
        False, "choose batch_size so that a round is exactly one epoch: floor(m / local_steps)"
    ),
}
FEDAVG = {"optimizer": Option("sgd", "local optimiser", ("sgd", "adam"))}
FEDPROX = {**FEDAVG, "proximal": Option(0.1, _PROXIMAL, at_least=0.0)}
DP_SGD = {
    "equal_credit": Option(
        False, "give the baseline CPFed's credit for participation and aggregation too (C7)", traced=True
    ),
}
DP_DSGD = {
    "credited_clients": Option(
        "n", "clients whose noise is credited: n as printed, r as derived (D4)", ("n", "r"), traced=True
    ),
    "participation": CONCENTRATED["participation"],
    "participations": CONCENTRATED["participations"],
}
DP_FEDAVG = {
    "update_clip": Option(1.0, "S, bound on the norm of a client's whole update", above=0.0),
    "noise_multiplier": Option(0.0, "noise std over S on the sum of updates; 0: from epsilon", at_least=0.0),
}

METHODS = {
    "secure-fedavg": Declaration("dither.methods.secure_fedavg", SECURE_FEDAVG),
    "nbafl": Declaration("dither.methods.nbafl", NBAFL),
    "dp-scaffold": Declaration("dither.methods.dp_scaffold", DP_SCAFFOLD),
    "cpfed": Declaration("dither.methods.cpfed", CPFED, aggregates=True),
    "concentrated": Declaration("dither.methods.concentrated", CONCENTRATED, aggregates=True),
    "fedavg": Declaration("dither.methods.baselines:fedavg", FEDAVG),
    "fedprox": Declaration("dither.methods.baselines:fedprox", FEDPROX),
    "scaffold": Declaration("dither.methods.baselines:scaffold", {}),
    "dp-sgd": Declaration("dither.methods.baselines:dp_sgd", DP_SGD),
    "dp-dsgd": Declaration("dither.methods.baselines:dp_dsgd", DP_DSGD),
    "dp-fedavg": Declaration("dither.methods.baselines:dp_fedavg", DP_FEDAVG),
}


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
