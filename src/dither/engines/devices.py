"""Set-up of JAX: the persistent compilation cache."""

from __future__ import annotations

import os
from pathlib import Path

import jax

_done = False


def enable_compilation_cache() -> None:
    """Keep compiled programs in the platform's cache folder, so that a second start is quick.

    Does nothing when JAX already has a cache folder, or with DITHER_COMPILATION_CACHE=0; another value of
    that variable is taken as the folder.
    """
    global _done
    if _done:
        return
    _done = True
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
