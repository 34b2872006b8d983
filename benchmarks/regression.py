"""Private linear regression: Dither's estimator against diffprivlib's LinearRegression at the same ε, and against
scikit-learn without privacy. Prints the table of docs/tasks.md.

    python benchmarks/regression.py --diffprivlib PYTHON

PYTHON is an interpreter that has diffprivlib (it needs an older scikit-learn than Dither does). Without it only
Dither's rows are made. Dither's ε is for one replaced record and δ = 1e-5; diffprivlib's is pure (δ = 0).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import train_test_split

import dither
from dither import data

EPSILONS = (1.0, 3.0)
# What is known of such measurements without looking at these patients
DIABETES_LOW = [18, 1, 10, 50, 50, 20, 10, 1, 2, 50]
DIABETES_HIGH = [90, 2, 60, 160, 400, 300, 120, 12, 8, 160]
DIFFPRIVLIB = """
import sys, json, warnings, numpy as np
from diffprivlib.models import LinearRegression
warnings.simplefilter("ignore")
f = np.load(sys.argv[1])
scores = []
for seed in range(int(sys.argv[3])):
    model = LinearRegression(epsilon=float(sys.argv[2]), bounds_X=(f["low"], f["high"]),
                             bounds_y=tuple(f["label"]), random_state=seed)
    model.fit(f["x"], f["y"])
    predicted = np.clip(model.predict(f["x_test"]), *f["label"])
    scores.append(1 - np.mean((predicted - f["y_test"]) ** 2) / np.var(f["y_test"]))
print(json.dumps(scores))
"""


def tables() -> dict[str, dict[str, np.ndarray]]:
    """Features, labels and public bounds of each table, split into training and test records."""
    diabetes, adult = load_diabetes(scaled=False), data.load("adult", features="ordinal")
    everything = np.concatenate([adult.x_train, adult.x_test]).astype(float)
    hours = adult.feature_names.index("hours-per-week")
    others = np.delete(everything, hours, axis=1)
    found = {
        "diabetes": (diabetes.data, diabetes.target, DIABETES_LOW, DIABETES_HIGH, (0, 400)),
        "Adult, hours a week": (others, everything[:, hours], np.zeros(13), np.ones(13), (0, 1)),
    }
    split = {}
    for name, (x, y, low, high, label) in found.items():
        x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.25, random_state=0)
        bounds = {
            "low": np.asarray(low, float),
            "high": np.asarray(high, float),
            "label": np.asarray(label, float),
        }
        split[name] = {"x": x_train, "y": y_train, "x_test": x_test, "y_test": y_test, **bounds}
    return split


def dither_scores(table: dict[str, np.ndarray], epsilon: float, seeds: int, place: Path) -> list[float]:
    scores = []
    for seed in range(seeds):
        model = dither.PrivateFederatedRegressor(
            epsilon=epsilon,
            feature_bounds=(table["low"], table["high"]),
            label_bounds=tuple(table["label"]),
            values={"privacy.adjacency": "replace-one"},
            random_state=seed,
            ledger=place / "ledger.json",
            new_ledger=True,
        ).fit(table["x"], table["y"])
        assert model.epsilon_ <= epsilon
        scores.append(float(model.score(table["x_test"], table["y_test"])))
    return scores


def shown(scores: list[float]) -> str:
    return f"{np.mean(scores):.3f} ± {np.std(scores, ddof=1):.3f}" if len(scores) > 1 else f"{scores[0]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--diffprivlib", help="a Python interpreter that has diffprivlib")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print("| table | records | ε | Dither | diffprivlib | scikit-learn, not private |\n|---|---|---|---|---|---|")
    for name, table in tables().items():
        plain = LinearRegression().fit(table["x"], table["y"]).score(table["x_test"], table["y_test"])
        for epsilon in EPSILONS:
            with tempfile.TemporaryDirectory() as place:
                ours = shown(dither_scores(table, epsilon, options.seeds, Path(place)))
                theirs = "-"
                if options.diffprivlib:
                    np.savez(Path(place) / "table.npz", **table)
                    arguments = ["-c", DIFFPRIVLIB, str(Path(place) / "table.npz"), str(epsilon), "20"]
                    done = subprocess.run(
                        [options.diffprivlib, *arguments], check=True, capture_output=True, text=True
                    )
                    theirs = shown(json.loads(done.stdout))
            print(f"| {name} | {len(table['y']):,} | {epsilon:g} | {ours} | {theirs} | {plain:.3f} |", flush=True)


if __name__ == "__main__":
    main()
