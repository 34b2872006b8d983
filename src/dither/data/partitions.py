"""Which client holds which rows: the partitions that the papers use.

A `ClientPartition` holds row numbers and copies no records. Clients may differ in size; padding is the engine's
task. Every kind is deterministic in the seed, and every client has at least one record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dither.data.dataset import Dataset, largest_remainder, stream
from dither.errors import DataError, did_you_mean

PARTITIONS = ("iid", "one-class", "similarity", "dirichlet", "column")
DIRICHLET_DRAWS = 100


class ClientPartition(NamedTuple):
    """The rows of each client: `order[start[k] : start[k] + size[k]]` belong to client k."""

    order: np.ndarray  # int32 [total], row numbers grouped by client
    start: np.ndarray  # int32 [num_clients]
    size: np.ndarray  # int32 [num_clients]
    names: tuple[str, ...]

    def rows(self, client: int) -> np.ndarray:
        """The row numbers of one client."""
        start = int(self.start[client])
        return self.order[start : start + int(self.size[client])]


# reason: the keywords are the keys of [data] in a spec
def partition(
    dataset_or_labels: Dataset | np.ndarray | Sequence[int],
    *,
    kind: str,
    num_clients: int,
    seed: int,
    similarity: float = 0.0,
    alpha: float = 0.5,
    groups: np.ndarray | Sequence[str] | None = None,
    records_per_client: int = 0,
) -> ClientPartition:
    """Distribute the training records over clients.

    "iid"         a uniform random split; sizes differ by at most one
    "one-class"   each client holds one class; the clients per class are in proportion to its frequency
    "similarity"  `similarity` percent of each client's records i.i.d., the rest by sorting on the label and
                  cutting into equal runs (Karimireddy et al. 2020)
    "dirichlet"   each class spread over clients by Dirichlet(`alpha`) shares, so sizes differ (Li et al.
                  2022); with `records_per_client`, each client of that size with its own Dirichlet mix of
                  classes (Hsu et al. 2019)
    "column"      each value of a column of the table is one client; `num_clients` is then 0 or their number

    `records_per_client` > 0 gives every client exactly that many records and leaves the rest unused.
    """
    if isinstance(dataset_or_labels, Dataset):
        labels = dataset_or_labels.y_train
        groups = dataset_or_labels.groups if groups is None else groups
    else:
        labels = np.asarray(dataset_or_labels)
    if kind not in PARTITIONS:
        raise DataError(f"unknown partition {kind!r}{did_you_mean(str(kind), PARTITIONS)}")
    if records_per_client < 0:
        raise DataError(f"records_per_client={records_per_client} is negative; give 0 for all records")
    rng = stream(seed, "partition")
    if kind == "column":
        return _by_column(labels, groups, num_clients, records_per_client, rng)
    if num_clients < 1:
        raise DataError(f"num_clients={num_clients}; at least 1 client is needed")
    if num_clients > len(labels):
        raise DataError(
            f"num_clients={num_clients} exceeds the {len(labels)} records: client {len(labels)} would be "
            f"empty; use at most {len(labels)} clients"
        )
    needed = num_clients * records_per_client
    if needed > len(labels):
        raise DataError(
            f"{num_clients} clients x {records_per_client} records = {needed}, but there are {len(labels)}; "
            f"lower num_clients or records_per_client"
        )
    if kind == "one-class":
        rows = _one_class(labels, num_clients, records_per_client, rng)
    elif kind == "dirichlet" and records_per_client:
        rows = _dirichlet_mixes(labels, num_clients, records_per_client, alpha, rng)
    elif kind == "dirichlet":
        rows = _dirichlet_shares(labels, num_clients, alpha, rng)
    else:
        # "iid" is 100% similarity.
        percent = 100.0 if kind == "iid" else similarity
        rows = _similarity(labels, num_clients, records_per_client, percent, rng)
    return _partition(rows, tuple(f"client {client}" for client in range(num_clients)))


def per_client_split(
    partition: ClientPartition, *, fractions: Sequence[float] = (0.8, 0.1, 0.1), seed: int
) -> tuple[ClientPartition, ClientPartition, ClientPartition]:
    """Split each client's rows at random into train, test and validation; all index the same array.

    The first two sizes are rounded down and the third part takes the rest (3,052 -> 2,441 / 305 / 306).
    """
    if len(fractions) != 3 or min(fractions) < 0 or abs(sum(fractions) - 1.0) > 1e-9:
        raise DataError(f"fractions={tuple(fractions)} must be three numbers >= 0 that sum to 1")
    rng = stream(seed, "per-client split")
    parts: tuple[list[np.ndarray], ...] = ([], [], [])
    for client, name in enumerate(partition.names):
        rows = rng.permutation(partition.rows(client))
        # The small addend undoes products such as 0.29 * 100 = 28.999999999999996.
        first = math.floor(fractions[0] * len(rows) + 1e-9)
        second = first + math.floor(fractions[1] * len(rows) + 1e-9)
        for part, piece, fraction in zip(parts, np.split(rows, [first, second]), fractions, strict=True):
            if fraction > 0 and len(piece) == 0:
                raise DataError(
                    f"{name!r} has {len(rows)} records, too few for a part of {fraction:g}; use fewer "
                    f"clients or other fractions"
                )
            part.append(piece)
    train, test, validation = (_partition(part, partition.names) for part in parts)
    return train, test, validation


# Each kind returns the rows of every client.


def _similarity(
    labels: np.ndarray, num_clients: int, records_per_client: int, percent: float, rng: np.random.Generator
) -> list[np.ndarray]:
    if not 0.0 <= percent <= 100.0:
        raise DataError(f"similarity={percent} is a percentage; give a number from 0 to 100")
    total = num_clients * records_per_client or len(labels)
    rows = rng.permutation(len(labels))[:total]
    sizes = np.full(num_clients, total // num_clients)
    sizes[: total % num_clients] += 1
    shared = np.round(sizes * percent / 100.0).astype(np.int64)
    alike, rest = rows[: shared.sum()], rows[shared.sum() :]
    rest = rest[np.argsort(labels[rest], kind="stable")]
    alike_parts = np.split(alike, np.cumsum(shared)[:-1])
    sorted_parts = np.split(rest, np.cumsum(sizes - shared)[:-1])
    return [np.concatenate(parts) for parts in zip(alike_parts, sorted_parts, strict=True)]


def clients_per_class(counts: np.ndarray, num_clients: int) -> np.ndarray:
    """Clients per class, in proportion to its records by largest remainder, at least one."""
    if num_clients < len(counts):
        raise DataError(
            f"num_clients={num_clients} is below the {len(counts)} classes; one-class needs one client per class"
        )
    clients = largest_remainder(counts, num_clients)
    while clients.min() == 0:
        clients[np.argmax(clients)] -= 1
        clients[np.argmin(clients)] += 1
    return clients


def _one_class(
    labels: np.ndarray, num_clients: int, records_per_client: int, rng: np.random.Generator
) -> list[np.ndarray]:
    values, counts = np.unique(labels, return_counts=True)
    parts: list[np.ndarray] = []
    for value, count, clients in zip(values, counts, clients_per_class(counts, num_clients), strict=True):
        rows = rng.permutation(np.flatnonzero(labels == value))
        if records_per_client:
            needed = int(clients) * records_per_client
            if needed > count:
                raise DataError(
                    f"class {value} has {count} records, but {clients} clients x {records_per_client} "
                    f"records = {needed}; lower records_per_client to {count // clients} or less"
                )
            rows = rows[:needed]
        parts += np.array_split(rows, clients)
    return parts


def _dirichlet_shares(
    labels: np.ndarray, num_clients: int, alpha: float, rng: np.random.Generator
) -> list[np.ndarray]:
    _check_alpha(alpha)
    class_rows = [rng.permutation(np.flatnonzero(labels == value)) for value in np.unique(labels)]
    # A small alpha sometimes leaves a client empty: draw again, as Li et al. do.
    for _ in range(DIRICHLET_DRAWS):
        shares = rng.dirichlet(np.full(num_clients, alpha), size=len(class_rows))
        cuts = [
            np.round(np.cumsum(share)[:-1] * len(rows)).astype(np.int64)
            for share, rows in zip(shares, class_rows, strict=True)
        ]
        pieces = [np.split(rows, cut) for rows, cut in zip(class_rows, cuts, strict=True)]
        parts = [np.concatenate(of_client) for of_client in zip(*pieces, strict=True)]
        empty = [client for client, part in enumerate(parts) if len(part) == 0]
        if not empty:
            return parts
    raise DataError(
        f"client {empty[0]} was still empty after {DIRICHLET_DRAWS} draws (alpha={alpha}, "
        f"num_clients={num_clients}); raise alpha, use fewer clients, or set records_per_client for equal sizes"
    )


def _dirichlet_mixes(
    labels: np.ndarray, num_clients: int, records_per_client: int, alpha: float, rng: np.random.Generator
) -> list[np.ndarray]:
    _check_alpha(alpha)
    class_rows = [rng.permutation(np.flatnonzero(labels == value)) for value in np.unique(labels)]
    left = np.array([len(rows) for rows in class_rows])
    used = np.zeros_like(left)
    parts: list[np.ndarray] = []
    for mix in rng.dirichlet(np.full(len(class_rows), alpha), size=num_clients):
        taken = np.zeros_like(left)
        while (short := records_per_client - int(taken.sum())) > 0:
            # An exhausted class leaves the mix; a mix of exhausted classes only becomes uniform.
            open_classes = left - used - taken > 0
            weights = np.where(open_classes, mix, 0.0)
            weights = weights if weights.sum() > 1e-12 else open_classes.astype(np.float64)
            drawn = rng.multinomial(short, weights / weights.sum())
            taken += np.minimum(drawn, left - used - taken)
        pieces = zip(class_rows, used, taken, strict=True)
        parts.append(np.concatenate([rows[first : first + count] for rows, first, count in pieces]))
        used += taken
    return parts


def _check_alpha(alpha: float) -> None:
    if not (alpha > 0 and math.isfinite(alpha)):
        raise DataError(f"alpha={alpha} must be a positive number")


def _by_column(
    labels: np.ndarray,
    groups: np.ndarray | Sequence[str] | None,
    num_clients: int,
    records_per_client: int,
    rng: np.random.Generator,
) -> ClientPartition:
    if groups is None:
        raise DataError(
            "a column partition needs the column: load the data with group_column='COLUMN' (for a folder of "
            "arrays, add groups.npy to it)"
        )
    values = np.asarray(groups)
    if len(values) != len(labels):
        raise DataError(f"groups has {len(values)} values for {len(labels)} records; one per record is needed")
    names, client_of = np.unique(values, return_inverse=True)
    if num_clients not in (0, len(names)):
        raise DataError(
            f"num_clients={num_clients}, but the column has {len(names)} values; set num_clients to "
            f"{len(names)} or 0"
        )
    parts: list[np.ndarray] = []
    # One sort for all clients; the rows of each are ascending.
    counts = np.bincount(client_of, minlength=len(names))
    of_clients = np.split(np.argsort(client_of, kind="stable"), np.cumsum(counts)[:-1])
    for name, rows in zip(names, of_clients, strict=True):
        if records_per_client:
            if len(rows) < records_per_client:
                raise DataError(
                    f"client {str(name)!r} has {len(rows)} records, records_per_client={records_per_client}; "
                    f"lower it to {len(rows)} or less"
                )
            rows = rng.permutation(rows)[:records_per_client]
        parts.append(rows)
    return _partition(parts, tuple(str(name) for name in names))


def _partition(rows: Sequence[np.ndarray], names: tuple[str, ...]) -> ClientPartition:
    size = np.array([len(part) for part in rows], dtype=np.int32)
    start = (np.cumsum(size) - size).astype(np.int32)
    return ClientPartition(np.concatenate(rows).astype(np.int32), start, size, names)
