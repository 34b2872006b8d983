"""Softmax regression on a GPU: its clipped sums with few kernels, over matrices whose rows begin at whole units of
memory.

XLA fetches a batch, reads it again for its norms and for the scores, and makes a dozen small kernels of softmax,
norm and clip. Here all of that is one kernel: each program reads its records once and leaves them behind, beside
their derivatives, for the product of the two. Products need twice as long for matrices with rows of, say, 47
numbers, which begin at odd places in memory. So derivatives lie with records along the rows, and `is_turned` says
which parameters are kept as their transpose during local training.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dither.types import Array, PyTree, RoundBatches

MOST_CLASSES = 254  # two more rows are used, and a column of 256 is held in registers
_RECORDS = 32  # that one program of the kernel fetches and clips
_WIDTH = 64  # features that it reads at once
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


# reason: a model, the batch, and the clip
def clipped_derivatives(
    steps: RoundBatches,
    weight: Array,
    bias: Array,
    clip_norm: Array,
    *,
    blocks: int,
    tiny: float,
    lost: float,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The derivatives of each record's cross-entropy in its scores, times the scale by which its gradient is
    clipped and weighted, for each block of records: `[blocks, classes, records]`. Two rows follow the classes: the
    weights of the records that were clipped, and all weights; then zeros up to a multiple of 8 rows. And the
    records: `[blocks, records, features + 4]`, where a 1 follows the features, then zeros. What is not finite in
    a record is 0.

    `weight` is `[classes, features]`. `tiny` and `lost` are those of `clipping`, and what it says of numbers that
    are not finite holds here.
    """
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    (classes, features), size = weight.shape, steps.rows.shape[1] // blocks
    rows = -(-(classes + 2) // 8) * 8
    sizes = _Sizes(classes, features, size, rows)
    make = pallas.pallas_call(
        functools.partial(_kernel, sizes=sizes, tiny=tiny, lost=lost),
        out_shape=(
            jax.ShapeDtypeStruct((blocks, rows, size), jnp.float32),
            jax.ShapeDtypeStruct((blocks, size, features + _UNIT), jnp.float32),
        ),
        grid=(blocks, -(-size // _RECORDS)),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
    )
    number = jnp.reshape(steps.number, 1).astype(jnp.int32)
    made = make(number, steps.x, steps.rows, steps.y, steps.weights, weight, bias, jnp.reshape(clip_norm, 1))
    derivatives, records = made
    return derivatives, records


class _Sizes(NamedTuple):
    classes: int
    features: int
    block: int  # records
    rows: int  # of the derivatives

    @property
    def height(self) -> int:
        """Rows that are computed: a power of 2, as of all that a kernel holds."""
        return max(16, 1 << (self.rows - 1).bit_length())

    @property
    def width(self) -> int:
        """Features that are read at once: they and the model's must fit in what a multiprocessor holds."""
        return _WIDTH if self.height <= 128 else _WIDTH // 2


# reason: the arguments are references to arrays in the GPU's memory; sizes and constants follow
def _kernel(
    number: Any,
    x: Any,
    rows: Any,
    y: Any,
    weights: Any,
    weight: Any,
    bias: Any,
    clip_norm: Any,
    out: Any,
    records: Any,
    *,
    sizes: _Sizes,
    tiny: float,
    lost: float,
) -> None:
    """`_RECORDS` records of a block."""
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    classes, height, step = sizes.classes, sizes.height, number[0]
    block, first = pallas.program_id(0), pallas.program_id(1) * _RECORDS
    row = jax.lax.broadcasted_iota(jnp.int32, (height, _RECORDS), 0)
    here = first + jax.lax.broadcasted_iota(jnp.int32, (_RECORDS,), 0) < sizes.block
    if sizes.block % _RECORDS == 0:
        here = jnp.ones(_RECORDS, bool)
    columns, all_rows = pallas.ds(block * sizes.block + first, _RECORDS), pallas.ds(0, height)

    def of_records(values: Any) -> Array:
        loaded: Array = triton.load(values.at[step, columns], mask=here, other=0)
        return loaded

    copies = records, (block, pallas.ds(first, _RECORDS))
    scores, squares = _scores(x, of_records(rows), weight, copies, here, sizes)
    class_of_row = jax.lax.broadcasted_iota(jnp.int32, (height,), 0)
    known = row < classes
    biases = triton.load(bias.at[all_rows], mask=class_of_row < classes, other=0.0)
    value = jnp.where(known, scores + biases[:, None], -jnp.inf)
    powers = jnp.exp(value - jnp.max(value, 0)[None])
    share = powers / jnp.sum(powers, 0)[None]
    derivative = jnp.where(known, share - jnp.where(row == of_records(y)[None], 1.0, 0.0), 0.0)
    squared = (jnp.sum(derivative * derivative, 0) + classes * lost) * (1 + squares)
    finite = squared < jnp.inf  # false for NaN, too
    length, counted = jnp.where(finite, jnp.sqrt(squared), jnp.inf), of_records(weights)
    scale = counted * jnp.minimum(1.0, clip_norm[0] / jnp.maximum(length, tiny))
    scaled = jnp.where(finite[None], derivative, 0.0) * scale[None]
    scaled = jnp.where(row == classes, (counted * jnp.where(length > clip_norm[0], 1.0, 0.0))[None], scaled)
    scaled = jnp.where(row == classes + 1, counted[None], scaled)
    stored = (row < sizes.rows) & here[None]
    triton.store(out.at[block, all_rows, pallas.ds(first, _RECORDS)], scaled, mask=stored)


def _scores(
    x: Any, rows: Array, weight: Any, copies: tuple[Any, tuple[Any, Any]], here: Array, sizes: _Sizes
) -> tuple[Array, Array]:
    """Products of the model's rows with the records at these rows of `x`, and the records' squared norms. The
    records are copied on the way, to that place of an array."""
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    height, width, features = sizes.height, sizes.width, sizes.features
    of_a_class = jax.lax.broadcasted_iota(jnp.int32, (height, width), 0) < sizes.classes
    places = jnp.broadcast_to(rows[:, None], (_RECORDS, width))

    def part(number: Array, before: tuple[Array, Array]) -> tuple[Array, Array]:
        start = number * width
        feature = start + jax.lax.broadcasted_iota(jnp.int32, (_RECORDS, width), 1)
        found = triton.load(x.at[places, feature], mask=feature < features, other=0.0)
        found = jnp.where(jnp.abs(found) < jnp.inf, found, 0.0)
        left = jnp.where(feature == features, 1.0, found)
        stored = (feature < features + _UNIT) & here[:, None]
        triton.store(copies[0].at[*copies[1], pallas.ds(start, width)], left, mask=stored)
        known = of_a_class & (start + jax.lax.broadcasted_iota(jnp.int32, (height, width), 1) < features)
        weights = triton.load(weight.at[pallas.ds(0, height), pallas.ds(start, width)], mask=known, other=0.0)
        along_features = ((1,), (1,)), ((), ())
        product = jax.lax.dot_general(weights, found, along_features, precision=jax.lax.Precision.HIGH)  # in TF32
        return before[0] + product, before[1] + jnp.sum(found * found, 1)

    none = jnp.zeros((height, _RECORDS), jnp.float32), jnp.zeros(_RECORDS, jnp.float32)
    made: tuple[Array, Array] = jax.lax.fori_loop(0, -(-(features + _UNIT) // width), part, none)
    return made
