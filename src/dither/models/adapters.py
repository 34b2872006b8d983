"""Models of your own: an Equinox, Flax or PyTorch module, or a factory of one, as a Dither `Model`; and weights.

A factory is called with what its signature names: `input_shape` ((features,) for a table, (height, width,
channels) for images), `num_outputs`, `key` (a JAX key) or `rngs` (of Flax NNX), and the entries of model.options.
PyTorch and Equinox modules get images with the channels first, as their convolutions want them, Flax modules with
the channels last. A plain `Model` gets the records as rows. A framework is imported only when a module of it is
given.

Modules are put into evaluation mode: dropout is off, in training too. A layer that mixes the records of a batch,
such as batch normalisation, is refused: a record's gradient would depend on other records.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dither.errors import SpecError, did_you_mean, extra
from dither.models import Model, leaf_name
from dither.spec import code
from dither.types import Array, Key, Params

if TYPE_CHECKING:
    from dither.spec import ModelSpec

Make = Callable[[Key], Any]  # a module whose weights come from that key


class Shape(NamedTuple):
    """What a model has to fit: the shape of a record, and the number of scores."""

    record: tuple[int, ...]
    num_outputs: int

    def records(self, x: Array, *, channels_first: bool) -> Array:
        """Rows of features as records of that shape."""
        x = jnp.asarray(x).reshape(x.shape[0], *self.record)
        return jnp.moveaxis(x, -1, 1) if channels_first and len(self.record) == 3 else x


def adapted(source: Any, shape: Shape, options: Mapping[str, Any]) -> Model:
    """The model that an object describes: a `Model`, a module, or a factory of either."""
    kind = _framework(source)
    if kind or isinstance(source, Model):
        if options:
            raise SpecError(f"model.options are for a factory, not for a finished {type(source).__name__}")
        make = _constant(source)
    elif callable(source):
        make = _factory(source, shape, options)
    else:
        raise SpecError(
            f"model={source!r:.60} is not a model; give a dither.Model, an Equinox, Flax or PyTorch module, or a "
            "function that returns one"
        )
    first = make(jax.random.key(0))
    kind = _framework(first)
    if not kind and not isinstance(first, Model):
        raise SpecError(
            f"the model's factory returned {type(first).__name__}; return a dither.Model, or an Equinox, Flax or "
            "PyTorch module"
        )
    return _fitting(_ADAPTERS[kind](make, shape) if kind else first, shape)


def _framework(module: Any) -> str:
    """The framework a module belongs to; empty if it is not a module."""
    for base in type(module).__mro__:
        for kind in _ADAPTERS:
            if base.__name__ == "Module" and f"{base.__module__}.".startswith(f"{kind}."):
                return kind
    return ""


def _constant(module: Any) -> Make:
    return lambda key: module


def _factory(function: Callable[..., Any], shape: Shape, options: Mapping[str, Any]) -> Make:
    """Calls the factory with a key and whatever else its signature names."""
    made = isinstance(function, type)
    called: Any = getattr(function, "__init__") if made else function  # noqa: B009
    named = dict(list(inspect.signature(called).parameters.items())[made:])  # without the object itself
    given = {"input_shape": shape.record, "num_outputs": shape.num_outputs}
    any_keyword = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in named.values())
    offered = [name for name in named if name not in ("key", "rngs", *given)]
    unknown = [name for name in options if name not in offered and not any_keyword]
    if unknown:
        raise SpecError(f"unknown key 'model.options.{unknown[0]}'{did_you_mean(unknown[0], offered)}")
    missing = [
        name
        for name in offered
        if named[name].default is inspect.Parameter.empty
        and named[name].kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        and name not in options
    ]
    if missing:
        raise SpecError(f"the model's factory needs {missing[0]!r}; set model.options.{missing[0]}")
    arguments = {name: value for name, value in given.items() if name in named} | dict(options)

    def make(key: Key) -> Any:
        more: dict[str, Any] = {"key": key} if "key" in named else {}
        if "rngs" in named:
            from flax import nnx

            more["rngs"] = nnx.Rngs(key)
        return function(**arguments, **more)

    return make


# The frameworks


def _equinox(make: Make, shape: Shape) -> Model:
    import equinox as eqx

    first = make(jax.random.key(0))
    leaves = jax.tree.leaves(first, is_leaf=lambda node: "BatchNorm" in type(node).__name__)
    _refuse_mixing(type(leaf).__name__ for leaf in leaves)
    params, static = eqx.partition(eqx.nn.inference_mode(first), eqx.is_inexact_array)
    names = [
        jax.tree_util.keystr(where, simple=True, separator=".")
        for where, _ in jax.tree_util.tree_flatten_with_path(params)[0]
    ]
    structure = jax.tree.structure(params)

    def init(key: Key) -> Params:
        leaves = jax.tree.leaves(eqx.filter(make(key), eqx.is_inexact_array))
        return dict(zip(names, leaves, strict=True))

    def apply(params: Params, x: Array) -> Array:
        module = eqx.combine(jax.tree.unflatten(structure, [params[name] for name in names]), static)
        return jax.vmap(module)(shape.records(x, channels_first=True))

    return Model(init, apply, name=type(first).__name__)


def _nnx(make: Make, shape: Shape) -> Model:
    from flax import nnx

    first = make(jax.random.key(0))
    _refuse_mixing(type(layer).__name__ for _, layer in nnx.iter_modules(first))
    first.eval()
    split: Any = nnx.split
    definition, params, rest = split(first, nnx.Param, ...)
    paths = [path for path, _ in nnx.to_flat_state(params)]

    def init(key: Key) -> Params:
        state = dict(nnx.to_flat_state(split(make(key), nnx.Param, ...)[1]))
        return {".".join(map(str, path)): state[path].get_value() for path in paths}

    def apply(params: Params, x: Array) -> Array:
        state = nnx.from_flat_state([(path, nnx.Param(params[".".join(map(str, path))])) for path in paths])
        return nnx.merge(definition, state, rest)(shape.records(x, channels_first=False))

    return Model(init, apply, name=type(first).__name__)


def _linen(make: Make, shape: Shape) -> Model:
    from flax import errors
    from flax.traverse_util import flatten_dict, unflatten_dict

    module = make(jax.random.key(0))

    def variables(key: Key) -> Any:
        return module.init(key, jnp.zeros((1, *shape.record)))

    for collection in jax.eval_shape(variables, jax.random.key(0)):
        if collection != "params":
            _refuse_mixing(["BatchNorm"] if collection == "batch_stats" else [])
            raise SpecError(f"your model has variables of kind {collection!r}; only 'params' can be trained")

    def init(key: Key) -> Params:
        return flatten_dict(variables(key)["params"], sep=".")  # type: ignore[no-untyped-call]

    def apply(params: Params, x: Array) -> Array:
        tree = unflatten_dict(params, sep=".")  # type: ignore[no-untyped-call]
        try:
            return module.apply({"params": tree}, shape.records(x, channels_first=False))
        except errors.InvalidRngError:
            raise SpecError("your model draws random numbers (dropout?); set deterministic=True") from None

    return Model(init, apply, name=type(module).__name__)


def _torch(make: Make, shape: Shape) -> Model:
    """Through torchax. The weights are drawn once, by torch's generator with seed 0, whatever the run's seed."""
    import torch

    interop, environment = _torchax()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = make(jax.random.key(0)).eval()
    _refuse_mixing(type(layer).__name__ for layer in module.modules())
    fixed = [name for name, value in module.named_parameters() if not value.requires_grad]
    if fixed:
        raise SpecError(
            f"parameter {fixed[0]!r} has requires_grad=False; leave that out and name those that are trained: "
            "model.trainable=['head.*']"
        )
    start = {name: value.detach().numpy().copy() for name, value in module.named_parameters()}
    buffers = {name: value.numpy().copy() for name, value in module.named_buffers()}

    def init(key: Key) -> Params:
        return {name: jnp.asarray(value) for name, value in start.items()}

    def apply(params: Params, x: Array) -> Array:
        arrays = {name: jnp.asarray(value) for name, value in {**params, **buffers}.items()}
        records = interop.torch_view(shape.records(x, channels_first=True))
        with environment:
            scores = torch.func.functional_call(module, interop.torch_view(arrays), (records,))
        return interop.jax_view(scores)

    return Model(init, apply, name=type(module).__name__)


def _torchax() -> tuple[Any, Any]:
    """torchax's conversions and its environment. torch 2.12 dropped the operators for named tensors, which torchax
    0.0.13 still lists: they stand as names without an operator while torchax is imported."""
    from torch._ops import OpOverloadPacket

    plain = OpOverloadPacket.__getattr__

    def forgiving(self: Any, key: str) -> Any:
        try:
            return plain(self, key)
        except AttributeError:
            if "name" not in key.lower():
                raise
            return f"{self}.{key}"

    OpOverloadPacket.__getattr__ = forgiving
    try:
        import torchax
        from torchax import interop

        return interop, torchax.default_env()
    except ImportError:
        raise SpecError(f"a PyTorch model needs torchax: {extra('torch')}") from None
    finally:
        OpOverloadPacket.__getattr__ = plain


_ADAPTERS: dict[str, Callable[[Make, Shape], Model]] = {
    "equinox": _equinox,
    "flax.nnx": _nnx,
    "flax.linen": _linen,
    "torch.nn": _torch,
}


# What every model must satisfy


def _refuse_mixing(layers: Iterable[str]) -> None:
    for layer in layers:
        if "BatchNorm" in layer:
            raise SpecError(
                f"your model has a {layer}, which mixes the records of a batch: no record's gradient is its own. "
                "Use GroupNorm or LayerNorm instead"
            )


def _fitting(model: Model, shape: Shape) -> Model:
    """The model, with one score a record as `[n]`; `SpecError` if it does not give every record its own."""
    leaves = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    if not any(leaf.size for leaf in leaves):
        raise SpecError("your model has no parameters to train")
    for leaf in leaves:
        if leaf.dtype != jnp.float32:
            raise SpecError(f"your model has parameters of type {leaf.dtype}; Dither trains float32")
    x = np.random.default_rng(0).random((3, math.prod(shape.record)), np.float32)
    others = np.concatenate([x[:1], 1 - x[1:] / 2])
    scores_of = jax.jit(lambda x: model.apply(model.init(jax.random.key(0)), x))
    given = scores_of(x)
    if not isinstance(given, jax.Array):
        raise SpecError(f"your model gives a {type(given).__name__} for a batch; it must give one array of scores")
    scores, again = np.asarray(given), np.asarray(scores_of(others))
    wanted = [(3, shape.num_outputs)] + [(3,), (3, 1)] * (shape.num_outputs <= 2)
    if scores.shape not in wanted:
        raise SpecError(
            f"your model gives scores of shape {scores.shape} for 3 records; it must give "
            f"{' or '.join(map(str, wanted))}"
        )
    if not np.array_equal(scores[0], again[0]):
        raise SpecError(
            "your model's scores of a record depend on the other records of the batch; a layer mixes them. Use "
            "GroupNorm or LayerNorm instead of batch normalisation"
        )
    _refuse_callbacks(model, x)
    if scores.shape == (3, 1):
        return model._replace(apply=lambda params, x: model.apply(params, x)[:, 0])
    return model


def _refuse_callbacks(model: Model, x: np.ndarray) -> None:
    def loss(params: Params) -> Array:
        return jnp.sum(model.apply(params, x))

    def scores_and_gradient(params: Params) -> Any:  # a derivative of one's own is other code than the scores
        return loss(params), jax.grad(loss)(params)

    refuse_callbacks("your model", scores_and_gradient, jax.eval_shape(model.init, jax.random.key(0)))


def refuse_callbacks(whose: str, function: Callable[..., Any], *arguments: Any) -> None:
    """`SpecError` if a function calls Python while it computes: a check could stop a run at one record, and so
    tell of it."""
    for name in _operations(jax.make_jaxpr(function)(*arguments).jaxpr):
        if "callback" in name or name.startswith("debug_"):
            raise SpecError(
                f"{whose} calls Python while it computes ({name}: a check, as equinox.error_if, or a print), "
                "which could stop a run at one record; leave that out (EQX_ON_ERROR=nan makes NaN of checks)"
            )


def _operations(program: Any) -> Iterator[str]:
    """The names of all operations of a traced program."""
    for equation in program.eqns:
        yield equation.primitive.name
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda value: hasattr(value, "eqns")):
            if hasattr(inner, "eqns"):
                yield from _operations(getattr(inner, "jaxpr", inner))


# Weights that a model starts from, and parameters that stay as they are
#
# `model.weights` names a safetensors file of public weights, by the names of the parameters; those that it does
# not hold start as they would. `model.trainable` names the parameters that are trained, with * for any text. The
# others are public constants: they are not clipped, noised, sent or counted.


def started(model: Model, spec: ModelSpec) -> Model:
    """The model with the spec's initial weights, and only its trainable parameters."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    pairs, structure = jax.tree_util.tree_flatten_with_path(shapes)
    sizes = {leaf_name(where): leaf.shape for where, leaf in pairs}
    given = _safetensors(spec.weights, sizes) if spec.weights else {}

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


def _safetensors(file: str, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
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
