"""Dither and its peers on the same work, on this machine, in one go.

    python benchmarks/bench.py                     # or: make bench        (about 25 minutes)
    python benchmarks/bench.py --quick             # or: make bench-quick  (a few minutes: A1 and B2)
    python benchmarks/bench.py --workloads A1 B1 --peers dither yardstick fedjax
    python benchmarks/bench.py --show              # table and chart again from the stored results

Each peer has an environment of its own under benchmarks/.cache/envs, made on the first call with pip. One that
cannot be made, and a peer that fails, are named in the table with the reason. Every measurement is a process by
itself, one at a time; for each workload Dither and the yardstick run first and again last, the peers in between,
so that a machine that drifts does so for all. Results go to benchmarks/results/bench.json and bench.png.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
PEERS = HERE / "peers"
CACHE = HERE / ".cache"
RESULTS = HERE / "results"
sys.path.insert(0, str(PEERS))

import report  # noqa: E402
import workloads  # noqa: E402

# What pip installs for each environment; the first list that installs is taken.
ENVIRONMENTS = {
    "torch": [["torch==2.13.0+cpu", "opacus==1.6.0", "numpy"], ["torch", "opacus", "numpy"]],
    "pfl": [["torch==2.13.0+cpu", "pfl[pytorch]==0.6.0"], ["torch", "pfl[pytorch]"]],
    "flower": [["torch==2.13.0+cpu", "flwr[simulation]==1.41.0"], ["torch", "flwr[simulation]<1.43"]],
    # FedJAX calls jax.tree_map, which newer versions of JAX no longer have; the rest goes with that version.
    "fedjax": [
        [
            *("fedjax==0.0.17", "jax==0.4.30", "jaxlib==0.4.30", "numpy<2.1", "scipy<1.14"),
            *("dm-haiku<0.0.14", "optax<0.2.4", "chex<0.1.88"),
        ]
    ],
}


class Peer(NamedTuple):
    name: str
    environment: str  # "" is the one that runs this
    command: list[str]
    workloads: str


PEER_LIST = [
    Peer("dither", "", ["python", "dither_run.py"], "A1 A32 B1 B2 C"),
    Peer("yardstick", "", ["python", "yardstick.py"], "A1 A32 B1 B2 C"),
    Peer("yardstick-scored", "", ["python", "yardstick.py", "--scored"], "B1 B2 C"),
    Peer("fedjax", "fedjax", ["python", "fedjax_loop.py"], "A1 A32 B1 B2"),
    Peer("fedjax-factorised", "fedjax", ["python", "fedjax_loop.py", "--factorised"], "B1"),
    Peer(
        "pfl",
        "pfl",
        ["python", "-m", "torch.distributed.run", "--nproc_per_node", "2", "pfl_simulation.py"],
        "A1 A32 B1 B2",
    ),
    Peer("flower", "flower", ["python", "flower_simulation.py"], "A1 A32 B1 B2"),
    Peer("opacus", "torch", ["python", "opacus_loop.py"], "A1 A32 B1"),
    Peer("opacus-ghost", "torch", ["python", "opacus_loop.py", "--ghost"], "B1"),
    Peer("torch.func", "torch", ["python", "torch_func.py"], "A1 A32 B1 B2"),
    Peer("torch-stacked", "torch", ["python", "torch_stacked.py"], "B1 B2"),
]
TWICE = ("dither", "yardstick", "yardstick-scored")


@functools.cache  # one that cannot be made is tried once
def environment(name: str) -> tuple[Path, str]:
    """The folder with an environment's programs, made if need be, and "" or why it could not be made."""
    if not name:
        return Path(sys.executable).parent, ""
    folder = CACHE / "envs" / name
    stamp = folder / "installed.json"
    if stamp.exists() and json.loads(stamp.read_text()) in ENVIRONMENTS[name]:
        return folder / "bin", ""
    print(f"making the environment of {name}", flush=True)
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], capture_output=True, text=True)
    if made.returncode:
        return folder / "bin", last_line(made.stderr or made.stdout)
    why = ""
    for requirements in ENVIRONMENTS[name]:
        command = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *requirements]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode == 0:
            stamp.write_text(json.dumps(requirements))
            return folder / "bin", ""
        why = why or last_line(made.stderr, "ERROR")
    return folder / "bin", why


def last_line(text: str, containing: str = "") -> str:
    lines = [line.strip() for line in text.splitlines() if containing in line and line.strip()]
    return lines[-1][:300] if lines else "no message"


def measured(peer: Peer, workload: str, seconds: float, limit: float) -> dict[str, Any]:
    """One peer's row for one workload, or a row that says why there is none."""
    row = {"peer": peer.name, "workload": workload}
    programs, why = environment(peer.environment)
    if why:
        return {**row, "error": f"environment: {why}"}
    program, *rest = peer.command
    command = [str(programs / program), *rest, workload, "--seconds", str(seconds)]
    load = os.getloadavg()[0]
    began = time.time()
    with (CACHE / "last-output.txt").open("w+") as output:
        process = subprocess.Popen(
            command, cwd=PEERS, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        peak = 0.0
        try:
            while process.poll() is None:
                peak = max(peak, tree_memory_mb(process.pid))
                if time.time() - began > limit:
                    return {**row, "error": f"stopped after {limit:.0f} s"}
                time.sleep(1.0)
        finally:  # also if this process is ended: a measurement would go on alone
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {**row, "error": last_line(text, "Error") if "Error" in text else last_line(text)}
    found = json.loads(lines[-1].removeprefix("RESULT "))
    found["peak_rss_mb"] = max(found["peak_rss_mb"], peak)
    found["load_before"] = load
    return found


def tree_memory_mb(root: int) -> float:
    """Memory of a process and all that descend from it, shared pages counted once."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError):
            continue
    family, grown = {root}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in family and child not in family}
        family |= more
        grown = bool(more)
    total = 0
    for member in family:
        try:
            for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
        except OSError:
            continue
    return total / 1024


def merged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Several measurements of one peer as one: medians; the first round of the first."""
    good = [row for row in rows if "error" not in row]
    if not good:
        return rows[0]
    middle = dict(good[0])
    middle["seconds_per_100"] = statistics.median(row["seconds_per_100"] for row in good)
    middle["peak_rss_mb"] = max(row["peak_rss_mb"] for row in good)
    middle["measurements"] = [row["seconds_per_100"] for row in good]
    return middle


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "date": time.strftime("%Y-%m-%d")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workloads", nargs="+", default=list(workloads.WORKLOADS), choices=list(workloads.WORKLOADS)
    )
    parser.add_argument(
        "--peers", nargs="+", default=[p.name for p in PEER_LIST], choices=[p.name for p in PEER_LIST]
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="to spend on timing each, where it is quick enough"
    )
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which a measurement is stopped")
    parser.add_argument("--quick", action="store_true", help="A1 and B2 alone, 3 seconds each; stored apart")
    parser.add_argument("--environments", action="store_true", help="only make the peers' environments")
    parser.add_argument("--show", action="store_true", help="only show what is stored")
    parser.add_argument("--markdown", action="store_true", help="show the table as Markdown")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout` too ends what was started here
    path = RESULTS / ("quick.json" if arguments.quick else "bench.json")
    if arguments.quick:
        path = CACHE / "quick.json"
        arguments.workloads, arguments.seconds = ["A1", "B2"], 3.0
    CACHE.mkdir(exist_ok=True)
    RESULTS.mkdir(exist_ok=True)
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    if not arguments.show:
        peers = [peer for peer in PEER_LIST if peer.name in arguments.peers]
        for peer in peers:
            environment(peer.environment)  # made before anything is timed
        if arguments.environments:
            return
        for workload in arguments.workloads:
            able = [peer for peer in peers if workload in peer.workloads.split()]
            found: dict[str, list[dict[str, Any]]] = {}
            for peer in [*able, *(peer for peer in able if peer.name in TWICE)]:
                if peer.name in found and peer.name == "dither":
                    peer = peer._replace(command=[*peer.command, "--again"])
                row = measured(peer, workload, arguments.seconds, arguments.limit)
                found.setdefault(peer.name, []).append(row)
                print(report.line(row), flush=True)
            fresh = [merged(rows) for rows in found.values()]
            names = {(row["peer"], row["workload"]) for row in fresh}
            kept = [row for row in kept if (row["peer"], row["workload"]) not in names] + fresh
            path.write_text(json.dumps({"machine": machine(), "rows": kept}, indent=1) + "\n")
    print(report.table(kept, markdown=arguments.markdown))
    report.chart(kept, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
