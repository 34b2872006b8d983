"""One run, computed from its spec: who took part when, the noise, ε by round and by client, the paper's bound.

The folder does not hold these; the accountant computes them when a page asks. A folder may come from anybody: a
method that is a Python file is not executed, a user's own table is opened only with `--own-data`, and a data set
of the catalogue is used only where it is on this machine already. A `PageRefusal` says what to do instead.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dither import accounting, data
from dither.accounting.accountant import without_rates
from dither.errors import DataError
from dither.experiment.build import Experiment, build_experiment, claim_after, planned_rounds
from dither.experiment.plan import bounds as theory
from dither.experiment.plan.bounds import estimate
from dither.experiment.plan.candidates import INTEGER_KEYS, Candidate, clip_key, first_noise
from dither.experiment.plan.records import PlanningData
from dither.methods import failing
from dither.spec import METHODS, MODELS, Spec
from dither.types import ADVERSARIES, RoundInfo
from dither.web.plan_page import bound_json
from dither.web.run_page import PageRefusal

_MAX_EPSILONS = 12
_MAX_ROUNDS, _MAX_CLIENTS = 300, 200  # of the map
_MAX_PARTICIPATIONS = 40_000
_MAX_DISTINCT = 24
_ZERO_START = ("logistic", "softmax")  # models that start at w = 0, where the loss is ln(classes)


def safe_spec(text: str, where: str, own_data: bool = False) -> Spec:
    """The spec of a run. Nothing that its folder names is executed, nor opened without `own_data`."""
    try:
        plain = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PageRefusal(f"spec.toml is not valid TOML: {error}") from error
    model = plain.get("model", {})
    ours = {
        "method": str(plain.get("method")) in METHODS,
        "model": isinstance(model, dict) and str(model.get("name", MODELS[0])) in MODELS,
    }
    for what in (name for name, known in ours.items() if not known):
        instead = "`dither account` with this folder prints its ε"
        raise PageRefusal(f"the page does not execute a {what} from a Python file; {instead}")
    source = plain.get("data", {})
    names_a_file = not isinstance(source, dict) or any(source.get(key) for key in ("path", "test_path", "schema"))
    names_a_file = names_a_file or bool(model.get("weights"))
    if names_a_file and not own_data:
        raise PageRefusal(
            "this run uses your own table, and the page opens files outside the runs folder only if it is started "
            "with --own-data; `dither account` with this folder prints its ε"
        )
    return Spec.from_toml(text, where=where)


def assemble(spec: Spec, data_dir: str | None = None) -> Experiment:
    """The spec brought to life, from data that is on this machine."""
    if spec.data.path:
        return build_experiment(spec)
    if spec.data.name not in data.entries():
        raise PageRefusal(f"{spec.data.name!r} is not in the catalogue of data sets; `dither data list` prints it")
    try:
        data.get(spec.data.name, data_dir=data_dir, download=False)
    except DataError:
        raise PageRefusal(
            f"{spec.data.name} is not on this machine, and the page downloads nothing; get it with: "
            f"dither data get {spec.data.name}"
        ) from None
    return build_experiment(spec, data_dir=data_dir)


def analysis(experiment: Experiment, rounds: Sequence[int]) -> dict[str, Any]:
    """The cohorts, the noise and ε of the completed rounds; `rounds` are those that were evaluated."""
    completed = min(max(rounds, default=0), planned_rounds(experiment))
    if completed == 0:
        raise PageRefusal("no round has been evaluated yet")
    return {
        "rounds": completed,
        "cohorts": _cohort_map(experiment, completed),
        "noise": _noise(experiment, completed),
        "epsilon": epsilon_by_round(experiment, rounds),
        "clients": _clients(experiment, completed),
    }


def epsilon_by_round(experiment: Experiment, rounds: Sequence[int]) -> dict[str, Any]:
    """Proven ε for the spec's view and adjacency after some of the evaluated rounds."""
    planned = [index for index in rounds if index <= planned_rounds(experiment)]
    count = min(len(planned), _MAX_EPSILONS)
    chosen = sorted({planned[int(i)] for i in np.linspace(0, len(planned) - 1, count)})
    values = [experiment.proven_epsilon(index) for index in chosen]
    return {
        "rounds": chosen,
        "values": values,
        "adversary": ADVERSARIES[experiment.spec.privacy.view],
        "adjacency": experiment.spec.adjacency,
    }


def _cohort_map(experiment: Experiment, completed: int) -> dict[str, Any]:
    """Who took part when: one row per client, one column per round, thinned if there are too many."""
    clients = len(experiment.partition.size)
    step = math.ceil(completed / _MAX_ROUNDS)
    shown = list(range(0, completed, step))
    rows = min(clients, _MAX_CLIENTS)
    grid = np.zeros((rows, len(shown)), int)
    for column, index in enumerate(shown):
        cohort = np.asarray(experiment.cohorts[index])
        grid[cohort[cohort < rows], column] = 1
    return {
        "clients": list(experiment.partition.names[:rows]),
        "of": clients,
        "rounds": [index + 1 for index in shown],
        "every": step,
        "took_part": grid.tolist(),
    }


def _noise(experiment: Experiment, completed: int) -> dict[str, Any]:
    """Noise and sensitivity of what the first client releases, round by round (thinned)."""
    releases = experiment.prepared.releases
    shown = sorted({int(i) for i in np.linspace(0, completed - 1, min(completed, 60))})
    size = int(experiment.partition.size[0])
    channels: dict[str, dict[str, Any]] = {}
    for index in shown:
        for release in releases(RoundInfo(index, 0, size, len(experiment.cohorts[index]))):
            entry = channels.setdefault(
                release.channel,
                {"rounds": [], "std": [], "sensitivity": [], "multiplier": [], "source": release.source},
            )
            entry["rounds"].append(index + 1)
            entry["std"].append(release.noise_std)
            entry["sensitivity"].append(release.sensitivity)
            entry["multiplier"].append(release.noise_std / release.sensitivity if release.sensitivity else None)
    return channels


def _clients(experiment: Experiment, completed: int) -> dict[str, Any] | None:
    """Each client's own proven ε, from the rounds it took part in; None if there are too many to compute."""
    if sum(len(cohort) for cohort in experiment.cohorts[:completed]) > _MAX_PARTICIPATIONS:
        return None
    accountant, privacy = experiment.accountant(), experiment.spec.privacy
    releases = accountant.releases
    by_client: list[list[Any]] = [[] for _ in experiment.partition.size]
    for index in range(completed):
        cohort = np.asarray(experiment.cohorts[index])
        for client in cohort.tolist():
            info = RoundInfo(index, client, int(experiment.partition.size[client]), len(cohort))
            seen = releases(info)
            by_client[client].append(without_rates(seen) if privacy.view == "upload" else seen)
    parts = [accounting.compress(seen) for seen in by_client]
    keys: list[Hashable] = [tuple(sorted(part, key=str)) for part in parts]
    if len(set(keys)) > _MAX_DISTINCT:
        return None
    values: dict[Hashable, float] = {(): 0.0}
    for key, part in zip(keys, parts, strict=True):
        if key not in values:
            view, adjacency = privacy.view, experiment.spec.adjacency
            row = accounting.proven(part, privacy.delta, accountant.conditions, view=view, adjacency=adjacency)
            values[key] = row.value
    return {
        "names": list(experiment.partition.names),
        "epsilon": [values[key] for key in keys],
        "participations": [len(seen) for seen in by_client],
        "records": experiment.partition.size.tolist(),
        "target": privacy.epsilon,
    }


# The convergence bound


def bound(experiment: Experiment) -> dict[str, Any]:
    """The paper's theorem at the noise that was added, round by round and term by term.

    The constants are estimated on the run's public records. The learning rate is the best one that the theorem
    allows, which need not be the run's.
    """
    spec = experiment.spec
    if spec.data.path:
        raise PageRefusal(
            "the bound's constants would have to be estimated on your own records, which no ε covers; "
            "`dither plan --proxy` estimates them on public records"
        )
    if spec.method not in theory.METHODS:
        raise PageRefusal(f"no convergence theorem for {spec.method}; there are for {', '.join(theory.METHODS)}")
    constants = estimate(spec, PlanningData(experiment.dataset, f"the records of {spec.data.name}", True))
    completed = planned_rounds(experiment)
    grid = sorted({round(x) for x in np.geomspace(1, completed, min(completed, 40))})
    smallest = int(experiment.partition.size.min())
    candidates = [_candidate(experiment, rounds) for rounds in grid]
    bounds = theory.bounds(spec, candidates, constants, smallest)
    last = {name: float(column[-1]) for name, column in bounds.values.items()}
    start = math.log(len(experiment.dataset.classes)) if spec.model.name in _ZERO_START else None
    return bound_json(bounds, grid) | {
        "least_loss": None if start is None else start - bounds.trivial,
        "failing": failing(theory.conditions(spec, candidates[-1], constants, last, smallest)),
        "rate": last.get("client_lr"),
        "run_rate": spec.client_lr,
    }


def _candidate(experiment: Experiment, rounds: int) -> Candidate:
    """The run cut at a round, as the theorems take it: at its own noise, nothing calibrated again."""
    spec = experiment.spec
    key = clip_key(spec.method)
    clip = float(experiment.prepared.hyper["param_clip"]) if spec.method == "nbafl" else spec.privacy.clip_norm
    point = {name: getattr(spec, name) for name in INTEGER_KEYS} | {key: clip, "num_rounds": rounds}
    return Candidate(
        point=point,
        spec=spec,
        noise_std=first_noise(experiment.prepared, experiment),
        claimed=claim_after(experiment, rounds),
        uploads=rounds * spec.cohort_size / len(experiment.partition.size),
        num_params=experiment.num_params,
    )


@lru_cache(maxsize=4)
def cached_experiment(text: str, where: str, data_dir: str | None, own_data: bool = False) -> Experiment:
    """`assemble` a spec's text: several questions about one run build it once."""
    return assemble(safe_spec(text, where, own_data), data_dir)
