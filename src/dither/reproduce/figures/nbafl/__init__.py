"""NbAFL (Wei et al. 2020): training loss on MNIST, 784-256-10 network, clients of 100 images, δ = 0.01."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dither.reproduce.figure import Axis, Line, Panel, Values, View
from dither.reproduce.figures.words import IMAGE_STAND_IN, TRAIN_LOSS
from dither.reproduce.judging import Verdict, not_judged

BASE = {"preset": "nbafl", "eval_every": 1, "privacy.view": "broadcast"}  # the paper's adversary
SMOKE = {
    **IMAGE_STAND_IN,
    "num_clients": 6,
    "cohort_size": 6,
    "data.records_per_client": 20,
    "model.hidden": [8],
    "local_steps": 2,
    "num_rounds": 3,
}
PROVEN = {"privacy.noise": "proven"}
PROVEN_NOTE = (
    "Noise set by the accountant for the paper's adversary, an outsider who sees all broadcasts and one upload of "
    "a client, with the sensitivity 2C that clipping proves (N2): 244 times the printed upload noise at ε = 50."
)
DESTROYED = (
    "Not run: with the proven sensitivity 2C (N2) the outsider's ε = 50 needs 244 times the printed upload noise "
    "and nothing is learnt; nbafl/fig2 shows it. No choice of C, N, T or K brings that down to a use."
)
LONG = 60  # aggregations from which on a run tells of "large T"
SHOWS = "N = 50 clients of 100 images, T = 25, C = 20, L = 1 exposed upload, 10 local Adam steps a round."


def over_rounds(title: str, lines: Sequence[tuple[str, Values]]) -> Panel:
    """Training loss against aggregations."""
    made = [Line(label, values) for label, values in lines]
    return Panel(title, made, "train_loss", TRAIN_LOSS, log=True, x_label="aggregation t")


def rounds_axis(view: View) -> Axis:
    """T as the axis below a panel of final losses."""
    return Axis("aggregations T", [(t, {"num_rounds": t}) for t in view.grid("num_rounds")])


def too_short(view: View) -> Verdict | None:
    """The verdict on the shape over T where the scale leaves out the long runs, in which noise would win."""
    last = view.grid("num_rounds")[-1]
    return not_judged(f"T ends at {last} here: too early for the noise to turn the curve") if last < LONG else None


def final_loss(view: View, settings: Sequence[Values]) -> list[Any]:
    """Each setting's final training losses over the seeds."""
    return [view.final(values, "train_loss") for values in settings]
