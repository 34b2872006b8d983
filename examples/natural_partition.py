"""Tables of your own, one for each institution, with a proven ε = 1.

Run it:   python examples/natural_partition.py
Five sites of unequal size hold invented patients. What is given: a schema with public bounds, the tables, and ε.
Dither chooses method, rounds, batches, rate and clip from the number of records.
"""

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

import dither

SCHEMA = """
origin = "public"                 # every value below is known without looking at anybody
label = {column = "ill", classes = ["no", "yes"]}
columns = [
    {name = "age", type = "numeric", bounds = [0, 110]},
    {name = "pressure", type = "numeric", bounds = [40, 260]},
    {name = "smoker", type = "categorical", categories = ["no", "yes"]},
]
"""


def patients(count: int = 12_000) -> pd.DataFrame:
    """Invented records; sites differ in age."""
    rng = np.random.default_rng(7)
    site = rng.choice(["north", "south", "east", "west", "island"], count, p=[0.4, 0.25, 0.15, 0.12, 0.08])
    age = np.clip(rng.normal(50, 18, count) + 4 * (site == "island"), 18, 100).round()
    pressure = rng.normal(130, 18, count).round()
    smoker = rng.choice(["no", "yes"], count, p=[0.8, 0.2])
    risk = 0.06 * (age - 55) + 0.04 * (pressure - 130) + 1.2 * (smoker == "yes")
    ill = np.where(rng.random(count) < 1 / (1 + np.exp(-risk)), "yes", "no")
    return pd.DataFrame({"age": age, "pressure": pressure, "smoker": smoker, "site": site, "ill": ill})


def main(folder: Path, **values: int) -> dither.Report:
    """Train over the sites, and return the report."""
    (folder / "schema.toml").write_text(SCHEMA, encoding="utf-8")
    sites = dict(iter(patients().groupby("site")))
    spec = {"data.schema": str(folder / "schema.toml"), "data.test_public": True, "privacy.epsilon": 1.0, **values}
    return dither.run(spec, data=sites, out=folder / "run", ledger=folder / "ledger.sqlite")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(main(Path(place)))
