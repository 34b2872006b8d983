"""Weights that a model starts from, and parameters that stay as they are.

`model.weights` names a safetensors file of public weights, by the names of the parameters; those that it does not
hold start as they would. `model.trainable` names the parameters that are trained, with * for any text. The others
are public constants: they are not clipped, noised, sent or counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from dither.errors import SpecError
from dither.models import Model, leaf_name
from dither.spec import code
from dither.types import Array, Key, Params

if TYPE_CHECKING:
    from dither.spec import ModelSpec


def started(model: Model, spec: ModelSpec) -> Model:
    """The model with the spec's initial weights, and only its trainable parameters."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    pairs, structure = jax.tree_util.tree_flatten_with_path(shapes)
    sizes = {leaf_name(where): leaf.shape for where, leaf in pairs}
    given = _read(spec.weights, sizes) if spec.weights else {}

    def named(key: Key) -> dict[str, Array]:
        leaves = dict(zip(sizes, jax.tree.leaves(model.init(key)), strict=True))
        return leaves | {name: jnp.asarray(value) for name, value in given.items()}

    def tree(leaves: Mapping[str, Any]) -> Params:
        return jax.tree.unflatten(structure, [leaves[name] for name in sizes])

    if not spec.trainable:
        return model._replace(init=lambda key: tree(named(key)))
    for pattern in spec.trainable:
        if not any(fnmatchcase(name, pattern) for name in sizes):
            raise SpecError(f"model.trainable={pattern!r} fits no parameter; there are {', '.join(sizes)}")
    trained = [name for name in sizes if any(fnmatchcase(name, pattern) for pattern in spec.trainable)]
    start = named(jax.random.key(0))
    frozen = {name: np.asarray(start[name]) for name in sizes if name not in trained}

    def init(key: Key) -> Params:
        leaves = named(key)
        return {name: leaves[name] for name in trained}

    def apply(params: Params, x: Array) -> Array:
        return model.apply(tree({**frozen, **params}), x)

    # A part of the parameters: what is known of the whole is not claimed.
    return model._replace(init=init, apply=apply, layers=(), convex=False, curvature=None, frozen=frozen)


def _read(file: str, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file, which must fit the parameters."""
    from safetensors import SafetensorError, numpy

    try:
        arrays = numpy.load(code.file_content(file))
    except (SafetensorError, ValueError, KeyError) as error:
        raise SpecError(f"model.weights={file!r} is not a safetensors file: {error}") from None
    for name, value in arrays.items():
        if name not in sizes:
            raise SpecError(f"{file!r} holds {name!r}, which the model has not; it has {', '.join(sizes)}")
        if value.shape != sizes[name]:
            raise SpecError(f"{file!r} holds {name!r} of shape {value.shape}; the model's is {sizes[name]}")
    return {name: np.asarray(value, np.float32) for name, value in arrays.items()}
