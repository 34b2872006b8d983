"""Models as (init, apply) pairs: logistic, softmax and linear regression, MLP, a small CNN; and their losses.

`init(key)` makes the parameters, `apply(params, x)` maps a batch `[n, ...]` to scores: `[n]` for a binary
model (the log-odds of class 1) and for regression (the label, scaled by its bounds to [0, 1]), `[n, classes]`
otherwise. Any such pair of yours fits: `Model(init, apply)`.

A model made only of dense layers also gives `layers`, from which `privacy.clipping` gets the norms of the
per-example gradients without forming those gradients.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from dither.errors import DitherError, SpecError, did_you_mean
from dither.models.windows import max_pool
from dither.spec import MODELS, code, model_file
from dither.types import Array, Key, Params

if TYPE_CHECKING:
    from dither.spec import ModelSpec


class Dense(NamedTuple):
    """A dense layer inside `Model.layers`: which entry of the parameters, and what follows it."""

    name: str
    activation: Callable[[Array], Array]


# Losses of each record, `[n]`, from its scores and its label

Loss = Callable[[Array, Array], Array]
_LARGEST_RESIDUAL = 2.0**30


def cross_entropy(scores: Array, y: Array) -> Array:
    """Sigmoid cross-entropy for scores `[n]`, softmax cross-entropy for `[n, classes]`."""
    if scores.ndim == 1:
        y = y.astype(scores.dtype)
        return -y * jax.nn.log_sigmoid(scores) - (1 - y) * jax.nn.log_sigmoid(-scores)
    of_label = jnp.take_along_axis(scores, y[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(scores, axis=-1) - of_label


def weighted_cross_entropy(weights: Sequence[float]) -> Loss:
    """Cross-entropy times the weight of the record's class."""
    table = tuple(weights)
    return lambda scores, y: jnp.asarray(table, scores.dtype)[y] * cross_entropy(scores, y)


def huber(scores: Array, y: Array, *, delta: float) -> Array:
    """½r² of the residual r = score - label, continued linearly beyond ±delta."""
    residual = scores.reshape(y.shape) - y
    inside = jnp.clip(residual, -delta, delta)
    # Not Optax's form, whose derivative is (|r| - delta) + delta: for a large delta float32 makes 0 of it.
    return inside * (residual - inside / 2)


def squared(scores: Array, y: Array) -> Array:
    """½r². Linear beyond 2^30: no record's gradient overflows, so that clipping it stays monotone in the score."""
    return huber(scores, y, delta=_LARGEST_RESIDUAL)


class Model(NamedTuple):
    """A model: two functions, its loss, and what is known about them."""

    init: Callable[[Key], Params]
    apply: Callable[[Params, Array], Array]
    layers: tuple[Dense, ...] = ()  # not empty: x -> dense -> activation -> ... is the whole of `apply`
    convex: bool = False  # the loss is convex in the parameters: needed by some privacy proofs
    name: str = "custom"
    loss: Loss = cross_entropy
    task: str = "classification"  # or "regression"
    # Where every record's gradient has one direction, whatever the parameters (one linear score): a bound on the
    # loss's second derivative along (record, 1). Only then is a clipped gradient that of a convex loss.
    curvature: float | None = None
    frozen: Mapping[str, Any] = MappingProxyType({})  # parameters that stay as they are, by name


def losses(model: Model, params: Params, x: Array, y: Array) -> Array:
    """The loss of each record, `[n]`."""
    return model.loss(model.apply(params, x), y)


def scores_of_each(model: Model, params: Params, x: Array) -> Array:
    """The scores of each record from that record alone, whatever a model of your own does with a batch: private
    evaluations count on it. (Dense layers keep records apart by themselves.)"""
    if model.layers:
        return model.apply(params, x)
    x = jnp.asarray(x)
    shape = jax.eval_shape(model.apply, params, x).shape[1:]
    return jax.vmap(lambda one: model.apply(params, one[None]).reshape(shape))(x)


def predict(scores: Array, task: str = "classification") -> Array:
    """The class of each record from its scores; for regression the scaled label, within its bounds."""
    if task == "regression":
        return jnp.clip(scores.reshape(scores.shape[0]), 0.0, 1.0)
    return (scores > 0).astype(jnp.int32) if scores.ndim == 1 else jnp.argmax(scores, axis=-1)


def probabilities(scores: Array) -> Array:
    """Class probabilities `[n, classes]` from scores."""
    if scores.ndim == 1:
        one = jax.nn.sigmoid(scores)
        return jnp.stack([1 - one, one], axis=-1)
    return jax.nn.softmax(scores, axis=-1)


def count_params(params: Params) -> int:
    """Number of scalars in a parameter tree (or in the shapes of one)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


# Models


def _one_layer(num_features: int, num_outputs: int, last: Callable[[Array], Array], **known: Any) -> Model:
    """One dense layer that starts at 0: convex in its parameters."""

    def init(key: Key) -> Params:
        return {"out": {"w": jnp.zeros((num_features, num_outputs)), "b": jnp.zeros((num_outputs,))}}

    def apply(params: Params, x: Array) -> Array:
        return last(_dense(params["out"], x))

    return Model(init, apply, layers=(Dense("out", last),), convex=True, **known)


def logistic(num_features: int) -> Model:
    """Binary logistic regression with a bias, started at 0 as in Secure FedAvg."""
    return _one_layer(num_features, 1, _squeeze, name="logistic", curvature=0.25)


def linear(num_features: int) -> Model:
    """Linear regression with a bias; parameters of 0 predict the middle of the label's bounds."""
    known = {"name": "linear", "loss": squared, "task": "regression", "curvature": 1.0}
    return _one_layer(num_features, 1, _from_middle, **known)


def softmax(num_features: int, num_classes: int) -> Model:
    """Multinomial logistic regression with a bias, started at 0."""
    curvature = 0.5 if num_classes == 2 else None
    return _one_layer(num_features, num_classes, _identity, name="softmax", curvature=curvature)


def mlp(num_features: int, num_classes: int, hidden: Sequence[int], start: str = "uniform") -> Model:
    """ReLU network with dense layers of the given widths; weights and biases uniform in ±1/√fan_in, or weights as
    "glorot" or "he" have them and zero biases. With 0 classes it has one output, for regression."""
    widths = [num_features, *hidden, num_classes or 1]
    last = _identity if num_classes else _from_middle
    layers = tuple(Dense(f"dense{i}", jax.nn.relu if i < len(hidden) else last) for i in range(len(widths) - 1))

    def init(key: Key) -> Params:
        keys = jax.random.split(key, 2 * len(layers))

        def uniform(which: Key, fan_in: int, shape: tuple[int, ...]) -> Array:
            reach = 1 / math.sqrt(fan_in)
            return jax.random.uniform(which, shape, minval=-reach, maxval=reach)

        def dense(i: int) -> Params:
            shape = (widths[i], widths[i + 1])
            if start == "uniform":
                return {
                    "w": uniform(keys[2 * i], widths[i], shape),
                    "b": uniform(keys[2 * i + 1], widths[i], shape[1:]),
                }
            weights = {"glorot": jax.nn.initializers.glorot_uniform, "he": jax.nn.initializers.he_normal}[start]()
            return {"w": weights(keys[2 * i], shape), "b": jnp.zeros(shape[1:])}

        return {layer.name: dense(i) for i, layer in enumerate(layers)}

    def apply(params: Params, x: Array) -> Array:
        for layer in layers:
            x = layer.activation(_dense(params[layer.name], x))
        return x

    return Model(init, apply, layers=layers, name="mlp")


def cnn(
    image_shape: Sequence[int], num_classes: int, channels: Sequence[int] = (16, 32), width: int = 32
) -> Model:
    """Small CNN: per entry of `channels` a 3x3 convolution, tanh and 2x2 max-pool; then one dense layer of
    `width` and the output (one, for regression, where there are 0 classes). tanh, because bounded activations
    suit clipped gradients (Papernot et al. 2021)."""
    height, width_px, depth = image_shape
    for _ in channels:
        height, width_px = height // 2, width_px // 2
    if height < 1 or width_px < 1:
        raise SpecError(
            f"model.hidden={list(channels)}: {len(channels)} poolings shrink an image of "
            f"{image_shape[0]}x{image_shape[1]} to nothing; give fewer convolution layers"
        )
    flat = height * width_px * channels[-1]

    def init(key: Key) -> Params:
        keys = jax.random.split(key, len(channels) + 2)

        def layer(at: int, *shape: int) -> Params:
            scale = math.sqrt(1 / math.prod(shape[:-1]))
            return {"w": jax.random.normal(keys[at], shape) * scale, "b": jnp.zeros(shape[-1:])}

        depths = enumerate(pairwise([depth, *channels]))
        params = {f"conv{at}": layer(at, 3, 3, *depth) for at, depth in depths}
        return {**params, "dense": layer(-2, flat, width), "out": layer(-1, width, num_classes or 1)}

    def apply(params: Params, x: Array) -> Array:
        x = x.reshape(x.shape[0], *image_shape)
        for i in range(len(channels)):
            layer = params[f"conv{i}"]
            x = jax.lax.conv_general_dilated(
                x, layer["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jnp.tanh(x + layer["b"])
            x = max_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), ((0, 0),) * 4)
        x = x.reshape(x.shape[0], -1)
        scores = _dense(params["out"], jnp.tanh(_dense(params["dense"], x)))
        return scores if num_classes else _from_middle(scores)

    return Model(init, apply, name="cnn")


def make(
    name: str,
    *,
    num_features: int,
    num_classes: int,
    hidden: Sequence[int] = (),
    image_shape: Sequence[int] = (),
    start: str = "uniform",
) -> Model:
    """The model of that name for data of that shape; 0 classes: regression."""
    if num_classes == 0 and name in ("logistic", "softmax"):
        raise SpecError(
            f"model.name={name!r} is for classes, but the label is a number; use 'linear', 'mlp' or 'cnn'"
        )
    if num_classes and name == "linear":
        raise SpecError(
            f"model.name='linear' is for regression, but the label has {num_classes} classes; use "
            f"{'logistic' if num_classes == 2 else 'softmax'!r}"
        )
    if num_classes != 2 and name == "logistic":
        raise SpecError(f"model.name='logistic' is binary but the data has {num_classes} classes; use 'softmax'")
    if len(image_shape) != 3 and name == "cnn":
        raise SpecError("model.name='cnn' needs images; this data set is a table, use 'mlp'")
    makers: dict[str, Callable[[], Model]] = {
        "logistic": lambda: logistic(num_features),
        "linear": lambda: linear(num_features),
        "softmax": lambda: softmax(num_features, num_classes),
        "mlp": lambda: mlp(num_features, num_classes, hidden or (64,), start),
        "cnn": lambda: cnn(image_shape, num_classes, hidden or (16, 32)),
    }
    if name not in makers:
        raise SpecError(f"unknown model.name={name!r}{did_you_mean(name, MODELS)}")
    return makers[name]()


def from_spec(spec: ModelSpec, num_features: int, num_classes: int, image_shape: Sequence[int]) -> Model:
    """The model of a spec for data of that shape, with the spec's loss; 0 classes: regression."""
    if spec.name in MODELS:
        shape = {"num_features": num_features, "num_classes": num_classes}
        model = make(spec.name, **shape, hidden=spec.hidden, image_shape=image_shape, start=spec.init)
    else:
        model = _own_model(spec, num_features, num_classes, image_shape)
    model = with_loss(model, spec, num_classes)
    if not spec.weights and not spec.trainable:
        return model
    from dither.models import adapters

    return adapters.started(model, spec)


def with_loss(model: Model, spec: ModelSpec, num_classes: int) -> Model:
    """The model with the spec's loss and class weights; 0 classes: regression."""
    regression = num_classes == 0
    name = spec.loss if spec.loss != "auto" else "squared" if regression else "cross-entropy"
    if regression == (name == "cross-entropy"):
        label, fitting = ("a number", "'squared' or 'huber'") if regression else ("a class", "'cross-entropy'")
        raise SpecError(f"model.loss={name!r} does not fit a label that is {label}; use {fitting}")
    weights = class_weights(spec, num_classes)
    if regression:
        loss = squared if name == "squared" else partial(huber, delta=spec.huber_delta)
        return model._replace(loss=loss, task="regression")
    if not weights:
        return model
    curvature = None if model.curvature is None else model.curvature * max(weights)
    return model._replace(loss=weighted_cross_entropy(weights), curvature=curvature)


def class_weights(spec: ModelSpec, num_classes: int) -> tuple[float, ...]:
    """The weight of each class in the loss: given, or n/(classes · count) by public counts; (): all are 1."""
    for key, values in (("class_weight", spec.class_weight), ("class_counts", spec.class_counts)):
        if values and len(values) != num_classes:
            needed = (
                f"give one for each of the {num_classes} classes" if num_classes else "regression has no classes"
            )
            raise SpecError(f"model.{key} has {len(values)} entries; {needed}")
    counts = spec.class_counts
    return tuple(sum(counts) / (num_classes * count) for count in counts) if counts else spec.class_weight


def _own_model(spec: ModelSpec, num_features: int, num_classes: int, image_shape: Sequence[int]) -> Model:
    """A user's model, from its file or from a registered object. Nothing that proofs or clipping rest on is taken
    from it: neither convexity nor that its layers and its loss keep records apart."""
    from dither.models import adapters

    named = model_file(spec.name)
    if named is None:
        source = code.registered_model(spec.name)
    else:
        file, factory = named
        module = code.module_of_content(file, code.file_content(file), (factory,), "model file")
        source = getattr(module, factory)
        # An agreement names the factory and its arguments: what an approved file imports was not approved.
        imported = inspect.isroutine(source) or isinstance(source, type)
        if imported and getattr(source, "__module__", "") != module.__name__ and code.is_approved(file):
            raise SpecError(f"{factory!r} is not defined in {file!r}, which was approved: define the model there")
    shape = adapters.Shape(tuple(image_shape) or (num_features,), num_classes or 1)
    try:
        model = adapters.adapted(source, shape, spec.options)
    except Exception as error:
        if named is None or isinstance(error, DitherError):
            raise
        needs = f"it gets records of shape {shape.record} and must give {shape.num_outputs} scores each"
        raise SpecError(f"{code.failed(named[0], error)} ({needs})") from error
    return Model(model.init, model.apply, name=spec.name)


def program_digest(model: Model, num_features: int) -> str:
    """SHA-256 of what a model computes: initial parameters, scores and gradients, as the compiler reads them."""

    def program(key: Key, x: Array) -> tuple[Params, Array, Params]:
        params = model.init(key)
        scores, gradient = jax.vjp(lambda p: model.apply(p, x), params)
        return params, scores, gradient(scores)

    records = jax.ShapeDtypeStruct((2, num_features), jnp.float32)
    text = jax.jit(program).lower(jax.random.key(0), records).as_text()
    return hashlib.sha256(text.encode()).hexdigest()


def leaf_name(where: tuple[Any, ...]) -> str:
    """The name of a leaf of the parameters in a file of weights: 'dense0/w'."""
    return "/".join(str(getattr(entry, "key", getattr(entry, "idx", entry))) for entry in where)


def _dense(layer: Params, x: Array) -> Array:
    return x @ layer["w"] + layer["b"]


def _identity(x: Array) -> Array:
    return x


def _squeeze(x: Array) -> Array:
    return x[..., 0]


def _from_middle(x: Array) -> Array:
    """One score for each record, counted from the middle of the label's bounds."""
    return x[..., 0] + 0.5
