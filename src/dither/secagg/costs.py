"""What a round of the protocol sends when nobody is lost, from the layout of its messages (see `messages`)."""

from __future__ import annotations

from dither.secagg import messages, primitives, shamir

_ENVELOPE = messages.HEADER_BYTES + primitives.SIGNATURE_BYTES
_ENCRYPTED = shamir.SHARE_BYTES + primitives.SEAL_OVERHEAD


def round_bytes(
    length: int, cohort_size: int, *, modulus_bits: int = 32, colluders: int = 0
) -> tuple[float, float]:
    """Bytes a client sends and receives in a round, at the mean over a cohort: the masked vector of `length`
    words, the seals of the committee, their shares on the way back, announcement and unsealing."""
    committee = colluders + 1
    seal = 32 + (32 + _ENCRYPTED) * cohort_size
    upload = _ENVELOPE + 32 + 4 + length * (modulus_bits // 8) + seal * committee / cohort_size
    answer = _ENVELOPE + 36 + (4 + shamir.SHARE_BYTES) * committee
    announcement = _ENVELOPE + 48 + 4 * cohort_size
    request = _ENVELOPE + 36 + (4 + _ENCRYPTED) * committee
    return upload + answer, float(announcement + request)
