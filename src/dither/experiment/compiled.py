"""An experiment compiled: the simulator as its spec asks for it, on as many devices as that is worth, and what the
rounds read."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dither.errors import RunExists, SpecError
from dither.experiment.build import Experiment, aggregation
from dither.simulation import devices, distributed, streaming
from dither.simulation import engine as simulate
from dither.simulation.arrays import ONE_DEVICE, Shards
from dither.spec import Spec


class Compiled(NamedTuple):
    """The simulation, what makes its rounds (itself, or one that streams its records), and what they read."""

    simulation: simulate.Simulation
    rounds: simulate.Simulation | streaming.Streamed
    inputs: simulate.Inputs


def compiled(experiment: Experiment, **options: Any) -> Compiled:
    """The engine for one run. `options` come on top of what the spec asks for."""
    made = simulation(experiment, **{**sharing(experiment), **options})
    rounds = engine(experiment, made)
    inputs = rounds.inputs(
        experiment.problem, seeds=[experiment.spec.seed], hyper=hypers([experiment]), cohorts=designs([experiment])
    )
    return Compiled(made, rounds, inputs)


def check(experiment: Experiment, begun: Mapping[str, Any] | None = None) -> Shards:
    """The devices for one run. Refuses what cannot be shared among processes, and records that stream through too
    little memory.

    `begun` is the provenance of a run to be continued. It gets as many devices as it had, whatever would be chosen
    here: another number would add its sums in another order, to other bits."""
    shards: Shards = sharing(experiment)["shards"]
    wanted = int((begun or {}).get("devices", shards.devices))
    # Among processes everyone gives as many; and a run that several began, any number of them may continue.
    if begun and wanted != shards.devices and distributed.count() == 1:
        here = len(distributed.devices(wanted))
        if here == wanted:
            shards = Shards(clients=wanted)
        elif "processes" not in begun:
            raise RunExists(
                f"this run was begun on {wanted} devices; the {here} here would add its sums in another order. "
                f"Continue it where there are {wanted} (on a CPU: DITHER_DEVICES={wanted}), or start a new run"
            )
    if experiment.dataset.streamed:
        _held(experiment, shards)
    return shards


def simulation(experiment: Experiment, **options: Any) -> simulate.Simulation:
    """The simulator for runs like this one."""
    return simulate.Simulation(
        experiment.model,
        experiment.prepared.build,
        num_clients=len(experiment.partition.size),
        cohort_size_at=experiment.prepared.cohort_size_at,
        **{**engine_options(experiment), **options},
    )


def hypers(experiments: Sequence[Experiment]) -> dict[str, np.ndarray]:
    """The methods' values of a batch of runs."""
    each = [compiled_hyper(experiment) for experiment in experiments]
    return {name: np.stack([np.asarray(hyper[name]) for hyper in each]) for name in each[0]}


def engine_options(experiment: Experiment) -> dict[str, Any]:
    """What a spec asks of the simulator besides method, data and seeds."""
    spec = experiment.spec
    return {
        "layout": "loop" if devices.sequential_clients(step_numbers(experiment)) else "vmap",
        "randomness": spec.source_of_randomness,
        "aggregation": aggregation(experiment),
        "dropout": spec.federation.dropout,
        "min_clients": min(spec.federation.min_clients, spec.cohort_size),
        "max_norm": spec.federation.max_norm,
        "refuse": unprotected(experiment),
    }


def unprotected(experiment: Experiment) -> bool:
    """Whether the method claims no ε and adds no noise: then a client whose update is not finite may be named."""
    prepared = experiment.prepared
    noisy = any(np.any(prepared.hyper[name]) for name in prepared.plan.noise_names)
    return math.isinf(prepared.claim.value) and not noisy


def sharing(experiment: Experiment, runs: int = 1) -> dict[str, Any]:
    """How a batch of runs like this one is shared among devices, and whether a device's runs go one by one."""
    how = aggregation(experiment)
    if experiment.spec.source_of_randomness == "os" or (how is not None and not how.compiled):
        _refuse_processes(experiment)
        return {"shards": ONE_DEVICE}
    records, spec = experiment.problem.x.nbytes, experiment.spec
    if experiment.dataset.streamed:
        _refuse_processes(experiment)
        records = min(records, int(streaming.GB * spec.data.stream_memory) // 2)  # a block at work
    if runs == 1:
        return {"shards": devices.for_one_run(round_flops=_round_flops(experiment), record_bytes=records)}
    return {
        "shards": devices.for_many_runs(runs, record_bytes=records),
        "sequential_runs": devices.sequential_runs(4 * spec.cohort_size * step_numbers(experiment)),
    }


def sharing_note(experiment: Experiment) -> str:
    """What somebody who shares this run among processes should know; empty where all is well."""
    flops = _round_flops(experiment)
    if distributed.count() == 1 or devices.worth_sharing(flops):
        return ""
    return (
        f"a round of this run has about {flops:.0e} operations: its {distributed.count()} processes wait for each "
        "other longer than they compute, and one alone is quicker"
    )


def _refuse_processes(experiment: Experiment) -> None:
    if distributed.count() == 1:
        return
    spec = experiment.spec
    if spec.source_of_randomness == "os":
        what = "randomness='os': the server's noise must not differ from process to process"
    elif experiment.dataset.streamed:
        what = "streamed records: each would read its own (data.stream='no' holds them in memory)"
    elif spec.secagg.noise == "discrete":
        what = "secagg.noise='discrete': such noise is added on one host"
    elif spec.aggregation == "real":
        what = "secagg.mode='real': the protocol runs on one host ('ideal' gives the same sums)"
    else:
        what = f"secagg.modulus_bits={spec.secagg.modulus_bits}: such sums stay on one host (32 can be shared)"
    raise SpecError(f"{distributed.count()} processes cannot share {what}; use one process")


def step_numbers(experiment: Experiment) -> int:
    """Numbers that one client works on in a local step: its model and its batch."""
    return experiment.num_params + _batch(experiment) * int(np.prod(experiment.problem.x.shape[1:]))


def _batch(experiment: Experiment) -> int:
    """Records in a batch."""
    return (
        int(experiment.partition.size.max())
        if experiment.spec.batch_sampling == "full"
        else experiment.spec.batch_size
    )


def _round_flops(experiment: Experiment) -> float:
    return (
        6.0
        * experiment.num_params
        * _batch(experiment)
        * experiment.spec.local_steps
        * experiment.spec.cohort_size
    )


def engine(experiment: Experiment, simulation: simulate.Simulation) -> simulate.Simulation | streaming.Streamed:
    """What makes the experiment's rounds: the simulation itself, or one that reads its records as it goes."""
    if not experiment.dataset.streamed:
        return simulation
    return streaming.Streamed(
        simulation, experiment.problem, experiment.cohorts, _held(experiment, simulation.shards)
    )


def _held(experiment: Experiment, shards: Shards) -> streaming.Room:
    """How many streamed records are in memory at a time; refuses where a round has more."""
    sizes, memory = experiment.partition.size, streaming.GB * experiment.spec.data.stream_memory
    features = experiment.problem.x.shape[1]
    at, most = streaming.most_in_a_round(experiment.cohorts, sizes)
    taking_part = np.unique(np.concatenate(experiment.cohorts))
    held = streaming.room(
        memory,
        features=features,
        shards=shards,
        wanted=int(sizes[taking_part].sum(dtype=np.int64)),
        scored=max(len(experiment.partition.order), len(experiment.problem.test_rows[0])),
    )
    if held.rows >= most:
        return held
    needed = streaming.memory_for(most, features=features, shards=shards) / streaming.GB
    fixes = [f"raise it to {math.ceil(needed * 100) / 100:g}", "lower cohort_size"]
    if experiment.spec.method_options.get("first_round") == "all" and at == 0:
        fixes[1] = "set method_options.first_round='cohort' (round 0 takes everyone)"
    raise SpecError(
        f"data.stream_memory={experiment.spec.data.stream_memory:g} (GB) has room for {held.rows:,} records in a "
        f"block, but round {at} takes {len(experiment.cohorts[at]):,} clients with {most:,}: {' or '.join(fixes)}"
    )


def compiled_hyper(experiment: Experiment) -> dict[str, Any]:
    """The method's values as the compiled rounds take them: without the noise that is added on the integers."""
    hyper = dict(experiment.prepared.hyper)
    if experiment.spec.secagg.noise == "discrete":
        name = experiment.plan.upload_noise
        hyper[name] = np.zeros_like(np.asarray(hyper[name]))
    return hyper


def designs(experiments: Sequence[Experiment]) -> list[np.ndarray] | None:
    """The participation designs of the runs, or None where cohorts are drawn as they go."""
    made = [experiment.plan.design for experiment in experiments if experiment.plan.design is not None]
    return made or None


# What processes that share a run must have alike


def facts(experiment: Experiment) -> dict[str, str]:
    """What every process that shares a run must have alike, by name."""
    return {
        **surroundings(experiment.spec),
        "the data": experiment.data_digest[:16],
        "noise, rates and clips": value_digest(experiment)[:12],
    }


def surroundings(spec: Spec) -> dict[str, str]:
    """Versions, the kind of device, and the method where it is a file."""
    versions = devices.versions()
    found = {name: versions[name] for name in ("dither", "jax", "numpy")} | {"its device": devices.device_kind()}
    if Path(spec.method).is_file():
        found["the method's file"] = hashlib.sha256(Path(spec.method).read_bytes()).hexdigest()[:12]
    return found


def value_digest(experiment: Experiment) -> str:
    """SHA-256 of the values that the compiled rounds take."""
    digest = hashlib.sha256()
    for name, value in sorted(compiled_hyper(experiment).items()):
        digest.update(name.encode() + np.asarray(value, np.float64).tobytes())
    return digest.hexdigest()


def origin(experiment: Experiment, begun: Mapping[str, Any]) -> str:
    """SHA-256 of all that the bits of a seeded run depend on: spec and seed, records, code, versions, processor,
    settings of the compiler, devices. What has one origin releases the same bits; whatever may move a bit makes
    another. `begun` is the run's provenance."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        code.update(path.read_bytes())
    about = {
        **facts(experiment),
        "spec": experiment.spec.digest(),
        "records": [experiment.data_digest, experiment.dataset.streamed],
        "code": code.hexdigest(),
        "python": platform.python_version(),
        "device": devices.device(),
        "processor": [platform.machine(), devices.cores(), *sorted(_processor())],
        "compiler": [os.environ.get("XLA_FLAGS", ""), repr(sorted(jax.config.values.items()))],
        "devices": [begun.get("devices"), distributed.count()],
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _processor() -> set[str]:
    """The processor's name and what it can do: compiled programs depend on both."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {platform.processor()}
    return {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
