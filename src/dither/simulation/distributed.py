"""Several processes as one simulation: plain SPMD. Every process runs the same program on its part of the devices.

    devices.connect("10.0.0.1:7000", count=2, number=0)   # in each process, before JAX computes anything
    dither.run("adult", out="runs/first")                 # in each: process 0 returns, the others exit

Process 0 alone writes, charges and prints. What only it can know (the spec, how many rounds the budget allows,
which checkpoint to continue from) it broadcasts at fixed points of the program. All processes see all records:
this is for simulations on one's own machines, not a federation.

No process may leave another waiting in a collective operation. An error outside the compiled rounds is told to the
others at their next exchange. An error in the compiled rounds ends the process without a word: its connections
close, and the others notice. JAX's heartbeat finds a machine that vanishes without closing them.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dither.errors import ProcessError, SpecError

CONNECT_SECONDS = 120.0  # until all processes must have come
HEARTBEAT_SECONDS = 30  # a machine that is silent for so long is given up
_SHUTDOWN_SECONDS = 30
_SHORT = 1020  # bytes of a message that needs no second exchange

_BROKEN = ("Gloo", "NCCL", "coordination service")  # what the engine's error says where a connection broke

_count, _number, _each = 1, 0, 1
_met: set[tuple[int, ...]] = set()  # devices that are connected, by their numbers
_computing = False  # the next collective is the engine's, not an exchange
_lost = False  # nobody can be told anything any more
_parted = False  # the simulation is over


def count() -> int:
    """How many processes share this simulation; 1 unless `connect` was called."""
    return _count


def number() -> int:
    """The number of this process, from 0."""
    return _number


def leading() -> bool:
    """Whether this is process 0, which writes, charges and prints."""
    return _number == 0


def lost() -> bool:
    """The others cannot be reached: exit by `os._exit`, as an ordinary exit would wait for them."""
    return _lost


def parted() -> bool:
    """This process was one of several. JAX connects devices, even those of one process, through the coordinator,
    which is gone: from now on each device works alone."""
    return _parted


# Meeting


def connect(
    coordinator: str,
    *,
    count: int,
    number: int,
    local_devices: Callable[[], int] = lambda: len(jax.local_devices()),
    seconds: float = CONNECT_SECONDS,
    on_wait: Callable[[], None] = lambda: None,
) -> None:
    """Meet the other processes at `coordinator` (HOST:PORT, where process 0 listens). `local_devices` counts the
    devices of this process; each process uses as many as the smallest has. `on_wait` is called now and then."""
    global _count, _number, _each
    check(coordinator, count, number)
    if getattr(jax.config, "jax_cpu_collectives_implementation", None) is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    failed: list[Exception] = []

    def meet() -> None:
        try:
            jax.distributed.initialize(
                coordinator,
                count,
                number,
                initialization_timeout=int(seconds) + 60,  # JAX's own end is an abort: ours comes before
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
                # Nobody else is to reach what this machine's own processes say to each other.
                coordinator_bind_address=coordinator if coordinator.startswith("127.") else None,
            )
        except Exception as error:
            failed.append(error)

    # In a thread of its own: it blocks, and Ctrl-C must not wait for it.
    thread, end = threading.Thread(target=meet, daemon=True), time.monotonic() + seconds
    thread.start()
    try:
        while thread.is_alive() and time.monotonic() < end:
            on_wait()
            thread.join(0.1)
    except BaseException:
        _give_up()
        raise
    if failed:
        raise ProcessError(
            f"process {number} cannot use the coordinator's address {coordinator}: {_first_line(failed[0])}"
        )
    if thread.is_alive():
        _give_up()
        missing = (
            f"not all of the {count} processes reached {coordinator} within {seconds:g} s; start each with the "
            "same --coordinator and its own --process"
            if number == 0
            else f"process {number} found no process 0 at {coordinator} within {seconds:g} s, or another one is "
            "missing; start them all, and check that this machine reaches that address"
        )
        raise ProcessError(missing)
    _count, _number = count, number
    _each = min(int(one["devices"]) for one in exchange({"devices": local_devices()}))
    _met.add(_numbers(_firsts()))


def disconnect() -> None:
    """Disconnect; every process must, at about the same time. Does nothing if the others are lost."""
    global _count, _number, _parted
    _parted = _parted or _count > 1
    connected = _count > 1 and not _lost
    _count, _number = 1, 0
    _met.clear()
    if connected:
        with suppress(jax.errors.JaxRuntimeError):  # one that ended before is no reason to lose what is done
            jax.distributed.shutdown()


def check(coordinator: str, count: int, number: int) -> None:
    """Refuse an invalid address or number."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise SpecError(f"coordinator={coordinator!r} is not HOST:PORT, e.g. 10.0.0.1:7000")
    if count < 2:
        raise SpecError(f"processes={count} must be at least 2")
    if not 0 <= number < count:
        raise SpecError(f"process={number} is not among 0 to {count - 1}")


def devices(wanted: int) -> list[jax.Device]:
    """`wanted` devices, equally many of each process, in the order of the processes."""
    if _count == 1:
        return list(jax.local_devices()[:wanted])
    return [device for index in range(_count) for device in _devices_of(index)[: wanted // _count]]


def devices_each() -> int:
    """Devices that each process uses."""
    return _each


def meet(devices: Sequence[jax.Device]) -> None:
    """Connect these devices, unless they are connected; all processes call this at the same point.

    JAX connects a program's devices in its first collective, and gives up if a process arrives half a minute after
    another, as one that compiles slowly may. Here all come from an exchange, which waits longer."""
    if _count == 1 or _numbers(devices) in _met:
        return
    exchange({})
    mesh = Mesh(np.array(devices), ("devices",))
    with _communicating():
        ones = put(np.ones(len(devices), np.int32), NamedSharding(mesh, PartitionSpec("devices")))
        jax.block_until_ready(_whole(mesh, _summed)(ones))
    _met.add(_numbers(devices))


# Communication. Every process must call the same of these at the same point.


def exchange(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every process's message, by number. Raises if one of them reports a failure."""
    if _count == 1:
        return [dict(message)]
    text = json.dumps(message).encode()
    with _communicating():
        head = np.int32(len(text)).tobytes() + text[:_SHORT].ljust(_SHORT)
        heads = _collected(np.frombuffer(head, np.uint8), _same)
        lengths = heads[:, :4].copy().view(np.int32)[:, 0]
        bodies, longest = heads[:, 4:], int(lengths.max())
        if longest > _SHORT:
            width = 1 << (longest - 1).bit_length()  # few widths: each is compiled
            bodies = _collected(np.frombuffer(text.ljust(width), np.uint8), _same)
    messages = [json.loads(body[:length].tobytes()) for body, length in zip(bodies, lengths, strict=True)]
    for index, one in enumerate(messages):
        if "error" in one and index != _number:
            error = ProcessError(f"process {index} ended: {one['error']}")
            error.exit_code = one["exit_code"]
            raise error
    return messages


def broadcast(message: Mapping[str, Any]) -> dict[str, Any]:
    """Process 0's message."""
    return exchange(message if leading() else {})[0]


def broadcast_arrays(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Process 0's arrays, to the bit; the others give arrays of the same shapes."""
    if _count == 1:
        return arrays
    received = []
    for array in map(np.ascontiguousarray, arrays):
        mine = array if leading() else np.zeros_like(array)
        total = _collected(np.frombuffer(mine.tobytes(), np.uint8), _summed)  # of bytes: -0.0 stays what it is
        received.append(np.frombuffer(total.tobytes(), array.dtype).reshape(array.shape))
    return received


def assert_equal(values: Mapping[str, str]) -> None:
    """Refuse to continue if a process differs from process 0 in one of these values."""
    first, *others = exchange({"values": dict(values)})
    for index, other in enumerate(others, 1):
        for name, value in first["values"].items():
            if other["values"].get(name) != value:
                raise ProcessError(
                    f"process {index} differs from process 0 in {name}: {other['values'].get(name)}, not {value}; "
                    "give every process the same files and versions"
                )


def part(exit_code: int = 0) -> None:
    """Everything that needs the other processes is done. Process 0 continues alone, and may take its time or
    fail; the others exit."""
    others = _count > 1 and not leading()
    exchange({})  # shutting down has a time limit: they come there together
    disconnect()
    if others:
        raise SystemExit(exit_code)


# Interruption


class Interrupt:
    """Ctrl-C asks a run to stop after the rounds under way, with a checkpoint; a second one stops it at once.

    The default handler raises wherever Python happens to be, and a library's clean-up code may swallow that.
    """

    asked = False  # here, or in another process
    _pressed = False

    def __enter__(self) -> Interrupt:
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, *_: object) -> None:
        if self._pressed:
            raise KeyboardInterrupt
        self._pressed = self.asked = True

    def exchange(self, **more: Any) -> dict[str, Any]:
        """Learn whether Ctrl-C was pressed in any process; also returns what process 0 tells the others."""
        messages = exchange({"asked": self.asked, **more})
        if any(message["asked"] for message in messages):
            self.asked = True
        return messages[0]

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


# Errors


@contextmanager
def computing() -> Iterator[None]:
    """Compiled rounds: the others are in their collectives too, and cannot be notified of an error."""
    global _computing
    _computing = True
    yield
    _computing = False


@contextmanager
def between_rounds() -> Iterator[None]:
    """A callback within `computing`, where an error can be reported to the others."""
    global _computing
    before, _computing = _computing, False
    yield
    _computing = before


@contextmanager
def together() -> Iterator[None]:
    """What all processes do together: an error in one of them stops all of them."""
    global _lost
    if _count == 1:
        yield
        return
    try:
        yield
    except ProcessError:
        raise  # the others know, or cannot be told
    except BaseException as error:
        if _count == 1:
            raise  # they have parted
        if _computing or _lost:
            _lost = True
            if any(word in str(error) for word in _BROKEN):
                raise _gone(error) from error
            raise
        interrupted = isinstance(error, KeyboardInterrupt)
        code = 130 if interrupted else getattr(error, "exit_code", 1)
        text = "it was interrupted" if interrupted else str(error) or repr(error)
        with suppress(ProcessError):
            exchange({"error": text, "exit_code": code})
        raise


# Arrays


def fetched(tree: Any) -> Any:
    """Whole arrays on the host, even where other processes hold parts of them."""
    return jax.tree.map(_fetched, tree)


def _fetched(array: Any) -> np.ndarray:
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    sharding = cast(NamedSharding, array.sharding)  # all that spans processes is on a mesh
    return np.asarray(_whole(sharding.mesh, _same)(array))


def put(value: Any, sharding: NamedSharding) -> jax.Array:
    """An array on the devices of all processes, each of which has the whole of it on its host."""
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


# Pieces


def _collected(array: np.ndarray, function: Callable[[jax.Array], jax.Array]) -> np.ndarray:
    """`function` of everybody's array, stacked, made on one device of each process."""
    mesh = Mesh(np.array(_firsts()), ("processes",))
    shape = (_count, *array.shape)
    spread = NamedSharding(mesh, PartitionSpec("processes"))
    stacked = jax.make_array_from_callback(shape, spread, lambda _: array[None])
    return np.asarray(_whole(mesh, function)(stacked))


@cache
def _whole(mesh: Mesh, function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(function, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _same(stacked: jax.Array) -> jax.Array:
    return stacked


def _summed(stacked: jax.Array) -> jax.Array:
    return stacked.sum(axis=0, dtype=stacked.dtype)


def _devices_of(index: int) -> list[jax.Device]:
    return [device for device in jax.devices() if device.process_index == index]


def _firsts() -> list[jax.Device]:
    return [_devices_of(index)[0] for index in range(_count)]


def _numbers(devices: Sequence[jax.Device]) -> tuple[int, ...]:
    return tuple(device.id for device in devices)


@contextmanager
def _communicating() -> Iterator[None]:
    """A collective that is not the engine's: after an error in it nobody knows who has heard what."""
    global _lost
    try:
        yield
    except BaseException as error:
        _lost = True
        if isinstance(error, Exception):
            raise _gone(error) from error
        raise


def _give_up() -> None:
    global _lost
    _lost = True


def _gone(error: BaseException) -> ProcessError:
    if "context initialization failed" in str(error):
        return ProcessError(
            f"process {_number} cannot connect to another: each machine's host name must resolve to its network "
            "address, not to 127.0.1.1 (see /etc/hosts), no firewall may intervene, and all processes must arrive "
            f"within half a minute, even one that compiles more slowly ({_first_line(error)})"
        )
    if "Timed out waiting" in str(error):
        return ProcessError(
            f"process {_number} has waited too long for another one, which hangs, or is much slower to compile or "
            f"load its data ({_first_line(error)})"
        )
    return ProcessError(
        f"process {_number} has lost another process, which ended or cannot be reached: its output has the "
        f"reason ({_first_line(error)})"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
