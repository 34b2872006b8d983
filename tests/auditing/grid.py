"""Small federations under proven noise, for every method, sampler and view."""

import numpy as np

from dither.data import Dataset
from dither.spec import Spec

CLIENTS, RECORDS, FEATURES = 6, 24, 8


def small_dataset(features=FEATURES, records=RECORDS * CLIENTS, classes=2, seed=0) -> Dataset:
    """Records in [0, 1], as pictures are: their norm has a public bound."""
    rng = np.random.default_rng(seed)
    x = rng.random((records + 10, features)).astype(np.float32)
    y = np.arange(records + 10, dtype=np.int32) % classes
    return Dataset(
        name="small",
        x_train=x[:records],
        y_train=y[:records],
        x_test=x[records:],
        y_test=y[records:],
        classes=tuple(f"class {i}" for i in range(classes)),
        feature_names=tuple(f"pixel {i}" for i in range(features)),
        image_shape=(features, 1, 1),
        covered=True,
    )


BASE = {
    "data.name": "digits",  # replaced by the small set; its kind is the same
    "num_clients": CLIENTS,
    "cohort_size": 3,
    "num_rounds": 6,
    "local_steps": 3,
    "batch_size": 4,
    "batch_sampling": "fixed",
    "client_lr": 0.1,
    "model.name": "logistic",
    "privacy.epsilon": 2.0,
    "privacy.delta": 1e-3,
    "privacy.noise": "proven",
    "privacy.unit": "run",
    "privacy.clip": "example",
    "privacy.clip_norm": 1.0,
    "privacy.adjacency": "replace-one",
    "privacy.view": "upload",
}


def small_spec(method: str, **changes) -> Spec:
    """A small spec; dots in keys are written as two underscores."""
    return (
        Spec()
        .with_values({"method": method})
        .with_values({**BASE, **{k.replace("__", "."): v for k, v in changes.items()}})
    )


def configurations() -> list[tuple[str, dict, tuple[str, ...]]]:
    """(method, changes, views): all methods, samplers and views, several noises and shapes."""
    outside, every = ("upload", "broadcast", "final"), ("upload", "sum", "broadcast", "final")
    rows: list[tuple[str, dict, tuple[str, ...]]] = []
    coins = {"batch_sampling": "poisson", "sampling_rate": 0.2}
    for method in ("cpfed", "dp-scaffold", "concentrated"):
        views = outside if method == "cpfed" else ("upload",)
        for sampler in ("fixed", "disjoint", "shuffled", "full"):
            rows.append((method, {"batch_sampling": sampler}, views))
        rows.append((method, coins, views))
    uncapped = {**coins, "batch_sampling": "poisson-full", "local_steps": 1}  # where add/remove has a proof
    rows.append(("cpfed", {**uncapped, "privacy__adjacency": "add/remove"}, outside))
    rows.append(("dp-scaffold", {"batch_sampling": "full", "num_rounds": 3}, ("sum", "broadcast", "final")))
    for sampler in ("fixed", "disjoint", "shuffled", "full", "poisson"):
        rate = coins if sampler == "poisson" else {"batch_sampling": sampler}
        views = every if sampler in ("fixed", "full") else ("upload",)
        rows.append(("secure-fedavg", {"privacy__clip": "batch", **rate}, views))
    rows.append(("secure-fedavg", {"privacy__clip": "example", **coins}, ("upload",)))
    one = {"batch_size": 1, "local_steps": 1, "privacy__clip": "batch"}
    rows.append(("secure-fedavg", {**one, "privacy__unit": "message"}, ("upload",)))
    rows.append(("secure-fedavg", {**one, "privacy__epsilon": 0.5}, ("upload", "sum")))
    nbafl = {"batch_sampling": "full", "privacy__clip": "none", "method_options__param_clip": 1.0}
    sgd, adam = ({"method_options__optimizer": name} for name in ("sgd", "adam"))
    rows.append(("nbafl", {**nbafl, **sgd, "cohort_size": CLIENTS}, every))
    rows.append(("nbafl", {**nbafl, **adam}, every))
    rows.append(("nbafl", {**nbafl, **sgd, "privacy__view": "broadcast"}, ("broadcast", "final")))
    for method, sampler in (("dp-sgd", "full"), ("dp-dsgd", "fixed")):
        rows.append((method, {"local_steps": 1, "batch_sampling": sampler}, ("upload", "sum")))
    # Sums: the credit of the others' noise, with steps that contract it, with colluders
    summed = {"privacy__view": "sum", "cohort_size": CLIENTS}
    for rate, sampler in ((0.05, "full"), (0.4, "full"), (0.05, "disjoint"), (0.4, "shuffled")):
        rows.append(("cpfed", {**summed, "batch_sampling": sampler, "client_lr": rate}, ("sum",)))
    rows.append(("cpfed", {**summed, "privacy__colluders": 3, "batch_sampling": "full"}, ("sum", "broadcast")))
    rows.append(("secure-fedavg", {**summed, "privacy__colluders": 1, "privacy__clip": "batch"}, ("sum", "final")))
    exact = {"randomness": "os", "secagg__mode": "ideal", "local_steps": 1, "batch_sampling": "full"}
    rows.append(("dp-sgd", {**summed, **exact, "privacy__colluders": 2}, ("sum",)))
    # Each client its own ε: the target has the least, so that its weight is smallest
    own = {"privacy__epsilons": (0.5, 2.0, 1.0, 2.0, 1.0, 2.0)}
    rows.append(("cpfed", {**own, "batch_sampling": "full"}, ("upload",)))
    rows.append(("dp-sgd", {**summed, **exact, **own, "privacy__colluders": 1}, ("sum",)))
    # A clip that adapts: the count of unclipped records is released beside the gradient
    adapts = {"privacy__clip_quantile": 0.5, "local_steps": 1, "batch_sampling": "full"}
    rows.append(("cpfed", adapts, ("upload",)))
    rows.append(("dp-sgd", {**summed, **exact, **adapts}, ("sum",)))
    # Noise that decays, other models, other budgets
    for schedule in ("rounds", "steps"):
        decays = {"privacy__noise_schedule": schedule, "privacy__noise_decay": 0.9}
        rows.append(("dp-scaffold", decays, ("upload",)))
    rows.append(("cpfed", {"model__name": "softmax", "batch_sampling": "full"}, ("upload",)))
    rows.append(("cpfed", {"model__name": "mlp", "model__hidden": (8,), "batch_sampling": "full"}, ("upload",)))
    for epsilon in (0.3, 6.0):
        rows.append(("cpfed", {"privacy__epsilon": epsilon, "batch_sampling": "full"}, ("upload",)))
    rows.append(("concentrated", {"privacy__epsilon": 6.0, "batch_sampling": "shuffled"}, ("upload",)))
    rows.append(("cpfed", {"privacy__epsilon": 6.0}, ("upload",)))
    blanked = {"privacy__adjacency": "zero-out"}
    return rows + [
        (m, {**changes, **blanked}, views) for m, changes, views in rows if "privacy__adjacency" not in changes
    ]
