"""`dither join`: a party, connected to the federation's server until the run is over."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dither.accounting.ledger.runs import EVERY_RECORD, Ledger, data_id
from dither.errors import FederationError
from dither.federation import keys
from dither.federation.agreement import PartyData
from dither.federation.party import Approve, Party


def join(
    data: Path,
    *,
    label: str,
    server: str,
    folder: Path,
    ledger: Path | None,
    approve: Approve,
    new_ledger: bool = False,
    methods: Iterable[Path] = (),
    seeded: bool = False,
    patience: float = 3600.0,
    idle: float = 86400.0,
    behind_supernode: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Take part until the run is over; what was answered and what the ledger says then."""
    from dither.federation import flower

    flower.require()
    from dither.federation.flower import apps, fleet

    if not behind_supernode:
        _check_address(server)
    with alone(folder):
        keys.check_party(folder)
        source = PartyData(data, label)
        book = Ledger(ledger or Ledger.default_path(), anchor=folder / "ledger-anchor.json")
        party = Party(
            folder,
            source,
            ledger=book,
            new_ledger=new_ledger,
            approve=approve,
            methods_approved=methods,
            seeded=seeded,
            say=say,
        )

        def over() -> bool:
            return party.outcome is not None or party.refusal is not None

        if behind_supernode:
            say(f"waiting for the SuperNode at {folder / 'node.sock'}")
            timer = fleet.IdleTimer("the SuperNode", idle, say)
            apps.answer_at(folder / "node.sock", party.answer, until=over, timer=timer)
        else:
            where = fleet.Server(server, folder / "ca.pem", folder / "node.key", folder / "node.number")
            fleet.serve(where, party.answer, until=over, patience=patience, idle=idle, say=say)
    if party.refusal is not None:
        raise party.refusal
    agreement = (
        {}
        if party.privacy is None
        else {key: getattr(party.privacy, key) for key in ("delta", "view", "adjacency")}
    )
    spent = book.spent(data_id(book, path=str(data)), EVERY_RECORD, **agreement)
    return {"party": party.name, "answered": party.answered, "outcome": party.outcome, "spent": spent}


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other processes from using a party's folder: two nodes with one memory could answer a round twice, or
    mask two vectors with one stream. A process that was killed lets go by itself."""
    keys.party_name(folder)
    with open(folder / "lock", "a", encoding="ascii") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FederationError(f"another `dither join` is using {str(folder)!r}: one at a time") from None
        yield


def _check_address(server: str) -> None:
    host, colon, port = server.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
        raise FederationError(f"--server {server!r} is not of the form HOST:PORT")
