"""At a tiny δ the rounding of the FFT is not small: composed losses must stay above the exact ε.

At a rate of 1 every sampled release is a plain Gaussian, whose ε is known. For 30 releases of μ = 5 at δ = 1e-14
the composed loss gave 583.56, which has a true δ of 1.023e-14; exact is 583.64.
"""

import math

import pytest

from dither.accounting import pld
from dither.accounting.gaussian import gaussian_epsilon


@pytest.mark.parametrize(("mu", "steps"), [(0.3, 100), (1.0, 30), (5.0, 1), (5.0, 10), (5.0, 30), (8.0, 30)])
@pytest.mark.parametrize("delta", [1e-10, 1e-13, 1e-14, 1e-15])
def test_composed_losses_stay_above_the_exact_epsilon(mu, steps, delta):
    exact = gaussian_epsilon(mu * math.sqrt(steps), delta)
    curves = (
        pld.removal(1.0, mu),
        pld.addition(1.0, mu),
        pld.fixed_size(1.0, mu),
        pld.poisson_replacement(1.0, mu / 2),
    )
    for curve in curves:
        assert pld.compose([pld.Events([(curve, steps)])], delta).epsilon(delta) >= exact * (1 - 1e-12)
