"""dither plan."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dither.cli.common import (
    Bar,
    DataDir,
    Json,
    Quiet,
    Settings,
    epsilon_text,
    escape,
    on_interrupt,
    print_table,
    refuse_input,
    terminal,
)
from dither.errors import SpecError
from dither.experiment.plots import bytes_text

if TYPE_CHECKING:
    from dither.experiment.plan import Plan, Trial
    from dither.experiment.plan.candidates import Candidate


# reason: one parameter per option of the command
def plan(
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help="A method or preset, or a SPEC.toml to start from.")
    ],
    epsilon: Annotated[float, typer.Option(help="Largest proven ε of the whole run.")],
    delta: Annotated[float, typer.Option(help="δ of that ε.")] = 1e-5,
    clients: Annotated[int | None, typer.Option(help="Number of clients (default: the preset's).")] = None,
    records: Annotated[int | None, typer.Option(help="Number of private training records.")] = None,
    model: Annotated[str | None, typer.Option(help="Model (default: the preset's).")] = None,
    dim: Annotated[int | None, typer.Option(help="Number of model parameters, if there is no proxy.")] = None,
    proxy: Annotated[str, typer.Option(help="Public data to plan on: the name of a data set, or a file.")] = "",
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
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A known constant of the loss, e.g. smoothness=1.5."),
    ] = None,
    metric: Annotated[str, typer.Option(help="What to optimise when measuring: accuracy or loss.")] = "accuracy",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds for the last candidates.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Use a small grid, for a first impression.")] = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Plan even if noise drowns all signal.")] = False,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the plan to this file, as a spec for dither run.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the plan (.png, .pdf or .svg).")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose rounds, cohort, local steps, batch, clip and learning rate for a proven budget."""
    from dither.experiment.folder import to_json, write_text
    from dither.experiment.partial import default_folder
    from dither.experiment.plan import plan as make_plan
    from dither.spec import parse_setting

    for file in (out, picture):
        if file is not None and not file.resolve().parent.is_dir():
            raise SpecError(f"the folder of {str(file)!r} does not exist")
        if file is not None:
            refuse_input(file, Path(method), Path(proxy))
    with on_interrupt("measured runs are kept: the same command continues"), Bar(as_json or quiet) as bar:
        result = make_plan(
            method, epsilon=epsilon, delta=delta, clients=clients, records=records, model=model, dim=dim,
            proxy=proxy, public_fraction=public_fraction, mode=mode, view=view, adjacency=adjacency,
            values=dict(parse_setting(each) for each in settings or []),
            grid=dict(_grid(each) for each in grid or []),
            constants=dict(_constant(each) for each in constant or []),
            metric=metric, seeds=seeds, effort="quick" if quick else "search", anyway=anyway,
            data_dir=data_dir, progress=bar.say, keep=default_folder(),
        )  # fmt: skip
    if out is not None:
        write_text(out, result.to_toml())
    if picture is not None:
        from dither.experiment.plan.planner import draw_plan

        draw_plan(result, picture)
    if as_json:
        typer.echo(to_json(report(result), indent=2))
    if as_json or quiet:
        return
    print_plan(result)
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


# Output


def report(plan: Plan) -> dict[str, Any]:
    """The plan as plain values, for --json."""
    from dither.experiment.plan.records import planned_gaps

    chosen, constants = plan.candidate, plan.constants
    return {
        "method": plan.spec.method,
        "mode": plan.mode,
        "choice": chosen.point,
        "score": plan.score,
        "proven_epsilon": plan.proven_epsilon,
        "claimed_epsilon": {"value": chosen.claimed.value, "unit": chosen.claimed.unit},
        "noise_std": chosen.noise_std,
        "printed_noise_std": chosen.printed_noise_std,
        "uploads_per_client": chosen.uploads,
        "bytes_per_client": chosen.bytes_per_client,
        "predicted_seconds": plan.seconds,
        "signal_to_noise": chosen.signal_to_noise,
        "terms": _terms(plan),
        "constants": {
            name: {"value": getattr(constants, name), "source": source}
            for name, source in (constants.sources.items() if constants else ())
        },
        "neighbours": _alternatives(plan),
        "pareto": [
            {
                "epsilon": trial.epsilon,
                "accuracy": trial.mean_accuracy,
                "bytes_per_client": trial.candidate.bytes_per_client,
                "choice": trial.candidate.point,
            }
            for trial in plan.pareto()
        ],
        "source": plan.source,
        "notes": list(plan.notes),
        "not_covered": planned_gaps(plan.spec),
        "spec": plan.spec.to_dict(),
    }


def print_plan(plan: Plan) -> None:
    """Tables: the choice, its bound or measurements, its neighbours, the Pareto front."""
    from rich.table import Table

    table = Table(show_header=False, title=plan.title(), title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for row in _choice(plan):
        table.add_row(*row)
    terminal().print(table)
    if terms := _terms(plan):
        total = sum(terms.values())
        rows = [
            {"term": name.replace("_", " "), "value": v, "share": f"{v / total:.1%}"} for name, v in terms.items()
        ]
        vacuous = plan.bounds is not None and plan.bounds.vacuous
        print_table(rows, title=f"Terms of the bound{' (vacuous)' if vacuous else ''}")
    if plan.constants is not None:
        rows = [
            {"constant": name.replace("_", " "), "value": float(getattr(plan.constants, name)), "source": source}
            for name, source in plan.constants.sources.items()
        ]
        print_table(rows, title="Constants of the loss")
    if alternatives := _alternatives(plan):
        print_table(alternatives, title="The choice and its neighbours")
    if front := plan.pareto():
        rows = [
            {
                "ε": f"{trial.epsilon:g}",
                "accuracy": f"{trial.mean_accuracy:.4f}",
                "per client": bytes_text(trial.candidate.bytes_per_client),
                **_labelled(trial.candidate),
            }
            for trial in front
        ]
        print_table(rows, title="Pareto front: no other point is better in accuracy, ε and bytes at once")


def _choice(plan: Plan) -> list[tuple[str, str]]:
    """The rows of the first table."""
    from dither.experiment.plan.records import planned_gaps
    from dither.experiment.report import ADVERSARIES

    chosen, claim, privacy = plan.candidate, plan.candidate.claimed, plan.spec.privacy
    rows = list(_labelled(chosen).items())
    rows += [
        (key, f"{chosen.point[key]:.4g}") for key in ("lr_decay", "method_options.proximal") if key in chosen.point
    ]
    if plan.mode == "theory" and plan.bounds is not None:
        gap = f"initial gap {plan.bounds.trivial:.4g}"
        rows.append(("bound", f"{plan.score:.4g} ({plan.bounds.source}); {gap}"))
    elif plan.search is not None:
        best = plan.search.best
        measured = f"accuracy {_accuracy(best)}, loss {best.mean_loss:.4f} ({len(best.accuracy)} seeds)"
        rows.append(("on the proxy", measured))
        rows.append(("search", f"{plan.search.runs} runs in {plan.search.seconds:.0f} s"))
    noise = f"{chosen.noise_std:.4g}"
    if not math.isnan(chosen.printed_noise_std):
        noise += f"; the paper's formula adds {chosen.printed_noise_std:.4g}"
    traffic = f"{chosen.uploads:.4g} per client, {bytes_text(chosen.bytes_per_client)} sent and received"
    rows += [
        ("noise std", noise),
        ("claimed ε", f"{epsilon_text(claim.value)} per {claim.unit} ({claim.source})"),
        (
            "proven ε",
            f"[bold]{plan.proven_epsilon:.4g}[/] per run, δ = {privacy.delta:g}, {plan.spec.adjacency}, "
            f"against {ADVERSARIES[privacy.view]}",
        ),
        *(("not covered", text) for text in planned_gaps(plan.spec)),
        ("uploads", traffic),
    ]
    if not math.isnan(plan.seconds):
        rows.append(("time", f"{plan.seconds:.1f} s simulated here, compilation included"))
    rows.append(("planned on", escape(plan.source)))
    return rows + [("note", f"[yellow]{escape(note)}[/]") for note in plan.notes]


def _labelled(candidate: Candidate) -> dict[str, str]:
    """The chosen hyperparameters of a candidate, by label."""
    from dither.experiment.plan.candidates import LABELS

    return {label: f"{candidate.point[key]:.4g}" for key, label in LABELS.items() if key in candidate.point}


def _accuracy(trial: Trial) -> str:
    error = "" if math.isnan(trial.standard_error) else f" ± {trial.standard_error:.4f}"
    return f"{trial.mean_accuracy:.4f}{error}"


def _terms(plan: Plan) -> dict[str, float]:
    if plan.bounds is None:
        return {}
    return {name: float(column[plan.bounds.best]) for name, column in plan.bounds.terms.items()}


def _alternatives(plan: Plan) -> list[dict[str, Any]]:
    """The choice first, then points that differ from it in one key (theory) or came next (measured)."""

    def line(candidate: Candidate, **score: str) -> dict[str, Any]:
        return {
            **_labelled(candidate),
            "claimed ε": epsilon_text(candidate.claimed.value),
            "noise std": f"{candidate.noise_std:.4g}",
            "per client": bytes_text(candidate.bytes_per_client),
            **score,
        }

    if plan.mode == "empirical" and plan.search is not None:
        return [line(trial.candidate, accuracy=_accuracy(trial)) for trial in plan.search.trials[:8]]
    if plan.bounds is None:
        return []
    chosen, total = plan.candidates[plan.bounds.best].point, plan.bounds.total
    one_off = [
        number
        for number, candidate in enumerate(plan.candidates)
        if sum(candidate.point[key] != chosen[key] for key in chosen if key != "batch_sampling") <= 1
    ]
    rates = plan.bounds.values.get("client_lr")
    return [
        line(plan.candidates[number], bound=f"{total[number]:.4g}")
        | {"learning rate": "" if rates is None else f"{rates[number]:.4g}"}
        for number in sorted(one_off, key=lambda number: total[number])[:9]
    ]
