"""`dither run` on a folder: streamed as in memory, interrupted as not, charged, and refused where it cannot be."""

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import dither
from dither import cli, data
from dither.accounting.ledger.runs import Ledger, data_id
from dither.data import arrays
from dither.errors import DataError, RunExists, SpecError
from dither.experiment import folder as runs
from dither.experiment import train
from dither.experiment.account import account
from dither.experiment.build import build_experiment, check, deal
from dither.experiment.sweep.batches import joined_problem
from dither.simulation import devices
from dither.simulation.arrays import Shards
from dither.spec import Spec
from tests.conftest import make_records


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """2,400 records of 40 parties of unequal size, scattered over the file."""
    where = tmp_path_factory.mktemp("data") / "records"
    where.mkdir()
    x, y = make_records(2400, features=8)
    rng = np.random.default_rng(0)
    np.save(where / "x.npy", x)
    np.save(where / "y.npy", y)
    np.save(where / "groups.npy", rng.choice(40, 2400, p=rng.dirichlet(np.full(40, 5.0))))
    (where / "classes.json").write_text('["no", "yes"]')
    return where


def spec_of(folder, stream, **values):
    plain = {
        "method": "cpfed",
        "randomness": "seeded",
        "num_clients": 0,
        "cohort_size": 4,
        "num_rounds": 12,
        "local_steps": 2,
        "batch_size": 4,
        "eval_every": 5,
        "data.name": "",
        "data.path": str(folder),
        "data.partition": "column",
        "data.stream": stream,
        "data.stream_memory": 0.00036,  # of records of 40 bytes: one piece to score, twice, and 400 records, twice
        "privacy.noise": "given",
        "privacy.noise_std": 0.2,
        "privacy.epsilon": 1e6,
    }
    return Spec().with_values({**plain, **values}, reset_options=True)


def outcome(run):
    model = (run.folder / "model.safetensors").read_bytes()
    return model, [{k: v for k, v in row.items() if k != "seconds"} for row in run.evaluations]


def interrupt_at(stop):
    def stopping(row):
        if row["round"] == stop:
            raise RuntimeError("killed")

    return stopping


def test_a_streamed_run_that_was_killed_ends_as_one_in_memory(folder, tmp_path, monkeypatch):
    book, others = tmp_path / "ledger", set(threading.enumerate())
    in_memory = dither.run(spec_of(folder, "no"), out=tmp_path / "memory", ledger=book)
    spec = spec_of(folder, "auto")
    monkeypatch.setattr(arrays, "free_memory", lambda: 0.0)
    with pytest.raises(RuntimeError, match="killed") as killed:
        dither.run(spec, out=tmp_path / "disk", ledger=book, checkpoint_seconds=0, on_evaluation=interrupt_at(5))
    # Nobody reads on, though the error holds on to everything.
    for thread in set(threading.enumerate()) - others:
        if thread.name.startswith("read-"):
            thread.join(20)
            assert not thread.is_alive(), killed
    monkeypatch.undo()  # there is room now, and yet it goes on as it began
    streamed = train.resume(tmp_path / "disk", ledger=book)
    assert outcome(streamed) == outcome(in_memory)
    report = streamed.summary["streamed"]
    assert report["block_records"] <= 420
    assert report["blocks"] >= 2
    assert "streamed" not in in_memory.summary
    found = [json.loads((run.folder / "provenance.json").read_text()) for run in (in_memory, streamed)]
    assert [each["records"] for each in found] == ["in memory", "streamed from the disk"]
    assert [each["devices"] for each in found] == [1, 1]
    assert "data_digest" not in found[0]  # without a key it is exact, and so local
    digests = {(run.folder / "local" / "provenance.json").read_text() for run in (in_memory, streamed)}
    assert len(digests) == 1
    # One data set in the ledger, whose accounts know both runs.
    ledger = Ledger(book)
    assert ledger.datasets() == [data_id(ledger, path=str(folder))]
    assert streamed.evaluate(folder) == in_memory.evaluate(folder)
    assert streamed.evaluate(folder).scores.records == 2400
    assert streamed.predict(folder).tolist() == streamed.predict(np.load(folder / "x.npy")).tolist()


def test_what_was_read_is_charged_whatever_lies_there_by_then(folder, tmp_path):
    own = shutil.copytree(folder, tmp_path / "own")
    experiment = build_experiment(spec_of(own, "yes"))
    run = runs.RunFolder.create(tmp_path / "run", experiment.spec, train.provenance(experiment))
    np.save(tmp_path / "x.npy", np.zeros((2400, 8), np.float32))
    os.replace(tmp_path / "x.npy", own / "x.npy")
    account = train.spending(experiment, run, tmp_path / "ledger")
    assert account.dataset == data_id(account.ledger, path=str(folder)) != data_id(account.ledger, path=str(own))


def test_a_home_folder_is_known_by_its_short_name(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    (folder.parent / "own.csv").write_text("a,b\n1,2\n")
    book = Ledger(tmp_path / "ledger")
    for name in (folder.name, "own.csv"):
        assert data_id(book, path=f"~/{name}") == data_id(book, path=str(folder.parent / name))
    for command in (
        ["data", "describe", f"~/{folder.name}", "--json", "--picture", str(tmp_path / "a.png")],
        ["budget", "show", f"~/{folder.name}", "--json", "--ledger", str(tmp_path / "ledger")],
    ):
        result = CliRunner().invoke(cli.app, command)
        assert result.exit_code == 0, result.output


def test_a_continued_run_keeps_its_devices(folder):
    experiment = build_experiment(spec_of(folder, "yes", **{"data.stream_memory": 0.01}))
    assert check(experiment) == check(experiment, {"devices": 1}) == Shards()
    assert check(experiment, {"devices": 2}) == Shards(clients=2)
    with pytest.raises(RunExists, match=r"begun on 64 devices; 4 devices .*DITHER_DEVICES=64"):
        check(experiment, {"devices": 64})
    assert check(experiment, {"devices": 64, "processes": 32}) == Shards()


@pytest.mark.slow
def test_a_run_on_two_devices_goes_on_with_two(folder, tmp_path, monkeypatch):
    """Also where one would be chosen now: memory and cores may be others by then."""
    # A method and a cohort whose sums show the order in which they are added.
    values = {"method": "dp-scaffold", "batch_sampling": "shuffled", "method_options.stop_at_budget": "no"}
    spec = spec_of(folder, "auto", cohort_size=9, **values)
    with monkeypatch.context() as then:
        then.setattr(devices, "cores", lambda: 2)
        then.setattr(devices, "worth_sharing", lambda flops: True)
        whole = dither.run(spec, out=tmp_path / "whole")
        with pytest.raises(RuntimeError, match="killed"):
            dither.run(spec, out=tmp_path / "killed", checkpoint_seconds=0, on_evaluation=interrupt_at(5))
    monkeypatch.setattr(arrays, "free_memory", lambda: 0.0)
    continued = train.resume(tmp_path / "killed")
    assert continued.folder == tmp_path / "killed"
    assert runs.RunFolder(tmp_path / "killed").provenance()["devices"] == 2
    assert outcome(continued) == outcome(whole)
    assert "streamed" not in continued.summary


def test_each_run_of_a_batch_scores_its_own_training_records(folder):
    dataset = data.load(path=folder, stream="no")
    values = {"data.path": "", "data.name": "adult", "data.partition": "iid", "num_clients": 7}
    specs = [spec_of(folder, "no", **values, **{"data.split": "per-client", "seed": seed}) for seed in (0, 1)]
    problems = [deal(spec, data.pool(dataset))[1] for spec in specs]
    joined = joined_problem(problems)
    assert not np.array_equal(*joined.train_rows)
    for rows, partition in zip(joined.train_rows, joined.partitions, strict=True):
        np.testing.assert_array_equal(rows, np.sort(partition.order))


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {"method": "dp-scaffold", "batch_sampling": "shuffled", "method_options.stop_at_budget": "no"},
        {
            "method": "secure-fedavg",
            "secagg.mode": "real",
            "privacy.noise": "paper",
            "privacy.epsilon": 8.0,
            "method_options.first_round": "cohort",
        },
        {"data.partition": "iid", "num_clients": 60, "data.split": "per-client"},
        {"model.name": "mlp", "model.hidden": [16], "data.part": "private", "data.public_fraction": 0.3},
        {"method": "cpfed", "batch_sampling": "poisson", "federation.dropout": 0.3, "federation.min_clients": 1},
    ],
    ids=lambda values: "-".join(map(str, values.values())),
)
def test_every_way_to_deal_and_train_is_the_same_streamed(folder, tmp_path, values):
    runs = [dither.run(spec_of(folder, how, **values), out=tmp_path / how) for how in ("no", "yes")]
    assert outcome(runs[0]) == outcome(runs[1])
    assert runs[1].summary["streamed"]["blocks"] > 1


@pytest.mark.slow
def test_the_command_gives_the_same_bits_as_a_user_compiles_them(folder, tmp_path):
    """In processes of their own, without the tests' settings of the compiler."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["DITHER_LEDGER"] = str(tmp_path / "ledger")
    for how in ("no", "yes"):
        path = tmp_path / f"{how}.toml"
        path.write_text(spec_of(folder, how, **{"model.name": "mlp", "model.hidden": [32]}).to_toml())
        command = [sys.executable, "-m", "dither", "run", str(path), "--out", str(tmp_path / how), "--quiet"]
        subprocess.run(command, check=True, env=environment)
    assert outcome(dither.load(tmp_path / "no")) == outcome(dither.load(tmp_path / "yes"))


def test_too_little_memory_names_the_round_and_enough(folder):
    spec = spec_of(folder, "yes", **{"data.stream_memory": 0.00033})
    with pytest.raises(SpecError, match=r"data.stream_memory=0.00033 .* round [0-9]+ takes 4 clients with"):
        dither.run(spec, out=folder.parent / "refused")
    assert not (folder.parent / "refused").exists()
    enough = replace(spec, data=replace(spec.data, stream_memory=0.01))
    assert build_experiment(enough).dataset.streamed


def test_a_first_round_of_everyone_names_the_option(folder):
    spec = spec_of(folder, "yes", method="secure-fedavg", **{"privacy.noise": "paper", "privacy.epsilon": 8.0})
    with pytest.raises(SpecError, match=r"round 0 takes 40 clients .*method_options.first_round='cohort'"):
        check(build_experiment(spec))


def test_what_needs_records_in_memory_refuses_streamed_ones(folder):
    spec = spec_of(folder, "yes")
    with pytest.raises(SpecError, match="a sweep are compared on test records"):
        dither.sweep(spec, {"seed": [0, 1]})
    experiment = build_experiment(spec)
    with pytest.raises(DataError, match=r"data.stream='no'"):
        np.asarray(experiment.problem.x)
    # What only needs counts works.
    assert account(spec).epsilon.table
    assert data.describe(experiment.dataset)["train_records"] == len(experiment.dataset.y_train)


def test_a_folder_with_a_column_of_a_table_is_refused(folder):
    with pytest.raises(DataError, match=r"group_column is given, but a folder of .npy files"):
        build_experiment(spec_of(folder, "yes", **{"data.column": "site"}))
