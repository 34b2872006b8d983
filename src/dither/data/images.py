"""Image sets in the idx format of MNIST (magic number, dimensions, bytes)."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dither.data.dataset import Dataset, stratified_split
from dither.data.mapped import zeros_aligned
from dither.errors import DataError

Images = tuple[np.ndarray, np.ndarray]  # (images [n, height, width], labels [n])

UNSIGNED_BYTE = 0x08


def read_idx(path: Path) -> np.ndarray:
    """The uint8 array of an idx file, gzipped or not."""
    try:
        raw = path.read_bytes()
        content = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        zeros, kind, dimensions = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{dimensions}I", content, 4)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise DataError(f"{path.name!r} is not an idx file: {error}; fetch it again") from None
    start = 4 + 4 * dimensions
    if zeros != 0 or kind != UNSIGNED_BYTE:
        raise DataError(f"{path.name!r} is not an idx file of bytes (magic number {content[:4].hex()})")
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{path.name!r} holds {len(content) - start} bytes, its header announces {math.prod(shape)}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def to_features(parts: Sequence[np.ndarray], largest: int = 255) -> list[np.ndarray]:
    """Flat float32 rows in [0, 1], all parts in one piece of memory, which need not be copied to be pooled. The
    largest grey value is a fact of the format, not of the records."""
    count, pixels = sum(map(len, parts)), math.prod(parts[0].shape[1:])
    rows = np.split(zeros_aligned((count, pixels), np.dtype(np.float32)), np.cumsum([len(p) for p in parts])[:-1])
    for images, out in zip(parts, rows, strict=True):
        np.multiply(images.reshape(len(images), -1), np.float32(1.0 / largest), out=out, dtype=np.float32)
    return rows


def image_dataset(
    name: str,
    train: Images,
    test: Images,
    classes: tuple[str, ...],
    *,
    largest: int = 255,
    notes: tuple[str, ...] = (),
) -> Dataset:
    """A `Dataset` from training and test images."""
    height, width = train[0].shape[1:]
    x_train, x_test = to_features([train[0], test[0]], largest)
    return Dataset(
        name=name,
        x_train=x_train,
        y_train=train[1].astype(np.int32),
        x_test=x_test,
        y_test=test[1].astype(np.int32),
        classes=classes,
        feature_names=tuple(f"pixel {row},{column}" for row in range(height) for column in range(width)),
        image_shape=(height, width, 1),
        schema=None,
        groups=None,
        groups_test=None,
        notes=notes,
        covered=True,
    )


def split_images(images: np.ndarray, labels: np.ndarray, test_count: int) -> tuple[Images, Images]:
    """A fixed stratified split, the same for everyone: results on a named set must be comparable."""
    train, test = stratified_split(labels, test_count, seed=0)
    return (images[train], labels[train]), (images[test], labels[test])


def upright(images: np.ndarray) -> np.ndarray:
    """EMNIST is published with rows and columns exchanged (Cohen et al. 2017)."""
    return np.ascontiguousarray(images.transpose(0, 2, 1))
