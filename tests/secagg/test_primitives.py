"""The cryptography against the published vectors, and what must be refused."""

import numpy as np
import pytest

from dither.errors import ProtocolAbort
from dither.secagg import primitives
from dither.secagg.primitives import AgreementKey, SigningKey


def test_rfc_8032_ed25519():
    """Section 7.1, tests 1 to 3."""
    vectors = [
        (
            "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
            "",
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
            "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
        ),
        (
            "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
            "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
            "72",
            "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
            "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
        ),
        (
            "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
            "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
            "af82",
            "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
            "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
        ),
    ]
    for private, public, message, signature in vectors:
        key = SigningKey(bytes.fromhex(private))
        assert key.public.hex() == public
        assert key.sign(bytes.fromhex(message)).hex() == signature
        primitives.verify(key.public, bytes.fromhex(signature), bytes.fromhex(message), "test")
        with pytest.raises(ProtocolAbort, match="bad signature: not by someone"):
            primitives.verify(key.public, bytes.fromhex(signature), bytes.fromhex(message) + b"x", "someone")


def test_a_signature_has_one_form():
    """RFC 8032 asks for S < L: the same signature with S + L must not be taken for a second one."""
    key = SigningKey(bytes(range(32)))
    signature = key.sign(b"m")
    order = 2**252 + 27742317777372353535851937790883648493
    s = int.from_bytes(signature[32:], "little") + order
    with pytest.raises(ProtocolAbort, match="bad signature"):
        primitives.verify(key.public, signature[:32] + s.to_bytes(32, "little"), b"m", "test")


def test_rfc_7748_x25519():
    """Section 6.1, and the first vector of section 5.2."""
    alice = AgreementKey(bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"))
    bob = AgreementKey(bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"))
    assert alice.public.hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    assert bob.public.hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    secret = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert alice.shared(bob.public).hex() == bob.shared(alice.public).hex() == secret
    other = AgreementKey(bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4"))
    point = bytes.fromhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    assert other.shared(point).hex() == "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"


SMALL_ORDER = [0, 1, 325606250916557431795983626356110631294008115727848805560023387167927233504, 2**255 - 20]


@pytest.mark.parametrize("point", SMALL_ORDER)
def test_a_public_key_that_would_give_a_zero_secret_is_refused(point):
    public = point.to_bytes(32, "little")
    with pytest.raises(ProtocolAbort, match="small order"):
        AgreementKey(primitives.fresh_key()).shared(public)
    with pytest.raises(ProtocolAbort, match="small order"):
        primitives.check_agreement(public)


def test_a_public_key_has_one_form():
    public = AgreementKey(primitives.fresh_key()).public
    primitives.check_agreement(public)
    with pytest.raises(ProtocolAbort, match="canonically"):
        primitives.check_agreement(public[:31] + bytes([public[31] | 0x80]))  # X25519 itself ignores this bit


def test_rfc_5869_hkdf():
    """Appendix A, test cases 1 to 3; `expand` from the pseudorandom key of case 1."""
    info = bytes(range(0xF0, 0xFA))
    first = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    assert primitives.hkdf(b"\x0b" * 22, info, salt=bytes(range(13)), length=42).hex() == first
    extracted = bytes.fromhex("077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5")
    assert primitives.expand(extracted, info, length=42).hex() == first
    second = primitives.hkdf(
        bytes(range(0x50)), bytes(range(0xB0, 0x100)), salt=bytes(range(0x60, 0xB0)), length=82
    )
    assert second.hex() == (
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c"
        "59045a99cac7827271cb41c65e590e09da3275600c2f09b8367793a9aca3db71"
        "cc30c58179ec3e87c14c01d5c1f3434f1d87"
    )
    third = "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
    assert primitives.hkdf(b"\x0b" * 22, b"", length=42).hex() == third


SUNSCREEN = (
    b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
    b"sunscreen would be it."
)


def test_rfc_8439_chacha20_poly1305():
    """Section 2.8.2, read by our `decrypt`: what is encrypted here carries its nonce in front."""
    key, context = bytes(range(0x80, 0xA0)), bytes.fromhex("50515253c0c1c2c3c4c5c6c7")
    sealed = bytes.fromhex(
        "070000004041424344454647"
        "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d6"
        "3dbea45e8ca9671282fafb69da92728b1a71de0a9e060b2905d6a5b67ecd3b36"
        "92ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc"
        "3ff4def08e4b7a9de576d26586cec64b61161ae10b594f09e26a7e902ecbd0600691"
    )
    assert primitives.decrypt(key, sealed, context, "it") == SUNSCREEN
    for place in (0, 12, len(sealed) - 1):
        altered = bytearray(sealed)
        altered[place] ^= 1
        with pytest.raises(ProtocolAbort, match="the share does not decrypt"):
            primitives.decrypt(key, bytes(altered), context, "the share")
    with pytest.raises(ProtocolAbort, match="another client, round or cohort"):
        primitives.decrypt(key, sealed, context + b"x", "it")
    with pytest.raises(ProtocolAbort):
        primitives.decrypt(key, sealed[:20], context, "it")


def test_encryption_is_undone_and_never_repeats():
    key = primitives.fresh_key()
    found = {primitives.encrypt(key, b"share", b"c") for _ in range(100)}
    assert len(found) == 100
    assert {primitives.decrypt(key, one, b"c", "it") for one in found} == {b"share"}


def test_nist_aes_256_ctr():
    """SP 800-38A, F.5.5."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    plaintext = bytes.fromhex(
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
        "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
    )
    cipher = primitives._counter_mode(key, bytes(range(0xF0, 0x100)))
    assert cipher.update(plaintext).hex() == (
        "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
        "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
    )


def test_masks_are_aes_256_of_0_1_2_read_as_little_endian_words():
    """AES-256 under the zero key of the blocks 0, 1 and 2, as printed in the GCM specification (test cases 13, 14:
    the hash key, the tag of nothing, the ciphertext of a zero block)."""
    blocks = bytes.fromhex(
        "dc95c078a2408989ad48a21492842087530f8afbc74536b9a963b4f1c4cb738bcea7403d4d606b6e074ec5d3baf39d18"
    )
    for words in ("<u4", "<u8"):
        expected = np.frombuffer(blocks, words)
        out = np.zeros(expected.size, words)
        primitives.mask(out, [(bytes(32), 1)])
        assert out.tolist() == expected.tolist()
        primitives.mask(out, [(bytes(32), -1)])
        assert not out.any()


@pytest.mark.parametrize("words", [np.uint32, np.uint64])
@pytest.mark.parametrize("size", [1, 3, 32767, 32768, 32769, 100_001])
def test_chunks_do_not_show(words, size):
    """Many streams in chunks are the same as one stream after the other in one piece."""
    keys = [(primitives.fresh_key(), sign) for sign in (1, -1, 1)]
    start = np.random.default_rng(0).integers(0, np.iinfo(words).max, size, words, endpoint=True)
    out = start.copy()
    primitives.mask(out, keys)
    expected = start.copy()
    for key, sign in keys:
        stream = np.frombuffer(primitives.keystream(key).update(bytes(expected.nbytes)), words)
        expected = expected + stream if sign > 0 else expected - stream
    assert np.array_equal(out, expected)


def test_masks_go_into_words_of_the_ring_only():
    for wrong in (np.zeros(4), np.zeros(4, np.int32), np.zeros((2, 2), np.uint32), np.zeros(8, np.uint32)[::2]):
        with pytest.raises(ValueError, match="contiguous vector of uint32 or uint64"):
            primitives.mask(wrong, [(bytes(32), 1)])
    with pytest.raises(ValueError, match="32 bytes, not 16"):
        primitives.mask(np.zeros(4, np.uint32), [(bytes(16), 1)])


def test_cryptography_is_imported_in_few_places():
    """Masks and noise; and certificates and transport keys of a real federation."""
    import ast
    from pathlib import Path

    import dither

    found = set()
    for path in Path(dither.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "cryptography" for name in names):
                found.add(path.name)
    assert found == {"primitives.py", "entropy.py", "keys.py", "fleet.py", "kits.py"}
