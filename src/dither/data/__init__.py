"""Data sets as arrays, and which client holds which rows.

>>> from dither import data
>>> adult = data.load("adult")                                          # downloaded once, verified, cached
>>> patients = data.load(path="patients.csv", label="outcome", schema="schema.toml")
>>> clients = data.partition(adult, kind="iid", num_clients=100, seed=0)

Nothing here imports JAX; pandas, scikit-learn, matplotlib and pooch are imported when a function needs them.
"""

from dither.data.arrays import check_unchanged, content_digest, folder_digest, open_folder, read_arrays
from dither.data.catalog import entries, get, hash_records, load, packaged_schema
from dither.data.dataset import (
    ClientPartition,
    Dataset,
    MappedArray,
    all_records,
    blank_features,
    partition,
    per_client_split,
    pool,
    public_part,
    row_split,
    row_split_sizes,
    stratified_split,
    stream,
    zeros_aligned,
)
from dither.data.drafts import Draft, draft
from dither.data.hashing import RecordHashes, file_digest, hash_table
from dither.data.plots import class_counts, describe, draw_partition, partition_table
from dither.data.schema import (
    NOT_COVERED,
    Categorical,
    Encoded,
    Label,
    Numeric,
    Schema,
    propose_task,
    with_label_bounds,
)
from dither.data.tables import read_table, table_files
from dither.data.transforms import NORM_BOUND, transform, transformed
