"""Gaussian noise, and the named random streams of a run.

A seed opens one stream a purpose (`partition`, `init`, `cohort`, `batch`, `epoch`, `noise`, `server`):
changing how many numbers one purpose draws never shifts another. Inside a stream, each round and each
client has its own key, so that no two clients and no two rounds ever share noise.
"""

from __future__ import annotations

import math
import zlib

import jax
import jax.numpy as jnp

from dither.core import Array, Key, PyTree


def stream(seed: int | Array, name: str) -> Key:
    """The key of a named stream of a run's seed (CRC-32 of the name, so it is the same everywhere)."""
    return jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))


def for_round(key: Key, index: Array) -> Key:
    """A stream's key in one round."""
    return jax.random.fold_in(key, index)


def for_client(key: Key, client: Array) -> Key:
    """A round's key for one client."""
    return jax.random.fold_in(key, client)


def standard_normal(key: Key, tree: PyTree) -> PyTree:
    """Independent N(0, 1) in the shape of `tree`, drawn as one block (many small draws are slower)."""
    leaves, structure = jax.tree.flatten(tree)
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    block = jax.random.normal(key, (sum(sizes),), jnp.float32)
    pieces, at = [], 0
    for leaf, size in zip(leaves, sizes, strict=True):
        pieces.append(block[at : at + size].reshape(leaf.shape))
        at += size
    return jax.tree.unflatten(structure, pieces)


def gaussian(key: Key, tree: PyTree, *, noise_std: Array) -> PyTree:
    """`tree` plus independent N(0, noise_std²) on every coordinate. `key` must be used only here."""
    noise = standard_normal(key, tree)
    return jax.tree.map(lambda value, z: value + noise_std * z, tree, noise)
