"""What the papers' bounds say about their knobs, and what is left of it when the formulas are corrected."""

import numpy as np
import pytest

from dither.methods import cpfed, dp_scaffold, nbafl, secure_fedavg
from tests.vectors.published import SECURE_FEDAVG

LOSS = nbafl.LossConstants(1.0, 1.0, 0.5, 1.2, 10.0, 2.3)  # the reference constants of vectors.json
RUN = nbafl.NbaflParams(param_clip=20.0, min_client_size=100, exposures=1, num_rounds=25, num_clients=50)


def test_nbafl_rounds_have_an_interior_optimum_that_grows_with_epsilon():
    best = []
    for epsilon in (50.0, 60.0, 100.0):
        T = np.arange(1, 401)
        run = RUN._replace(num_rounds=T)
        total = nbafl.convergence(LOSS, run, epsilon=epsilon, delta=0.01).total
        best.append(int(T[np.argmin(total)]))
        assert total[0] > total.min() < total[-1]
    assert best == [42, 44, 52]


def test_nbafl_improves_with_clients():
    run, budget = RUN._replace(num_clients=np.array([50, 60, 80, 100])), {"epsilon": 60.0, "delta": 0.01}
    assert np.all(np.diff(nbafl.convergence(LOSS, run, **budget).total) < 0)
    fixed = nbafl.convergence_corrected(LOSS, run, **budget, num_params=10)
    assert np.all(np.diff(fixed.total) < 0)


def test_an_optimal_cohort_is_an_artefact_of_lemma_4():
    """Remark 5: an interior best K under Lemma 4 as printed; inverted rightly (N4), all clients are best."""
    K = np.arange(1, 51)
    run, budget = RUN._replace(num_rounds=200, cohort_size=K), {"epsilon": 50.0, "delta": 0.01}
    bound = nbafl.scheduled_convergence(LOSS, run, **budget).total
    best = nbafl.optimal_cohort(LOSS, run, **budget)
    assert 1 < best < 50
    assert bound[best - 1] == np.nanmin(bound) < bound[-1]
    printed = nbafl.scheduled_aggregate_noise_std(run, **budget)
    assert np.nanmin(printed) < printed[-1]
    corrected = nbafl.scheduled_required_noise_std(run, **budget, form="corrected")
    assert np.all(np.diff(corrected) < 0)  # fewer clients always need more noise: the optimum is K = N
    # The bound at that noise (Theorem 2's terms with E|n| and E|n|² of one coordinate) has its minimum at N too.
    lam = nbafl.increment_coefficients(LOSS, corrected=True)
    rounds = (1 - nbafl.contraction(LOSS) ** 200) / (1 - nbafl.contraction(LOSS))
    noise = (lam.cross * nbafl.expected_norm(noise_std=corrected, num_params=1)) + lam.noise * corrected**2
    assert np.argmin(noise * rounds) == len(K) - 1


def test_secure_fedavg_local_steps_have_an_interior_optimum():
    Q = np.arange(1, 201)
    training = SECURE_FEDAVG._replace(
        local_steps=Q, batch_size=1, epsilon=10.0, weighted_variance=1.0, heterogeneity=100.0
    )
    total = secure_fedavg.communication_rounds(training).total
    best = secure_fedavg.optimal_local_steps(training)
    assert 1 < best < 200
    assert total[best - 1] == total.min()
    iid = training._replace(heterogeneity=0.0, weighted_variance=1e-4)
    assert secure_fedavg.optimal_local_steps(iid) == 1  # without heterogeneity nothing speaks for local steps


@pytest.mark.parametrize("corrected", [False, True])
def test_dp_scaffold_schemes_are_ordered(corrected):
    """Fig 3: decaying noise lowers the bound, per step more than per round, once it decays."""
    R = np.arange(250, 701, 50)
    training = dp_scaffold.ScaffoldTraining(
        40, 8, 500, server_lr=2.0, control_error=1.0, gradient_variance=1.0, num_params=10
    )
    totals = []
    for scheme, decay in ((0, 1.0), (1, 0.998), (2, 0.99998)):
        noise = dp_scaffold.NoiseScheme(scheme, R, 200, decay, decay_start=200)
        errors = dp_scaffold.error_terms_closed(training, noise, initial_variance=8.0, corrected=corrected)
        totals.append(dp_scaffold.convergence_optimal(errors, num_rounds=R, initial_distance=1.0).total)
    assert np.all(totals[2] < totals[1])
    assert np.all(totals[1] < totals[0])


def test_more_local_steps_start_faster_and_end_higher():
    """CPFed: at a fixed noise and rate, larger τ is ahead after few rounds and behind after many."""
    run = {
        "client_lr": 0.01,
        "smoothness": 1.0,
        "strong_convexity": 0.1,
        "num_params": 100,
        "noise_std": 0.05,
        "gradient_variance": 1.0,
        "client_size": 1000,
        "initial_gap": 1.0,
    }

    def bound(tau, rounds):
        training = cpfed.AveragingTraining(local_steps=tau, num_rounds=rounds, **run)
        return cpfed.convergence_convex(training, corrected=True).total

    assert bound(10, 50) < bound(1, 50)
    assert bound(10, 10**6) > bound(1, 10**6)
