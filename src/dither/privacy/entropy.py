"""Gaussian noise from the operating system's entropy: the source of a deployment.

`OsEntropy` stands wherever `privacy.noise` takes a key. Nothing about it can be repeated: it has no seed and
no state, and each block of at most 32,768 normals comes from a ChaCha20 keystream under its own 256-bit key
and nonce from `os.urandom`. A forked child, a restored snapshot or a second thread therefore has nothing to
share with its twin, and no key outlives the block it made.

This is the second importer of `cryptography`, after `secagg.primitives`: noise that a party could predict
protects as little as a mask that it could, and `privacy` stands above `secagg`, so it may not ask there. The
package is imported at the first draw: seeded research runs where it is not installed, and there is no other
keystream to fall back on.

From words to normals: the inverse distribution function. The top bit of a 64-bit word is the sign; the other
63 bits m give p = (m + 1/2) / 2^64 in (0, 1/2], and the normal is ±|Φ^-1(p)|. Going through the lower tail keeps
all 53 bits of a double there, where p is small, and none is lost near p = 1; both tails are the same by
construction and reach 9.16 σ, with a probability of 2^-63 that a draw falls into the two outermost cells.
(A float32 uniform of 23 bits, as behind `jax.random.normal`, ends at 5.4 σ.) Box-Muller would do as well in the
tails, but couples two normals through one radius and pays a sine and a cosine; SciPy's `ndtri` needs one
rational function, and a logarithm for only one draw in four.

What is drawn is rounded once to float32. Scaling and addition are float32 on the device, the same code for
both sources, so that a simulated and a deployed round differ in the draw alone.

Not covered: floating-point attacks (errata G8). A released float32 sum `value + noise` can carry traces of
`value` in its low bits, and the time `ndtri` takes depends on the draw. A sampler secure against these replaces
`noise.gaussian` as a whole (integers in, discrete Gaussian added, integers out), not this source. Memory is
not wiped after use.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback
from scipy.special import ndtri

from dither.types import Array

_BLOCK = 1 << 15  # normals under one key: 256 KiB of keystream, small enough for a core's cache
_ZEROS = memoryview(bytes(8 * _BLOCK))
_LOW_63 = np.int64(2**63 - 1)


# On the host


def standard_normals(count: int) -> np.ndarray:
    """`count` independent N(0, 1) in float64, different at every call."""
    return _fill(np.empty(count, np.float64))


def _fill(out: np.ndarray) -> np.ndarray:
    """Overwrite a flat array with normals, computed in float64 and rounded to the array's type."""
    for start in range(0, out.size, _BLOCK):
        part = out[start : start + _BLOCK]
        part[:] = _from_words(_keystream(part.size))
    return out


def _keystream(count: int) -> np.ndarray:
    """64-bit words under a key and a nonce that are used for nothing else."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    nonce = bytes(4) + os.urandom(12)  # the first 4 bytes are the block counter
    cipher = Cipher(algorithms.ChaCha20(os.urandom(32), nonce), mode=None)
    return np.frombuffer(cipher.encryptor().update(_ZEROS[: 8 * count]), np.int64)


def _from_words(words: np.ndarray) -> np.ndarray:
    """Uniform 64-bit words, as int64, to normals (see the module's docstring)."""
    z = (words & _LOW_63).astype(np.float64)
    z += 0.5
    z *= 2.0**-64
    ndtri(z, out=z)
    return np.copysign(z, words.view(np.float64), out=z)  # the sign of a double is the top bit of its word


# Inside a traced function


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class OsEntropy:
    """A source of noise that is fresh at every draw. `OsEntropy()` has no leaves and passes through jit, vmap
    and scan like a constant.

    `place` says for whom a draw is made: `at(client)` adds a number to it. It adds no randomness and its value
    is never read. It makes a draw depend on what `vmap` maps over: vmap evaluates once, for all clients, what
    depends on none of them, and they would share one draw. So a source must be derived for each client as a
    key must, with `noise.for_client`.
    """

    place: Array | None = None

    def at(self, number: Array) -> OsEntropy:
        """The source for one round, client or step. Deriving twice with the same number is harmless."""
        number = jnp.asarray(number).astype(jnp.int32)
        return OsEntropy(number if self.place is None else self.place + number)

    def draw(self, count: int) -> Array:
        """`count` N(0, 1) in float32, for each index that an enclosing vmap maps over."""
        return _drawer(count)(jnp.int32(0) if self.place is None else self.place)

    def tree_flatten(self) -> tuple[tuple[Array | None], None]:
        return (self.place,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Array | None]) -> OsEntropy:
        return cls(*children)


@functools.cache
def _drawer(count: int) -> Callable[[Array], Array]:
    """A function of `place` that calls the host once for all the indices vmap maps over.

    The callback is an effect to JAX and to XLA: neither may drop it, merge two of them, fold it into a
    constant, move it out of a loop or keep it in the compilation cache. It is unordered, because draws have
    no order; each consumer waits for its own.
    """
    _keystream(1)  # a missing package shows here, while tracing, not in the middle of a run

    def host(place: Array) -> np.ndarray:
        shape = (*place.shape, count)
        return _fill(np.empty(math.prod(shape), np.float32)).reshape(shape)

    @custom_vmap
    def draw(place: Array) -> Array:
        return io_callback(host, jax.ShapeDtypeStruct((*place.shape, count), jnp.float32), place)

    @draw.def_vmap
    def _(axis_size: int, in_batched: list[bool], place: Array) -> tuple[Array, bool]:
        del axis_size, in_batched  # vmap calls this only with a mapped place, its axis in front
        return draw(place), True

    return draw
