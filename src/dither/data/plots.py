"""Summary, table and plot of a data set and its partition."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dither.data.dataset import ClientPartition, Dataset, largest_remainder
from dither.data.tables import StrPath
from dither.errors import DataError

# Okabe and Ito's palette, distinguishable with any colour vision; black comes last.
OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
SEPARATE_BARS = 120  # with more clients than this the bars touch
NAMED_CLIENTS = 60  # with more than this their names would not be readable
MAX_RECTANGLES = 2500
LEGEND_CLASSES = 12
LABEL_BINS = 5  # of a regression


class PartitionRow(NamedTuple):
    """One client in the terminal's table. `mix` shows the classes in proportion, one symbol per class."""

    client: str
    records: int
    counts: tuple[int, ...]
    mix: str


def describe(dataset: Dataset) -> dict[str, Any]:
    """A summary of a data set, ready for a table or JSON."""
    bounds, dataset = dataset.label_bounds, binned(dataset)
    labels = np.concatenate([dataset.y_train, dataset.y_test])
    counts = np.bincount(labels[labels >= 0], minlength=len(dataset.classes)).tolist()  # without blanks
    records = dict(zip(dataset.classes, counts, strict=True))
    return {
        "name": dataset.name,
        "train_records": len(dataset.y_train),
        "test_records": len(dataset.y_test),
        "features": int(dataset.x_train.shape[1]),
        "image_shape": list(dataset.image_shape),
        "label_bounds": list(bounds or ()),
        "classes": list(dataset.classes),
        "class_records": records,
        "class_shares": {name: count / len(labels) for name, count in records.items()},
        "groups": 0 if dataset.groups is None else len(np.unique(dataset.groups)),
        "schema_digest": "" if dataset.schema is None else dataset.schema.digest(),
        "covered": dataset.covered,
        "notes": list(dataset.notes),
    }


def binned(dataset: Dataset) -> Dataset:
    """The data set with five equal parts of a regression's bounds as its classes; others as they are."""
    if dataset.label_bounds is None:
        return dataset
    edges = np.linspace(*dataset.label_bounds, LABEL_BINS + 1)
    names = tuple(f"{low:.4g} to {high:.4g}" for low, high in pairwise(edges))
    train, test = (
        (LABEL_BINS * y).astype(np.int32).clip(0, LABEL_BINS - 1) for y in (dataset.y_train, dataset.y_test)
    )
    return dataset._replace(classes=names, y_train=train, y_test=test, label_bounds=None)


def class_counts(dataset: Dataset, partition: ClientPartition) -> np.ndarray:
    """Records of each class at each client, int [num_clients, num_classes]."""
    dataset = binned(dataset)
    num_classes = len(dataset.classes)
    client_of = np.repeat(np.arange(len(partition.size)), partition.size)
    labels = dataset.y_train[partition.order]
    pair = client_of * num_classes + labels
    return np.bincount(pair[labels >= 0], minlength=len(partition.size) * num_classes).reshape(-1, num_classes)


def partition_table(dataset: Dataset, partition: ClientPartition, *, width: int = 24) -> list[PartitionRow]:
    """One row per client, with a text histogram of its classes."""
    rows: list[PartitionRow] = []
    counts = class_counts(dataset, partition)
    for client, name in enumerate(partition.names):
        shown = largest_remainder(counts[client], width) if counts[client].sum() else np.zeros(0, dtype=np.int64)
        mix = "".join(SYMBOLS[number % len(SYMBOLS)] * int(count) for number, count in enumerate(shown))
        rows.append(PartitionRow(name, int(partition.size[client]), tuple(counts[client].tolist()), mix))
    return rows


def draw_partition(dataset: Dataset, partition: ClientPartition, path: StrPath) -> Path:
    """Save a PNG with one stacked bar per client: height for records, colours for classes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dataset = binned(dataset)
    counts = class_counts(dataset, partition)
    num_clients, num_classes = counts.shape
    figure = Figure(figsize=(9.0, 4.0), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = _colours(num_classes)
    tops = np.cumsum(counts, axis=1)
    few = num_clients <= SEPARATE_BARS and num_clients * num_classes <= MAX_RECTANGLES
    gap = 0.1 if few else 0.0
    for number in range(num_classes):
        bottom = tops[:, number] - counts[:, number]
        if gap:
            axes.bar(np.arange(num_clients), counts[:, number], 1 - 2 * gap, bottom=bottom, color=colours[number])
        else:  # one polygon per class: 1,000 clients with 47 classes stay quick
            edges = np.arange(num_clients + 1) - 0.5
            axes.stairs(tops[:, number], edges, baseline=bottom, fill=True, color=colours[number], linewidth=0)
    axes.set_xlim(-0.5, num_clients - 0.5)
    axes.set_ylim(0, max(1.0, 1.05 * float(tops[:, -1].max())))
    axes.set_ylabel("records")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    _label_clients(axes, partition)
    _label_classes(figure, axes, dataset.classes, colours)
    smallest, largest = int(partition.size.min()), int(partition.size.max())
    sizes = f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
    plural = "client" if num_clients == 1 else "clients"
    axes.set_title(f"{dataset.name}: {num_clients:,} {plural}, {sizes} records each", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    target = Path(path)
    partial = target.with_name(f"{target.name}.tmp")
    try:
        figure.savefig(partial, format="png")
        os.replace(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"cannot write the picture {str(target)!r}: {error.strerror}") from None
    return target


def _colours(num_classes: int) -> list[Any]:
    if num_classes <= len(OKABE_ITO):
        return list(OKABE_ITO[:num_classes])
    from matplotlib import colormaps

    # Lightness is monotonic in viridis, so neighbours differ with any colour vision and in print.
    return [colormaps["viridis"](position) for position in np.linspace(0.0, 1.0, num_classes)]


def _label_clients(axes: Any, partition: ClientPartition) -> None:
    names = partition.names
    if names[0] == "client 0":
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_xlabel("client")
    elif len(names) <= NAMED_CLIENTS:
        short = [name if len(name) <= 18 else f"{name[:17]}…" for name in names]
        crowded = len(names) > 8 or max(map(len, short)) * len(names) > 90
        axes.set_xticks(
            range(len(names)), short, rotation=45 if crowded else 0, ha="right" if crowded else "center"
        )
        axes.tick_params(axis="x", labelsize=8 if crowded else 9)
    else:
        axes.set_xlabel("institution")


def _label_classes(figure: Any, axes: Any, classes: tuple[str, ...], colours: list[Any]) -> None:
    if len(classes) <= LEGEND_CLASSES:
        from matplotlib.patches import Patch

        # In the order of the colours in a bar, top to bottom.
        pairs = list(zip(classes, colours, strict=True))[::-1]
        handles = [Patch(color=colour, label=name) for name, colour in pairs]
        axes.legend(handles=handles, title="class", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        return
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    edges = np.arange(len(classes) + 1) - 0.5
    scale = ScalarMappable(BoundaryNorm(edges, len(classes)), ListedColormap(colours))
    bar = figure.colorbar(scale, ax=axes, label="class", pad=0.01)
    step = max(1, len(classes) // 12)
    bar.set_ticks(range(0, len(classes), step), labels=classes[::step])
    bar.minorticks_off()
