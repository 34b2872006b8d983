"""dither plan: knobs for a proven budget."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dither.cli.options import DataDir, Json, Quiet, Settings
from dither.cli.printing import epsilon_text, error_terminal, escape, print_table, terminal
from dither.cli.stopping import going_on
from dither.errors import SpecError

if TYPE_CHECKING:
    from dither.experiment.plan import Plan


def plan(
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help="A method or preset, or a SPEC.toml to start from.")
    ],
    epsilon: Annotated[float, typer.Option(help="Proven ε of the whole run, at most.")],
    delta: Annotated[float, typer.Option(help="δ of that ε.")] = 1e-5,
    clients: Annotated[int | None, typer.Option(help="Clients (default: the preset's).")] = None,
    records: Annotated[int | None, typer.Option(help="Private training records in all.")] = None,
    model: Annotated[str | None, typer.Option(help="Model (default: the preset's).")] = None,
    dim: Annotated[int | None, typer.Option(help="Parameters of the model, where there is no proxy.")] = None,
    proxy: Annotated[str, typer.Option(help="Public data to plan on: a data set's name, or a file.")] = "",
    public_fraction: Annotated[
        float, typer.Option(help="Share of the proxy that is public; the plan is for the rest.")
    ] = 0.0,
    mode: Annotated[
        str, typer.Option(help="theory, empirical, or auto: theory unless its bound is vacuous.")
    ] = "auto",
    view: Annotated[str, typer.Option(help="What the adversary sees: upload, sum, broadcast, final.")] = "upload",
    adjacency: Annotated[
        str, typer.Option(help="zero-out, replace-one, add/remove, or auto: what the spec says.")
    ] = "auto",
    grid: Annotated[
        list[str] | None, typer.Option(metavar="KEY=A,B,C", help="Values to try, e.g. num_rounds=10,20,50.")
    ] = None,
    constant: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A known constant of the loss: smoothness=1.5.")
    ] = None,
    metric: Annotated[
        str, typer.Option(help="What measurements maximise: accuracy, or minimise: loss.")
    ] = "accuracy",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the last candidates.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="A small grid, to see how it goes.")] = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Plan also where noise drowns all signal.")] = False,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan as a spec for dither run.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the plan (.png, .pdf, .svg).")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose rounds, clients a round, local steps, batch, clip and learning rate for a proven budget."""
    from dither import api
    from dither.experiment.folder import to_json, write_text
    from dither.spec import parse_setting

    for file in (out, picture):
        if file is not None and not file.resolve().parent.is_dir():
            raise SpecError(f"the folder of {str(file)!r} does not exist")

    def progress(line: str) -> None:
        if not as_json and not quiet:
            error_terminal().print(f"[dim]{escape(line)}[/]", highlight=False, soft_wrap=True)

    from dither.experiment.partial import default_folder

    with going_on("measured runs are kept: the same command goes on from there"):
        made = api.plan(
            method,
            epsilon=epsilon,
            delta=delta,
            clients=clients,
            records=records,
            model=model,
            dim=dim,
            proxy=proxy,
            public_fraction=public_fraction,
            mode=mode,
            view=view,
            adjacency=adjacency,
            values=dict(parse_setting(each) for each in settings or []),
            grid=dict(_grid(each) for each in grid or []),
            constants=dict(_constant(each) for each in constant or []),
            metric=metric,
            seeds=seeds,
            effort="quick" if quick else "search",
            anyway=anyway,
            data_dir=data_dir,
            progress=progress,
            keep=default_folder(),
        )
    if out is not None:
        write_text(out, made.to_toml())
    if picture is not None:
        from dither.experiment.plan.pictures import draw_plan

        draw_plan(made, picture)
    if as_json:
        typer.echo(to_json(report(made), indent=2))
    if as_json or quiet:
        return
    print_plan(made)
    if out is not None:
        terminal().print(f"run it: [bold]dither run {escape(str(out))}[/]", soft_wrap=True, highlight=False)
    if picture is not None:
        terminal().print(f"picture: {escape(str(picture))}", soft_wrap=True, highlight=False)


def _grid(text: str) -> tuple[str, tuple[Any, ...]]:
    key, equals, values = text.partition("=")
    try:
        numbers = tuple(float(value) for value in values.split(","))
    except ValueError:
        numbers = ()
    if not equals or not numbers:
        raise SpecError(f"--grid {text!r} is not of the form key=number,number,...")
    return key.strip(), tuple(int(number) if number.is_integer() else number for number in numbers)


def _constant(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        raise SpecError(f"--constant {text!r} is not of the form name=number") from None


# What is shown


def report(made: Plan) -> dict[str, Any]:
    """The plan as plain values."""
    from dither.accounting import FLOAT_NOISE

    price, constants = made.price, made.constants
    return {
        "method": made.spec.method,
        "mode": made.mode,
        "choice": price.point,
        "score": made.score,
        "proven_epsilon": made.proven_epsilon,
        "claimed_epsilon": {"value": price.claimed.value, "unit": price.claimed.unit},
        "noise_std": price.noise_std,
        "printed_noise_std": price.printed_noise_std,
        "uploads_per_client": price.uploads,
        "bytes_per_client": price.bytes_per_client,
        "predicted_seconds": made.seconds,
        "signal_to_noise": price.signal_to_noise,
        "terms": _terms(made),
        "constants": {
            name: {"value": getattr(constants, name), "source": source}
            for name, source in constants.sources.items()
        }
        if constants
        else {},
        "neighbours": _alternatives(made),
        "pareto": [
            {
                "epsilon": trial.epsilon,
                "accuracy": trial.mean_accuracy,
                "bytes_per_client": trial.price.bytes_per_client,
                "choice": trial.price.point,
            }
            for trial in made.pareto()
        ],
        "source": made.source,
        "notes": list(made.notes),
        "not_covered": [FLOAT_NOISE],
        "spec": made.spec.to_dict(),
    }


def print_plan(made: Plan) -> None:
    """Tables: the choice, what its bound is made of or what was measured, its neighbours, the Pareto front."""
    from rich.table import Table

    from dither.accounting import FLOAT_NOISE
    from dither.experiment.plan.pictures import bytes_text

    price, privacy = made.price, made.spec.privacy
    table = Table(show_header=False, title=f"Plan for {made.spec.method}, by {made.mode}", title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for key, name in _knob_names(made):
        table.add_row(name, f"{price.point[key]:.4g}")
    extra = {key: value for key, value in price.point.items() if key in ("lr_decay", "method_options.proximal")}
    for key, value in extra.items():
        table.add_row(key, f"{value:.4g}")
    if made.mode == "theory" and made.bounds is not None:
        table.add_row("bound", f"{made.score:.4g} ({made.bounds.source}); initial gap {made.bounds.trivial:.4g}")
    elif made.search is not None:
        best = made.search.best
        error = "" if math.isnan(best.standard_error) else f" ± {best.standard_error:.4f}"
        table.add_row(
            "on the proxy",
            f"accuracy {best.mean_accuracy:.4f}{error}, loss {best.mean_loss:.4f} ({len(best.accuracy)} seeds)",
        )
        table.add_row("search", f"{made.search.runs} runs in {made.search.seconds:.0f} s")
    printed = (
        "" if math.isnan(price.printed_noise_std) else f"; the paper's formula adds {price.printed_noise_std:.4g}"
    )
    table.add_row("noise std", f"{price.noise_std:.4g}{printed}")
    table.add_row(
        "claimed ε", f"{epsilon_text(price.claimed.value)} per {price.claimed.unit} ({price.claimed.source})"
    )
    table.add_row(
        "proven ε",
        f"[bold]{made.proven_epsilon:.4g}[/] per run, δ = {privacy.delta:g}, {made.spec.adjacency}, "
        f"to one who sees: {privacy.view}",
    )
    table.add_row("not covered", FLOAT_NOISE)
    table.add_row(
        "uploads", f"{price.uploads:.4g} a client, {bytes_text(price.bytes_per_client)} sent and received"
    )
    if not math.isnan(made.seconds):
        table.add_row("time", f"{made.seconds:.1f} s simulated here, compilation included")
    table.add_row("planned on", escape(made.source))
    for note in made.notes:
        table.add_row("note", f"[yellow]{escape(note)}[/]")
    terminal().print(table)
    if terms := _terms(made):
        total = sum(terms.values())
        rows = [
            {"term": name.replace("_", " "), "value": v, "share": f"{v / total:.1%}"} for name, v in terms.items()
        ]
        vacuous = made.bounds is not None and made.bounds.vacuous
        print_table(rows, title=f"What the bound is made of{', vacuous as it is' if vacuous else ''}")
    if made.constants is not None:
        rows = [
            {"constant": name.replace("_", " "), "value": float(getattr(made.constants, name)), "source": source}
            for name, source in made.constants.sources.items()
        ]
        print_table(rows, title="Constants of the loss")
    if alternatives := _alternatives(made):
        print_table(alternatives, title="The choice and its neighbours")
    if front := made.pareto():
        rows = [
            {
                "ε": f"{trial.epsilon:g}",
                "accuracy": f"{trial.mean_accuracy:.4f}",
                "a client": bytes_text(trial.price.bytes_per_client),
                **{name: f"{trial.price.point[key]:.4g}" for key, name in _knob_names(made)},
            }
            for trial in front
        ]
        print_table(rows, title="Pareto front: no other point is better in accuracy, ε and bytes at once")


def _knob_names(made: Plan) -> list[tuple[str, str]]:
    from dither.experiment.plan.knobs import NAMES

    return [(key, name) for key, name in NAMES.items() if key in made.price.point]


def _terms(made: Plan) -> dict[str, float]:
    if made.bounds is None:
        return {}
    return {name: float(column[made.bounds.best]) for name, column in made.bounds.terms.items()}


def _alternatives(made: Plan) -> list[dict[str, Any]]:
    """The choice first, then points that differ from it in one knob (theory) or came next (measured)."""
    from dither.experiment.plan.pictures import bytes_text

    def line(price: Any, score: str) -> dict[str, Any]:
        return {
            **{name: f"{price.point[key]:.4g}" for key, name in _knob_names(made) if key in price.point},
            "claimed ε": epsilon_text(price.claimed.value),
            "noise std": f"{price.noise_std:.4g}",
            "a client": bytes_text(price.bytes_per_client),
            ("bound" if made.mode == "theory" else "accuracy"): score,
        }

    if made.mode == "empirical" and made.search is not None:
        return [
            line(
                trial.price,
                f"{trial.mean_accuracy:.4f}"
                + ("" if math.isnan(trial.standard_error) else f" ± {trial.standard_error:.4f}"),
            )
            for trial in made.search.trials[:8]
        ]
    if made.bounds is None:
        return []
    chosen = made.prices[made.bounds.best].point
    total = made.bounds.total
    one_off = [
        number
        for number, price in enumerate(made.prices)
        if sum(price.point[key] != chosen[key] for key in chosen if key != "batch_sampling") <= 1
    ]
    shown = []
    for number in sorted(one_off, key=lambda i: total[i])[:9]:
        entry = line(made.prices[number], f"{total[number]:.4g}")
        rate = made.bounds.values.get("client_lr")
        entry["learning rate"] = "" if rate is None else f"{rate[number]:.4g}"
        shown.append(entry)
    return shown


def register(app: typer.Typer) -> None:
    """Add this command to the program."""
    app.command()(plan)
