"""A run as a frozen dataclass, to and from TOML; presets by name.

    spec = Spec.from_preset("secure-fedavg").with_values({"privacy.epsilon": 1.0, "num_rounds": 50})
    spec.to_toml();  Spec.from_toml(text)

Every value is checked when a `Spec` is created: an unknown key, or a value of the wrong type or out of range,
raises a `SpecError` that names it. Checks that need the data (batch_size against a client's records) come later.

keys.toml declares the keys, methods.toml the methods and their options. A method in your own Python file declares
its own: OPTIONS maps each name to `(default, help)` or to an `Option`.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
import tomllib
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from dither.errors import SpecError, did_you_mean
from dither.spec import code

__all__ = ["METHODS", "Spec"]

_MODEL_FILE = re.compile(r"(?P<file>.+\.py(#[0-9a-f]{64})?):(?P<factory>[A-Za-z_]\w*)")
IN_MEMORY = "(in memory)"  # data.path of records that were given in Python
_BETWEEN_FILES = "\n"  # of data.path, where it lists several
_TABLES = (".csv", ".tsv", ".parquet", ".npz")
_LIMITS = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}


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
        for limit, holds in _LIMITS.items():
            bound = getattr(self, limit)
            if bound is not None and not holds(value, bound):
                raise SpecError(f"{name}={value} must be {limit.replace('_', ' ')} {bound}")


def _options(entries: Mapping[str, Any], section: str = "") -> dict[str, Option]:
    """What keys.toml or methods.toml declares, by dotted key."""
    options: dict[str, Option] = {}
    for name, entry in entries.items():
        if "help" in entry:
            values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
            options[section + name] = Option(**values)
        else:
            options |= _options(entry, f"{name}.")
    return options


class Declaration(NamedTuple):
    """What a spec knows of a method: where its `prepare` is, its options, and whether its paper sums uploads by
    secure aggregation."""

    module: str
    options: Mapping[str, Option]
    aggregates: bool = False


def _read_toml(file: str) -> dict[str, Any]:
    return tomllib.loads(files("dither").joinpath("spec", file).read_text(encoding="utf-8"))


_KEYS = _options(_read_toml("keys.toml"))


def _key(name: str) -> Any:
    """A field of the spec with its default."""
    return field(default=_KEYS[name].default)


@dataclass(frozen=True)
class DataSpec:
    """Which records, and who holds them."""

    name: str = _key("data.name")
    path: str = _key("data.path")
    test_path: str = _key("data.test_path")
    test_public: bool = _key("data.test_public")
    public: bool = _key("data.public")
    id: str = _key("data.id")
    label: str = _key("data.label")
    classes: str = _key("data.classes")
    label_bounds: tuple[float, ...] = _key("data.label_bounds")
    schema: str = _key("data.schema")
    encoding: str = _key("data.encoding")
    features: str = _key("data.features")
    transform: str = _key("data.transform")
    test_fraction: float = _key("data.test_fraction")
    partition: str = _key("data.partition")
    similarity: float = _key("data.similarity")
    alpha: float = _key("data.alpha")
    column: str = _key("data.column")
    records_per_client: int = _key("data.records_per_client")
    split: str = _key("data.split")
    public_fraction: float = _key("data.public_fraction")
    part: str = _key("data.part")
    stream: str = _key("data.stream")
    stream_memory: float = _key("data.stream_memory")

    @property
    def class_names(self) -> tuple[str, ...]:
        """The declared classes of the label."""
        return tuple(name.strip() for name in self.classes.split(",") if name.strip())

    @property
    def paths(self) -> str | tuple[str, ...]:
        """`path`, or its files if it is a list."""
        files = tuple(self.path.split(_BETWEEN_FILES))
        return files if len(files) > 1 else self.path

    @property
    def title(self) -> str:
        """What the records are called: the name of the set, of the file, or of the first file."""
        first, *others = self.path.split(_BETWEEN_FILES)
        more = f" and {len(others)} more" if others else ""
        return (Path(first).name or first) + more if first else self.name


MODELS = ("logistic", "softmax", "linear", "mlp", "cnn")


@dataclass(frozen=True)
class ModelSpec:
    """The model."""

    name: str = _key("model.name")
    hidden: tuple[int, ...] = _key("model.hidden")
    init: str = _key("model.init")
    options: dict[str, Any] = field(default_factory=dict)  # what your own model's factory is called with
    weights: str = _key("model.weights")
    trainable: tuple[str, ...] = _key("model.trainable")
    l2: float = _key("model.l2")
    l2_inside_clip: bool = _key("model.l2_inside_clip")
    loss: str = _key("model.loss")
    huber_delta: float = _key("model.huber_delta")
    class_weight: tuple[float, ...] = _key("model.class_weight")
    class_counts: tuple[float, ...] = _key("model.class_counts")


@dataclass(frozen=True)
class PrivacySpec:
    """How much privacy, against which adversary, and how the noise is set."""

    epsilon: float = _key("privacy.epsilon")
    delta: float = _key("privacy.delta")
    unit: str = _key("privacy.unit")
    noise: str = _key("privacy.noise")
    noise_std: float = _key("privacy.noise_std")
    noise_schedule: str = _key("privacy.noise_schedule")
    noise_decay: float = _key("privacy.noise_decay")
    noise_decay_start: int = _key("privacy.noise_decay_start")
    noise_scale: tuple[float, ...] = _key("privacy.noise_scale")
    epsilons: tuple[float, ...] = _key("privacy.epsilons")
    clip: str = _key("privacy.clip")
    clip_norm: float = _key("privacy.clip_norm")
    clip_quantile: float = _key("privacy.clip_quantile")
    view: str = _key("privacy.view")
    colluders: int = _key("privacy.colluders")
    project_epsilon: float = _key("privacy.project_epsilon")
    statistics_epsilon: float = _key("privacy.statistics_epsilon")
    assume_credit: bool = _key("privacy.assume_credit")
    adjacency: str = _key("privacy.adjacency")


@dataclass(frozen=True)
class SecaggSpec:
    """Secure aggregation."""

    mode: str = _key("secagg.mode")
    modulus_bits: int = _key("secagg.modulus_bits")
    scale_bits: int = _key("secagg.scale_bits")
    bound: float = _key("secagg.bound")
    noise: str = _key("secagg.noise")
    threshold: int = _key("secagg.threshold")
    neighbours: int = _key("secagg.neighbours")


@dataclass(frozen=True)
class FederationSpec:
    """Rules of a real federation."""

    min_clients: int = _key("federation.min_clients")
    refused: str = _key("federation.refused")
    round_timeout: float = _key("federation.round_timeout")
    max_norm: float = _key("federation.max_norm")
    dropout: float = _key("federation.dropout")


@dataclass(frozen=True)
class Spec:
    """A complete description of a run: the same spec gives the same bits (on the same device and versions)."""

    method: str = _key("method")
    task: str = _key("task")
    seed: int = _key("seed")
    num_clients: int = _key("num_clients")
    cohort_size: int = _key("cohort_size")
    num_rounds: int = _key("num_rounds")
    local_steps: int = _key("local_steps")
    batch_size: int = _key("batch_size")
    batch_sampling: str = _key("batch_sampling")
    sampling_rate: float = _key("sampling_rate")
    client_lr: float = _key("client_lr")
    lr_decay: float = _key("lr_decay")
    server_lr: float = _key("server_lr")
    server_optimizer: str = _key("server_optimizer")
    server_momentum: float = _key("server_momentum")
    server_schedule: str = _key("server_schedule")
    server_average: float = _key("server_average")
    eval_every: int = _key("eval_every")
    randomness: str = _key("randomness")
    compare: bool = _key("compare")
    data: DataSpec = field(default_factory=DataSpec)
    model: ModelSpec = field(default_factory=ModelSpec)
    privacy: PrivacySpec = field(default_factory=PrivacySpec)
    secagg: SecaggSpec = field(default_factory=SecaggSpec)
    federation: FederationSpec = field(default_factory=FederationSpec)
    method_options: dict[str, Any] = field(default_factory=dict)  # the method's own constants

    def __post_init__(self) -> None:
        for key, option in _KEYS.items():
            option.check(key, _value(self, key))
        object.__setattr__(self, "method_options", _method_options(self.method, self.method_options))
        _check_together(self)

    @property
    def source_of_randomness(self) -> str:
        """ "seeded" or "os": the value of `randomness` for this data, with "auto" resolved."""
        if self.randomness != "auto":
            return self.randomness
        return "os" if self.private else "seeded"

    @property
    def adjacency(self) -> str:
        """ "zero-out", "replace-one" or "add/remove": `privacy.adjacency` for this data, with "auto" resolved."""
        if self.privacy.adjacency != "auto":
            return self.privacy.adjacency
        return "zero-out" if self.data.path else "replace-one"

    @property
    def scored(self) -> bool:
        """Whether the test records are public: the catalogue's are, a user's own by declaration. data.public is
        about the records of data.path alone."""
        own = self.data.test_path or (self.data.path and not self.data.public)
        return self.data.test_public or not own

    @property
    def private(self) -> bool:
        """Whether the records are a user's own, and not declared public."""
        return bool(self.data.path) and not self.data.public

    @property
    def aggregation(self) -> str:
        """ "off", "ideal" or "real": `secagg.mode` for this method, with "auto" resolved."""
        if self.secagg.mode != "auto":
            return self.secagg.mode
        wanted = declared(self.method).aggregates and self.method_options.get("aggregation_credit", True)
        return "ideal" if wanted and self.cohort_size > 1 else "off"

    @property
    def colluders(self) -> int:
        """`privacy.colluders` in a simulation (default: 0); the agreement of a federation names its number."""
        return max(self.privacy.colluders, 0)

    # To and from other forms

    @classmethod
    def from_preset(cls, name: str) -> Spec:
        """The preset of that name."""
        return cls.from_toml(preset_text(name), where=f"preset {name}")

    @classmethod
    def from_toml(cls, text: str, where: str = "spec") -> Spec:
        """A spec from TOML; missing keys take their defaults."""
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SpecError(f"{where} is not valid TOML: {error}") from error
        return cls().with_values(_flatten(values), reset_options=True)

    @classmethod
    def from_any(cls, source: Spec | str | Path | Mapping[str, Any]) -> Spec:
        """A spec from a spec, a mapping, the path of a TOML file or the name of a preset."""
        if isinstance(source, Spec):
            return source
        if isinstance(source, Mapping):
            return cls().with_values(_flatten(source), reset_options=True)
        path = Path(source)
        if path.suffix.lower() in _TABLES:
            raise SpecError(f"{str(path)!r} is a table; give a spec whose data.path is this file")
        if path.suffix == ".toml" or path.is_file():
            if not path.is_file():
                raise SpecError(f"no spec file {str(path)!r}; `dither presets` lists what can be run by name")
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                raise SpecError(f"{str(path)!r} is not a text file in UTF-8") from None
            return cls.from_toml(text, where=str(path))
        if (path / "run" / "spec.toml").is_file():  # a project of `dither start`
            raise SpecError(f"{str(path)!r} is not a run folder; give {str(path / 'run')!r}")
        if (path.suffix or "/" in str(source)) and str(source) not in preset_names():
            beside = [each.name for each in path.parent.glob("*.toml")] if path.parent.is_dir() else []
            hint = did_you_mean(path.name, beside) if beside else "; give a preset or a file that ends in .toml"
            raise SpecError(f"no spec file {str(source)!r}{hint}")
        return cls.from_preset(str(source))

    @staticmethod
    def given(source: Spec | str | Path | Mapping[str, Any]) -> dict[str, Any] | None:
        """The values that a mapping or a TOML file gives, by dotted key. For a path of records (a table, or a
        folder or pattern of tables), that path. None for a `Spec` and for a preset, which are complete."""
        if isinstance(source, Mapping):
            return _flatten(source)
        if isinstance(source, Spec) or str(source) in preset_names():
            return None
        path = Path(source).expanduser()
        if path.suffix.lower() in _TABLES or path.is_dir() or "*" in str(source):
            return {"data.path": str(source)}
        if not path.is_file():
            return None  # `from_any` says what is wrong
        try:
            return _flatten(tomllib.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return None

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, complete."""
        return asdict(self, dict_factory=lambda items: {name: _plain(value) for name, value in items})

    def flat(self) -> dict[str, Any]:
        """Every value by its dotted key."""
        return _flatten(self.to_dict())

    def to_toml(self) -> str:
        """Complete TOML."""
        import tomli_w

        return tomli_w.dumps(self.to_dict())

    @property
    def files(self) -> list[str]:
        """The files of method, model and weights."""
        named = model_file(self.model.name)
        code_files = [self.method] * self.method.endswith(".py") + ([named[0]] if named else [])
        return code_files + [self.model.weights] * bool(self.model.weights)

    def digest(self) -> str:
        """SHA-256 of the canonical form, with the content of the files that it names: two specs with the same
        digest are the same run."""
        text = json.dumps(self.to_dict(), sort_keys=True).encode()
        for file in self.files:
            text += Path(file).read_bytes() if Path(file).is_file() else b""
        return hashlib.sha256(text).hexdigest()

    def fingerprint(self) -> str:
        """SHA-256 of what differs from the defaults. Unlike `digest`, it stays the same in later versions with
        more keys, so it can name stored results. A change of a default's meaning must change such names."""

        def values(spec: Spec) -> dict[str, Any]:  # "auto" is younger than some names: what it comes to counts
            resolved = {"privacy.adjacency": spec.adjacency, "privacy.colluders": spec.colluders}
            return {**_flatten(spec.to_dict()), **resolved}

        plain = values(Spec(method=self.method))
        chosen = {key: value for key, value in values(self).items() if value != plain.get(key)}
        text = json.dumps({**chosen, "method": self.method}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def default(cls, key: str) -> Any:
        """The default of a dotted key."""
        return _KEYS[key].default

    def with_values(self, values: Mapping[str, Any], *, reset_options: bool = False) -> Spec:
        """A copy with dotted keys set, `{"privacy.epsilon": 1.0}`. A new method starts from its own options."""
        top: dict[str, Any] = {}
        sections: dict[str, dict[str, Any]] = {}
        options: dict[str, Any] = {}
        model_options: dict[str, Any] = {}
        for key, value in values.items():
            head, _, rest = key.partition(".")
            if head == "method_options" and rest:
                options[rest] = value
            elif key.startswith("model.options."):
                model_options[key.removeprefix("model.options.")] = _plain(value)
            elif key == "model.name" and not isinstance(value, str):
                sections.setdefault(head, {})[rest] = code.register_model(value)
            elif key not in _KEYS:
                near = did_you_mean(_ELSEWHERE.get(key, key), all_keys(), "`dither keys` lists them all")
                raise SpecError(f"unknown key {key!r}{near}")
            elif rest:
                sections.setdefault(head, {})[rest] = _convert(key, value, _type(key))
            else:
                top[key] = _convert(key, value, _type(key))
        renamed = sections.get("model", {}).get("name", self.model.name) != self.model.name
        if model_options or renamed:  # another model starts without the options of this one
            model = sections.setdefault("model", {})
            model["options"] = {**({} if renamed else self.model.options), **model_options}
            if renamed and model["name"] not in MODELS:
                model.setdefault("hidden", ())
        top |= {name: replace(getattr(self, name), **changes) for name, changes in sections.items()}
        fresh = reset_options or top.get("method", self.method) != self.method
        return replace(self, **top, method_options={**({} if fresh else self.method_options), **options})


_SECTIONS = (DataSpec, ModelSpec, PrivacySpec, SecaggSpec, FederationSpec)
_HINTS = {kind: get_type_hints(kind) for kind in (Spec, *_SECTIONS)}


def _type(key: str) -> Any:
    section, _, name = key.rpartition(".")
    return _HINTS[_HINTS[Spec][section] if section else Spec][name]


_ELSEWHERE = {  # how other systems call a key
    **dict.fromkeys(("lr", "learning_rate"), "client_lr"),
    **dict.fromkeys(("data", "dataset"), "data.name"),
    "model": "model.name",
    "epochs": "num_rounds",
    "clip": "privacy.clip_norm",
}


def all_keys() -> list[str]:
    """Every key that TOML and --set understand, dotted (without a method's own options)."""
    return list(_KEYS)


def describe_keys(name: str | None = None) -> list[tuple[str, Any, str]]:
    """(key, default, meaning) of every key, and of the options of `method` if one is given."""
    options = dict(_KEYS)
    if name is not None:
        options |= {f"method_options.{key}": option for key, option in declared(name).options.items()}
    return [(key, option.default, option.described) for key, option in options.items()]


def parse_setting(text: str) -> tuple[str, Any]:
    """`key=value` of --set. The value is read as TOML, or as a plain string if it is not valid TOML."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise SpecError(f"--set {text!r} is not of the form key=value")
    try:
        return key.strip(), tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


# Presets


def preset_names() -> list[str]:
    """Names of the presets that ship with Dither."""
    folder = files("dither").joinpath("spec", "presets")
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def preset_text(name: str) -> str:
    """A preset as TOML."""
    if name not in preset_names():
        raise SpecError(f"unknown preset {name!r}{did_you_mean(name, preset_names())}")
    return files("dither").joinpath("spec", "presets", f"{name}.toml").read_text(encoding="utf-8")


def preset_title(name: str) -> str:
    """The first line of a preset's comment."""
    return preset_text(name).splitlines()[0].lstrip("# ").strip()


# Methods and models


METHODS = {
    name: Declaration(entry["module"], _options(entry.get("options", {})), entry.get("aggregates", False))
    for name, entry in _read_toml("methods.toml").items()
}


def declared(name: str) -> Declaration:
    """The declaration of a method, by its name or in its Python file."""
    if name in METHODS:
        return METHODS[name]
    module = method_module(name)
    traced = getattr(module, "VALUES", ())
    options = {key: Option(*entry) for key, entry in module.OPTIONS.items()}
    options = {key: entry._replace(traced=entry.traced or key in traced) for key, entry in options.items()}
    return Declaration(name, options, aggregates=getattr(module, "SECURE_AGGREGATION", False))


def method_available(name: object) -> bool:
    """Whether a method can be named without a path: it comes with Dither, or was approved here. Opens no file."""
    return isinstance(name, str) and (name in METHODS or code.is_approved(name))


def method_module(name: str) -> types.ModuleType:
    """The module of a method's Python file, or of the content that was approved under that name."""
    if not code.is_approved(name) and not name.endswith(".py"):
        raise SpecError(f"unknown method={name!r}{did_you_mean(name, METHODS)}")
    return code.module_of_content(name, code.file_content(name), ("prepare", "OPTIONS"), "method")


def model_file(name: str) -> tuple[str, str] | None:
    """The file and the factory of model.name = "my_model.py:factory"; None for other names."""
    match = _MODEL_FILE.fullmatch(name)
    return (match["file"], match["factory"]) if match else None


# Checks


def _method_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A method's options: its defaults, with the given ones checked and put in."""
    options = declared(name).options
    merged = {key: option.default for key, option in options.items()}
    for key, value in given.items():
        if key not in options:
            raise SpecError(f"unknown key 'method_options.{key}' for method {name!r}{did_you_mean(key, options)}")
        merged[key] = _convert(f"method_options.{key}", value, type(options[key].default))
        options[key].check(f"method_options.{key}", merged[key])
    return merged


_LEAST_FACTOR = 2.0**-100  # of a noise or a rate that falls over a run: float32 rounds what is below 2^-126 to 0
_LEAST_CLIP = 1e-6  # beside it the squares that float32 loses do not count (docs/privacy.md, Totality)
_LARGEST = 2.0**60  # of a rate or a clip: float32 ends at 2^128, and what overflows shows through any noise


def _check_model(model: ModelSpec) -> None:
    own = model_file(model.name) is not None or model.name.startswith("object:")
    if model.name not in MODELS and not own:
        hint = "; a model of your own is 'my_model.py:factory'" if ".py" in model.name else ""
        raise SpecError(f"unknown model.name={model.name!r}{did_you_mean(model.name, MODELS)}{hint}")
    if model.init != "uniform" and model.name != "mlp":
        raise SpecError(f"model.init={model.init!r} is for 'mlp', not for {model.name!r}; leave it out")
    if own and model.hidden:
        raise SpecError(f"model.hidden is for mlp and cnn, not for {model.name!r}; use model.options")
    if model.options and not own:
        raise SpecError(f"model.options is for a model of your own, not for {model.name!r}")
    for key, value in model.options.items():
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, str | int | float):
                raise SpecError(f"model.options.{key}={each!r} must be a number, a text, true, false or a list")


def _check_together(spec: Spec) -> None:
    _check_model(spec.model)
    if 0 < spec.num_clients < spec.cohort_size:
        raise SpecError(f"cohort_size={spec.cohort_size} exceeds num_clients={spec.num_clients}; lower it")
    if spec.num_clients == 0 and spec.data.partition not in ("column", "files", "iid" if spec.data.path else ""):
        raise SpecError(
            "num_clients=0 is for data.partition='column' or 'files'; give the number of clients for "
            f"{spec.data.partition!r}"
        )
    _check_task(spec)
    _check_data(spec)
    clips = {f"method_options.{key}": spec.method_options.get(key, 0) for key in ("update_clip", "param_clip")}
    for name, value in {"privacy.clip_norm": spec.privacy.clip_norm, **clips}.items():
        if 0 < value < _LEAST_CLIP:
            raise SpecError(
                f"{name}={value:g} is below {_LEAST_CLIP:g}: float32 loses the squares of such numbers; raise it"
            )
    steps = {"client_lr": spec.client_lr, "model.l2": spec.model.l2}
    for name, value in {"privacy.clip_norm": spec.privacy.clip_norm, **clips, **steps}.items():
        if value > _LARGEST:
            raise SpecError(f"{name}={value:g} is beyond 2^60: float32 could overflow; lower it")
    scales = len(spec.privacy.noise_scale)
    if scales and spec.num_clients and scales != spec.num_clients:
        raise SpecError(
            f"privacy.noise_scale has {scales} entries for num_clients={spec.num_clients}; give "
            f"one for each client"
        )
    if spec.privacy.epsilons:
        _check_epsilons(spec.privacy, spec.num_clients)
    if spec.privacy.clip_quantile and (spec.local_steps > 1 or spec.privacy.clip != "example"):
        raise SpecError(
            f"privacy.clip_quantile={spec.privacy.clip_quantile:g} needs local_steps=1 and "
            f"privacy.clip='example', not local_steps={spec.local_steps} and {spec.privacy.clip!r}"
        )
    if spec.privacy.noise_decay_start > spec.num_rounds:
        raise SpecError(
            f"privacy.noise_decay_start={spec.privacy.noise_decay_start} exceeds num_rounds={spec.num_rounds}; "
            f"lower it"
        )
    _check_falling(spec)
    if spec.privacy.noise == "given" and spec.privacy.noise_std == 0:
        raise SpecError("privacy.noise='given' needs privacy.noise_std above 0; for no noise use 'none'")
    if spec.secagg.mode in ("ideal", "real") and spec.cohort_size == 1:
        raise SpecError(
            f"secagg.mode={spec.secagg.mode!r} with cohort_size=1: the sum of one upload is the upload; take at "
            "least 2 clients a round, or mode 'off'"
        )
    if spec.secagg.noise == "discrete" and spec.aggregation == "off":
        raise SpecError("secagg.noise='discrete' is noise on integers; set secagg.mode to 'ideal' or 'real'")


def _check_falling(spec: Spec) -> None:
    """Refuse noise and rates that the compiled rounds would compute as 0: proofs take them as they are."""
    privacy, steps = spec.privacy, spec.num_rounds * spec.local_steps
    turns = spec.num_rounds - privacy.noise_decay_start
    turns *= {"constant": 0, "rounds": 1, "steps": spec.local_steps}[privacy.noise_schedule]
    fallen = privacy.noise_decay ** (turns / 2)  # noise_decay is the factor of the variance
    if fallen < _LEAST_FACTOR:
        raise SpecError(
            f"privacy.noise_decay={privacy.noise_decay:g} shrinks the noise to {fallen:.2g} of its start: float32 "
            "would make 0 of it; raise noise_decay or noise_decay_start"
        )
    slowest = spec.client_lr / (1 + spec.lr_decay * steps)
    if slowest < _LEAST_FACTOR:
        raise SpecError(
            f"client_lr={spec.client_lr:g} falls to {slowest:.2g} by lr_decay={spec.lr_decay:g}: float32 would "
            "make 0 of it; raise client_lr or lower lr_decay"
        )


def _check_data(spec: Spec) -> None:
    table = Path(spec.data.path).suffix.lower() in (".csv", ".tsv", ".parquet")
    if table and not (spec.data.label or spec.data.schema):
        raise SpecError(f"data.path={spec.data.path!r} needs data.label, the name of the label column")
    if not spec.data.path and not spec.data.name:
        raise SpecError("give data.name (dither data list) or data.path")
    if spec.data.public and not spec.data.path:
        raise SpecError("data.public is for your own records (data.path); those of the catalogue are public")
    if spec.data.public and spec.data.part == "private":
        raise SpecError("data.part='private' are records that are not public, as data.public says; leave one out")
    if spec.data.test_path and spec.data.split != "given":
        raise SpecError(
            f"data.test_path with data.split={spec.data.split!r} would train on the test file; leave one out"
        )
    dealt_by_rows = spec.data.partition in ("iid", "files", "column") and spec.data.part == "all"
    if spec.data.split == "rows" and not dealt_by_rows:
        raise SpecError(
            "data.split='rows' holds out rows of your own tables (data.path) by their numbers: it goes with "
            "data.partition 'iid', 'files' or 'column', without data.part"
        )
    if spec.data.classes and not spec.privacy.project_epsilon:
        raise SpecError(
            "data.classes declares classes for dither serve with privacy.project_epsilon; elsewhere list them in "
            "the schema (data.schema)"
        )
    if spec.data.transform != "none" and spec.privacy.project_epsilon:
        raise SpecError(
            f"data.transform={spec.data.transform!r} does not go with privacy.project_epsilon, which chooses the "
            "model from the schema; leave one of the two out"
        )
    if spec.data.part != "all" and spec.data.public_fraction == 0:
        raise SpecError(f"data.part={spec.data.part!r} needs data.public_fraction, the share declared public")
    if spec.data.partition == "column" and not spec.data.column and (table or not spec.data.path):
        raise SpecError("data.partition='column' needs data.column, the column that names the client")


def _check_epsilons(privacy: PrivacySpec, num_clients: int) -> None:
    targets, most = privacy.epsilons, privacy.epsilon
    if num_clients and len(targets) != num_clients:
        raise SpecError(
            f"privacy.epsilons has {len(targets)} entries for num_clients={num_clients}; give one for each client"
        )
    if math.isinf(most) or max(targets) > most:
        raise SpecError(
            f"privacy.epsilons has {max(targets):.15g}, but no client may exceed privacy.epsilon={most:.15g}, "
            "which is finite; set privacy.epsilon to the largest target"
        )
    if privacy.noise != "proven":
        raise SpecError(f"privacy.epsilons needs privacy.noise='proven', not {privacy.noise!r}")
    if privacy.noise_scale:
        raise SpecError("give privacy.epsilons or privacy.noise_scale, not both")


def _check_task(spec: Spec) -> None:
    bounds = spec.data.label_bounds
    if bounds and (len(bounds) != 2 or not bounds[0] < bounds[1]):
        raise SpecError(f"data.label_bounds={list(bounds)} must be two numbers, the lower one first")
    if bounds and spec.task == "classification":
        raise SpecError("data.label_bounds is for task='regression'; leave one of the two out")
    if spec.model.class_weight and spec.model.class_counts:
        raise SpecError("give model.class_weight or model.class_counts, not both")


_ANY_NUMBERS = ("data.label_bounds",)  # all other lists are of numbers above 0
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def _convert(name: str, value: Any, wanted: Any) -> Any:
    if name == "data.path" and isinstance(value, list | tuple):
        if not value or not all(isinstance(each, str | Path) and str(each) for each in value):
            raise SpecError(f"data.path={value!r} must be a path or a list of paths")
        return _BETWEEN_FILES.join(map(str, value))
    if name == "model.class_weight" and value == "balanced":
        raise SpecError(
            "model.class_weight='balanced' would count private labels; give public counts or shares of classes "
            "as model.class_counts, or the weights themselves"
        )
    if wanted is tuple or get_origin(wanted) is tuple:
        return _convert_list(name, value, (*get_args(wanted), int)[0])
    if wanted is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    accepted = int | float if wanted is float else wanted
    if isinstance(value, accepted) and isinstance(value, bool) == (wanted is bool):
        return float(value) if wanted is float else value
    raise SpecError(f"{name}={value!r} must be {_KINDS[wanted]}")


def _convert_list(name: str, value: Any, wanted: Any) -> tuple[Any, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    if wanted is str:
        return tuple(_convert(name, item, str) for item in items)
    any_number = name in _ANY_NUMBERS
    try:
        converted = tuple(_convert(name, item, wanted) for item in items)
    except SpecError:
        converted = (math.nan,)
    if all(item > 0 or (any_number and math.isfinite(item)) for item in converted):
        return converted
    numbers = "whole numbers" if wanted is int else "numbers"
    raise SpecError(f"{name}={value!r} must be a list of {numbers}{'' if any_number else ' above 0'}")


def _flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{inner}": deeper for inner, deeper in _flatten(value).items()})
        else:
            flat[key] = value
    return flat


def _value(spec: Spec, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(getattr(spec, section) if section else spec, name)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
