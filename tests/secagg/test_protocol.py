"""The state machines: an honest run is exact, and each rule is kept against a party with a valid key."""

import copy
import itertools
import struct

import numpy as np
import pytest

from dither.errors import ProtocolAbort, SpecError
from dither.secagg import primitives, shamir
from dither.secagg.client import NO_SHARE, ClientSession
from dither.secagg.graph import Rules
from dither.secagg.roster import AnnouncedCohort
from tests.secagg.support import (
    IDS,
    announcement,
    enrolled,
    payload_of,
    plain_sum,
    resign,
    snapshot,
    strangers,
    twin,
    vectors,
)


def refused(session, reason, call, *arguments):
    """The call aborts for this reason and changes nothing."""
    before = snapshot(session)
    with pytest.raises(ProtocolAbort, match=reason):
        call(*arguments)
    assert snapshot(session) == before


def uploaded(server, clients, values, round_index=0):
    message = server.announce(round_index, clients, len(next(iter(values.values()))))
    for who in server.cohort:
        server.upload(clients[who].upload(message, values[who]))
    return message


# Honest runs


@pytest.mark.parametrize("bits", [32, 64])
def test_the_sum_is_exact_round_after_round(bits):
    server, clients = enrolled(IDS, Rules(bits, colluders=1, min_clients=3))
    for round_index in (0, 1, 5):
        values = vectors(IDS, server.rules, seed=round_index)
        uploaded(server, clients, values, round_index)
        for who, request in server.unseal().items():
            server.shares(clients[who].unseal(request))
        assert np.array_equal(server.open(), plain_sum(values.values()))
        assert np.array_equal(server.open(), plain_sum(values.values()))  # asking again changes nothing


def test_before_the_seals_are_off_the_server_holds_noise(five):
    """All uploads are in, all pair masks have cancelled, and what is left is still masked by the committee."""
    server, clients, values = five
    uploaded(server, clients, values)
    assert not np.any(server._attempt.total == plain_sum(values.values()))  # 5 words: by chance 1 in 2^30


def test_any_threshold_of_answers_opens_the_same_sum(five):
    server, clients, values = five
    uploaded(server, clients, values)
    requests = server.unseal()
    threshold = server._attempt.cohort.threshold
    assert threshold == 4
    for some in itertools.combinations(IDS, threshold - 1):
        server._attempt.answers.clear()
        for seal in server._attempt.seals.values():
            seal.shares.clear()
        for who in some:
            server.shares(clients[who].unseal(requests[who]))
        assert not server.ready
        refused(server, "3 shares received, threshold is 4", server.open)
    last = next(who for who in IDS if who not in some)
    server.shares(clients[last].unseal(requests[last]))
    assert server.ready
    assert np.array_equal(server.open(), plain_sum(values.values()))


def test_survivors_are_announced_as_a_new_attempt(five):
    server, clients, values = five
    message = server.announce(0, IDS, 5)
    for who in IDS[1:]:
        server.upload(clients[who].upload(message, values[who]))
    assert server.missing == (2,)
    refused(server, "clients 2 have not arrived; reannounce without them", server.unseal)
    message = server.reannounce()
    assert (server.attempt, server.cohort) == (1, IDS[1:])
    for who in IDS[1:]:
        server.upload(clients[who].upload(message, values[who]))
    for who, request in server.unseal().items():
        server.shares(clients[who].unseal(request))
    assert np.array_equal(server.open(), plain_sum(values[who] for who in IDS[1:]))


def test_too_few_survivors_abort_the_round(five):
    server, clients, values = five
    message = server.announce(0, IDS, 5)
    for who in IDS[:3]:
        server.upload(clients[who].upload(message, values[who]))
    refused(server, "a cohort of 3 clients, threshold is 4", server.reannounce)
    server.announce(1, IDS, 5)  # the next round goes on with everyone


def test_the_same_announcement_gets_the_same_bytes(five):
    server, clients, values = five
    message = server.announce(0, IDS, 5)
    for client in clients.values():
        assert client.upload(message, values[client.who]) == client.upload(message, values[client.who])


# The late upload: why sums are sealed


def test_a_late_upload_of_an_old_attempt_opens_nothing(five):
    """Client 2's upload of attempt 0 comes after the others were announced as attempt 1. The server now holds all
    uploads of both attempts; the difference of the two sums would be client 2's vector."""
    server, clients, values = five
    first = server.announce(0, IDS, 5)
    late = {who: clients[who].upload(first, values[who]) for who in IDS}
    for who in IDS[1:]:
        server.upload(late[who])
    book = twin_with_uploads(server)
    second = server.reannounce()
    refused(server, "wrong attempt: upload of client 2, round 0, attempt 0, the newest is", server.upload, late[2])
    for who in IDS[1:]:
        server.upload(clients[who].upload(second, values[who]))
    # A dishonest server keeps a second book, in which attempt 0 is still open.
    book.upload(late[2])
    old = book.unseal()
    for who in IDS[1:]:
        refused(clients[who], "wrong attempt: unseal of the server, round 0, attempt 0, the newest",
                clients[who].unseal, old[who])  # fmt: skip
    for who, request in server.unseal().items():
        server.shares(clients[who].unseal(request))
    assert np.array_equal(server.open(), plain_sum(values[who] for who in IDS[1:]))


@pytest.mark.parametrize(("size", "colluders"), [(4, 0), (5, 0), (5, 1), (6, 1), (6, 2), (7, 2)])
def test_no_division_of_the_clients_opens_two_attempts(size, colluders):
    """A dishonest server collects all uploads of attempt 0, then announces any part of the clients as attempt 1
    and asks everyone to unseal both; its colluders answer both ways. It never gets enough answers to both, and the
    threshold could not be lower: with one answer less needed, the best division would open two sums."""
    ids, helpers = range(size), set(range(colluders))
    rules = Rules(colluders=colluders, min_clients=colluders + 2)
    threshold, best = rules.threshold_for(size), 0
    server, clients = enrolled(ids, rules)
    values = vectors(ids, rules)
    parts = itertools.chain.from_iterable(itertools.combinations(ids, n) for n in range(threshold, size))
    for round_index, part in enumerate(parts):
        uploaded(server, clients, values, round_index)
        first = twin_with_uploads(server).unseal()
        before = {who: twin(clients[who]) for who in helpers}
        second = server.announce(round_index, part, 5)
        for who in part:
            server.upload(clients[who].upload(second, values[who]))
        answers = [0, 0]
        for attempt, requests in enumerate((first, server.unseal())):
            for who, request in requests.items():
                party = before[who] if who in helpers and not attempt else clients[who]
                try:
                    party.unseal(request)
                except ProtocolAbort as reason:
                    assert "wrong attempt" in str(reason)  # noqa: PT017
                else:
                    answers[attempt] += 1
        assert min(answers) < threshold
        best = max(best, answers[0])
    assert best == size - threshold + colluders  # and so a threshold t with size - t + colluders >= t opens both
    assert size - (threshold - 1) + colluders >= threshold - 1


def twin_with_uploads(server):
    found = twin(server)
    found._attempt = copy.deepcopy(server._attempt)
    return found


def test_a_threshold_at_which_two_sums_could_be_opened_is_refused(five):
    server, clients, values = five
    reason = (
        "threshold 3 is too low for a cohort of 5 with 1 colluders: two sums could be opened; at least 4 is safe"
    )
    refused(clients[2], reason, clients[2].upload, announcement(server, IDS, threshold=3), values[2])
    clients[2].upload(announcement(server, IDS, threshold=4), values[2])
    # Nor may it be lowered when the cohort has shrunk: attempt 0 still needs only 4 of the same 5 clients.
    refused(clients[2], "changes the round's threshold", clients[2].upload,
            announcement(server, IDS[:4], attempt=1, threshold=3), values[2])  # fmt: skip


# What a client refuses from a server with a valid key


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ((2,), "a cohort of 1: the sum would be the client's own vector"),
        ((), "not in the announced cohort|a cohort of 0"),
        ((2, 3), "a cohort of 2 clients, min_clients is 3"),
        ((3, 5, 7, 11), "client 2 is not in the announced cohort"),
        ((2, 3, 5, 8), "client 8 is not on the roster"),
        ((2, 3, 3, 5), "strictly ascending"),
        ((3, 2, 5, 7), "strictly ascending"),
    ],
)
def test_a_client_refuses_cohorts_that_do_not_protect_it(five, ids, reason):
    server, clients, values = five
    refused(clients[2], reason, clients[2].upload, announcement(server, ids), values[2])


def test_a_client_keeps_to_one_cohort_and_one_vector_for_an_attempt(five):
    server, clients, values = five
    client = clients[2]
    message = announcement(server, IDS, round_index=4)
    later = announcement(server, IDS[:4], round_index=4, attempt=1, threshold=4)
    refused(client, "a round begins with attempt 0", client.upload, later, values[2])
    client.upload(message, values[2])
    other = values[2].copy()
    other[0] += 1
    for reason, announced, vector in [
        ("round 4, attempt 0 was answered with another vector", message, other),
        ("before with another cohort", announcement(server, IDS[:4], round_index=4), values[2]),
        ("attempt 2 comes after attempt 0", announcement(server, IDS[:4], round_index=4, attempt=2), values[2]),
        ("attempt 1 loses nobody", announcement(server, IDS, round_index=4, attempt=1), values[2]),
        ("wrong round: 3 is over", announcement(server, IDS, round_index=3, attempt=9), values[2]),
        ("the round's threshold or length", announcement(server, IDS[:4], round_index=4, attempt=1, dimension=6),
         np.zeros(6, np.uint32)),
    ]:  # fmt: skip
        refused(client, reason, client.upload, announced, vector)
    client.upload(later, values[2])
    refused(client, "wrong attempt: 0 is over", client.upload, message, values[2])
    refused(client, "client 11 joins in round 4, attempt 2", client.upload,
            announcement(server, IDS, round_index=4, attempt=2), values[2])  # fmt: skip


def test_after_unsealing_there_is_no_upload_in_that_round(five):
    server, clients, values = five
    message = uploaded(server, clients, values)
    requests = server.unseal()
    answer = clients[2].unseal(requests[2])
    assert clients[2].unseal(requests[2]) == answer  # a lost answer may be asked for again
    for announced in (message, announcement(server, IDS[:4], attempt=1, threshold=4)):
        refused(
            clients[2],
            "round 0 is over: this client unsealed its attempt 0",
            clients[2].upload,
            announced,
            values[2],
        )
    refused(server, "round 0 is over: its attempt 0 is being opened", server.reannounce)
    clients[2].upload(announcement(server, IDS, round_index=1), values[2])
    refused(clients[2], "wrong round: unseal of the server, round 0", clients[2].unseal, requests[2])


def test_a_client_unseals_only_what_it_uploaded_for(five):
    server, clients, values = five
    refused(clients[2], "unseal before any upload", clients[2].unseal,
            resign(announcement(server, IDS), server.signing, kind=8))  # fmt: skip
    uploaded(server, clients, values)
    requests = server.unseal()
    body = payload_of(requests[2])
    for reason, changed in [
        ("wrong round: unseal of the server, round 1, attempt 0, the newest is round 0", {"round_index": 1}),
        ("wrong attempt: unseal of the server, round 0, attempt 1", {"attempt": 1}),
        ("is about another cohort", {"payload": bytes(32) + body[32:]}),
        ("the committee is", {"payload": body[:32] + struct.pack("<I", 1) + body[36 : 36 + 65]}),
        ("oversized, 65 bytes too many", {"payload": body + body[36 : 36 + 65]}),
        (
            "number of encrypted shares is 3, at most 2",
            {"payload": body[:32] + struct.pack("<I", 3) + body[36:] + bytes(65)},
        ),
    ]:
        refused(clients[2], reason, clients[2].unseal, resign(requests[2], server.signing, **changed))
    refused(clients[2], "bad signature", clients[2].unseal, resign(requests[2], clients[3].signing))


def shares_in(answer):
    """The shares of an answer, by their maker."""
    body = payload_of(answer)
    return {int.from_bytes(body[at : at + 4], "little"): body[at + 4 : at + 37] for at in range(36, len(body), 37)}


def test_a_share_that_does_not_decrypt_is_answered_with_none(five):
    """Altered, or meant for another: the client says which one it could not use, and gives the others."""
    server, clients, values = five
    uploaded(server, clients, values)
    requests = server.unseal()
    body = payload_of(requests[2])
    last = server._attempt.cohort.committee[-1]
    altered = resign(requests[2], server.signing, body[:-1] + bytes([body[-1] ^ 1]))
    found = shares_in(clients[2].unseal(altered))
    assert [maker for maker, share in found.items() if share == NO_SHARE] == [last]
    found = shares_in(clients[2].unseal(resign(requests[2], server.signing, payload_of(requests[3]))))
    assert set(found.values()) == {NO_SHARE}


def test_a_share_of_another_round_or_attempt_does_not_decrypt(five):
    """Ciphertexts of round 0, sent again in round 1 with everything else as it should be."""
    server, clients, values = five
    uploaded(server, clients, values)
    old = server.unseal()
    uploaded(server, clients, values, 1)
    before = {struct.unpack_from("<I", payload_of(old[2]), 36 + 65 * n)[0] for n in (0, 1)}
    while set(server._attempt.cohort.committee) != before:  # another round with the same committee
        uploaded(server, clients, values, server._attempt.cohort.round_index + 1)
    new = server.unseal()[2]
    stale = resign(new, server.signing, payload=payload_of(new)[:36] + payload_of(old[2])[36:])
    assert set(shares_in(clients[2].unseal(stale)).values()) == {NO_SHARE}


def test_a_client_wants_the_announced_vector(five):
    server, clients, values = five
    message = server.announce(0, IDS, 5)
    for wrong in (
        values[2][:4],
        values[2].astype(np.uint64),
        values[2].astype(np.int32),
        values[2].reshape(5, 1),
        [1] * 5,
    ):
        refused(clients[2], "5 words of uint32 were announced", clients[2].upload, message, wrong)


# What the server refuses


def test_the_server_refuses_uploads_that_do_not_belong(five):
    server, clients, values = five
    message = server.announce(0, IDS, 5)
    uploads = {who: clients[who].upload(message, values[who]) for who in IDS}
    inside = server._attempt.cohort.committee[0]
    outside = next(who for who in IDS if who not in server._attempt.cohort.committee)
    good, body = uploads[outside], payload_of(uploads[outside])
    key = clients[outside].signing
    stranger = ClientSession(13, federation=server.federation, server=server.signing.public, rules=server.rules)
    for reason, wrong in [
        ("wrong round", resign(good, key, round_index=1)),
        ("wrong attempt", resign(good, key, attempt=1)),
        (
            "bad signature: not by the sender of this upload of client",
            resign(good, key, sender=inside),
        ),  # impersonation
        ("bad signature", resign(good, stranger.signing)),
        ("client 13 is not on the roster", resign(good, stranger.signing, sender=13)),
        ("another cohort", resign(good, key, bytes(32) + body[32:])),
        ("truncated, the masked vector needs 20 bytes, 16 are left", resign(good, key, body[:-4])),
        ("oversized, 4 bytes too many", resign(good, key, body + bytes(4))),
        ("a seal of 497 bytes, expected 0", resign(good, key, body[:32] + payload_of(uploads[inside])[32:])),
        (
            "a seal of 0 bytes, expected 497",
            resign(uploads[inside], clients[inside].signing, body[:36] + body[36:]),
        ),
        ("got shares, expected upload", resign(good, key, kind=7)),
        ("hello with round 0|got hello, expected upload", resign(good, key, kind=1)),
    ]:
        refused(server, reason, server.upload, wrong)
    for who in IDS:
        server.upload(uploads[who])
        refused(
            server,
            f"replay: upload of client {who}, round 0, attempt 0 was already received",
            server.upload,
            uploads[who],
        )
    for who, request in server.unseal().items():
        server.shares(clients[who].unseal(request))
    assert np.array_equal(server.open(), plain_sum(values.values()))
    refused(server, "over", server.upload, uploads[2])


def test_a_client_outside_the_cohort_is_refused(five):
    server, clients, values = five
    everyone = announcement(server, IDS)
    server.announce(0, IDS[:4], 5)
    refused(server, "client 11, round 0, attempt 0: not in this cohort", server.upload,
            clients[11].upload(everyone, values[11]))  # fmt: skip
    refused(server, "another cohort", server.upload, clients[2].upload(everyone, values[2]))


def test_the_server_refuses_answers_that_do_not_belong_and_uses_no_share_but_those_committed_to(five):
    server, clients, values = five
    message = server.announce(0, IDS, 5)
    for who in IDS[1:]:
        server.upload(clients[who].upload(message, values[who]))
    last = clients[2].upload(message, values[2])
    early = resign(last, clients[2].signing, kind=7)
    refused(server, "nothing is being unsealed", server.shares, early)
    server.upload(last)
    answers = {who: clients[who].unseal(request) for who, request in server.unseal().items()}
    body, key = payload_of(answers[2]), clients[2].signing
    for reason, wrong in [
        ("the committee is", resign(answers[2], key, body[:32] + struct.pack("<I", 1) + body[36:73])),
        ("bad signature", resign(answers[2], clients[3].signing)),
        ("wrong round", resign(answers[2], key, round_index=1)),
        ("another cohort", resign(answers[2], key, bytes(32) + body[32:])),
    ]:
        refused(server, reason, server.shares, wrong)
    for wrong in (payload_of(answers[3]), body[:-1] + bytes([body[-1] ^ 1])):  # another's shares; an altered one
        other = copy.deepcopy(server._attempt)
        server._attempt, kept = other, server._attempt
        server.shares(resign(answers[2], key, wrong))
        assert 0 < len(server.disputed) <= 2
        assert all(who == 2 for _, who in server.disputed)
        server._attempt = kept
    for answer in answers.values():
        server.shares(answer)
    refused(server, "replay", server.shares, answers[2])
    assert server.disputed == []
    assert server.disputes() == {}
    assert server.liars() == {}
    assert np.array_equal(server.open(), plain_sum(values.values()))


def test_a_dishonest_committee_member_is_named(five):
    """It commits to one seed and shares another: only it can be the reason, and the sum is not opened wrongly."""
    server, clients, values = five
    message = server.announce(0, IDS, 5)
    member = server._attempt.cohort.committee[0]
    for who in IDS:
        upload = clients[who].upload(message, values[who])
        if who == member:
            body = payload_of(upload)
            upload = resign(upload, clients[who].signing, body[:36] + bytes(32) + body[68:])
        server.upload(upload)
    for who, request in server.unseal().items():
        server.shares(clients[who].unseal(request))
    assert set(server.liars()) == {member}
    refused(server, f"client {member}: it committed to a seal that is not the one it shared", server.open)


def test_the_server_opens_rounds_in_order(five):
    server, _, _ = five
    server.announce(3, IDS, 5)
    refused(server, "round numbers must increase", server.announce, 2, IDS, 5)
    refused(server, "client 12 is not on the roster", server.announce, 4, (*IDS, 12), 5)
    refused(server, "0 words; 1 to", server.announce, 4, IDS, 0)
    server.announce(3, IDS[:4], 5)
    refused(server, "a later attempt may only lose clients", server.announce, 3, IDS, 5)


# Enrolment


def test_rules_that_protect_nobody_are_refused():
    for wrong in (
        Rules(modulus_bits=16),
        Rules(min_clients=1),
        Rules(colluders=1, min_clients=2),
        Rules(threshold=1),
        Rules(neighbours=3),
        Rules(colluders=-1),
    ):
        with pytest.raises(SpecError, match="="):
            wrong.check()


def test_everyone_must_see_the_same_roster():
    """A server shows client 1 a roster with client 3, and client 2 one without."""
    rules = Rules()
    server, clients = strangers((1, 2, 3), rules)
    server.hello(clients[1].hello())
    server.hello(clients[2].hello())
    small = server.make_roster()
    server.roster = None
    server.hello(clients[3].hello())
    large = server.make_roster()
    mine, other = clients[1].confirm(large), clients[2].confirm(small)
    server.confirm(mine)
    refused(server, "client 2 confirms another roster", server.confirm, other)
    server.confirm(clients[3].confirm(large))
    refused(server, "not confirmed by clients 2", server.confirmed)
    # A dishonest server passes client 2's signature on nevertheless.
    server._confirmations[2] = other[-64:]
    refused(clients[1], "bad signature: not by the sender of this confirm of client 2", clients[1].confirmed,
            server.confirmed())  # fmt: skip
    refused(clients[2], "it is about another roster", clients[2].confirmed, server.confirmed())
    refused(clients[2], "a second roster", clients[2].confirm, large)
    refused(
        clients[1],
        "before enrolment is complete",
        clients[1].upload,
        announcement(server, (1, 2)),
        vectors([1], rules)[1],
    )
    assert not any(client.enrolled for client in clients.values())


def test_a_roster_with_an_exchanged_agreement_key_is_refused():
    """The classic attack on relayed keys: the server puts its own X25519 key beside client 2's identity."""
    server, clients = strangers((1, 2), Rules())
    for client in clients.values():
        server.hello(client.hello())
    server.make_roster()
    own = primitives.AgreementKey(primitives.fresh_key())
    members = dict(server.roster.members)
    members[2] = members[2]._replace(agreement=own.public)
    server.roster = type(server.roster)(server.federation, server.rules, members)
    refused(
        clients[1],
        "bad signature: not by the sender of this hello of client 2",
        clients[1].confirm,
        server.make_roster(),
    )


def test_pinned_identities_leave_no_room_for_others():
    server, clients = strangers((1, 2, 3), Rules())
    pins = {who: client.signing.public for who, client in clients.items() if who < 3}
    for client in clients.values():
        client.pins = dict(pins)
        server.hello(client.hello())
    refused(clients[1], "client 3 is on the roster, but not pinned", clients[1].confirm, server.make_roster())
    clients[1].pins = {**pins, 2: clients[3].signing.public}
    refused(
        clients[1],
        "client 2 is on the roster with a key that is not the pinned one",
        clients[1].confirm,
        server.make_roster(),
    )
    clients[1].pins = {4: pins[1]}
    refused(clients[1], "client 4 is not on the roster", clients[1].confirm, server.make_roster())
    clients[1].pins = {}
    refused(clients[1], "client 1 is on the roster, but not pinned", clients[1].confirm, server.make_roster())
    guarded, late = strangers((1, 2), Rules())
    guarded.pins = {1: late[1].signing.public}
    guarded.hello(late[1].hello())
    refused(guarded, "client 2 says hello with a key that is not the pinned one", guarded.hello, late[2].hello())


def test_what_a_client_asks_of_a_roster():
    server, clients = strangers((1, 2), Rules())
    for client in clients.values():
        server.hello(client.hello())
    message = server.make_roster()
    refused(
        clients[1],
        "confirmations arrived before a roster",
        clients[1].confirmed,
        resign(message, server.signing, kind=4),
    )
    refused(clients[1], "bad signature", clients[1].confirm, resign(message, clients[2].signing))
    clients[1].rules = Rules(colluders=1, min_clients=3)
    refused(clients[1], "are not those agreed on", clients[1].confirm, message)
    absent = ClientSession(5, federation=server.federation, server=server.signing.public, rules=Rules())
    refused(absent, "client 5 is not on the roster", absent.confirm, message)
    double = ClientSession(2, federation=server.federation, server=server.signing.public, rules=Rules())
    refused(double, "keys for client 2 that are not its own", double.confirm, message)
    foreign = ClientSession(2, federation=bytes(32), server=server.signing.public, rules=Rules())
    refused(foreign, "of another federation", foreign.confirm, message)


def test_who_may_enrol():
    server, clients = strangers((1, 2, 3), Rules())
    refused(server, "the roster is not closed yet", server.confirmed)
    server.hello(clients[1].hello())
    server.hello(clients[1].hello())  # the same once more is harmless
    double = ClientSession(1, federation=server.federation, server=server.signing.public, rules=Rules())
    refused(server, "client 1 is enrolled with other keys", server.hello, double.hello())
    thief = ClientSession(2, federation=server.federation, server=server.signing.public, rules=Rules())
    stolen = resign(thief.hello(), thief.signing, thief.signing.public + clients[1].agreement.public + thief.nonce)
    refused(server, "client 2 says hello with a key of client 1", server.hello, stolen)
    weak = resign(thief.hello(), thief.signing, thief.signing.public + bytes(32) + thief.nonce)
    refused(server, "small order", server.hello, weak)
    refused(server, "a roster of 1 clients, min_clients is 2", server.make_roster)
    server.hello(clients[2].hello())
    server.make_roster()
    refused(server, "the roster is closed", server.hello, clients[3].hello())
    refused(server, "announcement before enrolment is complete", server.announce, 0, (1, 2), 5)
    refused(server, "no round is open", server.upload, clients[1].hello())


# Different announcements for different clients


def test_clients_that_were_told_different_things_share_no_mask(five):
    """The same clients, one part told another threshold. Even if the server adds what it should refuse, and takes
    off all seals, the masks do not cancel: every key depends on every word of the announcement."""
    server, clients, values = five
    for round_index, told in enumerate(({4}, {4, 5}, {5})):
        total, seals = np.zeros(5, np.uint32), 0
        for who in IDS:
            threshold = min(told) if who in (2, 3) else max(told)
            message = announcement(server, IDS, round_index=round_index, threshold=threshold)
            total += np.frombuffer(clients[who].upload(message, values[who])[-84:-64], "<u4")
            found = clients[who]._attempt
            if found.seed:
                primitives.mask(total, [(found.cohort.seal_key(found.seed, who), -1)])
                seals += 1
        if len(told) == 1:
            assert seals == 2
            assert np.array_equal(total, plain_sum(values.values()))
        else:
            assert not np.any(total == plain_sum(values.values()))


def test_a_seal_is_fresh_at_every_attempt(five):
    server, clients, values = five
    seeds = set()
    for round_index in range(20):
        for client in clients.values():
            client.upload(announcement(server, IDS, round_index=round_index), values[client.who])
            seeds.add(client._attempt.seed)
    assert len(seeds - {b""}) == 40  # two members of the committee a round
    assert len(max(seeds)) == shamir.SECRET_BYTES


def test_the_committee_is_everyones_turn():
    server, _ = enrolled(range(10), Rules(colluders=1, min_clients=3))
    turns = np.zeros(10, int)
    for round_index in range(500):
        server.announce(round_index, range(10), 1)
        turns[list(server._attempt.cohort.committee)] += 1
    assert turns.sum() == 1000
    assert np.all(np.abs(turns - 100) < 5 * np.sqrt(500 * 0.2 * 0.8))


def test_what_is_asked_changes_every_key_and_neither_committee_nor_ring():
    """A server that could choose these by the low bits of a model would search for colluders."""
    server, _ = enrolled(range(9), Rules(colluders=1, neighbours=4, min_clients=3))
    one, other = (
        AnnouncedCohort(server.roster, 0, 0, 6, 3, tuple(range(9)), asked) for asked in (bytes(32), b"\x01" * 32)
    )
    assert one.digest != other.digest
    assert one.mask_key(bytes(32)) != other.mask_key(bytes(32))
    assert one.committee == other.committee
    assert [one.neighbours(who) for who in one.ids] == [other.neighbours(who) for who in other.ids]


def test_a_client_answers_what_it_was_asked():
    server, clients = enrolled(range(3))
    announced = server.announce(0, range(3), 2, b"\x01" * 32)
    vector = np.zeros(2, np.uint32)
    with pytest.raises(ProtocolAbort, match="for something else than what this client was asked"):
        clients[0].upload(announced, vector, b"\x02" * 32)
    for client in clients.values():
        server.upload(client.upload(announced, vector, b"\x01" * 32))
    assert not server.missing
