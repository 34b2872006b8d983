"""Public features: what data.transform computes of each record, between the encoding and the model.

A transform is fixed: no data has shaped it. The features of a record follow from that record alone. So it costs no
ε, neighbouring data sets stay neighbours, and every party computes the same. The features of a record have a norm
of at most 1.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from dither.data.dataset import Dataset, MappedArray, zeros_aligned
from dither.errors import DataError

NORM_BOUND = 1.0 + 1e-5  # of transformed records, with what float32 rounds
_WIDTH, _SCATTERED_WIDTH = 1024, 4096  # number of random features, of records and of their scattering
_BANDWIDTH = 2.0  # of the kernel that random features approximate, for records of norm 1
_ANGLES = 4  # of the scattering
_BLOCK = 4096  # records at a time
_SCALES = 2  # of the scattering, J: it averages over windows of 2^J pixels
_EDGE = 1 << _SCALES
_PICTURES = 64  # at a time


def transform(x: np.ndarray, name: str) -> np.ndarray:
    """Features `[records, features]` in float32 of encoded records; the records themselves for "none"."""
    if name == "none":
        return x
    width = _features(x[:0], name).shape[1]
    features = zeros_aligned((len(x), width), np.dtype(np.float32))
    for at in range(0, len(x), _BLOCK):
        features[at : at + _BLOCK] = _features(x[at : at + _BLOCK], name)
    if not np.isfinite(features).all():
        record = int(np.flatnonzero(~np.isfinite(features).all(1))[0])
        raise DataError(f"record {record} has no finite {name} features; scale its values to [0, 1]")
    return features


def transformed(dataset: Dataset, name: str) -> Dataset:
    """The data set with public features instead of its encoded records."""
    if isinstance(dataset.x_train, MappedArray):
        raise DataError(f"data.transform={name!r} needs the records in memory; set data.stream='no'")
    count = len(dataset.x_train)
    features = transform(np.concatenate([dataset.x_train, dataset.x_test]), name)
    if name != "unit":
        names = tuple(f"{name} {number}" for number in range(features.shape[1]))
        dataset = dataset._replace(feature_names=names, image_shape=())
    return dataset._replace(
        x_train=features[:count],
        x_test=features[count:],
        notes=(*dataset.notes, f"{name} features, computed from each record by itself by a fixed public rule"),
    )


def _features(x: np.ndarray, name: str) -> np.ndarray:
    if name == "scattering-random":
        return _unit(_random_features(_normalised_scattering(x), _SCATTERED_WIDTH))
    rules = {"unit": _unit, "scattering": _normalised_scattering, "random": _random_features}
    return rules[name](x)


def _normalised_scattering(x: np.ndarray) -> np.ndarray:
    """A picture's scattering coefficients, scaled by themselves to a joint norm of 1.

    Square roots bring large and small coefficients together. At each place the mean over an order's channels is
    split from the contrast between them, and the contrast is divided by its size there and elsewhere."""
    side = math.isqrt(x.shape[1])
    if side * side != x.shape[1] or side % 4 or side < 8:
        raise DataError(
            "a scattering data.transform is for square grey pictures with a side of 8, 12, 16, ... pixels, not "
            f"for records of {x.shape[1]} features; leave it out, or use 'random'"
        )
    channels = [1, 2 * _ANGLES, _ANGLES**2]
    roots = np.sqrt(np.maximum(scattering(x.reshape(-1, side, side), angles=_ANGLES), 0))
    roots = roots.reshape(len(x), sum(channels), (side // 4) ** 2)
    blurred, *orders = np.split(roots, np.cumsum(channels)[:-1], axis=1)
    groups = [blurred]
    for order in orders:
        mean = order.mean(1, keepdims=True)
        energy = np.square(order - mean).mean(1, keepdims=True)
        groups += [mean, (order - mean) / np.sqrt(energy + energy.mean(2, keepdims=True) + 1e-6)]
    return _unit(np.concatenate([_standardised(group) for group in groups], axis=1))


def _standardised(group: np.ndarray) -> np.ndarray:
    """Each record's numbers in a row, with a mean of 0 and a spread of 1."""
    rows = group.reshape(len(group), group.shape[1] * group.shape[2])
    rows = rows - rows.mean(1, keepdims=True)
    return np.asarray(rows / (np.sqrt(np.square(rows).mean(1, keepdims=True)) + 1e-3))


def _random_features(x: np.ndarray, width: int = _WIDTH) -> np.ndarray:
    """Random Fourier features of a Gaussian kernel on records of norm 1 (Rahimi and Recht 2007)."""
    directions, shifts = _random_waves(x.shape[1], width)
    return np.asarray(np.cos(_unit(x) @ directions + shifts) / math.sqrt(width), np.float32)


def _unit(x: np.ndarray) -> np.ndarray:
    """Each record with a norm of 1; a record of zeros stays as it is."""
    norm = np.sqrt(np.square(x, dtype=np.float64).sum(1, keepdims=True))
    return np.asarray(x / np.maximum(norm, 1e-30), np.float32)


@cache
def _random_waves(inputs: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Directions and shifts. They come from raw bits, which every version of NumPy draws alike."""
    from scipy.special import ndtri

    bits = np.random.PCG64(0).random_raw((inputs + 1) * width)
    uniform = ((bits >> np.uint64(11)) + 0.5) / 2.0**53
    directions, shifts = np.split(uniform.reshape(inputs + 1, width), [inputs])
    waves = _BANDWIDTH * ndtri(directions)
    return waves.astype(np.float32), (2 * np.pi * shifts[0]).astype(np.float32)


# The scattering transform: J. Bruna, S. Mallat, "Invariant Scattering Convolution Networks", TPAMI 2013. A linear
# model on it is a strong private model (F. Tramèr, D. Boneh, "Differentially Private Learning Needs Better
# Features", ICLR 2021). Features lie in [0, 1] where pixels do.


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
        some = pictures[at : at + _PICTURES]
        features[at : at + _PICTURES] = _scattered(some, angles).reshape(len(some), -1)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(fill, range(0, len(pictures), _PICTURES)))
    return features


def _scattered(pictures: np.ndarray, angles: int) -> np.ndarray:
    from scipy import fft

    padded = np.pad(pictures, ((0, 0), (_EDGE, _EDGE), (_EDGE, _EDGE)), mode="reflect")
    fine_waves, coarse_waves = _wavelets(padded.shape[1], padded.shape[2], angles)
    spectrum = fft.fft2(padded)[:, None]
    fine = np.abs(fft.ifft2(spectrum * fine_waves))
    coarse = np.abs(fft.ifft2(_every_second(spectrum * coarse_waves)))
    half = _EDGE // 2  # places are as far apart as before, in every second pixel
    channels = [_averages(padded[:, None], _EDGE), _averages(fine, _EDGE), _averages(coarse, half)]
    for band in np.moveaxis(fft.fft2(fine), 1, 0):
        second = fft.ifft2(_every_second(band[:, None] * coarse_waves))
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


@cache
def _wavelets(height: int, width: int, angles: int) -> list[np.ndarray]:
    """Spectra `[angles, height, width]` of fine and of coarse Morlet wavelets. Each wavelet has an ℓ1 norm of 1 in
    space, so that no feature exceeds the largest pixel."""
    from scipy import fft

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
    return scales
