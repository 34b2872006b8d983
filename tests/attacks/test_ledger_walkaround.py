"""Ways around the ledger (H8): each must be a new charge, or refused."""

import json
import os
import re
import shutil
import threading
from importlib import metadata

import jax
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import dither
from dither import cli
from dither.accounting.ledger import store
from dither.accounting.ledger.runs import EVERY_RECORD, Budget, Ledger, data_id
from dither.accounting.ledger.store import known_records
from dither.data import hash_records
from dither.errors import BudgetExhausted, ConfigError, DitherError, SpecError
from dither.experiment import build
from dither.experiment.build import build_experiment, origin
from dither.experiment.folder import RunFolder
from dither.experiment.plan import records
from dither.experiment.train import check_public, resume, spending
from dither.federation.server import load_evaluation_data
from dither.spec import Spec

DELTA = 1e-5


def spec_of(path, **values):
    plain = {
        "method": "cpfed",
        "num_clients": 2,
        "cohort_size": 2,
        "num_rounds": 2,
        "batch_size": 4,
        "batch_sampling": "poisson",
        "sampling_rate": 0.05,
        "eval_every": 2,
        "randomness": "seeded",
        "data.name": "",
        "data.path": str(path),
        "data.label": "sick",
        "privacy.epsilon": 1.0,
        "privacy.adjacency": "zero-out",
    }
    return Spec().with_values({**plain, **values}, reset_options=True)


def people(count=200, seed=0):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "age": rng.integers(18, 90, count),
            "weight": rng.normal(70, 12, count).round(3),
            "height": rng.normal(170, 10, count).round(1),
            "pulse": rng.integers(50, 110, count),
            "site": rng.choice(["North", "South", "East"], count),
            "sick": rng.choice(["no", "yes"], count),
        }
    )


@pytest.fixture(scope="module")
def spent(tmp_path_factory):
    """A folder with records, a ledger, and a seeded run that was charged to it."""
    place = tmp_path_factory.mktemp("spent")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DITHER_STATE", str(place / "state"))
        people().to_csv(place / "people.csv", index=False)
        dither.run(spec_of(place / "people.csv"), out=place / "first", ledger=place / "ledger" / "ledger.sqlite")
    return place


@pytest.fixture
def place(spent, tmp_path, monkeypatch):
    """A copy of it."""
    shutil.copytree(spent, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("DITHER_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("DITHER_LEDGER", str(tmp_path / "ledger" / "ledger.sqlite"))
    return tmp_path


def book(place):
    return Ledger(place / "ledger" / "ledger.sqlite")


def epsilon(place):
    ledger = book(place)
    return sum(
        spent.epsilon
        for dataset in ledger.datasets()
        for spent in ledger.spent(dataset, EVERY_RECORD, delta=DELTA, adjacency="zero-out")
    )


def charges(place):
    return sum(entry.kind == "charge" for entry in book(place).history())


def train(place, path, **arguments):
    return dither.run(
        spec_of(path, **arguments.pop("values", {})),
        out=place / f"run-{len(list(place.glob('run-*')))}-{path.stem}",
        **arguments,
    )


def emptied(source, target):
    """A copy of a run folder in which no round has been made, by an owner who writes the digests anew as well."""
    shutil.copytree(
        source,
        target,
        ignore=shutil.ignore_patterns("local", "metrics.jsonl", "summary.json", "model.safetensors"),
    )
    rewrite_digests(target)
    return target


def rewrite_digests(folder):
    kept = RunFolder(folder)
    kept._save_digests({"files": kept._digests_of(), "begun": []})


def test_another_seed_in_a_copied_folder_is_charged(place):
    before = epsilon(place)
    spec = (place / "first" / "spec.toml").read_text()
    models = {(place / "first" / "model.safetensors").read_bytes()}
    for seed in (1, 2):
        copy = emptied(place / "first", place / f"copy{seed}")
        (copy / "spec.toml").write_text(spec.replace("\nseed = 0\n", f"\nseed = {seed}\n"))
        rewrite_digests(copy)
        resume(copy)
        models.add((copy / "model.safetensors").read_bytes())
    assert len(models) == 3
    assert charges(place) == 3
    assert epsilon(place) > 1.2 * before  # of three runs together


def test_the_same_bits_again_are_one_charge_and_a_moved_bit_is_another(place, monkeypatch):
    """A copy with nothing changed; then one whose compiler's settings, and one whose compiler is another."""
    before = (place / "first" / "model.safetensors").read_bytes()
    resume(emptied(place / "first", place / "same"))
    assert charges(place) == 1
    assert (place / "same" / "model.safetensors").read_bytes() == before
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " ")
    resume(emptied(place / "first", place / "flags"))
    assert charges(place) == 2
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "99" if name == "jaxlib" else version(name))
    resume(emptied(place / "first", place / "compiler"))
    assert charges(place) == 3


def test_the_threads_that_add_numbers_up_make_another_run(monkeypatch):
    """With NPROC=1 a product of 30,000 records has other bits: the same noise again, around other sums."""
    experiment = build_experiment(Spec.from_any("adult"), blank=True)
    origins = {origin(experiment, {})}
    for name in ("NPROC", "PJRT_NPROC", "ONEDNN_MAX_CPU_ISA"):
        monkeypatch.setenv(name, "1")
        origins.add(origin(experiment, {}))
    assert len(origins) == 4


def renamed(frame, path):
    frame.rename(columns={"age": "years"}).to_csv(path.with_suffix(".csv"), index=False)


def one_more_newline(frame, path):
    path.with_suffix(".csv").write_text(frame.to_csv(index=False) + "\n")


def other_line_ends(frame, path):
    path.with_suffix(".csv").write_text(frame.to_csv(index=False).replace("\n", "\r\n"), newline="")


def shuffled_rows(frame, path):
    frame.sample(frac=1, random_state=1).to_csv(path.with_suffix(".csv"), index=False)


def shuffled_and_renamed_columns(frame, path):
    columns = {"sick": "sick", "weight": "a", "site": "b", "age": "c", "pulse": "d", "height": "e"}
    frame[list(columns)].rename(columns=columns).to_csv(path.with_suffix(".csv"), index=False)


def respelled(frame, path):
    frame = frame.assign(age=frame.age.map("{:.2f}".format), site=" " + frame.site.str.upper() + " ")
    frame.to_csv(path.with_suffix(".csv"), index=False)


def half_of_them(frame, path):
    frame.iloc[::2].to_csv(path.with_suffix(".csv"), index=False)


def some_among_many(frame, path):
    pd.concat([people(3000, seed=1), frame.iloc[:20]]).to_csv(path.with_suffix(".csv"), index=False)


def without_a_column(frame, path):
    half_of_them(frame.drop(columns="weight"), path)


def with_a_new_column(frame, path):
    frame.assign(ward=np.arange(len(frame)) % 7 + 1).to_csv(path.with_suffix(".csv"), index=False)


def with_another_column_and_people(frame, path):
    frame = pd.concat([frame.iloc[20:], people(20, seed=2)])
    frame.assign(height=frame.height / 2.54).to_csv(path.with_suffix(".csv"), index=False)


def renamed_shuffled_and_without_a_column(frame, path):
    shuffled_and_renamed_columns(frame.assign(site=None), path)


def as_parquet(frame, path):
    frame.to_parquet(path.with_suffix(".parquet"))


DISGUISES = [
    renamed, one_more_newline, other_line_ends, shuffled_rows, shuffled_and_renamed_columns, respelled,
    half_of_them, some_among_many, without_a_column, with_a_new_column, with_another_column_and_people,
    renamed_shuffled_and_without_a_column, as_parquet,
]  # fmt: skip


@pytest.mark.parametrize("disguise", DISGUISES)
def test_the_same_records_in_another_dress_are_recognised(place, disguise):
    disguise(people(), place / "other")
    (path,) = place.glob("other.*")
    with pytest.raises(DitherError, match=r"people\.csv"):
        train(place, path)
    assert charges(place) == 1
    assert not list(place.glob("run-*"))


def test_charged_records_are_not_public_in_another_dress(place):
    """As training records, as test records that are scored exactly, or as what a plan is measured on."""
    shuffled_rows(people(), place / "other")
    people(seed=1).to_csv(place / "new.csv", index=False)
    (path,) = place.glob("other.*")
    for values, trained in (
        ({"data.public": True}, path),
        ({"data.test_path": str(path), "data.test_public": True}, place / "new.csv"),
        ({"data.test_path": str(path), "data.public": True, "data.test_public": True}, place / "new.csv"),
    ):
        with pytest.raises(SpecError, match=r"declared public.*people\.csv.* as private"):
            train(place, trained, values=values)
    for share in (0.0, 0.5):
        with pytest.raises(SpecError, match="declared public"):
            dither.plan(
                "cpfed",
                epsilon=1.0,
                proxy=str(path),
                public_fraction=share,
                records=100,
                values={"data.label": "sick"},
            )
    assert charges(place) == 1


def test_charged_records_are_not_public_among_others(place):
    """Two fifths of a table that was declared public were charged patients, and nothing was said: less than half.
    Rows that are equal by chance are no people."""
    mixed = pd.concat([people()[:80], people(seed=1)[:120]])
    mixed.to_csv(place / "mixed.csv", index=False)
    with pytest.raises(SpecError, match=r"declared public.*people\.csv.* share 40% of the smaller one's records"):
        train(place, place / "mixed.csv", values={"data.public": True})
    rng = np.random.default_rng(0)
    for name, count in (("charged", 400), ("open", 60)):
        table = pd.DataFrame({"a": rng.integers(0, 30, count), "b": rng.integers(0, 30, count)})
        table.assign(sick=rng.choice(["no", "yes"], count)).to_csv(place / f"{name}.csv", index=False)
    dither.statistics(str(place / "charged.csv"), epsilon=0.1)
    (chance,) = known_records(hash_records(place / "open.csv"))
    assert 0.05 < chance.shared.share < 0.5
    dither.statistics(str(place / "open.csv"), epsilon=0.1, public=True)


def test_charged_records_are_not_public_with_other_columns(place):
    people().drop(columns="pulse").to_csv(place / "other.csv", index=False)
    with pytest.raises(SpecError, match=r"declared public.*people\.csv.* share \d+"):
        train(place, place / "other.csv", values={"data.public": True})
    with pytest.raises(DitherError, match="new-ledger"):
        train(place, place / "other.csv", ledger=place / "fresh.sqlite")


def test_charged_records_are_not_public_wherever_that_is_said(place):
    """For statistics that nobody charges, for a schema read from them, for scores of a sweep or a federation."""
    shuffled_rows(people(), place / "other")
    people(seed=1).to_csv(place / "new.csv", index=False)
    path = str(place / "other.csv")
    for given in (path, pd.read_csv(path)):
        with pytest.raises(SpecError, match="declared public"):
            dither.statistics(given, epsilon=50.0, public=True)
    written = invoke("data", "schema", path, "--label", "sick", "--public", "--out", place / "schema.toml")
    assert "declared public" in str(written.exception)
    assert not (place / "schema.toml").exists()
    public = {"data.public": True, "data.test_public": True}
    scored = spec_of(place / "new.csv", **public, **{"data.test_path": path})
    with pytest.raises(SpecError, match="declared public"):
        dither.sweep(scored, {"privacy.epsilon": [0.5, 1.0]}, out=place / "sweep")
    dither.data.draft(place / "new.csv", "sick").schema.save(place / "schema.toml")
    with pytest.raises(SpecError, match="declared public"):
        load_evaluation_data(scored.with_values({"data.schema": str(place / "schema.toml"), "data.label": ""}))
    assert charges(place) == 1


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def test_the_same_records_are_charged_together_once_they_are_named(place):
    """By the ledger's own id, as the refusal says; then by a name; and the budget is one."""
    renamed(people(), place / "other")
    half_of_them(people(), place / "half")
    shuffled_rows(people(), place / "third")
    with pytest.raises(DitherError) as refused:
        train(place, place / "other.csv")
    (name,) = re.findall(r"data\.id='(\w+)'", str(refused.value))
    assert "share 100% of the smaller one's records" in str(refused.value)
    train(place, place / "other.csv", values={"data.id": name})
    assert invoke("budget", "set", place / "people.csv", "--epsilon", 9, "--id", "people").exit_code == 0
    assert invoke("budget", "same", place / "half.csv", "people").exit_code == 0
    train(place, place / "half.csv")
    ledger = book(place)
    assert len(ledger.datasets()) == 1
    assert ledger.spent(ledger.datasets()[0], EVERY_RECORD)[0].participations == 6
    assert ledger.budget(data_id(ledger, path=str(place / "other.csv"))).epsilon == 9
    ledger.set_budget(ledger.find("people"), Budget(1.2, DELTA, "upload", "zero-out"), raising=True)
    with pytest.raises(BudgetExhausted):
        train(place, place / "third.csv", values={"data.id": "people"})
    history = json.loads(invoke("budget", "history", "--json").stdout)
    assert any("the same records as" in row["what"] for row in history)


def test_other_peoples_records_need_the_owners_word(place):
    half_of_them(people(), place / "half")
    path = place / "half.csv"
    with pytest.raises(DitherError, match="dither budget other half"):
        train(place, path)
    dataset = book(place).datasets()[0][:8]
    refused = invoke("budget", "other", path, dataset)
    assert "confirm with --yes" in str(refused.exception)
    assert invoke("budget", "other", path, dataset, "--yes").exit_code == 0
    train(place, path)
    assert len(book(place).datasets()) == 2
    shuffled_rows(people().iloc[::2], place / "again")  # the word was for that file
    with pytest.raises(DitherError, match="so do 1 others"):
        train(place, place / "again.csv")


def test_the_owners_word_is_not_on_what_joins_an_account_later(place):
    """Two tables of other people share some rows. One table of all of them was charged to one of the accounts; the
    other one's people were in it for nothing."""
    other = pd.concat([people(seed=5), people()[:20]])
    other.to_csv(place / "other.csv", index=False)
    assert invoke("budget", "other", place / "other.csv", place / "people.csv", "--yes").exit_code == 0
    train(place, place / "other.csv")
    pd.concat([people(), people(seed=5)]).to_csv(place / "both.csv", index=False)
    with pytest.raises(DitherError) as refused:
        train(place, place / "both.csv")
    (first,) = re.findall(r"dither budget same both.csv (\w+)", str(refused.value))
    assert invoke("budget", "same", place / "both.csv", first).exit_code == 0
    with pytest.raises(DitherError, match=r"both\.csv' and data set .* share 100% of the smaller") as refused:
        train(place, place / "both.csv")
    (second,) = re.findall(r"dither budget same both.csv (\w+)", str(refused.value))
    assert second != first
    assert invoke("budget", "same", place / "both.csv", second).exit_code == 0
    train(place, place / "both.csv")
    (dataset,) = book(place).datasets()
    assert len(book(place).spent(dataset, EVERY_RECORD)[0].runs) == 3


def test_two_data_sets_with_budgets_become_one_with_the_stricter(place):
    people(seed=5).to_csv(place / "new.csv", index=False)
    ledger = book(place)
    first, second = (data_id(ledger, path=str(place / name)) for name in ("people.csv", "new.csv"))
    ledger.set_budget(first, Budget(3.0, DELTA))
    ledger.set_budget(second, Budget(2.0, DELTA, "sum"))
    with pytest.raises(ConfigError, match="budgets that cannot be compared"):
        ledger.identify(second, name=first)
    ledger.set_budget(second, Budget(2.0, DELTA), raising=True)
    ledger.identify(second, name=first)
    assert ledger.budget(first) == ledger.budget(second) == Budget(2.0, DELTA)


def test_a_second_account_in_another_ledger_is_recorded(place):
    fresh = place / "elsewhere" / "fresh.sqlite"
    shuffled_rows(people(), place / "other")
    with pytest.raises(DitherError, match=r"people\.csv in another ledger.* share 100% of the smaller"):
        train(place, place / "other.csv", ledger=fresh)
    train(place, place / "other.csv", ledger=fresh, new_ledger=True, values={"randomness": "os"})
    again = Ledger(fresh)
    again.identify(data_id(again, path=str(place / "other.csv")), lambda: pytest.fail("known there by now"))
    (about,) = [entry.about for entry in Ledger(fresh).history() if entry.kind == "data"]
    assert about.besides == (book(place)._store.id,)
    said = "another ledger's account of these records (--new-ledger): its ε adds up"
    for ledger in (again, Ledger(fresh)):  # "spent" is not all that was spent on these people
        (spent,) = ledger.spent(data_id(ledger, path=str(place / "other.csv")))
        assert spent.not_covered == said
    (spent,) = book(place).spent(book(place).datasets()[0])  # nor in the first one
    assert spent.not_covered.endswith(said)


def test_of_two_ledgers_that_meet_records_at_once_one_comes_second(place, monkeypatch):
    """Two jobs, each with its ledger: both asked whether the records are known before either said they are."""
    people(seed=5).to_csv(place / "new.csv", index=False)
    refused, asked, rows = [], store.known_records, hash_records(place / "new.csv")

    def identify(name):
        ledger = Ledger(place / name)
        try:
            ledger.identify(data_id(ledger, path=str(place / "new.csv")), lambda: rows)
        except DitherError as error:
            refused.append(str(error))

    def ask(rows):
        monkeypatch.setattr(store, "known_records", asked)
        found = asked(rows)
        other.start()
        other.join(1.0)
        return found

    other = threading.Thread(target=identify, args=["two.sqlite"])
    monkeypatch.setattr(store, "known_records", ask)
    identify("one.sqlite")
    other.join()
    assert len(refused) == 1
    assert "new-ledger" in refused[0]


def test_a_party_of_a_federation_is_told_before_it_joins(place):
    from dither.federation.agreement import PartyData
    from dither.federation.party import Party

    renamed(people(), place / "other")
    source = PartyData(place / "other.csv", "sick")
    for ledger, words in [(book(place), "dither budget same"), (Ledger(place / "fresh.sqlite"), "--new-ledger")]:
        with pytest.raises(DitherError, match=words):
            Party(place / "keys", source, ledger=ledger, approve=lambda agreement, experiment: "")


def test_a_memory_that_was_lost_is_made_again(place):
    shutil.rmtree(place / "state")
    train(place, place / "people.csv", values={"seed": 1})
    with pytest.raises(DitherError, match="new-ledger"):
        train(place, place / "people.csv", ledger=place / "fresh.sqlite", values={"seed": 2})


@pytest.mark.parametrize("way", ["argument", "environment"])
def test_a_fresh_ledger_does_not_forget(place, monkeypatch, way):
    fresh = place / "elsewhere" / "fresh.sqlite"
    if way == "environment":
        monkeypatch.setenv("DITHER_LEDGER", str(fresh))
    with pytest.raises(DitherError, match="new-ledger"):
        train(place, place / "people.csv", ledger=fresh if way == "argument" else None)


@pytest.mark.parametrize("way", ["rolled back", "deleted", "replaced"])
def test_a_ledger_that_forgets_is_noticed_by_a_new_run(place, way):
    where, old = place / "ledger", place / "old"
    shutil.copytree(where, old)
    book(place).set_budget("any", Budget(1.0, DELTA))  # one more entry
    shutil.rmtree(where)
    if way == "rolled back":
        shutil.copytree(old, where)
    if way == "replaced":
        Ledger(place / "another.sqlite")
        where.mkdir()
        for suffix in ("", ".key"):
            shutil.move(place / f"another.sqlite{suffix}", where / f"ledger.sqlite{suffix}")
    with pytest.raises(DitherError, match=r"ledger\.sqlite"):
        dither.run(spec_of(place / "people.csv", seed=2), out=place / "new")


def test_a_budget_is_not_raised_without_a_second_word(place):
    ledger = book(place)
    dataset = data_id(ledger, path=str(place / "people.csv"))
    ledger.set_budget(dataset, Budget(1.0, DELTA, "upload", "zero-out"))
    asked = ["budget", "set", str(place / "people.csv"), "--adjacency", "zero-out", "--epsilon"]
    for flags in ([], ["--json"]):  # no terminal here: nobody can be asked
        refused = CliRunner().invoke(cli.app, [*asked, "100", *flags])
        assert refused.exit_code == 1
        assert isinstance(refused.exception, ConfigError)
        assert str(refused.exception).startswith("this raises the budget from ε=1 (")
    assert ledger.budget(dataset).epsilon == 1.0
    assert CliRunner().invoke(cli.app, [*asked, "0.5"]).exit_code == 0
    assert CliRunner().invoke(cli.app, [*asked, "100", "--yes"]).exit_code == 0
    assert ledger.budget(dataset).epsilon == 100.0
    history = json.loads(CliRunner().invoke(cli.app, ["budget", "history", "--json"]).stdout)
    assert "budget ε=100 (" in history[-1]["what"]
    assert "raised from ε=0.5 (" in history[-1]["what"]


def test_a_budget_is_for_the_records_however_they_are_saved(place):
    """A budget that was set before the first charge was for the bytes of one file: 0.5 was set, the table saved
    again with other line ends, and 4 spent."""
    table, again = place / "mine.csv", place / "again.csv"
    people(seed=5).to_csv(table, index=False)
    assert invoke("budget", "set", table, "--epsilon", 0.5).exit_code == 0
    people(seed=5).sort_values("age").to_csv(again, index=False, lineterminator="\r\n")
    with pytest.raises(DitherError, match=r"'again\.csv' and data set .*mine\.csv.* share 100%"):
        dither.statistics(str(again), epsilon=4.0)
    assert "share 100%" in str(invoke("budget", "set", again, "--epsilon", 9).exception)
    assert (
        invoke("budget", "same", again, "mine.csv").exit_code != 0
    )  # not by the name of a file that is not there
    assert invoke("budget", "same", again, table).exit_code == 0
    with pytest.raises(BudgetExhausted):
        dither.statistics(str(again), epsilon=4.0)
    assert charges(place) == 1


def test_what_was_spent_is_not_denied_of_a_table_that_was_saved_again(place):
    """`dither budget show` said that nothing had been charged."""
    people().to_csv(place / "again.csv", index=False, lineterminator="\r\n")
    shown = invoke("budget", "show", place / "again.csv")
    assert re.search(
        r"'again\.csv' and data set \w+ \(people\.csv\) .* share 100%", " ".join(shown.output.split())
    )
    people(seed=8).to_csv(place / "new.csv", index=False)
    assert invoke("budget", "set", place / "new.csv", "--epsilon", 1).exit_code == 0
    for shown in (invoke("budget", "show", place / "new.csv"), invoke("budget", "show")):
        assert shown.exit_code == 0
        assert "share" not in shown.output


def test_a_budget_of_one_ledger_is_not_forgotten_in_another(place):
    people(seed=5).to_csv(place / "mine.csv", index=False)
    assert invoke("budget", "set", place / "mine.csv", "--epsilon", 0.5).exit_code == 0
    other = ("--ledger", place / "other.sqlite")
    assert "new-ledger" in str(invoke("budget", "set", place / "mine.csv", "--epsilon", 9, *other).exception)
    with pytest.raises(DitherError, match="new-ledger"):
        dither.statistics(str(place / "mine.csv"), epsilon=4.0, ledger=place / "other.sqlite")
    second = invoke("budget", "set", place / "mine.csv", "--epsilon", 9, "--new-ledger", *other)
    assert second.exit_code == 0
    dither.statistics(str(place / "mine.csv"), epsilon=4.0, ledger=place / "other.sqlite")


def test_the_owners_word_on_a_file_holds_when_it_is_saved_again(place):
    """Too many columns are others for the ledger to see that these are the same people."""
    other = people().assign(age=lambda t: t.age + 0.5, weight=lambda t: t.weight * 2.2, height=0, pulse=0, x=1)
    other.to_csv(place / "other.csv", index=False)
    assert invoke("budget", "same", place / "other.csv", place / "people.csv").exit_code == 0
    other.to_csv(place / "again.csv", index=False, lineterminator="\r\n")
    with pytest.raises(DitherError, match=r"'again\.csv' and data set .* share 100%"):
        dither.statistics(str(place / "again.csv"), epsilon=4.0)


# Test records that are chosen after training


def test_a_test_split_that_is_drawn_after_training_is_not_public(place):
    """The first run trained on four fifths. Another seed holds out other rows, and data.test_public would score
    the model exactly on records that are charged as private; so would the first seed after statistics of all."""
    public = {"data.test_public": True}
    for values in ({"seed": 1}, {"data.test_fraction": 0.5}, {"data.split": "rows"}, {"data.split": "per-client"}):
        with pytest.raises(SpecError, match=r"data\.test_public declares records of .*people\.csv.* public"):
            train(place, place / "people.csv", values={**public, **values})
    assert charges(place) == 1
    report = train(place, place / "people.csv", values={**public, "privacy.epsilon": 0.5})
    assert report.test_accuracy is not None
    dither.statistics(str(place / "people.csv"), epsilon=0.1)
    with pytest.raises(SpecError, match=r"data\.test_public declares"):
        train(place, place / "people.csv", values={**public, "privacy.epsilon": 0.4})


def test_a_test_split_of_what_another_ledger_was_charged_for_is_not_public(place):
    """The second account knows nothing of what the first run left out: records that it trained on were scored."""
    values = {"seed": 1, "data.test_public": True}
    with pytest.raises(SpecError, match=r"the test part of .*people\.csv' is declared public.* share 100%"):
        train(place, place / "people.csv", values=values, ledger=place / "fresh.sqlite", new_ledger=True)
    people(seed=7).to_csv(place / "new.csv", index=False)
    train(place, place / "new.csv", values=values, ledger=place / "fresh.sqlite", new_ledger=True)


def test_two_runs_that_begin_together_do_not_both_call_their_test_split_public(place):
    """Neither had charged when the other looked, and each would score its model on records the other trains on."""
    people(seed=7).to_csv(place / "new.csv", index=False)
    accounts = []
    for seed in (0, 1):
        spec = spec_of(place / "new.csv", seed=seed, **{"data.test_public": True})
        experiment, folder = build_experiment(spec), RunFolder.create(place / f"together-{seed}", spec, {}, {})
        accounts.append(spending(experiment, folder, place / "ledger" / "ledger.sqlite"))
    assert accounts[0].pay(0, 1) == 1
    with pytest.raises(SpecError, match=r"data\.test_public declares records of .*new\.csv.* public"):
        accounts[1].pay(0, 1)
    assert accounts[0].pay(1, 2) == 2
    assert charges(place) == 3


@pytest.mark.parametrize("change", [{"data.test_fraction": 0.3}, {"data.path": "sorted.csv"}])
def test_test_records_of_clients_are_known_by_what_they_hold(place, change):
    """They were known by their rows among the pooled records. Another share that is held out before, or the rows
    in another order, put other records there: those that the first run had trained on were scored exactly."""
    table = people(count=300, seed=9)
    table.to_csv(place / "mine.csv", index=False)
    table.sort_values("age").to_csv(place / "sorted.csv", index=False)
    values = {"data.split": "per-client", "data.test_public": True, "data.id": "mine"}
    train(place, place / "mine.csv", values=values)
    train(place, place / "mine.csv", values={**values, "privacy.epsilon": 0.5})  # the same ones
    path = place / change.get("data.path", "mine.csv")
    with pytest.raises(SpecError, match=r"data\.test_public declares records of mine"):
        train(place, path, values={**values, **change, "data.path": str(path)})
    assert charges(place) == 3


@pytest.mark.parametrize("count", [60, 200])
def test_a_run_is_not_scored_on_its_own_training_records(place, count):
    """Nothing was charged for them when they were declared public as test records, in the very first run."""
    people(seed=4).to_csv(place / "new.csv", index=False)
    people(seed=4)[:count].sort_values("age").to_csv(place / "test.csv", index=False)
    values = {"data.test_path": str(place / "test.csv"), "data.test_public": True}
    with pytest.raises(SpecError, match=r"test\.csv' is declared public, but it and new\.csv.* share"):
        train(place, place / "new.csv", values=values)
    assert charges(place) == 1
    people(seed=6)[:count].to_csv(place / "test.csv", index=False)
    assert train(place, place / "new.csv", values=values).test_accuracy is not None


@pytest.mark.parametrize("kind", ["csv", "npz"])
def test_a_run_is_not_scored_on_a_few_of_its_many_training_records(place, kind):
    """A sketch of 1,024 of them held none of the twenty, which were then scored exactly: 20 of 60,000 records were
    overlooked in seven of ten runs."""
    rng = np.random.default_rng(5)
    x, y = rng.normal(0, 1, (60_000, 3)), rng.integers(0, 2, 60_000)
    few = slice(100, 120)
    values = {"data.label": "", "data.test_public": True}
    if kind == "npz":
        np.savez(place / "many.npz", x_train=x, y_train=y, x_test=x[few], y_test=y[few])
    else:
        table = pd.DataFrame(x, columns=list("abc")).assign(sick=np.where(y, "yes", "no"))
        table.to_csv(place / "many.csv", index=False)
        table[few].to_csv(place / "few.csv", index=False)
        values |= {"data.label": "sick", "data.test_path": str(place / "few.csv")}
    experiment = build_experiment(spec_of(place / f"many.{kind}", **values))
    with pytest.raises(SpecError, match=r"is declared public, but it and .* share 100%"):
        check_public(experiment)


def test_arrays_are_not_scored_on_themselves_in_the_place_of_a_test_file(place):
    """data.test_path was ignored for arrays that are given in Python: the model was scored exactly on a fifth of
    them, which nobody had called public."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(0, 1, (300, 3)), rng.integers(0, 2, 300)
    np.savez(place / "open.npz", x=x[:50] + 9, y=y[:50])
    values = {"data.test_path": str(place / "open.npz"), "data.test_public": True, "data.label": ""}
    with pytest.raises(SpecError, match=r"data\.test_path=.* does not go with arrays"):
        dither.run(spec_of("x.npz", **values), data=(x, y), out=place / "run")
    assert charges(place) == 1


def test_private_records_do_not_decide_what_is_made_of_the_public_share(place):
    """The label of a private record moved which public ones are held out, as the split is stratified by class: a
    plan, and a model that nobody charges for, were made of others. So were bounds that are read from all."""
    table = people(count=600, seed=21)
    schema = str(place / "schema.toml")
    dither.data.draft(table, "sick").schema.as_public().save(schema)
    base = {"data.part": "public", "data.public_fraction": 0.3, "data.public": True, "data.label": ""}
    public = dither.data.load(records=table, label="sick", test_fraction=0.0)
    whose = dither.data.public_part(public, "public", 0.3)
    is_public = np.isin(public.x_train, whose.x_train).all(axis=1)
    found = []
    for world in (table, table.assign(sick=np.where(is_public, table.sick, "yes"))):
        world.to_csv(place / "shared.csv", index=False)
        spec = spec_of(place / "shared.csv", **base, **{"data.schema": schema})
        spec_, _ = records.base_spec("cpfed", {"num_clients": 2}, {"data.schema": schema}, {})
        _, planned, count = records.planning_data(spec_, None, None, str(place / "shared.csv"), 0.3, None)
        parts = [build_experiment(spec).problem, planned.dataset]
        found.append([count, *(each for part in (parts[0][:2], parts[1][1:5]) for each in part)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    drafted = {**base, "data.label": "sick"}
    with pytest.raises(SpecError, match="read from its private records"):
        build_experiment(spec_of(place / "shared.csv", **drafted))


@pytest.mark.parametrize("kind", ["csv", "npz"])
def test_test_records_are_the_ones_that_were_read(place, kind):
    """Another file lay at their path when they were compared with charged records."""
    values = {"data.label": ""} if kind == "npz" else {}

    def write(name, seed):
        path, table = place / f"{name}.{kind}", people(seed=seed)
        if kind == "csv":
            table.to_csv(path, index=False)
        else:
            np.savez(
                path, x=table[["age", "weight", "height"]].to_numpy(float), y=(table.sick == "yes").astype(int)
            )
        return path

    train(place, write("charged", 3), values=values)
    values |= {"data.test_path": str(write("test", 3)), "data.test_public": True}
    experiment = build_experiment(spec_of(write("new", 1), **values))
    write("test", 7)
    with pytest.raises(SpecError, match="declared public"):
        check_public(experiment)


def test_a_public_schema_is_of_the_records_that_were_compared(place, monkeypatch):
    """`data schema --public` read its file twice: another one's bounds could be called public."""
    people(seed=8).assign(age=lambda table: table["age"] - 500).to_csv(place / "open.csv", index=False)
    asked = ["data", "schema", str(place / "open.csv"), "--label", "sick", "--public", "--out"]
    refuse = build.refuse_charged

    def then_another_file(*given):
        refuse(*given)
        shutil.copy(place / "people.csv", place / "open.csv")

    with monkeypatch.context() as patch:
        patch.setattr(build, "refuse_charged", then_another_file)
        assert CliRunner().invoke(cli.app, [*asked, str(place / "schema.toml")]).exit_code == 0
    schema = dither.data.Schema.load(place / "schema.toml")
    assert next(column.bounds for column in schema.columns if column.name == "age")[1] < 0
    refused = CliRunner().invoke(cli.app, [*asked, str(place / "other.toml")])
    assert "is declared public, but it and people.csv" in str(refused.exception)
    assert not (place / "other.toml").exists()


def test_what_a_server_or_a_plan_reads_is_what_is_compared(place, monkeypatch):
    """Charged records came to lie there after the comparison."""
    people(seed=1).to_csv(place / "other.csv", index=False)
    dither.data.draft(place / "other.csv", "sick").schema.save(place / "schema.toml")
    path, values = str(place / "other.csv"), {"data.label": "sick"}

    def swapped(read):
        def late(*given, **options):
            people().to_csv(path, index=False)
            return read(*given, **options)

        return late

    monkeypatch.setattr(dither.data, "read_table", swapped(dither.data.read_table))
    given = {"data.test_path": path, "data.test_public": True, "data.schema": str(place / "schema.toml")}
    with pytest.raises(SpecError, match="declared public"):
        load_evaluation_data(spec_of(place / "new.csv", **given, **{"data.label": ""}))
    people(seed=1).to_csv(path, index=False)
    monkeypatch.setattr(records, "load_data", swapped(records.load_data))
    with pytest.raises(SpecError, match="declared public"):
        dither.plan("cpfed", epsilon=1.0, proxy=path, records=100, values=values)


def test_pictures_that_were_charged_are_no_test_records(place):
    """Records of many features have no parts that are compared: two fifths of a test set could be charged ones."""
    rng = np.random.default_rng(3)
    x, y = rng.integers(0, 256, (500, 400)), rng.integers(0, 2, 500)
    np.savez(place / "own.npz", x=x[:200], y=y[:200])
    values = {"data.label": "", "data.test_path": str(place / "test.npz"), "data.test_public": True}
    for first in (120, 200):
        np.savez(place / "test.npz", x=x[first : first + 200], y=y[first : first + 200])
        if first == 200:
            assert train(place, place / "own.npz", values=values).test_accuracy is not None
            continue
        with pytest.raises(SpecError, match=r"test\.npz' is declared public, but it and own\.npz.* share 40%"):
            train(place, place / "own.npz", values=values)
    few = np.eye(100)[rng.integers(0, 10, (260, 3)) + np.arange(0, 30, 10)].sum(
        axis=1
    )  # 100 columns that say little
    for name, part in (("charged", slice(0, 200)), ("open", slice(200, 260))):
        np.savez(place / f"{name}.npz", x=few[part], y=y[:260][part])
    train(place, place / "charged.npz", values={"data.label": ""})
    (chance,) = known_records(hash_records(place / "open.npz"))
    assert 0.01 < chance.shared.share < 0.5
    train(place, place / "open.npz", values={"data.label": "", "data.public": True})


def test_test_arrays_beside_the_others_are_not_charged_ones(place):
    """A file of arrays that was dealt out anew: what the first run trained on was the second one's test part."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(0, 1, (300, 3)), rng.integers(0, 2, 300)
    for name, tested in (("one", slice(200, 300)), ("two", slice(0, 100))):
        parts = {f"{key}_test": array[tested] for key, array in (("x", x), ("y", y))}
        parts |= {f"{key}_train": np.delete(array, tested, axis=0) for key, array in (("x", x), ("y", y))}
        np.savez(place / f"{name}.npz", **parts)
    values = {"data.label": "", "data.test_public": True, "data.id": "arrays"}
    train(place, place / "one.npz", values=values)
    train(place, place / "one.npz", values={**values, "privacy.epsilon": 0.5})  # the same ones
    with pytest.raises(SpecError, match=r"data\.test_public declares records of arrays"):
        train(place, place / "two.npz", values=values)
    assert charges(place) == 3


def test_test_arrays_are_not_the_training_arrays_of_the_same_file(place):
    """Declared public in the first run, they were scored exactly, and nothing was charged for it."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(0, 1, (300, 3)), rng.integers(0, 2, 300)
    values = {"data.label": "", "data.test_public": True}
    np.savez(place / "one.npz", x_train=x, y_train=y, x_test=x[50:150], y_test=y[50:150])
    (place / "one.npz").rename(place / "one.NPZ")  # the same kind of file
    with pytest.raises(
        SpecError, match=r"x_test of '.*' is declared public, but it and the training .* share 100%"
    ):
        train(place, place / "one.NPZ", values=values)
    np.savez(place / "one.npz", x_train=x[:200], y_train=y[:200], x_test=x[160:], y_test=y[160:])
    with pytest.raises(SpecError, match=r"but it and the training records, .* share 28\.6%"):
        train(place, place / "one.npz", values=values)
    x = rng.integers(0, 30, (300, 2))  # equal by chance
    np.savez(place / "one.npz", x_train=x[:200], y_train=y[:200], x_test=x[260:], y_test=y[260:])
    assert train(place, place / "one.npz", values=values).test_accuracy is not None
    x = rng.normal(5, 1, (300, 3))
    np.savez(place / "one.npz", x=np.tile(x, (2, 1)), y=np.tile(y, 2))  # a share of the rows, held out by Dither
    assert train(place, place / "one.npz", values=values).test_accuracy is not None


def test_test_records_beside_a_folders_arrays_are_not_charged_ones(place):
    frame, folder = people(), place / "arrays"
    folder.mkdir()
    rng = np.random.default_rng(3)
    np.save(folder / "x.npy", rng.normal(0, 1, (100, 2)))
    np.save(folder / "y.npy", rng.integers(0, 2, 100))
    np.save(folder / "x_test.npy", np.ascontiguousarray(frame[["age", "weight"]].to_numpy(float)))
    np.save(folder / "y_test.npy", (frame.sick == "yes").to_numpy(np.int64))
    frame.assign(sick=(frame.sick == "yes").astype(int))[["age", "weight", "sick"]].to_csv(
        place / "two.csv", index=False
    )
    dither.statistics(str(place / "two.csv"), epsilon=0.1)
    values = {"data.label": "", "data.test_public": True}
    with pytest.raises(SpecError, match=r"declared public.*two\.csv"):
        train(place, folder, values=values)


def test_test_arrays_of_a_folder_are_not_trained_on(place):
    """A ledger knows a folder by x.npy. Its test records, pooled with the others and dealt out anew, were trained
    on in any number of runs, and an account of their own was as fresh as ever."""
    folder, rng = place / "arrays", np.random.default_rng(3)
    folder.mkdir()
    for name in ("", "_test"):
        np.save(folder / f"x{name}.npy", rng.normal(0, 1, (100, 2)))
        np.save(folder / f"y{name}.npy", rng.integers(0, 2, 100))
    for split in ("per-client", "validation"):
        with pytest.raises(SpecError, match=r"would train on x_test\.npy"):
            train(place, folder, values={"data.label": "", "data.split": split})
    assert charges(place) == 1


def test_seeded_runs_that_share_their_noise_are_labelled(place):
    """Whoever sees two of them need not know the seed. (The same bits again reveal nothing new.)"""
    plain = {"batch_sampling": "full", "sampling_rate": 0.0, "num_rounds": 1, "privacy.noise": "given"}
    plain |= {"privacy.noise_std": 1.0, "seed": 7}
    models = []
    for clip_norm in (1e-6, 2e-6):
        report = train(place, place / "people.csv", values={**plain, "privacy.clip_norm": clip_norm})
        models.append(np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(report.params)]))
    assert np.abs(models[1] - models[0]).max() < 1e-5 < 1e-2 < np.abs(models[0]).max()
    dataset = data_id(book(place), path=str(place / "people.csv"))
    (spent,) = book(place).spent(dataset, EVERY_RECORD)
    assert "one seed" in spent.not_covered
    shown = invoke("budget", "show", place / "people.csv").stdout
    assert "share their noise" in shown


def test_one_seeded_run_in_two_folders_is_not_labelled(place):
    for seed in (3, 3, 5):
        train(place, place / "people.csv", values={"seed": seed})
    dataset = data_id(book(place), path=str(place / "people.csv"))
    (spent,) = book(place).spent(dataset, EVERY_RECORD)
    assert len(spent.runs) == 4
    assert "one seed" not in spent.not_covered
    assert "noise from a seed: whoever knows the seed can subtract it" in spent.not_covered  # it is in spec.toml
