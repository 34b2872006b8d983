"""Panels and judges of Secure FedAvg's figures (papers/secure-fedavg.toml)."""

from __future__ import annotations

from dither.reproduction import judging
from dither.reproduction.figure import Panel, Setting, Values, View, curves
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
    return [curves(title, settings(view), ACCURACY, more) for title, more in cases(view)]


def rises_with_epsilon(view: View) -> Verdict:
    verdicts = [
        judging.ordered_within_noise(*view.finals(settings(view), ACCURACY, more), what=title)
        for title, more in cases(view)
    ]
    return judging.all_of(*verdicts)


def spread_is_small_for_one_step(view: View) -> Verdict:
    """Without DP minus the smallest ε; "much smaller" is read as less than half."""
    spreads = []
    for _, more in cases(view):
        accuracy, _ = view.finals(settings(view), ACCURACY, more)
        spreads.append(accuracy[-1] - accuracy[0])
    few, many = (title for title, _ in cases(view))
    return judging.greater_by(spreads[1], 2 * spreads[0], (f"spread at {many}", f"twice the spread at {few}"))


def ordered(view: View, panel: int, rising: bool = True) -> Verdict:
    return judging.ordered_within_noise(
        *view.finals(settings(view), ACCURACY, cases(view)[panel][1]), rising=rising
    )


def order_is_broken(view: View, panel: int, rising: bool = True) -> Verdict:
    return judging.order_is_broken(*view.finals(settings(view), ACCURACY, cases(view)[panel][1]), rising=rising)
