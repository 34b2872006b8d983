"""Public features of pictures: the scattering transform, which no data has shaped.

J. Bruna, S. Mallat, "Invariant Scattering Convolution Networks", TPAMI 2013. A linear model on it is a strong
private model (F. Tramèr, D. Boneh, "Differentially Private Learning Needs Better Features", ICLR 2021).

Each record's features follow from that record alone, by fixed filters: it is preprocessing that costs no ε, and
neighbouring records stay neighbours. Features lie in [0, 1] where pixels do.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy import fft

from dither.errors import DataError

_SCALES = 2  # J: averages over windows of 2^J pixels
_EDGE = 1 << _SCALES
_BLOCK = 64  # pictures at a time


def scattering(pictures: np.ndarray, *, angles: int = 8) -> np.ndarray:
    """Features `[records, channels · (h/4) · (w/4)]` in float32 of pictures `[records, h, w]` with values in
    [0, 1]; h and w must be multiples of 4, at least 8. With L angles there are 1 + 2L + L² channels, by order: the
    local averages, those of L fine and L coarse waves, and those of the coarse waves in each fine one."""
    pictures = np.asarray(pictures, np.float32)
    if pictures.ndim != 3 or any(side % 4 or side < 8 for side in pictures.shape[1:]) or angles < 1:
        raise DataError(
            f"pictures of shape {pictures.shape}: give [records, h, w] with sides that are multiples of 4, from 8"
        )
    channels = 1 + _SCALES * angles + angles**2
    places = pictures.shape[1] * pictures.shape[2] // _EDGE**2
    features = np.empty((len(pictures), channels * places), np.float32)

    def fill(at: int) -> None:
        some = pictures[at : at + _BLOCK]
        features[at : at + _BLOCK] = _scattered(some, angles).reshape(len(some), -1)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(fill, range(0, len(pictures), _BLOCK)))
    return features


def _scattered(pictures: np.ndarray, angles: int) -> np.ndarray:
    padded = np.pad(pictures, ((0, 0), (_EDGE, _EDGE), (_EDGE, _EDGE)), mode="reflect")
    wavelets = _wavelets(padded.shape[1], padded.shape[2], angles)
    spectrum = fft.fft2(padded)[:, None]
    fine = np.abs(fft.ifft2(spectrum * wavelets.fine))
    coarse = np.abs(fft.ifft2(_every_second(spectrum * wavelets.coarse)))
    half = _EDGE // 2  # places are as far apart as before, in every second pixel
    channels = [_averages(padded[:, None], _EDGE), _averages(fine, _EDGE), _averages(coarse, half)]
    for band in np.moveaxis(fft.fft2(fine), 1, 0):
        second = fft.ifft2(_every_second(band[:, None] * wavelets.coarse))
        channels.append(_averages(np.abs(second), half))
    return np.concatenate(channels, axis=1)


def _every_second(spectrum: np.ndarray) -> np.ndarray:
    """The spectrum of every second pixel in both directions; what coarse wavelets leave is as smooth."""
    height, width = spectrum.shape[-2:]
    folded: np.ndarray = spectrum.reshape(*spectrum.shape[:-2], 2, height // 2, 2, width // 2).mean((-4, -2))
    return folded


def _averages(bands: np.ndarray, step: int) -> np.ndarray:
    """Local averages `[records, channels, places]`, `step` apart, of `[records, channels, height, width]`."""
    records, channels, height, width = bands.shape
    weights = np.kron(_window(height, step), _window(width, step))
    return (bands.reshape(-1, height * width) @ weights.T).reshape(records, channels, -1)


@cache
def _window(side: int, step: int) -> np.ndarray:
    """Gaussian weights `[places, side]` around every place but the padded ones, each with a sum of 1."""
    places = np.arange(step, side - step, step)[:, None]
    distance = (np.arange(side) - places + side // 2) % side - side // 2
    weights = np.exp(-((distance / (0.8 * step)) ** 2) / 2)
    return np.asarray(weights / weights.sum(1, keepdims=True), np.float32)


class _Wavelets(NamedTuple):
    """Spectra `[angles, height, width]` of the wavelets of either scale."""

    fine: np.ndarray
    coarse: np.ndarray


@cache
def _wavelets(height: int, width: int, angles: int) -> _Wavelets:
    """Morlet wavelets. Each has an ℓ1 norm of 1 in space, so that no feature exceeds the largest pixel."""
    rows = fft.fftfreq(height, 1 / height)[:, None]
    columns = fft.fftfreq(width, 1 / width)[None, :]
    scales = []
    for scale in range(_SCALES):
        spread, frequency = 0.8 * 2**scale, 0.75 * np.pi / 2**scale
        spectra = []
        for number in range(angles):
            turn = np.pi * number / angles
            along = rows * np.cos(turn) + columns * np.sin(turn)
            across = columns * np.cos(turn) - rows * np.sin(turn)
            window = np.exp(-(along**2 + (across * 4 / angles) ** 2) / (2 * spread**2))
            wave = np.exp(1j * frequency * along)
            # The mean is taken out, so that flat pictures give nothing
            wavelet = window * (wave - (window * wave).sum() / window.sum())
            spectra.append(fft.fft2(wavelet / np.abs(wavelet).sum()))
        scales.append(np.asarray(spectra, np.complex64))
    return _Wavelets(*scales)
