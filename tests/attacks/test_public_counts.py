"""H4: add/remove while counts are public. The terms of a federation show every party's record count, so they
alone tell a neighbour with one record more from one without: no ε under add/remove is true there."""

import math
from dataclasses import replace

import numpy as np
import pytest

from dither import tasks
from dither.federation.terms import Terms, federated
from dither.spec import Spec


def terms_of(sizes) -> Terms:
    base = Spec.from_preset("adult").with_values(
        {"num_clients": 2, "cohort_size": 2, "privacy.adjacency": "replace-one"}
    )
    spec = federated(base, 2, "own")
    return Terms("f", "r1", spec, None, ("no", "yes"), 3, (), ("ann", "bob"), tuple(sizes)).check()


@pytest.mark.xfail(strict=True, reason="H4: add/remove is proved where counts are shown")
def test_no_epsilon_under_add_remove_where_everybody_reads_the_counts():
    one, other = terms_of((4000, 4000)), terms_of((4001, 4000))
    assert one.digest != other.digest  # what everybody sees tells the neighbours apart
    task = one.task(np.zeros((1, 3), np.float32), np.zeros(1, np.int32))
    rows = [row for row in tasks.proven(task) if row["adjacency"] == "add/remove"]
    assert rows and all(math.isinf(row["value"]) for row in rows)


@pytest.mark.xfail(strict=True, reason="H4: add/remove is proved where a batch's cap follows the largest count")
def test_no_epsilon_under_add_remove_where_a_cap_follows_the_counts():
    task = terms_of((4000, 4000)).task(np.zeros((1, 3), np.float32), np.zeros(1, np.int32))
    assert task.spec.batch_sampling == "poisson"
    simulated = replace(task, spec=task.spec.with_values({"privacy.noise": "given", "privacy.noise_std": 0.1}))
    rows = [row for row in tasks.proven(simulated) if row["adjacency"] == "add/remove"]
    assert rows and all(math.isinf(row["value"]) for row in rows)
