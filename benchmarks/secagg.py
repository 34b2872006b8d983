"""What secure aggregation costs: 100 clients, 10^6 parameters, words of 32 bits, on this CPU.

    python benchmarks/secagg.py [--clients 100] [--dimension 1000000] [--json results.json]

A client's masking is compared with the bare keystream for the same bytes (AES-256-CTR in the same chunks, nothing
added); the server's work with a plain NumPy sum of the same vectors. Each pair is measured in turns in one run and
shown as a ratio of medians: ratios hold where times do not. With Flower installed (flwr) one pair mask of its
SecAgg+ is measured beside one of ours, by its own functions, for the same vector.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dither.secagg import messages, primitives
from dither.secagg.encoding import FixedPoint
from dither.secagg.messages import Kind
from dither.secagg.session import LocalFederation


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def medians(repeats: int, **runs: Callable[[], object]) -> dict[str, float]:
    """The median time of each, measured in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(seconds(run))
    return {name: statistics.median(values) for name, values in times.items()}


def bare_keystream(streams: int, size: int) -> None:
    """What `primitives.mask` does, without the additions."""
    buffer = bytearray(primitives._CHUNK + 16)
    ciphers = [primitives.keystream(primitives.fresh_key()) for _ in range(streams)]
    for start in range(0, size, primitives._CHUNK):
        zeros = primitives._ZEROS[: min(primitives._CHUNK, size - start)]
        for cipher in ciphers:
            cipher.update_into(zeros, buffer)


def measure(clients: int, dimension: int, repeats: int) -> dict[str, float]:
    how = FixedPoint(scale_bits=10, modulus_bits=32, bound=8.0, num_clients=clients)
    federation = LocalFederation(clients, how)
    server = federation.server
    rng = np.random.default_rng(0)
    values = [rng.integers(0, 2**32, dimension, np.uint32) for _ in range(clients)]
    size = 4 * dimension

    keys = [(primitives.fresh_key(), 1) for _ in range(clients - 1)]
    scratch = values[0].copy()
    message = server.announce(0, range(clients), dimension)
    uploads = [client.upload(message, value) for client, value in zip(federation.clients, values, strict=True)]
    turn = iter(range(1, 1_000_000))

    def whole_upload() -> None:  # a new attempt each time, from announcement to signed bytes
        announced = server.announce(next(turn), range(clients), dimension)
        federation.clients[1].upload(announced, values[1])

    opened = server._attempt
    found = medians(
        repeats,
        keystream=lambda: bare_keystream(clients - 1, size),
        masks=lambda: primitives.mask(scratch, keys),
        upload=whole_upload,
    )

    server._attempt = opened
    for upload in uploads:
        server.upload(upload)
    for who, request in server.unseal().items():
        if who != 1:  # its measured uploads have taken it to later rounds
            server.shares(federation.clients[who].unseal(request))
    plain = np.zeros(dimension, np.uint32)
    for value in values:
        plain += value
    sealed = copy.deepcopy(server._attempt)
    if not np.array_equal(server.open(), plain):
        raise SystemExit("the sum is wrong")
    vectors = [np.frombuffer(upload[-64 - size : -64], np.uint32) for upload in uploads]

    def add_all() -> np.ndarray:
        total = np.zeros(dimension, np.uint32)
        for vector in vectors:
            total += vector
        return total

    def add_and_open() -> None:
        server._attempt = copy.copy(sealed)
        server._attempt.total = add_all()  # pair masks cancel by being added
        server.open()

    def check_signatures() -> None:
        for upload, client in zip(uploads, federation.clients, strict=True):
            received = messages.parse(upload, federation=server.federation, expect=Kind.UPLOAD)
            received.verify(client.signing.public)

    found |= medians(
        max(repeats, 7),
        plain_sum=add_all,
        unmask=add_and_open,
        signatures=check_signatures,
    )
    return found


def flower(dimension: int, repeats: int) -> dict[str, float] | None:
    """One pair mask added to the vector: Flower's way and ours; None where Flower is not installed."""
    try:
        from flwr.common.secure_aggregation.ndarrays_arithmetic import parameters_addition
        from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
    except ImportError:
        return None
    theirs = [np.zeros(dimension, np.int64)]
    ours = np.zeros(dimension, np.uint32)
    key = primitives.fresh_key()
    return medians(
        repeats,
        flower_mask=lambda: parameters_addition(theirs, pseudo_rand_gen(key, 2**32, [(dimension,)])),
        our_mask=lambda: primitives.mask(ours, [(key, 1)]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--dimension", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    chosen = parser.parse_args()
    found = measure(chosen.clients, chosen.dimension, chosen.repeats)
    peer = flower(chosen.dimension, 9)
    found |= peer or {}
    rows = [
        ("client: bare keystream", "keystream", "keystream", None),
        ("client: masks", "masks", "keystream", 2.0),
        ("client: whole upload", "upload", "keystream", 2.0),
        ("server: plain sum", "plain_sum", "plain_sum", None),
        ("server: sum and unseal", "unmask", "plain_sum", 2.0),
        ("server: signatures", "signatures", "plain_sum", None),
    ]
    if peer:
        rows += [
            ("one mask: ours", "our_mask", "our_mask", None),
            ("one mask: Flower SecAgg+", "flower_mask", "our_mask", None),
        ]
    print(f"{chosen.clients} clients, {chosen.dimension} words of 32 bits")
    table = []
    for label, name, base, most in rows:
        ratio = found[name] / found[base]
        verdict = "" if most is None else f"  (at most {most:g}x: {'yes' if ratio <= most else 'NO'})"
        print(f"{label:26} {1e3 * found[name]:9.2f} ms   {ratio:6.2f}x{verdict}")
        table.append({"what": label, "seconds": found[name], "ratio": ratio, "at_most": most})
    if not peer:
        print("Flower is not installed: no comparison with SecAgg+ (pip install 'flwr>=1.41,<1.43')")
    if chosen.json:
        inputs = {"clients": chosen.clients, "dimension": chosen.dimension, "repeats": chosen.repeats}
        chosen.json.write_text(json.dumps({**inputs, "rows": table}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
