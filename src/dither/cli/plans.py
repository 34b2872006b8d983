"""dither plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dither.cli import common
from dither.errors import SpecError

if TYPE_CHECKING:
    from dither.experiment.plan import Plan


# reason: one parameter an option
def plan(
    method: str,
    epsilon: float,
    delta: float = 1e-05,
    clients: int | None = None,
    records: int | None = None,
    model: str | None = None,
    dim: int | None = None,
    proxy: str = "",
    public_fraction: float = 0.0,
    mode: str = "auto",
    view: str = "upload",
    adjacency: str = "auto",
    grid: list[str] | None = None,
    constant: list[str] | None = None,
    metric: str = "accuracy",
    seeds: int = 5,
    quick: bool = False,
    anyway: bool = False,
    settings: list[str] | None = None,
    out: Path | None = None,
    picture: Path | None = None,
    data_dir: Path | None = None,
) -> None:
    """Choose rounds, cohort, local steps, batch, clip and learning rate for a proven budget."""
    from dither.experiment.folder import cache_folder, write_text
    from dither.experiment.plan import plan as make_plan

    for file in (out, picture):
        if file is not None and not file.resolve().parent.is_dir():
            raise SpecError(f"the folder of {str(file)!r} does not exist")
        if file is not None:
            check = common.check_picture if file is picture else common.refuse_input
            check(file, Path(method), Path(proxy))
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
            {"ε": f"{trial.epsilon:g}", "accuracy": trial.accuracy_text(), **trial.candidate.labelled()}
            for trial in front
        ]
        common.print_table(rows, title="Pareto front: no other point is better in accuracy, ε and bytes at once")
