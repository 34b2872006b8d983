"""Restarts: a node that comes back keeps its keys, its answers and its rules."""

import contextlib
import json
from functools import partial

import numpy as np
import pytest

from dither.errors import DitherError, ProtocolAbort
from dither.secagg.client import ClientSession
from dither.secagg.graph import Rules
from dither.secagg.server import ServerSession
from tests.secagg.support import announcement, enrolled, plain_sum, snapshot, strangers, twin, vectors

IDS = (0, 1, 2, 3)


def test_everyone_restarts_after_every_message():
    """Clients after each message; the server whenever it holds no uploads."""
    rules = Rules(64, colluders=1, min_clients=3)
    server, clients = strangers(IDS, rules)
    for who in IDS:
        server.hello(clients[who].hello())
        clients[who] = twin(clients[who])
        server = twin(server)
    roster = server.make_roster()
    server = twin(server)
    for who in IDS:
        server.confirm(clients[who].confirm(roster))
        clients[who] = twin(clients[who])
        server = twin(server)
    for who in IDS:
        clients[who].confirmed(server.confirmed())
        clients[who] = twin(clients[who])
    for round_index in range(3):
        values = vectors(IDS, rules, seed=round_index)
        server.announce(round_index, IDS, 5)
        server = twin(server)
        message = server.announcement()
        for who in IDS:
            first = clients[who].upload(message, values[who])
            clients[who] = twin(clients[who])
            assert clients[who].upload(message, values[who]) == first
            server.upload(first)
        for who, request in server.unseal().items():
            answer = clients[who].unseal(request)
            clients[who] = twin(clients[who])
            assert clients[who].unseal(request) == answer
            server.shares(answer)
        assert np.array_equal(server.open(), plain_sum(values.values()))
        server = twin(server)


def test_a_restarted_client_keeps_its_rules():
    server, clients = enrolled(IDS)
    values = vectors(IDS, server.rules)
    clients[0].upload(announcement(server, IDS, round_index=2), values[0])
    back = twin(clients[0])
    assert snapshot(back) == snapshot(clients[0])
    with pytest.raises(ProtocolAbort, match="answered with another vector"):
        back.upload(announcement(server, IDS, round_index=2), values[1])
    with pytest.raises(ProtocolAbort, match="attempt 2 comes after attempt 0"):
        back.upload(announcement(server, IDS[:3], round_index=2, attempt=2), values[0])
    with pytest.raises(ProtocolAbort, match="with another cohort"):
        back.upload(announcement(server, IDS[:3], round_index=2), values[0])
    with pytest.raises(ProtocolAbort, match="wrong round: 1 is over"):
        back.upload(announcement(server, IDS, round_index=1), values[0])
    server.announce(3, IDS, 5)
    for who in IDS:
        server.upload(clients[who].upload(server.announcement(), values[who]))
    clients[0].unseal(server.unseal()[0])
    with pytest.raises(ProtocolAbort, match="round 3 is over"):
        twin(clients[0]).upload(announcement(server, IDS, round_index=3, attempt=1), values[0])


def test_a_restarted_server_asks_again_or_gives_the_round_up():
    server, clients = enrolled(IDS)
    values = vectors(IDS, server.rules)
    message = server.announce(0, IDS, 5)
    uploads = {who: clients[who].upload(message, values[who]) for who in IDS}
    server.upload(uploads[0])
    server = twin(server)
    assert server.announcement() == message
    assert server.missing == IDS  # what was received is lost, and asked for again
    for who in IDS:
        server.upload(clients[who].upload(message, values[who]))
    server.unseal()
    server = twin(server)
    with pytest.raises(ProtocolAbort, match="this attempt is over"):
        server.upload(uploads[0])
    with pytest.raises(ProtocolAbort, match="round 0 is over"):
        server.announce(0, IDS, 5)
    server.announce(1, IDS, 5)


def without_checksum(data):
    """As earlier versions saved a state."""
    return json.loads(data.splitlines()[0])


def test_one_flipped_bit_of_a_state_is_noticed():
    server, clients = enrolled(IDS)
    for load, data in (
        (ClientSession.load, clients[0].save()),
        (partial(ServerSession.load, signing=server.signing.private), server.save()),
    ):
        for place in range(0, len(data), 37):
            damaged = bytearray(data)
            damaged[place] ^= 1
            with pytest.raises(ProtocolAbort, match="damaged"):
                load(bytes(damaged))


def test_damaged_states_are_refused():
    server, clients = enrolled(IDS)
    clients[0].upload(server.announce(0, IDS, 5), vectors(IDS, server.rules)[0])
    client, coordinator = clients[0].save(), server.save()
    load_server = partial(ServerSession.load, signing=server.signing.private)
    with pytest.raises(ProtocolAbort, match="not the saved state of a client"):
        ClientSession.load(coordinator)
    with pytest.raises(ProtocolAbort, match="not the saved state of a server"):
        load_server(client)
    with pytest.raises(ProtocolAbort, match="version 3"):
        ClientSession.load(json.dumps({**without_checksum(client), "version": 3}).encode())
    for load, data in ((ClientSession.load, client), (load_server, coordinator)):
        for wrong in (b"", b"\xff\xfe", b"[]", b"7", data[:-2], data[: len(data) // 2]):
            with pytest.raises(ProtocolAbort):
                load(wrong)
        whole = without_checksum(data)
        for name in set(whole) - {"dither-secagg", "version"}:
            missing = {key: value for key, value in whole.items() if key != name}
            with pytest.raises(ProtocolAbort, match="damaged"):
                load(json.dumps(missing).encode())
            for other in (None, 5, "zz", [], {}, [[]]):
                # No other exception; where the value is a possible one (no pins, no attempt) it loads.
                with contextlib.suppress(DitherError):
                    load(json.dumps({**whole, name: other}).encode())


def test_the_same_keys_without_their_state_share_nothing_old():
    """Who lost its state and enrols anew with its old keys is shown no old roster: masks are never used twice."""
    server, clients = strangers(IDS, Rules())
    roster = enrol_all(server, clients)
    old = clients[0]
    fresh = ClientSession(
        0, federation=old.federation, server=old.server, rules=old.rules,
        signing=old.signing.private, agreement=old.agreement.private,
    )  # fmt: skip
    assert fresh.hello() != old.hello()
    with pytest.raises(ProtocolAbort, match="keys for client 0 that are not its own"):
        fresh.confirm(roster)


def enrol_all(server, clients):
    for client in clients.values():
        server.hello(client.hello())
    roster = server.make_roster()
    for client in clients.values():
        server.confirm(client.confirm(roster))
    return roster
