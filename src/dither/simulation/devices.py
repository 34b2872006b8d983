"""JAX on this machine: the compilation cache, a CPU's cores as devices, how many devices a batch uses, a clock
that counts the compiler's seconds apart, and programs that are kept for the next start."""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jaxlib import xla_client

from dither.errors import SpecError
from dither.simulation import distributed
from dither.simulation.arrays import ONE_DEVICE, Shards
from dither.types import __version__

_LARGE = 50_000  # numbers of a client in a step, from which on those of several no longer fit a core's caches
_WORTH_SHARING = 1e9  # arithmetic of a round, tens of milliseconds of a core: devices meet in about one
_CACHED = 256 << 10  # bytes of a step that stay in a core's cache (measured: 1.7x either way at 23 and 730 KiB)
_REFUSED_FLAGS = ("_enable_fast_math", "way_gemm", "_bf16_bf16_f32", "_detect_nan", "_detect_inf")  # their ends
# How libraries are told to make products of float32, and of what proofs assume
_EXACT = dict.fromkeys(("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"), "strict")
_EXACT["NVIDIA_TF32_OVERRIDE"] = "0"
_COPIES = 4 << 30  # bytes that copies of the records, one a device, may take on a CPU
# Seconds after which XLA warns that devices of a CPU wait for another, and after which it ends the process
_PATIENCE = {
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 600,
    "--xla_cpu_collective_call_terminate_timeout_seconds": 86_400,
}
_PATIENT = (0, 8), (0, 13)  # from this jaxlib on and up to that one, XLA knows these flags; unknown ones end it

_is_set_up = False


def set_up() -> None:
    """Set up the cache and the cores, once per process, before it computes anything."""
    global _is_set_up
    _refuse_inexact()
    _refuse_debugging()
    if not _is_set_up:
        _is_set_up = True
        _wait_longer()
        _split_cpu()
        _keep_programs()


def _refuse_inexact() -> None:
    """Under fast math the compiler may drop every check for a number that is not finite: a clip bounds nothing.
    Products of float32 that are made of shorter numbers err by more than the proofs allow."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):  # as XLA reads it
        raise SpecError(
            f"XLA_FLAGS={flags!r} is taken for a file of flags, which nobody checks; give the flags themselves"
        )
    for flag in flags.split():
        name, _, value = flag.partition("=")
        if name.endswith(_REFUSED_FLAGS) and value.lower() not in ("false", "0", "none"):
            raise SpecError(
                f"XLA_FLAGS has {flag}: proofs need the arithmetic of IEEE 754, without which one record may move "
                "an update beyond its clip, or stop a run and so tell of itself; leave the flag out"
            )
    for name, exact in _EXACT.items():
        if os.environ.get(name, exact).lower() not in ("", exact):
            raise SpecError(
                f"{name}={os.environ[name]} is set: products may be made of shorter numbers than float32, with "
                f"errors beyond those of the proofs; leave it out, or set it to {exact}"
            )


def _refuse_debugging() -> None:
    """A computation that stops where a number is not finite tells that there is such a record."""
    for name in ("jax_debug_nans", "jax_debug_infs"):
        if getattr(jax.config, name, False):
            raise SpecError(
                f"{name.upper()} is set: a run would stop at a record that overflows, and tell of it; leave it out"
            )


def check_protected() -> None:
    """Proofs of what float32 computes (R7) know the arithmetic of CPUs and GPUs alone."""
    if jax.default_backend() not in ("cpu", "gpu"):
        raise SpecError(
            f"randomness='os' has no proof on this device ({device()}), whose products may be made of shorter "
            "numbers than float32; set JAX_PLATFORMS=cpu"
        )


def connect(coordinator: str, *, count: int, number: int, on_wait: Callable[[], None] = lambda: None) -> None:
    """Meet the other processes at `coordinator` (HOST:PORT, where process 0 listens), before JAX computes
    anything. `on_wait` is called now and then meanwhile."""
    set_up()
    distributed.connect(coordinator, count=count, number=number, local_devices=local_devices, on_wait=on_wait)


def _wait_longer() -> None:
    """Have a CPU's devices wait for each other for a day. XLA would end the process after a minute, but on a busy
    machine one device may be that far behind.

    Does nothing if XLA has read its flags already. The environment stays as it was, for other programs.
    """
    first, beyond = _PATIENT
    if not first <= tuple(map(int, jaxlib.version.__version__.split(".")[:2])) < beyond:
        return
    before = os.environ.get("XLA_FLAGS")
    ours = (f"{flag}={seconds}" for flag, seconds in _PATIENCE.items() if flag not in (before or ""))
    os.environ["XLA_FLAGS"] = " ".join([before or "", *ours]).strip()
    try:
        xla_client.CompileOptions()  # for which XLA reads its flags, once
    finally:
        os.environ.pop("XLA_FLAGS")
        os.environ |= {} if before is None else {"XLA_FLAGS": before}


def _split_cpu() -> None:
    """Show each core as a device, so that clients of larger models can share them.

    Programs for one device still use all cores. DITHER_DEVICES sets the number. Does nothing if it was chosen
    before: by XLA_FLAGS, by JAX's own option, or because JAX has already computed something.
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
    """Devices of this process, at most as many as there are cores."""
    if distributed.parted():
        return 1
    count = len(jax.local_devices())
    return count if jax.default_backend() != "cpu" else min(count, cores())


def parallel_tasks() -> int:
    """How many things each process computes at the same time."""
    return cores() if distributed.count() == 1 else distributed.devices_each()


def usable(record_bytes: int) -> int:
    """Devices of a process that may share work; each will hold a copy of the records."""
    count = local_devices() if distributed.count() == 1 else distributed.devices_each()
    if jax.default_backend() != "cpu":
        return count
    return max(1, min(count, _COPIES // max(record_bytes, 1)))


def for_one_run(*, round_flops: float, record_bytes: int) -> Shards:
    """Devices for a single run. They share its clients if a round is long enough to be worth waiting for each
    other, and always among several processes."""
    if distributed.count() == 1 and not worth_sharing(round_flops):
        return ONE_DEVICE
    return Shards(clients=distributed.count() * usable(record_bytes))


def worth_sharing(round_flops: float) -> bool:
    """Whether a round is long enough for devices to gain by sharing its clients."""
    return round_flops > _WORTH_SHARING


def for_many_runs(runs: int, *, record_bytes: int) -> Shards:
    """Devices for a batch of runs, which never wait for each other; the same number in each process."""
    count = distributed.count()
    return Shards(runs=count * min(math.ceil(runs / count), usable(record_bytes)))


def sequential_clients(step_numbers: int) -> bool:
    """Whether a round's clients are computed one after the other (layout "loop" of `Simulation`), given how many
    numbers a client's model and batch have."""
    return jax.default_backend() == "cpu" and step_numbers > _LARGE


def sequential_runs(step_bytes: int) -> bool:
    """Whether a device computes its runs one after the other, given the bytes that its clients read in a local
    step. Side by side saves the start of many small operations but does not fit the caches."""
    return jax.default_backend() == "cpu" and step_bytes > _CACHED


# Where a run is made


def device_kind() -> str:
    """ "cpu" or "gpu" (anything faster)."""
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


def device() -> str:
    """The name of the machine's first device."""
    first = jax.devices()[0]
    return f"{first.platform}: {first.device_kind}"


def versions() -> dict[str, str]:
    """The versions that a run depends on."""
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


# The clock
#
#     clock = Clock()
#     with clock("rounds"):
#         state = jax.block_until_ready(simulation.advance(...))
#     clock.seconds  # {"compile": 0.41, "rounds": 2.03}
#
# JAX tells how long it traced, lowered and compiled a function, or fetched the program from its cache on disk. One
# of these may happen inside another, so what counts is the time that any of them was under way.

COMPILE = "compile"

_EVENTS = "/jax/core/compile/"
_compiler_seconds = 0.0  # seconds of this process under way in the compiler
_compiler_spans: list[tuple[float, float]] = []  # the latest spans, by their end
_listening = False


class Clock:
    """Seconds by what they were spent on. Compiling counts as "compile", wherever it happens."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {COMPILE: 0.0}
        _listen()

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Count what happens inside as `what`. Not to be nested."""
        began, compiled = time.perf_counter(), _compiler_seconds
        try:
            yield
        finally:
            compiled = _compiler_seconds - compiled
            took = time.perf_counter() - began
            self.seconds[COMPILE] += compiled
            self.seconds[what] = self.seconds.get(what, 0.0) + max(took - compiled, 0.0)

    def report(self) -> dict[str, float]:
        """The seconds, rounded to milliseconds."""
        return {what: round(value, 3) for what, value in self.seconds.items()}


def _listen() -> None:
    global _listening
    if not _listening:
        _listening = True
        jax.monitoring.register_event_duration_secs_listener(_heard)


def _heard(event: str, duration_secs: float, **_: str | int) -> None:
    """A span has just ended. Spans that lie inside it have ended before, and are counted already."""
    global _compiler_seconds
    if not event.startswith(_EVENTS):
        return
    end = time.perf_counter()
    start = earliest = end - duration_secs
    inside = 0.0
    while _compiler_spans and _compiler_spans[-1][1] > start:
        first, last = _compiler_spans.pop()
        inside += last - max(first, start)
        earliest = min(first, earliest)
    _compiler_seconds += max(duration_secs - inside, 0.0)
    _compiler_spans.append((earliest, end))
    del _compiler_spans[:-64]


# Compiled programs that the next start of the same run neither compiles nor traces
#
# JAX's cache spares the compiler, but its key is the lowered program: every start traces and lowers the rounds
# first, which takes longer than a small run. Here the key is all that the program is traced from
# (`build.program_key`), and what is kept is the compiled program itself. Whatever is in doubt is traced: a program
# without a key, another shape, a file that does not load. The folder lies in that of JAX's cache, and like it must
# be the user's own: what is loaded from it is run.

_KEPT = 128  # programs in the folder; the oldest go
_BROKEN = (OSError, EOFError, ValueError, TypeError, AttributeError, ImportError, RuntimeError)


class KeptProgram:
    """A jitted function whose compiled programs are kept under `key`; with an empty key it is the function itself.
    With `awaited`, a call returns when its results are there.

    Keywords are static. The devices are those on which the arguments lie."""

    def __init__(self, jitted: Any, key: str, *, awaited: bool = False) -> None:
        self._jitted, self._key, self._awaited = jitted, key, awaited
        self._ready: dict[str, Callable[..., Any]] = {}
        self.lower = jitted.lower

    def __call__(self, *values: Any, **constants: Any) -> Any:
        results = self._results(values, constants)
        return jax.block_until_ready(results) if self._awaited else results

    def _results(self, values: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        if not self._key:
            return self._jitted(*values, **constants)
        signature = _signature(self._key, values, constants)
        if signature not in self._ready:
            self._ready[signature] = self._made(signature, values, constants)
        return self._ready[signature](*values)

    def _made(self, signature: str, values: tuple[Any, ...], constants: Mapping[str, Any]) -> Callable[..., Any]:
        path = _path(signature)
        kept = _loaded(path, values) if path else None
        if kept is not None:
            return kept
        lowered, before = self._jitted.lower(*values, **constants), _misses()
        # JAX cannot store a program again that came from its own cache (of another version of Dither, say). The
        # first start notes that, and the second goes past that cache.
        noted = path.with_suffix(".again") if path else None
        again = noted is not None and noted.exists()
        program: Any = _compiled_anew(lowered) if again else lowered.compile()
        if path and noted:
            if again or _misses() > before:
                _store(path, lambda: pickle.dumps(serialize_executable.serialize(program)))
                noted.unlink(missing_ok=True)
            else:
                _store(noted, bytes)
        made: Callable[..., Any] = program
        return made


def _compiled_anew(lowered: Any) -> Any:
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        return lowered.compile()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


def kept_numbers(key: str, compute: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
    """Numbers determined by what the key names; computed if they are not kept yet or the key is empty."""
    path = _path(hashlib.sha256(key.encode()).hexdigest()) if key else None
    if path is None:
        return compute()
    try:
        return tuple(int(number) for number in path.read_text().split())
    except (OSError, ValueError):
        numbers = compute()
        _store(path, lambda: " ".join(map(str, numbers)).encode())
        return numbers


_compiled = {"misses": 0}


def _misses() -> int:
    """How many programs JAX has compiled in this process and put into its cache."""
    return _compiled["misses"]


def _count_miss(event: str, **_: str | int) -> None:
    _compiled["misses"] += event == "/jax/compilation_cache/cache_misses"


jax.monitoring.register_event_listener(_count_miss)


def _path(name: str) -> Path | None:
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    return Path(folder) / "traced" / name if folder else None


def _signature(key: str, values: tuple[Any, ...], constants: Mapping[str, Any]) -> str:
    """SHA-256 of the key and of the arguments' structure, shapes, types and devices."""
    leaves, structure = jax.tree.flatten(values)
    kinds = [(jax.typeof(leaf).str_short(), getattr(leaf, "weak_type", False), _place(leaf)) for leaf in leaves]
    about = repr((key, str(structure), kinds, sorted(constants.items())))
    return hashlib.sha256(about.encode()).hexdigest()


def _place(leaf: Any) -> str:
    return repr(leaf.sharding) if isinstance(leaf, jax.Array) else "host"


def _loaded(path: Path, values: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The stored program, or None if there is none that this machine can run."""
    arrays = [leaf for leaf in jax.tree.leaves(values) if isinstance(leaf, jax.Array)]
    devices = sorted({device for array in arrays for device in array.devices()}, key=lambda device: device.id)
    try:
        content, in_tree, out_tree = pickle.loads(path.read_bytes())  # noqa: S301 - as trusted as machine code
        program: Callable[..., Any] = serialize_executable.deserialize_and_load(
            content, in_tree, out_tree, execution_devices=devices or jax.devices()[:1]
        )
        return program
    except (*_BROKEN, pickle.UnpicklingError):
        return None


def _store(path: Path, content: Callable[[], bytes]) -> None:
    """Store the content atomically."""
    try:
        written = content()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        aside.write_bytes(written)
        aside.replace(path)
        by_age = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)
        for old in by_age[:-_KEPT]:
            old.unlink(missing_ok=True)
    except (*_BROKEN, pickle.PicklingError):
        return  # a cache that cannot be written is no reason not to train
