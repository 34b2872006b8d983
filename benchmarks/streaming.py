"""Records on the disk: what a streamed run takes in memory and time, beside the same run in memory.

    python benchmarks/streaming.py                          # 100,000 clients x 64 records of Adult's width, 2.9 GB
    python benchmarks/streaming.py --clients 10000 --rounds 200 --dir /scratch
    python benchmarks/streaming.py --show                   # the stored table again

Makes a folder of synthetic records in pieces, and runs `dither run` on it in processes of their own: in memory,
streamed with the clients' records scattered over the file (partition "iid"), streamed with each client's records
side by side (partition "column"), and streamed and in memory under a limit on the process's memory that the
records exceed (RLIMIT_DATA: the system refuses any more, so that what finishes has never had it). Models must
agree to the last bit. Results go to benchmarks/results/streaming.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

STORED = Path(__file__).resolve().parent / "results" / "streaming.json"
FEATURES, RECORDS, TEST = 113, 64, 10_000
SPEC = """
method = "cpfed"
randomness = "seeded"
num_clients = {clients}
cohort_size = 100
num_rounds = {rounds}
local_steps = 10
batch_size = {batch}
eval_every = {every}

[data]
name = ""
path = "{folder}"
partition = "{partition}"
stream = "{stream}"
stream_memory = {memory}

[model]
name = "logistic"

[privacy]
epsilon = 8.0
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--memory", type=float, default=1.0, help="data.stream_memory, in GB")
    parser.add_argument("--limit", type=float, default=2.2, help="GB of the runs under a limit; 0: none")
    parser.add_argument("--dir", type=Path, help="where the records are made (default: a temporary folder)")
    parser.add_argument("--show", action="store_true", help="print the stored table")
    args = parser.parse_args()
    if args.show:
        show(json.loads(STORED.read_text(encoding="utf-8")))
        return
    with tempfile.TemporaryDirectory(dir=args.dir) as made:
        found = measured(Path(made), args)
    STORED.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    show(found)


def measured(where: Path, args: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    folder = make(where / "records", args.clients)
    print(f"{args.clients * RECORDS:,} records made in {time.perf_counter() - began:.0f} s", flush=True)
    settings = [
        ("in memory", "iid", "no", 0.0),
        ("streamed, clients scattered", "iid", "yes", 0.0),
        ("streamed, clients side by side", "column", "yes", 0.0),
    ]
    if args.limit:
        settings += [
            (f"streamed, at most {args.limit:g} GB", "iid", "yes", args.limit),
            (f"in memory, at most {args.limit:g} GB", "iid", "no", args.limit),
        ]
    rows, models = [], {}
    for number, (name, partition, stream, limit) in enumerate(settings):
        values = {"partition": partition, "stream": stream, "clients": args.clients, "rounds": args.rounds}
        values |= {"folder": folder, "batch": args.batch, "memory": args.memory, "every": max(args.rounds // 2, 1)}
        row = {"name": name, **child(where, f"run-{number}", SPEC.format(**values), limit)}
        print(json.dumps(row), flush=True)
        rows.append(row)
        if "seconds" in row:
            model = (where / f"run-{number}" / "model.safetensors").read_bytes()
            models.setdefault(partition, []).append(model)
    return {
        "clients": args.clients,
        "records": args.clients * RECORDS,
        "record_bytes": 4 * FEATURES * (args.clients * RECORDS + TEST),
        "rounds": args.rounds,
        "batch": args.batch,
        "stream_memory": args.memory,
        "same_model": all(model == of[0] for of in models.values() for model in of),
        "cores": len(os.sched_getaffinity(0)),
        "rows": rows,
    }


def make(folder: Path, clients: int) -> Path:
    """Records of a noisy linear rule, client by client, a million numbers at a time."""
    folder.mkdir()
    rng, rule = np.random.default_rng(0), np.random.default_rng(1).normal(size=FEATURES).astype(np.float32)
    for part, count in (("", clients * RECORDS), ("_test", TEST)):
        x = np.lib.format.open_memmap(folder / f"x{part}.npy", "w+", np.float32, (count, FEATURES))
        y = np.zeros(count, np.int32)
        for at in range(0, count, 1 << 16):
            some = rng.random((min(1 << 16, count - at), FEATURES), dtype=np.float32) - np.float32(0.5)
            x[at : at + len(some)] = some
            y[at : at + len(some)] = some @ rule + rng.normal(size=len(some)) > 0
        x.flush()
        del x
        np.save(folder / f"y{part}.npy", y)
    np.save(folder / "groups.npy", np.repeat(np.arange(clients, dtype=np.int32), RECORDS))
    (folder / "classes.json").write_text('["0", "1"]')
    return folder


def child(where: Path, name: str, spec: str, limit: float) -> dict[str, Any]:
    """`dither run` in a process of its own: its seconds and its peak memory."""
    (where / f"{name}.toml").write_text(spec)
    command = [sys.executable, "-m", "dither", "run", f"{name}.toml", "--out", name, "--quiet"]
    environment = {
        **os.environ,
        "DITHER_LEDGER": str(where / "ledger"),
        "DITHER_STATE": str(where / "state"),
        "MALLOC_ARENA_MAX": "2",
    }

    def bounded() -> None:
        if limit:
            resource.setrlimit(resource.RLIMIT_DATA, (int(limit * 1e9),) * 2)

    began = time.perf_counter()
    with open(where / f"{name}.log", "w") as log:
        process = subprocess.Popen(command, cwd=where, env=environment, stdout=log, stderr=log, preexec_fn=bounded)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - began
    if process.returncode:
        last = ((where / f"{name}.log").read_text().strip().splitlines() or [""])[-1]
        return {"failed": last, "peak_gb": used.ru_maxrss * 1024 / 1e9}
    summary = json.loads((where / name / "summary.json").read_text())
    timing, streamed = summary["timing"], summary.get("streamed")
    return {
        "seconds": seconds,
        "peak_gb": used.ru_maxrss * 1024 / 1e9,
        "rounds_100": timing["rounds"] / summary["rounds"] * 100,
        "timing": timing,
        "accuracy": summary["test_accuracy"],
        **({"streamed": streamed} if streamed else {}),
    }


def show(found: dict[str, Any]) -> None:
    print(
        f"\n{found['clients']:,} clients, {found['records']:,} records, {found['record_bytes'] / 1e9:.2f} GB; "
        f"100 clients a round, batches of {found['batch']}; {found['rounds']} rounds, 2 evaluations; "
        f"stream_memory = {found['stream_memory']:g}; {found['cores']} cores"
    )
    print(f"{'':36}{'peak GB':>9}{'whole s':>9}{'100 rounds':>12}{'an evaluation':>15}{'waiting':>9}")
    for row in found["rows"]:
        if "failed" in row:
            print(f"{row['name']:36}{'':>9}   {row['failed'][:70]}")
            continue
        timing = row["timing"]
        busy = timing["rounds"] + timing["evaluation"]
        waiting = f"{row['streamed']['seconds_waiting'] / busy:.0%}" if "streamed" in row else "-"
        print(
            f"{row['name']:36}{row['peak_gb']:9.2f}{row['seconds']:9.1f}{row['rounds_100']:10.3f} s"
            f"{timing['evaluation'] / 2:13.2f} s{waiting:>9}"
        )
    print("models of one partition agree to the last bit" if found["same_model"] else "MODELS DIFFER")


if __name__ == "__main__":
    main()
