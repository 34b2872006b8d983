"""The pictures of docs/audit.md: python tools/audit_pictures.py docs/images [--quick]

roc and trials   Secure FedAvg's message claimed at ε = 0.5 (a million trials); a plain Gaussian release
membership       LiRA on a small network, without noise and with proven ε
reconstruction   digits read off one upload
"""

from __future__ import annotations

import sys
from pathlib import Path

import audit_membership
import audit_reconstruction
import numpy as np

from dither import data
from dither.auditing import audit, report
from dither.errors import DataError
from dither.experiment import plots
from dither.spec import Spec

OVERFIT = {
    "method": "fedavg",
    "data.name": "digits",
    "model.name": "mlp",
    "model.hidden": (64,),
    "num_clients": 4,
    "cohort_size": 4,
    "num_rounds": 40,
    "local_steps": 5,
    "batch_size": 32,
    "client_lr": 0.5,
    "privacy.noise": "none",
    "privacy.clip": "none",
    "privacy.delta": 1e-5,
}
PRIVATE = {
    **OVERFIT,
    "method": "cpfed",
    "privacy.noise": "proven",
    "privacy.epsilon": 3.0,
    "privacy.clip": "example",
}


def claims(folder: Path, trials: int) -> None:
    found = audit("secure-fedavg", views=("upload",), trials=trials, rounds=1, confidence=0.99)
    report.draw_roc(found, folder / "audit-secure-fedavg-roc.png")
    report.draw_trials(found, folder / "audit-secure-fedavg-trials.png")
    one = {"batch_sampling": "full", "local_steps": 1, "num_rounds": 1, "sampling_rate": 0.0}
    found = audit(
        "adult", values={**one, "privacy.adjacency": "replace-one"}, views=("upload",), trials=trials // 10
    )
    report.draw_trials(found, folder / "audit-gaussian-trials.png")
    print(found.rows[0].proven, [(b.form, b.value) for b in found.rows[0].bounds])


def members(folder: Path, shadows: int) -> None:
    figure, axes = plots.new_figure(1, 1, width=5.2, height=4.2)
    axis = axes[0][0]
    for name, values, colour in (("no noise", OVERFIT, plots.VERMILION), ("proven ε = 3", PRIVATE, plots.BLUE)):
        found = audit_membership.lira(
            Spec().with_values({"method": values["method"]}).with_values(values), shadows=shadows
        )
        grid = np.geomspace(1e-5, 1, 400)
        true = np.interp(grid, *report.roc(found.scores_in, found.scores_out))
        axis.plot(grid, true, color=colour, label=f"{name}, AUC {found.auc:.3f}")
        print(name, found.auc, found.tpr_at, found.bound, "accuracy", found.accuracy)
    axis.plot([1e-5, 1], [1e-5, 1], ":", color=plots.GREY, label="a guess")
    axis.set(xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-4, 1.1))
    axis.set_xlabel("false positive rate")
    axis.set_ylabel("true positive rate")
    axis.set_title(f"Who was trained on? {shadows} shadow models", fontsize=10, loc="left")
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    plots.save(figure, folder / "audit-membership.png")


def pictures(folder: Path) -> None:
    try:
        dataset = data.load("mnist")
    except DataError:
        dataset = data.load("digits")
    rows = [int(np.flatnonzero(dataset.y_train == label)[0]) for label in range(8)]
    noises = [
        ("sent without noise", {"privacy.noise": "none"}),
        ("noise as printed,\nclaimed ε = 0.5", {}),
        ("noise for which\nε = 0.5 is proved", {"privacy.noise": "proven"}),
    ]
    leaks = audit_reconstruction.reconstruct(dataset, rows, noises)
    audit_reconstruction.draw(dataset, rows, leaks, folder / "audit-reconstruction.png")
    print([(leak.name.replace("\n", " "), round(leak.likeness, 3)) for leak in leaks])


if __name__ == "__main__":
    quick = "--quick" in sys.argv
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
    pictures(target)
    members(target, 64 if quick else 200)
    claims(target, 100_000 if quick else 1_000_000)
