"""Messages between the coordinator and the nodes: a header, arrays, and the sender's signature, as bytes.

    magic "DTHR", version, length of the header, header as JSON, the arrays' bytes, Ed25519 signature over all of
    it

The header names the federation, the kind, the sender and the receiver; an answer quotes the digest of the message
it answers, so an old answer cannot stand for a new one. Reading is strict: exact lengths, known types of numbers,
no bytes left over. What cannot be read is a `FederationError` that names the reason.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dither.errors import FederationError
from dither.federation.keys import Identity, verify

SERVER = "(server)"  # no party may have brackets in its name
ANYONE = "(anyone)"  # the receiver of a hello, whose name is yet to be learnt
_HEAD = struct.Struct("<4sBI")
_MAGIC, _VERSION = b"DTHR", 1
_SIGNATURE = 64
_MOST_HEADER = 2 << 20
_MOST_BYTES = 1 << 31
_TYPES = ("<f4", "<i4", "<u4", "<u8", "|u1")


class SignedMessage(NamedTuple):
    """A message whose signature was checked."""

    kind: str
    sender: str
    fields: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    digest: str  # of all its bytes

    def bytes(self, name: str) -> bytes:
        """An array of bytes."""
        return self.array(name, "|u1").tobytes()

    def array(self, name: str, kind: str | None = None) -> np.ndarray:
        """An array that must be there."""
        if name not in self.arrays:
            raise FederationError(f"a {self.kind!r} message without {name!r}")
        array = self.arrays[name]
        if kind is not None and array.dtype.str != kind:
            raise FederationError(f"{name!r} in a {self.kind!r} message has type {array.dtype}, expected {kind}")
        return array

    def field(self, name: str, kind: type) -> Any:
        """A header field that must be there with that type."""
        value = self.fields.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise FederationError(f"a {self.kind!r} message whose {name!r} is {value!r}, not {kind.__name__}")
        return value


# reason: a message's header, and what it carries
def pack(
    identity: Identity,
    *,
    federation: str,
    kind: str,
    sender: str,
    to: str,
    fields: Mapping[str, Any] | None = None,
    arrays: Mapping[str, np.ndarray | bytes] | None = None,
    answers: str = "",
) -> bytes:
    """A signed message. `answers` is the digest of the message that is answered."""
    listed, bodies = [], []
    for name, given in (arrays or {}).items():
        array = np.frombuffer(given, np.uint8) if isinstance(given, bytes) else np.asarray(given, order="C")
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        if array.dtype.str not in _TYPES:
            raise FederationError(f"array {name!r} has type {array.dtype}, which messages do not carry")
        listed.append([name, array.dtype.str, list(array.shape)])
        bodies.append(array.tobytes())
    header = {
        "federation": federation,
        "kind": kind,
        "from": sender,
        "to": to,
        "nonce": secrets.token_hex(16),
        "answers": answers,
        "fields": dict(fields or {}),
        "arrays": listed,
    }
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    content = b"".join([_HEAD.pack(_MAGIC, _VERSION, len(text)), text, *bodies])
    return content + identity.sign(content)


def unpack(
    content: bytes, *, federation: str, to: str, keys: Mapping[str, bytes], answers: str = ""
) -> SignedMessage:
    """The message in these bytes, if one of `keys` (sender to public key) signed it for this receiver."""
    if not _HEAD.size + _SIGNATURE <= len(content) <= _MOST_BYTES:
        raise FederationError(f"a message of {len(content)} bytes")
    magic, version, length = _HEAD.unpack_from(content)
    if magic != _MAGIC or version != _VERSION:
        raise FederationError("not a message of this version of Dither")
    end = len(content) - _SIGNATURE
    if length > min(_MOST_HEADER, end - _HEAD.size):
        raise FederationError(f"a header of {length} bytes in a message of {len(content)}")
    try:
        header = json.loads(content[_HEAD.size : _HEAD.size + length])
        kind, sender, fields = str(header["kind"]), str(header["from"]), dict(header["fields"])
        listed = [(str(name), str(dtype), tuple(shape)) for name, dtype, shape in header["arrays"]]
        addressed = (header["federation"], header["to"], header["answers"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FederationError(f"a header that cannot be read: {type(error).__name__}") from None
    if sender not in keys:
        raise FederationError(f"a message from {sender!r}, who is unknown here")
    if not verify(keys[sender], content[end:], content[:end]):
        raise FederationError(f"a message in the name of {sender!r} that it did not sign")
    if addressed[0] != federation:
        raise FederationError("a message of another federation")
    if addressed[1] != to and not (addressed[1] == ANYONE and kind == "hello"):
        raise FederationError(f"a message for {addressed[1]!r}, not for {to!r}")
    if addressed[2] != answers:
        raise FederationError(f"a {kind!r} message from {sender!r} that answers another question (a replay?)")
    arrays, at = {}, _HEAD.size + length
    for name, dtype, shape in listed:
        sizes_fit = all(type(side) is int and side >= 0 for side in shape)
        # Also of an empty array NumPy multiplies the sides that are not 0.
        if dtype not in _TYPES or not sizes_fit or len(shape) > 8 or math.prod(filter(None, shape)) > _MOST_BYTES:
            raise FederationError(f"array {name!r} of type {dtype!r} and shape {shape}")
        stop = at + np.dtype(dtype).itemsize * math.prod(shape)
        if stop > end:
            raise FederationError(f"array {name!r} is cut off")
        arrays[name] = np.frombuffer(content[at:stop], dtype).reshape(shape)
        at = stop
    if at != end:
        raise FederationError(f"{end - at} bytes too many in a {kind!r} message")
    return SignedMessage(kind, sender, fields, arrays, digest(content))


def printable(text: str) -> str:
    """Text of another's as it may be shown: nothing in it reaches a terminal but letters."""
    return "".join(each if each.isprintable() else " " for each in text)


def digest(content: bytes) -> str:
    """What an answer quotes."""
    return hashlib.sha256(content).hexdigest()
