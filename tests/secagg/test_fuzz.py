"""Mutated messages of every kind, at the moment each is due: refused with `ProtocolAbort`, nothing changed.

After each batch of mutants the party's state is what it was, the genuine message is still accepted, and the sum at
the end is exact. Some mutants are signed anew by the rightful sender's key: for these only such changes are made
that no honest reading allows (a server may announce any round and survivors, a client may send any words).
"""

import random
import struct

import numpy as np
import pytest

from dither.errors import ProtocolAbort
from dither.secagg import primitives
from dither.secagg.graph import Rules
from dither.secagg.messages import HEADER_BYTES, Kind
from tests.secagg.support import payload_of, plain_sum, resign, snapshot, strangers, vectors, without_share

IDS = (0, 1, 4, 9)
RULES = Rules(threshold=3, colluders=1, min_clients=3)
HEADER_FIELDS = [(0, 4), (4, 1), (5, 1), (6, 32), (38, 8), (46, 4), (50, 4), (54, 8)]


def randomly(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """A mutation that knows nothing of the format but where the header's fields are. Nobody signs it."""
    found = bytearray(data)
    kind = rng.randrange(10)
    place = rng.randrange(len(found))
    if kind == 0:
        found[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        for _ in range(rng.randrange(1, 9)):
            found[rng.randrange(len(found))] = rng.randrange(256)
    elif kind == 2:
        del found[place:]
    elif kind == 3:
        found += rng.randbytes(rng.randrange(1, 70))
    elif kind == 4:
        del found[place : place + rng.randrange(1, 40)]
    elif kind == 5:
        found[place:place] = found[place : place + rng.randrange(1, 40)] or b"\0"
    elif kind == 6:
        start, size = rng.choice(HEADER_FIELDS)
        found[start : start + size] = rng.choice([bytes(size), b"\xff" * size, rng.randbytes(size)])
    elif kind == 7:
        other = rng.choice(others)
        cut = rng.randrange(len(other))
        found[min(cut, len(found)) :] = other[cut:]
    elif kind == 8:  # a length that fits, with bytes taken out of the payload
        size = min(rng.randrange(1, 8), len(found) - HEADER_BYTES - 64)
        del found[HEADER_BYTES : HEADER_BYTES + size]
        found[54:62] = struct.pack("<Q", len(found) - HEADER_BYTES - 64)
    else:
        return rng.choice([rng.randbytes(rng.randrange(300)), rng.choice(others)])
    return bytes(found)


def signed_anew(rng: random.Random, data: bytes, key: primitives.SigningKey, most: int) -> bytes:
    """A mutation of the payload (its first `most` bytes, or its length), signed by the rightful sender."""
    body = bytearray(payload_of(data))
    kind = rng.randrange(5)
    place = rng.randrange(min(most, len(body)))
    if kind == 0:
        body[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        size = rng.choice([1, 4, 32])
        body[place : place + size] = rng.randbytes(min(size, most - place, len(body) - place))
    elif kind == 2:
        del body[rng.randrange(len(body)) :]
    elif kind == 3:
        body += rng.randbytes(rng.randrange(1, 80))
    else:
        word = rng.choice([0, 1, 2, 5, 2**31, 2**32 - 1])
        start = min(place, max(0, min(most, len(body)) - 4))
        body[start : start + 4] = struct.pack("<I", word)
    return resign(data, key, bytes(body))


class Fuzzer:
    """Throws mutants at a party before it gets the genuine message."""

    def __init__(self, seed: int, batch: int) -> None:
        self.rng, self.batch = random.Random(seed), batch
        self.seen: list[bytes] = [b"DSAG"]
        self.thrown: dict[Kind, int] = dict.fromkeys(Kind, 0)
        self.reasons: set[str] = set()

    def deliver(
        self, session, call, genuine: bytes, key, stranger, *, resigned: int = 10**9, moves=True, extra=()
    ):
        """`resigned`: how much of the payload may be mutated under the sender's own signature; `moves`: whether
        its round and attempt may be, too."""
        before = snapshot(session)
        rng, kind = self.rng, Kind(genuine[5])
        # Whole messages of the past, in the wrong place. Those that may rightly be sent twice are left out:
        # enrolment, and announcements, which are news to a client that was away. What another one is asked to
        # unseal is answered, too: "no share".
        twice = kind <= Kind.CONFIRMED or kind in (Kind.ANNOUNCE, Kind.UNSEAL)
        others = [data for data in self.seen if not (twice and data[5:6] == genuine[5:6])]
        for _ in range(self.batch):
            choice = rng.random()
            if choice < 0.6:
                mutant = randomly(rng, genuine, others)
            elif choice < 0.75:  # a valid signature, but of someone else
                mutant = resign(genuine, stranger)
            elif choice < 0.95 and resigned:
                mutant = signed_anew(rng, genuine, key, resigned)
            elif moves and kind > Kind.CONFIRMED:
                mutant = resign(
                    genuine, key, round_index=rng.choice([0, 1, 7]), attempt=rng.choice([0, 1, 2**31 - 1])
                )
            else:
                mutant = resign(genuine, key, kind=rng.choice(list(Kind)))
            if mutant == genuine:
                continue
            self.throw(call, mutant, kind, *extra)
        assert snapshot(session) == before
        found = call(genuine, *extra)
        self.seen.append(genuine)
        return found

    def throw(self, call, mutant: bytes, kind: Kind, *extra) -> None:
        self.thrown[kind] += 1
        try:
            call(mutant, *extra)
        except ProtocolAbort as reason:
            self.reasons.add(str(reason).split(":")[0][:40])
        else:
            raise AssertionError(f"a forged {kind.name} was accepted: {mutant.hex()}")


def run(fuzz: Fuzzer, rounds: int) -> None:
    """A federation from its first message to some sums, one client lost now and then."""
    server, clients = strangers(IDS, RULES)
    thief = primitives.SigningKey(primitives.fresh_key())
    mine = server.signing
    for who, client in clients.items():
        fuzz.deliver(server, server.hello, client.hello(), client.signing, thief, resigned=0)
        # Once enrolled, not even the client itself can take its place with other keys.
        for _ in range(fuzz.batch // 4):
            key = primitives.fresh_key()
            fuzz.throw(
                server.hello, resign(client.hello(), client.signing, client.signing.public + key), Kind.HELLO
            )
            other = primitives.SigningKey(key)
            fuzz.throw(
                server.hello, resign(client.hello(), other, other.public + client.agreement.public), Kind.HELLO
            )
        assert server._members[who].keys == client._keys
    roster = server.make_roster()
    for client in clients.values():
        confirm = fuzz.deliver(client, client.confirm, roster, mine, thief)
        fuzz.deliver(server, server.confirm, confirm, client.signing, thief)
    confirmed = server.confirmed()
    for client in clients.values():
        fuzz.deliver(client, client.confirmed, confirmed, mine, thief)
    for round_index in range(1, rounds + 1):
        values = vectors(IDS, RULES, seed=round_index)
        gone = fuzz.rng.choice([None, *IDS])
        message = server.announce(round_index, IDS, 5)
        while True:
            for who in server.cohort:
                if who == gone:
                    continue
                client = clients[who]
                upload = fuzz.deliver(
                    client, client.upload, message, mine, thief, resigned=48, moves=False, extra=(values[who],)
                )
                fuzz.deliver(
                    server,
                    server.upload,
                    upload,
                    client.signing,
                    clients[IDS[0]].signing if who else thief,
                    resigned=36,
                )
                if who == IDS[0]:  # a replay
                    fuzz.throw(server.upload, upload, Kind.UPLOAD)
            if not server.missing:
                break
            message = server.reannounce()
        for who, request in server.unseal().items():
            client = clients[who]
            answer = fuzz.deliver(client, client.unseal, request, mine, clients[IDS[1]].signing, resigned=36)
            if len(server.cohort) - len(server._attempt.answers) <= 2:  # the last ones say they got no share
                answer = without_share(answer, client.signing, server._attempt.cohort.committee[0])
            fuzz.deliver(server, server.shares, answer, client.signing, thief, resigned=36)
            fuzz.throw(server.shares, answer, Kind.SHARES)
        for who, dispute in server.disputes().items():
            release = fuzz.deliver(clients[who], clients[who].release, dispute, mine, thief)
            fuzz.deliver(server, server.released, release, clients[who].signing, thief, resigned=36)
        assert np.array_equal(server.open(), plain_sum(values[who] for who in server.cohort))


def test_ten_thousand_mutants():
    fuzz = Fuzzer(seed=1, batch=170)
    run(fuzz, rounds=3)
    assert sum(fuzz.thrown.values()) > 10_000
    assert min(fuzz.thrown.values()) > 300, fuzz.thrown
    assert len(fuzz.reasons) > 40, sorted(fuzz.reasons)


@pytest.mark.slow
def test_a_hundred_thousand_mutants():
    thrown = 0
    for seed in range(10, 22):
        fuzz = Fuzzer(seed=seed, batch=170)
        run(fuzz, rounds=3)
        thrown += sum(fuzz.thrown.values())
    assert thrown > 120_000
