"""Random accepted specs, each attacked with the worst known neighbouring data sets: attacked ε against proven ε.

`check(seed)` draws one spec with `draw`, builds it, runs its compiled client with and without noise on constructed
records, and compares what that exhibits with what the accountant proves. Five attacks:

totality    records of extreme floats (infinite, NaN, near overflow): an upload that is not finite reveals all
exhibited   the largest shift of a noiseless upload over neighbouring records, the measured noise, then R1 or R5
sum         the same against the noise of the honest others; if local steps contract it, the exact value for
            quadratic losses, which the theorem's hypotheses include (rates as they run, R6')
ex ante     rounds in which everyone takes part are not drawn (R4)
counts      private statistics and evaluations: the counts of every question (`auditing.counts`)

Noise is measured, so each answer may be wrong with probability 1e-7; everything is drawn from the seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.stats import chi2

from dither import accounting
from dither.auditing import bounds
from dither.auditing.counts import check_counts
from dither.auditing.neighbours import CANARY_NORM, certain_start
from dither.auditing.trials import CodeUnderAudit, float32, most_exposed
from dither.data import ClientPartition, Dataset
from dither.data import transform as transformed
from dither.errors import NoProof, SpecError
from dither.experiment.build import Experiment, assemble
from dither.methods import local
from dither.simulation import devices, engine
from dither.spec import Spec
from dither.types import Records, Round

FEATURES = 8
_ERROR = 1e-7  # probability that one spec is reported wrongly
_MIDDLE, _FAR = np.float32(0.5), 1e4  # labels of a regression
_COUNTS = 5  # seeds of this remainder by 8 draw statistics
_CHUNK = 512  # cases of one call, always as many: one compilation a spec
_TRIALS = 2048  # with noise, and draws by which the use of a record is counted
_ADDING = ("cpfed", "dp-sgd", "dp-dsgd", "secure-fedavg")  # servers that add the sum of the uploads to the model
_AVERAGING = ("cpfed", "concentrated", "dp-sgd", "dp-dsgd")  # with targets of clients and an adaptive clip
_ROUNDING = 1e-3  # of float32, relative


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
    statistics or a private evaluation instead of training."""
    rng = np.random.default_rng(seed)
    if seed % 8 == _COUNTS:
        case, proven, attacked = check_counts(rng, _ERROR)
        return FuzzOutcome(seed, Drawn(case.values, case.sizes), "R1", proven, attacked, "counts")
    while True:
        drawn = draw(rng)
        try:
            experiment = build(drawn)
            recipe, proven = _proven(experiment, drawn)
        except (SpecError, NoProof):
            continue
        if math.isfinite(proven):
            found = _Attack(experiment, drawn, recipe).epsilons()
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
    return Drawn(
        values,
        sizes=one((12,) * clients, tuple(12 + 4 * (number % 3) for number in range(clients))),
        view=view,
        classes=classes,
        ex_ante=ex_ante,
        missing=one(0, 0, 1) if view != "upload" else 0,
        twice=-1 if ex_ante or rng.random() < 0.75 else int(rng.integers(values["num_rounds"])),
    )


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
        row = min((r for r in rows if (r.view, r.adjacency) == ("upload", adjacency)), key=lambda r: r.value)
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
        self.sizes = np.asarray(plan.client_sizes)
        self.delta, self.sampled = plan.delta, plan.batch_sampling != "full"
        model = experiment.model
        self.linear = model.name in ("logistic", "softmax")
        # Where the mean is clipped as a whole, the others oppose the canary, which outweighs them all.
        self.opposing = plan.clip == "batch" and not self.sampled and self.linear
        heavier = 2 * int(self.sizes.max()) if self.opposing else 1
        self.records = _target_records(CANARY_NORM * heavier, experiment.spec.data.transform)
        self.names = list(self.records)
        self.numbers = plan.round_numbers or tuple(range(len(plan.cohorts)))
        self.target = most_exposed(plan.cohorts, plan.client_sizes)
        first = model.init(jax.random.key(0))
        starts = [jax.tree.map(jnp.zeros_like, first) if self.linear else first]
        if self.linear:
            starts.append(certain_start(model, heavier * self._movement(), seed=0))
        self.starts = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
        self.num_starts = len(starts)
        self._program = jax.jit(self._uploads)

    def _movement(self) -> float:
        """How far a run may carry the model along a record."""
        hyper, rounds = self.plan.hyper, len(self.numbers)
        steps = self.plan.local_steps * rounds
        noise = max(float(np.max(np.asarray(hyper[name]))) for name in self.plan.noise_names)
        far = self.plan.client_lr * (self.plan.clip_norm * steps + 6 * noise * math.sqrt(steps))
        return min(far, 500.0)

    # The client under attack

    def _uploads(self, cases: dict[str, Any]) -> Any:
        code, rows = CodeUnderAudit.of(self.experiment), int(self.sizes.max())
        loud, quiet = float32(code.hyper), float32(code.noiseless())
        x = np.stack([record for record, _ in self.records.values()]).astype(np.float32)
        y = np.array([label for _, label in self.records.values()], np.int32)
        opposite = -CANARY_NORM / math.sqrt(FEATURES) if self.opposing else 0.0
        others_x = np.full((rows - 1, FEATURES), opposite, np.float32)
        others_y = np.full(rows - 1, int(self.opposing), np.int32)
        if not self.drawn.classes:  # a label so far away that no step comes near it; the others have no gradient
            y, others_y = np.where(y > 0, _FAR * y, y).astype(np.float32), np.full(rows - 1, _MIDDLE)

        def one(case: dict[str, Any]) -> Any:
            hyper = {k: quiet[k] + case["noise"] * (loud[k] - quiet[k]) for k in loud}
            algorithm = code.build(hyper)
            params = jax.tree.map(lambda leaf: leaf[case["start"]], self.starts)
            records = Records(
                jnp.concatenate([jnp.asarray(x)[case["record"]][None], others_x]),
                jnp.concatenate([jnp.asarray(y)[case["record"]][None], others_y]),
                jnp.arange(rows, dtype=jnp.int32),
                jnp.int32(0),
                jnp.asarray(self.sizes, jnp.int32)[case["client"]],
            )
            result = algorithm.client(
                code.keys(case["seed"], case["index"], case["client"]),
                algorithm.message(algorithm.init(params)),
                algorithm.client_init(params),
                records,
                Round(case["index"], case["client"], case["cohort"]),
            )
            upload = result.upload["params"] if code.client_state else result.upload
            if self.plan.clip_quantile:  # the count in the unit of the model's change, so that all noise is alike
                rate = local.learning_rate(hyper, case["index"])
                unit = local.COUNT_SHARE * hyper["clip_norm"] * rate
                upload = {**upload, "unclipped": upload["unclipped"] * unit}
            return ravel_pytree(upload)[0]

        return jax.vmap(one)(cases)

    def run(self, count: int, **columns: Any) -> np.ndarray:
        """Uploads `[count, dimension]`; columns that are not named are those of the target's first round."""
        first = next(at for at, cohort in enumerate(self.plan.cohorts) if self.target in cohort)
        defaults = {
            "noise": 0.0, "record": 1, "start": self.num_starts - 1, "seed": 0, "client": self.target,
            "index": self.numbers[first], "cohort": len(self.plan.cohorts[first]),
        }  # fmt: skip
        kinds = {"noise": np.float32, "seed": np.uint32}
        table = {
            name: np.broadcast_to(np.asarray(columns.get(name, value)), (count,)).astype(kinds.get(name, np.int32))
            for name, value in defaults.items()
        }
        pieces = []
        for start in range(0, count, _CHUNK):
            rows = np.minimum(np.arange(start, start + _CHUNK), count - 1)
            cases = {name: column[rows] for name, column in table.items()}
            pieces.append(np.asarray(self._program(cases), np.float64)[: count - start])
        return np.concatenate(pieces)

    # What is exhibited

    @cached_property
    def noiseless(self) -> np.ndarray:
        """`[starts, records, seeds, dimension]` of the target's first round."""
        seeds = 12 if self.sampled else 1
        start, record, seed = np.indices((self.num_starts, len(self.names), seeds)).reshape(3, -1)
        uploads = self.run(start.size, start=start, record=record, seed=seed)
        return uploads.reshape(self.num_starts, len(self.names), seeds, -1)

    @cached_property
    def pair(self) -> _Pair:
        """The neighbours whose noiseless uploads are furthest apart. Where batches are drawn, one upload must
        not depend on the draw: a record without a gradient, at the start that is certain of it."""
        names, blank, silent = self.names, self.names.index("blank"), self.names.index("silent")
        allowed = list(range(len(names)))
        if self.recipe.startswith(("R6", "E3")):  # they rest on the public bound on norms
            allowed = [at for at in allowed if names[at] in ("blank", "silent") or names[at].startswith("largest")]
        best = _Pair(0, silent, silent, np.zeros(self.noiseless.shape[-1]))
        for start in range(self.num_starts - 1, -1 if not self.sampled else self.num_starts - 2, -1):
            for at in allowed:
                for other in allowed:
                    if (blank in (at, other)) != (self.plan.adjacency == "zero-out"):
                        continue
                    if self.sampled and other not in (blank, silent):
                        continue
                    shifts = self.noiseless[start, at] - self.noiseless[start, other]
                    lengths = np.linalg.norm(shifts, axis=1)
                    # Where batches are drawn, a round may use the record more than once: the least counts.
                    length = np.min(lengths[lengths > 0], initial=np.inf) if self.sampled else lengths[0]
                    if math.isfinite(length) and length > 1.02 * np.linalg.norm(best.shift):
                        best = _Pair(start, at, other, shifts[int(np.argmin(np.abs(lengths - length)))])
        return best

    def residuals(self, index: int, cohort: int, client: int) -> np.ndarray:
        """The noise of a client's upload along the pair's line; in every coordinate, where losses are flat and so
        the noise is the same in all."""
        start = self.pair.start
        where = {"index": index, "cohort": cohort, "client": client, "start": start, "record": self.pair.neighbour}
        seeds = 1 + np.arange(_TRIALS) + 10_000 * (1 + client) + 1_000_000 * index
        noise = self.run(_TRIALS, noise=1.0, seed=seeds, **where) - self.run(_TRIALS, seed=seeds, **where)
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
            where = {"start": start, "index": number, "cohort": len(cohort), "seed": 0}
            worlds = self.run(2, record=np.array([record, neighbour]), **where)
            shift = np.linalg.norm(worlds[0] - worlds[1]) if not self.sampled else np.linalg.norm(self.pair.shift)
            rows.append((float(shift), of(self.target), honest))
        return rows

    # ε

    def epsilons(self) -> dict[str, float]:
        """The lower bound of each attack."""
        if not np.all(np.isfinite(self.noiseless)):
            return {"totality": math.inf}
        if not np.any(self.pair.shift):
            return {"totality": 0.0}
        view, found = self.drawn.view, {"totality": 0.0}
        if self.sampled:
            found["exhibited"] = self._sampled()
        elif self.drawn.ex_ante:
            found["ex ante"] = self._ex_ante()
        elif view == "upload":
            found["exhibited"] = self._gaussian(shift**2 / own for shift, own, _ in self.rounds if shift)
        elif self.plan.exposures and view == "broadcast":
            seen = sorted(shift**2 / own for shift, own, _ in self.rounds if shift)[::-1]
            found["exhibited"] = self._gaussian(seen[: self.plan.exposures])
        elif view == "sum" or not np.any(np.asarray(self.plan.hyper.get("downlink_std", 0.0))):
            found |= self._sums(view)
        return found

    def _gaussian(self, squares: Any) -> float:
        return accounting.gaussian_epsilon(math.sqrt(math.fsum(squares)), self.delta)

    def _sampled(self) -> float:
        """The record is used now and then. Further rounds count if they are alike and independent."""
        shift = float(np.linalg.norm(self.pair.shift))
        worlds = [
            self.run(_TRIALS, record=at, start=self.pair.start, seed=np.arange(_TRIALS))
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

    def _sums(self, view: str) -> dict[str, float]:
        """The sum of the cohort's uploads, the broadcasts that it makes, or the model that all of them make."""
        if view == "final" and len(self.rounds) > 1:
            spec = self.experiment.spec
            adds = spec.method in _ADDING and not self.plan.clip_quantile and spec.server_optimizer == "sgd"
            if self.plan.round_numbers or not adds or self.pair.start != 1:
                return {}
            moved = math.fsum(shift for shift, _, _ in self.rounds)
            own = math.fsum(own + others for shift, own, others in self.rounds if shift)
            # In rounds without the target everybody else's noise is in the model.
            rest = math.fsum(others for shift, _, others in self.rounds if not shift)
            return {"final": self._gaussian([moved**2 / (own + rest)])}
        found = {"sum": self._gaussian(shift**2 / (own + others) for shift, own, others in self.rounds if shift)}
        if self.recipe.startswith("R6") and self.pair.start == 1 and self.plan.noise_schedule != "steps":
            found["linear sum"] = max(self._gaussian(self._linear(share)) for share in np.linspace(0, 1, 9))
        return found

    def _linear(self, share: float) -> list[float]:
        """μ² of each round for quadratic losses: the target's record has the steepest gradient g that a balanced
        record of the largest norm has, below the clip, and the others' losses `share` of its curvature g²."""
        plan = self.plan
        steepest = min(math.sqrt(plan.smoothness or 0.0), plan.clip_norm)
        names = ("largest", "largest, opposite") if plan.adjacency != "zero-out" else ("largest", "blank")
        at = np.array([self.names.index(name) for name in names])
        worlds = self.run(2, record=at, start=1)
        whole = np.linalg.norm(worlds[0] - worlds[1])
        if plan.adjacency != "zero-out":  # the bias keeps the two from being quite opposite
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
