"""Methods by name: the papers' files, and any Python file of yours with OPTIONS and prepare."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from dither.errors import SpecError
from dither.spec import Spec, options
from dither.types import Prepared, PrivacyPlan


class Method(NamedTuple):
    """A method as its file gives it."""

    prepare: Callable[[Any, PrivacyPlan], Prepared]
    pilot_metric: str = ""
    why: str = ""  # why its claimed and its proven ε differ, with errata ids


def method(name: str) -> Method:
    """The method of that name, or of a Python file."""
    if name not in options.METHODS:
        return _method(options.module_of_file(name))
    module, _, baseline = options.METHODS[name].module.partition(":")
    if baseline:
        return Method(getattr(import_module(module), f"prepare_{baseline}"))
    return _method(import_module(module))


def prepare(
    spec: Spec, model: Any, *, client_sizes: np.ndarray, num_params: int, chosen: Method | None = None
) -> Prepared:
    """The spec's method (or `chosen`, where it was read before), made ready for clients of those sizes."""
    num_clients = len(client_sizes)
    if spec.cohort_size > num_clients:
        raise SpecError(f"cohort_size={spec.cohort_size} exceeds num_clients={num_clients}")
    privacy = spec.privacy
    plan = PrivacyPlan(
        client_sizes=np.asarray(client_sizes),
        num_params=num_params,
        cohort_size=spec.cohort_size,
        num_rounds=spec.num_rounds,
        local_steps=spec.local_steps,
        batch_size=spec.batch_size,
        batch_sampling=spec.batch_sampling,
        sampling_rate=spec.sampling_rate,
        client_lr=spec.client_lr,
        lr_decay=spec.lr_decay,
        server_lr=spec.server_lr,
        clip_norm=privacy.clip_norm,
        clip=privacy.clip,
        l2=spec.model.l2,
        l2_inside_clip=spec.model.l2_inside_clip,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        noise="none" if math.isinf(privacy.epsilon) else privacy.noise,
        unit=privacy.unit,
        view=privacy.view,
        colluders=spec.colluders,
        adjacency=spec.adjacency,
        options=spec.method_options,
        noise_std=privacy.noise_std,
        noise_schedule=privacy.noise_schedule,
        noise_decay=privacy.noise_decay,
        noise_decay_start=privacy.noise_decay_start,
        noise_scale=privacy.noise_scale,
        seed=spec.seed,
        aggregation=spec.aggregation,
        discrete_noise=spec.secagg.noise == "discrete",
        scale_bits=spec.secagg.scale_bits,
        exact_noise=spec.source_of_randomness == "os",
        assume_credit=privacy.assume_credit,
    )
    return (chosen or method(spec.method)).prepare(model, plan)


def _method(module: Any) -> Method:
    return Method(module.prepare, getattr(module, "PILOT_METRIC", ""), getattr(module, "WHY", ""))
