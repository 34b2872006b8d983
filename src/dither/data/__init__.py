"""Data sets as arrays, and who holds which rows.

>>> from dither import data
>>> adult = data.load("adult")                                          # downloaded once, verified, cached
>>> own = data.load(path="patients.csv", label="outcome", schema="schema.toml")
>>> clients = data.partition(adult, kind="iid", num_clients=100, seed=0)

Nothing here imports JAX; pandas, scikit-learn and matplotlib are imported when a function needs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Public name -> the module of this room that holds it.
_EXPORTS = {
    "Dataset": "dataset",
    "joined": "dataset",
    "pool": "dataset",
    "public_part": "dataset",
    "stratified_split": "dataset",
    "stream": "dataset",
    "Mapped": "mapped",
    "zeros_aligned": "mapped",
    "arrays_of": "folders",
    "folder_digest": "folders",
    "of_file": "rows",
    "of_table": "rows",
    "Categorical": "schema",
    "Encoded": "schema",
    "Label": "schema",
    "Numeric": "schema",
    "Schema": "schema",
    "draft_schema": "drafting",
    "encode_features": "tables",
    "read_arrays": "tables",
    "read_table": "tables",
    "Entry": "catalog",
    "entries": "catalog",
    "get": "catalog",
    "load": "catalog",
    "packaged_schema": "catalog",
    "PARTITIONS": "partitions",
    "ClientPartition": "partitions",
    "partition": "partitions",
    "per_client_split": "partitions",
    "class_counts": "pictures",
    "describe": "pictures",
    "draw_partition": "pictures",
    "partition_table": "pictures",
}

__all__ = list(_EXPORTS)

if TYPE_CHECKING:
    from dither.data.catalog import Entry as Entry
    from dither.data.catalog import entries as entries
    from dither.data.catalog import get as get
    from dither.data.catalog import load as load
    from dither.data.catalog import packaged_schema as packaged_schema
    from dither.data.dataset import Dataset as Dataset
    from dither.data.dataset import joined as joined
    from dither.data.dataset import pool as pool
    from dither.data.dataset import public_part as public_part
    from dither.data.dataset import stratified_split as stratified_split
    from dither.data.dataset import stream as stream
    from dither.data.drafting import draft_schema as draft_schema
    from dither.data.folders import arrays_of as arrays_of
    from dither.data.folders import folder_digest as folder_digest
    from dither.data.mapped import Mapped as Mapped
    from dither.data.mapped import zeros_aligned as zeros_aligned
    from dither.data.partitions import PARTITIONS as PARTITIONS
    from dither.data.partitions import ClientPartition as ClientPartition
    from dither.data.partitions import partition as partition
    from dither.data.partitions import per_client_split as per_client_split
    from dither.data.pictures import class_counts as class_counts
    from dither.data.pictures import describe as describe
    from dither.data.pictures import draw_partition as draw_partition
    from dither.data.pictures import partition_table as partition_table
    from dither.data.schema import Categorical as Categorical
    from dither.data.schema import Encoded as Encoded
    from dither.data.schema import Label as Label
    from dither.data.schema import Numeric as Numeric
    from dither.data.schema import Schema as Schema
    from dither.data.tables import encode_features as encode_features
    from dither.data.tables import read_arrays as read_arrays
    from dither.data.tables import read_table as read_table


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"dither.data.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'dither.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
