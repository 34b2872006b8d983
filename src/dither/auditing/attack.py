"""The audit of a spec: for each adversary view, claimed, proven and attacked ε.

report = audit("secure-fedavg", views=("upload",), trials=10_000, confidence=0.99)
report.rows[0]["attacked"]["value"], report.violations
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dither import data
from dither.accounting import ProvenRow
from dither.auditing import bounds, one_run, scores
from dither.auditing.designs import Design, World, designs, world
from dither.auditing.rows import Row, is_plain, plain_row, round_rate
from dither.auditing.rows import exhibit as exhibit_of
from dither.auditing.worlds import (
    KIND,
    VIEWS,
    Code,
    KeysOf,
    PairedRuns,
    Schedule,
    Seen,
    floats_per_trial,
    schedule,
)
from dither.errors import SpecError, did_you_mean
from dither.experiment.build import Experiment, build_experiment, claim_after, claimed
from dither.experiment.partial import Unfinished
from dither.privacy import sampling
from dither.spec import Spec
from dither.types import Algorithm, Hyper, Release, RoundInfo

_SEARCH = 256  # trials with which designs are compared
_PILOT, _MOST_PILOT = 2048, 32_768
_OPERATIONS = 1.2e12  # of one row: about a minute on two cores
_FEWEST = 200  # trials, however large the model
_LARGE = 20_000  # parameters above which nobody else's upload is looked at beside the target's


@dataclass(frozen=True)
class Audit:
    """What an audit found. `rows` are plain values; `found` keeps the scores for pictures."""

    spec: Spec
    confidence: float
    claimed: dict[str, Any]
    rows: list[dict[str, Any]]
    notes: list[str]
    found: list[Row] = field(repr=False, default_factory=list)

    @property
    def violations(self) -> list[dict[str, Any]]:
        """Rows whose attacked ε exceeds the proven one: a bug in the method, its noise or the accountant."""
        return [row for row in self.rows if row["verdict"] == "VIOLATION"]

    @property
    def refuted(self) -> list[dict[str, Any]]:
        """Rows whose attacked ε exceeds the paper's claim."""
        return [row for row in self.rows if row["refutes_claim"]]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, without the scores."""
        return {
            "method": self.spec.method,
            "spec": self.spec.to_dict(),
            "confidence": self.confidence,
            "claimed": self.claimed,
            "rows": self.rows,
            "notes": self.notes,
        }


def audit(
    what: Spec | str | Path | Mapping[str, Any] | Experiment,
    *,
    values: Mapping[str, Any] | None = None,
    views: Sequence[str] = VIEWS,
    trials: int = 10_000,
    confidence: float = 0.95,
    canaries: int = 0,
    rounds: int | None = None,
    made: int | None = None,
    seed: int = 0,
    data_dir: str | Path | None = None,
    dataset: data.Dataset | None = None,
    build: Callable[[Hyper], Algorithm] | None = None,
    keys: KeysOf | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
    keep: str | Path | None = None,
) -> Audit:
    """Attack a spec (or a preset, a TOML file, a run's spec, a `Experiment`): a lower bound on ε for each view.

    Each row holds with probability `confidence`, whatever form of bound is its largest. `trials` are made in each
    of two worlds. `rounds` looks at the target's first rounds only: still a lower bound for the whole run. `made`
    says that a run ended after so many rounds. `canaries` adds the bounds from one run with so many canaries.
    `build` and `keys` put other code in the place of the method's and the engine's own, to see whether the audit
    notices. `keep` is a folder in which rows wait until the last is made, so that an interrupted audit goes on.
    """
    for view in views:
        if view not in VIEWS:
            raise SpecError(f"view={view!r} is not one of {', '.join(VIEWS)}{did_you_mean(view, VIEWS)}")
    if not 0.5 < confidence < 1:
        raise SpecError(f"confidence={confidence} must lie between 0.5 and 1")
    if trials < _FEWEST:
        raise SpecError(f"trials={trials} are too few to say anything; give at least {_FEWEST}")
    if isinstance(what, Experiment):
        experiment = what
    else:
        spec = Spec.from_any(what).with_values(values or {})
        experiment = build_experiment(spec, data_dir=data_dir, dataset=dataset)
    if made is not None:
        ended = claim_after(experiment, made) if made < len(experiment.cohorts) else experiment.prepared.claim
        experiment = experiment.first_rounds(made)
        experiment = replace(experiment, prepared=experiment.prepared._replace(claim=ended))
    if experiment.plan.per_client:
        raise SpecError(f"{experiment.spec.method} protects whole clients; an audit replaces one record")
    code = Code.of(experiment.prepared)
    code = code._replace(build=build or code.build, keys=keys or code.keys)
    table, claim = experiment.accountant().table(), claimed(experiment.prepared.claim)
    auditor = _Auditor(experiment, code, table, trials, confidence, rounds, seed)
    wanted = [(view, "run") for view in views]
    if "upload" in views and "message" in (claim["unit"], experiment.spec.privacy.unit):
        wanted.insert(0, ("upload", "message"))
        if rounds == 1:
            wanted.remove(("upload", "run"))  # it would be the same
    if canaries:
        wanted.append(("upload", "one run"))
    about = [
        experiment.spec.digest(),
        experiment.data_digest,
        trials,
        confidence,
        rounds,
        made,
        seed,
        canaries,
        wanted,
    ]
    kept = Unfinished(None if build or keys else keep, "audit", about)
    rows, found = [], []
    for view, unit in wanted:
        row = auditor.restored(kept.get(f"{view} {unit}"))
        if row is None:
            row = auditor.attack_once(canaries) if unit == "one run" else auditor.attack(view, unit)
            kept.put(f"{view} {unit}", auditor.state(row))
        found.append(row)
        rows.append(plain_row(row, experiment, table, claim, confidence, auditor.reached(row)))
        if on_row:
            on_row(rows[-1])
    kept.done()
    return Audit(experiment.spec, confidence, claim, rows, auditor.notes, found)


class _Auditor:
    """Attacks views of one experiment one after the other."""

    def __init__(
        self,
        experiment: Experiment,
        code: Code,
        table: list[ProvenRow],
        trials: int,
        confidence: float,
        rounds: int | None,
        seed: int,
    ) -> None:
        self.experiment, self.code, self.table = experiment, code, table
        self.trials, self.confidence, self.rounds = trials, confidence, rounds
        self.notes: list[str] = []
        self._final = False  # whether the view at hand is the final model alone
        self._next_seed = (seed * 0x9E3779B1 + 1) % 2**32
        self._position: int | None = None
        self._paired_runs: dict[Any, PairedRuns] = {}
        self.sizes = np.asarray(experiment.partition.size)
        # What the method reveals says how it samples; the code under audit may be another.
        self.algorithm = experiment.prepared.build(experiment.prepared.hyper)

    # Between rows

    def state(self, row: Row) -> dict[str, Any]:
        """A row, and what the rows after it depend on."""
        return {**row._asdict(), "after": [self._next_seed, self._position, self.notes]}

    def restored(self, state: dict[str, Any] | None) -> Row | None:
        """The row of a state, and this auditor as it was after it."""
        if state is None:
            return None
        self._next_seed, self._position, self.notes = state["after"]
        return Row(
            view=state["view"],
            unit=state["unit"],
            design=state["design"],
            rounds=state["rounds"],
            bounds=[bounds.LowerBound(*each) for each in state["bounds"]],
            scores_in=np.asarray(state["scores_in"]),
            scores_out=np.asarray(state["scores_out"]),
            cuts=[bounds.Cut(*each) for each in state["cuts"]],
            mu_cuts=[bounds.Cut(*each) for each in state["mu_cuts"]],
        )

    # One row

    def attack(self, view: str, unit: str) -> Row:
        """The best of the designs, then pilot and trials."""
        spec = self.experiment.spec
        plan = self._schedule(view, 1 if unit == "message" else self.rounds)
        release = self._release(plan)
        trials, plan, affordable = self._affordable(view, plan)
        paired = self._paired(view, plan)
        self._final = view == "final"
        size = int(self.sizes[plan.target])
        options = self._designs(view, plan, release)
        used = round_rate(release, spec.local_steps)
        search = min(int(np.clip(40 / used, _SEARCH, 8192)), max(affordable // 20, 8))
        placed = [self._place(paired, design, size, release, search) for design in options]
        told, design, pair, line = max(placed, key=lambda found: found[0])
        if told == -math.inf:
            raise SpecError(f"view {view!r}: one record moves nothing here, or nothing finite; there is no attack")

        pilot_size = min(int(np.clip(100 / used, _PILOT, _MOST_PILOT)), max(affordable // 2, 50))
        pilot = self._pilot(paired, design, pair, line, pilot_size)
        score = scores.learn(pilot)
        pilot_in, pilot_out = score(pilot.seen_in), score(pilot.seen_out)
        seen_in, seen_out = (self._observe(paired, design, pair, line, which, trials) for which in (0, 1))
        scores_in, scores_out = score(seen_in), score(seen_out)

        plain = is_plain(release)
        exhibit = exhibit_of(pilot, score, release)
        forms = 1 + plain + (exhibit is not None)
        each = 1 - (1 - self.confidence) / forms
        cuts = bounds.choose_cuts(pilot_in, pilot_out, trials=trials, delta=spec.privacy.delta, error=1 - each)
        aim = {"delta": spec.privacy.delta, "confidence": each}
        result = [bounds.count_bound(scores_in, scores_out, cuts, **aim)]
        mu_cuts = bounds.mu_cuts(pilot_in, pilot_out) if plain else []
        if plain:
            result.append(bounds.mu_bound(scores_in, scores_out, mu_cuts, **aim))
        if exhibit is not None:
            result.append(bounds.exhibited_bound(exhibit, **aim))
        return Row(view, unit, design.name, len(plan.rounds), result, scores_in, scores_out, cuts, mu_cuts)

    def attack_once(self, canaries: int) -> Row:
        """Many canaries in one run."""
        spec = self.experiment.spec
        plan = self._schedule("upload", self.rounds)
        trial = one_run.run(
            self.code,
            self.experiment.model,
            plan,
            self.sizes,
            num_features=self.experiment.problem.x.shape[1],
            canaries=canaries,
            movement=self._movement("upload", plan),
            seed=self._seeds(1)[0],
        )
        release = self._release(plan)
        shares = (0.1, 0.3, 1.0)
        plain = is_plain(release)
        each = 1 - (1 - self.confidence) / (len(shares) * (1 + plain))
        aim = {"delta": spec.privacy.delta, "confidence": each}
        found = []
        for share in shares:
            guesses = bounds.count_guesses(trial.scores, trial.included, share)
            found.append(bounds.one_run_bound(guesses, **aim))
            if plain:
                found.append(bounds.one_run_gaussian_bound(guesses, **aim))
        best = [
            max((b for b in found if b.form == form), key=lambda b: b.value) for form in {b.form for b in found}
        ]
        return Row(
            "upload",
            "one run",
            f"{canaries} canaries",
            len(plan.rounds),
            sorted(best, key=lambda b: b.form),
            trial.scores[trial.included],
            trial.scores[~trial.included],
            [],
            [],
        )

    def reached(self, row: Row) -> list[dict[str, Any]]:
        """Attacked ε from the first trials, for the picture of ε against trials."""
        if not row.cuts:
            return []
        steps, count = [], len(row.scores_in)
        while count >= 100:
            aim = {"delta": self.experiment.spec.privacy.delta, "confidence": self.confidence}
            found = bounds.count_bound(row.scores_in[:count], row.scores_out[:count], row.cuts, **aim)
            step = {"trials": count, "counts": found.value}
            if row.mu_cuts:
                inside, outside = row.scores_in[:count], row.scores_out[:count]
                step["mu"] = bounds.mu_bound(inside, outside, row.mu_cuts, **aim).value
            steps.append(step)
            count //= 2
        return steps[::-1]

    # Pieces

    def _schedule(self, view: str, rounds: int | None) -> Schedule:
        spec = self.experiment.spec
        return schedule(
            self.experiment.cohorts,
            self.sizes,
            view=view,
            rounds=rounds,
            colluders=min(spec.colluders, spec.cohort_size - 1) if view == "sum" else 0,
        )

    def _release(self, plan: Schedule) -> tuple[Release, ...]:
        target = plan.target
        info = RoundInfo(int(plan.rounds[0]), target, int(self.sizes[target]), int(plan.cohort_sizes[0]))
        return tuple(r for r in self.algorithm.releases(info) if r.channel == "uplink")

    def _paired(self, view: str, plan: Schedule) -> PairedRuns:
        kind = KIND[view]
        key = (kind, len(plan.rounds))
        if key not in self._paired_runs:
            self._paired_runs[key] = self._compiled(kind, view, plan)
        return self._paired_runs[key]

    def _compiled(self, kind: str, view: str, plan: Schedule) -> PairedRuns:
        experiment = self.experiment
        members = plan.cohorts.shape[1] if view != "upload" else (1 if experiment.num_params > _LARGE else 2)
        return PairedRuns(
            self.code,
            kind,
            plan,
            self.sizes,
            exposures=experiment.plan.exposures if kind == "evolving" else 0,
            alone=experiment.num_params > _LARGE,
            work=floats_per_trial(experiment.model, experiment.problem.x.shape[1], self._width(), members),
        )

    def _width(self) -> int:
        spec = self.experiment.spec
        if spec.batch_sampling in ("full", "poisson-full"):
            return int(self.sizes.max())
        sampler = sampling.make(
            spec.batch_sampling,
            batch_size=min(spec.batch_size, int(self.sizes.min())),
            local_steps=1,
            client_sizes=self.sizes,
            sampling_rate=spec.sampling_rate,
        )
        return sampler.width

    def _affordable(self, view: str, plan: Schedule) -> tuple[int, Schedule, int]:
        """Fewer rounds, then fewer trials, where all would take too long; a lower bound stays one. Also how many
        trials would take no longer than that, for the pilots to keep to."""
        spec = self.experiment.spec
        members = plan.cohorts.shape[1] if view != "upload" else 1
        if view in ("broadcast", "final"):
            members *= 2  # the adversary's own expectation
        one = members * (
            spec.local_steps * self.experiment.num_params * (6.0 * self._width() + 60.0)
            + self._sampling_operations()
        )
        rounds = len(plan.rounds)
        fit = int(np.clip(_OPERATIONS / (2 * self.trials * one), 1, rounds))
        if fit < rounds and self.rounds is None and view != "final":
            self.notes.append(f"view {view}: the first {fit} of {rounds} rounds are attacked (--rounds for more)")
            plan = Schedule(plan.target, plan.rounds[:fit], plan.cohorts[:fit], plan.cohort_sizes[:fit])
        affordable = int(_OPERATIONS / (2 * one * len(plan.rounds)))
        trials = int(np.clip(affordable, _FEWEST, self.trials))
        if trials < self.trials:
            self.notes.append(f"view {view}: {trials} trials instead of {self.trials}, as the model is large")
        return trials, plan, affordable

    def _sampling_operations(self) -> float:
        """About what drawing a round's batches costs: sorts for permutations, comparisons for small subsets."""
        spec, size = self.experiment.spec, float(self.sizes.max())
        if spec.batch_sampling in ("shuffled", "disjoint"):
            return 2000.0 * size * (2 if spec.batch_sampling == "shuffled" else 1)
        if spec.batch_sampling == "fixed":
            return 20.0 * spec.local_steps * spec.batch_size**2
        return 20.0 * spec.local_steps * size

    def _movement(self, view: str, plan: Schedule) -> float:
        """How far training can carry the model along the line, as long as broadcasts are not chosen anew."""
        spec, hyper = self.experiment.spec, self.experiment.prepared.hyper
        step = float(hyper.get("client_lr", spec.client_lr))
        reach = float(hyper.get("clip_norm", 1.0))
        noise = float(np.max(np.asarray(hyper.get("noise_std", 0.0))))
        rounds = len(plan.rounds) if view in ("broadcast", "final") else 1
        moved = step * spec.local_steps * reach * rounds + 6 * step * noise * math.sqrt(spec.local_steps * rounds)
        return min(moved, 500.0)

    def _designs(self, view: str, plan: Schedule, release: tuple[Release, ...]) -> list[Design]:
        experiment, spec = self.experiment, self.experiment.spec
        rows = [r for r in self.table if r["view"] == view and r["adjacency"] == spec.adjacency]
        rests_on_bound = any(row["recipe"].startswith("R6") for row in rows)
        features = experiment.problem.x.shape[1]
        norm_bound = None
        if rests_on_bound:
            schema = experiment.dataset.schema
            squared = float(features)
            if schema is not None:
                squared = min(squared, schema.squared_norm_bound(spec.data.encoding, spec.data.features))
            norm_bound = math.sqrt(squared)
        return designs(
            experiment.model,
            features,
            adjacency=spec.adjacency,
            movement=self._movement(view, plan),
            clip=spec.privacy.clip,
            clip_norm=spec.privacy.clip_norm,
            batch_size=self._width(),
            norm_bound=norm_bound,
            seed=spec.seed,
        )

    def _place(
        self, paired: PairedRuns, design: Design, size: int, release: tuple[Release, ...], count: int
    ) -> tuple[float, Design, tuple[World, World], np.ndarray]:
        """How well a design tells its worlds apart in a short pilot, with the canary where it is used most."""
        rows = int(self.sizes.max())

        def made(inside: bool, positions: np.ndarray) -> World:
            return world(design, size, rows, inside=inside, positions=positions)

        everywhere, nowhere = np.arange(size), np.arange(0)
        if is_plain(release):
            all_in, all_out = made(True, everywhere[:1]), made(False, everywhere[:1])
        else:
            all_in = made(True, everywhere)
            all_out = made(False, everywhere) if design.neighbour is not None else made(True, nowhere)
        line = paired.line(all_in, all_out, design.start)
        if not np.any(line) or not np.all(np.isfinite(line)):
            return -math.inf, design, (all_in, all_out), line
        position = 0
        if not is_plain(release):
            position = self._most_used(paired, design, made, line, size)
        pair = made(True, np.array([position])), made(False, np.array([position]))
        pilot = self._pilot(paired, design, pair, line, count)
        if not all(np.all(np.isfinite(seen.target)) for seen in pilot):
            return -math.inf, design, pair, line
        score = scores.learn(pilot)
        # Of pairs that tell about as much, one that can be exhibited tells more.
        bonus = 1.5 if exhibit_of(pilot, score, release) is not None else 1.0
        return bonus * scores.separation(score, pilot), design, pair, line

    def _most_used(
        self, paired: PairedRuns, design: Design, made: Callable[..., World], line: np.ndarray, size: int
    ) -> int:
        """Where the canary is used. Batches that are drawn show half of the records now more, now less, and then
        any place will do; where they show always the same, the sampler has forgotten its randomness, and halving
        the records again and again finds one that it uses."""
        if self._position is not None and self._position < size:
            return self._position
        seeds = self._seeds(64)

        def shown(positions: np.ndarray) -> np.ndarray:
            own = made(True, positions)
            inputs = paired.inputs(own, own, design.start, line, noise=False)
            return paired.observe(inputs, seeds, final=self._final).target

        nothing = shown(np.arange(0))
        low, high = 0, size
        while high - low > 1:
            middle = (low + high) // 2
            lower, upper = shown(np.arange(low, middle)), shown(np.arange(middle, high))
            if np.ptp(lower, axis=0).max() > 1e-3 * np.abs(lower - nothing).max():
                break  # it is random
            more = np.abs(lower - nothing).mean() >= np.abs(upper - nothing).mean()
            low, high = (low, middle) if more else (middle, high)
        self._position = low
        return low

    def _pilot(
        self, paired: PairedRuns, design: Design, pair: tuple[World, World], line: np.ndarray, count: int
    ) -> scores.Pilot:
        seen: list[Seen] = []
        plain: list[Seen] = []
        for own in pair:
            seeds = self._seeds(count)
            for noise, into in ((True, seen), (False, plain)):
                inputs = paired.inputs(own, pair[1], design.start, line, noise=noise)
                into.append(paired.observe(inputs, seeds, final=self._final))
        return scores.Pilot(*seen, *plain)

    def _observe(
        self,
        paired: PairedRuns,
        design: Design,
        pair: tuple[World, World],
        line: np.ndarray,
        which: int,
        count: int,
    ) -> Seen:
        inputs = paired.inputs(pair[which], pair[1], design.start, line, noise=True)
        return paired.observe(inputs, self._seeds(count), final=self._final)

    def _seeds(self, count: int) -> np.ndarray:
        """Seeds that no other trial of this audit has."""
        first, self._next_seed = self._next_seed, (self._next_seed + count) % 2**32
        return ((first + np.arange(count, dtype=np.uint64)) % 2**32).astype(np.uint32)
