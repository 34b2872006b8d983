"""Formulas of the papers refuse what makes them meaningless, and name it."""

import functools

import pytest

from dither import methods
from dither.errors import SpecError
from dither.methods import concentrated, cpfed, dp_scaffold, nbafl, secure_fedavg

PARAMS = {
    concentrated: concentrated.ConcentratedParams(5, 10, 32, 320, 1.0, 8),
    cpfed: cpfed.CpfedParams(20, 10, 16, 64, 1.0, 10),
    dp_scaffold: dp_scaffold.ScaffoldParams(dp_scaffold.NoiseScheme(0, 100, 5), 32, 1.0, 0.2, 0.1, "fixed"),
    nbafl: nbafl.NbaflParams(20.0, 100, 1, 25, 50, 20),
    secure_fedavg: secure_fedavg.SecureFedavgParams(5, 1, 300),
}
TARGET = {"epsilon": 5.0, "delta": 1e-3}
# A formula, its keywords, and what must be above 0: keywords and fields of its parameters
FORMULAS = [
    (methods, "classical_noise_multiplier", TARGET, "epsilon"),
    (methods, "zcdp_of_gaussian", {"sensitivity": 1.0, "noise_std": 1.0}, "noise_std"),
    (methods, "zcdp_from_epsilon", TARGET, "epsilon"),
    (
        concentrated,
        "rho_total",
        {"noise_std": 1.0},
        "noise_std participations local_steps client_size cohort_size",
    ),
    (cpfed, "step_sensitivity", {"clip_norm": 1.0, "batch_size": 64}, "clip_norm batch_size"),
    (cpfed, "rho_round", {"noise_std": 1.0}, "noise_std local_steps cohort_size"),
    (cpfed, "rho_total", {"noise_std": 1.0}, "noise_std local_steps num_rounds"),
    (dp_scaffold, "initial_noise_variance", TARGET, "epsilon batch_size clip_norm"),
    (dp_scaffold, "leakage_slope", {"initial_variance": 1.0}, "batch_size initial_variance"),
    (nbafl, "uplink_sensitivity", {"param_clip": 20.0, "min_client_size": 100}, "param_clip min_client_size"),
    (nbafl, "uplink_noise_std", TARGET, "epsilon exposures param_clip min_client_size"),
    (nbafl, "required_aggregate_noise_std", TARGET, "epsilon num_rounds"),
    (nbafl, "scheduling_gamma", {"epsilon": 5.0}, "epsilon exposures"),
    (nbafl, "scheduled_base_epsilon", {"epsilon": 5.0}, "epsilon num_rounds"),
    (nbafl, "min_defined_cohort", {"epsilon": 5.0}, "epsilon num_rounds num_clients"),
    (secure_fedavg, "sampling_bound", {}, "local_steps batch_size client_size"),
    (
        *(secure_fedavg, "sensitivity", {"local_steps": 5, "clip_norm": 1.0, "next_lr": 0.1}),
        "local_steps clip_norm next_lr",
    ),
    (secure_fedavg, "sensitivity_exact", {"clip_norm": 1.0, "round_lrs": [0.1, 0.1]}, "clip_norm round_lrs"),
    (secure_fedavg, "noise_multiplier", TARGET, "epsilon"),
    (secure_fedavg, "base_epsilon", {"epsilon": 5.0}, "epsilon"),
    (
        *(secure_fedavg, "epsilon_of_noise", {"noise_std": 1.0, "sensitivity": 1.0, "delta": 1e-3}),
        "noise_std sensitivity",
    ),
    *(
        (
            nbafl,
            f"{link}_epsilon_of_noise",
            {"noise_std": 1.0, "sensitivity": 1.0, "delta": 1e-3, **counted},
            words,
        )
        for link, counted, words in (
            ("uplink", {"exposures": 1}, "noise_std sensitivity exposures"),
            ("downlink", {"num_rounds": 25}, "noise_std sensitivity num_rounds"),
        )
    ),
]


@pytest.mark.parametrize(
    ("room", "name", "keywords", "names"), FORMULAS, ids=[f"{f[0].__name__}.{f[1]}" for f in FORMULAS]
)
def test_what_is_not_above_zero_is_refused_by_name(room, name, keywords, names):
    formula = getattr(room, name)
    takes_params = "params" in formula.__code__.co_varnames[: formula.__code__.co_argcount]
    params = (PARAMS[room],) if takes_params else ()
    formula(*params, **keywords)  # it works with what is right
    for wrong in names.split():
        values = {wrong: 0.0}
        changed = params if wrong in keywords else (params[0]._replace(**values),)
        given = keywords | values if wrong in keywords else keywords
        with pytest.raises(SpecError, match=f"{wrong}=0 must be a finite number above 0"):
            formula(*changed, **given)


@pytest.mark.parametrize(
    ("cohort", "clients", "message"),
    [
        (0, 5, "cohort_size=0 must be"),
        (3, 0, "num_clients=0 must be"),
        (6, 5, "cohort_size=6 exceeds num_clients=5"),
    ],
)
def test_a_cohort_that_cannot_be_drawn_is_refused_by_name(cohort, clients, message):
    methods.check_cohort(5, 5)
    with pytest.raises(SpecError, match=message):
        methods.check_cohort(cohort, clients)


DELTAS = [
    (methods.gaussian_constant, {}),
    (methods.epsilon_from_zcdp, {"rho": 0.1}),
    (methods.zcdp_from_epsilon, {"epsilon": 1.0}),
    (methods.epsilon_from_rdp, {"rdp": 0.1, "alpha": 2.0}),
    (dp_scaffold.optimal_alpha, {"slope": 0.1}),
    (functools.partial(secure_fedavg.noise_multiplier, PARAMS[secure_fedavg]), {"epsilon": 1.0}),
]


@pytest.mark.parametrize(("formula", "keywords"), DELTAS)
def test_a_delta_that_is_no_probability_is_refused(formula, keywords):
    formula(**keywords, delta=1e-5)
    for delta in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(SpecError, match="must lie strictly between 0 and 1"):
            formula(**keywords, delta=delta)


COHORTS = [
    lambda r, n: cpfed.rho_total(
        PARAMS[cpfed]._replace(cohort_size=r, num_clients=n, secure_aggregation=False), noise_std=1.0
    ),
    lambda r, n: concentrated.expected_participations(num_rounds=10, cohort_size=r, num_clients=n),
    lambda r, n: concentrated.participation_bounds(num_rounds=10, cohort_size=r, num_clients=n),
    lambda r, n: nbafl.scheduling_gamma(PARAMS[nbafl]._replace(cohort_size=r, num_clients=n), epsilon=1.0),
    lambda r, n: nbafl.scheduled_base_epsilon(PARAMS[nbafl]._replace(cohort_size=r, num_clients=n), epsilon=1.0),
    lambda r, n: nbafl.scheduled_epsilon_of_noise(
        PARAMS[nbafl]._replace(cohort_size=r, num_clients=n), noise_std=1.0, sensitivity=1.0, delta=1e-3
    ),
]


@pytest.mark.parametrize("formula", COHORTS)
def test_a_formula_of_a_cohort_refuses_one_that_is_too_large(formula):
    formula(5, 5)
    for cohort, clients, said in ((6, 5, "cohort_size=6 exceeds num_clients=5"), (0, 5, "cohort_size=0 must be")):
        with pytest.raises(SpecError, match=said):
            formula(cohort, clients)


NOISE = dp_scaffold.NoiseScheme(1, 100, 5, 0.9, 10)
SCHEMES = [
    lambda noise: dp_scaffold.noise_variance(noise, round_number=1, step_number=1, initial_variance=1.0),
    dp_scaffold.effective_rounds,
    lambda noise: dp_scaffold.max_alpha(PARAMS[dp_scaffold]._replace(schedule=noise), initial_variance=1.0),
    lambda noise: dp_scaffold.min_decay(noise, initial_variance=1.0),
]


@pytest.mark.parametrize("formula", SCHEMES)
def test_a_scheme_that_there_is_not_is_refused(formula):
    for scheme in (0, 1, 2):
        formula(NOISE._replace(scheme=scheme))
    with pytest.raises(SpecError, match="scheme=3 is not one of 0"):
        formula(NOISE._replace(scheme=3))


@pytest.mark.parametrize("formula", SCHEMES[:3])
def test_a_decay_outside_0_to_1_is_refused_where_noise_falls(formula):
    formula(NOISE._replace(scheme=0, decay=1.5))  # not read
    for decay in (0.0, 1.1, -0.5):
        with pytest.raises(SpecError, match=f"decay={decay:g} must lie in"):
            formula(NOISE._replace(decay=decay))


@pytest.mark.parametrize("wrong", ["round_number", "step_number", "initial_variance"])
def test_rounds_and_steps_of_a_schedule_count_from_one(wrong):
    right = {"round_number": 1, "step_number": 1, "initial_variance": 1.0}
    with pytest.raises(SpecError, match=f"{wrong}=0 must be a finite number above 0"):
        dp_scaffold.noise_variance(NOISE, **{**right, wrong: 0})


def test_local_steps_of_a_leakage_are_counted_from_one():
    params = PARAMS[dp_scaffold]
    with pytest.raises(SpecError, match="local_steps=0 must be"):
        dp_scaffold.leakage_slope(
            params._replace(schedule=params.schedule._replace(local_steps=0)), initial_variance=1.0
        )


def test_an_order_is_fixed_or_optimised():
    params = PARAMS[dp_scaffold]._replace(alpha_mode="best")
    with pytest.raises(SpecError, match="alpha_mode='best' is neither 'fixed' nor 'optimised'"):
        dp_scaffold.initial_noise_variance(params, **TARGET)
    with pytest.raises(SpecError, match="alpha_mode='best' is neither 'fixed' nor 'optimised'"):
        dp_scaffold.epsilon_of_noise(params, initial_variance=1.0, delta=1e-3)


def test_uses_of_a_record_need_batches_that_a_client_has():
    right = {"participations": 3, "local_steps": 4, "batch_size": 5, "client_size": 20}
    assert concentrated.record_uses(**right) == 3
    for wrong in ("participations", "local_steps", "batch_size"):
        with pytest.raises(SpecError, match=f"{wrong}=0 must be"):
            concentrated.record_uses(**{**right, wrong: 0})
    with pytest.raises(SpecError, match="batch_size=21 exceeds client_size=20"):
        concentrated.record_uses(**{**right, "batch_size": 21})
    assert concentrated.record_uses(**{**right, "batch_size": 20}) == 12
    with pytest.raises(SpecError, match="batch_size=301 exceeds client_size=300"):
        secure_fedavg.inclusion_probability(PARAMS[secure_fedavg]._replace(batch_size=301))
    assert secure_fedavg.inclusion_probability(PARAMS[secure_fedavg]._replace(batch_size=300)) == 1.0
