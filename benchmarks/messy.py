"""A table as institutions keep it: 200,000 records of 60 columns in six files. What a private model reaches on it.

    python benchmarks/messy.py make hospitals     # six files in six dialects, and hospitals-test.parquet
    python benchmarks/messy.py show hospitals     # Dither at proven ε = 1 against scikit-learn without privacy

The files differ in delimiter, encoding, decimal mark, order of columns and the word for a missing value. The
columns include ids, dates, free text, constants, two copies of the label and categories with thousands of levels.
Of the records 8% are positive; the label follows a logistic rule in 23 of the columns.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

RECORDS = 200_000
TEST_RECORDS = 40_000
SHARES = {"north": 0.30, "south": 0.22, "east": 0.18, "west": 0.14, "coast": 0.10, "hills": 0.06}
# How each institution writes its file. hills keeps Parquet.
DIALECTS = {
    "north": {"sep": ",", "encoding": "utf-8", "na_rep": ""},
    "south": {"sep": ";", "encoding": "cp1252", "decimal": ",", "na_rep": "NA"},
    "east": {"sep": "\t", "encoding": "utf-16", "na_rep": "n/a"},
    "west": {"sep": ",", "encoding": "utf-8", "na_rep": "-", "lineterminator": "\r\n", "quoting": 1},
    "coast": {"sep": "|", "encoding": "utf-8-sig", "na_rep": "NULL"},
}
LABEL = "readmitted"
RATE = 0.08  # of positive records


def make_table(count: int, rng: np.random.Generator, first_id: int = 100_000) -> pd.DataFrame:
    """Records of all institutions, in a random order."""
    columns: dict[str, np.ndarray] = {}
    score = np.zeros(count)

    def add(name: str, values: np.ndarray, effect: np.ndarray | None = None, missing: float = 0.0) -> None:
        nonlocal score
        if effect is not None:
            score = score + effect
        if missing:
            values = np.where(rng.random(count) < missing, None, values.astype(object))
        columns[name] = values

    columns["patient_id"] = first_id + np.arange(count)
    columns["visit"] = np.array([f"V{number:08x}" for number in rng.choice(2**31, count, replace=False)])
    days = rng.integers(0, 1461, count)
    admitted = np.datetime64("2019-01-01") + days.astype("timedelta64[D]")
    columns["admitted"] = admitted.astype(str)
    columns["discharged"] = (admitted + rng.integers(1, 20, count).astype("timedelta64[D]")).astype(str)

    age = rng.gamma(9, 7, count).clip(0, 105).round()
    add("age", age, 0.5 * (age - 63) / 20, missing=0.01)
    add("sex", rng.choice(["männlich", "weiblich"], count), missing=0.002)
    pressure = rng.normal(128, 18, count).round()
    add("systolic_pressure", pressure, 0.35 * (pressure - 128) / 18, missing=0.05)
    for number in range(14):  # laboratory values, four of them skewed
        values = rng.normal(size=count) if number % 4 else rng.exponential(1.0, count) - 1
        effect = rng.choice([-1, 1]) * (0.25 + 0.03 * number) * values if number < 9 else None
        scale, centre = 10.0 ** (number % 4 - 1), 5 * 10.0 ** (number % 4 - 1)
        add(f"lab_{number:02d}", (centre + scale * values).round(3), effect, missing=0.03 * (number % 5))
    for number in range(10):  # counts
        values = rng.poisson(1 + number % 3, count)
        add(f"count_{number:02d}", values, 0.3 * (values - 1) if number < 4 else None)
    for number in range(4):  # numbers that say nothing
        add(f"device_{number:02d}", rng.normal(100, 15, count).round(1))
    levels = ["très bas", "bas", "moyen", "élevé", "très élevé"]
    for number in range(10):  # categories
        codes = rng.integers(0, 3 + number % 3, count)
        effect = 0.6 * (codes - 1) if number < 5 else None
        add(f"grade_{number:02d}", np.array(levels)[codes], effect, missing=0.02 * (number % 3))
    ward = rng.choice(["A", "B", "C", "D", "E", "F", "G"], count)
    add("ward", ward, 0.5 * (ward == "B") - 0.5 * (ward == "F"))
    add("postcode", rng.integers(1000, 9999, count).astype(str) + " " + rng.choice(["AB", "CD", "EF"], count))
    add("diagnosis_code", np.array([f"{chr(65 + c // 100)}{c % 100:02d}" for c in rng.integers(0, 2000, count)]))
    columns["country"] = np.full(count, "NL")
    columns["software"] = np.full(count, "4.2")
    words = np.array(
        [
            "patient",
            "stable;",
            "cough,",
            "fever",
            "seen",
            "again",
            "after",
            "treatment",
            "no",
            "pain",
            "moved",
            "home",
        ]
    )
    notes = words[rng.integers(0, len(words), (count, 6))]
    columns["remarks"] = np.array([" ".join(row) + f" {n}" for n, row in enumerate(notes)])
    columns["contact"] = np.array([f"nurse{n}@hospital.example" for n in rng.integers(0, 10**6, count)])
    for number in range(5):
        add(f"flag_{number}", rng.choice(["Y", "N"], count, p=[0.3, 0.7]))

    offset = np.quantile(score + rng.logistic(size=count), 1 - RATE)
    positive = rng.random(count) < 1 / (1 + np.exp(-(score - offset)))
    columns[LABEL] = np.where(positive, "yes", "no")
    columns["readmitted_code"] = np.where(positive, 1, 0)  # copies of the label
    columns["bill_type"] = np.where(positive, "RE", "FI")
    return pd.DataFrame(columns)


def make(folder: Path, records: int = RECORDS, test_records: int = TEST_RECORDS, seed: int = 0) -> list[Path]:
    """Write the six files and a public test file; return the six."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    table = make_table(records + test_records, rng)
    table.iloc[records:].to_parquet(folder.parent / f"{folder.name}-test.parquet", index=False)
    ends = np.round(np.cumsum([0.0, *SHARES.values()]) * records).astype(int)
    paths = []
    for name, start, stop in zip(SHARES, ends[:-1], ends[1:], strict=True):
        part = table.iloc[start:stop]
        if name == "coast":  # the same columns in another order
            part = part[[*part.columns[::-1]]]
        if name in DIALECTS:
            paths.append(folder / f"{name}.csv")
            part.to_csv(paths[-1], index=False, **DIALECTS[name])  # type: ignore[call-overload]
        else:
            paths.append(folder / f"{name}.parquet")
            part.to_parquet(paths[-1], index=False)
    return paths


def show(folder: Path, out: Path) -> dict[str, float]:
    """Draft a schema from the public test records, train by Dither's own choices at ε = 1, and compare."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    import dither
    from dither import data

    public = folder.parent / f"{folder.name}-test.parquet"
    out.mkdir(parents=True)
    drafted = data.draft(public, LABEL)
    drafted.schema.as_public().save(out / "schema.toml")
    for column, why in drafted.excluded.items():
        print(f"left out: {column} {why}")
    values = {
        "data.path": str(folder),
        "data.schema": str(out / "schema.toml"),
        "data.test_path": str(public),
        "data.test_public": True,
        "privacy.epsilon": 1.0,
    }
    report = dither.run(values, out=out / "run", ledger=out / "ledger.sqlite")
    table = data.load(path=folder, test_path=public, schema=out / "schema.toml", encoding="standard")
    plain = LogisticRegression(max_iter=1000).fit(table.x_train, table.y_train)
    proven = report.epsilon.proven()
    result = {
        "proven epsilon": proven.value,
        "delta": proven.delta,
        "AUC of Dither": report.scores.model["auc"],
        "AUC of scikit-learn without privacy": roc_auc_score(table.y_test, plain.decision_function(table.x_test)),
    }
    print(report)
    for name, value in result.items():
        print(f"{name}: {value:.6g}")
    return result


if __name__ == "__main__":
    command, place = sys.argv[1], Path(sys.argv[2])
    if command == "make":
        make(place)
    else:
        show(place, place.parent / f"{place.name}-out")
