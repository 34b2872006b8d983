"""Messages: what is read is what was signed; everything else is refused with its reason."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dither.errors import FederationError
from dither.federation import messages
from dither.federation.keys import Identity
from dither.simulation import devices

ANN, EVE = Identity(bytes(range(32))), Identity(bytes(32))
KEYS = {"ann": ANN.public}


def packed(**changes):
    values = {
        "federation": "f",
        "kind": "upload",
        "sender": "ann",
        "to": messages.SERVER,
        "fields": {"round": 3},
        "arrays": {"upload": np.arange(6, dtype=np.float32).reshape(2, 3), "secagg": b"abc"},
        "answers": "q",
    }
    return messages.pack(values.pop("identity", ANN), **{**values, **changes})


def read(content, **changes):
    return messages.unpack(
        content, **{"federation": "f", "to": messages.SERVER, "keys": KEYS, "answers": "q", **changes}
    )


def test_what_is_read_is_what_was_signed():
    message = read(packed())
    assert (message.kind, message.sender, message.fields) == ("upload", "ann", {"round": 3})
    np.testing.assert_array_equal(message.array("upload"), np.arange(6, dtype=np.float32).reshape(2, 3))
    assert message.bytes("secagg") == b"abc"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"federation": "g"}, "another federation"),
        ({"to": "bob"}, r"for '\(server\)'"),
        ({"answers": "other"}, "another question"),
        ({"keys": {"bob": ANN.public}}, "unknown"),
        ({"keys": {"ann": EVE.public}}, "did not sign"),
    ],
)
def test_what_is_not_for_us_is_refused(changes, reason):
    with pytest.raises(FederationError, match=reason):
        read(packed(), **changes)


def test_nobody_speaks_for_another():
    with pytest.raises(FederationError, match=r"did not sign"):
        read(messages.pack(EVE, federation="f", kind="upload", sender="ann", to=messages.SERVER, answers="q"))


def test_an_array_keeps_its_shape():
    arrays = {"number": np.array(2.5, np.float32), "none": np.zeros((0, 3), np.float32)}
    message = read(packed(arrays=arrays))
    assert {name: array.shape for name, array in message.arrays.items()} == {"number": (), "none": (0, 3)}
    assert message.array("number") == 2.5


def test_only_a_hello_is_for_anyone():
    content = packed(to=messages.ANYONE)
    with pytest.raises(FederationError, match=r"for '\(anyone\)'"):
        read(content)
    assert read(packed(to=messages.ANYONE, kind="hello"), to="bob").kind == "hello"


def test_fields_and_arrays_must_have_their_types():
    message = read(packed())
    with pytest.raises(FederationError, match=r"'round' is 3, not str"):
        message.field("round", str)
    with pytest.raises(FederationError, match=r"without 'absent'"):
        message.array("absent")
    with pytest.raises(FederationError, match=r"has type float32"):
        message.bytes("upload")
    with pytest.raises(FederationError, match=r"do not carry"):
        packed(arrays={"upload": np.array(["text"])})


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_message_that_was_touched_is_refused(data):
    content = bytearray(packed())
    how = data.draw(st.sampled_from(["flip", "cut", "extend", "header"]))
    if how == "flip":
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    elif how == "cut":
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    elif how == "extend":
        content += data.draw(st.binary(min_size=1, max_size=80))
    else:
        content[5:9] = data.draw(st.integers(0, 2**32 - 1)).to_bytes(4, "little")
    if bytes(content) == packed():
        return
    with pytest.raises(FederationError):
        read(bytes(content))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_signed_message_of_a_malicious_party_is_refused_or_well_formed(data):
    """Headers that somebody signed but nobody should believe: never another exception than ours."""
    junk = st.one_of(st.none(), st.integers(), st.text(max_size=5), st.lists(st.integers(), max_size=3))
    header = {
        "federation": "f",
        "kind": "upload",
        "from": "ann",
        "to": messages.SERVER,
        "nonce": "",
        "answers": "q",
        "fields": {},
        "arrays": [],
    }
    for key in data.draw(st.lists(st.sampled_from(["kind", "fields", "arrays", "to", "answers"]), max_size=3)):
        header[key] = data.draw(junk)
    if data.draw(st.booleans()):
        header["arrays"] = [["x", data.draw(st.sampled_from(["<f4", "<f8", "O"])), data.draw(junk)]]
    text = json.dumps(header).encode()
    body = messages._HEAD.pack(b"DTHR", 1, len(text)) + text + data.draw(st.binary(max_size=16))
    try:
        message = read(body + ANN.sign(body))
    except FederationError:
        return
    assert all(isinstance(array, np.ndarray) for array in message.arrays.values())


def test_a_partys_words_cannot_write_on_the_servers_screen():
    assert messages._plain("no\x1b[2J\nround 1/3  4 parties") == "no [2J round 1/3  4 parties"
    assert len(messages._plain("x" * 10_000)) == 400


def test_a_hello_must_say_what_is_asked():
    def hello(**fields):
        return read(packed(kind="hello", fields=fields))

    facts = messages._facts(hello(records=3, versions={"dither": "1", "other": "x"}, party="cat", event="done"))
    assert facts["records"] == 3
    assert facts["versions"]["dither"] == "1"
    assert set(facts) == {"records", "versions"}
    assert set(facts["versions"]) == set(devices.versions())
    wrong = [{"records": each, "versions": {}} for each in ("3", True, -1, 2**31)]
    wrong += [{"records": 3, "versions": {}, "epsilon": each} for each in ("1", True, 0, -1.0, 10**400)]
    for fields in (*wrong, {"records": 3}, {}):
        assert messages._facts(hello(**fields)) is None
