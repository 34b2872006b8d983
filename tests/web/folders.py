"""Run folders written by hand: what the page must show, or refuse, without training anything."""

import json
import os
import time

from dither.spec import Spec


def make_run(
    root, name="run", *, rounds=20, done=None, summary=True, values=None, spec_text=None, age=0.0, **extra
):
    """A run folder as training leaves it; `done` evaluations every second round, `extra` on top of the summary."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    if spec_text is None:
        base = {"num_rounds": rounds, "eval_every": 2, "compare": False}
        spec_text = Spec.from_preset("adult").with_values({**base, **(values or {})}).to_toml()
    (folder / "spec.toml").write_text(spec_text, encoding="utf-8")
    (folder / "provenance.json").write_text(json.dumps({"run": "0123456789abcdef", "dither": "0.1.0"}))
    last = rounds if done is None else done
    lines = [
        {"round": r, "test_accuracy": 0.5 + r / 100, "loss": 1 / r, "train_loss": 1 / r, "seconds": 0.1 * r}
        for r in range(2, last + 1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary:
        (folder / "summary.json").write_text(json.dumps(make_summary(**extra)))
    if age:
        for path in folder.iterdir():
            os.utime(path, (time.time() - age, time.time() - age))
    return folder


def make_summary(**extra):
    row = {"view": "upload", "adjacency": "zero-out", "value": 0.9995, "delta": 1e-5, "unit": "run"}
    row |= {"recipe": "R3", "assumed": False, "not_covered": [], "detail": "given the 20 participations"}
    clients = {"min": 0.9, "median": 0.95, "max": 0.9995}
    claim = {"value": 74.8, "unit": "run", "delta": 1e-5, "source": "Theorem 1", "adjacency": "replace-one"}
    claim["conditions"] = [{"condition": "it averages (C1)", "holds": False}]
    proven = [
        {**row, "clients": clients},
        {**row, "adjacency": "replace-one", "value": 2.09},
        {**row, "unit": "message", "value": 0.1},
        {**row, "view": "final", "adjacency": "replace-one", "value": "inf", "recipe": "no proof"},
    ]
    traffic = {"aggregation": "off", "upload_bytes": 420, "download_bytes": 420, "lost": 0}
    return {
        "method": "cpfed",
        "data": "adult",
        "test_accuracy": 0.7,
        "loss": 0.05,
        "rounds": 20,
        "seconds": 2.0,
        "epsilon": {"claimed": claim, "proven": proven, "attacked": None},
        "why": "the claim averages participation instead of counting it (C1)",
        "participation": {"min": 20, "median": 20.0, "max": 20},
        "randomness": "seeded",
        "notes": [],
        "num_clients": 16,
        "num_features": 104,
        "num_params": 105,
        "image_shape": [],
        "classes": ["<=50K", ">50K"],
        "traffic": {**traffic, "most_missing": 0, "void_rounds": 0},
        **extra,
    }
