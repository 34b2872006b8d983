"""Set-up of JAX: the persistent compilation cache, a CPU's cores as devices, and how many of them a batch uses."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from dither.simulation import distributed
from dither.simulation.sharding import ONE_DEVICE, Shards
from dither.types import __version__

_LARGE = 50_000  # numbers of a client in a step, from which on those of several no longer fit a core's caches
_WORTH_SHARING = 1e9  # arithmetic of a round, tens of milliseconds of a core: devices meet in about one
_CACHED = 256 << 10  # bytes of a step that stay in a core's cache (measured: 1.7x either way at 23 and 730 KiB)
_COPIES = 4 << 30  # bytes that copies of the records, one a device, may take on a CPU

_done = False


def set_up() -> None:
    """Once a process, before it computes anything: the cache and the cores."""
    global _done
    if not _done:
        _done = True
        _split_cpu()
        _keep_programs()


def connect(coordinator: str, *, count: int, number: int, on_wait: Callable[[], None] = lambda: None) -> None:
    """Meet the other processes at `coordinator` (HOST:PORT, where process 0 listens), before JAX computes
    anything. `on_wait` is called now and then meanwhile."""
    set_up()
    distributed.connect(coordinator, count=count, number=number, local_devices=local_devices, on_wait=on_wait)


def _split_cpu() -> None:
    """Show each core as a device of its own, so that clients of larger models can share them.

    Programs for one device still use all cores. Does nothing where the number was chosen before (by XLA_FLAGS, by
    JAX's own option, or because JAX has already computed something), or with DITHER_DEVICES=1; another value
    of that variable is taken as the number.
    """
    wish = os.environ.get("DITHER_DEVICES", "")
    chosen = getattr(jax.config, "jax_num_cpu_devices", -1) > 0
    if chosen or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", int(wish) if wish.isdigit() else cores())
    except RuntimeError:
        return  # JAX is in use already: one device it is


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_devices() -> int:
    """Devices of this process that are worth using: no more than there are cores."""
    if distributed.parted():
        return 1
    count = len(jax.local_devices())
    return count if jax.default_backend() != "cpu" else min(count, cores())


def at_once() -> int:
    """Things that this process, and each other one, makes at the same time."""
    return cores() if distributed.count() == 1 else distributed.devices_each()


def usable(record_bytes: int) -> int:
    """Devices of a process among which work may be shared; each will hold a copy of the records."""
    count = local_devices() if distributed.count() == 1 else distributed.devices_each()
    if jax.default_backend() != "cpu":
        return count
    return max(1, min(count, _COPIES // max(record_bytes, 1)))


def for_one_run(*, round_flops: float, record_bytes: int) -> Shards:
    """Devices for a single run: clients are shared where a round is long, else they would wait for each other;
    and among processes, which somebody has asked for, in any case."""
    if distributed.count() == 1 and not worth_sharing(round_flops):
        return ONE_DEVICE
    return Shards(clients=distributed.count() * usable(record_bytes))


def worth_sharing(round_flops: float) -> bool:
    """Whether a round is so long that devices gain by sharing its clients."""
    return round_flops > _WORTH_SHARING


def for_many_runs(runs: int, *, record_bytes: int) -> Shards:
    """Devices for a batch of runs, which have nothing to wait for; of each process as many."""
    count = distributed.count()
    return Shards(runs=count * min(math.ceil(runs / count), usable(record_bytes)))


def sequential_clients(step_numbers: int) -> bool:
    """Whether a round's clients go one after the other (layout "loop" of `Simulation`), from the numbers that one
    works on in a local step: those of its model and of its batch."""
    return jax.default_backend() == "cpu" and step_numbers > _LARGE


def sequential_runs(step_bytes: int) -> bool:
    """Whether a device makes its runs one after the other (see `Simulation`), from the bytes that its clients
    read in a local step. Side by side saves the start of many small operations, and loses the caches."""
    return jax.default_backend() == "cpu" and step_bytes > _CACHED


# Where a run is made


def device_kind() -> str:
    """ "cpu" or "gpu" (anything faster)."""
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


def device() -> str:
    """The machine's accelerator in words."""
    first = jax.devices()[0]
    return f"{first.platform}: {first.device_kind}"


def versions() -> dict[str, str]:
    """What makes a run."""
    return {
        "dither": __version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _keep_programs() -> None:
    """Keep compiled programs in the platform's cache folder, so that a second start is quick.

    Does nothing when JAX already has a cache folder, or with DITHER_COMPILATION_CACHE=0; another value of
    that variable is taken as the folder.
    """
    wish = os.environ.get("DITHER_COMPILATION_CACHE", "")
    if wish == "0" or getattr(jax.config, "jax_compilation_cache_dir", None):
        return
    if wish:
        folder = Path(wish)
    else:
        from platformdirs import user_cache_path

        folder = user_cache_path("dither") / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a read-only home is no reason not to train
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
