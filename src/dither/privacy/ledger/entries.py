"""What the ledger holds, and its canonical text: the hash chain is over these very characters."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from dither.core import Release, Sampling
from dither.errors import ConfigError, LedgerError
from dither.privacy.accounting import ADJACENCIES, VIEWS, ZERO_OUT, Facts, Lattice, Participation

GENESIS, CHARGE, BUDGET = "genesis", "charge", "budget"
FORMAT = 1

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

    def __str__(self) -> str:
        return f"ε={self.epsilon:.6g} (δ={self.delta:g}, view {self.view}, {self.adjacency})"


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


class Entry(NamedTuple):
    """One line of the ledger. A charge has a run, rounds [start, stop) and charges; a budget entry has the
    budget (None: removed) and the client it is for (None: all of the data set)."""

    position: int
    time: str
    kind: str
    dataset: str
    hash: str
    run: str = ""
    rounds: tuple[int, int] = (0, 0)
    facts: Facts | None = None
    charges: tuple[Charge, ...] = ()
    client: str | None = None
    budget: Budget | None = None


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


def encode_charges(charges: Sequence[Charge], rounds: tuple[int, int], facts: Facts) -> str:
    """The content of a charge entry. Equal participations are counted together and clients with equal ones
    are grouped, all in sorted order, so that the same charge always has the same text."""
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
    return canonical(
        {
            "rounds": [_whole("rounds", round) for round in rounds],
            "facts": _encode_facts(facts),
            "participations": [json.loads(text) for text in used],
            "groups": [[sorted(clients), counted] for counted, clients in sorted(groups.items())],
        }
    )


class Charged(NamedTuple):
    """A charge entry's content: participations, and groups of clients with (participation, count) pairs."""

    rounds: tuple[int, int]
    facts: Facts
    participations: tuple[tuple[Release, ...], ...]
    groups: tuple[tuple[tuple[str, ...], tuple[tuple[int, int], ...]], ...]

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
    return Charged(
        (start, stop),
        _decode_facts(fields["facts"]),
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
    ]


def _decode_release(fields: list[Any]) -> Release:
    channel, noise_std, sensitivity, uses, sampling, source = fields
    return Release(channel, noise_std, sensitivity, uses, Sampling(*sampling), source)


def _whole(what: str, value: Any) -> int:
    if value != int(value) or value < 0:
        raise ValueError(f"{what}={value} is not a whole number from 0 on")
    return int(value)


def _name(what: str, value: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what}={value!r} is not a name")
    return value


# Facts: only what differs from the defaults, which claim nothing, so that old entries stay readable.


def _encode_facts(facts: Facts) -> dict[str, Any]:
    default = Facts()
    fields = {name: value for name, value in facts._asdict().items() if value != getattr(default, name)}
    return json.loads(json.dumps(fields, default=lambda value: value.item()))


def _decode_facts(fields: dict[str, Any]) -> Facts:
    unknown = [name for name in fields if name not in Facts._fields]
    if unknown:
        raise LedgerError(f"the ledger holds the fact {unknown[0]!r}, written by a newer Dither; upgrade this one")
    if "participation" in fields:
        fields = {**fields, "participation": Participation(*fields["participation"])}
    if fields.get("lattice") is not None:
        fields = {**fields, "lattice": Lattice(*fields["lattice"])}
    if "not_covered" in fields:
        fields = {**fields, "not_covered": tuple(fields["not_covered"])}
    return Facts(**fields)


# --- budgets -------------------------------------------------------------------------------------------


def encode_budget(budget: Budget | None, client: str | None) -> str:
    """The content of a budget entry."""
    return canonical({"client": client, "budget": None if budget is None else list(budget.check())})


def decode_budget(content: str) -> tuple[Budget | None, str | None]:
    """The inverse of `encode_budget`."""
    fields = json.loads(content)
    return None if fields["budget"] is None else Budget(*fields["budget"]), fields["client"]


def decode(row: Row) -> Entry:
    """A row as people and programs want it."""
    entry = Entry(row.position, row.time, row.kind, row.dataset, row.hash, row.run)
    if row.kind == CHARGE:
        charged = decode_charges(row.content)
        return entry._replace(rounds=charged.rounds, facts=charged.facts, charges=charged.charges())
    if row.kind == BUDGET:
        budget, client = decode_budget(row.content)
        return entry._replace(budget=budget, client=client)
    return entry
