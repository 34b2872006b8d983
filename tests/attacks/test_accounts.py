"""Records that reveal something outside their own account: each way must be charged to it, or refused."""

import shutil
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import dither
from dither import PrivateFederatedClassifier
from dither.accounting.ledger import Budget, Charge, Ledger
from dither.accounting.ledger.runs import EVERY_RECORD, Spending, charged_in_all, client_name, data_id
from dither.data.hashing import hash_arrays
from dither.errors import BudgetExhausted, ConfigError, DataError
from dither.experiment import counting, evaluation
from dither.experiment.statistics import statistics
from dither.federation.agreement import PartyData
from dither.spec import Spec
from dither.types import Release, Sampling
from tests.accounting.test_accountant import planned
from tests.federation.parties import Parties, lines, small_spec

DELTA = 1e-5
ALL, RARE = Sampling("full", 1.0, "zero-out"), Sampling("poisson", 0.05, "zero-out")


def noisy(noise_std, sampling=ALL, uses=1):
    return (Release("uplink", noise_std, 1.0, uses, sampling, "test"),)


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "ledger.sqlite")


def epsilon(ledger, client):
    (row,) = ledger.spent("table", client)
    return row.epsilon


def charge(ledger, run, *charges):
    """All that a run reveals, registered and charged at once."""
    charges = [Charge(client, [(releases, 1)] if releases else []) for client, releases in charges]
    ledger.charge(run, "table", charges, rounds=(0, 1), plan=lambda: charges)


# An institution that has an account of its own, in a table of several


def test_what_names_no_institution_is_charged_to_every_one(ledger):
    """A run dealt out at random, or statistics of the whole table, are about north's records too: north's account
    said 0.5 and the table's 3.0."""
    charge(ledger, "by site", (EVERY_RECORD, noisy(8.0)), ("north", noisy(10.0)), ("south", noisy(8.0)))
    apart = epsilon(ledger, "north")
    charge(ledger, "dealt out", (EVERY_RECORD, noisy(1.0, RARE, 40)))
    charge(ledger, "statistics", (EVERY_RECORD, noisy(4.0)))
    everyone = epsilon(ledger, EVERY_RECORD)
    assert epsilon(ledger, "south") == everyone
    assert 2 * apart < epsilon(ledger, "north") < everyone, "in the run that named it, north revealed less"


def test_an_institutions_budget_stops_what_does_not_name_it(ledger):
    ledger.set_budget("table", Budget(1.0, DELTA), "north")
    charge(ledger, "by site", (EVERY_RECORD, noisy(2.0)), ("north", noisy(10.0)), ("south", noisy(2.0)))
    with pytest.raises(BudgetExhausted, match="north"):
        charge(ledger, "statistics", (EVERY_RECORD, noisy(2.0)))
    charge(ledger, "by site again", (EVERY_RECORD, noisy(2.0)), ("north", None), ("south", noisy(2.0)))
    with pytest.raises(BudgetExhausted, match="north"):  # a partition by another column
        charge(ledger, "by ward", (EVERY_RECORD, noisy(2.0)), ("ward 1", noisy(2.0)))
    assert epsilon(ledger, "north") < 1.0 < epsilon(ledger, "south")


def test_a_run_names_institutions_that_no_round_picks(ledger):
    """They have revealed nothing: what the others reveal is not charged to them."""
    cohorts = [np.array([0, 1, 2])] * 3
    accountant = planned(lambda info: noisy(2.0), [50] * 4, cohorts)
    names = ["north", "south", "west", "east"]
    ledger.set_budget("table", Budget(0.1, DELTA), "east")
    run = Spending(ledger, accountant, run="r", dataset="table", clients=names, replay=False)
    assert run.pay(0, 2) == 2
    assert run.pay(2, 3) == 3
    assert epsilon(ledger, "east") == 0.0
    assert epsilon(ledger, "north") == epsilon(ledger, EVERY_RECORD) > 1.0


def test_what_a_table_will_be_charged_is_known_before(ledger):
    """`dither start` planned with the most exposed client of the whole run, and the ledger, which is charged by
    stretches of rounds, refused the evaluation after schema and training were paid."""
    cohorts = [np.array([t < 4, 2 + (t < 2), 4]).astype(int) for t in range(8)]
    stretches = [(0, 3), (3, 6), (6, 8)]
    accountant = planned(lambda info: noisy(2.0 + info.client), [50] * 5, cohorts, adjacency="zero-out")
    run = Spending(ledger, accountant, run="r", dataset="table", clients=None, replay=False)
    for start, stop in stretches:
        run.pay(start, stop)
    known = charged_in_all(accountant, stretches)
    ledger.charge("planned", "other", [known], rounds=(0, 8), conditions=accountant.conditions)
    (spent,), (before,) = ledger.spent("table", EVERY_RECORD), ledger.spent("other", EVERY_RECORD)
    assert before.epsilon == pytest.approx(spent.epsilon, rel=1e-9)
    assert spent.epsilon > max(accountant.of(group.members[:1]).epsilon("upload") for group in accountant.clients)


def test_a_run_on_two_files_of_the_same_people_registers_both(tmp_path):
    """Who is in both reveals two whole runs, not one, if the run is stopped and another one follows."""
    rounds, later = noisy(1.0, RARE, 3), noisy(9.0, RARE)
    ledgers = {joined: Ledger(tmp_path / f"{joined}.sqlite") for joined in (False, True)}
    for joined, ledger in ledgers.items():
        ledger.set_budget("north" * 4, Budget(99.0, 1e-5))
        for file in ("north" * 4, "south" * 4):
            if joined:
                ledger.identify(file, name="people")
            for start in (0, 1):  # of a hundred
                ledger.charge(
                    "run",
                    file,
                    [Charge(EVERY_RECORD, [(rounds, 1)])],
                    rounds=(start, start + 1),
                    plan=lambda: [Charge(EVERY_RECORD, [(rounds, 100)])],
                )
        last = [Charge(EVERY_RECORD, [(later, 1)])]
        ledger.charge("later", "north" * 4, last, rounds=(0, 1), plan=lambda last=last: last)
    (apart,), (both,) = (ledger.spent("north" * 4) for ledger in ledgers.values())
    assert both.epsilon > 1.3 * apart.epsilon
    assert (both.runs, both.not_covered) == (("run", "later"), "")


def test_equal_values_of_two_columns_are_two_clients(tmp_path):
    """Site 1 has people in all wards: a run that named ward 1 was charged to site 1, which has a budget, as if it
    were ward 1, although some of its people are in the ward that reveals most."""
    rng, path, book = np.random.default_rng(0), tmp_path / "t.csv", Ledger(tmp_path / "ledger.sqlite")
    wards = rng.choice([1, 2], 200, p=[0.9, 0.1])
    pd.DataFrame({"x": rng.normal(size=200), "ward": wards, "sick": rng.integers(0, 2, 200)}).to_csv(
        path, index=False
    )
    values = {
        "method": "concentrated", "num_clients": 0, "cohort_size": 1, "num_rounds": 3, "batch_size": 4,
        "data.name": "", "data.path": str(path), "data.label": "sick", "data.partition": "column",
        "data.column": "ward", "data.test_fraction": 0.0, "privacy.epsilon": 1.0, "seed": 1,
    }  # fmt: skip
    dither.run(Spec().with_values(values, reset_options=True), out=tmp_path / "run", ledger=book.path)
    (dataset,) = book.datasets()
    book.set_budget(dataset, Budget(100.0, DELTA), "site=1")
    spent = {each.client: each.epsilon for each in book.spent(dataset)}
    assert spent.keys() == {EVERY_RECORD, "site=1", "ward=1", "ward=2"}
    assert spent["site=1"] == spent[EVERY_RECORD] > min(spent["ward=1"], spent["ward=2"])


def test_a_clients_name_says_its_column(ledger):
    """Names without a column, as entries of old have them, are of no client of today: such runs are charged to it
    as to any record."""
    assert client_name("a", "b=c") != client_name("a=b", "c")
    assert client_name("a\\", "=c") != client_name("a\\=", "c")
    charge(ledger, "of old", (EVERY_RECORD, noisy(2.0)), ("1", noisy(9.0)))
    everyone = epsilon(ledger, EVERY_RECORD)
    assert ledger.client("table", "1") == "1"
    ledger.set_budget("table", Budget(0.8 * everyone, DELTA), "1")
    ledger.set_budget("table", Budget(3.0, DELTA), "site=1")
    assert epsilon(ledger, "1") < epsilon(ledger, "site=1") == everyone
    with pytest.raises(BudgetExhausted, match="'1'"):
        charge(ledger, "by ward", (EVERY_RECORD, noisy(2.0)), ("ward=1", noisy(9.0)))
    charge(ledger, "by ward", (EVERY_RECORD, noisy(5.0)), ("ward=1", noisy(9.0)))
    with pytest.raises(ConfigError, match=r"client='1'.* site=1 or ward=1"):
        ledger.client("table", "1")
    assert ledger.client("table", "ward=7") == "ward=7"
    with pytest.raises(ConfigError, match="such as site=north"):
        ledger.client("table", "north")


# Files that change


def test_a_party_charges_the_records_that_it_read(tmp_path):
    """The nightly export replaces the table while `dither join` waits: cat trained on the records that it had
    read, and charged them to the new file, which had no budget and no sketch."""
    parties = Parties(tmp_path, small_spec(num_rounds=1))
    own = parties.nodes["cat"].ledger
    own.set_budget(data_id(own, path=str(parties.file("cat"))), Budget(1e-3, DELTA))
    parties.file("cat").write_text(parties.file("cat").read_text() + "\n")
    parties.coordinator().run()
    assert lines(parties)[0]["refused"]["cat"] == "this party's budget does not allow it"
    assert parties.charged("cat") == []
    assert parties.charged("bob") == [0]


def test_a_party_does_not_read_arrays_of_another_file(tmp_path):
    path, label = tmp_path / "cat.npz", np.arange(40) % 2
    np.savez(path, x=np.ones((40, 3), np.float32), y=label)
    source = PartyData(path)
    np.savez(path, x=np.zeros((40, 3), np.float32), y=label)
    agreement = SimpleNamespace(schema=None, classes=("0", "1"), spec=Spec())
    with pytest.raises(DataError, match=r"cat\.npz' changed after it was read"):
        source.encode(agreement)


def test_counts_are_of_the_file_that_is_charged(tmp_path, monkeypatch):
    path, read = tmp_path / "table.csv", counting.read
    path.write_text("age\n1\n2\n3\n")

    def replaced_meanwhile(each):
        table = read(each)
        path.write_text("age\n4\n5\n6\n")
        return table

    monkeypatch.setattr(counting, "read", replaced_meanwhile)
    with pytest.raises(DataError, match=r"table\.csv' changed after it was read"):
        statistics(path, epsilon=1.0, ledger=tmp_path / "ledger.sqlite")
    assert charges(tmp_path) == 0


def test_scores_are_of_the_arrays_that_are_charged(tmp_path, monkeypatch):
    """A folder was read, replaced, and charged: the digest was of files alone."""
    for name, at in (("old", 0.0), ("new", 1.0)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "x.npy", np.full((50, 2), at) + np.arange(100).reshape(50, 2))
        np.save(tmp_path / name / "y.npy", np.arange(50) % 2)

    def replaced_meanwhile(report, path, *, held_out):
        shutil.copytree(tmp_path / "new", tmp_path / "old", dirs_exist_ok=True)
        return pd.DataFrame({"score": np.zeros(50), "predicted": 0, "truth": 0})

    monkeypatch.setattr(evaluation, "scored_table", replaced_meanwhile)
    report = SimpleNamespace(classes=("0", "1"), label=SimpleNamespace(bounds=None))
    with pytest.raises(DataError, match=r"old' changed after it was read"):
        evaluation.evaluate_privately(report, [tmp_path / "old"], epsilon=1.0, ledger=tmp_path / "ledger.sqlite")
    assert charges(tmp_path) == 0


def charges(place):
    return sum(entry.kind == "charge" for entry in Ledger(place / "ledger.sqlite").history())


def test_streamed_records_are_those_that_are_charged(tmp_path):
    """The nightly export writes over the file that a run streams its records from, and the rest of the rounds was
    made with people whose account knew nothing of it. Another file in its place is not read."""
    folder, rng = tmp_path / "arrays", np.random.default_rng(0)
    folder.mkdir()
    export = [rng.normal(mean, 1, (200, 3)).astype(np.float32) for mean in (0, 5)]
    np.save(folder / "y.npy", rng.integers(0, 2, 200))
    losses = []
    for number, overwrites in enumerate((False, None, True)):
        np.save(folder / "x.npy", export[0])

        def later(row, overwrites=overwrites):
            if row["round"] == 2 and overwrites is not None:
                target = folder / ("x.npy" if overwrites else "new.npy")
                np.save(target, export[1])
                target.replace(folder / "x.npy")

        spec = Spec().with_values(
            {
                "method": "cpfed",
                "num_clients": 2,
                "cohort_size": 2,
                "num_rounds": 6,
                "eval_every": 2,
                "batch_size": 4,
            }
            | {"batch_sampling": "poisson", "sampling_rate": 0.05, "randomness": "seeded", "data.name": ""}
            | {"data.path": str(folder), "data.stream": "yes", "data.test_fraction": 0.0},
            reset_options=True,
        )
        arguments = {
            "out": tmp_path / f"run-{number}",
            "ledger": tmp_path / "ledger.sqlite",
            "on_evaluation": later,
        }
        if overwrites:
            with pytest.raises(DataError, match=r"x\.npy' was written to while its records were in use"):
                dither.run(spec, **arguments)
        else:
            losses.append(dither.run(spec, **arguments).local.train_loss)
    assert losses[0] == losses[1]


def test_no_file_is_charged_for_counts_that_another_one_refuses(tmp_path):
    """The first file had paid before the second could not, or turned out to hold the same records."""
    files = [tmp_path / name for name in ("north.csv", "south.csv")]
    for number, file in enumerate(files):
        file.write_text("age\n" + "".join(f"{10 * number + age}\n" for age in range(10)))
    book = Ledger(tmp_path / "ledger.sqlite")
    book.set_budget(data_id(book, path=str(files[1])), Budget(0.5, DELTA))
    with pytest.raises(BudgetExhausted):
        statistics(files, epsilon=1.0, ledger=book.path)
    files[1].write_text(files[0].read_text() + "99\n")
    with pytest.raises(DataError, match="share 100%"):
        statistics(files, epsilon=1.0, ledger=book.path)
    assert charges(tmp_path) == 0


# Records that Dither itself scales


def test_an_estimator_charges_the_records_as_they_were_given(tmp_path):
    """Three fits with three bounds were three data sets of ε = 1 each, and none was the table they came from."""
    rng = np.random.default_rng(0)
    x, y, ledger = rng.normal(5, 2, (60, 3)).round(3), np.array(["no", "yes"] * 30), tmp_path / "ledger.sqlite"
    for bounds in ((0, 10), (0, 11)):
        PrivateFederatedClassifier(feature_bounds=bounds, classes=["no", "yes"], num_rounds=1, ledger=ledger).fit(
            x, y
        )
    book = Ledger(ledger)
    (dataset,) = book.datasets()
    (spent,) = book.spent(dataset)
    assert spent.epsilon > 1.3
    assert "joined" not in spent.not_covered
    with pytest.raises(DataError, match="share 100% of the smaller one's records"):
        book.identify("a table of them", lambda: hash_arrays(x, y))
