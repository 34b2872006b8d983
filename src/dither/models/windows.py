"""Max pooling and convolution whose derivatives XLA compiles well on a CPU.

XLA's derivative of max pooling takes longer than the rest of a small CNN. A convolution inside a loop, where all
training happens, is only quick if its axes already have the order that XLA's kernels want; derivatives do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from dither.types import Array

MOST_CUTS = 64  # offsets of a convolution's window that are looked at one by one
MOST_POOLED = 16  # of a pooling's

Sizes = tuple[int, ...]
Padding = tuple[tuple[int, int], ...]


def cuts(
    window: Sizes, counts: Sizes, strides: Sizes, dilation: Sequence[int] = ()
) -> Iterator[tuple[slice, ...]]:
    """For each offset in a window, where the values stand that have this offset in their windows."""
    for offset in itertools.product(*map(range, window)):
        starts = [at * step for at, step in zip(offset, dilation or [1] * len(window), strict=True)]
        yield tuple(
            slice(start, start + (count - 1) * step + 1, step)
            for start, count, step in zip(starts, counts, strides, strict=True)
        )


def _placed(values: Array, cut: tuple[slice, ...], shape: Sizes) -> Array:
    """Zeros of that shape with the values where `cut` says."""
    around = [(each.start, size - each.stop, each.step - 1) for each, size in zip(cut, shape, strict=True)]
    return jax.lax.pad(values, jnp.zeros((), values.dtype), around)


def _without(padding: Padding, padded: Array) -> Array:
    return padded[tuple(slice(low, size - high) for (low, high), size in zip(padding, padded.shape, strict=True))]


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def max_pool(x: Array, window: Sizes, strides: Sizes, padding: Padding) -> Array:
    """The largest value in each window. The derivative goes to the first largest value, as that of JAX does."""
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, padding)


def _pool_forward(x: Array, window: Sizes, strides: Sizes, padding: Padding) -> tuple[Array, tuple[Array, Array]]:
    largest = max_pool(x, window, strides, padding)
    return largest, (x, largest)


def _pool_backward(
    window: Sizes, strides: Sizes, padding: Padding, stored: tuple[Array, Array], derivative: Array
) -> tuple[Array]:
    x, largest = stored
    padded = jnp.pad(x, padding, constant_values=-jnp.inf)
    open_windows = jnp.ones(largest.shape, bool)  # those whose largest value is still to come
    total = jnp.zeros_like(padded)
    for cut in cuts(window, largest.shape, strides):
        first = open_windows & (padded[cut] == largest)
        open_windows &= ~first
        total += _placed(jnp.where(first, derivative, 0), cut, padded.shape)
    return (_without(padding, total),)


max_pool.defvjp(_pool_forward, _pool_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def convolve(x: Array, kernel: Array, strides: Sizes, padding: Padding, dilation: Sizes) -> Array:
    """The convolution of images [n, ..., channels] with a kernel [..., channels, outputs]."""
    return _convolution(x, kernel, strides, padding, dilation)


def _convolution(x: Array, kernel: Array, strides: Sizes, padding: Padding, dilation: Sizes) -> Array:
    last = x.ndim - 1
    images = (0, last, *range(1, last))
    numbering = jax.lax.ConvDimensionNumbers(images, (last, last - 1, *range(last - 1)), images)
    return jax.lax.conv_general_dilated(
        x, kernel, strides, padding, rhs_dilation=dilation, dimension_numbers=numbering
    )


def _convolve_forward(
    x: Array, kernel: Array, strides: Sizes, padding: Padding, dilation: Sizes
) -> tuple[Array, tuple[Array, Array]]:
    return _convolution(x, kernel, strides, padding, dilation), (x, kernel)


def _convolve_backward(
    strides: Sizes, padding: Padding, dilation: Sizes, stored: tuple[Array, Array], derivative: Array
) -> tuple[Array, Array]:
    x, kernel = stored
    *window, channels, outputs = kernel.shape
    reach = [(size - 1) * step for size, step in zip(window, dilation, strict=True)]
    if all(step == 1 for step in strides):
        turned = jnp.flip(kernel, range(len(window))).swapaxes(-1, -2)
        around = tuple((width - low, width - high) for width, (low, high) in zip(reach, padding, strict=True))
        to_x = _convolution(derivative, jax.lax.optimization_barrier(turned), strides, around, dilation)
    else:
        patches = jnp.matmul(derivative, kernel.reshape(-1, outputs).T)
        padded = (len(x), *(n + low + high for n, (low, high) in zip(x.shape[1:-1], padding, strict=True)))
        total = jnp.zeros((*padded, channels), x.dtype)
        counts = derivative.shape[1:-1]
        for number, cut in enumerate(cuts(tuple(window), counts, strides, dilation)):
            part = patches[..., number * channels : (number + 1) * channels]
            total += _placed(part, (slice(0, len(x), 1), *cut, slice(0, channels, 1)), total.shape)
        to_x = _without(((0, 0), *padding, (0, 0)), total)
    to_kernel = jax.vjp(lambda kernel: _convolution(x, kernel, strides, padding, dilation), kernel)[1](derivative)[
        0
    ]
    return to_x, to_kernel


convolve.defvjp(_convolve_forward, _convolve_backward)
