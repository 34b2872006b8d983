"""Warnings after a run, and that what is released of them rests on public records alone."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import dither
from dither import models
from dither.cli import app
from dither.experiment.metrics import (
    CLIPPED,
    DIVERGED,
    RISING,
    TRIVIAL,
    Evidence,
    TestScores,
    advise,
    classification_scores,
    gradient_norms,
    trivial_loss,
)
from dither.privacy import clipping
from dither.spec import Spec
from tests.privacy.test_clipping import clipped_sum

SMALL = {
    "method": "cpfed",
    "num_clients": 4,
    "cohort_size": 4,
    "num_rounds": 40,
    "local_steps": 4,
    "batch_size": 128,
    "batch_sampling": "poisson",
    "eval_every": 10,
    "client_lr": 2.0,
    "secagg.mode": "off",
    "privacy.adjacency": "zero-out",
    "data.name": "",
    "randomness": "seeded",
}


def write_rare(path: Path, count: int = 4000) -> dict:
    """7.8% of the records are positive, and 40 features say something about which."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(count, 40)).astype(np.float32)
    score = (x - 0.5) @ rng.normal(size=40) + rng.logistic(size=count)
    y = (score > np.quantile(score, 1 - 0.078)).astype(np.int64)
    np.savez(path, x=x, y=y, classes=np.array(["no", "yes"]))
    return {**SMALL, "data.path": str(path), "data.test_public": True}


@pytest.fixture(scope="module")
def rare(tmp_path_factory):
    """A run that never says yes, as its clip makes it (in 2026 nothing warned)."""
    folder = tmp_path_factory.mktemp("rare")
    spec = write_rare(folder / "rare.npz")
    return dither.run(spec, out=folder / "run", ledger=folder / "ledger.json")


def test_a_model_that_never_says_yes_is_called_trivial_and_a_better_clip_is_named(rare):
    trivial, clipped = rare.advice
    assert (trivial.kind, clipped.kind) == (TRIVIAL, CLIPPED)
    assert rare.scores.trivial["accuracy"] == pytest.approx(0.922, abs=0.001)
    assert rare.test_accuracy == pytest.approx(0.922, abs=0.005)
    assert "no better than a constant (always 'no')" in trivial.text
    assert "of the gradients of class 'yes'" in clipped.text
    assert "try privacy.clip_norm=3." in clipped.text
    assert ("warning", trivial.text) in rare.main_lines()
    read = dither.load(rare.folder)
    assert (read.scores, read.advice) == (rare.scores, rare.advice)


def test_the_page_shows_scores_and_warnings(rare):
    from dither.web.files import SafeFolder
    from dither.web.run_page import details

    shown = details(SafeFolder(rare.folder.parent), {"id": "run"})
    assert shown["advice"] == [each.text for each in rare.advice]
    assert shown["scores"]["rows"][0] == [
        "accuracy",
        rare.scores.model["accuracy"],
        rare.scores.trivial["accuracy"],
    ]
    json.dumps(shown["scores"])


def test_without_public_test_records_scores_and_warnings_stay_local(tmp_path):
    spec = write_rare(tmp_path / "rare.npz", 1000) | {"data.test_public": False, "num_rounds": 10}
    report = dither.run(spec, out=tmp_path / "run", ledger=tmp_path / "ledger.json")
    assert (report.scores, report.advice) == (None, ())
    assert [each.kind for each in report.local.advice][:1] == [TRIVIAL]
    assert "on your records" in report.local.advice[0].text
    released = (report.folder / "summary.json").read_text()
    assert "constant" not in released
    assert "auc" not in released


@pytest.mark.parametrize("public", [True, False])
def test_a_run_that_diverges_says_so_and_exits_with_7(tmp_path, public):
    """Without public test records the released model tells, on made-up records."""
    write_rare(tmp_path / "rare.npz", 1000)
    settings = {
        **SMALL,
        "data.path": str(tmp_path / "rare.npz"),
        "data.test_public": public,
        "client_lr": 1e7,
        "num_rounds": 2,
    }
    (tmp_path / "spec.toml").write_text(Spec.from_any(settings).to_toml())
    arguments = [
        "run",
        str(tmp_path / "spec.toml"),
        "--out",
        str(tmp_path / "run"),
        "--ledger",
        str(tmp_path / "l.json"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 7, result.output
    assert "training diverged" in result.output
    assert "lower client_lr (now 1e+07)" in " ".join(result.output.replace("│", " ").split())


def evidence(**changes):
    y = np.array([0] * 70 + [1] * 30)
    good = np.where(np.stack([y == 0, y == 1], 1), 0.9, 0.1)
    scores = classification_scores(good, y, ("no", "yes"))
    plain = Evidence(
        Spec(),
        "test records",
        [10, 20, 30, 40, 50],
        [0.6, 0.5, 0.4, 0.35, 0.34],
        0.61,
        scores,
        np.full(100, 0.5),
        y,
        ("no", "yes"),
    )
    return plain._replace(**changes)


def test_a_good_run_gets_no_advice():
    assert advise(evidence()) == ()


def test_a_loss_that_rises_after_its_lowest_is_reported_with_the_round():
    (advice,) = advise(evidence(losses=[0.6, 0.3, 0.32, 0.4, 0.5]))
    assert (advice.kind, advice.key) == (RISING, "client_lr")
    assert "rose from 0.3 after round 20 to 0.5" in advice.text


@pytest.mark.parametrize("loss", [2e7, float("nan"), float("inf")])
def test_divergence_is_the_only_advice(loss):
    (advice,) = advise(evidence(losses=[0.6, 0.5, loss], norms=np.full(100, 9.0)))
    assert advice.kind == DIVERGED


def test_most_gradients_clipped_names_the_clip_that_leaves_nine_of_ten():
    norms = np.linspace(0.5, 10.5, 100)
    (advice,) = advise(evidence(norms=norms))
    assert advice.kind == CLIPPED
    assert "95% of the gradients are clipped" in advice.text
    assert "try privacy.clip_norm=9.5 (now 1)" in advice.text


def test_a_regression_that_explains_nothing_is_trivial():
    scores = TestScores(
        50, {"r2": -0.2, "rmse": 5.0, "mae": 3.0}, {"r2": 0.0, "rmse": 4.0, "mae": 2.0}, "always the mean, 7"
    )
    (advice,) = advise(evidence(scores=scores, classes=(), losses=[0.3] * 5))
    assert (advice.kind, advice.key) == (TRIVIAL, "privacy.epsilon")
    assert "R² -0.2000 against 0.0000" in advice.text


@pytest.mark.parametrize("name", ["logistic", "linear", "mlp"])
def test_gradient_norms_are_those_that_the_clip_sees(name):
    import jax

    num_classes = {"logistic": 2, "linear": 0}.get(name, 3)
    model = models.make(name, num_features=4, num_classes=num_classes, hidden=(5,))
    rng = np.random.default_rng(1)
    x = rng.normal(size=(6, 4)).astype(np.float32)
    y = rng.uniform(size=6).astype(np.float32) if name == "linear" else rng.integers(0, num_classes, 6)
    params = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), model.init(jax.random.key(0))
    )
    norms = gradient_norms(model, params, x, y)
    for at in (0, 5):
        one = (x[at : at + 1], y[at : at + 1], np.ones(1, np.float32))
        total, _ = clipped_sum(model, params, *one, clip_norm=1e9)
        assert norms[at] == pytest.approx(float(clipping.norm(total)), rel=1e-4)


def test_the_trivial_loss_is_the_entropy_of_the_labels_and_half_the_variance():
    y = np.array([0, 0, 0, 1])
    entropy = -0.75 * np.log(0.75) - 0.25 * np.log(0.25)
    assert trivial_loss(models.logistic(2), np.zeros(4), y) == pytest.approx(entropy, rel=1e-5)
    assert trivial_loss(models.softmax(2, 2), np.zeros((4, 2)), y) == pytest.approx(entropy, rel=1e-5)
    numbers = np.float32([0, 0.5, 1, 0.5])
    assert trivial_loss(models.linear(2), np.zeros(4), numbers) == pytest.approx(numbers.var() / 2, rel=1e-5)
