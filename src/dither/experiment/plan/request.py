"""What is planned for: the spec with its budget, the public records to plan on, and the count of private ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dither import data
from dither.errors import DataError, SpecError
from dither.experiment.build import load_data
from dither.experiment.plan import knobs, shapes
from dither.experiment.plan.knobs import Impossible
from dither.experiment.plan.shapes import Material
from dither.spec import Spec


def base_spec(
    what: Any,
    epsilon: float,
    delta: float,
    clients: int | None,
    model: str | None,
    view: str,
    adjacency: str,
    values: dict[str, Any],
    given: dict[str, tuple[Any, ...]],
) -> tuple[Spec, dict[str, tuple[Any, ...]]]:
    """The spec with the asked budget and public facts, and the knobs that the user holds."""
    base = Spec.from_any(what)
    if clients is not None and clients < 1:
        raise Impossible(f"clients={clients} must be at least 1; nearest feasible: clients=1")
    asked = {
        "privacy.epsilon": epsilon,
        "privacy.delta": delta,
        "privacy.unit": "run",
        "privacy.noise": "proven",
        "privacy.noise_std": 0.0,
        "privacy.noise_schedule": "constant",
        "privacy.noise_decay": 1.0,
        "privacy.noise_decay_start": 0,
        "privacy.view": view,
        "privacy.adjacency": base.privacy.adjacency if adjacency == "auto" else adjacency,
        "data.split": "given",
        "data.records_per_client": 0,
        "lr_decay": 0.0,
        "compare": False,
    }
    number = clients if clients is not None else values.get("num_clients", base.num_clients)
    cohort = values.pop("cohort_size", None)
    if cohort is not None:
        if cohort > number:
            raise Impossible(
                f"cohort_size={cohort} exceeds the {number} clients; nearest feasible: cohort_size={number}"
            )
        given.setdefault("cohort_size", (cohort,))
    asked |= {"num_clients": number, "cohort_size": min(base.cohort_size, number)}
    if model is not None:
        asked["model.name"] = model
        if model in ("logistic", "softmax"):
            asked["model.hidden"] = []
    base = base.with_values({**asked, **values})
    base = base.with_values({"privacy.adjacency": base.adjacency})  # a proxy's path must not decide it
    for key in (*knobs.WHOLE, "client_lr", knobs.clip_key(base.method)):
        if key in values:
            given.setdefault(key, (values[key],))
    return base, given


def material(
    base: Spec,
    records: int | None,
    dim: int | None,
    proxy: str,
    public_fraction: float,
    data_dir: str | Path | None,
) -> tuple[Spec, Material, int]:
    """Records to plan on (never private ones), the spec with its data, and how many records the plan is for."""
    if not proxy:
        if public_fraction:
            raise SpecError(f"public_fraction={public_fraction:g} is a share of --proxy, and none is given")
        if records is None or dim is None:
            raise SpecError(
                "without --proxy, give --records and --dim: the records of the plan's own data are private, and "
                "an estimate on them would have to be charged to their budget"
            )
        return base, _synthetic(base, _positive("records", records), _positive("dim", dim)), records
    own_file = Path(proxy).suffix.lower() in (".csv", ".parquet", ".npz")
    where = {"data.path": proxy, "data.name": ""} if own_file else {"data.name": proxy, "data.path": ""}
    own_path = base.data.path and Path(base.data.path).resolve() == Path(proxy).resolve()
    if own_file and own_path and not public_fraction:
        raise SpecError(
            f"{proxy!r} is the plan's own private data: an estimate on it would have to be charged to its budget; "
            "declare a share of it public (--public-fraction), or give other public data"
        )
    everything = base.with_values({**where, "data.part": "all", "data.public_fraction": 0.0})
    dataset, share = load_data(everything, data_dir=data_dir), proxy
    if public_fraction:
        base = base.with_values({**where, "data.public_fraction": public_fraction, "data.part": "private"})
        total = len(dataset.y_train)
        dataset = data.public_part(dataset, "public", public_fraction)  # of the others the count alone is used
        share = f"the public {public_fraction:.0%} of {proxy}"
    if public_fraction and not dataset.covered:
        raise SpecError(
            f"{proxy!r} has no schema, so its encoding would be read from the private records too; write one with "
            "`dither data schema` and give it as --set data.schema=FILE"
        )
    if records is None:
        if not public_fraction:
            raise SpecError("give --records, the number of private training records the plan is for")
        records = total - len(dataset.y_train)
    return base, shapes.proxy(dataset, _positive("records", records), share), records


def _synthetic(base: Spec, records: int, dim: int) -> Material:
    outputs = {"logistic": 1, "softmax": 2}.get(base.model.name)
    if outputs is None:
        raise SpecError(f"model.name={base.model.name!r} needs a --proxy: --dim alone does not say its layers")
    features = dim // outputs - 1
    if features < 1 or dim % outputs:
        raise SpecError(
            f"dim={dim} does not fit a {base.model.name} model of two classes: {outputs}·(features + 1)"
        )
    return shapes.synthetic(records, features)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise SpecError(f"{name}={value} must be at least 1")
    return value


def smallest_client(base: Spec, records: int) -> int:
    """The records of the smallest client."""
    if records < base.num_clients:
        raise Impossible(
            f"{records} records cannot be dealt to {base.num_clients} clients; nearest feasible: "
            f"{records} clients of one record"
        )
    if base.data.partition == "iid":
        return records // base.num_clients
    plain = shapes.rehearsal(base)
    try:
        dealt = data.partition(
            shapes.stand_in(records, 1, ("0", "1")),
            kind=plain.data.partition,
            num_clients=plain.num_clients,
            seed=plain.seed,
            similarity=plain.data.similarity,
            alpha=plain.data.alpha,
        )
    except DataError as reason:
        raise Impossible(f"{reason}; nearest feasible: data.partition='iid'") from reason
    return int(dealt.size.min())
