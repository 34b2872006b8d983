"""CPFed: periodic averaging, noise on every gradient, secure aggregation, zCDP.

R. Hu, Y. Gong, Y. Guo, "CPFed: Communication-Efficient and Privacy-Preserving Federated Learning", 2020.

| paper | here | | paper | here |
|---|---|---|---|---|
| n, r | `num_clients`, `cohort_size` | | σ | `noise_std`, on the averaged gradient |
| T, τ | `num_rounds`, `local_steps` | | L (Lipschitz) | `clip_norm`, per example |
| B | `batch_size` | | η | `client_lr` |

Deviations: none in the algorithm. The claimed ε is Theorem 1's; errata C1, C2 and G7 say why it is not proved,
C3 what is. The formulas are in `papers.theory.cpfed`.
"""

from __future__ import annotations

from dither.core import Claim, Prepared, Setting
from dither.models import Model
from dither.papers import local
from dither.papers.theory import cpfed as theory

OPTIONS = {
    "aggregation_credit": (True, "credit the other clients' noise under secure aggregation (Theorem 1)"),
}
VALUES = ("aggregation_credit",)  # it sets the noise, no structure

SECURE_AGGREGATION = True

WHY = (
    "the claim averages participation instead of counting it (C1) and credits all of the others' noise although "
    "their own later steps contract it (G7); the proof for visible uploads counts the sampling of records, which "
    "the paper ignores (C3)"
)

# Algorithm


def prepare(model: Model, setting: Setting) -> Prepared:
    """CPFed for one federation (Algorithm 1): τ noisy steps, then the mean of r local models."""
    gradients = local.noisy_gradients(model, setting, source="CPFed Corollary 1; errata G7a")
    std = local.chosen_noise_std(setting, lambda: noise_std(setting))
    hyper = local.gradient_hyper(setting, std)
    return Prepared(
        hyper=hyper,
        build=local.averaging(setting, gradients),
        claim=claim(setting, local.quietest(hyper)),
        cohort_size_at=lambda index: setting.cohort_size,
        noise_names=("noise_std",),
        reclaim=lambda other: claim(setting, local.quietest(other)),
        own_epochs=True,
        upload_unit=local.upload_unit(setting),
        ignores_counts=True,
    )


# Noise


def noise_std(setting: Setting) -> float:
    """σ for a target ε by Theorem 1; without the aggregation credit r is replaced by 1 in the per-round ρ."""
    return float(theory.noise_std(epsilon=setting.epsilon, delta=setting.delta, **_run(setting)))


# Privacy


def claim(setting: Setting, std: float) -> Claim:
    """Theorem 1 at this noise."""
    if std == 0:
        return local.no_noise(setting)
    return theory.claim(noise_std=std, delta=setting.delta, colluders=setting.colluders, **_run(setting))


def _run(setting: Setting) -> dict:
    return {
        "num_rounds": setting.num_rounds,
        "local_steps": setting.local_steps,
        "num_clients": setting.num_clients,
        "batch_size": setting.batch_size,
        "clip_norm": setting.clip_norm,
        "cohort_size": setting.cohort_size,
        "secure_aggregation": bool(setting.options["aggregation_credit"]),
    }
