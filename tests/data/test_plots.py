"""A partition in numbers, text and a picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dither import data
from dither.errors import DataError


@pytest.fixture(scope="module")
def digits() -> data.Dataset:
    return data.load("digits")


def test_describe_is_ready_for_json(digits: data.Dataset) -> None:
    facts = json.loads(json.dumps(data.describe(digits)))
    assert facts["train_records"] == 1438
    assert facts["test_records"] == 359
    assert facts["features"] == 64
    assert sum(facts["class_records"].values()) == 1797
    assert sum(facts["class_shares"].values()) == pytest.approx(1.0)
    assert facts["covered"] is True


def test_counts_by_client(digits: data.Dataset) -> None:
    clients = data.partition(digits, kind="dirichlet", num_clients=5, seed=0)
    counts = data.class_counts(digits, clients)
    for client in range(5):
        expected = np.bincount(digits.y_train[clients.rows(client)], minlength=10)
        np.testing.assert_array_equal(counts[client], expected)


def test_table(digits: data.Dataset) -> None:
    clients = data.partition(digits, kind="one-class", num_clients=20, seed=0)
    rows = data.partition_table(digits, clients, width=10)
    assert len(rows) == 20
    assert rows[0].mix == "0" * 10
    assert rows[-1].mix == "9" * 10
    assert all(sum(row.counts) == row.records for row in rows)


@pytest.mark.parametrize("num_clients", [1, 10, 1000])
def test_picture(digits: data.Dataset, tmp_path: Path, num_clients: int) -> None:
    clients = data.partition(digits, kind="iid", num_clients=num_clients, seed=0)
    path = data.draw_partition(digits, clients, tmp_path / "partition.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5_000
    assert [file.name for file in tmp_path.iterdir()] == ["partition.png"]


def test_picture_with_named_institutions(patients: Path, tmp_path: Path) -> None:
    dataset = data.load(path=patients, label="outcome", group_column="hospital")
    clients = data.partition(dataset, kind="column", num_clients=0, seed=0)
    assert data.draw_partition(dataset, clients, tmp_path / "p.png").exists()
    with pytest.raises(DataError, match="cannot write the picture"):
        data.draw_partition(dataset, clients, tmp_path / "nowhere" / "p.png")
