"""Data of your own, split as it lies: one client for each institution named in a column, proven ε = 1.

Run it:   python examples/natural_partition.py
It invents patients at five sites of unequal size, writes a schema whose bounds are public knowledge, trains, and
prints what was proved. Your own table needs the same: a label, a column that names the holder, public bounds.
"""

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

import dither

SITES = {"north": 0.4, "south": 0.25, "east": 0.15, "west": 0.12, "island": 0.08}
SCHEMA = """
origin = "public"                 # every value below is known without looking at anybody

[label]
column = "ill"
classes = ["no", "yes"]

[[columns]]
name = "age"
type = "numeric"
bounds = [0.0, 110.0]

[[columns]]
name = "pressure"
type = "numeric"
bounds = [40.0, 260.0]

[[columns]]
name = "smoker"
type = "categorical"
categories = ["no", "yes"]
"""


def patients(count: int = 12_000) -> pd.DataFrame:
    """Invented records; sites differ in age."""
    rng = np.random.default_rng(7)
    site = rng.choice(list(SITES), count, p=list(SITES.values()))
    age = np.clip(rng.normal(50, 18, count) + 4 * (site == "island"), 18, 100).round()
    pressure = rng.normal(130, 18, count).round()
    smoker = rng.choice(["no", "yes"], count, p=[0.8, 0.2])
    risk = 0.06 * (age - 55) + 0.04 * (pressure - 130) + 1.2 * (smoker == "yes")
    ill = np.where(rng.random(count) < 1 / (1 + np.exp(-risk)), "yes", "no")
    return pd.DataFrame({"age": age, "pressure": pressure, "smoker": smoker, "site": site, "ill": ill})


def main(folder: Path, rounds: int = 40) -> dither.Report:
    """Write the table and its schema, train, return the run."""
    table, schema = folder / "patients.csv", folder / "schema.toml"
    patients().to_csv(table, index=False)
    schema.write_text(SCHEMA, encoding="utf-8")
    values = {
        "data.name": "",
        "data.path": str(table),
        "data.schema": str(schema),
        "data.partition": "column",
        "data.column": "site",
        "data.test_public": True,  # these patients are invented
        "num_clients": 0,  # one a value of the column
        "cohort_size": len(SITES),
        "num_rounds": rounds,
        "sampling_rate": 0.05,
        "batch_size": 64,
        "client_lr": 1.0,
        "compare": False,
        "privacy.epsilon": 1.0,
    }
    return dither.run("adult", values=values, out=folder / "run", ledger=folder / "ledger.sqlite")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        run = main(Path(made))
    print(f"test accuracy {run.accuracy:.3f} over {run.num_clients} sites")
    for row in run.epsilon.table:
        if row.view == "upload" and row.unit == "run":
            print(f"proven ε = {row.value:.3g} at δ = {row.delta:g}, {row.adjacency} ({row.recipe})")
