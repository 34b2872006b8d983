"""The layer rules: each gives the record-by-record sum, and is chosen where it should be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dither.errors import SpecError
from dither.models import Model
from dither.privacy import clipping, layers
from tests.privacy.test_clipping import close, reference

NHWC = ("NHWC", "HWIO", "NHWC")


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.5, jnp.float32)


def strided_convolution(params, x):
    x = x.reshape(-1, 6, 4, 1)
    options = {"padding": [(1, 2), (0, 1)], "rhs_dilation": (1, 2), "dimension_numbers": NHWC}
    x = jax.lax.conv_general_dilated(x, params["w"], (2, 1), **options) + params["b"]
    return jnp.tanh(x).reshape(x.shape[0], -1) @ params["out"]


def channels_first(params, x):
    x = jax.lax.conv_general_dilated(x.reshape(-1, 1, 6, 4), params["w"], (1, 1), "SAME")
    return jnp.einsum("nchw,ck->nk", jnp.tanh(x + params["b"][:, None, None]), params["out"])


def grouped_convolution(params, x):
    x = x.reshape(-1, 3, 4, 2)
    options = {"padding": "SAME", "dimension_numbers": NHWC, "feature_group_count": 2}
    return jax.lax.conv_general_dilated(x, params["w"], (1, 1), **options).reshape(len(x), -1) @ params["out"]


def rows(params, x):
    """Six rows a record through a dense layer, a layer norm with scale and shift, then a weight from the left."""
    x = x.reshape(-1, 6, 4) @ params["w"]
    x = (x - x.mean(-1, keepdims=True)) / (1 + x.std(-1, keepdims=True)) * params["scale"] + params["shift"]
    return (params["out"].T @ jnp.tanh(x).mean(1).T).T


def embedding(params, x):
    tokens = jnp.clip(jnp.abs(x[:, :8]) * 4, 0, 9).astype(jnp.int32)
    return jnp.tanh(params["table"][tokens]).sum(1) @ params["out"]


def shared(params, x):
    """One weight in two places: its gradient is a sum."""
    x = jnp.tanh(x.reshape(-1, 6, 4).mean(1) @ params["w"])
    return jnp.tanh(x @ params["w"] + params["w"][0]) @ params["out"]


def looped(params, x):
    def step(state, row):
        return jnp.tanh(state @ params["w"] + row), None

    state, _ = jax.lax.scan(step, jnp.zeros((len(x), 4)), x.reshape(-1, 6, 4).swapaxes(0, 1))
    return jax.jit(lambda s, w: s @ w)(state, params["out"])


def standardised(params, x):
    """A weight that is changed before it is used, and one without a bias after it."""
    weight = params["w"] / (1 + jnp.sqrt(jnp.sum(params["w"] ** 2)))
    return jnp.tanh(x[:, :4] @ weight) @ params["out"]


CASES = {
    "strided convolution": (strided_convolution, {"w": (3, 2, 1, 5), "b": (5,), "out": (60, 3)}, "_Convolution"),
    "channels first": (channels_first, {"w": (5, 1, 3, 3), "b": (5,), "out": (5, 3)}, "_Convolution"),
    "grouped convolution": (grouped_convolution, {"w": (2, 2, 1, 4), "out": (48, 3)}, "_Generic"),
    "rows": (rows, {"w": (4, 5), "scale": (5,), "shift": (5,), "out": (5, 3)}, "_Product"),
    "embedding": (embedding, {"table": (10, 4), "out": (4, 3)}, "_Embedding"),
    "shared": (shared, {"w": (4, 4), "out": (4, 3)}, "_Generic"),
    "looped": (looped, {"w": (4, 4), "out": (4, 3)}, "_Generic"),
    "standardised": (standardised, {"w": (4, 4), "out": (4, 3)}, "_Generic"),
}


def made(name):
    apply, shapes, _ = CASES[name]
    params = {leaf: normal(*shape, seed=number) for number, (leaf, shape) in enumerate(shapes.items())}
    return Model(lambda key: params, apply), params


QUICK = ("strided convolution", "rows", "embedding", "shared")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES]
)
def test_a_rule_gives_the_record_by_record_sum(name, monkeypatch):
    model, params = made(name)
    used = []
    choose = layers._rule
    monkeypatch.setattr(layers, "_rule", lambda *given: used.append(choose(*given)) or used[-1])
    monkeypatch.setattr(layers, "BLOCK", 4)  # so that there are several blocks, and padding
    x, y = normal(11, 24, seed=9) * 2, jnp.arange(11) % 3
    weights = jnp.ones(11).at[5].set(0)
    total, fraction = jax.jit(
        lambda x, y: clipping.example_clipped_sum(model, params, x, y, weights, clip_norm=0.7)
    )(x, y)
    close(total, reference(model, params, x, y, weights, 0.7))
    assert 0 < float(fraction) <= 1
    assert CASES[name][2] in {type(rule).__name__ for rule in used}


def test_a_product_of_one_row_forms_no_gradient_of_a_record():
    model, params = made("strided convolution")
    text = str(
        jax.make_jaxpr(lambda x, y: layers.clipped_sum(model, params, x, y, jnp.ones(11), clip_norm=0.7))(
            normal(11, 24), jnp.zeros(11, jnp.int32)
        )
    )
    assert "f32[11,6,5]" in text  # the convolution's, formed
    assert "f32[11,60,3]" not in text
    assert "f32[11,180]" not in text


def test_large_gradients_pass_in_small_blocks(monkeypatch):
    model, params = made("shared")
    monkeypatch.setattr(layers, "_BLOCK_NUMBERS", 100)
    text = str(
        jax.make_jaxpr(lambda x, y: layers.clipped_sum(model, params, x, y, jnp.ones(11), clip_norm=0.7))(
            normal(11, 24), jnp.zeros(11, jnp.int32)
        )
    )
    assert "scan" in text
    assert "f32[11,4,4]" not in text


@pytest.mark.parametrize("kind", [jnp.float16, jnp.bfloat16])
def test_products_with_shorter_numbers_are_refused(kind):
    """Squares of float16 vanish below 2^-25: such a record counted for a thousand clips."""

    def apply(params, x):
        contracted = (((1,), (0,)), ((), ()))
        return jax.lax.dot_general(x.astype(kind), params["w"], contracted, preferred_element_type=jnp.float32)[
            :, 0
        ]

    model = Model(lambda key: {"w": jnp.zeros((100, 1))}, apply, loss=lambda scores, y: 1e6 * scores)
    x = jnp.full((8, 100), 1e-4)
    with pytest.raises(SpecError, match=f"numbers of type {kind.__name__}"):
        clipping.example_clipped_sum(model, model.init(None), x, jnp.zeros(8), jnp.eye(8)[0], clip_norm=1.0)
