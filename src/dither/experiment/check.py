"""Claimed against proven ε for training that Dither did not run, from a description of it.

dither.check("training.toml")           # a plain description, see docs/check.md
dither.check("accountant.json")         # the state of an Opacus accountant
dither.check(event)                     # a dp-accounting event, or a file with its text

What is not said is taken at its worst, and named together with what would fix it.
"""

from __future__ import annotations

import ast
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dither.accounting import ADJACENCIES, FLOAT_NOISE, REPLACE_ONE, ZERO_OUT, ProvenRow, account, shuffled_uses
from dither.errors import NoProof, SpecError, did_you_mean
from dither.experiment.report import Overview
from dither.types import Release, Sampling, epsilon_text

_CHOICES = {
    "sampling": ("poisson", "fixed", "shuffled", "stream", "full"),  # stream: of epochs that run into each other
    "clipping": ("example", "batch", "none"),
    "randomness": ("secure", "seeded"),
    "claimed_adjacency": ADJACENCIES,
}
_RANGES: dict[str, tuple[float, float]] = {  # of whole numbers where the limits are
    "noise_multiplier": (0.0, math.inf),
    "steps": (0, 10**9),
    "sampling_rate": (0.0, 1.0),
    "batch_size": (0, 10**12),
    "records": (0, 10**15),
    "delta": (1e-300, 1.0 - 1e-9),
    "claimed_epsilon": (0.0, math.inf),
    "other_runs": (0, 10**9),
}
_MOST_KINDS = 50  # of steps, up to which the places in an epoch where they may begin are followed


@dataclass(frozen=True)
class Steps:
    """Noisy steps of one kind. `noise_multiplier` is the std of the noise over the clip: on a batch's sum, or on
    the mean where that is what is clipped."""

    noise_multiplier: float
    steps: int
    sampling: str = ""
    sampling_rate: float = 0.0
    batch_size: int = 0
    records: int = 0
    clipping: str = ""
    public_rate: bool = True  # sampling_rate was chosen without the record count

    def rate(self) -> float:
        share = self.batch_size / self.records if self.batch_size and self.records else 0.0
        if share > 1:
            raise SpecError(f"batch_size={self.batch_size} exceeds records={self.records}; correct one of them")
        if self.sampling_rate and share and not math.isclose(self.sampling_rate, share, rel_tol=0.01):
            raise SpecError(
                f"sampling_rate={self.sampling_rate:g} is not batch_size/records={share:g}; leave one of them out"
            )
        return max(self.sampling_rate, share)


@dataclass(frozen=True)
class Training:
    """What is known of a training run. Empty strings are facts that nobody has stated."""

    releases: tuple[Steps, ...]
    title: str = "training"
    delta: float = 1e-5
    claimed_epsilon: float | None = None
    claimed_adjacency: str = ""
    randomness: str = ""
    exact_noise: bool = False  # noise on a lattice of its own, without floating-point holes
    other_runs: int | None = None  # on the same records, whose results chose this one


@dataclass(frozen=True, repr=False)
class Check(Overview):
    """The proven ε of a described training for each neighbour relation, beside its claim."""

    training: Training
    table: tuple[ProvenRow, ...]
    not_covered: tuple[str, ...]
    fixes: tuple[str, ...]

    def proven(self, adjacency: str = "") -> ProvenRow:
        """The row of one neighbour relation: by default that of the claim, otherwise zero-out."""
        wanted = adjacency or self.training.claimed_adjacency or ZERO_OUT
        return next(row for row in self.table if row.adjacency == wanted)

    @property
    def supported(self) -> bool:
        """Whether a proof reaches the claimed ε: for every relation, if none is stated."""
        claimed = self.training.claimed_epsilon
        rows = [self.proven()] if self.training.claimed_adjacency else self.table
        return claimed is not None and max(row.value for row in rows) <= claimed

    def title(self) -> str:
        return self.training.title

    def overview(self) -> list[tuple[str, str]]:
        training = self.training
        claimed = "none" if training.claimed_epsilon is None else epsilon_text(training.claimed_epsilon, "nearest")
        relation = training.claimed_adjacency or "neighbours not stated"
        lines = [("claimed ε", f"{claimed}, δ = {training.delta:g} ({relation})")]
        for row in self.table:
            why = row.detail if math.isinf(row.value) else row.recipe
            lines.append(("proven ε", f"{epsilon_text(row.value)}, δ = {row.delta:g}, {row.adjacency} ({why})"))
        if training.claimed_epsilon is not None:
            verdict = "a proof supports the claim" if self.supported else "no proof here supports the claim"
            lines.append(("verdict", verdict))
        lines += [("not covered", text) for text in self.not_covered]
        return lines + [("to fix", text) for text in self.fixes]

    def to_dict(self) -> dict[str, Any]:
        more = {"supported": self.supported, "not_covered": self.not_covered, "fixes": self.fixes}
        return {"training": self.training, "proven": self.table, **more}


def check(what: Any, values: Mapping[str, Any] | None = None) -> Check:
    """Check a description: a file, a mapping, a `Training` or a dp-accounting event. `values` are facts on top,
    for the whole training or for all of its steps."""
    training = what if isinstance(what, Training) else _training(_described(what), dict(values or {}))
    missing: dict[str, str] = {}  # what is not stated -> what would fix it
    kinds = training.releases
    releases = [(_release(steps, missing), _uses(steps, kinds[:at])) for at, steps in enumerate(kinds)]
    table = tuple(
        account(releases, training.delta, adjacency=adjacency, views=("upload",))[0] for adjacency in ADJACENCIES
    )
    gaps = [] if training.exact_noise else [FLOAT_NOISE]
    if training.randomness != "secure":
        known = "a seeded generator" if training.randomness else "where the random numbers come from is not stated"
        gaps.append(f"{known}: anyone who can repeat the noise can subtract it")
        missing.setdefault(
            "randomness", "draw the noise from a cryptographic generator and say randomness = 'secure'"
        )
    if training.other_runs != 0:
        number = "an unknown number of" if training.other_runs is None else str(training.other_runs)
        gaps.append(f"{number} other runs on the same records (a search for settings is one): their ε adds up")
        missing.setdefault(
            "other_runs", "charge every run on these records, and say other_runs = 0 if there is none"
        )
    if training.claimed_epsilon is not None and not training.claimed_adjacency:
        missing["adjacency"] = "say for which neighbouring data ε is claimed: claimed_adjacency = 'zero-out'"
    return Check(training, table, tuple(gaps), tuple(missing.values()))


def _release(steps: Steps, missing: dict[str, str]) -> Release:
    """The release of one step, each unknown at its worst."""
    distance = {"example": 1.0, "batch": 2.0}.get(steps.clipping, math.inf)
    if math.isinf(distance):
        missing["clipping"] = (
            "without a clip one record can move a step by any amount; clip every record's gradient and say "
            "clipping = 'example'"
        )
    kind, rate = steps.sampling or "full", steps.rate()
    if not steps.sampling:
        missing["sampling"] = (
            "how records enter a batch is not stated, so no amplification counts, and each is taken to enter once "
            "at most; say sampling = 'poisson', 'fixed' or 'shuffled'"
        )
    elif kind != "full" and not 0 < rate <= 1:
        missing["rate"] = "sampled batches need sampling_rate, or batch_size and records"
        kind = "full"
    if kind in ("shuffled", "stream"):
        missing["shuffled"] = (
            "batches of a shuffled epoch have no proof of amplification; draw Poisson batches to get one"
        )
    if steps.clipping == "batch":
        missing["batch clip"] = "clipping a batch's mean bounds no single record; clip every record's gradient"
    if kind in ("full", "shuffled", "stream"):  # of a shuffled epoch one step uses the record: `_uses`
        kind, rate = "full", 1.0
    if steps.sampling == "stream":  # or a batch holds it twice, last of an epoch and first of the next
        distance *= 2.0
    adjacency = ZERO_OUT if steps.clipping == "example" else REPLACE_ONE
    # A record may turn a clipped batch round, whether it is replaced or drawn: for Poisson batches the recipe
    # takes half of a replacement's distance for a draw, so the replacement's is stated at twice its size.
    distance *= 2.0 if steps.clipping == "batch" and kind == "poisson" else 1.0
    public = bool(steps.sampling_rate) and steps.public_rate
    sampling = Sampling(kind, rate, adjacency, 0.0, steps.batch_size, steps.records, fixed_rate=public)
    return Release("uplink", steps.noise_multiplier, distance, 1, sampling, "the description")


def _uses(steps: Steps, before: Sequence[Steps]) -> int:
    """Steps that may use a record: one of each shuffled epoch, or one of two epochs that run into each other, but
    twice. The first may be in the middle of an epoch, unless the steps `before` were whole epochs."""
    rate = steps.rate()
    rate = rate if 0 < rate <= 1 else 1.0
    if steps.sampling == "stream":
        begun = not all(map(_whole_epochs, before))
        return math.ceil((math.ceil(steps.steps * rate) + begun) / 2)
    if steps.sampling != "shuffled" or rate == 1:
        return steps.steps
    epoch = max(1, math.floor(1 / rate + 1e-9))
    return min(steps.steps, max(shuffled_uses(steps.steps + gone, epoch) for gone in _gone(steps, before, epoch)))


def _gone(steps: Steps, before: Sequence[Steps], epoch: int) -> set[int]:
    """How many steps of an epoch may be over before the first of these: epochs may go on, or begin anew with every
    kind of step."""
    if all(map(_whole_epochs, before)):
        return {0}
    alike = all((each.sampling, each.rate()) == (steps.sampling, steps.rate()) for each in before)
    if not alike or abs(epoch * steps.rate() - 1) > 2.0**-52 or len(before) > _MOST_KINDS:
        return {epoch - 1}
    gone = {0}
    for each in before:
        gone = {0, *((begun + each.steps) % epoch for begun in gone)}
    return gone


def _whole_epochs(steps: Steps) -> bool:
    """Whether the steps end where an epoch ends, if they began where one begins."""
    if steps.sampling in ("poisson", "fixed", "full"):
        return True
    rate = steps.rate()
    batches = round(1 / rate) if rate else 0
    return batches > 0 and abs(batches * rate - 1) <= 2.0**-52 and steps.steps % batches == 0


# Reading


def _described(what: Any) -> dict[str, Any]:
    """A description as plain values."""
    if isinstance(what, Mapping):
        return dict(what)
    if not isinstance(what, str | Path):
        return _event(repr(what))
    path = Path(what)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{str(path)!r} cannot be read ({error.strerror}); give a description's file") from None
    except UnicodeDecodeError:
        raise SpecError(f"{str(path)!r} is not a text file; give TOML, JSON or the text of an event") from None
    try:
        if path.suffix == ".json":
            return _opacus(json.loads(text), path)
        if path.suffix == ".toml":
            return tomllib.loads(text)
        return _event(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, SyntaxError) as error:
        first = str(error).splitlines()[0]
        raise SpecError(f"{str(path)!r} is not a description (.toml, .json or an event's text): {first}") from None


def _opacus(state: Any, path: Path) -> dict[str, Any]:
    """An Opacus accountant's state, {"history": [[noise_multiplier, sample_rate, steps]]}. The loader may draw
    Poisson batches or shuffle; the history does not say which. Its rate is one over the number of batches, which
    follows from the record count."""
    try:
        history = [(float(noise), float(rate), count) for noise, rate, count in state["history"]]
    except (KeyError, TypeError, ValueError):
        raise SpecError(
            f'{str(path)!r} is not an Opacus accountant\'s state: it needs "history", a list of '
            "[noise_multiplier, sample_rate, steps]"
        ) from None
    about, names = {"clipping": "example", "public_rate": False}, ("noise_multiplier", "sampling_rate", "steps")
    return {"title": path.name, "releases": [dict(zip(names, each, strict=True)) | about for each in history]}


def _event(text: str) -> dict[str, Any]:
    """A dp-accounting event, from its text."""
    steps = _event_steps(ast.parse(text.strip(), mode="eval").body)
    return {"title": "dp-accounting event", "releases": steps}


def _event_steps(node: ast.expr) -> list[dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args:
        raise SpecError(f"{ast.unparse(node)[:60]!r} is not an event of dp-accounting, as `print(event)` shows it")
    name = ast.unparse(node.func).rsplit(".", 1)[-1]
    given = {keyword.arg: keyword.value for keyword in node.keywords}

    def number(key: str, kind: str) -> Any:
        return _check_value(kind, ast.literal_eval(given[key]))

    try:
        if name == "NoOpDpEvent":
            return []
        if name == "GaussianDpEvent":
            noise = number("noise_multiplier", "noise_multiplier")
            return [{"noise_multiplier": noise, "steps": 1, "clipping": "example", "sampling": "full"}]
        if name == "ComposedDpEvent" and isinstance(given["events"], ast.List | ast.Tuple):
            return [each for inner in given["events"].elts for each in _event_steps(inner)]
        if name == "SelfComposedDpEvent":
            count = number("count", "steps")
            return [{**each, "steps": each["steps"] * count} for each in _event_steps(given["event"])]
        if name == "PoissonSampledDpEvent":
            rate = number("sampling_probability", "sampling_rate")
            return _on_one_batch(name, given["event"], {"sampling": "poisson", "sampling_rate": rate})
        if name == "SampledWithoutReplacementDpEvent":
            records, batch = number("source_dataset_size", "records"), number("sample_size", "batch_size")
            drawn = {"sampling": "fixed", "records": records, "batch_size": batch}
            return _on_one_batch(name, given["event"], drawn)
    except (KeyError, ValueError):
        raise SpecError(f"{ast.unparse(node)[:60]!r} is missing a number that {name} needs") from None
    raise _no_recipe(name)


def _on_one_batch(name: str, event: ast.expr, drawn: dict[str, Any]) -> list[dict[str, Any]]:
    """The event on a sampled batch. All of its Gaussians see the same batch: together they are one, whose 1/z² is
    the sum of theirs. As steps with batches of their own they would reveal less."""
    inner = _event_steps(event)
    if any(each["sampling"] != "full" for each in inner):
        raise _no_recipe(f"{name} around another sampled event")
    squares = [
        each["steps"] / each["noise_multiplier"] ** 2 if each["noise_multiplier"] else math.inf for each in inner
    ]
    total = math.fsum(squares)
    noise = 1 / math.sqrt(total) if total else math.inf
    return [{"noise_multiplier": noise, "steps": 1, "clipping": "example", **drawn}]


def _no_recipe(event: str) -> NoProof:
    return NoProof(f"there is no recipe for {event}: describe the training in TOML (docs/check.md)")


def _training(described: dict[str, Any], values: dict[str, Any]) -> Training:
    """A checked `Training`: every key known, every value in its range."""
    per_step = {entry.name for entry in fields(Steps)}
    releases = described.pop("releases", None)
    if releases is None:  # one kind of step may stand at the top
        releases = [{name: described.pop(name) for name in list(described) if name in per_step}]
    for name, value in values.items():
        if name in per_step:
            releases = [{**each, name: value} for each in releases]
        else:
            described[name] = value
    steps = tuple(_checked(Steps, each) for each in releases)
    if not steps:
        raise SpecError("the description has no noisy steps; give noise_multiplier and steps")
    training: Training = _checked(Training, {**described, "releases": steps})
    return training


def _checked(kind: type, given: Mapping[str, Any]) -> Any:
    names = [entry.name for entry in fields(kind)]
    for name, value in given.items():
        if name not in names:
            raise SpecError(f"unknown key {name!r}{did_you_mean(name, names)}")
        _check_value(name, value)
    missing = [name for name in ("noise_multiplier", "steps") if name in names and name not in given]
    if missing:
        raise SpecError(f"{missing[0]} is missing; a step needs noise_multiplier and steps")
    return kind(**given)


def _check_value(name: str, value: Any) -> Any:
    """The value, if it is one that the key may have."""
    choices = _CHOICES.get(name, ())
    if choices and value not in ("", *choices):
        listed = ", ".join(choices)
        raise SpecError(f"{name}={value!r} is not one of {listed}{did_you_mean(str(value), choices)}")
    if name in ("exact_noise", "public_rate") and not isinstance(value, bool):
        raise SpecError(f"{name}={value!r} must be true or false")
    if name in _RANGES:
        low, high = _RANGES[name]
        whole = isinstance(low, int)
        kind = int if whole else int | float
        if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high:
            number = "a whole number" if whole else "a number"
            raise SpecError(f"{name}={value!r} must be {number} from {low:g} to {high:g}")
    return value
