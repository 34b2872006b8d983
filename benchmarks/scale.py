"""How Dither's own cost grows: sweeps as one program, cohort, local steps, clients that are not chosen, start-up.

    python benchmarks/scale.py                       # or: make bench-scale
    python benchmarks/scale.py sweep start-up        # some sections
    python benchmarks/scale.py --show                # the stored table again

Each measurement runs in a process of its own. Results go to benchmarks/results/scale.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

import dither_run  # noqa: E402
import numpy as np  # noqa: E402
import workloads  # noqa: E402

STORED = HERE / "results" / "scale.json"
PRESETS = ("secure-fedavg", "nbafl", "dp-scaffold", "cpfed", "concentrated")
EPSILONS, SEEDS = (4.0, 8.0, 16.0, 32.0, 64.0), range(5)


# What a process of its own measures


def steady(spec: Any, dataset: Any, *, runs: int = 1, seconds: float = 2.0) -> dict[str, float]:
    """Seconds of one round once compiled, of `runs` equal runs as a sweep makes them; and of the first call."""
    import jax

    from dither.experiment import build
    from dither.experiment.build import build_experiment

    experiment = build_experiment(spec, dataset=dataset)
    how = build.sharing(experiment, runs)
    simulation = build.make_simulation(experiment, **how)
    runs += -runs % how["shards"].runs  # every device gets as many, as in a sweep
    inputs = simulation.inputs(
        experiment.problem, seeds=list(range(runs)), hyper=build.hypers([experiment] * runs)
    )
    state = simulation.start(inputs)
    began = time.perf_counter()
    state = jax.block_until_ready(simulation.advance(state, inputs, 0, 1))
    first = time.perf_counter() - began
    done, count, times = 1, 1, []
    while len(times) < 5:
        began = time.perf_counter()
        state = jax.block_until_ready(simulation.advance(state, inputs, done, done + count))
        took = time.perf_counter() - began
        done += count
        if took < seconds / 10 and not times:
            count = max(count + 1, int(count * seconds / 5 / max(took, 1e-4)))  # too short to time: more rounds
            continue
        times.append(took / count)
        if sum(times) * count > 3 * seconds:
            break
    return {"first": first, "round": statistics.median(times)}


def made(w: workloads.Workload, clients: int, records: int, features: int = 0) -> Any:
    """A data set of the workload's kind for that many clients."""
    from dither.data import Dataset

    features = features or w.features
    rng = np.random.default_rng(0)
    x = rng.random((clients * records, features), dtype=np.float32)
    y = (x[:, : min(features, 50)].sum(1) * w.classes).astype(np.int32) % w.classes
    return Dataset(
        name="synthetic",
        x_train=x,
        y_train=y,
        x_test=x[:1000].copy(),
        y_test=y[:1000].copy(),
        classes=tuple(map(str, range(w.classes))),
        feature_names=tuple(f"x{i}" for i in range(features)),
        covered=True,
    )


def spec_of(name: str, **values: Any) -> Any:
    from dither.spec import Spec

    spec = Spec.from_any(HERE / "specs" / f"{name}.toml")
    return spec.with_values({"data.path": "", "data.name": "adult", "randomness": "seeded", **values})


def measure_grid(
    name: str, key: str, values: list[int], fixed: dict[str, int], clients: int, records: int
) -> None:
    w = workloads.WORKLOADS[name]
    dataset = made(w, clients, records)
    for value in values:
        settings = {
            "num_clients": clients,
            "data.records_per_client": records,
            "eval_every": 1000,
            **fixed,
            key: value,
        }
        if name[0] == "B":
            settings["batch_sampling"] = "fixed"  # one epoch would tie steps to records
        found = steady(spec_of(name, **settings), dataset)
        result(workload=name, key=key, value=value, **found)


def measure_clients(clients: int, features: int) -> None:
    w = workloads.WORKLOADS["A32"]
    before = peak()
    dataset = made(w, clients, 64, features)
    held = peak()
    settings = {"num_clients": clients, "data.records_per_client": 64, "cohort_size": 100, "num_rounds": 100}
    found = steady(spec_of("A32", **settings), dataset)
    size = dataset.x_train.nbytes / 2**20
    result(
        clients=clients, features=features, data_mb=size, before_mb=before, held_mb=held, peak_mb=peak(), **found
    )


def measure_sweep(name: str, runs: int, rounds: int) -> None:
    """A whole sweep, end to end: data, experiments, compilation, all runs."""
    from dither.data.arrays import load_npz
    from dither.experiment.sweep.batches import train_specs

    dataset = load_npz(dither_run.CACHE / "data" / f"{name}.npz")
    grid = [(e, s) for e in EPSILONS for s in SEEDS][:runs]
    specs = [
        spec_of(name, num_rounds=rounds, eval_every=rounds, seed=s, **{"privacy.epsilon": e}) for e, s in grid
    ]
    times = []
    for _ in range(2):
        began = time.perf_counter()
        outcomes = train_specs(specs, dataset=dataset)
        times.append(time.perf_counter() - began)
    loss = statistics.mean(o.metrics[-1]["train_loss"] for o in outcomes)
    result(workload=name, runs=runs, rounds=rounds, first=times[0], again=times[1], peak_mb=peak(), loss=loss)


def measure_side_by_side(name: str, runs: int) -> None:
    from dither.data.arrays import load_npz

    dataset = load_npz(dither_run.CACHE / "data" / f"{name}.npz")
    found = steady(spec_of(name), dataset, runs=runs)
    result(workload=name, runs=runs, peak_mb=peak(), **found)


def result(**values: Any) -> None:
    print("RESULT " + json.dumps(values), flush=True)


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# Sections


def apart(*arguments: Any) -> tuple[list[dict[str, Any]], float]:
    """Rows that this script prints in a process of its own, and its wall-clock seconds."""
    began = time.time()
    command = [sys.executable, __file__, "--measure", *map(str, arguments)]
    environment = {**os.environ, "DITHER_COMPILATION_CACHE": str(dither_run.CACHE / "compiled")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    rows = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    if done.returncode:
        rows.append({"error": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:300]})
    return rows, time.time() - began


def section_sweep() -> list[dict[str, Any]]:
    rows = []
    for name, rounds in (("A1", 100), ("A32", 100)):
        single, one_wall = apart("sweep", name, 1, rounds)
        many, many_wall = apart("sweep", name, 25, rounds)
        one_steady, _ = apart("side-by-side", name, 1)
        many_steady, _ = apart("side-by-side", name, 25)
        spec = HERE / "specs" / f"{name}.toml"
        settings = (f"num_rounds={rounds}", f"eval_every={rounds}")
        alone = statistics.median(dither_run.run(spec, *settings)["wall"] for _ in range(3))
        rows.append(
            {
                "workload": name,
                "one_run_round_s": one_steady[-1].get("round"),
                "25_runs_round_s": many_steady[-1].get("round"),
                "sweep_of_25_wall_s": many_wall,
                "sweep_of_1_wall_s": one_wall,
                "separate_run_wall_s": alone,
                "separate_25_wall_s (scaled from 3)": 25 * alone,
                "sweep": many,
                "single": single,
            }
        )
    return rows


def section_growth() -> list[dict[str, Any]]:
    rows = []
    rows += apart("grid", "A32", "cohort_size", "10,20,50,100", "local_steps=10", 1000, 64)[0]
    rows += apart("grid", "A32", "local_steps", "5,10,20,50", "cohort_size=50", 1000, 64)[0]
    rows += apart("grid", "B1", "cohort_size", "5,10,25,50", "local_steps=8", 50, 512)[0]
    rows += apart("grid", "B1", "local_steps", "2,5,10,20", "cohort_size=20", 50, 512)[0]
    return rows


def section_clients() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for clients, features in ((1000, 32), (10_000, 32), (100_000, 32), (1000, 113), (100_000, 113)):
        rows += [
            {"clients": clients, "features": features, **row} for row in apart("clients", clients, features)[0]
        ]
    return rows


def section_start_up() -> list[dict[str, Any]]:
    dither = str(Path(sys.executable).with_name("dither"))
    times = []
    for _ in range(7):
        began = time.time()
        subprocess.run([dither, "--help"], capture_output=True, check=True)
        times.append(time.time() - began)
    rows: list[dict[str, Any]] = [{"what": "dither --help", "seconds": statistics.median(times), "goal": 0.4}]
    for name in workloads.WORKLOADS:
        spec = HERE / "specs" / f"{name}.toml"
        settings = ("num_rounds=1", "eval_every=1")
        cold = dither_run.run(spec, *settings, cold=True)
        dither_run.run(spec, *settings)
        warm = statistics.median(dither_run.run(spec, *settings)["first_row"] for _ in range(3))
        rows.append({"what": f"{name}: first round, cold cache", "seconds": cold["first_row"]})
        rows.append({"what": f"{name}: first round, warm cache", "seconds": warm, "goal": 3.0})
    return rows


def section_presets() -> list[dict[str, Any]]:
    """What each paper's preset takes to compile, without and with the cache (`timing` in summary.json)."""
    rows = []
    for name in PRESETS:
        settings = ["num_rounds=1", "eval_every=1"]
        settings += ["privacy.noise_decay_start=1"] if name == "dp-scaffold" else []
        cold = dither_run.run(Path(name), *settings, cold=True)
        dither_run.run(Path(name), *settings)
        warm = dither_run.run(Path(name), *settings)
        compile_s, cached_s = (each["summary"]["timing"]["compile"] for each in (cold, warm))
        rows.append(
            {"preset": name, "compile_s": compile_s, "cached_s": cached_s, "first_row_s": warm["first_row"]}
        )
    return rows


SECTIONS = {
    "start-up": section_start_up,
    "presets": section_presets,
    "sweep": section_sweep,
    "growth": section_growth,
    "clients": section_clients,
}


def show(found: dict[str, Any]) -> None:
    for row in found.get("start-up", []):
        verdict = "" if "goal" not in row else f"   goal {row['goal']:g} s, {word(row['seconds'] <= row['goal'])}"
        print(f"{row['what']:32} {row['seconds']:7.2f} s{verdict}")
    for row in found.get("presets", []):
        print(f"{row['preset']:14} compiles in {row['compile_s']:.1f} s, in {row['cached_s']:.1f} s from the "
              f"cache; first row after {row['first_row_s']:.1f} s")  # fmt: skip
    for row in found.get("sweep", []):
        one, many, wall = row["one_run_round_s"], row["25_runs_round_s"], row["sweep_of_25_wall_s"]
        separate = row["separate_25_wall_s (scaled from 3)"]
        print(f"{row['workload']}: 25 runs as one program take {many / one:.1f}x one run's round (goal 25x, "
              f"{word(many <= 25 * one)}); end to end {wall:.1f} s against {separate:.0f} s of 25 separate runs, "
              f"{wall / separate:.3f} of it (goal below 0.2, {word(wall < separate / 5)})")  # fmt: skip
    seen: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in found.get("growth", []):
        if "error" in row:
            print(f"growth: {row['error']}")
            continue
        seen.setdefault((row["workload"], row["key"]), []).append(row)
    for (name, key), rows in seen.items():
        first, last = rows[0], rows[-1]
        cells = ", ".join(f"{row['value']}: {1e3 * row['round']:.3g} ms" for row in rows)
        more, cost = last["value"] / first["value"], last["round"] / first["round"]
        print(f"{name}, {key}: {cells} ({more:g}x costs {cost:.2f}x)")
    for row in found.get("clients", []):
        if "error" in row:
            print(f"{row['clients']:>7} clients, {row['features']} features: {row['error']}")
            continue
        print(f"{row['clients']:>7} clients, {row['features']} features: {1e3 * row['round']:.3g} ms a round, "
              f"peak {row['peak_mb']:.0f} MB (the records {row['data_mb']:.0f} MB)")  # fmt: skip


def word(holds: bool) -> str:
    return "met" if holds else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help=f"some of: {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--show", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.sections:
        if name not in SECTIONS:
            parser.error(f"no section {name!r}; there are {', '.join(SECTIONS)}")
    found = json.loads(STORED.read_text()) if STORED.exists() else {}
    if not arguments.show:
        dither_run.prepare(list(workloads.WORKLOADS.values()))
        for name in arguments.sections or SECTIONS:
            found[name] = SECTIONS[name]()
            STORED.parent.mkdir(exist_ok=True)
            STORED.write_text(json.dumps(found, indent=1) + "\n")
    show(found)


def measure(kind: str, *rest: str) -> None:
    if kind == "grid":
        name, key, values, fixed, clients, records = rest
        other, _, number = fixed.partition("=")
        measure_grid(
            name, key, [int(v) for v in values.split(",")], {other: int(number)}, int(clients), int(records)
        )
    elif kind == "clients":
        measure_clients(*map(int, rest))
    elif kind == "sweep":
        measure_sweep(rest[0], int(rest[1]), int(rest[2]))
    else:
        measure_side_by_side(rest[0], int(rest[1]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(*sys.argv[2:])
    else:
        main()
