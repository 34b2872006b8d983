"""A method in a Python file: the skeleton of CONTRIBUTING.md runs, and the example passes the suite."""

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dither.cli import app
from dither.errors import SpecError
from dither.experiment import build
from dither.experiment.build import choose
from dither.experiment.report import load
from dither.spec import Spec
from tests.methods import test_conformance as suite

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "fedavgm_dp.py"


@pytest.fixture
def name():
    return str(FILE)


@pytest.fixture(autouse=True)
def given_noise(monkeypatch):
    monkeypatch.setitem(suite.BASE, "privacy.noise", "given")
    monkeypatch.setitem(suite.BASE, "privacy.noise_std", 0.3)


test_same_bits = suite.test_it_trains_and_the_same_seed_gives_the_same_bits
test_layouts = suite.test_layouts_agree_and_padding_clients_change_nothing
test_traces = suite.test_no_method_retraces_on_later_rounds
test_checkpoints = suite.test_client_state_round_trips_through_a_checkpoint
test_one = suite.test_a_cohort_of_one_works
test_nan = suite.test_records_that_are_not_numbers_count_as_nothing_where_noise_is_added
test_releases = suite.test_releases_are_finite_numbers_for_the_accountant


TINY = {
    "num_clients": 6,
    "cohort_size": 6,
    "num_rounds": 5,
    "batch_size": 8,
    "batch_sampling": "poisson",
    "sampling_rate": 0.1,
    "data.name": "breast-cancer",
    "privacy.adjacency": "zero-out",
}


def silent():
    """The example, as if it released nothing."""
    return FILE.read_text().replace("algorithm._replace(", "algorithm._replace(releases=lambda info: (),")


def test_the_example_is_calibrated_to_a_proven_epsilon(name):
    spec = Spec().with_values({"method": name, **TINY})
    experiment = build.build_experiment(spec)
    assert float(np.min(experiment.prepared.hyper["noise_std"])) > 0
    assert experiment.proven_epsilon(5) == pytest.approx(1.0, rel=1e-3)
    assert spec.method_options == {"momentum": 0.5}


def test_a_file_that_is_edited_during_a_run_changes_no_proof(name, tmp_path):
    """What ran is proved, not what the file says by then."""
    file = tmp_path / "method.py"
    file.write_text(FILE.read_text())
    experiment = build.build_experiment(Spec().with_values({"method": str(file), **TINY}))
    before = experiment.accountant(missing=1).epsilon("sum"), build.claim_after(experiment, 3)
    file.write_text(silent().replace('"no claim"', '"another"'))
    assert (experiment.accountant(missing=1).epsilon("sum"), build.claim_after(experiment, 3)) == before
    assert before[0] > 0


def test_a_method_that_releases_nothing_is_refused_by_name(tmp_path):
    file = tmp_path / "silent.py"
    file.write_text(
        FILE.read_text().replace("algorithm._replace(", "algorithm._replace(releases=lambda info: (),")
    )
    with pytest.raises(SpecError, match=r"silent\.py' releases nothing: `releases` must return"):
        build.build_experiment(Spec().with_values({"method": str(file), **TINY}))


def test_the_skeleton_of_contributing_runs_with_a_proven_epsilon(tmp_path):
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "server_step.py").write_text(code, encoding="utf-8")
    spec = Spec().with_values({"method": str(tmp_path / "server_step.py"), **TINY})
    (tmp_path / "spec.toml").write_text(spec.to_toml(), encoding="utf-8")
    command = [
        "run",
        str(tmp_path / "spec.toml"),
        "--set",
        "method_options.server_step=0.7",
        "--out",
        str(tmp_path / "run"),
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    report = load(tmp_path / "run")
    assert report.spec.method_options == {"server_step": 0.7}
    assert report.epsilon.proven("upload").value == pytest.approx(1.0, rel=1e-3)


CALLING = {
    "client": """
    def client(keys, message, state, records, round):
        x = eqx.error_if(records.x, jnp.any(records.x > 1e30), "too large")
        return algorithm.client(keys, message, state, records._replace(x=x), round)
""",
    "server": """
    def server(key, state, upload, cohort):
        jax.debug.print("{}", jax.tree.leaves(upload)[0])
        return algorithm.server(key, state, upload, cohort)
""",
}


def own_records(**values):
    """A spec of ten institutions' own records and its experiment."""
    rng = np.random.default_rng(0)
    records = rng.random((200, 3)), rng.integers(0, 2, 200), np.repeat(list("abcdefghij"), 20)
    chosen = choose(
        {"num_rounds": 2, "num_clients": 10, "cohort_size": 10, "batch_size": 5, **values}, records=records
    )
    return build.build_experiment(chosen.spec, dataset=chosen.dataset)


@pytest.mark.parametrize("part", CALLING)
def test_a_method_that_calls_python_does_not_meet_own_records(part, tmp_path):
    """A check in its client stopped a run at one record, and so told of it."""
    pytest.importorskip("equinox")
    file = tmp_path / "calling.py"
    wrapped = f"def calling(algorithm):{CALLING[part]}    return algorithm._replace({part}={part})\n"
    file.write_text(
        FILE.read_text().replace("with_momentum(averaging(hyper), hyper)", "calling(averaging(hyper))")
        + f"\n\nimport equinox as eqx\n\n\n{wrapped}"
    )
    with pytest.raises(SpecError, match=r"calling\.py' calls Python while it computes \((pure_|debug_)"):
        own_records(method=str(file))
    public = build.build_experiment(Spec().with_values({"method": str(file), **TINY}))  # nobody is told on
    with pytest.raises(SpecError, match="calls Python"):  # a party's records are its own
        build.assemble(public.spec, public.dataset, public.partition, public.problem, federated=True)


@pytest.mark.parametrize("randomness", ["os", "seeded"])
def test_the_example_meets_own_records_with_noise_from_the_host(name, randomness):
    experiment = own_records(method=name, randomness=randomness)
    _, rounds, inputs = build.compiled(experiment)
    assert int(rounds.advance(rounds.start(inputs), inputs, 0, 2).rounds[0]) == 2
    assert experiment.spec.source_of_randomness == randomness
