"""Two checkouts of Dither on the same workloads, by turns in one run: is the newer one slower?

    python benchmarks/versions.py OTHER_CHECKOUT [A1 A32 B1] [--repeats 3]

Each measurement is a `dither run` in a process of its own, with one checkout's `src` first on the path. Printed
are the seconds of the rounds (from the first evaluation to the last, ledger and checkpoints included), of the
whole command with warm caches, and of its processor time, each with the ratio of this checkout to the other:
medians over the repeats. On a busy machine look at the processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))


def measured(source: Path, spec: Path, cache: Path) -> tuple[float, float, float]:
    """(seconds of the rounds, of the command, of its processor time) of one run."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        path = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH", "")]))
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "DITHER_LEDGER": str(Path(scratch) / "ledger"),
            "DITHER_STATE": str(Path(scratch) / "state"),
            "DITHER_COMPILATION_CACHE": str(cache),
        }
        began, used = time.perf_counter(), _processor_seconds()
        command = [sys.executable, "-m", "dither", "run", str(spec), "--out", str(out), "--quiet"]
        subprocess.run(command, cwd=HERE.parent, env=environment, check=True, stdout=subprocess.DEVNULL)
        whole, used = time.perf_counter() - began, _processor_seconds() - used
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return rows[-1]["seconds"] - rows[0]["seconds"], whole, used


def _processor_seconds() -> float:
    """Of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    import dither_run
    import workloads

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("workloads", nargs="*", default=["A1", "A32", "B1"])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    sources = {"other": options.other / "src", "this": HERE.parent / "src"}
    dither_run.prepare([workloads.WORKLOADS[name] for name in options.workloads])
    columns = [name for kind in ("rounds", "command", "CPU") for name in (f"{kind}: other", "this", "ratio")]
    print(f"{'workload':10s}" + "".join(f"{column:>15s}" for column in columns))
    with tempfile.TemporaryDirectory() as caches:
        for name in options.workloads:
            spec = HERE / "specs" / f"{name}.toml"
            seconds: dict[str, list[tuple[float, float, float]]] = {which: [] for which in sources}
            for repeat in range(options.repeats + 2):  # the first two fill the caches
                for which, source in sources.items():
                    found = measured(source, spec, Path(caches) / which)
                    if repeat > 1:
                        seconds[which].append(found)
            median = {w: [statistics.median(column) for column in zip(*seconds[w], strict=True)] for w in sources}
            numbers = []
            for before, now in zip(median["other"], median["this"], strict=True):
                numbers += [before, now, now / before]
            print(f"{name:10s}" + "".join(f"{number:15.3f}" for number in numbers), flush=True)


if __name__ == "__main__":
    main()
