"""What a client or a server must still know after a restart, as bytes.

A client's state holds its private keys and, while a round is open, the seed of its seal: whoever reads it reads
what the client masks. Keep it as you would keep a TLS key. Store the newest state before a message leaves the
process, and never restore an older one: the rules that protect the client are only as old as its state.

A server's state holds public keys and where the open round stands: no uploads, and no private key, because run
folders are passed on. An attempt that was collecting begins anew (send `announcement()` again; clients answer with
the same bytes), one that was being opened is over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dither.errors import ConfigError, ProtocolAbort
from dither.secagg import client as clients
from dither.secagg import server as servers
from dither.secagg.client import ClientSession
from dither.secagg.messages import SERVER, Kind, rebuild
from dither.secagg.roster import AnnouncedCohort, Member, Roster, Rules
from dither.secagg.server import ServerSession

_VERSION = 1
_Session = TypeVar("_Session")


def save_client(session: ClientSession) -> bytes:
    """The client's keys, its roster, and what it has answered."""
    newest = session._attempt
    return _dump(
        "client",
        {
            "who": session.who,
            "federation": session.federation.hex(),
            "server": session.server.hex(),
            "rules": list(session.rules),
            "pins": _pins(session.pins),
            "signing": session.signing.private.hex(),
            "agreement": session.agreement.private.hex(),
            "nonce": session.nonce.hex(),
            "roster": session.roster.pack().hex() if session.roster else None,
            "enrolled": session.enrolled,
            "attempt": newest
            and {
                **_cohort(newest.cohort),
                "plaintext": newest.plaintext.hex(),
                "seed": newest.seed.hex(),
                "seal": newest.seal.hex(),
                "unsealed": newest.unsealed,
            },
        },
    )


def load_client(data: bytes) -> ClientSession:
    """The client as it was when `save_client` was called."""

    def build(state: dict[str, Any]) -> ClientSession:
        session = ClientSession(
            int(state["who"]),
            federation=bytes.fromhex(state["federation"]),
            server=bytes.fromhex(state["server"]),
            rules=Rules(*state["rules"]),
            pins=_read_pins(state["pins"]),
            signing=bytes.fromhex(state["signing"]),
            agreement=bytes.fromhex(state["agreement"]),
        )
        session.nonce = bytes.fromhex(state["nonce"])
        session.roster = _roster(session.federation, state["roster"])
        session.enrolled = bool(state["enrolled"])
        if (saved := state["attempt"]) is not None and session.roster is not None:
            session._attempt = clients._AnsweredAttempt(
                _read_cohort(session.roster, saved),
                bytes.fromhex(saved["plaintext"]),
                bytes.fromhex(saved["seed"]),
                bytes.fromhex(saved["seal"]),
                unsealed=bool(saved["unsealed"]),
            )
        return session

    return _load("client", data, build)


def save_server(session: ServerSession) -> bytes:
    """The server's roster, and where the open round stands."""
    newest = session._attempt
    return _dump(
        "server",
        {
            "federation": session.federation.hex(),
            "rules": list(session.rules),
            "pins": _pins(session.pins),
            "members": [
                [m.id, m.signing.hex(), m.agreement.hex(), m.nonce.hex(), m.signature.hex()]
                for m in session.listed()
            ],
            "roster": session.roster.pack().hex() if session.roster else None,
            "confirmations": {str(who): saved.hex() for who, saved in session._confirmations.items()},
            "attempt": newest and {**_cohort(newest.cohort), "over": newest.unsealing or newest.over},
        },
    )


def load_server(data: bytes, signing: bytes) -> ServerSession:
    """The server with this private key as it was when `save_server` was called, without the uploads of the open
    attempt."""

    def build(state: dict[str, Any]) -> ServerSession:
        session = ServerSession(
            federation=bytes.fromhex(state["federation"]),
            rules=Rules(*state["rules"]),
            pins=_read_pins(state["pins"]),
            signing=signing,
        )
        session.enrol(Member(int(who), *map(bytes.fromhex, keys)) for who, *keys in state["members"])
        session.roster = _roster(session.federation, state["roster"])
        session._confirmations = {int(who): bytes.fromhex(saved) for who, saved in state["confirmations"].items()}
        if (saved := state["attempt"]) is not None and session.roster is not None:
            session._attempt = servers._OpenAttempt.empty(
                _read_cohort(session.roster, saved), over=bool(saved["over"])
            )
        return session

    return _load("server", data, build)


def _pins(pins: Mapping[int, bytes] | None) -> dict[str, str] | None:
    return None if pins is None else {str(who): public.hex() for who, public in pins.items()}


def _read_pins(pins: Mapping[str, str] | None) -> dict[int, bytes] | None:
    return None if pins is None else {int(who): bytes.fromhex(public) for who, public in pins.items()}


def _cohort(cohort: AnnouncedCohort) -> dict[str, Any]:
    return {
        "round": cohort.round_index,
        "number": cohort.attempt,
        "threshold": cohort.threshold,
        "dimension": cohort.dimension,
        "ids": list(cohort.ids),
    }


def _read_cohort(roster: Roster, saved: Mapping[str, Any]) -> AnnouncedCohort:
    round_index, attempt, threshold, dimension = (
        int(saved[name]) for name in ("round", "number", "threshold", "dimension")
    )
    ids = tuple(int(who) for who in saved["ids"])
    return AnnouncedCohort(roster, round_index, attempt, threshold, dimension, ids).check()


def _roster(federation: bytes, payload: str | None) -> Roster | None:
    if payload is None:
        return None
    return Roster.read(rebuild(Kind.ROSTER, federation, SERVER, bytes.fromhex(payload), b""))


def _dump(what: str, state: dict[str, Any]) -> bytes:
    body = json.dumps({"dither-secagg": what, "version": _VERSION, **state}).encode()
    return body + b"\n" + hashlib.sha256(body).hexdigest().encode()


def _load(what: str, data: bytes, build: Callable[[dict[str, Any]], _Session]) -> _Session:
    try:
        body, _, checksum = data.partition(b"\n")  # without one in a state of an earlier version
        if checksum and hashlib.sha256(body).hexdigest().encode() != checksum:
            raise ProtocolAbort(f"the saved state of the {what} (secagg.json) is damaged: start a new run")
        state = json.loads(body)
        if not isinstance(state, dict) or state.get("dither-secagg") != what:
            raise ProtocolAbort(f"this is not the saved state of a {what}")
        if state.get("version") != _VERSION:
            raise ProtocolAbort(f"state of version {state.get('version')!r}, this is version {_VERSION}")
        return build(state)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ProtocolAbort(f"the saved state of the {what} is damaged: {error}") from error
