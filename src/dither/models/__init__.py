"""Models as (init, apply) pairs: logistic and softmax regression, MLP, a small CNN.

`init(key)` makes the parameters, `apply(params, x)` maps a batch `[n, ...]` to scores: `[n]` for a binary
model (the log-odds of class 1), `[n, classes]` otherwise. Any such pair of yours fits: `Model(init, apply)`.

A model made only of dense layers also gives `layers`, from which `privacy.clipping` gets the norms of the
per-example gradients without forming those gradients.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from dither.errors import SpecError, did_you_mean
from dither.spec import MODELS, options
from dither.types import Array, Key, Params

if TYPE_CHECKING:
    from dither.spec import ModelSpec


class Dense(NamedTuple):
    """A dense layer inside `Model.layers`: which entry of the parameters, and what follows it."""

    name: str
    activation: Callable[[Array], Array]


class Model(NamedTuple):
    """A model: two functions, and what is known about them."""

    init: Callable[[Key], Params]
    apply: Callable[[Params, Array], Array]
    layers: tuple[Dense, ...] = ()  # not empty: x -> dense -> activation -> ... is the whole of `apply`
    convex: bool = False  # the loss is convex in the parameters: needed by some privacy proofs
    name: str = "custom"


def losses(model: Model, params: Params, x: Array, y: Array) -> Array:
    """Cross-entropy of each record, `[n]`."""
    return score_losses(model.apply(params, x), y)


def score_losses(scores: Array, y: Array) -> Array:
    """Cross-entropy of each record from its scores: sigmoid for `[n]`, softmax for `[n, classes]`."""
    import optax  # not at the top: a proof needs no loss and should not wait for it

    if scores.ndim == 1:
        return optax.sigmoid_binary_cross_entropy(scores, y.astype(scores.dtype))
    return optax.softmax_cross_entropy_with_integer_labels(scores, y)


def predict(scores: Array) -> Array:
    """The class of each record from its scores."""
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


def logistic(num_features: int) -> Model:
    """Binary logistic regression with a bias, started at 0 as in Secure FedAvg."""

    def init(key: Key) -> Params:
        del key
        return {"out": {"w": jnp.zeros((num_features, 1)), "b": jnp.zeros((1,))}}

    def apply(params: Params, x: Array) -> Array:
        return _dense(params["out"], x)[..., 0]

    return Model(init, apply, layers=(Dense("out", _squeeze),), convex=True, name="logistic")


def softmax(num_features: int, num_classes: int) -> Model:
    """Multinomial logistic regression with a bias, started at 0."""

    def init(key: Key) -> Params:
        del key
        return {"out": {"w": jnp.zeros((num_features, num_classes)), "b": jnp.zeros((num_classes,))}}

    def apply(params: Params, x: Array) -> Array:
        return _dense(params["out"], x)

    return Model(init, apply, layers=(Dense("out", _identity),), convex=True, name="softmax")


def mlp(num_features: int, num_classes: int, hidden: Sequence[int]) -> Model:
    """ReLU network with dense layers of the given widths; weights and biases uniform in ±1/√fan_in."""
    widths = [num_features, *hidden, num_classes]
    layers = tuple(
        Dense(f"dense{i}", jax.nn.relu if i < len(hidden) else _identity) for i in range(len(widths) - 1)
    )

    def init(key: Key) -> Params:
        keys = jax.random.split(key, 2 * len(layers))

        def uniform(which: Key, fan_in: int, shape: tuple[int, ...]) -> Array:
            reach = 1 / math.sqrt(fan_in)
            return jax.random.uniform(which, shape, minval=-reach, maxval=reach)

        return {
            layer.name: {
                "w": uniform(keys[2 * i], widths[i], (widths[i], widths[i + 1])),
                "b": uniform(keys[2 * i + 1], widths[i], (widths[i + 1],)),
            }
            for i, layer in enumerate(layers)
        }

    def apply(params: Params, x: Array) -> Array:
        for layer in layers:
            x = layer.activation(_dense(params[layer.name], x))
        return x

    return Model(init, apply, layers=layers, name="mlp")


def cnn(
    image_shape: Sequence[int], num_classes: int, channels: Sequence[int] = (16, 32), width: int = 32
) -> Model:
    """Small CNN: per entry of `channels` a 3x3 convolution, tanh and 2x2 max-pool; then one dense layer of
    `width` and the output. tanh, as bounded activations suit clipped gradients (Papernot et al. 2021)."""
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
        params = {}
        fan = depth
        for i, out in enumerate(channels):
            scale = math.sqrt(1 / (9 * fan))
            params[f"conv{i}"] = {
                "w": jax.random.normal(keys[i], (3, 3, fan, out)) * scale,
                "b": jnp.zeros((out,)),
            }
            fan = out
        params["dense"] = {
            "w": jax.random.normal(keys[-2], (flat, width)) * math.sqrt(1 / flat),
            "b": jnp.zeros((width,)),
        }
        params["out"] = {
            "w": jax.random.normal(keys[-1], (width, num_classes)) * math.sqrt(1 / width),
            "b": jnp.zeros((num_classes,)),
        }
        return params

    def apply(params: Params, x: Array) -> Array:
        x = x.reshape(x.shape[0], *image_shape)
        for i in range(len(channels)):
            layer = params[f"conv{i}"]
            x = jax.lax.conv_general_dilated(
                x, layer["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jnp.tanh(x + layer["b"])
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = x.reshape(x.shape[0], -1)
        return _dense(params["out"], jnp.tanh(_dense(params["dense"], x)))

    return Model(init, apply, name="cnn")


def make(
    name: str,
    *,
    num_features: int,
    num_classes: int,
    hidden: Sequence[int] = (),
    image_shape: Sequence[int] = (),
) -> Model:
    """The model of that name for data of that shape."""
    if name == "logistic":
        if num_classes != 2:
            raise SpecError(
                f"model.name='logistic' is binary but the data has {num_classes} classes; use 'softmax'"
            )
        return logistic(num_features)
    if name == "softmax":
        return softmax(num_features, num_classes)
    if name == "mlp":
        return mlp(num_features, num_classes, hidden or (64,))
    if name == "cnn":
        if len(image_shape) != 3:
            raise SpecError("model.name='cnn' needs images; this data set is a table, use 'mlp'")
        return cnn(image_shape, num_classes, hidden or (16, 32))
    raise SpecError(f"unknown model.name={name!r}{did_you_mean(name, MODELS)}")


def from_spec(spec: ModelSpec, num_features: int, num_classes: int, image_shape: Sequence[int]) -> Model:
    """The model of a spec for data of that shape."""
    if spec.name not in MODELS:
        from dither.models import adapters

        shape = adapters.Shape(tuple(image_shape) or (num_features,), num_classes)
        return adapters.adapted(_source(spec.name), shape, spec.options)
    return make(
        spec.name,
        num_features=num_features,
        num_classes=num_classes,
        hidden=spec.hidden,
        image_shape=image_shape,
    )


def _source(name: str) -> Any:
    """The object that a program registered, or the factory in a file."""
    found = options.model_file(name)
    if found is None:
        return options.registered_model(name)
    file, factory = found
    module = options.module_of_content(file, options.file_content(file), (factory,), "model file")
    return getattr(module, factory)


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
