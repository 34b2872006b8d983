"""Who lied about a seal: its maker or those who say that they could not use their shares."""

import itertools
import struct

import numpy as np
import pytest

from dither.errors import ProtocolAbort
from dither.secagg import primitives, shamir
from dither.secagg.client import NO_SHARE, SEAL_ENTRY
from dither.secagg.messages import SERVER, Kind, pack
from tests.secagg.support import (
    IDS,
    announcement,
    payload_of,
    plain_sum,
    resign,
    twin,
    without_share,
)


def upload_all(server, clients, values, spoil=lambda cohort, seal: seal, round_index=0):
    """All upload; the first of the committee spoils its seal. Returns who that is."""
    message = server.announce(round_index, clients, 5)
    maker = server._attempt.cohort.committee[0]
    honest = clients[maker]._seal
    clients[maker]._seal = lambda cohort, seed: spoil(cohort, honest(cohort, seed))
    for who in server.cohort:
        server.upload(clients[who].upload(message, values[who]))
    clients[maker]._seal = honest
    return maker


def answer_all(server, clients, change=lambda who, answer: answer):
    for who, request in server.unseal().items():
        server.shares(change(who, clients[who].unseal(request)))


def accuse(server, clients, maker, accusers):
    """All answer; the first of them say falsely that the maker's share is no use."""
    false = [who for who in IDS if who != maker][:accusers]

    def change(who, answer):
        return without_share(answer, clients[who].signing, maker) if who in false else answer

    answer_all(server, clients, change)


def settle(server, clients):
    for who, dispute in server.disputes().items():
        server.released(clients[who].release(dispute))


def spoiled(places):
    """A seal whose shares at these places do not decrypt."""

    def spoil(cohort, seal):
        found = bytearray(seal)
        for place in places:
            found[32 + place * SEAL_ENTRY + 40] ^= 1
        return bytes(found)

    return spoil


def test_shares_that_do_not_decrypt_are_released_by_an_honest_maker_and_condemn_a_liar(five):
    server, clients, values = five
    maker = upload_all(server, clients, values, spoiled(range(5)))
    answer_all(server, clients)
    assert not server.ready
    assert {found for found, _ in server.disputed} == {maker}
    assert list(server.disputes()) == [maker]
    # Five say so, more than may lie: the maker is condemned even if it never answers.
    assert list(server.liars()) == [maker]
    with pytest.raises(ProtocolAbort, match="does not decrypt"):
        clients[maker].release(server.disputes()[maker])  # its own words convict it


def test_a_maker_that_lied_to_a_few_may_put_it_right(five):
    """Nothing is lost, so nobody has to be blamed."""
    server, clients, values = five
    maker = upload_all(server, clients, values)
    places = [place for place, who in enumerate(IDS) if who != maker][:2]
    server._attempt.seals[maker].ciphertexts |= {IDS[place]: bytes(61) for place in places}
    answer_all(server, clients)
    assert not server.ready
    settle(server, clients)
    assert server.ready
    assert server.liars() == {}
    np.testing.assert_array_equal(server.open(), plain_sum(values.values()))


@pytest.mark.parametrize("accusers", [1, 2, 4])
def test_false_accusers_frame_nobody(five, accusers):
    """However many say that an honest maker's share is no use: it releases them, and the sum opens."""
    server, clients, values = five
    maker = upload_all(server, clients, values)
    accuse(server, clients, maker, accusers)
    assert server.ready == (accusers == 1)
    settle(server, clients)
    assert server.ready
    assert server.liars() == {}
    np.testing.assert_array_equal(server.open(), plain_sum(values.values()))


def test_as_many_accusers_as_may_lie_condemn_nobody_who_is_away(five):
    """Two are away, one lies about an honest maker that does not answer any more: the round fails, unblamed."""
    server, clients, values = five
    maker = upload_all(server, clients, values)
    accuser, gone = [who for who in IDS if who != maker][:2]
    for who, request in server.unseal().items():
        answer = clients[who].unseal(request)
        if who == accuser:
            answer = without_share(answer, clients[who].signing, maker)
        if who != gone:
            server.shares(answer)
    assert not server.ready
    assert list(server.disputes()) == [maker]
    assert server.liars() == {}


def test_shares_of_no_polynomial_condemn_their_maker(five):
    """Each is the one committed to, and any four of them join to something else."""
    server, clients, values = five

    def split(seed, *, shares, threshold):
        return [primitives.digest(seed, bytes([at])).rjust(33, b"\0") for at in range(shares)]

    with pytest.MonkeyPatch.context() as patch:
        message = server.announce(0, IDS, 5)
        maker = server._attempt.cohort.committee[0]
        for who in IDS:
            with patch.context() as inner:
                if who == maker:
                    inner.setattr(shamir, "split", split)
                server.upload(clients[who].upload(message, values[who]))
    answer_all(server, clients)
    assert server.ready
    assert list(server.liars()) == [maker]


def test_a_maker_that_releases_what_it_never_committed_to_is_condemned(five):
    server, clients, values = five
    maker = upload_all(server, clients, values)
    accuse(server, clients, maker, 2)
    release = clients[maker].release(server.disputes()[maker])
    body = payload_of(release)
    assert len(body) == 36 + 2 * 37
    wrong = body[:72] + bytes([body[72] ^ 1]) + body[73:-1] + bytes([body[-1] ^ 1])
    server.released(resign(release, clients[maker].signing, wrong))
    assert not server.ready
    assert list(server.liars()) == [maker]


# A server that misuses disputes


def dispute(server, answers, **place):
    quoted = b"".join(struct.pack("<I", len(answer)) + answer for answer in answers)
    body = server._attempt.cohort.digest + struct.pack("<I", len(answers)) + quoted
    place = {"round_index": 0, "attempt": 0, **place}
    return pack(Kind.DISPUTE, server.federation, SERVER, body, server.signing.sign, **place)


def test_a_share_is_released_only_for_one_who_has_unsealed(five):
    """Else a maker alone would open its seal, and the server could sum again without it."""
    server, clients, values = five
    maker = upload_all(server, clients, values)
    other, third = [who for who in IDS if who != maker][:2]
    answer = clients[other].unseal(server.unseal()[other])
    forged = resign(answer, clients[other].signing, sender=third)
    stranger = primitives.SigningKey(primitives.fresh_key())
    for reason, wrong in [
        ("bad signature", dispute(server, [forged])),
        ("bad signature", dispute(server, [resign(answer, stranger)])),
        ("got upload, expected shares", dispute(server, [resign(answer, clients[other].signing, kind=5)])),
        ("is not about", dispute(server, [resign(answer, clients[other].signing, bytes(32))])),
        ("wrong round", dispute(server, [answer], round_index=1)),
        ("wrong attempt", dispute(server, [answer], attempt=1)),
        ("number of answers is 6", dispute(server, [answer] * 6)),
        (
            "truncated",
            resign(dispute(server, [answer]), server.signing, payload_of(dispute(server, [answer]))[:-1]),
        ),
    ]:
        with pytest.raises(ProtocolAbort, match=reason):
            clients[maker].release(wrong)
    outside = next(who for who in IDS if who not in server._attempt.cohort.committee)
    with pytest.raises(ProtocolAbort, match="sealed nothing"):
        clients[outside].release(dispute(server, [answer]))
    released = payload_of(clients[maker].release(dispute(server, [answer])))
    assert released[36:40] == struct.pack("<I", other)
    assert (
        server._attempt.cohort.commitment(maker, server._attempt.cohort.number(other), released[40:])
        == (server._attempt.seals[maker].commitments[other])
    )


def test_no_division_of_the_clients_opens_two_attempts_with_disputes(five):
    """Each honest client unseals one of two attempts, the colluder both, and every maker is asked to release all
    it can for both. At most one of the two opens."""
    server, clients, values = five
    first = announcement(server, IDS, threshold=4)
    server.announce(0, IDS, 5)
    uploads = {who: clients[who].upload(first, values[who]) for who in IDS}
    for upload in uploads.values():
        server.upload(upload)
    early = {who: twin(client) for who, client in clients.items()}  # those who never hear of the second attempt
    old_attempt, old = server._attempt, server.unseal()
    old_attempt.unsealing = False
    server.announce(0, IDS[:4], 5)
    second = server.announcement()
    for who in IDS[:4]:
        server.upload(clients[who].upload(second, values[who]))
    new_attempt, new = server._attempt, server.unseal()
    old_attempt.unsealing = True
    liar = 2
    honest = [who for who in IDS if who != liar]
    for size in range(len(honest) + 1):
        for some in itertools.combinations(honest, size):
            opened = 0
            for attempt, requests, members, who_answers in (
                (old_attempt, old, early, {*some, liar}),
                (new_attempt, new, clients, {*honest, liar} - set(some)),
            ):
                server._attempt = attempt
                attempt.answers.clear()
                for seal in attempt.seals.values():
                    seal.shares.clear()
                for who in who_answers & requests.keys():
                    answer = twin(members[who]).unseal(requests[who])
                    for maker in attempt.cohort.committee:  # all say that they got nothing: all is disputed
                        answer = without_share(answer, members[who].signing, maker)
                    server.shares(answer)
                quoted = dispute(server, list(attempt.answers.values()), attempt=attempt.cohort.attempt)
                for maker in attempt.cohort.committee:
                    server.released(twin(members[maker]).release(quoted))
                opened += server.ready
            assert opened <= 1, some


def test_a_client_that_restarts_can_still_release(five):
    server, clients, values = five
    maker = upload_all(server, clients, values)
    accuse(server, clients, maker, 2)
    clients[maker] = twin(clients[maker])
    settle(server, clients)
    np.testing.assert_array_equal(server.open(), plain_sum(values.values()))


def test_no_share_is_no_element_of_the_field():
    with pytest.raises(ProtocolAbort, match="not a reduced element"):
        shamir.read(NO_SHARE)
