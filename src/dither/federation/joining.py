"""A party's commands: `dither join` takes part until the run is over, `dither federation check` says if it can."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from dither.accounting.ledger import Spent
from dither.accounting.ledger.runs import EVERY_RECORD, Ledger, data_id
from dither.errors import DataError, DitherError, FederationError, extra
from dither.experiment.folder import lock
from dither.federation import flower, keys, nvflare
from dither.federation.agreement import PartyData, held_out_sizes
from dither.federation.local import IdleTimer, answer_at, clock, host_and_port
from dither.federation.party import LOCAL, Party, approved_agreement
from dither.spec import code
from dither.types import __version__, epsilon_text

_LINGER_SECONDS = 2.0  # for the last answer to reach the server
_ELSEWHERE = "`dither join` without --json says more"
CLOCK_SECONDS = 10.0  # by more than this a SuperLink takes a node's signature for a replay


class JoinOutcome(NamedTuple):
    """What a party did in a federation that is over, and what its ledger says then."""

    party: str
    answered: int  # rounds
    outcome: dict[str, Any] | None  # as the server told it
    spent: list[Spent]


# reason: one parameter for each option of the command
def join(
    data: Path,
    *,
    label: str,
    server: str,
    folder: Path,
    ledger: Path | None,
    files: Iterable[Path] = (),
    patience: float = 3600.0,
    idle: float = 86400.0,
    behind_supernode: bool = False,
    say: Callable[[str], None] = lambda line: None,
    structured: bool = False,
    unread: bool = False,
    **options: Any,
) -> JoinOutcome:
    """Take part until the run is over; `options` are those of `Party`. With `structured`, what is said may be
    collected elsewhere: nothing of a record is in it. With `unread` nobody reads what is approved: it needs a
    limit."""
    say = _without_records(say) if structured else say
    keys.party_name(folder)  # else it is no party's folder
    over_flare = nvflare.is_used(folder)
    (nvflare if over_flare else flower).require()
    if not behind_supernode:
        host_and_port(server, "--server", FederationError)
    with alone(folder):
        keys.check_party(folder)
        for path in files:
            code.approve(path)
        own_ledger = Ledger(ledger or Ledger.default_path(), anchor=folder / "ledger-anchor.json")
        party = Party(folder, PartyData(data, label), ledger=own_ledger, say=say, **options)
        if unread and not party.limited:
            raise FederationError(
                f"--yes approves an agreement that nobody has read: say how much it may cost, with --epsilon E or "
                f"`dither budget set {data.name} --epsilon E`, or name the agreement you have read with --approve"
            )

        def over() -> bool:
            return party.outcome is not None or party.refusal is not None

        if over_flare:
            from dither.federation.nvflare import system

            _reach(server, patience, say)
            system.start_relay(folder, server)
            timer = IdleTimer(f"the server at {server}", idle, say)
            answer_at(system.socket_of(folder), party.answer, until=over, timer=timer)
            time.sleep(_LINGER_SECONDS)
            system.end_relay(folder)
        elif behind_supernode:
            say(f"waiting for the SuperNode at {folder / 'node.sock'}")
            timer = IdleTimer("the SuperNode", idle, say)
            answer_at(folder / "node.sock", party.answer, until=over, timer=timer)
        else:
            from dither.federation.flower import fleet

            where = fleet.Server(server, folder / "ca.pem", folder / "node.key", folder / "node.number")
            nodes = len(party.keyring.parties)
            fleet.serve(where, party.answer, until=over, patience=patience, idle=idle, nodes=nodes, say=say)
    if structured and isinstance(party.refusal, DataError):
        raise FederationError(f"the records do not fit the agreement, or could not be read: {_ELSEWHERE}")
    if party.refusal is not None:
        raise party.refusal
    agreed = ("delta", "view", "adjacency") if party.privacy is not None else ()
    privacy = {key: getattr(party.privacy, key) for key in agreed}
    spent = own_ledger.spent(party.dataset, EVERY_RECORD, **privacy)
    return JoinOutcome(party.name, party.answered, party.outcome, spent)


def _reach(server: str, patience: float, say: Callable[[str], None]) -> None:
    """Wait until the server takes connections: NVIDIA FLARE's client says nothing of one that does not."""
    until, tries = time.monotonic() + patience, 0
    while True:
        try:
            socket.create_connection(host_and_port(server, "--server", FederationError), 10.0).close()
            return say(f"{server} takes connections")
        except OSError as error:
            if time.monotonic() > until:
                since = f" for {patience:.0f} s" if patience else ""
                raise FederationError(
                    f"no server at {server}{since} ({error}); check the address and that `dither serve` runs there"
                ) from None
            tries += 1
            if tries & (tries - 1) == 0:  # the first, second, fourth, eighth ...
                say(f"no connection to {server} ({error}); the last try at {clock(until - time.monotonic())}")
            time.sleep(min(0.5 * tries, 5.0))


def _without_records(say: Callable[[str], None]) -> Callable[[str], None]:
    return lambda line: say(f"{LOCAL}{_ELSEWHERE}" if line.startswith(LOCAL) else line)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other processes from using a party's folder: two parties with one memory could answer a round twice, or
    mask two vectors with one stream. A process that was killed lets go by itself."""
    keys.party_name(folder)
    handle = lock(folder / "lock")
    if handle is None:
        raise FederationError(f"another `dither join` is using {str(folder)!r}; stop that one first")
    with handle:
        yield


# Can this party take part?


class Preflight(NamedTuple):
    good: bool
    what: str


def check(folder: Path, *, data: Path | None, label: str, server: str, ledger: Path | None) -> list[Preflight]:
    """Keys, versions, data, budget, connection and clock; what was not given is not looked at."""
    steps = [_check_keys(folder), _check_versions(folder)]
    if data is not None:
        steps += [_check_data(folder, data, label), _check_budget(data, ledger)]
    if server:
        steps.append(_check_connection(folder, server))
    findings: list[Preflight] = []
    for step in steps:
        try:
            findings.extend(step)
        except DitherError as error:
            findings.append(Preflight(False, str(error)))
    return findings


def _check_keys(folder: Path) -> Iterator[Preflight]:
    keyring, name = keys.Keyring.load(folder), keys.party_name(folder)
    keys.check_party(folder)
    yield Preflight(True, f"keys of {name!r}, one of {len(keyring.parties)} parties")
    ends = keys.expiry(folder / "ca.pem")
    yield Preflight(ends > datetime.now(UTC), f"the federation's CA is valid until {ends:%Y-%m-%d}")
    open_files = [each.name for each in folder.glob("*.key") if each.stat().st_mode & 0o077]
    if open_files:
        yield Preflight(False, f"{', '.join(open_files)} can be read by others: chmod 600")


def _check_versions(folder: Path) -> Iterator[Preflight]:
    yield Preflight(True, f"Dither {__version__}")
    package, name, needed = ("flwr", "Flower", "deploy")
    if nvflare.is_used(folder):
        package, name, needed = ("nvflare", "NVIDIA FLARE", "nvflare")
    if find_spec(package) is None:
        yield Preflight(False, f"{name} is not installed: {extra(needed)}")
    else:
        yield Preflight(True, f"{name} {version(package)}")


def _check_data(folder: Path, data: Path, label: str) -> Iterator[Preflight]:
    records = PartyData(data, label)
    yield Preflight(True, f"{data.name} has {records.count:,} records")
    try:
        agreement = approved_agreement(folder)
    except FederationError as error:  # it names a file of the owner's, which `dither join` is given
        yield Preflight(True, f"not compared with the approved agreement: {error}")
        return
    if agreement is None:
        yield Preflight(True, "no agreement is approved here yet: `dither join` shows it and asks")
        return
    x, _ = agreement.encode(records)
    yield Preflight(
        True, f"it fits the approved agreement: {x.shape[1]} features, {len(agreement.classes)} classes"
    )
    agreed = agreement.sizes[agreement.number(keys.party_name(folder))]
    held = held_out_sizes(agreement.spec, records.count)[0]
    if agreed != held:
        yield Preflight(
            False, f"the approved agreement counts {agreed:,} training records, this file has {held:,}"
        )


def _check_budget(data: Path, ledger: Path | None) -> Iterator[Preflight]:
    own_ledger = Ledger(ledger or Ledger.default_path())
    (spent,) = own_ledger.spent(data_id(own_ledger, path=str(data)), EVERY_RECORD)
    used = "nothing" if not spent.participations else f"ε = {epsilon_text(spent.epsilon)} at δ = {spent.delta:g}"
    if spent.budget is None:
        yield Preflight(True, f"spent on this file: {used}; no budget is set (dither budget set)")
    else:
        left = spent.epsilon < spent.budget.epsilon
        yield Preflight(left, f"spent on this file: {used} of a budget of {spent.budget}")


def _check_connection(folder: Path, server: str) -> Iterator[Preflight]:
    host, port = host_and_port(server, "--server", FederationError)
    if nvflare.is_used(folder):  # whose TLS asks for this party's certificate: `dither join` brings it
        _reach(server, 0.0, lambda line: None)
        yield Preflight(True, f"{server} takes connections")
        return
    trust = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    try:
        with closing(HTTPSConnection(host, port, timeout=10.0, context=trust)) as line:
            line.request("GET", "/")
            date = line.getresponse().getheader("date")
    except ssl.SSLCertVerificationError as error:
        raise FederationError(f"the certificate of {server} is refused: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise FederationError(f"{server} does not speak TLS as this federation does: {error.reason}") from None
    except (OSError, HTTPException) as error:
        raise FederationError(f"{server} cannot be reached: {error}") from None
    yield Preflight(True, f"{server} answers, with a certificate of this federation")
    if date:
        seconds = abs((datetime.now(UTC) - parsedate_to_datetime(date)).total_seconds())
        good = seconds <= CLOCK_SECONDS
        yield Preflight(good, f"the clocks are {seconds:.0f} s apart" + ("" if good else ": set this one"))
