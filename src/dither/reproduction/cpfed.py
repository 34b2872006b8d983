"""CPFed (Hu, Gong, Guo 2020), Figs. 4 to 9: Adult, categorical columns, 10 of 16 devices a round."""

from __future__ import annotations

from dither.reproduction.periodic import Paper, aggregation_figures, baseline_figures, noise_figures

PAPER = Paper(
    name="cpfed",
    title="CPFed",
    subject="CPFed",
    prefix="CP",
    rival="DP-SGD",
    rivals=(
        ("DP-SGD, as printed", {"method": "dp-sgd", "local_steps": 1}),
        ("DP-SGD, equal credit", {"method": "dp-sgd", "local_steps": 1, "method_options.equal_credit": True}),
    ),
    variant="equal credit (C7)",
    errata=("C7",),
    why_rival="the printed baseline gets neither the participation nor the aggregation credit that CPFed gets: "
    "4 times the noise at the same claimed ε (C7)",
    why_late="with τ = 1 the loss is still falling after the last round: its plateau is not reached",
    first_figure=4,
)

FIGURES = (*noise_figures(PAPER), *baseline_figures(PAPER), *aggregation_figures(PAPER))
