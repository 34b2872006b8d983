"""The audit of a spec: for each adversary view, claimed, proven and attacked ε.

report = audit("secure-fedavg", views=("upload",), trials=10_000, confidence=0.99)
report.rows[0].attacked.value, report.violations
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dither import data
from dither.accounting import ProvenRow
from dither.auditing import bounds, likelihood
from dither.auditing.neighbours import NeighbouringPair, PairSetting, TrialData, neighbouring_pairs
from dither.auditing.report import AttackResult, Audit, AuditRow, report_row
from dither.auditing.trials import (
    VIEWS,
    CodeUnderAudit,
    KeysOf,
    Observations,
    PairedTrials,
    TargetSchedule,
    batch_width,
    most_exposed,
    run_canaries,
    target_schedule,
)
from dither.errors import SpecError, did_you_mean
from dither.experiment.build import Experiment, build_experiment, claim_after, origin, squared_norm_bound
from dither.experiment.folder import Unfinished
from dither.experiment.report import Report, run_folder
from dither.privacy import sampling
from dither.spec import Spec
from dither.types import Algorithm, Hyper, Release, RoundInfo

_SEARCH = 256  # trials with which pairs are compared
_PILOT, _MOST_PILOT = 2048, 32_768
_OPERATIONS = 1.2e12  # of one row: about a minute on two cores
_COUPLED = 256  # pilot trials that show whether what is seen is linear in the noise
_FEWEST = 200  # trials, however large the model


class _Options(NamedTuple):
    """What an audit was asked for."""

    trials: int
    confidence: float
    canaries: int
    rounds: int | None
    seed: int


# reason: the public entry point; every keyword is one choice of the user's
def audit(
    spec: Spec | str | Path | Mapping[str, Any] | Experiment,
    *,
    values: Mapping[str, Any] | None = None,
    views: Sequence[str] = VIEWS,
    trials: int = 10_000,
    confidence: float = 0.95,
    canaries: int = 0,
    rounds: int | None = None,
    completed_rounds: int | None = None,
    seed: int = 0,
    data_dir: str | Path | None = None,
    dataset: data.Dataset | None = None,
    build: Callable[[Hyper], Algorithm] | None = None,
    keys: KeysOf | None = None,
    on_row: Callable[[AuditRow], None] | None = None,
    keep: str | Path | None = None,
    model: Any = None,
) -> Audit:
    """Attack a spec (or a preset, a TOML file, a run folder, an `Experiment`): a lower bound on ε for each view.

    All rows hold together with probability `confidence`, whatever form of bound is the largest of each. `trials`
    are run with the canary, and as many without. `rounds` attacks only the target's first rounds, which is still
    a lower bound for the whole run. `completed_rounds` says that a run ended early. `canaries` adds the bounds
    from one run with that many canaries. `build` and `keys` replace the method's and the engine's own code, to
    test whether the audit notices. `keep` is a folder for finished rows until the last is done, so that an
    interrupted audit continues.
    """
    options = _Options(trials, confidence, canaries, rounds, seed)
    _check_options(views, options)
    folder = run_folder(spec)
    if folder is not None:
        spec, finished_run = folder.spec(), Report.read(folder.path)
        if finished_run is not None and not values:
            completed_rounds = finished_run.rounds
    if isinstance(spec, Experiment):
        experiment = spec
    else:
        own = {} if model is None else {"model.name": model}
        spec = Spec.from_any(spec).with_values({**(values or {}), **own})
        experiment = build_experiment(spec, data_dir=data_dir, dataset=dataset)
    if completed_rounds is not None:
        experiment = _ended_after(experiment, completed_rounds)
    if experiment.plan.per_client:
        raise SpecError(f"{experiment.spec.method} protects whole clients; an audit replaces one record")
    code = CodeUnderAudit.of(experiment)
    code = code._replace(build=build or code.build, keys=keys or code.keys)
    accountant, claim = experiment.accountant(), experiment.prepared.claim.to_json()
    if experiment.plan.epsilons:  # the proof on trial is that of the client that is attacked
        sizes = np.asarray(experiment.partition.size)
        accountant = accountant.of([most_exposed(experiment.cohorts, sizes)])
    proofs = accountant.table()
    attacks = _attacks(views, options, experiment, claim)
    # A union bound over the rows keeps the confidence.
    options = options._replace(confidence=1 - (1 - confidence) / max(1, len(attacks)))
    auditor = _Auditor(experiment, code, proofs, options)
    about = [origin(experiment, {}), options, completed_rounds, attacks]
    finished = Unfinished(None if build or keys else keep, "audit", about)
    rows, results = [], []
    for view, unit in attacks:
        result = auditor.restored(finished.get(f"{view} {unit}"))
        if result is None:
            result = auditor.attack_once() if unit == "one run" else auditor.attack(view, unit)
            finished.put(f"{view} {unit}", auditor.state(result))
        results.append(result)
        rows.append(report_row(result, experiment, proofs, claim, confidence))
        if on_row:
            on_row(rows[-1])
    finished.done()
    notes = list(auditor.notes)
    if experiment.spec.data.path:
        notes.append("local, not private: measured with your own records at hand, which no ε covers")
    return Audit(experiment.spec, confidence, claim, rows, notes, results)


def _check_options(views: Sequence[str], options: _Options) -> None:
    for view in views:
        if view not in VIEWS:
            raise SpecError(f"unknown view={view!r}{did_you_mean(view, VIEWS)}")
    if not 0.5 < options.confidence < 1:
        raise SpecError(f"confidence={options.confidence} must lie between 0.5 and 1")
    if options.trials < _FEWEST:
        raise SpecError(f"trials={options.trials} are too few to show anything; give at least {_FEWEST}")


def _ended_after(experiment: Experiment, rounds: int) -> Experiment:
    """The experiment of a run that ended after this many rounds."""
    claim = claim_after(experiment, rounds) if rounds < len(experiment.cohorts) else experiment.prepared.claim
    experiment = experiment.first_rounds(rounds)
    return replace(experiment, prepared=experiment.prepared._replace(claim=claim))


def _attacks(
    views: Sequence[str], options: _Options, experiment: Experiment, claim: dict[str, Any]
) -> list[tuple[str, str]]:
    """(view, unit) of each row."""
    attacks = [(view, "run") for view in views]
    if "upload" in views and "message" in (claim["unit"], experiment.spec.privacy.unit):
        attacks.insert(0, ("upload", "message"))
        if options.rounds == 1:
            attacks.remove(("upload", "run"))  # it would be the same
    if options.canaries:
        attacks.append(("upload", "one run"))
    return attacks


class _PlacedPair(NamedTuple):
    """A pair of data sets with the canary in its place, and how well a short pilot told them apart."""

    separation: float
    pair: NeighbouringPair
    inside: TrialData
    outside: TrialData
    direction: np.ndarray


class _Auditor:
    """Attacks the views of one experiment one after the other."""

    def __init__(
        self, experiment: Experiment, code: CodeUnderAudit, proofs: list[ProvenRow], options: _Options
    ) -> None:
        self.experiment, self.code, self.proofs, self.options = experiment, code, proofs, options
        self.notes: list[str] = []
        self._final = False  # whether the view at hand is the final model alone
        self._next_seed = (options.seed * 0x9E3779B1 + 1) % 2**32
        self._position: int | None = None
        self._compiled: dict[tuple[str, int], PairedTrials] = {}
        self.sizes = np.asarray(experiment.partition.size)
        self.width = batch_width(experiment)
        # What the method reveals says how it samples; the code under audit may be another.
        self.algorithm = experiment.prepared.build(experiment.prepared.hyper)

    # Between rows

    def state(self, result: AttackResult) -> dict[str, Any]:
        """A result, and what the results after it depend on."""
        return {**result._asdict(), "after": [self._next_seed, self._position, self.notes]}

    def restored(self, state: dict[str, Any] | None) -> AttackResult | None:
        """The result of a state, and this auditor as it was after it."""
        if state is None:
            return None
        self._next_seed, self._position, self.notes = state["after"]
        return AttackResult.from_json(state)

    # One row

    def attack(self, view: str, unit: str) -> AttackResult:
        """Choose the best pair, fit the test statistic to a pilot, then count trials."""
        spec = self.experiment.spec
        schedule = self._schedule(view, 1 if unit == "message" else self.options.rounds)
        releases = self._releases(schedule)
        trials, schedule, affordable = self._affordable(view, schedule)
        paired = self._paired_trials(view, schedule)
        self._final = view == "final"
        use_rate = _use_rate(releases, spec.local_steps)
        search = min(int(np.clip(40 / use_rate, _SEARCH, 8192)), max(affordable // 20, 8))
        placed = max(
            (self._place(paired, pair, releases, search) for pair in self._pairs(view, schedule)),
            key=lambda one: one.separation,
        )
        if placed.separation == -math.inf:
            raise SpecError(f"view {view!r}: one record moves nothing here, or nothing finite; there is no attack")

        pilot_size = min(int(np.clip(100 / use_rate, _PILOT, _MOST_PILOT)), max(affordable // 2, 50))
        pilot = self._pilot(paired, placed, pilot_size)
        ratio = likelihood.fit(pilot)
        pilot_scores = ratio(pilot.noisy_in), ratio(pilot.noisy_out)
        observed = [self._observe(paired, placed, dataset, trials) for dataset in (placed.inside, placed.outside)]
        scores = ratio(observed[0]), ratio(observed[1])

        # A union bound over the forms keeps the confidence.
        gaussian = likelihood.is_unsampled(releases) and pilot.is_linear()
        exhibited = likelihood.exhibited_pair(pilot, ratio, releases)
        each = 1 - (1 - self.options.confidence) / (1 + gaussian + (exhibited is not None))
        delta = spec.privacy.delta
        thresholds = bounds.choose_thresholds(*pilot_scores, trials=trials, delta=delta, error=1 - each)
        lower_bounds = [bounds.count_bound(scores, thresholds, delta=delta, confidence=each)]
        mu_thresholds = bounds.mu_thresholds(*pilot_scores) if gaussian else []
        if gaussian:
            lower_bounds.append(bounds.mu_bound(scores, mu_thresholds, delta=delta, confidence=each))
        if exhibited is not None:
            lower_bounds.append(bounds.exhibited_bound(exhibited, delta=delta, confidence=each))
        rounds = len(schedule.rounds)
        return AttackResult(view, unit, placed.pair.name, rounds, lower_bounds, *scores, thresholds, mu_thresholds)

    def attack_once(self) -> AttackResult:
        """Many canaries in one run."""
        canaries = self.options.canaries
        schedule = self._schedule("upload", self.options.rounds)
        result = run_canaries(
            self.experiment,
            self.code,
            schedule,
            canaries=canaries,
            movement=self._movement("upload", schedule),
            seed=self._seeds(1)[0],
        )
        forms = [bounds.one_run_bound]
        bent = self.experiment.plan.max_norm or self.experiment.spec.secagg.bound
        if likelihood.is_unsampled(self._releases(schedule)) and not bent:
            forms.append(bounds.one_run_gaussian_bound)
        shares = (0.1, 0.3, 1.0)
        each = 1 - (1 - self.options.confidence) / (len(shares) * len(forms))
        guesses = [bounds.count_guesses(result.scores, result.included, share) for share in shares]
        delta = self.experiment.spec.privacy.delta
        best = [
            max((form(some, delta=delta, confidence=each) for some in guesses), key=lambda bound: bound.value)
            for form in forms
        ]
        scores = result.scores[result.included], result.scores[~result.included]
        rounds = len(schedule.rounds)
        return AttackResult("upload", "one run", f"{canaries} canaries", rounds, best, *scores, [], [])

    # What is attacked

    def _schedule(self, view: str, rounds: int | None) -> TargetSchedule:
        spec = self.experiment.spec
        return target_schedule(
            self.experiment.cohorts,
            self.sizes,
            view=view,
            rounds=rounds,
            colluders=min(spec.colluders, spec.cohort_size - 1) if view == "sum" else 0,
        )

    def _releases(self, schedule: TargetSchedule) -> tuple[Release, ...]:
        target = schedule.target
        info = RoundInfo(int(schedule.rounds[0]), target, int(self.sizes[target]), int(schedule.cohort_sizes[0]))
        return tuple(r for r in self.algorithm.releases(info) if r.channel == "uplink")

    def _paired_trials(self, view: str, schedule: TargetSchedule) -> PairedTrials:
        """Broadcasts and the final model share a compiled program."""
        key = ("broadcast" if view == "final" else view, len(schedule.rounds))
        if key not in self._compiled:
            self._compiled[key] = PairedTrials(self.experiment, self.code, view, schedule)
        return self._compiled[key]

    def _affordable(self, view: str, schedule: TargetSchedule) -> tuple[int, TargetSchedule, int]:
        """Fewer rounds, then fewer trials, if all of them would take too long; a lower bound remains one. Also
        returns how many trials are affordable, which limits the pilots."""
        spec = self.experiment.spec
        members = schedule.cohorts.shape[1] if view != "upload" else 1
        if view in ("broadcast", "final"):
            members *= 2  # the adversary's own expectation
        operations = members * (
            spec.local_steps * self.experiment.num_params * (6.0 * self.width + 60.0) + self._sampling_operations()
        )
        wanted, rounds = self.options.trials, len(schedule.rounds)
        fit = int(np.clip(_OPERATIONS / (2 * wanted * operations), 1, rounds))
        if fit < rounds and self.options.rounds is None and view != "final":
            self.notes.append(f"view {view}: the first {fit} of {rounds} rounds are attacked (--rounds for more)")
            schedule = schedule.first(fit)
        affordable = int(_OPERATIONS / (2 * operations * len(schedule.rounds)))
        trials = int(np.clip(affordable, _FEWEST, wanted))
        if trials < wanted:
            self.notes.append(f"view {view}: {trials} trials instead of {wanted}, as the model is large")
        return trials, schedule, affordable

    def _sampling_operations(self) -> float:
        """About what drawing a round's batches costs: sorts for permutations, comparisons for small subsets."""
        spec, size = self.experiment.spec, float(self.sizes.max())
        if spec.batch_sampling in ("shuffled", "disjoint"):
            return 2000.0 * size * (2 if spec.batch_sampling == "shuffled" else 1)
        if spec.batch_sampling == "fixed":
            return 20.0 * spec.local_steps * spec.batch_size**2
        return 20.0 * spec.local_steps * size

    def _movement(self, view: str, schedule: TargetSchedule) -> float:
        """How far training can carry the model along the direction, as long as broadcasts are not chosen again."""
        spec, hyper = self.experiment.spec, self.experiment.prepared.hyper
        lr = float(hyper.get("client_lr", spec.client_lr))
        clip_norm = float(hyper.get("clip_norm", 1.0))
        noise = float(np.max(np.asarray(hyper.get("noise_std", 0.0))))
        rounds = len(schedule.rounds) if view in ("broadcast", "final") else 1
        moved = lr * spec.local_steps * clip_norm * rounds + 6 * lr * noise * math.sqrt(spec.local_steps * rounds)
        return min(moved, 500.0)

    # Pairs of data sets

    def _pairs(self, view: str, schedule: TargetSchedule) -> list[NeighbouringPair]:
        experiment, spec = self.experiment, self.experiment.spec
        proofs = [row for row in self.proofs if row.view == view and row.adjacency == spec.adjacency]
        features = experiment.problem.x.shape[1]
        norm_bound = None
        if any(row.recipe.startswith("R6 G") for row in proofs):  # it rests on a bound of the records' norm
            bound = squared_norm_bound(spec, experiment.dataset)
            norm_bound = math.sqrt(min(float(features), math.inf if bound is None else bound))
        setting = PairSetting(
            adjacency=spec.adjacency,
            movement=self._movement(view, schedule),
            clip=spec.privacy.clip,
            clip_norm=spec.privacy.clip_norm,
            batch_size=self.width,
            norm_bound=norm_bound,
            seed=spec.seed,
        )
        return neighbouring_pairs(experiment.model, features, setting)

    def _place(
        self, paired: PairedTrials, pair: NeighbouringPair, releases: tuple[Release, ...], count: int
    ) -> _PlacedPair:
        """The pair with the canary where it is used most, and how well a short pilot tells its data sets apart."""
        size, rows = int(self.sizes[paired.schedule.target]), int(self.sizes.max())
        everywhere, unsampled = np.arange(size), likelihood.is_unsampled(releases)

        def dataset(inside: bool, positions: np.ndarray) -> TrialData:
            return pair.dataset(size, rows, inside=inside, positions=positions)

        if unsampled:
            inside, outside = dataset(True, everywhere[:1]), dataset(False, everywhere[:1])
        else:
            inside = dataset(True, everywhere)
            outside = dataset(False, everywhere) if pair.neighbour is not None else dataset(True, everywhere[:0])
        direction = paired.direction(inside, outside, pair.start)
        unusable = _PlacedPair(-math.inf, pair, inside, outside, direction)
        if not np.any(direction) or not np.all(np.isfinite(direction)):
            return unusable
        position = 0 if unsampled else self._most_used(paired, pair, dataset, direction)
        inside, outside = (dataset(which, np.array([position])) for which in (True, False))
        placed = _PlacedPair(0.0, pair, inside, outside, direction)
        pilot = self._pilot(paired, placed, count)
        if not all(np.all(np.isfinite(observed.target)) for observed in pilot.seen()):
            return unusable
        ratio = likelihood.fit(pilot)
        # Of pairs that tell about as much, one that can be exhibited tells more.
        bonus = 1.5 if likelihood.exhibited_pair(pilot, ratio, releases) is not None else 1.0
        return placed._replace(separation=bonus * ratio.separation(pilot))

    def _most_used(
        self,
        paired: PairedTrials,
        pair: NeighbouringPair,
        dataset: Callable[[bool, np.ndarray], TrialData],
        direction: np.ndarray,
    ) -> int:
        """A position at which the canary is used. With random batches, half of the records show now more, now
        less, and any position will do. Where they always show the same, the sampler has lost its randomness, and
        bisection finds a record that it uses."""
        size = int(self.sizes[paired.schedule.target])
        if self._position is not None and self._position < size:
            return self._position
        seeds = self._seeds(64)

        def noiseless(positions: np.ndarray) -> np.ndarray:
            inside = dataset(True, positions)
            inputs = paired.inputs(inside, inside, pair.start, direction, noise=0.0)
            return paired.observe(inputs, seeds, final=self._final).target

        without = noiseless(np.arange(0))
        low, high = 0, size
        while high - low > 1:
            middle = (low + high) // 2
            lower, upper = noiseless(np.arange(low, middle)), noiseless(np.arange(middle, high))
            if np.ptp(lower, axis=0).max() > 1e-3 * np.abs(lower - without).max():
                break  # it is random
            more = np.abs(lower - without).mean() >= np.abs(upper - without).mean()
            low, high = (low, middle) if more else (middle, high)
        self._position = low
        return low

    # Trials

    def _pilot(self, paired: PairedTrials, placed: _PlacedPair, count: int) -> likelihood.Pilot:
        noisy, noiseless = [], []
        for dataset in (placed.inside, placed.outside):
            first = self._next_seed
            noisy.append(self._observe(paired, placed, dataset, count))
            self._next_seed = first  # the same seeds without noise
            noiseless.append(self._observe(paired, placed, dataset, count, noise=0.0))
        # Some seeds of those without the canary once more: with it, and at half the noise.
        after, few = self._next_seed, min(count, _COUPLED)

        def again(dataset: TrialData, noise: float) -> np.ndarray:
            self._next_seed = first
            return self._observe(paired, placed, dataset, few, noise=noise).target

        alone, still = noisy[1].target[:few], noiseless[1].target[:few]
        bent = again(placed.inside, 1.0) - alone - (again(placed.inside, 0.0) - still)
        curved = alone - still - 2 * (again(placed.outside, 0.5) - still)
        self._next_seed = after
        return likelihood.Pilot(noisy[0], noisy[1], noiseless[0], noiseless[1], bent, curved)

    def _observe(
        self, paired: PairedTrials, placed: _PlacedPair, dataset: TrialData, count: int, *, noise: float = 1.0
    ) -> Observations:
        inputs = paired.inputs(dataset, placed.outside, placed.pair.start, placed.direction, noise=noise)
        return paired.observe(inputs, self._seeds(count), final=self._final)

    def _seeds(self, count: int) -> np.ndarray:
        """Seeds that no other trial of this audit has."""
        first, self._next_seed = self._next_seed, (self._next_seed + count) % 2**32
        return ((first + np.arange(count, dtype=np.uint64)) % 2**32).astype(np.uint32)


def _use_rate(releases: tuple[Release, ...], local_steps: int) -> float:
    """Probability that one record is used in one participation."""
    if not releases:
        return 1.0
    scheme = releases[0].sampling
    if scheme.kind.endswith("-round"):
        return max(scheme.rate, 1e-9)
    return max(sampling.used_in_round(scheme, local_steps), 1e-9)
