"""dither plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from dither.cli import common
from dither.errors import SpecError

if TYPE_CHECKING:
    from dither.experiment.plan import Plan


# reason: one parameter per option of the command
def plan(
    method: Annotated[str, Argument(metavar="METHOD", help="A method or preset, or a SPEC.toml to start from.")],
    epsilon: Annotated[float, Option(help="Largest proven ε of the whole run.")],
    delta: common.Delta = 1e-5,
    clients: Annotated[int | None, Option(help="Number of clients (default: the preset's).")] = None,
    records: Annotated[int | None, Option(help="Number of private training records.")] = None,
    model: Annotated[str | None, Option(help="Model (default: the preset's).")] = None,
    dim: Annotated[int | None, Option(help="Number of model parameters, if there is no proxy.")] = None,
    proxy: Annotated[str, Option(help="Public data to plan on: the name of a data set, or a file.")] = "",
    public_fraction: Annotated[
        float, Option(help="Share of the proxy that is public; the plan is for the rest.")
    ] = 0.0,
    mode: Annotated[str, Option(help="theory, empirical, or auto: theory unless its bound is vacuous.")] = "auto",
    view: Annotated[str, Option(help="What the adversary sees: upload, sum, broadcast, final.")] = "upload",
    adjacency: Annotated[
        str, Option(help="zero-out, replace-one, add/remove, or auto (as in the spec).")
    ] = "auto",
    grid: Annotated[
        list[str] | None, Option(metavar="KEY=A,B,C", help="Values to try, e.g. num_rounds=10,20,50.")
    ] = None,
    constant: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", help="A known constant of the loss, e.g. smoothness=1.5.")
    ] = None,
    metric: Annotated[str, Option(help="What to optimise when measuring: accuracy or loss.")] = "accuracy",
    seeds: Annotated[int, Option(min=1, help="Number of seeds for the last candidates.")] = 5,
    quick: Annotated[bool, Option("--quick", help="Use a small grid, for a first impression.")] = False,
    anyway: Annotated[bool, Option("--anyway", help="Plan even if the noise exceeds every signal.")] = False,
    settings: common.Settings = None,
    out: Annotated[Path | None, Option(help="Write the plan to this new file, as a spec for dither run.")] = None,
    picture: Annotated[Path | None, Option(help="Draw the plan (.png, .pdf or .svg).")] = None,
    data_dir: common.DataDir = None,
) -> None:
    """Choose rounds, cohort, local steps, batch, clip and learning rate for a proven budget."""
    from dither.experiment.folder import cache_folder, write_text
    from dither.experiment.plan import plan as make_plan

    if out is not None:
        common.check_new(out)
    if picture is not None:
        common.check_picture(picture, Path(method), Path(proxy))
    with common.on_interrupt("measured runs are kept; run the same command to continue"), common.Bar() as bar:
        result = make_plan(
            method, epsilon=epsilon, delta=delta, clients=clients, records=records, model=model, dim=dim,
            proxy=proxy, public_fraction=public_fraction, mode=mode, view=view, adjacency=adjacency,
            values=common.values_of(settings), grid=dict(_grid(each) for each in grid or []),
            constants=dict(_constant(each) for each in constant or []),
            metric=metric, seeds=seeds, effort="quick" if quick else "search", anyway=anyway,
            data_dir=data_dir, progress=bar.say, keep=cache_folder("unfinished"),
        )  # fmt: skip
    if out is not None:
        write_text(out, result.to_toml())
    if picture is not None:
        from dither.experiment.plan.planner import draw_plan

        draw_plan(result, picture)
    if not common.emit(result):
        return
    print_plan(result)
    if out is not None:
        common.terminal().print(
            f"run it: [bold]dither run {common.escape(str(out))}[/]", soft_wrap=True, highlight=False
        )
    if picture is not None:
        common.terminal().print(f"picture: {common.escape(str(picture))}", soft_wrap=True, highlight=False)


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


def print_plan(plan: Plan) -> None:
    """Tables: the choice, its bound or measurements, its neighbours, the Pareto front."""
    common.print_lines(plan.title(), plan.overview())
    if terms := plan.terms():
        total = sum(terms.values())
        rows = [
            {"term": name.replace("_", " "), "value": v, "share": f"{v / total:.1%}"} for name, v in terms.items()
        ]
        vacuous = plan.bounds is not None and plan.bounds.vacuous
        common.print_table(rows, title=f"Terms of the bound{' (vacuous)' if vacuous else ''}")
    if plan.constants is not None:
        rows = [
            {"constant": name.replace("_", " "), "value": float(getattr(plan.constants, name)), "source": source}
            for name, source in plan.constants.sources.items()
        ]
        common.print_table(rows, title="Constants of the loss")
    if alternatives := plan.alternatives():
        common.print_table(alternatives, title="The choice and its neighbours")
    if front := plan.pareto():
        rows = [
            {"ε": f"{trial.epsilon:.15g}", "accuracy": trial.accuracy_text(), **trial.candidate.labelled()}
            for trial in front
        ]
        common.print_table(rows, title="Pareto front: no other point is better in accuracy, ε and bytes at once")
