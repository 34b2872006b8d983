"""What the ledger holds, and its canonical text: the hash chain is over these very characters."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from dither.accounting import ADJACENCIES, VIEWS, ZERO_OUT, Conditions, Lattice, Participation
from dither.accounting.ledger.sketch import Sketch
from dither.errors import ConfigError, LedgerError
from dither.types import ExactNoise, Release, Sampling, Uses

GENESIS, CHARGE, BUDGET, DATA = "genesis", "charge", "budget", "data"
EVERY_RECORD = "every record"  # the account of what the most exposed record of a data set has revealed
FORMAT = 2  # 2 knows DATA entries; files of format 1 are read, and become 2 with the first of them

Participated = Sequence[tuple[tuple[Release, ...], int]]


class Budget(NamedTuple):
    """A limit on the proven ε of everything ever released of a client's records on one data set."""

    epsilon: float
    delta: float
    view: str = "upload"
    adjacency: str = ZERO_OUT

    def check(self) -> Budget:
        """Itself, or ConfigError naming the value that cannot be used."""
        if not 0.0 <= self.epsilon < math.inf:
            raise ConfigError(
                f"budget epsilon={self.epsilon} must be at least 0 and finite; None removes a budget"
            )
        if not 0.0 < self.delta < 1.0:
            raise ConfigError(f"budget delta={self.delta} must lie between 0 and 1")
        if self.view not in VIEWS:
            raise ConfigError(f"budget view={self.view!r}; known: {', '.join(VIEWS)}")
        if self.adjacency not in ADJACENCIES:
            raise ConfigError(f"budget adjacency={self.adjacency!r}; known: {', '.join(ADJACENCIES)}")
        return Budget(float(self.epsilon), float(self.delta), self.view, self.adjacency)

    def within(self, other: Budget) -> bool:
        """Whether it allows nothing that `other` forbids: no term is looser, none cannot be compared."""
        return (
            self.epsilon <= other.epsilon
            and self.delta <= other.delta
            and VIEWS.index(self.view) <= VIEWS.index(other.view)  # from who sees most to who sees least
            and self.adjacency == other.adjacency
        )

    def __str__(self) -> str:
        return f"ε={self.epsilon:.15g} (δ={self.delta:g}, view {self.view}, {self.adjacency})"


class Charge(NamedTuple):
    """What the coming rounds will reveal of one client's records: (releases of one participation, how often)."""

    client: str
    participations: Participated


class Spent(NamedTuple):
    """What one client has spent on one data set: ε of all its releases together, at the budget's δ and view."""

    client: str
    epsilon: float
    delta: float
    view: str
    adjacency: str
    participations: int
    runs: tuple[str, ...]
    budget: Budget | None
    not_covered: str = ""  # what another ledger was charged; what was chosen after looking at earlier results
    numbers: tuple[str, ...] = ()  # what computing with numbers leaves uncovered (R7)


class About(NamedTuple):
    """What an entry says of its data set: the file's name, a name that the owner gave it, the sketch of its
    records (once), the data sets that it is the same as, and those that share rows with it but hold other records;
    and the other ledgers that know these records, if the owner began a second account of them."""

    file: str = ""
    name: str = ""
    sketch: Sketch | None = None
    same: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    besides: tuple[str, ...] = ()


def client_name(column: str, value: str) -> str:
    """The account of the records that have this value in this column. Another column's equal value is another
    account. (Entries of old have the value alone.)"""
    return column.replace("\\", "\\\\").replace("=", "\\=") + "=" + value


class Entry(NamedTuple):
    """One line of the ledger. A charge has a run, rounds [start, stop) and charges; a budget entry has the
    budget (None: removed), the one it replaces, and the client it is for (None: all of the data set)."""

    position: int
    time: str
    kind: str
    dataset: str
    hash: str
    run: str = ""
    rounds: tuple[int, int] = (0, 0)
    conditions: Conditions | None = None
    charges: tuple[Charge, ...] = ()
    client: str | None = None
    budget: Budget | None = None
    was: Budget | None = None
    about: About | None = None


class Row(NamedTuple):
    """An entry as it lies in the file."""

    position: int
    time: str
    kind: str
    dataset: str
    run: str
    content: str
    hash: str


def row_hash(key: bytes, previous: str, row: Row) -> str:
    """HMAC-SHA256 over the previous hash and everything in the row: its link of the chain."""
    text = json.dumps([previous, *row[:-1]], separators=(",", ":"))
    return hmac.new(key, text.encode("ascii"), hashlib.sha256).hexdigest()


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces; floats in their shortest exact form."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


# --- charges -------------------------------------------------------------------------------------------


def encode_charges(
    charges: Sequence[Charge],
    rounds: tuple[int, int],
    conditions: Conditions,
    plan: Sequence[Charge] | None = None,
    held_out: str = "",
) -> str:
    """The content of a charge entry. Equal participations are counted together and clients with equal ones
    are grouped, all in sorted order, so that the same charge always has the same text. `plan` is what the whole
    run will reveal, in the entry that registers it; `held_out` names the records that the run does not use."""
    fields = {
        "rounds": [_whole("rounds", round) for round in rounds],
        "facts": _encode_conditions(conditions),
        **_encode_groups(charges),
        **({"held_out": held_out} if held_out else {}),
    }
    return canonical(fields if plan is None else {**fields, "plan": _encode_groups(plan)})


def without_plan(content: str) -> str:
    """The content of a charge entry of a run that was registered before."""
    fields = json.loads(content)
    return canonical({name: value for name, value in fields.items() if name != "plan"})


def _encode_groups(charges: Sequence[Charge]) -> dict[str, Any]:
    texts: dict[tuple[Release, ...], str] = {}
    counts: dict[str, dict[str, int]] = {}
    for client, participations in charges:
        own = counts.setdefault(_name("client", client), {})
        for releases, count in participations:
            releases = tuple(releases)
            if releases not in texts:
                texts[releases] = canonical([_encode_release(release) for release in releases])
            number = _whole("count", count)
            if number:
                own[texts[releases]] = own.get(texts[releases], 0) + number
    used = sorted({text for own in counts.values() for text in own})
    index = {text: i for i, text in enumerate(used)}
    groups: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for client, own in counts.items():
        groups.setdefault(tuple(sorted((index[text], n) for text, n in own.items())), []).append(client)
    return {
        "participations": [json.loads(text) for text in used],
        "groups": [[sorted(clients), counted] for counted, clients in sorted(groups.items())],
    }


class Charged(NamedTuple):
    """A charge entry's content: participations, and groups of clients with (participation, count) pairs; and the
    same for the whole run, if the entry registers it."""

    rounds: tuple[int, int]
    conditions: Conditions
    participations: tuple[tuple[Release, ...], ...]
    groups: tuple[tuple[tuple[str, ...], tuple[tuple[int, int], ...]], ...]
    plan: Charged | None = None
    held_out: str = ""

    def charges(self) -> tuple[Charge, ...]:
        """One `Charge` a client."""
        result = []
        for clients, counts in self.groups:
            shared = tuple((self.participations[i], n) for i, n in counts)
            result += [Charge(client, shared) for client in clients]
        return tuple(result)


def decode_charges(content: str) -> Charged:
    """The inverse of `encode_charges`."""
    fields = json.loads(content)
    start, stop = fields["rounds"]
    charged = _decode_groups(fields, (start, stop), _decode_conditions(fields["facts"]))
    charged = charged._replace(held_out=str(fields.get("held_out", "")))
    if "plan" not in fields:
        return charged
    return charged._replace(plan=_decode_groups(fields["plan"], charged.rounds, charged.conditions))


def _decode_groups(fields: dict[str, Any], rounds: tuple[int, int], conditions: Conditions) -> Charged:
    return Charged(
        rounds,
        conditions,
        tuple(tuple(_decode_release(release) for release in group) for group in fields["participations"]),
        tuple((tuple(clients), tuple((i, count) for i, count in counts)) for clients, counts in fields["groups"]),
    )


def _encode_release(release: Release) -> list[Any]:
    if release.channel not in ("uplink", "downlink"):
        raise ValueError(f"channel={release.channel!r}; known: 'uplink', 'downlink'")
    kind, rate, adjacency, truncation, batch_size, population, fixed_rate = release.sampling
    return [
        release.channel,
        float(release.noise_std),
        float(release.sensitivity),
        _whole("uses", release.uses),
        [
            kind,
            float(rate),
            adjacency,
            float(truncation),
            _whole("batch_size", batch_size),
            _whole("population", population),
            bool(fixed_rate),
        ],
        str(release.source),
        *_without_empty_end(
            [
                [float(rate) for rate in release.rates],
                [float(part) for part in release.exact or ()],
                [float(part) for part in release.by_use or ()],
            ]
        ),
    ]


def _without_empty_end(parts: list[list[float]]) -> list[list[float]]:
    while parts and not parts[-1]:
        parts.pop()
    return parts


def _decode_release(fields: list[Any]) -> Release:
    channel, noise_std, sensitivity, uses, sampling, source, *more = fields  # old entries have no more
    rates = tuple(more[0]) if more else ()
    exact = ExactNoise(*more[1]) if len(more) > 1 and more[1] else None
    by_use = Uses(int(more[2][0]), *more[2][1:]) if len(more) > 2 else None
    return Release(channel, noise_std, sensitivity, uses, Sampling(*sampling), source, rates, exact, by_use)


def _whole(what: str, value: Any) -> int:
    if value != int(value) or value < 0:
        raise ValueError(f"{what}={value} is not a whole number from 0 on")
    return int(value)


def _name(what: str, value: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what}={value!r} is not a name")
    return value


# Conditions: only what differs from the defaults, which claim nothing, so that old entries stay readable.

_ONE_RATE = (
    "step_smoothness",
    "step_lipschitz",
)  # of old entries: times the first rate, which says nothing of others


def _encode_conditions(conditions: Conditions) -> dict[str, Any]:
    default = Conditions()
    fields = {name: value for name, value in conditions._asdict().items() if value != getattr(default, name)}
    plain: dict[str, Any] = json.loads(json.dumps(fields, default=lambda value: value.item()))
    return plain


def _decode_conditions(fields: dict[str, Any]) -> Conditions:
    fields = {name: value for name, value in fields.items() if name not in _ONE_RATE}
    unknown = [name for name in fields if name not in Conditions._fields]
    if unknown:
        raise LedgerError(f"the ledger holds the field {unknown[0]!r}, written by a newer version; upgrade Dither")
    if "participation" in fields:
        fields = {**fields, "participation": Participation(*fields["participation"])}
    if "not_covered" in fields:
        fields = {**fields, "not_covered": tuple(fields["not_covered"])}
    if "lattice" in fields:
        fields = {**fields, "lattice": Lattice(*fields["lattice"])}
    return Conditions(**fields)


# --- budgets -------------------------------------------------------------------------------------------


def encode_budget(budget: Budget | None, client: str | None, was: Budget | None = None) -> str:
    """The content of a budget entry; `was` is the budget that bound before."""
    now, before = (None if each is None else list(each.check()) for each in (budget, was))
    return canonical({"client": client, "budget": now, "was": before})


def decode_budget(content: str) -> tuple[Budget | None, str | None, Budget | None]:
    """The inverse of `encode_budget`; entries of old do not say what was."""
    fields = json.loads(content)
    budget, was = (None if fields.get(name) is None else Budget(*fields[name]) for name in ("budget", "was"))
    return budget, fields["client"], was


# --- data sets -----------------------------------------------------------------------------------------


def encode_about(about: About) -> str:
    """The content of a data entry: only what it says."""
    fields = {name: value for name, value in about._asdict().items() if value}
    return canonical({**fields, "sketch": about.sketch.encode()} if about.sketch is not None else fields)


def decode_about(content: str) -> About:
    """The inverse of `encode_about`."""
    fields = json.loads(content)
    unknown = [name for name in fields if name not in About._fields]
    if unknown:
        raise LedgerError(
            f"the ledger describes data by {unknown[0]!r}, written by a newer version; upgrade Dither"
        )
    sketch = Sketch.decode(fields["sketch"]) if "sketch" in fields else None
    lists = {name: tuple(fields.get(name, ())) for name in ("same", "other", "besides")}
    return About(fields.get("file", ""), fields.get("name", ""), sketch, **lists)


def decode(row: Row) -> Entry:
    """A row as people and programs want it."""
    entry = Entry(row.position, row.time, row.kind, row.dataset, row.hash, row.run)
    if row.kind == CHARGE:
        charged = decode_charges(row.content)
        return entry._replace(rounds=charged.rounds, conditions=charged.conditions, charges=charged.charges())
    if row.kind == BUDGET:
        budget, client, was = decode_budget(row.content)
        return entry._replace(budget=budget, client=client, was=was)
    if row.kind == DATA:
        return entry._replace(about=decode_about(row.content))
    return entry
