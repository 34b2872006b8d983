"""The benchmarks' workloads and the specs for `dither run` are the same work, and the table judges rightly."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from dither.methods import secure_fedavg
from dither.spec import Spec

FOLDER = Path(__file__).parents[1] / "benchmarks"
sys.path[:0] = [str(FOLDER), str(FOLDER / "peers")]
workloads = importlib.import_module("workloads")
report = importlib.import_module("report")


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_spec_is_the_workload(name: str) -> None:
    w, spec = workloads.WORKLOADS[name], Spec.from_any(FOLDER / "specs" / f"{name}.toml")
    assert (spec.num_clients, spec.cohort_size) == (w.clients, w.cohort)
    assert (spec.local_steps, spec.batch_size, spec.data.records_per_client) == (w.local_steps, w.batch, w.records)
    assert spec.client_lr == w.lr
    assert spec.model.hidden == ((w.hidden,) if w.hidden else ())
    assert spec.batch_sampling == ("disjoint" if w.epoch else "fixed")
    assert (spec.privacy.clip == "example") == (w.clip > 0)
    if w.clip:
        assert spec.privacy.clip_norm == w.clip
    if w.param_clip:
        assert spec.method_options["param_clip"] == w.param_clip
        assert (spec.method_options["optimizer"], spec.method_options["proximal"]) == ("sgd", 0.0)
    if spec.privacy.noise == "given":
        assert spec.privacy.noise_std == pytest.approx(w.step_noise or w.upload_noise)
    else:
        multiplier = secure_fedavg.noise_multiplier(
            secure_fedavg.SecureFedavgParams(w.local_steps, w.batch, w.records),
            epsilon=spec.privacy.epsilon,
            delta=spec.privacy.delta,
        )
        sensitivity = secure_fedavg.sensitivity(local_steps=w.local_steps, clip_norm=w.clip, next_lr=w.lr)
        assert float(multiplier * sensitivity) == pytest.approx(w.upload_noise)


def test_a_loss_of_uniform_scores_is_that_of_guessing() -> None:
    w = workloads.WORKLOADS["C"]
    x, y = np.ones((1, 5, w.features), np.float32), np.arange(5)[None]
    assert workloads.loss(w, workloads.initial(w), x, y) == pytest.approx(np.log(w.classes))


def test_the_table_judges_each_goal_and_drops_nobody() -> None:
    def row(peer: str, seconds: float) -> dict[str, object]:
        shown = {"first_round_s": 1.0, "peak_rss_mb": 1.0, "check_loss": 1.0}
        return {"peer": peer, "workload": "B1", "seconds_per_100": seconds, **shown}

    rows = [row("dither", 10), row("yardstick", 5), row("pfl", 299), row("opacus-ghost", 40)]
    rows += [row("torch-stacked", 9), {"peer": "flower", "workload": "B1", "error": "environment: no wheel"}]
    lines = {line.split()[1]: line for line in report.table(rows).splitlines()[1:]}
    assert "30x missed" in lines["pfl"]
    # The stacked loop is no library: it is shown, and not among "the best of them".
    assert "best: 2x met; 4x met" in lines["opacus-ghost"]
    assert "2.00x, missed" in lines["yardstick"]
    assert "no wheel" in lines["flower"]


def test_the_page_shows_the_stored_results() -> None:
    stored = FOLDER / "results" / "bench.json"
    page = (FOLDER.parent / "docs" / "benchmarks.md").read_text()
    if not stored.exists():
        assert "No results are stored yet" in page
        return
    rows = json.loads(stored.read_text())["rows"]
    # python benchmarks/bench.py --show --markdown
    assert report.table(rows, markdown=True) in page


@pytest.mark.slow
def test_one_epsilon_simulated_and_federated(tmp_path, monkeypatch) -> None:
    """A small version of `benchmarks/one_epsilon.py show`, at a larger ε for fewer records."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    messy, one_epsilon = importlib.import_module("messy"), importlib.import_module("one_epsilon")
    messy.make(tmp_path / "hospitals", 12_000, 4_000)
    result = one_epsilon.show(tmp_path / "hospitals", tmp_path / "out", epsilon=8.0)
    assert result["its one ε"] <= 8.0
    assert result["ε, seeded, federated, of the party that spent most"] <= 8.0
    for name in ("AUC", "private AUC", "ε"):
        simulated = result[f"{name}, seeded, simulated"]
        federated = [value for key, value in result.items() if key.startswith(f"{name}, seeded, federated")]
        assert federated == pytest.approx([simulated], abs=1e-4)
    assert result["AUC, one ε for everything"] > 0.8
