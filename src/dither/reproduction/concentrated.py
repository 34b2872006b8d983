"""Concentrated DP-FL (Hu, Guo, Gong 2021), Figs. 3 to 8: Adult, all columns, 10 of 16 devices a round."""

from __future__ import annotations

from dither.reproduction.cpfed import Paper, aggregation_figures, baseline_figures, noise_figures

BASELINE = {"method": "dp-dsgd", "local_steps": 1, "batch_sampling": "fixed"}
CONCENTRATED = Paper(
    name="concentrated",
    title="Concentrated DP-FL",
    subject="the method",
    prefix="CD",
    rival="DP-DSGD",
    rivals=(
        ("DP-DSGD, n credited as printed", BASELINE),
        ("DP-DSGD, r credited", {**BASELINE, "method_options.credited_clients": "r"}),
    ),
    variant="r credited (D4)",
    errata=("D4",),
    why_rival="the printed n should be r, and the baseline forgoes the gain of disjoint batches",
    why_late="",
    first_figure=3,
)

FIGURES = (*noise_figures(CONCENTRATED), *baseline_figures(CONCENTRATED), *aggregation_figures(CONCENTRATED))
