"""The bytes of a message: their layout, and the only form that is read."""

import struct

import pytest

from dither.errors import ProtocolAbort
from dither.secagg import messages, primitives
from dither.secagg.messages import Kind, Reader, pack, parse

KEY = primitives.SigningKey(bytes(range(32)))
FEDERATION = b"F" * 32


def message(payload=b"payload", kind=Kind.UPLOAD, sender=3, **place):
    return pack(kind, FEDERATION, sender, payload, KEY.sign, **place)


def test_the_layout_is_the_documented_one():
    found = message(round_index=0x0102030405, attempt=6)
    assert found[:4] == b"DSAG"
    assert found[4:6] == bytes([2, Kind.UPLOAD])
    assert found[6:38] == FEDERATION
    assert struct.unpack("<QIIQ", found[38:62]) == (0x0102030405, 6, 3, 7)
    assert found[62:69] == b"payload"
    label = b"dither secagg message, version 1\n"
    primitives.verify(KEY.public, found[69:], label + primitives.digest(found[:69]), "it")
    assert len(found) == messages.HEADER_BYTES + 7 + 64


def test_there_and_back():
    found = parse(message(round_index=5, attempt=2), federation=FEDERATION, expect=Kind.UPLOAD)
    assert (found.kind, found.round_index, found.attempt, found.sender) == (Kind.UPLOAD, 5, 2, 3)
    assert bytes(found.payload) == b"payload"
    found.verify(KEY.public)
    assert found.name == "upload of client 3, round 5, attempt 2"


def edited(place: int, value: bytes) -> bytes:
    found = message()
    return found[:place] + value + found[place + len(value) :]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated: 0 bytes"),
        (bytearray(message()), "a message is bytes, not bytearray"),
        ("text", "a message is bytes, not str"),
        (None, "a message is bytes, not NoneType"),
        (message()[:125], "truncated: 125 bytes are less than header and signature"),
        (message()[:-1], "truncated: upload has 132 bytes, its header says 133"),
        (message() + b"x", "oversized: upload has 134 bytes, its header says 133"),
        (edited(0, b"HTTP"), "not a secure-aggregation message: it begins with b'HTTP'"),
        (edited(4, b"\x01"), "protocol version 1, this is version 2"),
        (edited(5, b"\x00"), "unknown kind of message: 0"),
        (edited(5, b"\x0b"), "unknown kind of message: 11"),
        (edited(5, b"\x07"), "got shares, expected upload"),
        (edited(6, b"G"), "upload of another federation, 474646"),
        (edited(50, b"\xff\xff\xff\xff"), "upload with sender 4294967295: only clients send it"),
        (edited(54, struct.pack("<Q", 2**60)), "oversized: upload with 1152921504606846976 bytes, at most"),
        (edited(38, b"\xff" * 8), "upload with round 18446744073709551615, attempt 0: out of range"),
        (edited(46, b"\xff" * 4), "attempt 4294967295: out of range"),
        (message(kind=Kind.ANNOUNCE, sender=messages.SERVER), "got announce, expected upload"),
    ],
)
def test_each_malformed_message_is_refused_with_the_reason(data, reason):
    with pytest.raises(ProtocolAbort, match=reason):
        parse(data, federation=FEDERATION, expect=Kind.UPLOAD)


def test_only_the_server_speaks_for_the_server():
    for kind in Kind:
        wrong = 3 if kind % 2 == 0 else messages.SERVER
        with pytest.raises(ProtocolAbort, match=r"only (the server sends|clients send) it"):
            parse(message(b"", kind, wrong), federation=FEDERATION, expect=kind)


def test_enrolment_has_no_rounds():
    with pytest.raises(ProtocolAbort, match="hello with round 1, attempt 0: out of range"):
        parse(message(bytes(64), Kind.HELLO, round_index=1), federation=FEDERATION, expect=Kind.HELLO)


def test_every_bit_is_signed():
    genuine = message(round_index=1)
    for bit in range(8 * len(genuine)):
        data = bytearray(genuine)
        data[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(ProtocolAbort):
            parse(bytes(data), federation=FEDERATION, expect=Kind.UPLOAD).verify(KEY.public)


def test_a_payload_is_read_to_its_end():
    found = parse(message(b"\x05\x00abc"), federation=FEDERATION, expect=Kind.UPLOAD)
    reader = Reader(found)
    assert reader.number(2, "a number", most=5) == 5
    with pytest.raises(ProtocolAbort, match="oversized, 3 bytes too many"):
        reader.done()
    with pytest.raises(ProtocolAbort, match="truncated, a key needs 4 bytes, 3 are left"):
        reader.take(4, "a key")
    assert reader.take(3, "a key") == b"abc"
    reader.done()
    with pytest.raises(ProtocolAbort, match="oversized, a number is 5, at most 4"):
        Reader(found).number(2, "a number", most=4)


def test_what_cannot_be_written_is_not_sent():
    for wrong in ({"round_index": 2**63}, {"round_index": -1}, {"attempt": 2**31}):
        with pytest.raises(ProtocolAbort, match="out of range"):
            message(**wrong)
