"""How long does the page take to answer? Whole requests to a warm server: sliders, and a folder of many runs.

    python benchmarks/page.py [--methods cpfed ...] [--sliders epsilon ...] [--positions 40] [--runs 1000]

Each slider of the page "Plan" moves from one end to the other while the others stay where the page opens. Every
position is one request to `/api/plan`, from parsing its address to the JSON of the answer, that was not asked
before. The table has the median, the 95th percentile and the largest time of a request in milliseconds: of the
wall clock, and of the processor (which other programs on the machine disturb less).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fastapi.testclient import TestClient

from dither.spec import Spec
from dither.web.app import create_app

METHODS = ("cpfed", "concentrated", "dp-scaffold", "secure-fedavg", "nbafl")


def positions(low: float, high: float, count: int, *, logarithmic: bool, whole: bool) -> list[float]:
    """Values of a slider from one end to the other, as the page spaces them."""
    values = np.geomspace(low, high, count) if logarithmic else np.linspace(low, high, count)
    shown = [float(f"{value:.3g}") if not whole else float(round(value)) for value in values]
    return sorted({min(max(value, low), high) for value in shown})


def timed(client: TestClient, path: str, **parameters: str) -> tuple[float, float]:
    """Milliseconds of one request, by the wall clock and of the processor."""
    wall, processor = time.perf_counter(), time.process_time()
    answer = client.get(path, params=parameters)
    seconds = time.perf_counter() - wall, time.process_time() - processor
    if answer.status_code not in (200, 422):  # 422: these sliders exclude each other
        raise RuntimeError(f"{path} {parameters}: {answer.status_code} {answer.text[:200]}")
    return 1000 * seconds[0], 1000 * seconds[1]


def line(name: str, slider: str, times: list[tuple[float, float]]) -> str:
    percentiles = (
        f"{np.median(x):6.0f} {np.percentile(x, 95):6.0f} {max(x):6.0f}" for x in zip(*times, strict=True)
    )
    return f"{name:14} {slider:9} {len(times):4}  {'   '.join(percentiles)}"


def sliders(client: TestClient, methods: Sequence[str], names: Sequence[str], count: int) -> None:
    """Print the table of sliders."""
    limits = client.get("/api/plan/limits").json()["limits"]
    print("                              wall clock, ms         processor, ms")
    print("method         slider    asked    50%    95%    max      50%    95%    max")
    for method in methods:
        client.get("/api/plan", params={"method": method})
        everything = []
        for slider in names or limits:
            whole = slider not in ("epsilon", "delta", "share")
            values = positions(*limits[slider], count, logarithmic=slider != "share", whole=whole)
            times = [timed(client, "/api/plan", method=method, **{slider: repr(value)}) for value in values]
            print(line(method, slider, times), flush=True)
            everything += times
        print(line(method, "all", everything), flush=True)


def many_runs(folder: Path, count: int) -> None:
    """Print how long a folder of finished runs of 50 evaluations takes, the first time and after that."""
    evaluations = [{"round": 2 * i, "test_accuracy": 0.8, "loss": 0.5, "seconds": 0.1 * i} for i in range(1, 51)]
    row = {"view": "upload", "adjacency": "zero-out", "value": 1.0, "delta": 1e-5, "unit": "run", "recipe": "R3"}
    texts = {
        "spec.toml": Spec.from_preset("adult").to_toml(),
        "metrics.jsonl": "".join(json.dumps(each) + "\n" for each in evaluations),
        "summary.json": json.dumps({"method": "cpfed", "epsilon": {"proven": [row] * 12}}),
    }
    for number in range(count):
        run = folder / f"run-{number:05}"
        run.mkdir()
        for name, text in texts.items():
            (run / name).write_text(text, encoding="utf-8")
    client = TestClient(create_app(folder), base_url="http://127.0.0.1:8765")
    for which in ("first", "next"):
        wall, processor = timed(client, "/api/runs")
        print(f"{count} runs, {which} look: {wall:.0f} ms, processor {processor:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--sliders", nargs="+", default=())
    parser.add_argument("--positions", type=int, default=40)
    parser.add_argument("--runs", type=int, default=1000)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        app = create_app(folder)
        app.state.warm()
        client = TestClient(app, base_url="http://127.0.0.1:8765")
        sliders(client, chosen.methods, chosen.sliders, chosen.positions)
        many_runs(Path(folder), chosen.runs)


if __name__ == "__main__":
    main()
