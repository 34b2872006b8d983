"""Proven ε: recipes R1 to R6 of the errata, the table of views, and calibration.

gaussian      R1: exact Gaussian composition, conversions, the sum of discrete noise; R2, R3: fixed-size and
              Poisson batches, the Rényi fallback, truncated batches
pld           privacy loss distributions: curves, pessimistic grid, composition by FFT
mixtures      R4, R5: random numbers of uses; one release per round on random batches
composition   from releases to loss items and ε; R6: the other clients' noise under secure aggregation
views         the recipe of each adversary view, and `account`: one `ProvenRow` a view
accountant    a run's clients and rounds to the table of proven ε, and the noise for a target ε
ledger/       what was ever released of whose data, and budgets

Everything is NumPy in float64. dp-accounting is imported only where the Rényi fallback runs.
"""

from dither.accounting.accountant import calibrate
from dither.accounting.composition import (
    ADD_REMOVE,
    ADJACENCIES,
    REPLACE_ONE,
    ZERO_OUT,
    absorption_cost,
    aggregated_round_mu,
    end_of_round_mu,
    honest_others,
    shuffled_uses,
    smooth_round_mu,
    step_multiplier,
    surviving_variance,
)
from dither.accounting.gaussian import (
    amplified_epsilon,
    charge_truncation,
    classical_noise_multiplier,
    classical_valid_up_to,
    compose_gaussians,
    fixed_size_composition,
    fixed_size_epsilon,
    fixed_size_rdp,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
    gaussian_noise_multiplier,
    plain_epsilon,
    poisson_composition,
    poisson_epsilon,
    poisson_rdp,
    unamplified_epsilon,
    zcdp_epsilon,
    zcdp_epsilon_tight,
)
from dither.accounting.mixtures import (
    batch_structured_epsilon,
    binomial_pmf,
    convex_message_epsilon,
    inclusion_probability,
    message_epsilon,
    message_noise_multiplier,
    mixture_epsilon,
    random_uses_epsilon,
    shuffled_round_pattern,
)
from dither.accounting.views import (
    FLOAT_NOISE,
    REALISED,
    VIEWS,
    WORST,
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
