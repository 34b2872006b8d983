"""What an accountant answers: a row of proven ε, and the bounds that it is the least of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dither.types import Participation, Release

Participations = Sequence[tuple[Release | tuple[Release, ...], int]]


@dataclass(frozen=True)
class ClientRange:
    """The same ε for the clients of a run: the least, the median and the largest."""

    min: float
    median: float
    max: float


@dataclass(frozen=True)
class ProvenRow:
    """A rigorous ε with everything it depends on, for one view, adjacency and unit; ∞ by recipe "no proof" where
    none is known. In a run's table it is the largest over all clients.

    view         what the adversary sees: "upload", "sum", "broadcast" or "final" (`accounting.VIEWS`)
    unit         "run" for the whole run, "message" for one participation; ", whole client" is appended where the
                 unit of privacy is a client
    recipe       the theorem used; "no proof" where ε = ∞
    assumed      the value rests on an assumption that is not established
    not_covered  what the proof leaves out, in words
    against      the collusion that a value relying on the other clients' noise withstands; empty where it relies
                 on nobody's noise
    clients      smallest, median and largest ε over the clients; None for one message
    no_credit    for sums: why the other clients' noise earned no credit; empty where it did
    """

    view: str
    adjacency: str
    value: float
    delta: float
    unit: str
    recipe: str
    assumed: bool = False
    not_covered: tuple[str, ...] = ()
    detail: str = ""
    against: str = ""
    clients: ClientRange | None = None
    no_credit: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The row as summary.json has it; ∞ is still a float here."""
        row = {**vars(self), "not_covered": list(self.not_covered)}
        row["clients"] = None if self.clients is None else dict(vars(self.clients))
        optional = ("clients", "no_credit")
        return {name: value for name, value in row.items() if name not in optional or value is not None}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> ProvenRow:
        """The row that `to_json` wrote; ∞ may be a float or the string "inf". KeyError, TypeError or ValueError
        where it is no such row."""
        clients, no_credit = row.get("clients"), row.get("no_credit")
        return cls(
            view=str(row["view"]),
            adjacency=str(row["adjacency"]),
            value=float(row["value"]),
            delta=float(row["delta"]),
            unit=str(row["unit"]),
            recipe=str(row["recipe"]),
            assumed=bool(row["assumed"]),
            not_covered=tuple(str(text) for text in row["not_covered"]),
            detail=str(row.get("detail", "")),
            against=str(row.get("against", "")),
            clients=None
            if clients is None
            else ClientRange(*(float(clients[name]) for name in ("min", "median", "max"))),
            no_credit=None if no_credit is None else str(no_credit),
        )

    # The mapping's interface of the dictionaries that rows were; it goes when nobody uses it any more.

    def __getitem__(self, name: str) -> Any:
        return self.to_json()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_json())

    def keys(self) -> list[str]:
        return list(self.to_json())

    def get(self, name: str, default: Any = None) -> Any:
        return self.to_json().get(name, default)


REALISED = Participation()
WORST = Participation("worst")


def binomial(num_rounds: int, rate: float, *, adaptive: bool = False, certain: int = 0) -> Participation:
    """Independent participation with probability `rate` in each of `num_rounds` rounds (R4), but for the first
    `certain` of them, which are sure."""
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"rate={rate} is not in [0, 1]")
    return Participation("binomial", num_rounds, rate, adaptive, certain)


class Bound(NamedTuple):
    value: float
    recipe: str
    detail: str
    assumed: bool = False


class Rounds(NamedTuple):
    """The participations that are counted, (releases, how many, the probability of each), and how they happen."""

    groups: list[tuple[tuple[Release, ...], int, float]]
    how: str
