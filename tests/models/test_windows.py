"""Max pooling and convolution: the values and the derivatives of JAX's, ties and padding included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dither.models.windows import convolve, max_pool

CASES = {
    "side by side": ((1, 2, 2, 1), (1, 2, 2, 1), ((0, 0),) * 4),
    "a rest is left out": ((1, 3, 2, 1), (1, 3, 2, 1), ((0, 0),) * 4),
    "overlapping": ((1, 3, 2, 1), (1, 1, 2, 1), ((0, 0),) * 4),
    "padded": ((1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 0), (1, 2), (0, 0))),
}


@pytest.mark.parametrize("name", CASES)
def test_the_derivative_of_max_pooling_is_that_of_jax(name):
    window, strides, padding = CASES[name]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-2, 3, (3, 7, 9, 2)), jnp.float32)  # full of ties

    def plain(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, padding)

    expected, back = jax.vjp(plain, x)
    values, our_back = jax.vjp(lambda x: max_pool(x, window, strides, padding), x)
    np.testing.assert_array_equal(values, expected)
    d = jnp.asarray(rng.integers(-9, 10, expected.shape), jnp.float32)  # sums of them are exact
    np.testing.assert_array_equal(our_back(d)[0], back(d)[0])
    np.testing.assert_array_equal(jax.vmap(lambda x: max_pool(x[None], window, strides, padding)[0])(x), expected)


CONVOLUTIONS = {
    "plain": ((1, 1), ((1, 1), (1, 1)), (1, 1)),
    "uneven": ((1, 1), ((0, 2), (3, 0)), (1, 2)),
    "strided": ((2, 3), ((0, 1), (2, 0)), (2, 1)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_derivatives_of_a_convolution_are_those_of_jax(name):
    strides, padding, dilation = CONVOLUTIONS[name]
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.integers(-3, 4, shape), jnp.float32) for shape in ((2, 7, 9, 2), (3, 2, 2, 4)))

    def plain(x, kernel):
        options = {"rhs_dilation": dilation, "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        return jax.lax.conv_general_dilated(x, kernel, strides, padding, **options)

    expected, back = jax.vjp(plain, x, kernel)
    values, our_back = jax.vjp(lambda x, kernel: convolve(x, kernel, strides, padding, dilation), x, kernel)
    np.testing.assert_array_equal(values, expected)
    d = jnp.asarray(rng.integers(-9, 10, expected.shape), jnp.float32)  # whole numbers: every sum is exact
    for ours, theirs in zip(our_back(d), back(d), strict=True):
        np.testing.assert_array_equal(ours, theirs)
