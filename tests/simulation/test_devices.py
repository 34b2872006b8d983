"""Where the seconds of a command went, and how long devices wait for each other."""

import os
import subprocess
import sys

import pytest

from dither.simulation import devices

TERMINATE = "--xla_cpu_collective_call_terminate_timeout_seconds"
LATE = """
import time
import jax, numpy as np
from jax.experimental import io_callback
from dither.simulation import devices
from dither.simulation.arrays import Shards

devices._PATIENCE = dict.fromkeys(devices._PATIENCE, 1)
devices.set_up()

def come(device):
    time.sleep(30 * int(device))
    return np.float32(1)

def meet(x):
    came = io_callback(come, jax.ShapeDtypeStruct((), np.float32), jax.lax.axis_index("clients"))
    return shards.summed(x * came)

shards = Shards(1, 2)
jax.block_until_ready(shards.jit(meet, "r", wide_vectors=False)(np.ones(1, np.float32)))
"""


def test_spans_inside_others_count_once(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(devices.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(devices, "_compiler_spans", [])
    clock = devices.Clock()
    with clock("rounds"):
        for moment, event, seconds in (
            (102.0, "/jax/core/compile/jaxpr_trace_duration", 1.0),  # 101 to 102
            (104.0, "/jax/core/compile/jaxpr_trace_duration", 3.5),  # 100.5 to 104, around it
            (104.5, "/jax/compilation_cache/cache_retrieval_time_sec", 0.4),  # not compiling by itself
            (105.0, "/jax/core/compile/backend_compile_duration", 1.0),  # 104 to 105
        ):
            now[0] = moment
            devices._heard(event, seconds)
        now[0] = 110.0
    assert clock.report() == {"compile": 4.5, "rounds": 5.5}


def test_xla_waits_for_a_late_device_as_long_as_it_is_told():
    """One device comes half a minute late, and the patience is cut to a second: XLA has read it, under names that
    this version of it knows."""
    environment = {**os.environ, "DITHER_DEVICES": "2"}
    environment.pop("XLA_FLAGS")
    command = [sys.executable, "-c", LATE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode < 0
    assert "Termination timeout" in done.stderr
    assert "of 1 seconds exceeded" in done.stderr


@pytest.mark.parametrize(
    ("version", "flags", "read"),
    [
        ("0.8.0", None, f"{TERMINATE}=86400"),
        ("0.12.0.1", "--xla_a=1", "--xla_a=1 --xla_cpu_collective_call_"),
        ("0.10.2", f"{TERMINATE}=9", f"{TERMINATE}=9 --xla_cpu_collective_call_"),
        ("0.7.2", "--xla_a=1", None),  # which would end at flags that it does not know
        ("0.13.0", None, None),
    ],
)
def test_xla_is_told_to_wait_in_flags_that_it_knows(version, flags, read, monkeypatch):
    seen = []
    monkeypatch.setattr(devices.jaxlib.version, "__version__", version)
    monkeypatch.setattr(devices.xla_client, "CompileOptions", lambda: seen.append(os.environ["XLA_FLAGS"]))
    monkeypatch.delenv("XLA_FLAGS")
    if flags is not None:
        monkeypatch.setenv("XLA_FLAGS", flags)
    devices._wait_longer()
    assert os.environ.get("XLA_FLAGS") == flags
    assert len(seen) == (read is not None)
    assert all(read in one and one.count("terminate") == 1 for one in seen)
