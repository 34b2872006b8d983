"""Every "verified" privacy number of the vectors, by the accountant's own functions."""

from __future__ import annotations

import math

import pytest

from dither import accounting, methods
from tests.accounting import renyi
from tests.vectors import published

CONVERGENCE = {"nb.thm2_corrected.d1", "cd.thm2_corrected"}  # bounds on the loss, not on privacy
PAPER_DELTA = 1e-4  # of Concentrated DP-FL, where an entry does not repeat it


def message(i):
    return accounting.message_epsilon(1 / i["z_true"], i["p"], i["delta"])


def message_multiplier(i):
    return accounting.message_noise_multiplier(i["eps"], i["p"], i["delta"])


def uses_mixture(i, z):
    return accounting.random_uses_epsilon(accounting.binomial_pmf(i["C"], i["p"]), 1 / z, i["delta"])


def correct_multiplier_mixture(i):
    return uses_mixture(i, accounting.message_noise_multiplier(0.5, i["p"], i["delta"]))


def convex_message(i):
    def rate(t):
        return 0.2 / (1 + 0.01 * t)

    steps, after = i["Q"], i["t"] + 1
    q = steps * i["b"] / i["n_k"]
    printed = 4 * steps * i["G"] * rate(after)
    noise_std = math.sqrt(8) * q * printed * math.sqrt(math.log(1.25 * q / i["delta"])) / i["eps_claimed"]
    rates = [rate(t) for t in range(after - steps, after)]
    return accounting.convex_message_epsilon(rates, i["G"], i["b"], i["n_k"], noise_std, i["delta"])


def nbafl(i, *, uploads, broadcasts, per_record=True):
    """ε of so many uploads and broadcasts with the paper's noise."""
    constant = math.sqrt(2 * math.log(1.25 / i["delta"]))
    printed = 2 * i["C"] / i["m"]
    noise_up = constant * i["L"] * printed / i["eps_claimed"]
    noise_down = constant * i["T"] * printed / i["N"] / i["eps_claimed"]
    if i["T"] <= i["L"] * math.sqrt(i["N"]):
        noise_down = noise_up / math.sqrt(i["N"])
    sensitivity = printed if per_record else 2 * i["C"]
    mu = accounting.compose_gaussians(
        [(noise_up / sensitivity, uploads), (noise_down / (sensitivity / i["N"]), broadcasts)]
    )
    return accounting.gaussian_epsilon(mu, i["delta"])


def cpfed_round(i):
    """μ of one aggregated round with CPFed's printed noise: z = σB/(2L) = sqrt(2 T τ/(n ρ))/2."""
    log_term = math.log(1 / i["delta"])
    rho = (math.sqrt(log_term + i["eps_paper"]) - math.sqrt(log_term)) ** 2
    return accounting.aggregated_round_mu(
        math.sqrt(2 * i["T"] * i["tau"] / (i["n"] * rho)) / 2,
        i["tau"],
        rates=[1.0] * i["tau"],
        others=accounting.honest_others(i["r"], i["c"]),
        smoothness=i.get("eta_beta", 1.0),
        convex=True,
    )


def cpfed_mixture(i):
    pmf = accounting.binomial_pmf(i["T"], i["r"] / i["n"])
    return accounting.random_uses_epsilon(pmf, cpfed_round(i), i["delta"])


def single_use(i):
    mu = accounting.aggregated_round_mu(
        i["z"],
        1,
        rates=[1.0] * i["tau"],
        others=accounting.honest_others(i["r"], i["c"]),
        smoothness=i.get("eta_beta", 1.0),
        convex=True,
    )
    return accounting.gaussian_epsilon(math.sqrt(i["U"]) * mu, i["delta"])


def scaffold_decay(i):
    """Scheme 1: variance β^(r-200) σ0² after round 200, 50 steps a round, z0 = 707."""
    levels = []
    for r in range(1, i["R"] + 1):
        z = math.sqrt(8) * 500 / 2 * i["beta"] ** (max(0, r - 200) / 2)
        levels.append((i["q"], z, 50))
    assert min(z for _, z, _ in levels) == pytest.approx(i["z_min"], rel=1e-9)
    return renyi.epsilon(renyi.fixed_size_rdp, levels, i["delta"], [i["order"]])


def fixed(i):
    return accounting.fixed_size_epsilon(i["q"], i["z"], i["steps"], i["delta"])


DISPATCH = {
    "gen.analytic_eps.*": lambda i: accounting.gaussian_epsilon(1 / i["z"], i["delta"]),
    "gen.analytic_z.*": lambda i: accounting.gaussian_noise_multiplier(i["eps"], i["delta"]),
    "gen.classical_valid_up_to.*": lambda i: accounting.classical_valid_up_to(i["delta"]),
    "gen.rdp_poisson.*": lambda i: renyi.poisson_rdp(i["q"], i["z"], [i["alpha"]])[0],
    "gen.rdp_wor.*": lambda i: renyi.fixed_size_rdp(i["q"], i["z"], [i["alpha"]])[0],
    "sf.verified_per_message.*": message,
    "sf.correct_z.*": message_multiplier,
    "sf.verified_e2e.*": lambda i: uses_mixture(i, i["z"]),
    "sf.verified_e2e_trueDelta.*": lambda i: uses_mixture(i, i["z"]),
    "sf.verified_e2e_correctz.*": correct_multiplier_mixture,
    "sf.verified_e2e_pld.*": lambda i: accounting.fixed_size_epsilon(i["p"], i["z"], i["C"], i["delta"]),
    "sf.verified_per_message_convex.*": convex_message,
    "nb.base_eps_correct.*": lambda i: accounting.unamplified_epsilon(i["eps"] / i["T"], i["K"] / i["N"]),
    "nb.verified.uplink_L1.*": lambda i: nbafl(i, uploads=i["L"], broadcasts=0),
    "nb.verified.downlink.*": lambda i: nbafl(i, uploads=0, broadcasts=i["T"]),
    "nb.verified.joint.*": lambda i: nbafl(i, uploads=i["L"], broadcasts=i["T"] - i["L"]),
    "nb.verified.joint_clip_only.*": lambda i: nbafl(
        i, uploads=i["L"], broadcasts=i["T"] - i["L"], per_record=False
    ),
    "sc.verified.wor_replace_rdp.*": lambda i: renyi.epsilon(
        renyi.fixed_size_rdp, [(i["q"], i["z"], i["steps"])], i["delta"], [i["order"]]
    ),
    "sc.verified.wor_replace_pld.*": fixed,
    "sc.verified.poisson_addremove_rdp.*": lambda i: renyi.epsilon(
        renyi.poisson_rdp, [(i["q"], i["z"], i["steps"])], i["delta"], [i["order"]]
    ),
    "sc.verified.nosampling.*": lambda i: accounting.gaussian_epsilon(math.sqrt(i["steps"]) / i["z"], i["delta"]),
    "sc.verified.scheme1.*": scaffold_decay,
    "cp.verified.local_wor_pld.*": fixed,
    "cp.verified.C20.W1": lambda i: accounting.gaussian_epsilon(math.sqrt(i["C_i"]) * cpfed_round(i), i["delta"]),
    "cp.verified.mixture.*": cpfed_mixture,
    "cp.cks_eps": lambda i: accounting.zcdp_epsilon_tight(i["rho"], i["delta"]),
    "cp.analytic_eps": lambda i: accounting.gaussian_epsilon(math.sqrt(2 * i["rho"]), i["delta"]),
    "cd.verified.local.zcdp_formula": lambda i: methods.epsilon_from_zcdp(
        rho=i["U"] / (2 * i["z"] ** 2), delta=PAPER_DELTA
    ),
    "cd.verified.reshuffled_each_round": lambda i: accounting.random_uses_epsilon(
        accounting.binomial_pmf(i["C_i"], i["p"]), 1 / i["z"], PAPER_DELTA
    ),
    "cd.verified.local_wor_pld.*": fixed,
    "cd.verified.local_poisson_pld.*": lambda i: accounting.poisson_epsilon(
        i["q"], i["z"], i["steps"], i["delta"]
    ),
    "cd.verified.SA_convex.*": single_use,
    "cd.uses_persistent_epochs": lambda i: accounting.shuffled_uses(i["C_i"] * i["tau"], i["m"] // i["gamma"]),
}
COVERED = [entry for entry in published.ENTRIES if published.lookup(DISPATCH, entry)]


@pytest.mark.parametrize("entry", COVERED, ids=lambda entry: entry["id"])
def test_verified_number(entry):
    published.check(DISPATCH, entry)


def test_every_verified_privacy_number_is_covered():
    verified = {entry["id"] for entry in published.ENTRIES if entry["kind"] == "verified"}
    assert verified - {entry["id"] for entry in COVERED} == CONVERGENCE


def test_no_pattern_is_idle():
    used = {max((p for p in DISPATCH if published.fnmatchcase(e["id"], p)), key=len) for e in COVERED}
    assert used == set(DISPATCH)
