"""`dither federation check`: can this party take part? One line a finding, in words."""

from __future__ import annotations

import socket
import ssl
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from dither.errors import DitherError
from dither.federation import keys
from dither.federation.agreement import Agreement, PartyData, approved_digest
from dither.federation.store import PartyStore
from dither.types import __version__

CLOCK_SECONDS = 10.0  # by more than this a SuperLink takes a node's signature for a replay


class Finding(NamedTuple):
    good: bool
    what: str


def check(folder: Path, *, data: Path | None, label: str, server: str, ledger: Path | None) -> list[Finding]:
    """Keys, versions, data, budget, connection and clock; what was not given is not looked at."""
    findings = [*_keys(folder), *_versions()]
    if data is not None:
        findings += _data(folder, data, label, ledger)
    if server:
        findings += _connection(folder, server)
    return findings


def _keys(folder: Path) -> list[Finding]:
    try:
        keyring = keys.Keyring.load(folder)
        name = keys.party_name(folder)
        own = keys.Identity.load(folder)
        if keyring.party(name).identity != own.public:
            return [Finding(False, "identity.key is not the one that federation.json lists for this party")]
    except DitherError as error:
        return [Finding(False, str(error))]
    found = [Finding(True, f"keys of {name!r}, one of {len(keyring.parties)} parties")]
    ends = keys.expiry(folder / "ca.pem")
    found.append(Finding(ends > datetime.now(UTC), f"the federation's CA is in force until {ends:%Y-%m-%d}"))
    open_files = [each.name for each in folder.glob("*.key") if each.stat().st_mode & 0o077]
    if open_files:
        found.append(Finding(False, f"{', '.join(open_files)} can be read by others: chmod 600"))
    return found


def _versions() -> list[Finding]:
    found = [Finding(True, f"Dither {__version__}")]
    if find_spec("flwr") is None:
        return [*found, Finding(False, "Flower is not installed: pip install 'dither[deploy]'")]
    from importlib.metadata import version

    return [*found, Finding(True, f"Flower {version('flwr')}")]


def _data(folder: Path, data: Path, label: str, ledger: Path | None) -> list[Finding]:
    try:
        source = PartyData(data, label)
    except DitherError as error:
        return [Finding(False, str(error))]
    found = [Finding(True, f"{data.name} has {source.records:,} records")]
    run = _approved_run(folder)
    if run is None:
        found.append(Finding(True, "no agreement is approved here yet: `dither join` shows it and asks"))
    else:
        try:
            x, _ = run.encode(source)
            found.append(
                Finding(True, f"it fits the approved agreement: {x.shape[1]} features, {len(run.classes)} classes")
            )
            held = run.sizes[run.number(keys.party_name(folder))]
            if held != source.records:
                found.append(Finding(False, f"the approved agreement counts {held:,} records"))
        except DitherError as error:
            found.append(Finding(False, str(error)))
    return [*found, *_budget(data, ledger)]


def _approved_run(folder: Path) -> Agreement | None:
    digest = approved_digest(folder)
    for path in sorted((folder / "runs").glob("*")) if digest else []:
        agreement = PartyStore(path).agreement()
        if agreement is not None and agreement.digest == digest:
            return agreement
    return None


def _budget(data: Path, ledger: Path | None) -> list[Finding]:
    from dither.accounting.ledger.runs import EVERY_RECORD, Ledger, data_id

    try:
        book = Ledger(ledger or Ledger.default_path())
        (spent,) = book.spent(data_id(book, path=str(data)), EVERY_RECORD)
    except DitherError as error:
        return [Finding(False, str(error))]
    used = "nothing" if not spent.participations else f"ε = {spent.epsilon:.3g} at δ = {spent.delta:g}"
    if spent.budget is None:
        return [Finding(True, f"spent on this file: {used}; no budget is set (dither budget set)")]
    left = spent.epsilon < spent.budget.epsilon
    return [Finding(left, f"spent on this file: {used} of a budget of {spent.budget}")]


def _connection(folder: Path, server: str) -> list[Finding]:
    host, _, port = server.rpartition(":")
    if not host or not port.isdigit():
        return [Finding(False, f"--server {server!r} is not of the form HOST:PORT")]
    trust = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), 10.0) as plain,
            trust.wrap_socket(plain, server_hostname=host.strip("[]")) as line,
        ):
            line.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            answer = line.recv(4096).decode("latin-1")
    except ssl.SSLCertVerificationError as error:
        return [Finding(False, f"the certificate of {server} is refused: {error.verify_message}")]
    except ssl.SSLError as error:
        return [Finding(False, f"{server} does not speak TLS as this federation does: {error.reason}")]
    except OSError as error:
        return [Finding(False, f"{server} cannot be reached: {error}")]
    found = [Finding(True, f"{server} answers, with a certificate of this federation")]
    dates = [line[6:] for line in answer.split("\r\n") if line.lower().startswith("date: ")]
    if dates:
        apart = abs((datetime.now(UTC) - parsedate_to_datetime(dates[0])).total_seconds())
        good = apart <= CLOCK_SECONDS
        found.append(Finding(good, f"the clocks are {apart:.0f} s apart" + ("" if good else ": set this one")))
    return found
