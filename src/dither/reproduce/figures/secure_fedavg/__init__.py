"""Secure FedAvg (Li, Chang, Chi 2020): test accuracy on Adult against communication rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dither.reproduce.figure import Line, Panel, Values, View
from dither.reproduce.figures.words import ACCURACY, TABLE_STAND_IN

BASE = {"preset": "secure-fedavg", "num_rounds": 100, "eval_every": 5}
SMOKE = {
    **TABLE_STAND_IN,
    "data.records_per_client": 20,
    "num_rounds": 4,
    "eval_every": 2,
    "cohort_size": 4,
    "method_options.first_round": "cohort",
}
PROVEN = {"privacy.noise": "proven"}
PROVEN_NOTE = (
    "Noise set by the accountant so that the ε of one message, which is what the paper states, is true "
    "(every upload seen, replace-one; E1). The run as a whole spends more (E2): see the ε table."
)
PARTITIONS = {"i.i.d.": {"data.partition": "iid"}, "one class a client": {"data.partition": "one-class"}}


def rounds_panel(title: str, lines: Sequence[tuple[str, Values]], more: Values) -> Panel:
    """Accuracy against rounds, one line a setting."""
    made = [Line(label, {**more, **values}) for label, values in lines]
    return Panel(title, made, "test_accuracy", ACCURACY)


def final(view: View, settings: Sequence[Values], more: Values) -> list[Any]:
    """Each setting's final accuracies over the seeds."""
    return [view.final({**more, **values}, "test_accuracy") for values in settings]
