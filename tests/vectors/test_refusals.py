"""Formulas of the papers refuse what makes them meaningless, and name it."""

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
