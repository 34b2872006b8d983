"""How often a ledger takes two tables for the same people: changed tables of the same people, and tables of other
people from the same population.

    python benchmarks/same_people.py [--splits N]

Each table is split into two halves of different people, N times at random. One half is known to a ledger. Counted
is how often the ledger recognises the changed half ("seen"), and how often it takes the other half for it
("mistaken"), by whole records or by parts of records (docs/privacy.md, "The same records in another file").
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import pandas as pd
from sklearn import datasets

from dither import data
from dither.accounting.ledger import sketch
from dither.data.hashing import hash_table


def tables() -> dict[str, pd.DataFrame]:
    """Real tables, and made-up ones that are hard: few values, row numbers, columns that follow from others."""
    rng = np.random.default_rng(0)
    adult = pd.read_csv(data.get("adult")[0], header=None, skipinitialspace=True)
    adult.columns = [f"c{number}" for number in adult]
    places, people = rng.integers(0, 900, 20_000), rng.integers(0, 3000, 20_000)
    known = {
        "name": rng.permutation(3000) + 10**6,
        "born": rng.integers(0, 30_000, 3000),
        "sex": rng.integers(1, 3, 3000),
    }
    return {
        "Adult": adult,
        "Adult, 2,000 records": adult.sample(2000, random_state=0),
        "Adult without its weight": adult.drop(columns="c2"),
        "breast cancer": datasets.load_breast_cancer(as_frame=True).frame,
        "diabetes": datasets.load_diabetes(as_frame=True, scaled=False).frame,
        "wine": datasets.load_wine(as_frame=True).frame,
        "iris": datasets.load_iris(as_frame=True).frame,
        "answers 1 to 5, 10 questions": pd.DataFrame(rng.integers(1, 6, (5000, 10))),
        "answers 1 to 5, 20 questions": pd.DataFrame(rng.integers(1, 6, (5000, 20))),
        "yes or no, 30 questions": pd.DataFrame(rng.integers(0, 2, (5000, 30))),
        "places and their regions": pd.DataFrame(
            {
                "zip": places,
                "city": places // 2 + 5000,
                "state": places // 90 + 1,
                "age": rng.integers(1, 90, 20_000),
                "sex": rng.integers(1, 3, 20_000),
                "bmi": rng.normal(25, 4, 20_000).round(1),
                "pressure": rng.normal(120, 15, 20_000).round(),
            }
        ),
        "several visits a person": pd.DataFrame({name: each[people] for name, each in known.items()}).assign(
            day=rng.integers(1, 1000, 20_000),
            code=rng.integers(1, 300, 20_000),
            pulse=rng.integers(50, 110, 20_000),
        ),
    }


def changes(half: pd.DataFrame, other: pd.DataFrame, rng: np.random.Generator) -> dict[str, pd.DataFrame]:
    """The same people in another table."""
    columns = list(half.columns)
    telling = max(columns, key=lambda name: half[name].nunique())
    any_one = columns[rng.integers(len(columns))]
    fewer = half.drop(columns=any_one)
    renamed = fewer[list(fewer.columns)[::-1]].sample(frac=1, random_state=1)
    tenth = len(half) // 10
    turned = half[columns[::-1]].sample(frac=1, random_state=1)
    return {
        "renamed, shuffled": turned.set_axis([f"v{i}" for i in range(len(columns))], axis=1),
        "a column less": fewer,
        "the most telling column less": half.drop(columns=telling),
        "a column more": half.assign(more=rng.normal(size=len(half))),
        "a constant more": half.assign(more="north"),
        "a column less, 10% others": pd.concat([fewer[tenth:], other[fewer.columns][:tenth]]),
        "a column less, half of them": fewer[::2],
        "a column less, renamed, shuffled": renamed.set_axis([f"v{i}" for i in range(len(columns) - 1)], axis=1),
        "three columns less": half.drop(columns=rng.choice(columns, min(3, len(columns) - 2), replace=False)),
    }


def others(half: pd.DataFrame, other: pd.DataFrame) -> dict[str, tuple[pd.DataFrame, pd.DataFrame]]:
    """Other people: as they are, with rows that are numbered in both, and with a column less."""
    numbered = [each.assign(row=np.arange(len(each)), id=np.arange(len(each)) + 1) for each in (half, other)]
    return {
        "as they are": (half, other),
        "rows numbered": (numbered[0], numbered[1]),
        "a column less": (half, other.drop(columns=half.columns[1])),
    }


def verdict(old: sketch.Sketch, new: pd.DataFrame, key: bytes) -> sketch.Overlap:
    return sketch.scan(hash_table(new), key, [old]).shared(old)


def measure(splits: int) -> dict[str, dict[str, str]]:
    """Of each table and change, how many of the splits were taken for the same people."""
    found: dict[str, dict[str, str]] = {}
    for name, table in tables().items():
        counts: dict[str, list[float]] = {}
        for split in range(splits):
            rng = np.random.default_rng(split)
            shuffled = table.rename(columns=str).drop_duplicates().sample(frac=1, random_state=split)
            half, other = shuffled[: len(shuffled) // 2], shuffled[len(shuffled) // 2 :]
            key = rng.bytes(16)
            known = sketch.scan(hash_table(half), key).sketch
            for change, new in changes(half, other, rng).items():
                counts.setdefault(f"seen: {change}", []).append(bool(verdict(known, new, key).share))
            for change, (one, two) in others(half, other).items():
                shared = verdict(known if one is half else sketch.scan(hash_table(one), key).sketch, two, key)
                counts.setdefault(f"mistaken by parts: {change}", []).append(bool(shared.share) and shared.parts)
                counts.setdefault(f"mistaken by records: {change}", []).append(
                    bool(shared.share) and not shared.parts
                )
        found[name] = {change: f"{sum(each):.0f}/{splits}" for change, each in counts.items()}
        print(name, json.dumps(found[name], indent=1), flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, default=20)
    measure(parser.parse_args().splits)
