"""Per-example clipping of any model by rules for its layers, at about the cost of a plain gradient.

The model is traced for one record. Wherever parameters meet the record (a product, a convolution, a table of
embeddings, a bias, a scale) the derivative d of the loss in the result is taken, for all records in one pass; with
the record's own operand a, it gives the gradient of these parameters:

    product a·w            a ⊗ d, whose norm is |a| |d|: not formed where the product has one row (Goodfellow 2015)
    product of rows        Σ over rows a_t ⊗ d_t, one matrix product a record
    convolution            the same, with the patches of the image as rows
    table of embeddings    the sums of d over equal indices, row by row
    all else               the derivative of this one operation, formed for each record

Norm and contribution come from the same stored numbers. No record's number depends on another record, by
construction. Records pass through in blocks of at most 64, fewer where their gradients are large.
"""

from __future__ import annotations

import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from dither.errors import SpecError
from dither.models import Model, losses
from dither.models.windows import MOST_CUTS, MOST_POOLED, convolve, cuts, max_pool
from dither.privacy.clipping import EXACT, LOST, TINY, product
from dither.types import Array, Params, PyTree

BLOCK = 64  # records whose contributions are summed at a time, at most
_BLOCK_NUMBERS = 1 << 24  # that a block forms, about
_MOVES = ("reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "convert_element_type", "copy")
_CALLS = ("jit", "pjit")


_Evaluate = Callable[[JaxprEqn, Sequence[Any]], list[Any]]


class _Weight(NamedTuple):
    """A value that depends on parameters and on no record."""

    of: Callable[[Sequence[Array]], Array]  # from the leaves of the parameters
    leaves: frozenset[int]  # which of them
    moved: bool  # it holds the numbers of one leaf, each once


class _Meeting(NamedTuple):
    """An operation in which parameters meet a record."""

    eqn: JaxprEqn
    operands: tuple[Any, ...]  # a `_Weight`, or None if the record or a constant comes in

    @property
    def results(self) -> list[Any]:
        return [var.aval for var in self.eqn.outvars]

    def shape(self, number: int) -> tuple[int, ...]:
        """The shape of an operand."""
        aval: Any = self.eqn.invars[number].aval
        return tuple(aval.shape)

    @property
    def leaves(self) -> frozenset[int]:
        return frozenset().union(*(each.leaves for each in self.operands if each is not None))

    def apply(self, leaves: Sequence[Array], records: Sequence[Array]) -> list[Array]:
        """The operation on one record's operands."""
        given = iter(records)
        values = [next(given) if each is None else each.of(leaves) for each in self.operands]
        return _evaluated(self.eqn, values)


def clipped_sum(
    model: Model, params: Params, x: Array, y: Array, weights: Array, *, clip_norm: Array, places: int = 1
) -> tuple[PyTree, Array]:
    """Sum over records of weight · clip(gradient, clip_norm), and the norm of each gradient. Blocks of records
    have a multiple of `places`."""
    leaves, structure = jax.tree.flatten(params)

    def loss(leaves: list[Array], one_x: Array, one_y: Array) -> Array:
        return jnp.sum(losses(model, jax.tree.unflatten(structure, leaves), one_x[None], one_y[None]))

    program = _Program(jax.make_jaxpr(loss)(leaves, x[0], y[0]), leaves)
    count = x.shape[0]
    most = max(1, min(BLOCK, _BLOCK_NUMBERS // max(program.numbers(), 1)))
    size = -(-count // -(-count // most) // places) * places  # blocks of about one size
    x, y, weights = (jnp.pad(a, [(0, -count % size)] + [(0, 0)] * (a.ndim - 1)) for a in (x, y, weights))
    blocks = tuple(a.reshape(-1, size, *a.shape[1:]) for a in (x, y, weights))

    def add(total: list[Array], block: tuple[Array, Array, Array]) -> tuple[list[Array], Array]:
        found, norms = program.block(leaves, *block, clip_norm=clip_norm)
        return [a + b for a, b in zip(total, found, strict=True)], norms

    if len(blocks[0]) == 1:
        total, norms = program.block(leaves, *(a[0] for a in blocks), clip_norm=clip_norm)
    else:
        total, norms = jax.lax.scan(add, [jnp.zeros_like(leaf) for leaf in leaves], blocks)
    return jax.tree.unflatten(structure, total), norms.reshape(-1)[:count]


class _Program:
    """The loss of one record, with the places where parameters meet it."""

    def __init__(self, closed: ClosedJaxpr, leaves: Sequence[Array]) -> None:
        self.closed, self.count = closed, len(leaves)
        self.meetings: list[_Meeting] = []

        def meet(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
            operands = tuple(value if isinstance(value, _Weight) else None for value in values)
            self.meetings.append(_Meeting(eqn, operands))
            return list(eqn.outvars)

        self._run([*leaves, None, None], meet, lambda eqn, values: list(eqn.outvars))  # no record is looked at
        operands = [each for meeting in self.meetings for each in meeting.operands if each is not None]
        uses = [sum(leaf in each.leaves for each in operands) for leaf in range(self.count)]
        self.rules = [_rule(meeting, uses, leaves) for meeting in self.meetings]

    def numbers(self) -> int:
        """How many numbers a record forms, about."""
        return sum(rule.numbers for rule in self.rules)

    def _run(self, arguments: Sequence[Any], meet: _Evaluate, evaluate: _Evaluate) -> Any:
        leaves, records = arguments[: self.count], arguments[self.count :]
        weights = [_Weight(operator.itemgetter(leaf), frozenset([leaf]), True) for leaf in range(self.count)]
        given = [*weights, *map(_Record, records)]
        return _value(_interpreted(self.closed.jaxpr, self.closed.consts, given, meet, evaluate)[0], leaves)

    def block(
        self, leaves: Sequence[Array], x: Array, y: Array, weights: Array, *, clip_norm: Array
    ) -> tuple[list[Array], Array]:
        """The clipped sum of a block of records, leaf by leaf, and the norms of their gradients."""

        def forward(taps: list[list[Array]], one_x: Array, one_y: Array) -> tuple[Array, list[list[Array]]]:
            seen: list[list[Array]] = []

            def meet(eqn: JaxprEqn, values: Sequence[Any]) -> list[Array]:
                operands = [_value(each, ()) for each in values if not isinstance(each, _Weight)]
                results = _evaluated(eqn, [_value(each, leaves) for each in values])
                # A zero is added to each result: the loss's derivative in it is the d of the docstring.
                results = [a + b if _real(a) else a for a, b in zip(results, taps[len(seen)], strict=True)]
                seen.append(operands)
                return results

            return self._run([*leaves, one_x, one_y], meet, _evaluated), seen

        def one(one_x: Array, one_y: Array) -> tuple[list[list[Array]], list[list[Array]]]:
            taps = [[jnp.zeros(each.shape) for each in meeting.results] for meeting in self.meetings]
            found: tuple[list[list[Array]], list[list[Array]]]
            found = jax.grad(forward, has_aux=True)(taps, one_x, one_y)
            return found

        derivatives, seen = jax.vmap(one)(x, y)
        parts = [rule(leaves, a, d) for rule, a, d in zip(self.rules, seen, derivatives, strict=True)]
        formed: dict[int, Array] = {}
        for part in parts:
            for leaf, value in part.formed.items():
                formed[leaf] = formed[leaf] + value if leaf in formed else value
        formed = _stored(formed)
        squared = sum(part.squared for part in parts) + sum(
            jnp.sum(jnp.square(value).reshape(len(x), -1), 1) for value in formed.values()
        )
        counts = jnp.isfinite(squared)
        norms = jnp.where(counts, jnp.sqrt(squared), jnp.inf)
        scale = weights * jnp.minimum(1.0, clip_norm / jnp.maximum(norms, TINY))
        total = [jnp.zeros_like(leaf) for leaf in leaves]
        for leaf, value in formed.items():
            flat = jnp.where(counts[:, None], value.reshape(len(x), -1), 0)
            total[leaf] = jnp.matmul(scale, flat, precision=EXACT).reshape(total[leaf].shape)
        for part in parts:
            if part.contribution is not None:
                total[part.leaf] = part.contribution(counts, scale)
        return total, norms


def _stored(numbers: PyTree) -> PyTree:
    """The numbers, kept from being computed twice: for the norm and, to other bits, for the sum."""
    return jax.lax.optimization_barrier(numbers)


# One record's program, step by step


class _Record(NamedTuple):
    """A value that depends on the record."""

    value: Array


def _value(value: Any, leaves: Sequence[Array]) -> Any:
    if isinstance(value, _Weight):
        return value.of(leaves)
    return value.value if isinstance(value, _Record) else value


def _real(value: Array) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.floating))


def _evaluated(eqn: JaxprEqn, values: Sequence[Any]) -> list[Array]:
    """The results of one operation."""
    if eqn.primitive.name == "reduce_window_max" and _plain_pooling(eqn):
        padding = tuple(map(tuple, eqn.params["padding"]))
        return [max_pool(values[0], eqn.params["window_dimensions"], eqn.params["window_strides"], padding)]
    if eqn.primitive.name == "conv_general_dilated" and _plain_convolution(eqn):
        return [_convolved(eqn.params, *values)]
    named = {var: value for var, value in zip(eqn.invars, values, strict=True) if not isinstance(var, Literal)}
    jaxpr = Jaxpr((), tuple(named), tuple(eqn.outvars), [eqn], eqn.effects)
    return list(jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*named.values()))


def _plain_pooling(eqn: JaxprEqn) -> bool:
    undilated = all(step == 1 for key in ("base_dilation", "window_dilation") for step in eqn.params[key])
    return undilated and math.prod(eqn.params["window_dimensions"]) <= MOST_POOLED


def _plain_convolution(eqn: JaxprEqn) -> bool:
    params = eqn.params
    image: Any
    kernel: Any
    result: Any
    image, kernel, result = (each.aval for each in (*eqn.invars, *eqn.outvars))
    window = math.prod(kernel.shape[axis] for axis in params["dimension_numbers"].rhs_spec[2:])
    return (
        params["feature_group_count"] == params["batch_group_count"] == 1
        and all(step == 1 for step in params["lhs_dilation"])
        and all(side >= 0 for pair in params["padding"] for side in pair)
        and window <= MOST_CUTS
        and image.dtype == kernel.dtype == result.dtype == jnp.float32
        and params["precision"] is None
    )


def _convolved(params: dict[str, Any], image: Array, kernel: Array) -> Array:
    """A plain convolution, in the order of axes that XLA's quick kernels want."""
    (batch, channel, *space), (out, into, *window), out_spec = params["dimension_numbers"]
    x, w = image.transpose(batch, *space, channel), kernel.transpose(*window, into, out)
    result = convolve(x, w, params["window_strides"], params["padding"], params["rhs_dilation"])
    return result.transpose(_inverse([out_spec[0], *out_spec[2:], out_spec[1]]))


def _inverse(order: Sequence[int]) -> list[int]:
    """The transposition that undoes another."""
    return [order.index(axis) for axis in range(len(order))]


def _interpreted(
    jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], meet: _Evaluate, evaluate: _Evaluate
) -> list[Any]:
    """The program's results. `meet` gives those of operations in which parameters meet a record, `evaluate` those
    of other operations on the record."""
    known: dict[Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    known |= dict(zip(jaxpr.invars, arguments, strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else known[var]

    for eqn in jaxpr.eqns:
        values = [read(var) for var in eqn.invars]
        weights = any(isinstance(each, _Weight) for each in values)
        recorded = any(isinstance(each, _Record) for each in values)
        results: list[Any]
        if weights and recorded and eqn.primitive.name in _CALLS:
            inner = eqn.params["jaxpr"]
            results = _interpreted(inner.jaxpr, inner.consts, values, meet, evaluate)
        elif weights and recorded:
            results = [_Record(each) for each in meet(eqn, values)]
        elif weights:
            results = [_weight(eqn, values, number) for number in range(len(eqn.outvars))]
        elif recorded:
            results = [_Record(each) for each in evaluate(eqn, [_value(each, ()) for each in values])]
        else:
            results = _evaluated(eqn, values)
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _weight(eqn: JaxprEqn, values: Sequence[Any], number: int) -> _Weight:
    """A result of an operation on parameters alone."""
    first = values[0]
    before: Any = eqn.invars[0].aval
    after: Any = eqn.outvars[number].aval
    moved = eqn.primitive.name in _MOVES and isinstance(first, _Weight) and first.moved
    moved = moved and math.prod(before.shape) == math.prod(after.shape) and before.dtype == after.dtype
    leaves = frozenset().union(*(each.leaves for each in values if isinstance(each, _Weight)))
    return _Weight(lambda all: _evaluated(eqn, [_value(each, all) for each in values])[number], leaves, moved)


# The rules


class _Contribution(NamedTuple):
    """What one meeting adds to the gradients of a block of records: formed, leaf by leaf, where other meetings may
    add to the same leaf; else its squared norms, and the sum as a function of what counts and the scale."""

    formed: dict[int, Array]
    squared: Array | float = 0.0
    leaf: int = -1
    contribution: Callable[[Array, Array], Array] | None = None


class _Rule(ABC):
    """What the gradients of the parameters in one meeting are, for a block of records."""

    @property
    @abstractmethod
    def numbers(self) -> int:
        """How many numbers a record forms, about."""

    @abstractmethod
    def __call__(self, leaves: Sequence[Array], operands: list[Array], derivatives: list[Array]) -> _Contribution:
        """From the record's operands and the loss's derivatives in the results."""


class _Generic(_Rule):
    """The rule for all else: the derivative of the operation, formed for each record."""

    def __init__(self, meeting: _Meeting, leaves: Sequence[Array]) -> None:
        self.meeting = meeting
        self.sizes = [leaves[leaf].size for leaf in meeting.leaves]

    @property
    def numbers(self) -> int:
        formed: int = sum(self.sizes) + sum(math.prod(each.shape) for each in self.meeting.results)
        return formed

    def __call__(self, leaves: Sequence[Array], operands: list[Array], derivatives: list[Array]) -> _Contribution:
        chosen = sorted(self.meeting.leaves)
        real = [bool(jnp.issubdtype(each.dtype, jnp.floating)) for each in self.meeting.results]

        def one(a: list[Array], d: list[Array]) -> list[Array]:
            def results(some: list[Array]) -> list[Array]:
                all_leaves = list(leaves)
                for leaf, value in zip(chosen, some, strict=True):
                    all_leaves[leaf] = value
                return list(itertools.compress(self.meeting.apply(all_leaves, a), real))

            back = jax.vjp(results, [leaves[leaf] for leaf in chosen])[1]
            gradient: list[Array] = back(list(itertools.compress(d, real)))[0]
            return gradient

        return _Contribution(dict(zip(chosen, jax.vmap(one)(operands, derivatives), strict=True)))


class _OneLeaf(_Rule):
    """A rule for an operation with one weight that holds the numbers of one leaf, which is used nowhere else."""

    def __init__(self, meeting: _Meeting, leaves: Sequence[Array]) -> None:
        self.meeting = meeting
        self.at = next(number for number, each in enumerate(meeting.operands) if each is not None)
        self.weight: _Weight = meeting.operands[self.at]
        (self.leaf,) = self.weight.leaves
        self.shape, self.size = meeting.shape(self.at), int(leaves[self.leaf].size)

    def _moved_back(self, leaves: Sequence[Array], gradient: Array) -> Array:
        """A gradient in the shape of the weight, as it was used, in the shape of its leaf."""

        def used(leaf: Array) -> Array:
            return self.weight.of([*leaves[: self.leaf], leaf, *leaves[self.leaf + 1 :]])

        moved: Array = jax.vjp(used, leaves[self.leaf])[1](gradient)[0]
        return moved


class _Rows(_OneLeaf):
    """A product of rows with parameters, or what is one."""

    @abstractmethod
    def _factors(self, operand: Array, derivative: Array) -> tuple[Array, Array]:
        """The rows of each record and the derivatives in their products."""

    @abstractmethod
    def _in_shape(self, gradient: Array) -> Array:
        """A gradient [in, out] in the shape of the weight."""

    def __call__(self, leaves: Sequence[Array], operands: list[Array], derivatives: list[Array]) -> _Contribution:
        a, d = self._factors(operands[0], derivatives[0])  # [records, rows, in], [records, rows, out]
        if a.shape[1] == 1:
            a, d = _stored((a[:, 0], d[:, 0]))
            # What squares lose below LOST the other factor could bring back: it is added.
            squared = (jnp.sum(jnp.square(d), 1) + d.shape[1] * LOST) * (
                jnp.sum(jnp.square(a), 1) + a.shape[1] * LOST
            )

            def outer(counts: Array, scale: Array) -> Array:
                scaled = jnp.where(counts[:, None], d, 0) * scale[:, None]
                gradient = product(jnp.where(counts[:, None], a, 0), scaled)
                return self._moved_back(leaves, self._in_shape(gradient))

            return _Contribution({}, squared, self.leaf, outer)
        formed = _stored(jnp.einsum("nti,nto->nio", a, d))
        flat = formed.reshape(len(a), -1)

        def weighted(counts: Array, scale: Array) -> Array:
            total = jnp.matmul(scale, jnp.where(counts[:, None], flat, 0), precision=EXACT)
            return self._moved_back(leaves, self._in_shape(total.reshape(formed.shape[1:])))

        return _Contribution({}, jnp.sum(jnp.square(flat), 1), self.leaf, weighted)


class _Product(_Rows):
    """dot_general without batch dimensions."""

    @property
    def contracted(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes that are summed over, of each operand."""
        axes: tuple[tuple[int, ...], tuple[int, ...]] = self.meeting.eqn.params["dimension_numbers"][0]
        return axes

    @property
    def numbers(self) -> int:
        rows: int = math.prod(self.meeting.results[0].shape) // max(self._columns, 1)
        return (self.size if rows > 1 else 0) + rows * (self._columns + self.size // max(self._columns, 1))

    @property
    def _columns(self) -> int:
        return math.prod(n for axis, n in enumerate(self.shape) if axis not in self.contracted[self.at])

    def _factors(self, operand: Array, derivative: Array) -> tuple[Array, Array]:
        inner = [1 + axis for axis in self.contracted[1 - self.at]]
        free = [axis for axis in range(1, operand.ndim) if axis not in inner]
        rows = math.prod(operand.shape[axis] for axis in free)
        a = operand.transpose(0, *free, *inner).reshape(len(operand), rows, -1)
        if self.at == 1:
            return a, derivative.reshape(len(operand), rows, -1)
        return a, derivative.reshape(len(operand), -1, rows).swapaxes(1, 2)

    def _in_shape(self, gradient: Array) -> Array:
        inner = list(self.contracted[self.at])
        order = inner + [axis for axis in range(len(self.shape)) if axis not in inner]
        moved = gradient.reshape([self.shape[axis] for axis in order])
        return moved.transpose(_inverse(order))


class _Convolution(_Rows):
    """conv_general_dilated without groups: a product with the patches of the image."""

    def __init__(self, meeting: _Meeting, leaves: Sequence[Array]) -> None:
        super().__init__(meeting, leaves)
        self.params = meeting.eqn.params
        self.numbering = self.params["dimension_numbers"]

    @property
    def numbers(self) -> int:
        columns: int = self.shape[self.numbering.rhs_spec[0]]
        rows: int = math.prod(self.meeting.results[0].shape) // columns
        return self.size + rows * (columns + self.size // columns)

    def _factors(self, operand: Array, derivative: Array) -> tuple[Array, Array]:
        (batch, channel, *spatial), (out_batch, out_channel, *out_spatial) = (
            [1 + axis for axis in spec] for spec in (self.numbering.lhs_spec, self.numbering.out_spec)
        )
        image = operand.transpose(0, batch, *spatial, channel)
        image = jnp.pad(image, [(0, 0), (0, 0), *self.params["padding"], (0, 0)])
        d = derivative.transpose(0, out_batch, *out_spatial, out_channel)
        window = tuple(self.shape[axis] for axis in self.numbering.rhs_spec[2:])
        counts, steps = d.shape[2:-1], self.params["window_strides"]
        patches = [image[:, :, *cut] for cut in cuts(window, counts, steps, self.params["rhs_dilation"])]
        a = jnp.concatenate(patches, -1)
        return a.reshape(len(a), -1, a.shape[-1]), d.reshape(len(d), -1, d.shape[-1])

    def _in_shape(self, gradient: Array) -> Array:
        out, into, *spatial = self.numbering.rhs_spec
        order = [*spatial, into, out]
        moved = gradient.reshape([self.shape[axis] for axis in order])
        return moved.transpose(_inverse(order))


class _Embedding(_OneLeaf):
    """gather of whole rows of a table."""

    @property
    def numbers(self) -> int:
        width = math.prod(self.shape[1:])
        rows: int = math.prod(self.meeting.results[0].shape) // width
        return rows * (rows + 3 * width)

    def __call__(self, leaves: Sequence[Array], operands: list[Array], derivatives: list[Array]) -> _Contribution:
        eqn, count = self.meeting.eqn, len(derivatives[0])
        offset = [1 + axis for axis in eqn.params["dimension_numbers"].offset_dims]
        rows = [axis for axis in range(1, derivatives[0].ndim) if axis not in offset]
        indices = operands[0].reshape(count, -1)
        if eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP:
            indices = jnp.clip(indices, 0, self.shape[0] - 1)
        inside = (indices >= 0) & (indices < self.shape[0])
        d = derivatives[0].transpose(0, *rows, *offset).reshape(count, indices.shape[1], -1)
        same = indices[:, :, None] == indices[:, None, :]
        first = (jnp.argmax(same, 2) == jnp.arange(indices.shape[1])) & inside
        # The sum of d over equal indices, at the first of them.
        summed = jnp.einsum("nts,nsw->ntw", same.astype(d.dtype), d, precision=EXACT)
        summed = _stored(jnp.where(first[:, :, None], summed, 0))
        at = jnp.where(inside, indices, 0).reshape(-1)

        def scattered(counts: Array, scale: Array) -> Array:
            scaled = jnp.where(counts[:, None, None], summed, 0) * scale[:, None, None]
            table = jnp.zeros((self.shape[0], d.shape[2])).at[at].add(scaled.reshape(len(at), -1))
            return self._moved_back(leaves, table.reshape(self.shape))

        return _Contribution({}, jnp.sum(jnp.square(summed), (1, 2)), self.leaf, scattered)


def _rule(meeting: _Meeting, uses: Sequence[int], leaves: Sequence[Array]) -> _Rule:
    """The rule for a meeting. `uses` counts the operands in which each leaf is."""
    avals: list[Any] = [each.aval for each in (*meeting.eqn.invars, *meeting.eqn.outvars)]
    for aval in avals:
        if _real(aval) and aval.dtype != jnp.float32:  # norms of shorter numbers err by more than proofs allow
            raise SpecError(
                f"your model computes with parameters and numbers of type {aval.dtype}; a record's gradient is "
                "clipped in float32 alone: leave out the other type, or use privacy.clip='batch'"
            )
    weights = [(at, each) for at, each in enumerate(meeting.operands) if each is not None]
    at, weight = weights[0]
    params, name = meeting.eqn.params, meeting.eqn.primitive.name
    if len(weights) > 1 or not weight.moved or any(uses[leaf] > 1 for leaf in weight.leaves):
        return _Generic(meeting, leaves)
    if name == "dot_general" and params["dimension_numbers"][1] == ((), ()):
        return _Product(meeting, leaves)
    if name == "conv_general_dilated" and at == 1 and _plain_convolution(meeting.eqn):
        return _Convolution(meeting, leaves)
    if name == "gather" and at == 0 and _takes_rows(meeting):
        return _Embedding(meeting, leaves)
    return _Generic(meeting, leaves)


def _takes_rows(meeting: _Meeting) -> bool:
    numbering, shape = meeting.eqn.params["dimension_numbers"], meeting.shape(0)
    return (
        tuple(numbering.collapsed_slice_dims) == tuple(numbering.start_index_map) == (0,)
        and not numbering.operand_batching_dims
        and tuple(meeting.eqn.params["slice_sizes"]) == (1, *shape[1:])
        and meeting.shape(1)[-1] == 1
    )
