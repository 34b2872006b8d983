"""What an accountant is told and what it answers: public facts, participation, and `Proven`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dither.types import Release

Participations = Sequence[tuple[Release | tuple[Release, ...], int]]


class Proven(NamedTuple):
    """A rigorous ε with everything it depends on; ∞ by recipe "no proof" where none is known."""

    view: str
    adjacency: str
    value: float
    delta: float
    unit: str
    recipe: str
    not_covered: tuple[str, ...]
    assumed: bool
    detail: str


@dataclass(frozen=True)
class ClientRange:
    """The same ε for the clients of a run: the least, the median and the largest."""

    min: float
    median: float
    max: float


@dataclass(frozen=True)
class ProvenRow:
    """One row of a run's table of proven ε: the largest value over all clients, for one view, adjacency and unit.

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


class Participation(NamedTuple):
    """How the counts of the releases are to be read.

    realised   they happened: a guarantee given the pattern
    worst      they are the most that can happen
    binomial   they are all of `num_rounds`, and an honest party lets the client take part in each by an
               independent coin of `rate`: R4, ex ante. With `adaptive` selection (loss-based, or in any way
               a function of earlier outputs) R4 is refused and all rounds are counted. The first `certain` of
               the listed participations are no draw: the client takes part in them whatever the coins say.
    """

    kind: str = "realised"
    num_rounds: int | None = None
    rate: float = 1.0
    adaptive: bool = False
    certain: int = 0


REALISED = Participation("realised")
WORST = Participation("worst")


def binomial(num_rounds: int, rate: float, *, adaptive: bool = False, certain: int = 0) -> Participation:
    """Independent participation with probability `rate` in each of `num_rounds` rounds (R4), but for the first
    `certain` of them, which are sure."""
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"rate={rate} is not in [0, 1]")
    return Participation("binomial", num_rounds, rate, adaptive, certain)


class Lattice(NamedTuple):
    """Noise that is discrete on the integers, after rounding to `step` (in the unit of the releases): of a vector
    of `dimension` coordinates, by clients whose noise is at least `least` times the target's."""

    step: float
    dimension: int
    least: float = 1.0


class Facts(NamedTuple):
    """Public facts that the proofs need besides the releases.

    cohort_size      clients in a sum, the target included (the smallest, where it varies)
    colluders        clients that give their own noise to the server
    others_noise     variance of the honest others' noise in the sum, relative to the target's; None means
                     equal weights and equal noise: cohort_size - colluders - 1
    convex           every honest client's clipped gradient is that of a convex loss: binary linear models with
                     per-example clipping
    smoothness       a data-independent bound on the smoothness of those losses, or None
    lipschitz        a Lipschitz bound of the clipped-gradient map, for G7c, or None
    client_state     clients keep private state from round to round (DP-SCAFFOLD): sums then depend on more
                     than the public past, and no aggregation credit is proved
    assume           take the credit of G7b although convexity or non-expansive steps are not established;
                     the value is labelled as assumed
    own_epochs       shuffled epochs advance only when the client takes part
    num_rounds       rounds of the run, for shuffled epochs that advance with the calendar
    encoded          uploads are rounded and clamped before they are summed
    lattice          the uplink's noise is discrete Gaussian on integers; None: continuous
    exposures        uploads of the client that the outsider of view "broadcast" also sees (NbAFL's L)
    counts_shown     what of the run depends on a record count, in words: add/remove then has no proof
    """

    cohort_size: int = 1
    colluders: int = 0
    others_noise: float | None = None
    convex: bool = False
    smoothness: float | None = None
    lipschitz: float | None = None
    client_state: bool = False
    assume: bool = False
    own_epochs: bool = False
    num_rounds: int | None = None
    exposures: int = 0
    lattice: Lattice | None = None
    encoded: bool = False
    participation: Participation = REALISED
    unit: str = "run"
    not_covered: tuple[str, ...] = ()
    counts_shown: str = ""


class Bound(NamedTuple):
    value: float
    recipe: str
    detail: str
    assumed: bool = False


class Rounds(NamedTuple):
    """The participations that are counted, (releases, how many, the probability of each), and how they happen."""

    groups: list[tuple[tuple[Release, ...], int, float]]
    how: str
