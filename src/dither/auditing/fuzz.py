"""Random accepted specs, each attacked with the worst known neighbouring data sets: attacked ε against proven ε.

`check(seed)` draws one spec with `draw`, builds it, runs the engine's compiled rounds with and without noise on
constructed records, and compares what that exhibits with what the accountant proves. The attacks:

totality    records of extreme floats (infinite, NaN, near overflow): an upload that is not finite reveals all
rounds      what the view shows of whole rounds of the engine (`auditing.rounds`): uploads as they are sent, sums,
            broadcasts or the last model
exhibited   where batches are drawn: the shift of a noiseless upload, the measured noise and use, then R5
linear sum  the exact value for quadratic losses, which the theorem's hypotheses include (rates as they run, R6')
ex ante     rounds in which everyone takes part are not drawn (R4)
batches     batches of fixed size of a client with up to 2^28 records that are not uniform
counts      private statistics and evaluations: the counts of every question (`auditing.counts`)
history     charges of a ledger against what was shown, composed by dp-accounting (`auditing.spending`)
choice      an adversary of the ledger's filter that looks before it chooses (`auditing.spending`)

Noise is measured, so each answer may be wrong with probability 1e-7; everything is drawn from the seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import chi2

from dither import accounting
from dither.auditing import bounds
from dither.auditing.counts import check_counts
from dither.auditing.neighbours import CANARY_NORM, certain_start
from dither.auditing.rounds import Rounds, Scene, See, attacked, told_apart
from dither.auditing.spending import check_spending
from dither.auditing.trials import most_exposed
from dither.data import ClientPartition, Dataset
from dither.data import transform as transformed
from dither.errors import NoProof, SpecError
from dither.experiment.build import Experiment, assemble
from dither.privacy import clipping, noise, sampling
from dither.privacy.sampling import ADD_REMOVE
from dither.simulation import devices, engine
from dither.simulation.arrays import RunInputs
from dither.spec import Spec
from dither.types import Array, Keys

FEATURES = 8
_ERROR = 1e-7  # probability that one spec is reported wrongly
_MIDDLE, _FAR = np.float32(0.5), 1e4  # labels of a regression
_COUNTS = 5  # seeds of this remainder by 8 draw statistics
# by 16: specs that protect whole clients, those with discrete noise, secure sums in coarse steps, and ledgers
_WHOLE, _DISCRETE, _COARSE, _LEDGER = (8, 11), (10, 15), (0, 6), (9, 12)
_ABSENT = (3, 4)  # by 32: specs of which neighbours have one record less
_CHUNK = 512  # cases of one call, always as many: one compilation a spec
_PILOT = 10  # runs of each row in each scene, of which the best are attacked
_TRIALS = 2048  # with noise, and draws by which the use of a record is counted
_ADDING = ("cpfed", "dp-sgd", "dp-dsgd", "secure-fedavg")  # servers that add the sum of the uploads to the model
_AVERAGING = ("cpfed", "concentrated", "dp-sgd", "dp-dsgd")  # with targets of clients and an adaptive clip
_GONE = {"zero-out": "blank", ADD_REMOVE: "absent"}  # by relation, what stands for a record that is not used
_ROUNDING = 1e-3  # of float32, relative
_DRAWS = 2**18  # of the records of one large client
_METHOD = str(Path(__file__).with_name("odd_method.py"))


class Drawn(NamedTuple):
    """A drawn spec, the counts of the clients' records, what the adversary sees, and what went wrong."""

    values: dict[str, Any]
    sizes: tuple[int, ...]
    view: str = "upload"
    classes: int = 0  # of a regression
    ex_ante: bool = False
    missing: int = 0  # clients that lack in every sum
    twice: int = -1  # the round that was made again after a kill; -1: none


class FuzzOutcome(NamedTuple):
    """One spec: the largest ε exhibited and by which attack, and the proven one."""

    seed: int
    drawn: Drawn
    recipe: str
    proven: float
    attacked: float
    attack: str

    @property
    def violated(self) -> bool:
        return self.attacked > self.proven * (1 + _ROUNDING)

    @property
    def command(self) -> str:
        """What shows this outcome again."""
        return f"dither audit --fuzz 1 --seed {self.seed}"

    def to_dict(self) -> dict[str, Any]:
        told = {"drawn": self.drawn._asdict(), "violated": self.violated, "command": self.command}
        return {**self._asdict(), **told}


def fuzz(
    count: int, *, seed: int = 0, on_outcome: Callable[[FuzzOutcome], None] | None = None
) -> list[FuzzOutcome]:
    """Check `count` random specs, those of the seeds `seed`, `seed + 1`, ..."""
    if count < 1:
        raise SpecError(f"--fuzz {count}: give the number of specs, at least 1")
    outcomes = []
    for number in range(seed, seed + count):
        outcomes.append(check(number))
        if on_outcome:
            on_outcome(outcomes[-1])
    return outcomes


def check(seed: int) -> FuzzOutcome:
    """Draw specs from a seed until one is accepted and has a proof, and attack it. Every eighth seed draws private
    statistics or a private evaluation instead of training, and as many draw charges of a ledger."""
    rng = np.random.default_rng(seed)
    if seed % 16 in _LEDGER:
        spent = check_spending(rng)
        return FuzzOutcome(seed, Drawn(spent.values, ()), "R10", spent.proven, spent.attacked, spent.attack)
    if seed % 8 == _COUNTS:
        case, proven, attacked = check_counts(rng, _ERROR)
        return FuzzOutcome(seed, Drawn(case.values, case.sizes), "R1", proven, attacked, "counts")
    while True:
        drawn = draw(rng)
        if seed % 16 in _WHOLE:
            drawn = _of_clients(drawn, rng)
        elif seed % 16 in _DISCRETE:
            drawn = _of_integers(drawn, rng)
        elif seed % 16 in _COARSE:
            drawn = _in_steps(drawn, rng)
        elif seed % 32 in _ABSENT:
            drawn = _of_absence(drawn, rng)
        try:
            experiment = build(drawn)
            recipe, proven = _proven(experiment, drawn)
            attacks = _Attack(experiment, drawn, recipe)  # the engine may refuse it too
        except (SpecError, NoProof):
            continue
        if math.isfinite(proven):
            found = attacks.epsilons()
            attack = max(found, key=lambda name: found[name])
            return FuzzOutcome(seed, drawn, recipe, proven, found[attack], attack)


# Specs


# reason: one table of what is drawn, read from top to bottom
def draw(rng: np.random.Generator) -> Drawn:
    """One spec, which may be refused. Corners that proofs find hard come more often than chance would have it."""

    def one(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    view = one("upload", "sum", "sum", "broadcast", "final")
    often = "secure-fedavg" if view == "upload" else "cpfed"
    method = one(often, often, often, "concentrated", "nbafl", "dp-scaffold", "dp-sgd", "dp-dsgd", "secure-fedavg")
    model, classes = one(("logistic", 2), ("logistic", 2), ("softmax", 2), ("softmax", 3), ("mlp", 2))
    clients = one(3, 6, 24, 24)
    everyone = method in ("dp-sgd", "concentrated") or rng.random() < 0.4
    sampling = one("full", "full", "full", "full", "fixed", "poisson", "poisson-full", "shuffled", "disjoint")
    if model == "mlp" or method == "nbafl" or view != "upload":
        sampling = "full"
    fastest = (8 if model == "logistic" else 4) / (FEATURES + 1)  # faster steps may expand (R6')
    clip_norm, batch_size = one(0.3, 1.0, 1.6, 2.2), one(1, 4, 12) if sampling != "full" else 12
    if (method, view, clip_norm) == ("secure-fedavg", "upload", 0.3):
        method, sampling = "nbafl", "full"
    values = {
        "method": method,
        "data.name": "digits",  # its place is taken by records of the same kind
        "num_clients": clients,
        "cohort_size": clients if everyone else one(2, int(rng.integers(2, clients + 1))),
        "num_rounds": one(1, 1, 2, 4),
        "local_steps": 1 if model == "mlp" or method in ("dp-sgd", "dp-dsgd") else one(1, 2, 2, 3),
        "batch_size": batch_size,
        "batch_sampling": sampling,
        "sampling_rate": one(0.1, 0.4) if sampling.startswith("poisson") else 0.0,
        "client_lr": round(fastest * one(0.99, rng.uniform(0.1, 0.95)), 3),
        "lr_decay": one(0.0, round(rng.uniform(0.3, 2.0), 2)) if method != "dp-scaffold" else 0.0,
        "model.name": model,
        "model.hidden": (4,),
        "model.l2": 0.0,
        "privacy.clip": "none" if method == "nbafl" else one("example", "example", "batch"),
        "privacy.clip_norm": clip_norm,
        "privacy.epsilon": round(rng.uniform(0.3, 8.0), 2),
        "privacy.delta": one(1e-5, 1e-3),
        "privacy.unit": "run",
        "privacy.view": view,
        "privacy.adjacency": one("replace-one", "zero-out"),
        "privacy.noise": "proven",
        "secagg.mode": one("off", "ideal"),
    }
    if method == "nbafl":
        values |= {"method_options.param_clip": 1.0, "method_options.optimizer": one("sgd", "adam")}
    elif method == "secure-fedavg":
        values |= {
            "method_options.first_round": one("all", "cohort"),
            "privacy.clip": one("example", "batch", "batch"),
        }
    elif rng.random() < 0.5:
        std = clip_norm / batch_size * round(rng.uniform(1.0, 12.0), 2)
        values |= {"privacy.noise": "given", "privacy.noise_std": std, "privacy.epsilon": 1e3}
        values |= {"privacy.noise_schedule": one("constant", "rounds", "steps"), "privacy.noise_decay": 0.8}
    if view in ("sum", "broadcast") and method in ("cpfed", "concentrated") and rng.random() < 0.4:
        # Rates that fall from the fastest that is proved: the others' noise shrinks most.
        classes, falling = 2, round(rng.uniform(0.5, 1.8), 2)
        values |= {"model.name": "logistic", "client_lr": round(7.9 / (FEATURES + 1), 3), "lr_decay": falling}
        values |= {"local_steps": 2, "privacy.clip": "example", "privacy.clip_norm": 1.6}
    if view == "upload" and method == "secure-fedavg" and rng.random() < 0.4:
        # The first round takes everyone, the others few.
        sampling, everyone = "full", False
        values |= {"batch_sampling": "full", "sampling_rate": 0.0, "batch_size": 12, "privacy.clip": "batch"}
        values |= {"cohort_size": 2, "num_rounds": one(1, 1, 2), "method_options.first_round": "all"}
    if values["cohort_size"] > 2 and rng.random() < 0.25:
        values["privacy.colluders"] = int(rng.integers(1, values["cohort_size"] - 1))
    if values["model.name"] == "softmax" and classes == 3 and sampling == "full" and clients < 24:
        # A regression, whose loss is twice as steep: half as fast. (No further draw here either.)
        classes = 0
        values |= {"model.name": "linear", "client_lr": round(values["client_lr"] / 2, 3)}
        values |= {"model.loss": "squared" if clients == 3 else "huber"}
    # Protected runs compute what they noise in another way. No further draw: a seed's specs stay what they were.
    values["randomness"] = "os" if round(1000 * values["client_lr"]) % 2 else "seeded"
    if values["randomness"] == "os" and values["local_steps"] == 1:
        values["secagg.mode"] = "ideal"  # exact sums, where the method has them (R9)
    if method == "nbafl" and view == "upload" and model != "mlp" and round(1000 * values["client_lr"]) % 3:
        sampling = "poisson"  # a record may be in none of a round's batches
        values |= {"batch_sampling": sampling, "sampling_rate": 0.4, "batch_size": 4}
    number = round(100 * values["privacy.epsilon"])
    if method in _AVERAGING and values["privacy.noise"] == "proven" and number % 3 == 0:
        shares = [(1.0, 0.5, 0.25)[(client + number // 3) % 3] for client in range(clients)]
        values["privacy.epsilons"] = tuple(values["privacy.epsilon"] * share for share in shares)
    adapts = values["local_steps"] == 1 and values["privacy.clip"] == "example" and method in _AVERAGING
    if adapts and round(1000 * values["client_lr"]) % 3 != 1:
        values["privacy.clip_quantile"] = 0.5
    elif method in _ADDING and number % 5 == 4:  # what a server makes of a sum is nobody's release
        values |= {"server_optimizer": "momentum" if number % 2 else "adam", "server_average": 0.5}
    if classes and number % 5 == 3:  # the loss of one class is twice as steep: half as fast
        values |= {"model.class_weight": (2.0, 0.5, 1.0)[:classes], "client_lr": values["client_lr"] / 2}
    elif values["model.name"] == "logistic" and number % 5 == 2 and not values["lr_decay"]:
        # Records of norm 1: steps may be faster, and shorter gradients reach the clip.
        values |= {"data.transform": "unit", "privacy.clip_norm": 0.6}
        values["client_lr"] *= (FEATURES + 1) / 2
    ex_ante = view == "upload" and sampling == "full" and not everyone
    drawn = Drawn(
        values,
        sizes=one((12,) * clients, tuple(12 + 4 * (number % 3) for number in range(clients))),
        view=view,
        classes=classes,
        ex_ante=ex_ante,
        missing=one(0, 0, 1) if view != "upload" else 0,
        twice=-1 if ex_ante or rng.random() < 0.75 else int(rng.integers(values["num_rounds"])),
    )
    return _cornered(drawn, one)


def _cornered(drawn: Drawn, one: Callable[..., Any]) -> Drawn:
    """The spec as it is, or with one thing that happens to uploads after their noise, or to the noise itself."""
    corner = one("", "", "", "", "ball", "ball", "clamp", "encoding", "file", "file", "vanishing", "batches")
    values = dict(drawn.values)
    method, clip_norm = values["method"], values["privacy.clip_norm"]
    if corner in ("clamp", "file", "vanishing") and method not in ("cpfed", "dp-dsgd"):
        options = [key for key in values if key.startswith(("method_options.", "server_"))]
        values = {key: value for key, value in values.items() if key not in options}
        values |= {"method": "cpfed", "privacy.clip": "example"}
    if corner in ("ball", "clamp", "encoding", "file"):
        # Much noise of others to count on, and an ε that counts of runs can show
        values |= {"cohort_size": values["num_clients"], "num_rounds": one(1, 2)}
        values |= {"privacy.noise": "proven", "privacy.epsilon": one(4.0, 8.0)}
        for key in ("noise_std", "noise_schedule", "noise_decay", "epsilons"):
            values.pop(f"privacy.{key}", None)
        drawn = drawn._replace(view=one(drawn.view, "sum"), twice=-1, ex_ante=False)
        values["privacy.view"] = drawn.view
    reach = 1.0 if method == "nbafl" else values["local_steps"] * clip_norm * values["client_lr"]
    length = reach / values["cohort_size"]  # of an upload
    if corner == "ball":
        values["federation.max_norm"] = length * one(0.4, 0.8)
    elif corner == "encoding":
        values |= {"secagg.mode": "ideal", "secagg.bound": length * one(0.1, 0.2, 0.6)}
    elif corner == "clamp":
        fast = 6 * clipping.REACH * values["cohort_size"] / clip_norm  # a whole client is cut, one record is not
        values |= {"client_lr": fast, "lr_decay": 0.0, "local_steps": 1, "secagg.mode": "off"}
    elif corner == "vanishing":  # as loud in the last round as noise usually is
        decay, std = one(1e-14, 1e-20), clip_norm / values["batch_size"] * one(2.0, 6.0)
        values |= {"privacy.noise": "given", "privacy.epsilon": 1e3, "num_rounds": 4, "secagg.mode": "off"}
        values |= {"privacy.noise_schedule": "rounds", "privacy.noise_decay": decay}
        values["privacy.noise_std"] = min(std / decay**2, 2e38)
        values.pop("privacy.epsilons", None)
    elif corner == "file":
        sends, later = one(("updates", 2), ("signs", 0), ("signs", 0), ("sums", 0))
        values |= {"method": _METHOD, "method_options.sends": sends, "method_options.later": later}
        values["num_rounds"] = max(values["num_rounds"], 1 if sends == "signs" else 2)
        for key in ("privacy.clip_quantile", "privacy.colluders", "server_optimizer", "server_average"):
            values.pop(key, None)
    elif corner == "batches" and drawn.view != "upload" and method != "nbafl" and values["model.name"] != "mlp":
        values |= {"batch_sampling": one("fixed", "poisson", "poisson-full", "shuffled"), "batch_size": 4}
        values["sampling_rate"] = 0.4 if values["batch_sampling"].startswith("poisson") else 0.0
    return drawn._replace(values=values)


def _of_clients(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    """The spec with a method that protects whole clients: a trusted server adds the noise to each mean."""
    kept = _without_options(drawn.values)
    view, hidden = str(rng.choice(["broadcast", "broadcast", "final"])), rng.random() < 0.4
    bound = float(rng.choice([0.1, 0.5, 2.0]))
    values = {
        "method": "dp-fedavg",
        "method_options.update_clip": bound,
        "privacy.view": view,
        "privacy.clip": "none",
        "privacy.epsilon": min(kept["privacy.epsilon"], 8.0),
        "privacy.noise": str(rng.choice(["proven", "paper"])),
        "server_optimizer": str(rng.choice(["sgd", "sgd", "momentum", "adam"])),
        "server_lr": float(rng.choice([0.5, 1.0])),
    }
    if "federation.max_norm" in kept:
        kept["federation.max_norm"] = 0.8 * bound / kept["cohort_size"]
    if rng.random() < 0.5:
        values |= {"privacy.noise": "paper", "method_options.noise_multiplier": round(rng.uniform(0.5, 8.0), 2)}
    if hidden:  # a seed that nobody knows: before the draw, a cohort is a batch of clients
        few = int(rng.integers(1, kept["num_clients"]))
        values |= {
            "cohort_size": few,
            "secagg.mode": "off",
            "server_optimizer": "sgd",
            "privacy.view": "broadcast",
        }
        values |= {"privacy.adjacency": "zero-out", "privacy.colluders": 0, "model.name": "logistic"}
        kept.pop("model.class_weight", None)
        drawn = drawn._replace(twice=-1, missing=0, classes=2)
        view = "broadcast"
    return drawn._replace(values={**kept, **values}, view=view, ex_ante=hidden)


def _of_integers(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    """The spec with discrete noise on the integers of a secure sum. The host adds it: few clients and rounds."""
    kept = _without_options(drawn.values)
    if kept["model.name"] == "mlp":
        kept["model.name"] = "logistic"
    view = str(rng.choice(["upload", "sum", "sum", "broadcast", "final"]))
    method = str(rng.choice(["secure-fedavg", "secure-fedavg", "nbafl"]))
    clients = int(rng.choice([3, 6]))
    cohort = int(rng.integers(2, clients + 1))
    values = {
        "method": method,
        "num_clients": clients,
        "cohort_size": cohort,
        "num_rounds": int(rng.integers(1, 3)) if view in ("upload", "sum") else 1,
        "privacy.noise": "proven",
        "privacy.epsilon": min(kept["privacy.epsilon"], 8.0),
        "privacy.view": view,
        "privacy.clip": "none" if method == "nbafl" else "batch",
        "privacy.colluders": int(rng.integers(0, cohort - 1)),
        "secagg.mode": "ideal",
        "secagg.noise": "discrete",
        "secagg.scale_bits": int(rng.choice([12, 16, 20, 20])),
        "secagg.modulus_bits": int(rng.choice([32, 32, 64])),
    }
    if method == "nbafl":
        values |= {"method_options.param_clip": 1.0, "batch_sampling": "full", "sampling_rate": 0.0}
    else:
        values["method_options.first_round"] = str(rng.choice(["all", "cohort"]))
    twice = -1 if drawn.twice >= values["num_rounds"] else drawn.twice
    sizes = (12,) * clients if rng.random() < 0.7 else (12, 16, 20) * (clients // 3)
    return drawn._replace(values={**kept, **values}, sizes=sizes, view=view, ex_ante=False, twice=twice)


def _in_steps(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    """The spec with a secure sum of floats whose steps may swallow the noise of an upload, but not a record."""
    kept = _without_options(drawn.values)
    clients, bits = int(rng.choice([12, 64])), int(rng.choice([8, 12, 20]))
    std = kept["privacy.clip_norm"] / 12 * round(rng.uniform(0.15, 0.3), 2)  # of a mean over twelve records
    deviations = float(rng.choice([0.1, 3.8, 4.2, 4.6]))  # of an upload's noise, as long as half a step
    values = {
        "method": str(rng.choice(["cpfed", "dp-dsgd"])),
        "num_clients": clients,
        "cohort_size": clients,
        "num_rounds": 1,
        "local_steps": 1,
        "client_lr": 2.0**-bits * clients / (2 * deviations * std),
        "lr_decay": 0.0,
        "batch_sampling": "full",
        "batch_size": 12,
        "sampling_rate": 0.0,
        "randomness": "seeded",
        "model.name": "logistic",
        "privacy.clip": "example",
        "privacy.noise": "given",
        "privacy.noise_std": std,
        "privacy.epsilon": 1e3,
        "privacy.view": "sum",
        "secagg.mode": "ideal",
        "secagg.scale_bits": bits,
    }
    kept.pop("model.class_weight", None)
    drawn = drawn._replace(classes=2, view="sum", twice=-1, ex_ante=False, missing=0, sizes=(12,) * clients)
    return drawn._replace(values={**kept, **values})


def _of_absence(drawn: Drawn, rng: np.random.Generator) -> Drawn:
    """The spec with a method that shows no record count, for neighbours of which one has a record more."""
    kept = _without_options(drawn.values)
    view, method = (str(rng.choice(names)) for names in (["upload", drawn.view], ["cpfed", "dp-sgd", "dp-dsgd"]))
    values = {
        "method": method,
        "cohort_size": kept["num_clients"] if method == "dp-sgd" else kept["cohort_size"],
        "local_steps": int(rng.integers(1, 3)) if (method, view) == ("cpfed", "upload") else 1,
        "batch_sampling": "poisson-full",
        "batch_size": 4,
        "sampling_rate": float(rng.choice([0.1, 0.5, 0.9])),
        "privacy.view": view,
        "privacy.adjacency": ADD_REMOVE,
        "privacy.clip": "example",
        "privacy.noise": "proven",
        "privacy.epsilon": min(kept["privacy.epsilon"], 8.0),
    }
    missing = 0 if view == "upload" else drawn.missing
    return drawn._replace(values={**kept, **values}, view=view, missing=missing, ex_ante=False)


def _without_options(values: dict[str, Any]) -> dict[str, Any]:
    """The spec without what only some methods have."""
    options = ("noise_std", "noise_schedule", "noise_decay", "epsilons", "clip_quantile", "colluders")
    lacking = (*(f"privacy.{key}" for key in options), "server_optimizer", "server_average")
    return {
        name: value
        for name, value in values.items()
        if name not in lacking and not name.startswith("method_options")
    }


def build(drawn: Drawn) -> Experiment:
    """The drawn spec brought to life, on records in [0, 1] whose values do not matter."""
    devices.set_up()
    sizes = np.array(drawn.sizes, np.int32)
    count = int(sizes.sum())
    x = np.full((count + 4, FEATURES), 0.5, np.float32)
    y = (np.arange(count + 4) % drawn.classes).astype(np.int32) if drawn.classes else np.full(count + 4, _MIDDLE)
    names = tuple(f"pixel {number}" for number in range(FEATURES))
    labels = tuple(f"class {number}" for number in range(drawn.classes))
    parts = x[:count], y[:count], x[count:], y[count:]
    dataset = Dataset("fuzz", *parts, labels, names, (FEATURES, 1, 1), covered=True)
    if not drawn.classes:
        dataset = dataset._replace(label_bounds=(0.0, 1.0))
    start = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int32)
    clients = tuple(f"client {number}" for number in range(len(sizes)))
    partition = ClientPartition(np.arange(count, dtype=np.int32), start, sizes, clients)
    problem = engine.problem(*parts[:2], partition, *parts[2:])
    experiment = assemble(Spec().with_values(drawn.values), dataset, partition, problem)
    rounds = len(experiment.cohorts)
    if 0 <= drawn.twice < rounds:  # the kill undid this round
        experiment = experiment.realised([(0, drawn.twice + 1), (drawn.twice, rounds)])
    return experiment


def _proven(experiment: Experiment, drawn: Drawn) -> tuple[str, float]:
    """Recipe and value of the bound under test; if clients have their own targets, for the target's."""
    accountant = experiment.accountant(drawn.missing)
    if experiment.plan.epsilons and not drawn.ex_ante:
        accountant = accountant.of([most_exposed(experiment.plan.cohorts, experiment.plan.client_sizes)])
    adjacency = experiment.plan.adjacency
    if drawn.ex_ante:
        rows = accountant.before_the_draw(experiment.prepared.cohort_size_at)
        row = min((r for r in rows if (r.view, r.adjacency) == (drawn.view, adjacency)), key=lambda r: r.value)
    else:
        row = accountant.proven(drawn.view, adjacency)
    return row.recipe, row.value


# Records


def _target_records(norm: float, transform: str) -> dict[str, tuple[np.ndarray, int]]:
    """What may stand in the target's first place: features and label. A label below 0 is a blank."""
    unit = np.ones(FEATURES) / math.sqrt(FEATURES)
    signs = np.where(np.arange(FEATURES) % 2, -1.0, 1.0)
    largest = transformed(np.ones((1, FEATURES), np.float32), transform)[0].astype(float)
    records = {
        "blank": (0 * unit, -1),
        "silent": (0 * unit, 0),
        "largest": (largest, 1),  # of the public bound on norms, which proofs for sums rest on
        "largest, opposite": (-largest, 1),
        "largest, flipped": (largest, 0),
        "canary": (norm * unit, 1),
        "canary, opposite": (-norm * unit, 1),
        "far": (1e5 * unit, 1),
        "far, flipped": (1e5 * unit, 0),
    }
    for name, value in (("overflow", 3e38), ("square overflow", 1e19), ("infinite", np.inf), ("tiny", 1e-42)):
        records[name] = (value * signs, 1)
    records["not a number"] = (np.full(FEATURES, np.nan), 1)
    return records


class _Pair(NamedTuple):
    """Two records in one place, at one of the starts; `shift` is between the noiseless uploads."""

    start: int
    record: int
    neighbour: int
    shift: np.ndarray


class _Attack:
    """The attacks on one experiment."""

    def __init__(self, experiment: Experiment, drawn: Drawn, recipe: str) -> None:
        self.experiment, self.drawn, self.recipe = experiment, drawn, recipe
        plan = self.plan = experiment.plan
        self.sizes, self.finite = np.asarray(plan.client_sizes), True
        # A client whose records are all alike is the same in every batch.
        self.delta, self.sampled = plan.delta, plan.batch_sampling != "full" and not plan.per_client
        model = experiment.model
        self.linear = model.name in ("logistic", "softmax")
        # Where the mean is clipped as a whole, the others oppose the canary, which outweighs them all.
        self.opposing = plan.clip == "batch" and not self.sampled and self.linear
        heavier = 2 * int(self.sizes.max()) if self.opposing else 1
        self.records = _target_records(CANARY_NORM * heavier, experiment.spec.data.transform)
        if plan.adjacency == ADD_REMOVE:
            self.records["absent"] = self.records["blank"]
        self.names = list(self.records)
        self.gone = _GONE.get(plan.adjacency, "")
        # Nothing but the noise and linear steps make an upload.
        bent = plan.max_norm or experiment.spec.secagg.bound or plan.client_lr > 1e6
        self.gaussian = not bent and experiment.spec.method != _METHOD and not plan.discrete_noise
        self.numbers = plan.round_numbers or tuple(range(len(plan.cohorts)))
        self.target = most_exposed(plan.cohorts, plan.client_sizes)
        first = model.init(jax.random.key(0))
        starts = [jax.tree.map(jnp.zeros_like, first) if self.linear else first]
        if self.linear:
            starts.append(certain_start(model, heavier * self._movement()))
        self.num_starts = len(starts)
        x, y, scenes = self._scenes()
        self.watched = Rounds(
            experiment,
            records=(x, y),
            starts=starts,
            scenes=scenes,
            view=drawn.view,
            target=self.target,
            silent=plan.colluders + drawn.missing,
            absent=self.names.index("absent") if "absent" in self.names else -1,
        )
        # Exact sums are in units of the noise, so that there must be some.
        self.quiet = 2.0**-6 if plan.exact_sums else 0.0

    def _scenes(self) -> tuple[np.ndarray, np.ndarray, list[Scene]]:
        """All rows, and what the target's other records and the other clients' records are: nothing that moves a
        model; all of one direction; or, balanced, those that contract a noise most."""
        rows = list(self.records.values())
        canary = -CANARY_NORM / math.sqrt(FEATURES) * np.ones(FEATURES)
        rows.append((canary, 1) if self.opposing else (np.zeros(FEATURES), 0))
        x = np.stack([record for record, _ in rows]).astype(np.float32)
        y = np.array([label for _, label in rows], np.int32)
        if not self.drawn.classes:  # a label so far away that no step comes near it; the others have no gradient
            y = np.where(y > 0, _FAR * y, y).astype(np.float32)
            y[-1] = _MIDDLE
        at, rest = self.names.index, len(rows) - 1
        pulling = (at("largest"), at("largest, opposite"))
        scenes = [Scene(start, rest, (rest,)) for start in range(self.num_starts)]
        scenes.append(Scene(self.num_starts - 1, rest, pulling))
        if self.linear:
            scenes.append(Scene(0, at("blank"), (at("largest"), at("largest, flipped")), by_client=False))
        return x, y, scenes

    def _movement(self) -> float:
        """How far a run may carry the model along a record."""
        hyper, rounds = self.plan.hyper, len(self.numbers)
        if self.plan.per_client:  # by updates that are clipped, and their noise; by Adam's steps
            reach = float(hyper["update_clip"]) * (1 + float(hyper["central_multiplier"]))
            return min(10.0 * rounds * (1 + reach), 500.0)
        steps = self.plan.local_steps * rounds
        noise = max(float(np.max(np.asarray(hyper[name]))) for name in self.plan.noise_names)
        far = self.plan.client_lr * (self.plan.clip_norm * steps + 6 * noise * math.sqrt(steps))
        return min(far, 500.0)

    def run(self, count: int, **columns: Any) -> np.ndarray:
        """Uploads `[count, dimension]`; columns that are not named are those of the target's first round."""
        first = next(at for at, cohort in enumerate(self.plan.cohorts) if self.target in cohort)
        defaults = {
            "noise": self.quiet, "record": 1, "scene": self.num_starts - 1, "seed": 0, "client": self.target,
            "index": self.numbers[first], "cohort": len(self.plan.cohorts[first]),
        }  # fmt: skip
        table = {
            name: np.broadcast_to(np.asarray(columns.get(name, value)), (count,))
            for name, value in defaults.items()
        }
        pieces = []
        for start in range(0, count, _CHUNK):
            rows = np.minimum(np.arange(start, start + _CHUNK), count - 1)
            inputs = self.watched.inputs(*(table[name][rows] for name in ("record", "scene", "seed", "noise")))
            uploads, finite = self.watched.uploads(
                inputs, *(table[name][rows] for name in ("index", "client", "cohort"))
            )
            self.finite &= finite
            pieces.append(uploads[: count - start])
        return np.concatenate(pieces)

    # What is exhibited

    @cached_property
    def noiseless(self) -> np.ndarray:
        """`[starts, records, seeds, dimension]` of the target's first round."""
        seeds = 12 if self.sampled else 1
        start, record, seed = np.indices((self.num_starts, len(self.names), seeds)).reshape(3, -1)
        uploads = self.run(start.size, scene=start, record=record, seed=seed)
        return uploads.reshape(self.num_starts, len(self.names), seeds, -1)

    @cached_property
    def pair(self) -> _Pair:
        """The neighbours whose noiseless uploads are furthest apart. Where batches are drawn, one upload must
        not depend on the draw: a record without a gradient, at the start that is certain of it."""
        silent = self.names.index("silent")
        best = _Pair(0, silent, silent, np.zeros(self.noiseless.shape[-1]))
        for start in range(self.num_starts - 1, -1 if not self.sampled else self.num_starts - 2, -1):
            for at, other in self._neighbours():
                if self.sampled and self.names[other] not in (self.gone, "silent"):
                    continue
                shifts = self.noiseless[start, at] - self.noiseless[start, other]
                lengths = np.linalg.norm(shifts, axis=1)
                # Where batches are drawn, a round may use the record more than once: the least counts.
                length = np.min(lengths[lengths > 0], initial=np.inf) if self.sampled else lengths[0]
                if math.isfinite(length) and length > 1.02 * np.linalg.norm(best.shift):
                    best = _Pair(start, at, other, shifts[int(np.argmin(np.abs(lengths - length)))])
        return best

    def _neighbours(self) -> list[tuple[int, int]]:
        """Pairs of rows that the relation under test allows in one place."""
        bounded = ("blank", "absent", "silent", "largest")  # proofs of sums may rest on the public bound on norms
        allowed = [
            (at, name)
            for at, name in enumerate(self.names)
            if not self.recipe.startswith(("R6 G", "E3")) or name.startswith(bounded)
        ]
        gone = {self.gone} - {""}
        return [(a, b) for a, name in allowed for b, other in allowed if {name, other} & {*_GONE.values()} == gone]

    # Whole rounds

    def seen(self, record: np.ndarray, scene: np.ndarray, seed: np.ndarray, noise: float = 1.0) -> np.ndarray:
        """What the view shows of whole rounds in each of these runs, `[runs, rounds, numbers]`."""
        pieces, count = [], len(seed)
        for start in range(0, count, _CHUNK):
            rows = np.minimum(np.arange(start, start + _CHUNK), count - 1)
            worlds = [
                (record[rows], scene[rows], seed[rows] + later, np.full(_CHUNK, noise)) for later in (0, 10**6)
            ]
            seen, sound = self.watched.seen(*(self.watched.inputs(*world) for world in worlds))
            self.finite &= sound
            pieces.append(seen[: count - start])
        return np.concatenate(pieces)

    def _best_rows(self, most: int = 99) -> tuple[int, int, int]:
        """(scene, record, neighbour) that a few runs of every row in so many scenes tell apart best."""
        scenes = range(self.num_starts - 1, len(self.watched.scenes))[:most]
        shape = len(scenes), len(self.names), _PILOT
        scene, record, seed = np.indices(shape).reshape(3, -1)
        seen = self.seen(record, scene + scenes[0], seed + 1)
        seen = seen.reshape(*shape, *seen.shape[1:])
        best, rows = -1.0, (0, 0, 0)
        for at, number in enumerate(scenes):
            spread = np.var(seen[at], axis=1).mean(axis=0)
            for one, other in self._neighbours():
                value = told_apart(seen[at, one], seen[at, other], spread)
                if value > 1.02 * best:
                    best, rows = value, (number, one, other)
        return rows

    def rounds_epsilon(self) -> float:
        """The rounds of the engine, with the record and with its neighbour."""
        see = self._see(*self._best_rows())
        gaussian = not self.sampled and self.recipe.startswith(("R1", "R6"))
        halves = not self.plan.discrete_noise  # its sampler draws something else at half the noise
        return attacked(see, delta=self.delta, error=_ERROR, gaussian=gaussian, halves=halves)

    def _see(self, scene: int, record: int, neighbour: int) -> See:
        def see(first: int, count: int, with_record: bool, noise: float) -> np.ndarray:
            row = record if with_record else neighbour
            return self.seen(np.full(count, row), np.full(count, scene), first + np.arange(count), noise)

        return see

    def _hidden(self) -> float:
        """Before the draw, where nobody learns who takes part: how often the engine draws the target, and what a
        round with it shows if all others are silent."""
        see = self._see(*self._best_rows(most=1))
        mine = [at for at, cohort in enumerate(self.plan.cohorts) if self.target in cohort]
        shifts = (see(1, _CHUNK, True, 1.0) - see(1, _CHUNK, False, 1.0))[:, mine]
        line = shifts[0, 0] / max(np.linalg.norm(shifts[0, 0]), 1e-30)
        seen = see(10**5, _TRIALS, False, 1.0)[:, mine] @ line
        residuals = np.ravel(seen[::2] - seen[1::2]) / math.sqrt(2)  # either world may be the one with the client
        pair = bounds.ExhibitedPair(
            float(np.min(shifts @ line)), residuals, self._drawn_cohorts(), _TRIALS, len(self.numbers)
        )
        return bounds.exhibited_bound(pair, delta=self.delta, confidence=1 - _ERROR).value

    def _drawn_cohorts(self) -> int:
        """In how many of the cohorts that the engine draws the target is."""
        index, size = self.numbers[0], self.plan.cohort_size
        rows, number = np.zeros(_TRIALS, int), jnp.int32(index)
        runs = self.watched.inputs(rows, rows, np.arange(_TRIALS), np.ones(_TRIALS)).runs

        def members(run: RunInputs) -> Array:
            return engine.Simulation.cohort(self.watched.simulation, run, number, size)[0].clients

        return int(np.sum(np.asarray(jax.vmap(members)(runs)) == self.target))

    def residuals(self, index: int, cohort: int, client: int) -> np.ndarray:
        """The noise of a client's upload along the pair's line; in every coordinate, where losses are flat and so
        the noise is the same in all."""
        start = self.pair.start
        where = {"index": index, "cohort": cohort, "client": client, "scene": start, "record": self.pair.neighbour}
        seeds = 1 + np.arange(_TRIALS) + 10_000 * (1 + client) + 1_000_000 * index
        noise = self.run(_TRIALS, noise=1.0, seed=seeds, **where) - self.run(_TRIALS, seed=seeds, **where)
        noise /= 1 - self.quiet
        if self.linear and start == 1:
            return np.ravel(noise)
        return np.asarray(noise @ (self.pair.shift / np.linalg.norm(self.pair.shift)))

    def variance(self, index: int, cohort: int, client: int) -> float:
        """An upper limit of the noise's variance."""
        residuals = self.residuals(index, cohort, client)
        return float(np.sum(residuals**2) / chi2.ppf(_ERROR / 10, len(residuals)))

    @cached_property
    def rounds(self) -> list[tuple[float, float, float]]:
        """For each round: the target's shift (0 if it is absent), its variance, and the honest others'."""
        rows, known = [], {}
        for number, cohort in zip(self.numbers, self.plan.cohorts, strict=True):
            # The noise follows the count of records and the client's target.
            kind_of = {int(k): (int(self.sizes[k]), *self.plan.epsilons[k : k + 1]) for k in cohort}
            kinds = {kind: k for k, kind in kind_of.items()}

            def of(client: int, number: int = number, cohort: np.ndarray = cohort) -> float:
                key = (number, len(cohort), client)
                if key not in known:
                    known[key] = self.variance(*key)
                return known[key]

            others: list[float] = []
            if self.drawn.view != "upload":
                others = sorted(of(kinds[kind_of[int(k)]]) for k in cohort if k != self.target)
            silent = min(self.plan.colluders + self.drawn.missing, len(others))
            honest = math.fsum(others[: len(others) - silent])  # the loudest collude
            if self.target not in cohort:
                rows.append((0.0, 0.0, honest))
                continue
            start, record, neighbour, _ = self.pair
            where = {"scene": start, "index": number, "cohort": len(cohort), "seed": 0}
            worlds = self.run(2, record=np.array([record, neighbour]), **where)
            shift = np.linalg.norm(worlds[0] - worlds[1]) if not self.sampled else np.linalg.norm(self.pair.shift)
            rows.append((float(shift), of(self.target), honest))
        return rows

    # ε

    def epsilons(self) -> dict[str, float]:
        """The lower bound of each attack."""
        view, found = self.drawn.view, {"totality": 0.0}
        if self.plan.per_client and self.drawn.ex_ante:
            found["ex ante"] = self._hidden()
        elif view != "upload" or not self.gaussian or not (self.sampled or self.drawn.ex_ante):
            found["rounds"] = self.rounds_epsilon()
        if self.gaussian and np.any(self.pair.shift if view == "upload" or self.needs_uploads else 0):
            found |= self._by_uploads(view)
        if not self.finite:
            found["totality"] = math.inf
        if self._uneven():
            found["batches"] = math.inf
        return found

    @property
    def needs_uploads(self) -> bool:
        """Whether single uploads show more of this view than whole rounds do."""
        exposed = self.plan.exposures and self.drawn.view == "broadcast"
        return bool(exposed or (self.recipe.startswith("R6") and self.plan.noise_schedule != "steps"))

    def _by_uploads(self, view: str) -> dict[str, float]:
        """What noiseless uploads and the measured noise show by a formula."""
        if view == "upload" and self.sampled:
            return {"exhibited": self._sampled()}
        if view == "upload":
            return {"ex ante": self._ex_ante()} if self.drawn.ex_ante else {}
        if self.plan.exposures and view == "broadcast":
            seen = sorted(shift**2 / own for shift, own, _ in self.rounds if shift)[::-1]
            return {"exhibited": self._gaussian(seen[: self.plan.exposures])}
        if self.pair.start != 1:
            return {}
        return {"linear sum": max(self._gaussian(self._linear(share)) for share in np.linspace(0, 1, 9))}

    def _gaussian(self, squares: Any) -> float:
        return accounting.gaussian_epsilon(math.sqrt(math.fsum(squares)), self.delta)

    def _sampled(self) -> float:
        """The record is used now and then. Further rounds count if they are alike and independent."""
        shift = float(np.linalg.norm(self.pair.shift))
        worlds = [
            self.run(_TRIALS, record=at, scene=self.pair.start, seed=np.arange(_TRIALS))
            for at in (self.pair.record, self.pair.neighbour)
        ]
        lengths = np.linalg.norm(worlds[0] - worlds[1], axis=1)
        if np.any(lengths[lengths > 0] < shift * (1 - _ROUNDING)):
            shift = float(lengths[lengths > 0].min())
        at = next(at for at, cohort in enumerate(self.plan.cohorts) if self.target in cohort)
        noise = self.residuals(self.numbers[at], len(self.plan.cohorts[at]), self.target)
        used = int(np.sum(lengths > 0))
        plan = self.plan
        alike = plan.noise_schedule == "constant" and (plan.local_steps == 1 or not plan.lr_decay)
        independent = plan.batch_sampling in ("fixed", "poisson", "poisson-full")
        releases = sum(self.target in cohort for cohort in plan.cohorts) if alike and independent else 1
        pair = bounds.ExhibitedPair(shift, noise, used, _TRIALS, releases)
        return bounds.exhibited_bound(pair, delta=self.delta, confidence=1 - _ERROR).value

    def _uneven(self) -> bool:
        """Whether batches of fixed size favour some records of a very large client: R2 takes them for uniform."""
        if self.plan.batch_sampling != "fixed":
            return False
        count = int(np.random.default_rng(round(1e4 * self.plan.client_lr)).integers(2**27, 2**28))
        sizes, batch_size = np.array([count]), self.plan.batch_size
        sampler = sampling.make(
            "fixed", batch_size=batch_size, local_steps=_DRAWS // batch_size, client_sizes=sizes
        )
        key = noise.stream(count, "batch")
        positions = np.asarray(sampler.draw(Keys(key, key, key), jnp.int32(0), jnp.int32(count)).positions)
        if (
            positions.min() < 0
            or positions.max() >= count
            or np.any(np.diff(np.sort(positions, axis=1), axis=1) == 0)
        ):
            return True
        below = np.linspace(0, 1, 17)[1:-1]
        hits = np.sum(positions.ravel()[:, None] < below * count, axis=0)
        error = _ERROR / (2 * len(below))
        least, most = (rate(hits, positions.size, error) for rate in (bounds.lower_rate, bounds.upper_rate))
        return bool(np.any((least > below) | (most < below)))

    def _ex_ante(self) -> float:
        """Before the draw: the rounds that take everyone, or one of those for which the target is drawn."""
        sure, drawn = [], [0.0]
        for number, (shift, own, _) in zip(self.numbers, self.rounds, strict=True):
            chance = self.experiment.prepared.cohort_size_at(number) / len(self.sizes)
            if shift and chance >= 1:
                sure.append(shift**2 / own)
            elif shift and chance > self.delta:
                drawn.append(accounting.message_epsilon(shift / math.sqrt(own), chance, self.delta))
        return max(self._gaussian(sure), *drawn)

    def _linear(self, share: float) -> list[float]:
        """μ² of each round for quadratic losses: the target's record has the steepest gradient g that a balanced
        record of the largest norm has, below the clip, and the others' losses `share` of its curvature g²."""
        plan = self.plan
        steepest = min(math.sqrt(plan.smoothness or 0.0), plan.clip_norm)
        names = ("largest", self.gone or "largest, opposite")
        at = np.array([self.names.index(name) for name in names])
        worlds = self.run(2, record=at, scene=1)
        whole = np.linalg.norm(worlds[0] - worlds[1])
        if not self.gone:  # the bias keeps the two from being quite opposite
            whole *= math.sqrt(1 + 1 / np.sum(self.records["largest"][0] ** 2))
        squares = []
        for number, (shift, own, others) in zip(self.numbers, self.rounds, strict=True):
            if not shift:
                continue
            shift *= float(whole / np.linalg.norm(self.pair.shift)) * steepest / plan.clip_norm
            steps = number * plan.local_steps + np.arange(plan.local_steps)
            rates = plan.client_lr / (1 + plan.lr_decay * steps)
            mine, theirs = (_kept(rates, part * steepest**2) for part in (1 / self.sizes[self.target], share))
            moved = shift * np.sum(rates * mine) / np.sum(rates)
            noise = [np.sum((rates * kept) ** 2) / np.sum(rates**2) for kept in (mine, theirs)]
            squares.append(float(moved**2 / (own * noise[0] + others * noise[1])))
        return squares


def _kept(rates: np.ndarray, curvature: float) -> np.ndarray:
    """What is left at the end of a round of what each step added, if later steps contract it."""
    return np.append(np.cumprod(1 - rates[:0:-1] * curvature)[::-1], 1.0)
