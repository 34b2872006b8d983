"""What the command line and a Python user share: train a spec, load a trained run.

run = dither.run("secure-fedavg", values={"num_rounds": 50}, out="runs/first")
run.summary["test_accuracy"]
dither.load("runs/first").predict(table)
"""

from __future__ import annotations

import hashlib
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dither
from dither import data, models, plots, proofs, runs
from dither.core import Claim, Params, Prepared
from dither.engines import cohorts, simulate
from dither.errors import BudgetExhausted, ClientRefused, DataError, RunExists
from dither.spec import Spec, method, prepare
from dither.spending import Ledger, Spending, data_id

CHECKPOINT_SECONDS = 5.0


@dataclass(frozen=True)
class Task:
    """A spec brought to life: data, who holds it, the model and the method."""

    spec: Spec
    dataset: data.Dataset
    federation: data.Federation
    problem: simulate.Problem
    model: models.Model
    prepared: Prepared
    num_params: int
    cohorts: list[np.ndarray]  # who takes part in each round


@dataclass(frozen=True)
class Run:
    """A trained run: its folder, spec, metrics, summary, and the model."""

    folder: Path
    spec: Spec
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    model: models.Model
    params: Params
    classes: tuple[str, ...]
    schema: data.Schema | None

    def predict_proba(self, features: Any) -> np.ndarray:
        """Class probabilities `[n, classes]` of an encoded array, a data frame or a file."""
        return np.asarray(models.probabilities(self._scores(features)))

    def predict(self, features: Any) -> np.ndarray:
        """The class name of each record of an encoded array, a data frame or a file (CSV, Parquet, npz)."""
        return np.asarray(self.classes)[np.asarray(models.predict(self._scores(features)))]

    def evaluate(self, path: str | Path) -> dict[str, float]:
        """Accuracy and loss on a file with labels."""
        encoded = self._encode(path, labels="required")
        if encoded.y is None:
            raise DataError(f"{str(path)!r} has no labels to evaluate on")
        scores = self.model.apply(self.params, self._check_width(encoded.x))
        right = np.asarray(models.predict(scores)) == encoded.y
        return {
            "records": len(encoded.y),
            "accuracy": float(np.mean(right)),
            "loss": float(np.mean(np.asarray(models.score_losses(scores, encoded.y)))),
        }

    def _scores(self, features: Any) -> Any:
        if isinstance(features, np.ndarray | list):
            x = np.asarray(features, np.float32)
        else:
            x = self._encode(features, labels="ignore").x
        return self.model.apply(self.params, self._check_width(x))

    def _encode(self, features: Any, *, labels: str) -> data.Encoded:
        how = (self.spec.data.encoding, self.spec.data.features)
        if not isinstance(features, str | Path):
            if self.schema is None:
                raise DataError("this run has no schema for tables; give an array of encoded features")
            return self.schema.encode(features, *how, labels=labels)
        if Path(features).suffix == ".npz":
            return data.read_arrays(features, classes=self.classes, labels=labels)
        if self.schema is None:
            raise DataError(f"this run was trained on arrays; give a .npz file instead of {str(features)!r}")
        return data.encode_features(self.schema, features, *how, labels=labels)

    def _check_width(self, x: np.ndarray) -> np.ndarray:
        wanted = int(self.summary["num_features"])
        if x.ndim != 2 or x.shape[1] != wanted:
            raise DataError(f"the data has shape {x.shape}, the model takes {wanted} features a record")
        return x


def build_task(spec: Spec, *, data_dir: str | Path | None = None, dataset: data.Dataset | None = None) -> Task:
    """Load the data (unless given), deal it out, and make model and method ready."""
    if dataset is None:
        dataset = load_data(spec, data_dir=data_dir)
    federation, problem = deal(spec, dataset)
    model = models.make(
        spec.model.name,
        num_features=dataset.x_train.shape[1],
        num_classes=len(dataset.classes),
        hidden=spec.model.hidden,
        image_shape=dataset.image_shape,
    )
    num_params = models.count_params(jax.eval_shape(model.init, jax.random.key(0)))
    prepared = _prepared(spec, model, federation, problem, num_params)
    num_rounds = min(prepared.num_rounds or spec.num_rounds, spec.num_rounds)
    who = cohorts.planned(
        spec.seed,
        num_clients=len(federation.size),
        cohort_size_at=prepared.cohort_size_at,
        design=prepared.cohorts,
        num_rounds=num_rounds,
    )
    task = Task(spec, dataset, federation, problem, model, prepared, num_params, who)
    if spec.privacy.noise != "proven" or math.isinf(spec.privacy.epsilon):
        return task
    calibrated = proofs.calibrated(
        prepared,
        federation.size,
        who,
        circumstances(task),
        epsilon=spec.privacy.epsilon,
        delta=spec.privacy.delta,
        view=spec.privacy.view,
        adjacency=spec.privacy.adjacency,
        unit=spec.privacy.unit,
    )
    return replace(task, prepared=calibrated)


def circumstances(task: Task) -> proofs.Circumstances:
    """The public facts of a run that proofs need."""
    spec, prepared = task.spec, task.prepared
    not_covered = [note for note in task.dataset.notes if "not covered" in note]
    not_covered += [caveat for caveat in prepared.caveats if "not covered" in caveat]
    if spec.data.path:
        not_covered.append("accuracy and loss shown are measured on records without noise")
        if spec.compare:
            not_covered.append("the accuracy without noise comes from a run without any privacy")
    convex = task.model.convex and len(task.dataset.classes) == 2
    return proofs.Circumstances(
        cohort_size=spec.cohort_size,
        num_rounds=len(task.cohorts),
        colluders=spec.privacy.colluders,
        convex=convex,
        step_smoothness=_step_smoothness(task) if convex else None,
        client_state=prepared.client_state,
        own_epochs=prepared.own_epochs,
        exposures=prepared.exposures,
        noise_ratio=proofs.noise_ratio(
            prepared.build(prepared.hyper),
            task.federation.size,
            np.ones(len(task.federation.size)) if prepared.weights is None else prepared.weights,
        ),
        per_client=prepared.per_client,
        assumed=prepared.assumed,
        not_covered=tuple(not_covered),
    )


def _step_smoothness(task: Task) -> float | None:
    """Learning rate times a bound on the smoothness of any client's loss, from public bounds alone: R²/4 for
    one sigmoid output, R²/2 for two softmax outputs (G7b), R the largest norm of (record, 1)."""
    spec, dataset = task.spec, task.dataset
    if dataset.schema is not None:
        squared = dataset.schema.squared_norm_bound(spec.data.encoding, spec.data.features)
    elif dataset.image_shape and not spec.data.path:
        squared = float(dataset.x_train.shape[1])  # every pixel lies in [0, 1]
    else:
        return None
    curvature = (squared + 1) / (4 if task.model.name == "logistic" else 2)
    return spec.client_lr * (curvature + 2 * spec.model.l2)


def proven(task: Task, rounds: int | None = None) -> list[dict[str, Any]]:
    """The table of proven ε after the first `rounds` rounds (all of them by default)."""
    return proofs.table(_classes(task, rounds), task.spec.privacy.delta, circumstances(task))


def accounted(spec: Spec, *, data_dir: str | Path | None = None, every_recipe: bool = False) -> dict[str, Any]:
    """Claimed and proven ε of a spec, without running it; with `every_recipe` also each bound that was tried."""
    task = build_task(spec, data_dir=data_dir)
    tried = {}
    if every_recipe:
        tried["tried"] = proofs.tried(_classes(task, None), spec.privacy.delta, circumstances(task))
    return {
        **tried,
        "method": spec.method,
        "claimed": claimed(task.prepared.claim),
        "proven": proven(task),
        "attacked": None,
        "why": method(spec.method).why,
    }


def proven_so_far(task: Task, rounds: int) -> float:
    """Proven ε of the first rounds for the spec's own view and adjacency."""
    privacy = task.spec.privacy
    return proofs.worst(
        _classes(task, rounds),
        privacy.delta,
        circumstances(task),
        view=privacy.view,
        adjacency=privacy.adjacency,
        unit="run",
    )


def _classes(task: Task, rounds: int | None) -> list[proofs.Clients]:
    prepared = task.prepared
    releases = prepared.build(prepared.hyper).releases
    return proofs.classes(
        releases, task.federation.size, task.cohorts[: len(task.cohorts) if rounds is None else rounds]
    )


def _prepared(
    spec: Spec, model: models.Model, federation: data.Federation, problem: simulate.Problem, num_params: int
) -> Prepared:
    """The spec's method. NbAFL's param_clip = 0 asks for the median parameter norm of a run without clip and
    noise, which is itself a look at private data (errata N7, G9)."""
    shape: dict[str, Any] = {"client_sizes": federation.size, "num_params": num_params}
    metric = method(spec.method).pilot_metric
    if not metric or spec.method_options["param_clip"]:
        return prepare(spec, model, **shape)
    pilot = prepare(spec.with_values({"privacy.noise": "none", "method_options.param_clip": 1e9}), model, **shape)
    history = simulate.simulate(
        pilot.build,
        model,
        problem,
        num_rounds=spec.num_rounds,
        cohort_size=pilot.cohort_size_at,
        seeds=[spec.seed],
        hyper={name: np.asarray(value)[None] for name, value in pilot.hyper.items()},
        eval_every=1,
    ).history
    norm = float(np.median([entry.metrics[metric][0] for entry in history]))
    prepared = prepare(spec.with_values({"method_options.param_clip": norm}), model, **shape)
    caveat = f"not covered: param_clip = {norm:.4g} is the median norm of a non-private pilot (errata N7)"
    return prepared._replace(caveats=(*prepared.caveats, caveat))


def load_data(spec: Spec, *, data_dir: str | Path | None = None) -> data.Dataset:
    """The spec's data set, encoded."""
    d = spec.data
    dataset = data.load(
        "" if d.path else d.name,
        path=d.path,
        test_path=d.test_path,
        label=d.label,
        schema=d.schema,
        encoding=d.encoding,
        features=d.features,
        data_dir=data_dir,
        test_fraction=d.test_fraction,
        group_column=d.column if d.partition == "column" else "",
        seed=spec.seed,
    )
    return data.pool(dataset) if d.split == "per-client" else dataset


def deal(spec: Spec, dataset: data.Dataset) -> tuple[data.Federation, simulate.Problem]:
    """Who holds which records, and what the model is scored on."""
    d = spec.data
    everything = data.partition(
        dataset,
        kind=d.partition,
        num_clients=spec.num_clients,
        seed=spec.seed,
        similarity=d.similarity,
        alpha=d.alpha,
        groups=dataset.groups,
        records_per_client=d.records_per_client,
    )
    if d.split == "given":
        return everything, simulate.problem(
            dataset.x_train, dataset.y_train, everything, dataset.x_test, dataset.y_test
        )
    # Each client keeps 80% for training; accuracy is the mean over the clients' own test records.
    train, test, _ = data.per_client_split(everything, fractions=(0.8, 0.1, 0.1), seed=spec.seed)
    weights = np.repeat(1.0 / (len(test.size) * np.maximum(test.size, 1)), test.size)
    return train, simulate.Problem(dataset.x_train, dataset.y_train, [train], [test.order], [weights])


def run(
    spec: Spec | str | Path | Mapping[str, Any],
    *,
    values: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    data_dir: str | Path | None = None,
    ledger: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    on_start: Callable[[Task, Path, int], None] | None = None,
    on_evaluation: Callable[[dict[str, Any]], None] | None = None,
) -> Run:
    """Train a spec (a preset's name, a TOML file, a mapping or a `Spec`) and leave a run folder.

    `values` are dotted keys put on top of the spec. `resume` continues a folder that was interrupted: the
    outcome is bit for bit that of an uninterrupted run on the same device and versions.

    Your own data is always charged to a ledger (the default one, or `ledger`), the catalogue's sets only when
    `ledger` is given. Where a budget ends the run early, `summary["stopped"]` says so.
    """
    spec = Spec.from_any(spec).with_values(values or {})
    if resume is None:
        path = Path(out) if out is not None else default_folder(spec)
        refuse_taken(path)
    else:
        _check_spec(runs.RunFolder.open(resume), spec)
        finished = runs.RunFolder.open(resume).summary()
        if finished is not None and "stopped" not in finished:
            return load(resume)
    task = build_task(spec, data_dir=data_dir)
    if resume is None:
        folder = runs.RunFolder.create(path, spec, provenance(task))
        if task.dataset.schema is not None:
            task.dataset.schema.save(folder.path / "schema.toml")
    else:
        folder = runs.RunFolder.open(resume)
    account = spending(task, folder, ledger)
    return train(task, folder, checkpoint_seconds, on_start, on_evaluation, account)


def spending(task: Task, folder: runs.RunFolder, ledger: str | Path | None) -> Spending | None:
    """The run's account in a ledger, or None for a set of the catalogue without one."""
    spec = task.spec
    if ledger is None and not spec.data.path:
        return None
    # The run folder keeps an anchor: a ledger that is rolled back later no longer agrees with it.
    book = Ledger(ledger or Ledger.default_path(), anchor=folder.path / "ledger-anchor.json")
    own_rows = spec.data.partition == "column"
    return Spending(
        book,
        run=folder.run_id(),
        dataset=data_id(book, path=spec.data.path, name=spec.data.name),
        releases=task.prepared.build(task.prepared.hyper).releases,
        sizes=task.federation.size,
        cohorts=task.cohorts,
        clients=task.federation.names if own_rows else None,
        facts=proofs.facts(circumstances(task)),
        replay=spec.randomness == "seeded",
    )


def resume(path: str | Path, **arguments: Any) -> Run:
    """Continue an interrupted run folder with its own spec."""
    return run(runs.RunFolder.open(path).spec(), resume=path, **arguments)


def refuse_taken(path: Path) -> None:
    """Say at once, before any data is loaded, that a folder is taken."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunExists(f"{str(path)!r} already exists; give another --out, or continue it with --resume {path}")


def train(
    task: Task,
    folder: runs.RunFolder,
    checkpoint_seconds: float,
    on_start: Callable[[Task, Path, int], None] | None,
    on_evaluation: Callable[[dict[str, Any]], None] | None,
    account: Spending | None = None,
) -> Run:
    """Rounds from the newest checkpoint (or from the start) to the end; then model, summary and plot."""
    spec, began = task.spec, time.perf_counter()
    digest = data_digest(task)
    simulation = simulate.Simulation(
        task.model,
        task.prepared.build,
        num_clients=len(task.federation.size),
        cohort_size_at=task.prepared.cohort_size_at,
        randomness=spec.randomness,
    )
    inputs = simulation.inputs(
        task.problem,
        seeds=[spec.seed],
        hyper={name: np.asarray(value)[None] for name, value in task.prepared.hyper.items()},
        cohorts=_designs([task]),
    )
    state, done, seconds_before = simulation.start(inputs), 0, 0.0
    checkpoint = folder.load_checkpoint()
    folder.clear_leftovers()
    if checkpoint is not None:
        _check_belongs(checkpoint, spec, digest, folder)
        if spec.randomness == "os" and spec.batch_sampling == "shuffled":
            raise RunExists(
                f"{str(folder.path)!r} cannot be resumed: its shuffled epochs came from randomness='os', which is "
                "never kept, and a new order could use a record twice in one epoch; start a new run"
            )
        state, done = _restore(state, checkpoint.leaves), checkpoint.round
        folder.drop_metrics_after(done)
        rows = folder.metrics()
        seconds_before = float(rows[-1]["seconds"]) if rows else 0.0
    else:
        folder.drop_metrics_after(0)
    if on_start:
        on_start(task, folder.path, done)

    saved = time.perf_counter()
    num_rounds = planned_rounds(task)
    stopped = ""
    for start, end in simulate.chunks(done, num_rounds, spec.eval_every):
        stop = end
        if account is not None:
            try:
                stop = account.pay(start, end)
            except BudgetExhausted as refusal:
                if start == 0:
                    folder.discard()
                    raise
                stopped = str(refusal)
                break
        state = simulation.advance(state, inputs, start, stop)
        scores = {name: float(value[0]) for name, value in simulation.evaluate(state, inputs).items()}
        state = simulate.reset_metrics(state)
        _check_refused(state, stop)
        now = time.perf_counter()
        row = {"round": stop, **scores, "seconds": round(seconds_before + now - began, 3)}
        folder.append_metrics(row)
        if stop == num_rounds or stop < end or now - saved >= checkpoint_seconds:
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
            folder.save_checkpoint(runs.Checkpoint(stop, leaves, spec.digest(), digest))
            saved = time.perf_counter()
        if on_evaluation:
            on_evaluation(row)
        if stop < end:
            stopped = f"the privacy budget ends after round {stop} of {num_rounds}"
            break

    task = replace(task, cohorts=task.cohorts[: folder.metrics()[-1]["round"]])
    params = jax.tree.map(lambda leaf: leaf[0], simulation.params(state, inputs))
    rows = folder.metrics()
    folder.save_model(named_leaves(params))
    summary = summarise(task, rows, np.asarray(state.participation)[0])
    if stopped:
        summary["stopped"] = stopped
        summary["epsilon"]["claimed"] = claimed(_claim_after(task, rows[-1]["round"]))
    if account is not None:
        summary["ledger"] = {"file": str(account.ledger.path), "dataset": account.dataset}
    if spec.compare:
        summary["test_accuracy_without_noise"] = without_noise(task)
    plots.draw_run(rows, folder.path / "plot.png", title=_title(spec), subtitle=_subtitle(task))
    folder.save_summary(summary)
    return Run(folder.path, spec, summary, rows, task.model, params, task.dataset.classes, task.dataset.schema)


def load(path: str | Path) -> Run:
    """A trained run, ready to predict."""
    folder = runs.RunFolder.open(path)
    leaves, summary, spec = folder.load_model(), folder.summary(), folder.spec()
    if summary is None:
        raise RunExists(f"{str(path)!r} is not complete; finish it with `dither run --resume {path}`")
    model = models.make(
        spec.model.name,
        num_features=summary["num_features"],
        num_classes=len(summary["classes"]),
        hidden=spec.model.hidden,
        image_shape=summary["image_shape"],
    )
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    paths = jax.tree_util.tree_flatten_with_path(shapes)
    params = jax.tree.unflatten(paths[1], [leaves[_leaf_name(where)] for where, _ in paths[0]])
    schema_path = folder.path / "schema.toml"
    schema = data.Schema.load(schema_path) if schema_path.is_file() else None
    return Run(folder.path, spec, summary, folder.metrics(), model, params, tuple(summary["classes"]), schema)


def _claim_after(task: Task, rounds: int) -> Claim:
    """The paper's ε for the rounds that were made, at the noise that was used."""
    fewer = replace(
        task.spec.privacy, noise_decay_start=min(task.spec.privacy.noise_decay_start, rounds), noise="none"
    )
    spec = replace(task.spec, num_rounds=rounds, privacy=fewer)
    again = prepare(spec, task.model, client_sizes=task.federation.size, num_params=task.num_params)
    return again.reclaim(task.prepared.hyper) if again.reclaim else task.prepared.claim


def without_noise(task: Task) -> float:
    """Test accuracy of the same run with its noise set to 0: what the noise costs."""
    prepared = task.prepared
    hyper = {
        name: np.zeros_like(np.asarray(value)) if name in prepared.noise_names else np.asarray(value)
        for name, value in prepared.hyper.items()
    }
    result = simulate.simulate(
        prepared.build,
        task.model,
        task.problem,
        num_rounds=planned_rounds(task),
        cohort_size=prepared.cohort_size_at,
        seeds=[task.spec.seed],
        hyper={name: value[None] for name, value in hyper.items()},
        cohorts=_designs([task]),
        eval_every=planned_rounds(task),
    )
    return float(result.history[-1].metrics["test_accuracy"][0])


def planned_rounds(task: Task) -> int:
    """Rounds the run will make: the spec's, or fewer where the method's budget is spent before."""
    return len(task.cohorts)


# Sweeps


@dataclass(frozen=True)
class Outcome:
    """One run of a sweep: no folder, only what was measured."""

    spec: Spec
    metrics: list[dict[str, Any]]
    claim: Claim
    participation: np.ndarray


# Keys that reach the compiled program as values: specs that differ only in these are one program.
TRACED = (
    "seed",
    "client_lr",
    "lr_decay",
    "server_lr",
    "privacy.epsilon",
    "privacy.delta",
    "privacy.clip_norm",
)


def sweep(
    specs: Sequence[Spec],
    *,
    data_dir: str | Path | None = None,
    dataset: data.Dataset | None = None,
    on_evaluation: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """Many runs, as few programs: specs that differ only in seed, noise, rates and clip train side by side.

    `dataset` is used instead of loading one, for all specs. Results come in the order of `specs`;
    `on_evaluation(done, total)` counts rounds over all runs.
    """
    groups: dict[str, list[int]] = {}
    for number, spec in enumerate(specs):
        groups.setdefault(_program(spec), []).append(number)
    outcomes: dict[int, Outcome] = {}
    total, finished = sum(spec.num_rounds for spec in specs), 0
    for members in groups.values():
        tasks = [build_task(specs[number], data_dir=data_dir, dataset=dataset) for number in members]
        first = tasks[0]
        hyper = {
            name: np.stack([np.asarray(t.prepared.hyper[name]) for t in tasks]) for name in first.prepared.hyper
        }

        def count(evaluation: simulate.Evaluation, base: int = finished, runs: int = len(tasks)) -> None:
            if on_evaluation:
                on_evaluation(base + evaluation.round * runs, total)

        result = simulate.simulate(
            first.prepared.build,
            first.model,
            _joined([task.problem for task in tasks]),
            num_rounds=planned_rounds(first),
            cohort_size=first.prepared.cohort_size_at,
            seeds=[task.spec.seed for task in tasks],
            hyper=hyper,
            cohorts=_designs(tasks),
            eval_every=first.spec.eval_every,
            randomness=first.spec.randomness,
            on_evaluation=count,
        )
        finished += len(tasks) * first.spec.num_rounds
        for i, (number, task) in enumerate(zip(members, tasks, strict=True)):
            rows = [
                {"round": entry.round, **{name: float(value[i]) for name, value in entry.metrics.items()}}
                for entry in result.history
            ]
            outcomes[number] = Outcome(task.spec, rows, task.prepared.claim, result.participation[i])
    return [outcomes[number] for number in range(len(specs))]


def _program(spec: Spec) -> str:
    """What two specs must share to be one compiled program."""
    plain = spec.with_values({key: Spec.default(key) for key in TRACED})
    return plain.digest()


def _designs(tasks: Sequence[Task]) -> list[np.ndarray] | None:
    """The participation designs of the runs, or None where cohorts are drawn as they go."""
    designs = [task.prepared.cohorts for task in tasks if task.prepared.cohorts is not None]
    return designs or None


def _joined(problems: Sequence[simulate.Problem]) -> simulate.Problem:
    """One problem for many runs: the same records, each run with its own dealing."""
    return problems[0]._replace(
        federations=[problem.federations[0] for problem in problems],
        test_rows=[problem.test_rows[0] for problem in problems],
        test_weights=[problem.test_weights[0] for problem in problems],
    )


# Pieces


def summarise(task: Task, rows: list[dict[str, Any]], participation: np.ndarray) -> dict[str, Any]:
    """summary.json."""
    last, spec = rows[-1], task.spec
    counts = np.sort(participation)
    return {
        "method": spec.method,
        "data": spec.data.path or spec.data.name,
        "test_accuracy": last["test_accuracy"],
        "loss": last["loss"],
        "train_loss": last["train_loss"],
        "rounds": last["round"],
        "seconds": last["seconds"],
        "epsilon": {"claimed": claimed(task.prepared.claim), "proven": proven(task), "attacked": None},
        "why": method(spec.method).why,
        "participation": {
            "min": int(counts[0]),
            "median": float(np.median(counts)),
            "max": int(counts[-1]),
        },
        "randomness": spec.randomness,
        "notes": [*task.dataset.notes, *task.prepared.caveats, *_view_caveat(spec)],
        "num_clients": len(task.federation.size),
        "num_features": int(task.dataset.x_train.shape[1]),
        "num_params": task.num_params,
        "image_shape": list(task.dataset.image_shape),
        "classes": list(task.dataset.classes),
    }


def _view_caveat(spec: Spec) -> tuple[str, ...]:
    if spec.privacy.view != "sum" or spec.secagg.mode != "off":
        return ()
    return (
        "privacy.view='sum' holds under secure aggregation, which is off: this server would see single uploads",
    )


def claimed(claim: Claim) -> dict[str, Any]:
    """A claim as it stands in summary.json."""
    return {
        "value": claim.value,
        "unit": claim.unit,
        "delta": claim.delta,
        "source": claim.source,
        "adjacency": claim.adjacency,
        "conditions": [{"condition": text, "holds": bool(holds)} for text, holds in claim.conditions],
    }


def provenance(task: Task) -> dict[str, Any]:
    """Where a run was made: enough to make it again."""
    device = jax.devices()[0]
    return {
        "dither": dither.__version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": f"{device.platform}: {device.device_kind}",
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "data_digest": data_digest(task),
        "spec_digest": task.spec.digest(),
        "randomness": task.spec.randomness,
    }


def default_folder(spec: Spec) -> Path:
    """runs/METHOD-DATA-TIME, made distinct when two start in the same second."""
    stem = Path(spec.data.path).stem if spec.data.path else spec.data.name
    base = Path("runs") / f"{Path(spec.method).stem}-{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    path, number = base, 2
    while path.exists():
        path, number = base.with_name(f"{base.name}-{number}"), number + 1
    return path


def data_digest(task: Task) -> str:
    """SHA-256 of the encoded records and of who holds them."""
    digest = hashlib.sha256()
    for array in (task.problem.x, task.problem.y, task.federation.order, task.federation.size):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def named_leaves(params: Params) -> dict[str, np.ndarray]:
    """Leaves by the path in the tree: 'dense0/w'."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(params)
    return {_leaf_name(where): np.asarray(leaf) for where, leaf in pairs}


def _leaf_name(where: tuple[Any, ...]) -> str:
    return "/".join(str(getattr(entry, "key", getattr(entry, "idx", entry))) for entry in where)


def _restore(like: simulate.State, leaves: list[np.ndarray]) -> simulate.State:
    own, structure = jax.tree.flatten(like)
    if [leaf.shape for leaf in own] != [leaf.shape for leaf in leaves]:
        raise RunExists("the checkpoint's arrays do not have the shapes of this spec; start a new run")
    return jax.tree.unflatten(
        structure, [jax.numpy.asarray(saved, leaf.dtype) for saved, leaf in zip(leaves, own, strict=True)]
    )


def _check_belongs(checkpoint: runs.Checkpoint, spec: Spec, digest: str, folder: runs.RunFolder) -> None:
    _check_spec(folder, spec, checkpoint.spec_digest)
    if checkpoint.data_digest != digest:
        raise RunExists(
            f"the checkpoint in {str(folder.path)!r} was made with other data "
            f"({checkpoint.data_digest[:12]}, now {digest[:12]}); restore the data, or start a new run"
        )


def _check_spec(folder: runs.RunFolder, spec: Spec, digest: str = "") -> None:
    digest = digest or folder.spec().digest()
    if digest != spec.digest():
        raise RunExists(
            f"the checkpoint in {str(folder.path)!r} is from another spec ({digest[:12]}, this one is "
            f"{spec.digest()[:12]}); resume with the folder's own spec.toml unchanged, or start a new run"
        )


def _check_refused(state: simulate.State, round: int) -> None:
    refused = np.flatnonzero(np.asarray(state.refused)[0])
    if len(refused):
        names = ", ".join(str(number) for number in refused[:5]) + (", ..." if len(refused) > 5 else "")
        raise ClientRefused(
            f"client {names} sent an update that is not finite by round {round}; lower client_lr "
            "or the noise, or check that client's records"
        )


def _title(spec: Spec) -> str:
    return f"{spec.method} on {Path(spec.data.path).name or spec.data.name}"


def _subtitle(task: Task) -> str:
    claim, spec = task.prepared.claim, task.spec
    value = (
        "no noise"
        if np.isinf(claim.value)
        else f"claimed ε = {claim.value:.3g} per {claim.unit}, δ = {claim.delta:g}"
    )
    steps = f"{spec.local_steps} local step{'s' if spec.local_steps > 1 else ''}"
    return f"{len(task.federation.size)} clients, {spec.cohort_size} a round, {steps}; {value}"
