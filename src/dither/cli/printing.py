"""What the commands print: tables, the progress bar, the summary of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from dither.experiment.build import Experiment
    from dither.experiment.train import Run

SEEN = {
    "upload": "every upload",
    "sum": "sums of uploads",
    "broadcast": "broadcasts",
    "final": "final model",
}


def worth_showing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Proven rows; of those without a proof one an adjacency, so that its absence is seen too."""
    shown = []
    for adjacency in dict.fromkeys(row["adjacency"] for row in rows):
        some = [row for row in rows if row["adjacency"] == adjacency]
        proven = [row for row in some if row["value"] not in ("inf", float("inf"))]
        shown += proven or some[:1]
    return sorted(shown, key=lambda row: row["value"] in ("inf", float("inf")))


class RunProgress:
    """A live bar on a terminal, a line now and then elsewhere, nothing when silent."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent
        self.folder: Path | None = None
        self._bar: Any = None
        self._total = 0
        self._printed = 0

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, experiment: Experiment, folder: Path, done: int) -> None:
        from dither.api import planned_rounds
        from dither.experiment.compiled import sharing_note

        self.folder, self._total, self._printed = folder, planned_rounds(experiment), done
        if self.silent:
            return
        console = terminal()
        claim = experiment.prepared.claim
        epsilon = epsilon_text(claim.value)
        unit = f"/{claim.unit}" if claim.unit != "run" else ""
        self._claimed = f"claimed ε {epsilon}{unit}"
        self._epsilon = self._claimed
        self._task_at_hand, self._accounting = experiment, 0.0
        if note := sharing_note(experiment):
            console.print(f"note: {escape(note)}", highlight=False)
        if done:
            console.print(f"resuming {escape(str(folder))} after round {done}", highlight=False)
        if not console.is_terminal:
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("round {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[scores]}  {task.fields[epsilon]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("", total=self._total, completed=done, scores="-", epsilon=self._epsilon)
        self._bar.start()

    def update(self, row: dict[str, Any]) -> None:
        if self.silent:
            return
        scores = scores_text(row)
        self._account(row)
        if self._bar is not None:
            self._bar.update(self._task, completed=row["round"], scores=scores, epsilon=self._epsilon)
        elif row["round"] - self._printed >= self._total / 10 or row["round"] == self._total:
            self._printed = row["round"]
            typer.echo(f"round {row['round']}/{self._total}  {scores}  {self._epsilon}")

    def _account(self, row: dict[str, Any]) -> None:
        """Bring the proven ε so far up to date, as long as that takes little of the run."""
        from time import perf_counter

        from dither.experiment.folder import RunFolder

        if self._accounting > 0.03 * (row["seconds"] + 3) and row["round"] < self._total:
            return
        began = perf_counter()
        begun = RunFolder(self.folder).begun() if self.folder else []
        value = self._task_at_hand.proven_epsilon(row["round"], begun)
        self._accounting += perf_counter() - began
        kind = "assumed" if self._task_at_hand.plan.assumed else "proven"
        self._epsilon = f"{kind} ε {epsilon_text(value)} at round {row['round']}, {self._claimed}"


def print_summary(result: Run) -> None:
    from rich.table import Table

    summary, spec = result.summary, result.spec
    claim = summary["epsilon"]["claimed"]
    table = Table(show_header=False, title=f"{spec.method} on {summary['data']}", title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    if summary["test_accuracy"] is not None:
        table.add_row("test accuracy", f"{summary['test_accuracy']:.4f}")
        table.add_row("loss", f"{summary['loss']:.4f}")
    else:
        table.add_row("test accuracy", "not scored")
    table.add_row("rounds", f"{summary['rounds']} in {summary['seconds']:.1f} s")
    seen = summary["participation"]
    table.add_row(
        "clients",
        f"{summary['num_clients']}, each in {seen['min']} to {seen['max']} rounds (median {seen['median']:g})",
    )
    if "streamed" in summary:
        read = summary["streamed"]
        table.add_row(
            "records",
            f"streamed from the disk: {read['blocks']} blocks of up to {read['block_records']:,}, "
            f"{read['seconds_waiting']:.1f} s of waiting",
        )
    if "traffic" in summary:
        table.add_row("a client sends", traffic_text(summary["traffic"]))
    table.add_row(
        "claimed ε",
        f"{epsilon_text(claim['value'])} per {claim['unit']}, δ = {claim['delta']:g} ({claim['source']})",
    )
    failing = sum(not condition["holds"] for condition in claim["conditions"])
    if failing:
        table.add_row(
            "", f"[yellow]{failing} of its conditions fail[/]: dither account {escape(str(result.folder))}"
        )
    for row in short_form(summary["epsilon"]["proven"], spec):
        table.add_row(
            "assumed ε" if row["assumed"] else "proven ε",
            f"[bold]{epsilon_text(row['value'])}[/] per {row['unit']}, δ = {row['delta']:g}, {row['adjacency']}, "
            f"to one who sees {SEEN[row['view']]} ({row['recipe']}){against(row)}",
        )
    for what in uncovered(short_form(summary["epsilon"]["proven"], spec)):
        table.add_row("not covered", escape(what))
    if "test_accuracy_without_noise" in summary:
        without = f"test accuracy {summary['test_accuracy_without_noise']:.4f}"
        table.add_row("without noise", f"{without} (not private: the same run with its noise left out)")
    for note in summary["notes"]:
        table.add_row("note", escape(note))
    if (result.folder / "plot.png").is_file():
        table.add_row("plot", escape(str(result.folder / "plot.png")))
    table.add_row("run folder", escape(str(result.folder)))
    if exact := local_text(result.local):
        table.add_row(LOCAL, f"{exact}; more in {escape(str(result.folder / 'local'))}")
    terminal().print(table)


LOCAL = "local, not private"


def scores_text(row: dict[str, Any]) -> str:
    """Scores on public test records; where there are none the training loss, marked as what it is."""
    if row["test_accuracy"] is not None:
        return f"accuracy {row['test_accuracy']:.4f}  loss {row['loss']:.4f}"
    return f"training loss {row['local']['train_loss']:.4f} ({LOCAL})"


def local_text(local: dict[str, Any]) -> str:
    """What stays in local/, in one line."""
    parts = [f"training loss {local['train_loss']:.4f}"] if "train_loss" in local else []
    if local.get("clamped"):
        parts.append(f"{local['clamped']} coordinates clamped: raise secagg.bound or lower client_lr")
    return "; ".join(parts)


SUMMED = {
    "off": "the server sees every upload",
    "ideal": "summed as secure aggregation would (secagg.mode = ideal)",
    "real": "under secure aggregation",
}


def traffic_text(traffic: dict[str, Any]) -> str:
    """One line on what a round sends."""
    parts = [
        f"{bytes_text(traffic['upload_bytes'])} a round and gets {bytes_text(traffic['download_bytes'])}",
        SUMMED[traffic["aggregation"]],
    ]
    if "mask_seconds" in traffic:
        parts.append(f"masks {1000 * traffic['mask_seconds']:.3g} ms a client")
    if traffic["lost"]:
        parts.append(f"{traffic['lost']} uploads lost")
    return "; ".join(parts)


def bytes_text(count: float) -> str:
    """1234 -> 1.23 kB."""
    power = next((power for power in (0, 1, 2) if count < 1000 ** (power + 1)), 3)
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


def short_form(rows: list[dict[str, Any]], spec: Any) -> list[dict[str, Any]]:
    """The proven ε for the spec's own view under each adjacency that has one, the spec's first."""
    view = [row for row in rows if row["view"] == spec.privacy.view and not row["unit"].startswith("message")]
    if spec.privacy.unit == "message":
        view = [row for row in rows if row["unit"].startswith("message")] + view
    proven = [row for row in view if row["value"] not in ("inf", float("inf"))] or view[:1]
    return sorted(proven, key=lambda row: row["adjacency"] != spec.adjacency)


def uncovered(rows: list[dict[str, Any]]) -> list[str]:
    """What no proof of these rows covers, each once."""
    return [
        text.removeprefix("not covered: ") for text in dict.fromkeys(t for r in rows for t in r["not_covered"])
    ]


def against(row: dict[str, Any]) -> str:
    """Whom a row that counts on the others' noise holds against, to follow it; empty elsewhere and in old runs."""
    return f", {row['against']}" if row.get("against") else ""


def print_event(event: str, **facts: Any) -> None:
    """A line of JSON: what commands that go on for long print with --json, one a happening."""
    from dither.experiment.folder import to_json

    typer.echo(to_json({"event": event, **facts}))


def print_table(
    rows: list[dict[str, Any]],
    *,
    as_json: bool = False,
    quiet: bool = False,
    title: str = "",
    footer: str = "",
) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    if as_json or quiet:
        return
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", caption=footer or None, caption_justify="left")
    for name in rows[0]:
        numeric = all(isinstance(row[name], int | float) for row in rows)
        table.add_column(name, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(escape(short(row[name])) for name in row))
    terminal().print(table)


def short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {short(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(short(inner) for inner in value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def epsilon_text(value: Any) -> str:
    return "∞" if value in (float("inf"), "inf") else f"{float(value):.3g}"


_PIPED = 120  # columns of what no terminal shows: rich would take 80 and break more lines


def terminal() -> Console:
    """Where results go: as wide as the terminal; in a pipe $COLUMNS wide, or wide enough for most tables."""
    import os

    from rich.console import Console

    console = Console()
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = _PIPED
    return console


def error_terminal() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def print_error(error: Exception) -> None:
    """An error as one line."""
    error_terminal().print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)


def escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
