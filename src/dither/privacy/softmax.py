"""Softmax regression on a GPU: its clipped sums with few kernels, over matrices whose rows begin at whole units of
memory.

XLA makes a dozen small kernels of softmax, norm and clip. Each does next to nothing, yet takes a tenth of the time
of the batch's products; here they are one. The products need twice as long for matrices with rows of, say, 47
numbers, which begin at odd places in memory. So scores and derivatives lie with records along the rows, and
`is_turned` says which parameters are kept as their transpose during local training.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dither.types import Array, PyTree

MOST_CLASSES = 254  # two more rows are used, and a column of 256 is held in registers
_RECORDS = 32  # that one program of the kernel clips
_UNIT = 4  # numbers of 32 bits, aligned to which a GPU reads memory quickest
_LARGE = 4096  # numbers in a matrix; the products of smaller ones do not matter


def is_large(shape: tuple[int, ...]) -> bool:
    """Whether a matrix of that shape is on a GPU, and large enough for what this module does."""
    return jax.default_backend() == "gpu" and len(shape) == 2 and shape[0] * shape[1] >= _LARGE


def is_turned(shape: tuple[int, ...]) -> bool:
    """Whether a matrix of that shape, or of its transpose's, is kept the other way round."""
    return is_large(shape) and sorted(side % _UNIT == 0 for side in shape) == [False, True]


def turned(tree: PyTree) -> PyTree:
    """Each such matrix transposed. Done twice, it changes nothing."""
    return jax.tree.map(lambda leaf: leaf.T if is_turned(leaf.shape) else leaf, tree)


# reason: a batch, and the clip
def clipped_derivatives(
    scores: Array,
    bias: Array,
    y: Array,
    weights: Array,
    squares: Array,
    clip_norm: Array,
    *,
    blocks: int,
    tiny: float,
    lost: float,
    interpret: bool = False,
) -> Array:
    """The derivatives of each record's cross-entropy in its scores, times the scale by which its gradient is
    clipped and weighted, for each block of records: `[blocks, classes, records]`. Two rows follow the classes: the
    weights of the records that were clipped, and all weights; then zeros up to a multiple of 8 rows.

    `scores` (`[classes, all records]`) are without the bias; `squares` are the squared norms of the records.
    `tiny` and `lost` are those of `clipping`, and what it says of numbers that are not finite holds here.
    """
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    classes, size = scores.shape[0], scores.shape[1] // blocks
    rows = -(-(classes + 2) // 8) * 8
    make = pallas.pallas_call(
        functools.partial(_kernel, classes=classes, size=size, rows=rows, tiny=tiny, lost=lost),
        out_shape=jax.ShapeDtypeStruct((blocks, rows, size), jnp.float32),
        grid=(blocks, -(-size // _RECORDS)),
        compiler_params=triton.CompilerParams(num_warps=4),
        interpret=interpret,
    )
    derivatives: Array = make(scores, bias, y, weights, squares, jnp.reshape(clip_norm, 1))
    return derivatives


# reason: the arguments are references to arrays in the GPU's memory; the sizes follow
def _kernel(
    scores: Any,
    bias: Any,
    y: Any,
    weights: Any,
    squares: Any,
    clip_norm: Any,
    out: Any,
    *,
    classes: int,
    size: int,
    rows: int,
    tiny: float,
    lost: float,
) -> None:
    """`_RECORDS` columns of a block."""
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    block, first = pallas.program_id(0), pallas.program_id(1) * _RECORDS
    height = 1 << (rows - 1).bit_length()
    row = jax.lax.broadcasted_iota(jnp.int32, (height, _RECORDS), 0)
    here = first + jax.lax.broadcasted_iota(jnp.int32, (_RECORDS,), 0) < size
    known = row < classes
    columns, all_rows = pallas.ds(block * size + first, _RECORDS), pallas.ds(0, height)
    if size % _RECORDS == 0:
        here = jnp.ones(_RECORDS, bool)

    def of_records(values: Any) -> Array:
        loaded: Array = triton.load(values.at[columns], mask=here, other=0)
        return loaded

    class_of_row = jax.lax.broadcasted_iota(jnp.int32, (height,), 0)
    biases = triton.load(bias.at[all_rows], mask=class_of_row < classes, other=0.0)
    found = triton.load(scores.at[all_rows, columns], mask=known & here[None], other=-jnp.inf)
    value = found + biases[:, None]
    powers = jnp.exp(value - jnp.max(value, 0)[None])
    share = powers / jnp.sum(powers, 0)[None]
    derivative = jnp.where(known, share - jnp.where(row == of_records(y)[None], 1.0, 0.0), 0.0)
    squared = (jnp.sum(derivative * derivative, 0) + classes * lost) * (1 + of_records(squares))
    finite = squared < jnp.inf  # false for NaN, too
    length, weight = jnp.where(finite, jnp.sqrt(squared), jnp.inf), of_records(weights)
    scale = weight * jnp.minimum(1.0, clip_norm[0] / jnp.maximum(length, tiny))
    scaled = jnp.where(finite[None], derivative, 0.0) * scale[None]
    scaled = jnp.where(row == classes, (weight * jnp.where(length > clip_norm[0], 1.0, 0.0))[None], scaled)
    scaled = jnp.where(row == classes + 1, weight[None], scaled)
    triton.store(out.at[block, all_rows, pallas.ds(first, _RECORDS)], scaled, mask=(row < rows) & here[None])
