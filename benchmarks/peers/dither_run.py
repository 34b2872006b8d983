"""Dither on the workloads, through `dither run`: ledger, metrics, checkpoints and accounting on.

    python dither_run.py A1 A32 B1 B2 C [--again]

Each run is a process, as a user starts it. The steady time is read from the run folder's metrics.jsonl, from the
first evaluation (which follows the compilation) to the last: evaluations, ledger and checkpoints between are in
it. The first round is timed from the start of the process, with an empty compilation cache and with a warm one;
--again leaves that out.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import workloads

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / "benchmarks" / ".cache"
AGAIN = workloads.flag("--again")


def run(spec: Path, *settings: str, cold: bool = False) -> dict:
    """One `dither run`; wall-clock seconds, and what its folder says."""
    dither = Path(sys.executable).with_name("dither")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        compiled = Path(scratch) / "compiled" if cold else CACHE / "compiled"
        environment = {
            **os.environ,
            "DITHER_LEDGER": str(Path(scratch) / "ledger"),
            "DITHER_STATE": str(Path(scratch) / "state"),
            "DITHER_COMPILATION_CACHE": str(compiled),
        }
        command = [str(dither), "run", str(spec), "--out", str(out)]
        for setting in settings:
            command += ["--set", setting]
        began = time.time()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        metrics, first_row = out / "metrics.jsonl", None
        while process.poll() is None:
            if first_row is None and metrics.exists() and metrics.stat().st_size:
                first_row = time.time() - began
            time.sleep(0.005 if first_row is None else 0.05)
        wall = time.time() - began
        if process.returncode:
            raise SystemExit(f"dither run {spec} failed:\n{process.stdout.read()}")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        exact = [json.loads(line) for line in (out / "local" / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((out / "summary.json").read_text())
        provenance = json.loads((out / "provenance.json").read_text())
    files = {"rows": rows, "exact": exact, "summary": summary, "provenance": provenance}
    return {"wall": wall, "first_row": first_row, **files}


def prepare(todo: list[workloads.Workload]) -> None:
    """The workloads' records as files."""
    (CACHE / "data").mkdir(parents=True, exist_ok=True)
    for w in todo:
        data = CACHE / "data" / f"{w.name}.npz"
        if not data.exists():
            workloads.write(w, str(data))


def timed(w: workloads.Workload, seconds: float) -> None:
    del seconds  # the spec says how many rounds
    prepare([w])
    spec = HERE.parent / "specs" / f"{w.name}.toml"
    start_up: dict[str, float] = {}
    if not AGAIN:
        one_round = ("num_rounds=1", "eval_every=1")
        start_up["first_round_s"] = run(spec, *one_round, cold=True)["first_row"]
        check = run(spec, f"num_rounds={w.check_rounds}", f"eval_every={w.check_rounds}")
        start_up["check_loss"] = check["exact"][-1]["train_loss"]
        start_up["first_round_warm_s"] = run(spec, *one_round)["first_row"]
    found = run(spec)
    first, last = found["rows"][0], found["rows"][-1]
    row = {
        "peer": "dither",
        "workload": w.name,
        **start_up,
        "seconds_per_100": 100 * (last["seconds"] - first["seconds"]) / (last["round"] - first["round"]),
        "rounds_timed": last["round"] - first["round"],
        "wall_s": found["wall"],
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
        "versions": {name: found["provenance"][name] for name in ("dither", "python", "jax")},
    }
    print("RESULT " + json.dumps(row), flush=True)


if __name__ == "__main__":
    workloads.each(timed)
