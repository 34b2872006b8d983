"""Panels and judges of DP-SCAFFOLD's figures (papers/dp-scaffold.toml): three schemes of noise over time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dither.methods import dp_scaffold
from dither.methods.dp_scaffold import NoiseScheme, ScaffoldParams
from dither.reproduction.figure import WITHOUT_NOISE, Line, Panel, Table, Values, View
from dither.reproduction.judging import Verdict, fact, greater_by, never_below, summary, too_few
from dither.types import Array

SCHEMES = ("scheme 0, constant noise", "scheme 1, decays by round", "scheme 2, decays by step")
SCHEDULES = ("constant", "rounds", "steps")

# Fig. 3: formulas only (methods: σ_0² = 8, one-sample gradient variance 1)

LOCAL_STEPS = 200
INITIAL_VARIANCE = 8.0
TRAINING = dp_scaffold.ScaffoldTraining(
    num_clients=40, cohort_size=8, batch_size=500, server_lr=2.0, control_error=1.0, gradient_variance=1.0
)
DECAY = (1.0, 0.998, 0.99998)
DECAY_START = 200
LAST_ROUND = 700
AFTER_START = np.arange(DECAY_START + 1, LAST_ROUND + 1)


def schedule(scheme: int, rounds: Array) -> NoiseScheme:
    """The noise of Fig. 3 over this many rounds."""
    return NoiseScheme(scheme, rounds, LOCAL_STEPS, DECAY[scheme], DECAY_START)


def epsilon(schedule: NoiseScheme, order: float, const: float, clip: float) -> np.ndarray:
    """The claimed ε: 8 of 40 users, 500 of 2,500 records; the paper leaves order, constant and L open (S6)."""
    params = ScaffoldParams(schedule, 500, clip, client_rate=0.2, data_rate=0.2, alpha=order, const=const)
    return np.asarray(dp_scaffold.epsilon_of_noise(params, initial_variance=INITIAL_VARIANCE, delta=1e-5))


def bound(scheme: int, rounds: np.ndarray, view: View | None = None) -> np.ndarray:
    """Corollary 1, 2 or 3 at the best learning rate, eqs (11)-(13)."""
    training = TRAINING._replace(**(view.formula if view else {}))
    errors = dp_scaffold.error_terms_closed(training, schedule(scheme, rounds), initial_variance=INITIAL_VARIANCE)
    return np.asarray(dp_scaffold.convergence_optimal(errors, num_rounds=rounds, initial_distance=1.0).total)


def excess(scheme: int, rounds: np.ndarray) -> np.ndarray:
    """The claimed ε that gives the paper's number (order 2, constant 2, L = 2; S6), without the ln(1/δ) that a
    fixed order 2 puts into it."""
    return np.asarray(epsilon(schedule(scheme, rounds), 2.0, 2.0, 2.0) - np.log(1e5))


def formula_panels(view: View) -> list[Panel]:
    """Noise over rounds (the paper's Fig. 2), bound and leakage; a line ends where its budget, that of scheme 0
    after all rounds, is spent."""

    def lines(formula: Callable[[int, np.ndarray], np.ndarray], first: int) -> list[Line]:
        def line(scheme: int) -> Line:
            rounds = np.arange(first, LAST_ROUND + 1)
            spent = dp_scaffold.last_round_within(schedule(scheme, LAST_ROUND))
            name, dashed = SCHEMES[scheme], scheme == 0
            return Line(
                name, formula=lambda _: (rounds, formula(scheme, rounds)), dashed=dashed, until=lambda *_: spent
            )

        return [line(scheme) for scheme in (0, 1, 2)]

    return [
        Panel("noise (Fig. 2)", lines(variance, 1), "variance", y_label="noise variance at the round's start"),
        Panel("convergence bound", lines(bound, 100), "bound", y_label="bound on f(w̄) − f*"),
        Panel("leakage above ln(1/δ)", lines(excess, 10), "epsilon", y_label="claimed ε − 11.5129"),
    ]


def variance(scheme: int, rounds: np.ndarray) -> np.ndarray:
    """Noise variance of the first step of a round, eqs (6) and (7)."""
    after = np.maximum(rounds - DECAY_START, 0)
    steps = np.maximum(LOCAL_STEPS * (after - 1), 0) if scheme == 2 else after
    return np.asarray(INITIAL_VARIANCE * DECAY[scheme] ** steps)


def decay_converges_better(view: View) -> Verdict:
    """The bounds of both decaying schemes lie below that of scheme 0 at every R after R_th."""
    constant, by_round, by_step = (bound(scheme, AFTER_START, view) for scheme in (0, 1, 2))
    numbers = [
        summary(f"R = {r}, scheme {s}", b[r == AFTER_START]) | {"standard error": 0.0, "seeds": 0}
        for r in (300, 500, 700)
        for s, b in enumerate((constant, by_round, by_step))
    ]
    lowest = AFTER_START[np.argmax(by_step < by_round)]
    text = f"for R in {AFTER_START[0]} … {AFTER_START[-1]}; scheme 2 is below scheme 1 from R = {lowest} on"
    return fact(bool(np.all((by_round < constant) & (by_step < constant))), text, numbers)


def leakage_is_ordered(view: View) -> Verdict:
    """At equal σ_0, β and R: the decay by round leaks less than the decay by step."""
    statements, holds = [], True
    for decay in (DECAY[2], DECAY[1]):
        by_round, by_step = (
            np.asarray(dp_scaffold.effective_rounds(schedule(scheme, AFTER_START)._replace(decay=decay)))
            for scheme in (1, 2)
        )
        less = by_round < by_step
        holds &= bool(np.all(less[1:]))  # in the first round after R_th scheme 2 starts one step later
        first = AFTER_START[np.argmax(less)]
        statements.append(f"β = {decay:g}: R_eff of scheme 1 below scheme 2 from R = {first} on")
    return fact(holds, "; ".join(statements))


def printed_numbers(view: View) -> list[Table]:
    """DP-SCAFFOLD's 11.5147, 7.6769 and rounds 497/428 beside what its formulas give (S6)."""

    def computed(formula: str, first: float, *others: Any) -> str:
        if formula == "epsilon":
            const, clip, rounds, steps = others
            return f"{float(epsilon(NoiseScheme(0, rounds, steps), first, const, clip)):.5f}"
        decay, steps, budget = others
        return str(dp_scaffold.last_round_within(NoiseScheme(int(first), budget, steps, decay, DECAY_START)))

    declared = view.figure.options["printed"]
    rows = [{**row, "computed": computed(*row["computed"])} for row in declared["rows"]]
    return [Table(declared["title"], rows, declared["note"])]


# Fig. 4


def schemes(view: View, similarity: float) -> list[Values]:
    """The settings of schemes 0, 1 and 2 at one similarity of the clients' records, each at the learning rate that
    does best on validation records in the round in which the scheme stops by the paper's formula."""
    settings = enumerate(_schemes(view, similarity))
    return [view.tuned(values, claimed_stop(view, scheme)) for scheme, values in settings]


def _schemes(view: View, similarity: float) -> list[Values]:
    return [
        {"privacy.noise_schedule": kind, "privacy.noise_decay": decay, "data.similarity": similarity}
        for kind, decay in zip(SCHEDULES, (1.0, *view.grid("decay")), strict=True)
    ]


def stop(scheme: int) -> Callable[[View, int], int]:
    """The last round within what scheme 0 spends in all rounds: by the paper's formula (any order and constant
    give the same rounds), or by the accountant for the cohorts that this seed draws."""

    def last(view: View, seed: int) -> int:
        if not view.proven:
            return claimed_stop(view, scheme)
        values = _schemes(view, view.base.data.similarity)
        budget = view.accounts.proven_epsilon(view.spec(values[0], seed))
        return view.accounts.proven_stop(view.spec(values[scheme], seed), budget)

    return last


def claimed_stop(view: View, scheme: int) -> int:
    """That round by the paper's formula."""
    base, decay = view.base, (1.0, *view.grid("decay"))[scheme]
    start = base.privacy.noise_decay_start
    return dp_scaffold.last_round_within(NoiseScheme(scheme, base.num_rounds, base.local_steps, decay, start))


def accuracy_panels(view: View) -> list[Panel]:
    panels = []
    for similarity in view.grid("similarity"):
        settings = zip(SCHEMES, schemes(view, similarity), strict=True)
        lines = [Line(name, values, until=stop(scheme)) for scheme, (name, values) in enumerate(settings)]
        lines.append(Line("without noise", _noiseless(view, similarity), dashed=True))
        panels.append(Panel(f"{similarity:g}% similarity", lines, "test_accuracy"))
    start = view.base.privacy.noise_decay_start
    later = [
        panel._replace(title=f"{panel.title.split()[0]}, R ≥ R_th", lines=panel.lines[:-1], row=1, first=start)
        for panel in panels
    ]
    return panels + later


def _noiseless(view: View, similarity: float) -> Values:
    return view.tuned({**WITHOUT_NOISE, "data.similarity": similarity})


def tuned_rates(view: View) -> list[Table]:
    """The rates that were chosen."""

    def rate(values: Values) -> str:
        return f"{values['client_lr']:g}"

    def row(similarity: float) -> dict[str, str]:
        each = zip(SCHEMES, schemes(view, similarity), strict=True)
        chosen = {scheme.partition(",")[0]: rate(values) for scheme, values in each}
        return {"similarity": f"{similarity:g}%", **chosen, "without noise": rate(_noiseless(view, similarity))}

    listed = ", ".join(f"{value:g}" for value in view.grid("client_lr"))
    note = f"Chosen among {listed} by the validation accuracy in the round in which the scheme stops, of one seed."
    return [
        Table("Learning rates, tuned alike (as printed)", [row(each) for each in view.grid("similarity")], note)
    ]


def stops(view: View) -> list[list[int]]:
    """Stopping rounds of schemes 0, 1 and 2, one a seed."""
    return [[stop(scheme)(view, seed) for seed in view.seeds] for scheme in (0, 1, 2)]


def stop_earlier(view: View) -> Verdict:
    zero, one, two = stops(view)
    earlier = all(a > b and a > c for a, b, c in zip(zero, one, two, strict=True))
    ranges = ", ".join(f"scheme {s}: {_range(rounds)}" for s, rounds in enumerate((zero, one, two)))
    return too_few(np.zeros(len(zero))) or fact(earlier, f"last full round: {ranges}")


def _range(rounds: list[int]) -> str:
    low, high = min(rounds), max(rounds)
    return str(low) if low == high else f"{low} to {high} over the seeds"


def later_schemes_are_better(view: View) -> Iterator[Verdict]:
    """Schemes 1 and 2 beat scheme 0 at every similarity, and scheme 2 is not beaten by scheme 1."""
    similarities = [f"{similarity:g}%" for similarity in view.grid("similarity")]
    accuracies = [
        [
            view.final(values, "test_accuracy", stop(scheme))
            for scheme, values in enumerate(schemes(view, similarity))
        ]
        for similarity in view.grid("similarity")
    ]
    for what, (constant, *decaying) in zip(similarities, accuracies, strict=True):
        for scheme, accuracy in enumerate(decaying, 1):
            yield greater_by(accuracy, constant, (f"scheme {scheme}", "scheme 0"), what=what)
    _, one, two = zip(*accuracies, strict=True)
    yield never_below(two, one, similarities, ("scheme 2", "scheme 1"), above=False)


def saves_a_quarter(view: View) -> Verdict:
    """ "Up to about 28%" is read as between 25% and 31%."""
    zero, _, two = stops(view)
    best = max(1 - b / a for a, b in zip(zero, two, strict=True))
    text = f"scheme 2 saves {100 * best:.1f}% of {zero[0]} rounds"
    return too_few(np.zeros(len(zero))) or fact(0.25 <= best <= 0.31, text)
