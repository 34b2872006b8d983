"""The cryptography that secure aggregation is made of: the only file of this room that imports `cryptography`.

Recipes, not building blocks: a caller cannot pick a nonce, a mode or a curve. Whatever fails raises
`ProtocolAbort`; nothing returns False.

    signatures      Ed25519 (RFC 8032), over a SHA-256 digest with a label of the caller's
    key agreement   X25519 (RFC 7748); an all-zero shared secret is refused
    derivation      HKDF-SHA256 (RFC 5869)
    shares          ChaCha20-Poly1305 (RFC 8439) with a random nonce
    masks           AES-256 in counter mode (NIST SP 800-38A) from counter 0, under a key used for nothing else

A mask is the keystream read as little-endian words of 32 or 64 bits: uniform on Z_{2^k} without rejection.
A key makes one stream and 2^64 bytes of it are far from any vector, so counter 0 is safe and no nonce travels.
AES is constant-time where the processor has the instruction for it. Keys are not wiped from memory after use.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
from collections.abc import Iterable

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from dither.errors import ProtocolAbort

KEY_BYTES = 32
SIGNATURE_BYTES = 64
SEAL_OVERHEAD = 12 + 16  # nonce and tag

_CHUNK = 1 << 17  # bytes of keystream between two additions: stream and target stay in a core's cache
_ZEROS = memoryview(bytes(_CHUNK))


def fresh_key() -> bytes:
    """256 bits from the operating system."""
    return os.urandom(KEY_BYTES)


def digest(*parts: bytes | memoryview) -> bytes:
    """SHA-256 of the parts, one after the other. Where lengths vary the caller writes them too."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def same(one: bytes | memoryview, other: bytes | memoryview) -> bool:
    """Equality in a time that does not depend on the bytes."""
    return hmac.compare_digest(one, other)


# Signatures


class SigningKey:
    """A long-term Ed25519 key. `private` is 32 bytes, from `fresh_key`."""

    def __init__(self, private: bytes) -> None:
        self.private = private
        self._key = Ed25519PrivateKey.from_private_bytes(private)
        self.public = self._key.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


@functools.lru_cache(4096)
def _verifier(public: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public)


def verify(public: bytes, signature: bytes, message: bytes, whose: str) -> None:
    """Return if the signature is by that key over that message; else `ProtocolAbort` naming `whose` it is not."""
    try:
        _verifier(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        raise ProtocolAbort(f"bad signature: not by {whose}") from None


# Key agreement


class AgreementKey:
    """A long-term X25519 key."""

    def __init__(self, private: bytes) -> None:
        self.private = private
        self._key = X25519PrivateKey.from_private_bytes(private)
        self.public = self._key.public_key().public_bytes_raw()

    def shared(self, other: bytes) -> bytes:
        """The raw X25519 secret with another public key: not uniform, for `extract` alone."""
        try:
            return self._key.exchange(X25519PublicKey.from_public_bytes(other))  # refuses an all-zero result
        except ValueError:
            raise ProtocolAbort("a public X25519 key is of small order: the shared secret would be zero") from None


@functools.lru_cache(4096)
def check_agreement(public: bytes) -> None:
    """Return if this is the one way to write an X25519 key with which a secret can be shared (RFC 7748, 6.1)."""
    if int.from_bytes(public, "little") >= 2**255 - 19:
        raise ProtocolAbort("a public X25519 key is not written canonically")
    _PROBE.shared(public)


_PROBE = AgreementKey(bytes(32))  # any private key: whether the result is zero depends on the public key alone


def hkdf(secret: bytes, info: bytes, *, salt: bytes = b"", length: int = KEY_BYTES) -> bytes:
    """HKDF-SHA256, extract and expand: for a secret that is not uniform, such as an X25519 result."""
    return HKDF(hashes.SHA256(), length, salt, info).derive(secret)


def expand(key: bytes, info: bytes, *, length: int = KEY_BYTES) -> bytes:
    """HKDF-SHA256, expand only: from a uniform key, one further key for each `info`."""
    return HKDFExpand(hashes.SHA256(), length, info).derive(key)


# Shares on their way through the server


def encrypt(key: bytes, plaintext: bytes, context: bytes) -> bytes:
    """A random nonce, the ciphertext and its tag; `context` must be the same to decrypt."""
    nonce = os.urandom(12)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, plaintext, context)


def decrypt(key: bytes, ciphertext: bytes, context: bytes, what: str) -> bytes:
    """The plaintext, or `ProtocolAbort` that names `what` was not meant for this key and context."""
    try:
        return ChaCha20Poly1305(key).decrypt(ciphertext[:12], ciphertext[12:], context)
    except (InvalidTag, ValueError):
        raise ProtocolAbort(
            f"{what} does not decrypt: altered, or meant for another client, round or cohort"
        ) from None


# Masks


def keystream(key: bytes) -> CipherContext:
    """AES-256-CTR from counter 0."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a mask key has {KEY_BYTES} bytes, not {len(key)}")
    return _counter_mode(key, bytes(16))


def _counter_mode(key: bytes, counter: bytes) -> CipherContext:
    """AES-256-CTR from any counter: apart only so that the published vectors can be tried on it."""
    return Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()


def mask(out: np.ndarray, streams: Iterable[tuple[bytes, int]]) -> None:
    """Add (sign +1) or subtract (sign -1) the keystream of each key to a vector of uint32 or uint64, in place.

    All streams advance together through chunks that fit a core's cache, and nothing is allocated per chunk: the
    vector is read from memory once, however many the streams.
    """
    if out.dtype not in (np.uint32, np.uint64) or out.ndim != 1 or not out.flags.c_contiguous:
        raise ValueError(f"masks go into a contiguous vector of uint32 or uint64, not {out.dtype} {out.shape}")
    words = _CHUNK // out.itemsize
    buffer = bytearray(_CHUNK + 16)  # `update_into` asks for room for one block more
    stream = np.frombuffer(buffer, out.dtype.newbyteorder("<"), words)
    open_streams = [(keystream(key), np.add if sign > 0 else np.subtract) for key, sign in streams]
    for start in range(0, out.size, words):
        part = out[start : start + words]
        zeros, piece = _ZEROS[: part.nbytes], stream[: part.size]
        for cipher, accumulate in open_streams:
            cipher.update_into(zeros, buffer)
            accumulate(part, piece, out=part)
