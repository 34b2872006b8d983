"""The table and the bar chart of benchmarks/bench.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
PROTECTED = Path(__file__).resolve().parent / "results" / "protected.json"

# How many times slower than Dither a peer must be: the goals. "best" is the fastest of IN_TABLE.
GOALS = {
    "A1": {"fedjax": 100, "pfl": 500, "flower": 1000},
    "A32": {"fedjax": 20, "pfl": 150, "flower": 300},
    "B1": {"best": 2, "opacus-ghost": 4, "pfl": 30},
    "B2": {"best": 1.6},
}
YARDSTICK = 1.5  # Dither may take this many times as long as the hand-written loop
IN_TABLE = ("flower", "pfl", "opacus", "opacus-ghost", "fedjax", "fedjax-factorised", "torch.func")
ORDER = ["A1", "A32", "B1", "B2", "C"]


def line(row: dict[str, Any]) -> str:
    head = f"{row['workload']:4} {row['peer']:18}"
    if "error" in row:
        return f"{head} {row['error']}"
    text = f"{head} {seconds(row['seconds_per_100']):>9} s per 100 rounds   {row['peak_rss_mb']:6.0f} MB"
    if "first_round_s" in row:  # not where Dither runs a second time
        text += f"   first round {row['first_round_s']:.2f} s   loss {row['check_loss']:.4f}"
    return text


def seconds(value: float) -> str:
    """Three figures."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def by_peer(rows: Rows, workload: str) -> dict[str, dict[str, Any]]:
    return {row["peer"]: row for row in rows if row["workload"] == workload}


def goal_of(found: dict[str, dict[str, Any]], workload: str, peer: str) -> tuple[str, float | None]:
    """The peer behind a goal (the best of the table, for "best"), and its time over Dither's."""
    timed = {name: row["seconds_per_100"] for name, row in found.items() if "error" not in row}
    if "dither" not in timed:
        return peer, None
    if peer == "best":
        rivals = {name: timed[name] for name in IN_TABLE if name in timed}
        if not rivals:
            return peer, None
        peer = min(rivals, key=lambda name: rivals[name])
    return peer, timed[peer] / timed["dither"] if peer in timed else None


def table(rows: Rows, *, markdown: bool = False) -> str:
    """All measurements, and for each the ratio to Dither's time with its goal."""
    head = ["workload", "", "s / 100 rounds", "protected", "first round, s", "memory, MB", "loss", "ratio", "goal"]
    protected = json.loads(PROTECTED.read_text())["cpu, 2 cores"] if PROTECTED.exists() else {}
    lines: list[list[str]] = []
    for workload in ORDER:
        found = by_peer(rows, workload)
        goals: dict[str, list[str]] = {}
        for name, least in GOALS.get(workload, {}).items():
            peer, ratio = goal_of(found, workload, name)
            text = f"{'best: ' if name == 'best' else ''}{least:g}x"
            goals.setdefault(peer, []).append(
                text + (" met" if ratio is not None and ratio >= least else " missed")
            )
        own = found.get("dither", {}).get("seconds_per_100")
        for peer in sorted(found, key=lambda name: found[name].get("seconds_per_100", 1e9)):
            row = found[peer]
            if "error" in row:
                lines.append([workload, peer, row["error"], *[""] * 5, "; ".join(goals.get(peer, []))])
                continue
            ratio = f"{seconds(row['seconds_per_100'] / own)}x" if own else ""
            if peer == "yardstick" and own:
                times = own / row["seconds_per_100"]
                goals[peer] = [
                    f"Dither at most {YARDSTICK}x: {times:.2f}x, {'met' if times <= YARDSTICK else 'missed'}"
                ]
            lines.append(
                [
                    workload,
                    peer,
                    seconds(row["seconds_per_100"]),
                    f"{protected[workload]['ratio']:.2f}x" if peer == "dither" and workload in protected else "",
                    f"{row['first_round_s']:.2f}",
                    f"{row['peak_rss_mb']:.0f}",
                    f"{row['check_loss']:.4f}",
                    ratio,
                    "; ".join(goals.get(peer, [])),
                ]
            )
    if markdown:
        return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *lines])
    widths = [min(max(len(cells[i]) for cells in [head, *lines]), 40) for i in range(len(head))]
    texts = [
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in [head, *lines]
    ]
    return "\n".join(text.rstrip() for text in texts)


def chart(rows: Rows, path: Path) -> None:
    """One panel a workload, seconds per 100 rounds on a log scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [w for w in ORDER if any(row["workload"] == w and "error" not in row for row in rows)]
    counts = [sum(row["workload"] == w and "error" not in row for row in rows) for w in shown]
    figure, axes = plt.subplots(
        len(shown), 1, figsize=(9, 0.34 * sum(counts) + 0.75 * len(shown)), sharex=True, squeeze=False,
        gridspec_kw={"height_ratios": [count + 0.6 for count in counts]}, layout="constrained",
    )  # fmt: skip
    for axis, workload in zip(axes[:, 0], shown, strict=True):
        found = {name: row for name, row in by_peer(rows, workload).items() if "error" not in row}
        names = sorted(found, key=lambda name: -found[name]["seconds_per_100"])
        values = [found[name]["seconds_per_100"] for name in names]
        own = found.get("dither", {}).get("seconds_per_100")
        colours = {"dither": "#c2410c", "yardstick": "#9a9a9a"}
        axis.barh(names, values, color=[colours.get(name, "#4878a8") for name in names], height=0.72)
        axis.set_xscale("log")
        axis.set_title(TITLES[workload], fontsize=10, loc="left")
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
        axis.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
        for number, (name, value) in enumerate(zip(names, values, strict=True)):
            ratio = f"  ({seconds(value / own)}x)" if own and name != "dither" else ""
            axis.text(value * 1.08, number, f"{seconds(value)} s{ratio}", va="center", fontsize=8.5)
    everything = [row["seconds_per_100"] for row in rows if "error" not in row]
    axes[-1, 0].set_xlim(min(everything) / 2, max(everything) * 12)
    axes[-1, 0].set_xlabel("seconds per 100 rounds, steady state, log scale (times Dither's in brackets)")
    figure.savefig(path, dpi=130)
    plt.close(figure)


TITLES = {
    "A1": "A1  logistic regression, 50 of 100 clients, 10 local steps, batch 1, noise on the upload",
    "A32": "A32  the same with batch 32",
    "B1": "B1  MNIST network, 50 clients, one epoch of 512, each example clipped, noise at every step",
    "B2": "B2  MNIST network, 50 clients, one epoch of 512, model clipped and noised",
    "C": "C  DP-SCAFFOLD, softmax 784-47, 8 of 40 users, 50 local steps of 500",
}
