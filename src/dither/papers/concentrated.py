"""Concentrated DP-FL: CPFed with shuffled epochs, participation counts and non-convex convergence.

R. Hu, Y. Guo, Y. Gong, "Concentrated Differentially Private Federated Learning with Performance Analysis",
IEEE Open Journal of the Computer Society, 2021.

| paper | here | | paper | here |
|---|---|---|---|---|
| n, r | `num_clients`, `cohort_size` | | σ | `noise_std`, on the averaged gradient |
| T, τ | `num_rounds`, `local_steps` | | G | `clip_norm`, per example |
| γ | `batch_size` | | C_i | `participations` |
| m | `client_size` | | η | `client_lr` |

Deviations: D2 (the partial last batch of an epoch is dropped, so every batch has γ records), D6 (equal
participation is impossible when T·r/n is not whole: a balanced design gives floor or ceil of it to each client
and the noise is set for the larger). The formulas are in `papers.theory.concentrated`.
"""

from __future__ import annotations

import numpy as np

from dither.core import Claim, Prepared, Setting
from dither.errors import SpecError
from dither.models import Model
from dither.papers import local
from dither.papers.theory import concentrated as theory

OPTIONS = {
    "aggregation_credit": (True, "credit the other clients' noise under secure aggregation (Theorem 1)"),
    "participation": (
        "balanced",
        "who takes part when: 'balanced' (floor or ceil of T·r/n each), 'equal' (exactly T·r/n) or 'uniform'",
    ),
    "participations": (0.0, "C_i for the noise; 0: the largest of the design (12.5 reproduces the paper)"),
    "exact_epochs": (False, "choose batch_size so that a round is exactly one epoch: floor(m / local_steps)"),
}
VALUES = ("aggregation_credit", "participations")  # they set the noise, no structure

SECURE_AGGREGATION = True

WHY = (
    "the claim spreads one use of a record over a fraction of an epoch and credits noise that is not there "
    "(D1, D2); with shuffled batches a visible upload spends whole uses (D2), with Poisson batches far less"
)

# Algorithm


def prepare(model: Model, setting: Setting) -> Prepared:
    """Concentrated DP-FL for one federation: epochs of disjoint batches that carry over from round to round."""
    if setting.options["exact_epochs"]:
        setting = setting._replace(batch_size=_exact_batch(setting))
    cohorts = participation_design(setting)
    counts = participations(setting, cohorts)
    gradients = local.noisy_gradients(model, setting, source="Concentrated DP-FL Corollary 1; errata D2, G7a")
    std = local.chosen_noise_std(setting, lambda: noise_std(setting, counts))
    hyper = local.gradient_hyper(setting, std)
    return Prepared(
        hyper=hyper,
        build=local.averaging(setting, gradients),
        claim=claim(setting, local.quietest(hyper), counts),
        cohort_size_at=lambda index: setting.cohort_size,
        cohorts=cohorts,
        noise_names=("noise_std",),
        reclaim=lambda other: claim(setting, local.quietest(other), counts),
        own_epochs=True,
        upload_unit=local.upload_unit(setting),
    )


def participation_design(setting: Setting) -> np.ndarray | None:
    """Cohorts `[num_rounds, cohort_size]` drawn beforehand, or None where each round draws its own.

    Each round takes the clients that took part least so far, ties broken at random: counts never differ by more
    than one. The design depends on the seed alone, never on data.
    """
    kind = setting.options["participation"]
    if kind == "uniform":
        return None
    if kind not in ("balanced", "equal"):
        raise SpecError(f"method_options.participation={kind!r} is not one of 'balanced', 'equal', 'uniform'")
    total = setting.num_rounds * setting.cohort_size
    if kind == "equal" and total % setting.num_clients:
        raise SpecError(
            f"participation='equal' is impossible: num_rounds*cohort_size/num_clients = {setting.num_rounds}*"
            f"{setting.cohort_size}/{setting.num_clients} = {total / setting.num_clients:g} is not whole; "
            "use 'balanced'"
        )
    rng = np.random.default_rng([setting.seed, 0xC047])
    counts = np.zeros(setting.num_clients, int)
    design = np.empty((setting.num_rounds, setting.cohort_size), np.int32)
    for index in range(setting.num_rounds):
        order = np.lexsort((rng.random(setting.num_clients), counts))
        design[index] = order[: setting.cohort_size]
        counts[design[index]] += 1
    return design


def participations(setting: Setting, cohorts: np.ndarray | None) -> float:
    """C_i for which the noise is set: as given, or the largest count of the design (T where none is drawn)."""
    if setting.options["participations"]:
        return float(setting.options["participations"])
    if cohorts is None:
        return float(setting.num_rounds)
    return float(np.bincount(cohorts.ravel(), minlength=setting.num_clients).max())


def _exact_batch(setting: Setting) -> int:
    smallest = int(setting.client_sizes.min())
    if setting.local_steps > smallest:
        raise SpecError(
            f"exact_epochs: local_steps={setting.local_steps} exceeds the {smallest} records of a client"
        )
    return smallest // setting.local_steps


# Noise


def noise_std(setting: Setting, counts: float) -> float:
    """σ for a target ε by Theorem 1, at the smallest client."""
    return float(theory.noise_std(epsilon=setting.epsilon, delta=setting.delta, **_client(setting, counts)))


# Privacy


def claim(setting: Setting, std: float, counts: float) -> Claim:
    """Theorem 1 at this noise, for the client that takes part most."""
    if std == 0:
        return local.no_noise(setting)
    return theory.claim(
        noise_std=std, delta=setting.delta, colluders=setting.colluders, **_client(setting, counts)
    )


def _client(setting: Setting, counts: float) -> dict:
    return {
        "participations": counts,
        "local_steps": setting.local_steps,
        "batch_size": setting.batch_size,
        "client_size": int(setting.client_sizes.min()),
        "clip_norm": setting.clip_norm,
        "cohort_size": setting.cohort_size,
        "secure_aggregation": bool(setting.options["aggregation_credit"]),
    }
