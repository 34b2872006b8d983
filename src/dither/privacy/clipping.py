"""Clipping: the whole batch gradient, or every example's own gradient.

Per-example clipping of a dense network never forms a per-example gradient: the gradient of a dense layer is
an outer product a_i ⊗ d_i of the layer's input and its output's derivative, so its squared norm is
|a_i|² |d_i|² (+ |d_i|² for the bias), and the clipped sum is one matrix product (Goodfellow 2015). Other
models go through the rules of `privacy.layers`.

What a clip returns is finite and within the clip for every bit pattern of its input: what is not finite, or has a
squared norm that overflows, counts as zero, and a record of weight 0 has no influence (docs/privacy.md, Totality).
Zeros are put in before the scale is applied, not after: the compiler then rounds as it does without them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dither.accounting import exact
from dither.models import Model, count_params, cross_entropy, losses
from dither.privacy import lattice, softmax
from dither.types import Array, Batch, Fetched, Params, PyTree, RoundBatches

REACH = 2.0**40  # of a coordinate that a client reads or sends: sums and products of such numbers are finite
TINY = 1e-30  # a zero vector is scaled by 1, not by 0/0
_SIDE_BY_SIDE = 16  # blocks of a batch
LOST = 2.0**-126  # a smaller square is flushed to 0
EXACT = jax.lax.Precision.HIGHEST  # a GPU's shortened products would let a record count for more than the clip


class Clipped(NamedTuple):
    """A gradient after clipping, and the fraction of vectors that the clip shortened."""

    gradient: PyTree
    fraction: Array


def norm(tree: PyTree) -> Array:
    """Euclidean norm of the whole tree as one vector."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def blocked_norm(tree: PyTree) -> Array:
    """`norm` with squares summed in rows of 256 and then the rows' sums: few errors add up (`exact`)."""
    rows = [jnp.sum(jnp.square(_rows(leaf)), 1) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(jnp.sum(jax.lax.optimization_barrier(jnp.concatenate(rows))))


def _rows(leaf: Array) -> Array:
    flat = leaf.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % exact.ROW)).reshape(-1, exact.ROW)


def norm_error(model: Model) -> float:
    """By how much, relatively, float32 may leave a record's clipped gradient longer than the clip (R7)."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    if not model.layers:
        return exact.norm_error(count_params(params) + 4 * len(jax.tree.leaves(params)) + 16)
    widths = [sum(params[layer.name]["w"].shape) for layer in model.layers]
    return exact.norm_error(max(widths) + len(widths))


def clip(tree: PyTree, clip_norm: Array, *, norm: Callable[[PyTree], Array] = norm) -> PyTree:
    """v · min(1, clip_norm/|v|), safe at v = 0; zero if |v|² is not finite."""
    length = norm(tree)
    length = jnp.where(jnp.isfinite(length), length, jnp.inf)
    scale = jnp.minimum(1.0, clip_norm / jnp.maximum(length, TINY))
    return jax.tree.map(lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, 0) * scale, tree)


def exact_clip(tree: PyTree, clip_norm: Array) -> PyTree:
    """`clip` with an error that `exact.whole_error` bounds. What is measured is what is scaled: the compiler may
    not compute it twice, to other bits."""
    return clip(jax.lax.optimization_barrier(tree), clip_norm, norm=blocked_norm)


def projected(tree: PyTree, radius: float) -> PyTree:
    """The (finite) tree projected onto the ball of that radius, less 2^-10 of it for the error of the norm; 0: any
    radius."""
    if not radius:
        return tree
    scale = jnp.minimum(1.0, radius * (1 - 2.0**-10) / jnp.maximum(norm(tree), TINY))
    return jax.tree.map(lambda leaf: leaf * scale, tree)


def reined(tree: PyTree) -> PyTree:
    """The tree with every number clamped to ±REACH, and 0 in place of NaN."""

    def rein(leaf: Array) -> Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.where(jnp.isnan(leaf), 0, jnp.clip(leaf, -REACH, REACH))

    return jax.tree.map(rein, tree)


# reason: a batch and the rule it is clipped by; all but mode and l2_inside_clip are traced
def gradient(
    model: Model,
    params: Params,
    batch: Batch,
    *,
    divisor: Array,
    clip_norm: Array,
    mode: str,
    l2: Array | float = 0.0,
    l2_inside_clip: bool = True,
) -> Clipped:
    """Mean gradient over a batch, clipped, plus that of l2·|params|².

    mode "batch" clips the mean (with the regulariser when `l2_inside_clip`), "example" clips each record's
    gradient before the mean (the regulariser does not touch data and stays outside), "none" clips nothing.
    """
    if mode == "example":
        total, fraction = example_clipped_sum(model, params, *batch, clip_norm=clip_norm, steps=_steps_of(batch))
        mean = jax.tree.map(lambda leaf: leaf / divisor, total)
        return Clipped(regularised(mean, params, l2), fraction)
    mean = _batch_mean(model, params, batch, divisor)
    if mode == "none":
        return Clipped(regularised(mean, params, l2), jnp.zeros(()))
    if l2_inside_clip:
        mean = regularised(mean, params, l2)
    fraction = (norm(mean) > clip_norm).astype(jnp.float32)
    mean = clip(mean, clip_norm)
    return Clipped(mean if l2_inside_clip else regularised(mean, params, l2), fraction)


def _batch_mean(model: Model, params: Params, batch: Batch, divisor: Array) -> PyTree:
    # What stands in the place of padding is of no record: 0 · NaN would poison the sum.
    used = batch.weights > 0
    x = jnp.where(used.reshape(-1, *([1] * (batch.x.ndim - 1))), batch.x, 0)
    return _mean_gradient(model, params, x, jnp.where(used, batch.y, 0), batch.weights / divisor)


# reason: a batch, the rule it is clipped by, and the lattice
def on_lattice(
    model: Model,
    params: Params,
    batch: Batch,
    *,
    scale: Array,
    mode: str,
    divisor: Array,
    clip_norm: Array,
    l2: Array | float = 0.0,
    fixed_places: bool,
) -> Clipped:
    """What exact noise is added to, as integers (R7): the sum of a batch's clipped gradients (mode "example"), or
    the clipped mean, `l2` inside the clip (mode "batch"), at the lattice's `scale`.

    The sum is taken in blocks. With `fixed_places` each block becomes integers by itself, so that a record moves
    those of its own block alone (`exact.sum_error`).
    """
    if mode == "batch":
        mean = regularised(_batch_mean(model, params, batch, divisor), params, l2)
        fraction = (norm(mean) > clip_norm).astype(jnp.float32)
        return Clipped(lattice.rounded(exact_clip(mean, clip_norm), scale), fraction)
    length = batch.x.shape[0]
    size = exact.block_size(length)
    # An accelerator sums blocks side by side, in groups that fit its memory; a CPU one after the other.
    together = 1 if jax.default_backend() == "cpu" else min(-(-length // size), _SIDE_BY_SIDE)
    filled = [jnp.pad(a, [(0, -len(a) % (size * together))] + [(0, 0)] * (a.ndim - 1)) for a in batch]
    groups = [a.reshape(-1, together, size, *a.shape[1:]) for a in filled]
    steps = _steps_of(batch) if length == size * together else None

    def one(block: list[Array]) -> tuple[PyTree, Array]:
        total, fraction = example_clipped_sum(model, params, *block, clip_norm=clip_norm, stored=True)
        return finished(total, fraction * jnp.sum(block[2]))

    def finished(total: PyTree, clipped: Array) -> tuple[PyTree, Array]:
        return lattice.rounded(total, scale) if fixed_places else total, jnp.rint(clipped)  # a whole number again

    def joined(a: tuple[PyTree, Array], b: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
        total = lattice.added(a[0], b[0]) if fixed_places else jax.tree.map(jnp.add, a[0], b[0])
        return total, a[1] + b[1]

    def one_group(group: list[Array]) -> tuple[PyTree, Array]:
        if together == 1:
            return one([a[0] for a in group])
        if _is_large_softmax(model, params):
            of_blocks = softmax_block_sums(model, params, *group, clip_norm=clip_norm, steps=steps)
            sums = jax.vmap(finished)(*of_blocks[:2])
        else:
            sums = jax.vmap(one)(group)
        each: list[tuple[PyTree, Array]] = [jax.tree.map(operator.itemgetter(i), sums) for i in range(together)]
        return functools.reduce(joined, each)

    total, clipped = one_group([a[0] for a in groups])
    if len(groups[0]) > 1:
        few = len(groups[0]) * together <= 8  # a loop costs a small model more than its sums do
        (total, clipped), _ = jax.lax.scan(
            lambda before, group: (joined(before, one_group(group)), None),
            (total, clipped),
            [a[1:] for a in groups],
            unroll=few or 1,
        )
    integers = total if fixed_places else lattice.rounded(total, scale)
    return Clipped(integers, clipped / jnp.maximum(jnp.sum(batch.weights), 1.0))


def _mean_gradient(model: Model, params: Params, x: Array, y: Array, weights: Array) -> PyTree:
    """The gradient of the weighted sum of the losses."""
    if not model.layers:
        return jax.grad(lambda p: jnp.sum(weights * losses(model, p, x, y)))(params)
    # The same in the order of the parameters: of `jax.grad`'s every weight matrix is turned, at every step.
    inputs, derivatives = _backward(model, params, x, y, weights)
    on_cpu = jax.default_backend() == "cpu"
    return {
        layer.name: {"w": product(a, d) if on_cpu else a.T @ d, "b": jnp.sum(d, 0)}
        for layer, a, d in zip(model.layers, inputs, derivatives, strict=True)
    }


def _backward(model: Model, params: Params, x: Array, y: Array, weights: Array) -> tuple[list[Array], list[Array]]:
    """Each dense layer's inputs, and the weighted losses' derivatives in its outputs before the activation."""

    def forward(taps: list[Array]) -> tuple[Array, list[Array]]:
        # A zero `tap` is added to each layer's output: the loss's derivative in it is d_i of the docstring.
        seen, value = [], x
        for layer, tap in zip(model.layers, taps, strict=True):
            seen.append(value)
            weight = params[layer.name]
            value = layer.activation(value @ weight["w"] + weight["b"] + tap)
        return jnp.sum(weights * model.loss(value, y)), seen

    taps = [jnp.zeros((x.shape[0], params[layer.name]["b"].shape[0]), jnp.float32) for layer in model.layers]
    derivatives, inputs = jax.grad(forward, has_aux=True)(taps)
    return inputs, derivatives


# reason: a batch, and the rule it is clipped by
def example_clipped_sum(
    model: Model,
    params: Params,
    x: Array,
    y: Array,
    weights: Array,
    *,
    clip_norm: Array,
    stored: bool = False,
    steps: RoundBatches | None = None,
) -> tuple[PyTree, Array]:
    """Sum over records of weight · clip(gradient, clip_norm), and the fraction that was clipped. `stored` keeps
    the compiler from computing a number twice, for the norm and, to other bits, for the sum (R7): `layers` does so
    always. A record then has the same bits at every place, if there are a multiple of `exact.PLACES`."""
    if _is_large_softmax(model, params):
        # Blocks side by side keep more of a GPU busy.
        size = next((size for size in (2 * exact.BLOCK, exact.BLOCK) if len(x) % size == 0), len(x))
        blocks = (a.reshape(-1, size, *a.shape[1:]) for a in (x, y, weights))
        totals, clipped, counted = softmax_block_sums(model, params, *blocks, clip_norm=clip_norm, steps=steps)
        total = jax.tree.map(_added_up, totals)
        return total, _added_up(clipped) / jnp.maximum(_added_up(counted), 1.0)
    x = _finite(x)
    if model.layers:
        return _dense_clipped_sum(model, params, x, y, weights, clip_norm=clip_norm, stored=stored)
    from dither.privacy import layers

    places = exact.PLACES if stored else 1
    total, norms = layers.clipped_sum(model, params, x, y, weights, clip_norm=clip_norm, places=places)
    return total, _fraction(norms, weights, clip_norm)


def _finite(x: Array) -> Array:
    """Records with 0 in place of what is not finite. It is part of the gather that makes them, and costs
    nothing."""
    return jnp.where(jnp.isfinite(x), x, 0)


def _dense_clipped_sum(
    model: Model, params: Params, x: Array, y: Array, weights: Array, *, clip_norm: Array, stored: bool
) -> tuple[PyTree, Array]:
    inputs, derivatives = _backward(model, params, x, y, jnp.ones(x.shape[0]))
    if stored:  # all but the records, which no arithmetic has made
        derivatives, inputs[1:] = jax.lax.optimization_barrier((derivatives, inputs[1:]))
    # What d² loses below LOST a large a² could bring back: it is added, so that no norm is too small.
    squared = sum(
        (jnp.sum(jnp.square(d), 1) + d.shape[1] * LOST) * (1 + jnp.sum(jnp.square(a), 1))
        for a, d in zip(inputs, derivatives, strict=True)
    )
    counts = jnp.isfinite(squared)
    norms = jnp.where(counts, jnp.sqrt(squared), jnp.inf)
    scale = weights * jnp.minimum(1.0, clip_norm / jnp.maximum(norms, TINY))
    total = {}
    for number, (layer, a, d) in enumerate(zip(model.layers, inputs, derivatives, strict=True)):
        if number:  # the first layer's are the records, which are finite
            a = jnp.where(counts[:, None], a, 0)
        scaled = jnp.where(counts[:, None], d, 0) * scale[:, None]
        total[layer.name] = {"w": product(a, scaled), "b": jnp.sum(scaled, 0)}
    return total, _fraction(norms, weights, clip_norm)


def _is_large_softmax(model: Model, params: Params) -> bool:
    """Whether `softmax_block_sums` clips: on a GPU, one dense layer with a plain cross-entropy."""
    if model.name != "softmax" or len(model.layers) != 1 or model.loss is not cross_entropy:
        return False
    shape = params[model.layers[0].name]["w"].shape
    return softmax.is_large(shape) and shape[1] <= softmax.MOST_CLASSES


def _steps_of(batch: Batch) -> RoundBatches | None:
    return batch.steps if isinstance(batch, Fetched) else None


def _added_up(blocks: Array) -> Array:
    """Their sum. That of few is additions: a reduction would be a kernel of its own."""
    return functools.reduce(jnp.add, blocks) if len(blocks) <= _SIDE_BY_SIDE else jnp.sum(blocks, 0)


# reason: as `example_clipped_sum`
def softmax_block_sums(
    model: Model,
    params: Params,
    x: Array,
    y: Array,
    weights: Array,
    *,
    clip_norm: Array,
    steps: RoundBatches | None = None,
    interpret: bool = False,
) -> tuple[PyTree, Array, Array]:
    """`example_clipped_sum` of softmax regression for each block of records, in the way of a GPU; with it the
    weights of the records that were clipped, and of all. `x` is `[blocks, records, features]`; with `steps` these
    records are fetched from there."""
    (layer,) = model.layers
    weight, bias = params[layer.name]["w"], params[layer.name]["b"]
    blocks, features, classes = len(x), x.shape[-1], len(bias)
    if steps is None:
        all_rows = jnp.arange(x[..., 0].size, dtype=jnp.int32)[None]
        flat = x.reshape(-1, features).astype(jnp.float32)
        steps = RoundBatches(flat, all_rows, y.reshape(1, -1), weights.reshape(1, -1), jnp.int32(0))
    derivatives, records = softmax.clipped_derivatives(
        steps, weight.T, bias, clip_norm, blocks=blocks, tiny=TINY, lost=LOST, interpret=interpret
    )
    sums = jnp.matmul(derivatives, records, precision=EXACT)  # the last column: of derivatives and counts alone
    gradient, bias_gradient = sums[:, :classes, :features].swapaxes(1, 2), sums[:, :classes, features]
    counts = sums[:, classes, features], sums[:, classes + 1, features]
    return {layer.name: {"w": gradient, "b": bias_gradient}}, *counts


def product(a: Array, d: Array) -> Array:
    """aᵀd, in full float32. A CPU copies the left factor of a product into another order. (dᵀa)ᵀ avoids that
    copy of `a`, and is used if its result is smaller to transpose."""
    if a.shape[0] > d.shape[1] and jax.default_backend() == "cpu":
        return jnp.matmul(d.T, a, precision=EXACT).T
    return jnp.matmul(a.T, d, precision=EXACT)


def _fraction(norms: Array, weights: Array, clip_norm: Array) -> Array:
    return jnp.sum(weights * (norms > clip_norm)) / jnp.maximum(jnp.sum(weights), 1.0)


def regularised(gradient: PyTree, params: Params, l2: Array | float) -> PyTree:
    if isinstance(l2, float) and l2 == 0:  # the compiler may not leave out 0 · params, which it would read
        return gradient
    return jax.tree.map(lambda g, p: g + 2 * l2 * p, gradient, params)
