"""The ledger under attack: random runs are charged to a real one, and what it says was spent is compared with what
they showed.

history   runs of random lengths, noise and batches, on two data sets that may turn out to be the same, paid as
          training pays (`ledger.runs`): in pieces, beside each other, by several processes, killed before or after
          rounds were made, made again with fresh noise or the same, stopped by what they showed, refused. What
          a record showed in all of them is composed by dp-accounting, rounded down
choice    an adversary that looks at the first output before it selects the second of several releases, each the
          quietest that the ledger lets pass: its δ is an integral over what it saw
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
from scipy.stats import norm

from dither.accounting import ZERO_OUT, Conditions
from dither.accounting.accountant import Accountant
from dither.accounting.ledger import Budget, Charge, Ledger, filter
from dither.accounting.ledger.runs import EVERY_RECORD, Spending
from dither.auditing.bounds import optimistic_loss
from dither.errors import BudgetExhausted
from dither.types import Release, RoundInfo, Sampling

_DATA = "d" * 16, "e" * 16
_SITE = "site=0"
_LOUD = 1.5  # noise of the clients with more records
_POPULATION = 100
_ACTIONS = 14
_STEP = 1e-3  # of dp-accounting's grid
_QUIETEST, _LOUDEST = 0.05, 200.0

Shown = Counter[tuple[float, float]]  # (noise std, sampling rate) of what a record showed, and how often


class SpendingCase(NamedTuple):
    """What was drawn, the ε that the ledger answers for, the ε that was shown, and by which attack."""

    values: dict[str, Any]
    proven: float
    attacked: float
    attack: str


def check_spending(rng: np.random.Generator) -> SpendingCase:
    """One drawn history or choice."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        return _choice(rng, path) if rng.random() < 0.25 else _History(rng, path).attack()


# Histories


class _Run(NamedTuple):
    name: str
    dataset: str
    kind: str
    rate: float
    std: float
    uses: int
    sizes: np.ndarray
    cohorts: list[np.ndarray]
    named: bool  # clients have accounts of their own
    replay: bool
    made: list[tuple[int, int]]

    def noise(self, client: int) -> float:
        return self.std * (_LOUD if self.sizes[client] > 12 else 1.0)

    def releases(self, info: RoundInfo) -> tuple[Release, ...]:
        stated = "add/remove" if self.kind == "poisson" else ZERO_OUT
        batch = round(self.rate * _POPULATION)
        sampling = Sampling(self.kind, self.rate, stated, 0.0, batch, _POPULATION, True)
        return (Release("uplink", self.noise(info.client), 1.0, self.uses, sampling, "drawn"),)

    def spending(self, ledger: Ledger) -> Spending:
        fewest = min(map(len, self.cohorts))
        plan = SimpleNamespace(
            cohorts=self.cohorts, client_sizes=self.sizes, num_clients=len(self.sizes), lattice=None
        )
        conditions = Conditions(cohort_size=fewest, others_noise=(fewest - 1) / _LOUD**2, encoded=True)
        told = SimpleNamespace(plan=plan, conditions=conditions, ledger_releases=self.releases)
        names = [f"site={client}" for client in range(len(self.sizes))] if self.named else None
        return Spending(
            ledger,
            cast(Accountant, told),
            run=self.name,
            dataset=self.dataset,
            clients=names,
            replay=self.replay,
        )

    def shown(self, client: int, view: str) -> Shown:
        """What a record of this client showed."""
        numbers = [number for start, stop in self.made for number in range(start, stop)]
        shown: Shown = Counter()
        for number in set(numbers) if self.replay else numbers:
            cohort = self.cohorts[number].tolist()
            if client in cohort:
                own = [client] if view == "upload" else cohort
                std = math.hypot(*(self.noise(each) for each in own))
                shown[std, self.rate] += self.uses
        return shown

    def most(self, view: str) -> Shown:
        """Of the client that showed most, roughly."""
        each = [self.shown(client, view) for client in range(len(self.sizes))]
        return max(each, key=lambda shown: sum(n * (rate / std) ** 2 for (std, rate), n in shown.items()))


class _History:
    def __init__(self, rng: np.random.Generator, path: Path) -> None:
        self.rng, self.path = rng, path
        self.view = str(rng.choice(["upload", "upload", "sum"]))
        self.budget = Budget(
            round(float(rng.uniform(0.5, 8.0)), 2), float(rng.choice([1e-5, 1e-3])), self.view, ZERO_OUT
        )
        self.ledger = Ledger(path, anchored=False)
        for dataset in _DATA:
            self.ledger.set_budget(dataset, self.budget)
            if rng.random() < 0.3:
                self.ledger.set_budget(dataset, self.budget._replace(epsilon=self.budget.epsilon / 2), _SITE)
        self.runs: list[_Run] = []
        self.joined = False
        self.story: list[str] = []
        self.found: list[tuple[float, float]] = []

    def attack(self) -> SpendingCase:
        last = 0.0
        for _ in range(_ACTIONS):
            if not self.joined and self.rng.random() < 0.1 and self._same_clients():
                self._compare()
                self.ledger.identify(_DATA[1], name=_DATA[0])
                self.joined = True
                self.story.append("joined")
            if not self.runs or self.rng.random() < 0.3:
                self.runs.append(self._drawn(last))
            # An output decides what comes next: whose turn it is here, how quiet the next run is there.
            run = self.runs[-1 if last > 0 else int(self.rng.integers(len(self.runs)))]
            last = float(self.rng.normal())
            self._advance(run, last)
        self._compare()
        proven, attacked = max(self.found, key=lambda pair: pair[1] / pair[0] if pair[0] else 0.0)
        values = {"method": "ledger", "budget": str(self.budget), "story": self.story}
        return SpendingCase(values, proven, attacked, "history")

    def _same_clients(self) -> bool:
        return self.ledger.budget(_DATA[0], _SITE) == self.ledger.budget(_DATA[1], _SITE)

    def _drawn(self, last: float) -> _Run:
        rng, clients, rounds = self.rng, int(self.rng.integers(2, 5)), int(self.rng.integers(1, 7))
        kind, rate = [("full", 1.0), ("full", 1.0), ("poisson", 0.05), ("poisson", 0.3), ("fixed", 0.1)][
            int(rng.integers(5))
        ]
        few = int(rng.integers(2, clients + 1))
        return _Run(
            name=f"run {len(self.runs)}",
            dataset=_DATA[int(rng.integers(2))],
            kind=kind,
            rate=rate,
            std=round(float(np.exp(rng.uniform(0.0, 2.5))) * (0.7 if last > 0 else 1.4) * math.sqrt(rate), 3),
            uses=int(rng.integers(1, 4)) if self.view == "upload" else 1,
            sizes=np.array([12 + 4 * (client % 2) for client in range(clients)]),
            cohorts=[rng.choice(clients, few, replace=False) for _ in range(rounds)],
            named=bool(rng.random() < 0.4),
            replay=bool(rng.random() < 0.3),
            made=[],
        )

    def _advance(self, run: _Run, output: float) -> None:
        """Pay for some rounds of a run and make them; where it was killed, a new process goes on from a
        checkpoint."""
        rng = self.rng
        start = run.made[-1][1] if run.made else 0
        if start and rng.random() < 0.3:
            start = int(rng.integers(start))
        stop = min(start + int(rng.integers(1, 4)), len(run.cohorts))
        if start >= stop:
            return
        ledger = self.ledger if rng.random() < 0.7 else Ledger(self.path, anchored=False)
        what = f"{run.name} ({run.kind}, {run.rate:g}, std {run.std:g}) of {run.dataset[0]}: {start} to {stop}"
        try:
            stop = run.spending(ledger).pay(start, stop)
        except BudgetExhausted:
            self.story.append(f"{what}, refused")
            return
        if output > -1.0:  # else: killed between the charge and the rounds
            run.made.append((start, stop))
        self.story.append(f"{what}, paid to {stop}")

    def _compare(self) -> None:
        """What the ledger says of each account, and what its records showed."""
        for dataset in _DATA:
            runs = [run for run in self.runs if self.joined or run.dataset == dataset]
            for account in (EVERY_RECORD, _SITE):
                (told,) = self.ledger.spent(dataset, account)
                budget = self.ledger.budget(dataset, account)
                shown: Shown = Counter()
                for run in runs:
                    named = account == _SITE and run.named
                    shown += run.shown(0, self.view) if named else run.most(self.view)
                # A budget refuses before it is passed, but two accounts that kept it may be joined.
                limit = budget.epsilon if budget and not self.joined else math.inf
                proven = min(told.epsilon, limit)
                self.found.append((proven, _composed(shown, told.delta)))


def _composed(shown: Shown, delta: float) -> float:
    """ε of these releases together, rounded down, by dp-accounting."""
    squares = sum(count / std**2 for (std, rate), count in shown.items() if rate == 1)
    parts = [((1 / math.sqrt(squares), 1.0), 1)] if squares else []
    parts += [(key, count) for key, count in shown.items() if key[1] < 1]
    if not parts:
        return 0.0
    step = max(_STEP, *((1 / std + 10) / std / 1e4 for (std, _), _ in parts))  # the grid holds the widest loss
    composed = [optimistic_loss(*key, step).self_compose(count) for key, count in parts]
    return float(reduce(lambda whole, part: whole.compose(part), composed).get_epsilon_for_delta(delta))


# Choices


def _choice(rng: np.random.Generator, path: Path) -> SpendingCase:
    """A Gaussian output, and then whichever of several releases is worst for what it showed."""
    epsilon, delta = round(float(rng.uniform(0.5, 3.0)), 2), float(rng.choice([1e-3, 1e-4]))
    ledger, rates = Ledger(path, anchored=False), (1.0, round(float(rng.uniform(1.05, 1.6)) * delta, 7), 0.02)
    ledger.set_budget(_DATA[0], Budget(epsilon, delta))
    first = round(float(np.exp(rng.uniform(0.7, 2.5))) / epsilon, 3)
    if not _passes(ledger, "first", first, 1.0):
        first = _quietest(ledger, 1.0) * 2
    ledger.charge("first", _DATA[0], _charges(first, 1.0), rounds=(0, 1), plan=lambda: _charges(first, 1.0))
    seconds = [(_quietest(ledger, rate), rate) for rate in rates]
    seen = np.linspace(-10.0, 10.0, 4001)  # of the first, in the world with the record, in units of its noise
    density = norm.pdf(seen) * (seen[1] - seen[0])
    losses = (0.5 / first + seen) / first

    def adversary(at: float) -> float:
        """Its δ."""
        return float(density @ np.max([_delta(at - losses, std, rate) for std, rate in seconds], axis=0))

    low, high, allowed = 0.0, 4 * epsilon, delta * (1 + filter.TRACE)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if adversary(middle) > allowed else (low, middle)
    values = {"method": "ledger", "budget": f"ε={epsilon} δ={delta}", "first": first, "seconds": seconds}
    return SpendingCase(values, epsilon, low, "choice")


def _charges(std: float, rate: float) -> list[Charge]:
    sampling = Sampling("full" if rate == 1 else "poisson", rate, "add/remove")
    return [Charge(EVERY_RECORD, [((Release("uplink", std, 1.0, 1, sampling, "drawn"),), 1)])]


def _passes(ledger: Ledger, run: str, std: float, rate: float) -> bool:
    return ledger.affordable(run, _DATA[0], lambda rounds: _charges(std, rate), 1) == 1


def _quietest(ledger: Ledger, rate: float) -> float:
    """The least noise that passes, within a hundredth."""
    low, high = _QUIETEST, _LOUDEST
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _passes(ledger, "second", middle, rate) else (middle, high)
    return high


def _delta(epsilon: np.ndarray, std: float, rate: float) -> np.ndarray:
    """δ of one release with the record used at this rate, against the world without it."""
    grown = (np.exp(epsilon) - 1 + rate) / rate
    at = np.log(np.maximum(grown, 1e-300))
    whole = norm.cdf(0.5 / std - at * std) - grown * norm.cdf(-0.5 / std - at * std)
    return np.asarray(np.where(grown > 0, rate * whole, 1 - np.exp(epsilon)))
