"""What per-example clipping costs: one gradient step of two networks on MNIST's shapes, batch 64, on this device.

    python benchmarks/clipping.py [--json] [--repeats N] [--opacus PYTHON]

Times the same step without a clip, with Dither's layer rules, and with jax-privacy's `clipped_grad` (all examples
at once, and one at a time), interleaved. Prints the quickest of each, and its ratio to the step without a clip.
The clipped gradients agree to 1e-5 (printed). --opacus names a Python that has torch and opacus; the same networks
are then timed there, plain and with ghost norms, against torch's own step without a clip.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax_privacy import clipping as jax_privacy

from dither import models
from dither.privacy import clipping
from dither.types import Batch

BATCH = 64
MODELS = {"mlp 784-256-10": models.mlp(784, 10, (256,)), "cnn 16-32-32-10": models.cnn((28, 28, 1), 10)}


def steps(model: models.Model) -> dict:
    """The ways to make a step, by name; each maps parameters to a gradient."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.random((BATCH, 784)), jnp.float32)
    y = jnp.asarray(rng.integers(0, 10, BATCH))

    def ours(which: models.Model, mode: str):
        options = {"divisor": float(BATCH), "clip_norm": 1.0, "mode": mode}
        return _step(
            lambda p, x, y: clipping.gradient(which, p, Batch(x, y, jnp.ones(BATCH)), **options).gradient, x, y
        )

    def theirs(microbatch: int):
        def loss(p, one_x, one_y):
            return jnp.sum(models.losses(model, p, one_x, one_y))

        options = {"l2_clip_norm": 1.0, "batch_argnums": (1, 2), "microbatch_size": microbatch}
        summed = jax_privacy.clipped_grad(loss, **options)
        return _step(lambda p, x, y: jax.tree.map(lambda leaf: leaf / BATCH, summed(p, x, y)), x, y)

    found = {"no clip": ours(model, "none"), "clip, layer rules": ours(model._replace(layers=()), "example")}
    if model.layers:
        found["clip, dense layers"] = ours(model, "example")
    return found | {"clip, jax-privacy": theirs(BATCH), "clip, jax-privacy 1": theirs(1)}


def _step(gradient, x, y):
    """A compiled step. The records are arguments: as constants they would be worked on while compiling."""
    compiled = jax.jit(gradient)
    return lambda params: compiled(params, x, y)


def measured(name: str, model: models.Model, repeats: int) -> dict:
    """The quickest of interleaved repetitions: other programs only ever slow a step down."""
    params = model.init(jax.random.key(0))
    ways = steps(model)
    outcomes = {way: jax.block_until_ready(run(params)) for way, run in ways.items() if way != "no clip"}
    first = jax.tree.leaves(outcomes["clip, jax-privacy 1"])
    difference = max(
        float(jnp.abs(a - b).max())
        for outcome in outcomes.values()
        for a, b in zip(jax.tree.leaves(outcome), first, strict=True)
    )
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, run in ways.items():
            began = time.perf_counter()
            for _ in range(3):
                out = run(params)
            jax.block_until_ready(out)
            times[way].append((time.perf_counter() - began) / 3)
    best = {way: min(values) for way, values in times.items()}
    rows = [
        {"step": way, "milliseconds": 1e3 * value, "ratio": value / best["no clip"]} for way, value in best.items()
    ]
    return {"model": name, "rows": rows, "largest_difference": difference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=30, help="of three steps each")
    parser.add_argument("--opacus", metavar="PYTHON", default="")
    options = parser.parse_args()
    results = [measured(name, model, options.repeats) for name, model in MODELS.items()]
    if options.opacus:
        script = Path(__file__).parent / "peers" / "opacus_clipping.py"
        told = subprocess.run(
            [options.opacus, script, str(3 * options.repeats)], capture_output=True, text=True, check=True
        )
        results += json.loads(told.stdout)
    if options.json:
        print(json.dumps({"results": results, "batch": BATCH, "jax": jax.__version__}, indent=2))
        return
    for result in results:
        print(result["model"])
        for row in result["rows"]:
            print(f"  {row['step']:22} {row['milliseconds']:9.3f} ms   {row['ratio']:6.2f}x")
        if "largest_difference" in result:
            print(f"  largest difference between the clipped gradients: {result['largest_difference']:.1e}")


if __name__ == "__main__":
    main()
