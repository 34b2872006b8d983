"""Federations for tests, and messages that a dishonest party with a valid key could send."""

from __future__ import annotations

import numpy as np

from dither.secagg import messages, primitives
from dither.secagg.client import NO_SHARE, ClientSession
from dither.secagg.graph import Rules
from dither.secagg.messages import Kind, pack
from dither.secagg.roster import AnnouncedCohort
from dither.secagg.server import ServerSession

IDS = (2, 3, 5, 7, 11)


def enrolled(ids, rules: Rules | None = None) -> tuple[ServerSession, dict[int, ClientSession]]:
    """A server and clients that have confirmed their roster."""
    server, clients = strangers(ids, rules or Rules())
    for client in clients.values():
        server.hello(client.hello())
    roster = server.make_roster()
    for client in clients.values():
        server.confirm(client.confirm(roster))
    confirmed = server.confirmed()
    for client in clients.values():
        client.confirmed(confirmed)
    return server, clients


def strangers(ids, rules: Rules) -> tuple[ServerSession, dict[int, ClientSession]]:
    """A server and clients before their first message."""
    federation = primitives.fresh_key()
    server = ServerSession(federation=federation, rules=rules)
    public = server.signing.public
    return server, {i: ClientSession(i, federation=federation, server=public, rules=rules) for i in ids}


def vectors(ids, rules: Rules, dimension: int = 5, seed: int = 0) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(seed)
    words = np.uint32 if rules.modulus_bits == 32 else np.uint64
    return {i: rng.integers(0, np.iinfo(words).max, dimension, words, endpoint=True) for i in ids}


def plain_sum(values) -> np.ndarray:
    values = list(values)
    return np.add.reduce(values, dtype=values[0].dtype)  # modulo 2^k


def resign(data: bytes, key: primitives.SigningKey, payload: bytes | None = None, **changes: int) -> bytes:
    """The same message with another payload, round, attempt, sender or kind, signed by this key."""
    _, _, kind, federation, round_index, attempt, sender, _ = messages._HEADER.unpack_from(data)
    body = data[messages.HEADER_BYTES : -primitives.SIGNATURE_BYTES] if payload is None else payload
    return pack(
        Kind(changes.get("kind", kind)),
        federation,
        changes.get("sender", sender),
        body,
        key.sign,
        round_index=changes.get("round_index", round_index),
        attempt=changes.get("attempt", attempt),
    )


def payload_of(data: bytes) -> bytes:
    return data[messages.HEADER_BYTES : -primitives.SIGNATURE_BYTES]


def announcement(server: ServerSession, ids, *, round_index=0, attempt=0, threshold=None, dimension=5) -> bytes:
    """What a dishonest server could announce: nothing is checked."""
    ids = tuple(ids)
    if threshold is None:
        threshold = server.rules.threshold_for(len(ids))
    cohort = AnnouncedCohort(server.roster, round_index, attempt, threshold, dimension, ids)
    place = {"round_index": round_index, "attempt": attempt}
    return pack(Kind.ANNOUNCE, server.federation, messages.SERVER, cohort.pack(), server.signing.sign, **place)


def twin(session):
    """A second copy of a party: what a dishonest one can make of itself to answer two ways."""
    return type(session).load(session.save(), session.signing.private)


def without_share(answer: bytes, key: primitives.SigningKey, maker: int) -> bytes:
    """A client's answer to `unseal`, as if it could not use that maker's share."""
    body = bytearray(payload_of(answer))
    for at in range(36, len(body), 4 + len(NO_SHARE)):
        if body[at : at + 4] == maker.to_bytes(4, "little"):
            body[at + 4 : at + 4 + len(NO_SHARE)] = NO_SHARE
    return resign(answer, key, bytes(body))


def snapshot(session: ClientSession | ServerSession):
    """All that a refusal must leave as it was."""
    if isinstance(session, ClientSession):
        return session.save()
    found = session._attempt
    inside = found and (
        found.total.tobytes(),
        sorted(found.uploaded),
        repr(found.seals),
        repr(found.answers),
        found.unsealing,
        found.over,
    )
    return session.save(), inside
