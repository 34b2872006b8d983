"""Compiled programs that the next start of the same run neither compiles nor traces.

JAX's cache spares the compiler, but its key is the lowered program: every start traces and lowers the rounds
first, which takes longer than a small run. Here the key is all that the program is traced from
(`build.program_key`), and what is kept is the compiled program itself. Whatever is in doubt is traced: a program
without a key, another shape, a file that does not load. The folder lies in that of JAX's cache, and like it must
be the user's own: what is loaded from it is run.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

_KEPT = 128  # programs in the folder; the oldest go
_BROKEN = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    ImportError,
    NotImplementedError,
    RuntimeError,
)


class KeptProgram:
    """A jitted function whose compiled programs are kept under `key`; with an empty key it is the function itself.

    Keywords are static. The devices are those on which the arguments lie."""

    def __init__(self, jitted: Any, key: str) -> None:
        self._jitted, self._key = jitted, key
        self._ready: dict[str, Callable[..., Any]] = {}
        self.lower = jitted.lower

    def __call__(self, *values: Any, **constants: Any) -> Any:
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
    """Numbers that follow from what the key names; computed where they are not kept, or the key is empty."""
    path = _path(hashlib.sha256(key.encode()).hexdigest()) if key else None
    if path is None:
        return compute()
    try:
        return tuple(int(number) for number in path.read_text().split())
    except (OSError, ValueError):
        numbers = compute()
        _store(path, lambda: " ".join(map(str, numbers)).encode())
        return numbers


_counted = {"misses": 0}


def _misses() -> int:
    """How many programs JAX has compiled in this process and put into its cache."""
    return _counted["misses"]


def _heard(event: str, **_: str | int) -> None:
    _counted["misses"] += event == "/jax/compilation_cache/cache_misses"


jax.monitoring.register_event_listener(_heard)


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
    """The stored program, or None where there is none that this machine can run."""
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
    """Keep the content, whole or not at all."""
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
