"""The papers' 27 figures by name. Each paper's are declared in the module of its name, as FIGURES."""

from __future__ import annotations

from importlib import import_module

from dither.errors import SpecError, did_you_mean
from dither.reproduction.figure import Figure

PAPERS = {
    "secure-fedavg": ("Secure FedAvg", (1, 2, 3, 4)),
    "nbafl": ("NbAFL", (2, 3, 4, 5, 6, 7, 8, 9, 10)),
    "dp-scaffold": ("DP-SCAFFOLD", (3, 4)),
    "cpfed": ("CPFed", (4, 5, 6, 7, 8, 9)),
    "concentrated": ("Concentrated DP-FL", (3, 4, 5, 6, 7, 8)),
}


def names() -> list[str]:
    """Every figure's id."""
    return [f"{paper}/fig{number}" for paper, (_, numbers) in PAPERS.items() for number in numbers]


def load(name: str) -> Figure:
    """The figure of that id."""
    if name not in names():
        raise SpecError(f"unknown figure {name!r}{did_you_mean(name, [*names(), *PAPERS, 'all'])}")
    paper, _, _ = name.partition("/")
    declared: tuple[Figure, ...] = import_module(f"dither.reproduction.{paper.replace('-', '_')}").FIGURES
    return next(figure for figure in declared if figure.id == name)


def select(wanted: str | list[str] | tuple[str, ...] = "all") -> list[Figure]:
    """Figures by id, by paper, or all of them, in the papers' order and each once."""
    asked = [wanted] if isinstance(wanted, str) else list(wanted)
    chosen: dict[str, None] = {}
    for one in asked or ["all"]:
        if one == "all":
            chosen |= dict.fromkeys(names())
        elif one in PAPERS:
            chosen |= {name: None for name in names() if name.startswith(f"{one}/")}
        else:
            load(one)  # an unknown name is an error that lists what is known
            chosen[one] = None
    return [load(name) for name in names() if name in chosen]
