"""Proven ε: recipes R1 to R6 of the errata, the table of views, and calibration.

gaussian      R1: exact Gaussian composition, conversions, the sum of discrete noise; R4: random numbers of uses;
              R5: one release a round on random batches; truncated batches
pld           privacy loss distributions: curves, pessimistic grid, composition by FFT
composition   from releases to loss items and ε; R2, R3: fixed-size and Poisson batches; R6: the other clients'
              noise under secure aggregation
exact         R7: what float32 and the sampler of integer noise cost
views         the recipe of each adversary view, and `account`: one `ProvenRow` a view
accountant    a run's clients and rounds to the table of proven ε, and the noise for a target ε
ledger/       everything that was ever released about each data set, and budgets

Everything is NumPy in float64.
"""

from dither.accounting.accountant import calibrate
from dither.accounting.composition import (
    ADD_REMOVE,
    ADJACENCIES,
    REPLACE_ONE,
    ZERO_OUT,
    absorption_cost,
    aggregated_round_mu,
    fixed_size_composition,
    fixed_size_epsilon,
    honest_others,
    poisson_epsilon,
    shuffled_uses,
    smooth_round_mu,
    step_multiplier,
    surviving_variance,
)
from dither.accounting.gaussian import (
    amplified_epsilon,
    binomial_pmf,
    charge_truncation,
    classical_valid_up_to,
    compose_gaussians,
    convex_message_epsilon,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
    gaussian_noise_multiplier,
    inclusion_probability,
    message_epsilon,
    message_noise_multiplier,
    mixture_epsilon,
    random_uses_epsilon,
    shuffled_round_pattern,
    unamplified_epsilon,
    zcdp_epsilon_tight,
)
from dither.accounting.views import (
    FLOAT_NOISE,
    REALISED,
    VIEWS,
    ClientEpsilon,
    ClientRange,
    Participations,
    ProvenRow,
    account,
    binomial,
    compress,
    proven,
)
from dither.types import Conditions, Lattice, Participation
