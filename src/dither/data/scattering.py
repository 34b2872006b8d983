"""Public features of pictures: the scattering transform, which no data has shaped.

J. Bruna, S. Mallat, "Invariant Scattering Convolution Networks", TPAMI 2013. A linear model on it is a strong
private model (F. Tramèr, D. Boneh, "Differentially Private Learning Needs Better Features", ICLR 2021).

Each record's features follow from that record alone, by fixed filters: it is preprocessing that costs no ε, and
neighbouring records stay neighbours. Features lie in [0, 1] where pixels do.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from scipy import fft

from dither.errors import DataError

_SCALES = 2  # J: averages over windows of 2^J pixels
_BLOCK = 512  # pictures at a time


def scattering(pictures: np.ndarray, *, angles: int = 8) -> np.ndarray:
    """Features `[records, channels · (h/4) · (w/4)]` in float32 of pictures `[records, h, w]` with values in
    [0, 1]; h and w must be multiples of 4. With L angles there are 1 + 2L + L² channels."""
    pictures = np.asarray(pictures, np.float32)
    if pictures.ndim != 3 or any(side % 4 for side in pictures.shape[1:]) or angles < 1:
        raise DataError(
            f"pictures of shape {pictures.shape}: give [records, h, w] with sides that are multiples of 4"
        )
    blocks = [_scattered(pictures[at : at + _BLOCK], angles) for at in range(0, max(len(pictures), 1), _BLOCK)]
    return np.concatenate(blocks)


def _scattered(pictures: np.ndarray, angles: int) -> np.ndarray:
    edge = 1 << _SCALES
    padded = np.pad(pictures, ((0, 0), (edge, edge), (edge, edge)), mode="reflect")
    low, bands = _filters(padded.shape[1], padded.shape[2], angles)
    spectrum = fft.fft2(padded).astype(np.complex64)

    def average(spectrum: np.ndarray) -> np.ndarray:
        smooth: np.ndarray = fft.ifft2(spectrum * low).real[:, edge:-edge:edge, edge:-edge:edge]
        return smooth.reshape(len(smooth), -1)

    channels = [average(spectrum)]
    for scale, filters in enumerate(bands):
        for band in filters:
            first = fft.fft2(np.abs(fft.ifft2(spectrum * band))).astype(np.complex64)
            channels.append(average(first))
            for finer in bands[scale + 1 :]:
                channels += [average(fft.fft2(np.abs(fft.ifft2(first * second)))) for second in finer]
    return np.concatenate(channels, axis=1).astype(np.float32)


@cache
def _filters(height: int, width: int, angles: int) -> tuple[np.ndarray, tuple[tuple[np.ndarray, ...], ...]]:
    """Spectra of the averaging window and of the wavelets, by scale and angle. Each has an ℓ1 norm of 1 in space,
    so that no feature exceeds the largest pixel."""

    def spectrum(kernel: np.ndarray) -> np.ndarray:
        return np.asarray(fft.fft2(kernel / np.abs(kernel).sum()), np.complex64)

    rows = fft.fftfreq(height, 1 / height)[:, None]
    columns = fft.fftfreq(width, 1 / width)[None, :]
    squared = rows**2 + columns**2
    low = spectrum(np.exp(-squared / (2 * (0.8 * 2**_SCALES) ** 2)))
    bands = []
    for scale in range(_SCALES):
        spread, frequency = 0.8 * 2**scale, 0.75 * np.pi / 2**scale
        filters = []
        for number in range(angles):
            turn = np.pi * number / angles
            along = rows * np.cos(turn) + columns * np.sin(turn)
            across = columns * np.cos(turn) - rows * np.sin(turn)
            window = np.exp(-(along**2 + (across * 4 / angles) ** 2) / (2 * spread**2))
            wave = np.exp(1j * frequency * along)
            # A Morlet wavelet: its mean is taken out, so that flat pictures give nothing
            filters.append(spectrum(window * (wave - (window * wave).sum() / window.sum())))
        bands.append(tuple(filters))
    return low, tuple(bands)
