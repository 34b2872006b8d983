"""What per-example clipping costs: one gradient step of the MNIST network (784-256-10), batch 64, on this CPU.

    python benchmarks/clipping.py

Times the same step without a clip, with the factorised norms, and with the generic fallback, interleaved and as
medians, and prints each as a ratio to the step without a clip. The results agree to 1e-5 (printed).
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from dither import models
from dither.privacy import clipping

BATCH, REPEATS = 64, 40


def main() -> None:
    model = models.mlp(784, 10, (256,))
    rng = np.random.default_rng(0)
    params = model.init(jax.random.key(0))
    x = jnp.asarray(rng.random((BATCH, 784)), jnp.float32)
    y = jnp.asarray(rng.integers(0, 10, BATCH))
    weights = jnp.ones(BATCH)

    def step(which: models.Model, mode: str):
        return jax.jit(
            lambda p: (
                clipping.gradient(which, p, x, y, weights, divisor=float(BATCH), clip_norm=1.0, mode=mode).gradient
            )
        )

    generic = model._replace(layers=())
    steps = {
        "no clip": step(model, "none"),
        "clip, factorised": step(model, "example"),
        "clip, generic": step(generic, "example"),
    }
    found = {name: jax.block_until_ready(run(params)) for name, run in steps.items()}
    difference = max(
        float(jnp.abs(a - b).max())
        for a, b in zip(
            jax.tree.leaves(found["clip, factorised"]), jax.tree.leaves(found["clip, generic"]), strict=True
        )
    )
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(REPEATS):
        for name, run in steps.items():
            began = time.perf_counter()
            for _ in range(5):
                out = run(params)
            jax.block_until_ready(out)
            times[name].append((time.perf_counter() - began) / 5)
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = [
        {"step": name, "milliseconds": 1e3 * value, "ratio": value / medians["no clip"]}
        for name, value in medians.items()
    ]
    if "--json" in sys.argv:
        print(json.dumps({"rows": rows, "largest_difference": difference, "jax": jax.__version__}, indent=2))
        return
    for row in rows:
        print(f"{row['step']:18} {row['milliseconds']:8.3f} ms   {row['ratio']:6.2f}x")
    print(f"largest difference between the clipped gradients: {difference:.1e}")


if __name__ == "__main__":
    main()
