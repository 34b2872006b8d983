"""Panels and judges of Secure FedAvg's figures (papers/secure-fedavg.toml)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dither.methods import secure_fedavg
from dither.reproduction import judging
from dither.reproduction.figure import Line, Panel, Setting, Values, View, curves
from dither.reproduction.judging import Verdict

ACCURACY = "test_accuracy"
PARTITIONS: list[tuple[str, Values]] = [
    ("i.i.d.", {"data.partition": "iid"}),
    ("one class a client", {"data.partition": "one-class"}),
]


def settings(view: View) -> list[Setting]:
    """The lines of a panel: one for each value of the figure's key, or for each ε."""
    options = view.figure.options
    return view.varied(options["label"], options["key"]) if options else view.levels("without DP")


def cases(view: View) -> list[tuple[str, Values]]:
    """The panels: each number Q of local steps with its number of rounds, or each partition."""
    if "num_rounds" not in view.scale.grid:
        return PARTITIONS
    return [
        (f"Q = {steps}", {"local_steps": steps, "num_rounds": rounds})
        for steps, rounds in zip(view.grid("local_steps"), view.grid("num_rounds"), strict=True)
    ]


def panels(view: View) -> list[Panel]:
    """Accuracy against rounds; then Theorem 1 over the same rounds (Fig. 1) or accuracy against bytes (Fig. 2)."""
    shown = [curves(title, settings(view), ACCURACY, more) for title, more in cases(view)]
    if not view.figure.options and not view.proven:
        shown += [theorem_panel(view, title, more) for title, more in cases(view)]
    if view.figure.options.get("key") == "cohort_size":
        sent = {"row": 1, "x_label": "MB sent, up and down", "per_round": megabytes}
        shown += [curves(title, settings(view), ACCURACY, more, **sent) for title, more in cases(view)]
    return shown


def megabytes(view: View, values: Values) -> float:
    """What a round sends: a model to and from each client, four bytes a parameter."""
    spec = view.spec(values, 0)
    count = view.accounts.estimated("num-params", view.spec({}, 0), lambda run: {"num_params": run.num_params})
    return 2e-6 * 4 * spec.cohort_size * float(count["num_params"])


# Theorem 1, with what is public: 14 columns of at most 1 and the bias bound a record's norm

NORM_SQ, RECORDS, PARAMS, VARIANCE = 15.0, 32_561, 104, 4.0  # γ_k² ≤ G²
INITIAL_DISTANCE_SQ = 1.0  # not known; B exceeds its term by orders of magnitude


def theorem_panel(view: View, title: str, more: Values) -> Panel:
    """The bound of Theorem 1 on F − F* for each ε."""

    def line(label: str, level: Values) -> Line:
        spec = view.spec({**level, **more}, 0)

        def bound(view: View) -> tuple[np.ndarray, np.ndarray]:
            rounds, convexity = np.arange(1, spec.num_rounds + 1), 2 * spec.model.l2
            training = secure_fedavg.SecureFedavgTraining(
                smoothness=NORM_SQ / 4 + convexity,
                local_steps=spec.local_steps,
                batch_size=spec.batch_size,
                clip_norm=spec.privacy.clip_norm,
                num_params=PARAMS,
                num_records=RECORDS,
                epsilon=min(spec.privacy.epsilon, 1e12),  # ∞: without noise
                delta=spec.privacy.delta,
                cohort_size=spec.cohort_size,
                weighted_variance=VARIANCE / spec.num_clients,
                heterogeneity=0.0,
                num_clients=spec.num_clients,
            )
            total = secure_fedavg.convergence(
                training,
                strong_convexity=convexity,
                num_steps=rounds * spec.local_steps,
                initial_distance_sq=INITIAL_DISTANCE_SQ,
            ).total
            return rounds, np.asarray(total)

        return Line(label, formula=bound)

    lines = [line(*setting) for setting in settings(view)]
    return Panel(f"Theorem 1, {title}", lines, "bound", log=True, row=1, y_label="bound on F − F*")


def rises_with_epsilon(view: View) -> Iterator[Verdict]:
    for title, more in cases(view):
        yield judging.ordered_within_noise(*view.finals(settings(view), ACCURACY, more), what=title)


def spread_is_small_for_one_step(view: View) -> Verdict:
    """Without DP minus the smallest ε; "much smaller" is read as less than half."""
    spreads = []
    for _, more in cases(view):
        accuracy, _ = view.finals(settings(view), ACCURACY, more)
        spreads.append(accuracy[-1] - accuracy[0])
    few, many = (title for title, _ in cases(view))
    return judging.greater_by(spreads[1], 2 * spreads[0], (f"spread at {many}", f"twice the spread at {few}"))


def ordered(view: View, panel: int, rising: bool = True, broken: bool = False) -> Verdict:
    """The last accuracies of a panel follow the order of its settings; or something breaks it."""
    judge = judging.order_is_broken if broken else judging.ordered_within_noise
    return judge(*view.finals(settings(view), ACCURACY, cases(view)[panel][1]), rising=rising)
