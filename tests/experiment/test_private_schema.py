"""Tests of `dither.experiment.private_schema`: a schema that an ε covers."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from dither.accounting.ledger import Ledger
from dither.cli import app
from dither.data import Categorical, Numeric, Schema
from dither.data.schema import PRIVATE, PUBLIC, SchemaPrivacy
from dither.errors import BudgetExhausted, DataError, SpecError
from dither.experiment import private_schema as private_schema_module
from dither.experiment.account import account
from dither.experiment.counting import HISTOGRAM, NAMES, Counting
from dither.experiment.private_schema import Wanted, _Estimates, _Label, _rounded, estimate_schema, private_schema
from tests.experiment.test_counting import asked as asked
from tests.experiment.test_statistics import seeded


def clinic(records=3000, seed=0):
    rng = np.random.default_rng(seed)
    age, grade = rng.normal(60, 12, records).round(), rng.choice(["low", "high"], records)
    ill = rng.random(records) < 1 / (1 + np.exp(-(age - 60) / 6))
    return pd.DataFrame(
        {
            "patient_id": np.arange(records),
            "age": np.where(rng.random(records) < 0.05, "-", age.astype(str)),
            "year": rng.integers(1995, 2025, records),
            "grade": np.where(rng.random(records) < 0.1, "", grade),
            "visit": [f"V{seed}{row:06}" for row in range(records)],
            "country": "NL",
            "constant": 4.2,
            "copy": np.where(ill, "RE", "FI"),
            "number_copy": ill.astype(int),
            "dose": age * 0.1 + rng.normal(0, 0.2, records),
            "ill": np.where(ill, "yes", "no"),
        }
    )


def estimated(wanted=Wanted("ill"), epsilon=8.0, frames=None, seed=0):
    frames = frames or [clinic(seed=0), clinic(seed=1)]
    counter = Counting(frames, epsilon, 1e-5, seeded(seed))
    return estimate_schema(counter, list(frames[0].columns), wanted, SchemaPrivacy(epsilon, 1e-5), "clinics")


def test_what_is_estimated():
    schema, excluded = estimated()
    columns = {column.name: column for column in schema.columns}
    assert set(columns) == {"age", "year", "grade", "dose"}
    assert schema.label.classes == ("no", "yes")
    assert columns["grade"].categories == ("high", "low")
    age, year = columns["age"], columns["year"]
    assert age.bounds[0] < 40
    assert age.bounds[1] > 80
    assert age.standard == pytest.approx((60, 12), abs=2)
    assert age.missing == pytest.approx(60, abs=3)
    assert 1970 < year.bounds[0] <= 1995
    assert 2024 <= year.bounds[1] < 2045
    assert year.standard[1] == pytest.approx(8.7, rel=0.2)
    assert "id" in excluded["patient_id"]
    assert "enough records" in excluded["visit"]
    assert "same value" in excluded["country"]
    assert "same value" in excluded["constant"]
    assert "follows from the label" in excluded["copy"]
    assert "follows from the label" in excluded["number_copy"]
    assert schema.covered
    assert schema.read_from_data == ()


@pytest.mark.parametrize("seed", range(3))
def test_a_feature_whose_values_hardly_stand_out_is_no_copy_of_the_label(seed):
    """At a small ε few bins of a histogram stand out from the noise: what is not seen speaks for no copy."""
    schema, excluded = estimated(epsilon=0.25, seed=seed)
    assert {"age", "dose", "year"} <= {column.name for column in schema.columns}
    assert "follows from the label" in excluded["copy"]


def test_bounds_are_a_tenth_wider_than_the_values_that_stand_out():
    values = [0.0] * 940 + [100.0] * 30 + [-100.0] * 30
    frame = pd.DataFrame({"level": values, "ill": ["yes", "no"] * 500})
    (level,) = estimated(epsilon=50.0, frames=[frame]).schema.columns
    assert level.bounds == (-140, 140)  # 120 and more, rounded


def test_a_label_of_numbers_is_a_regression_and_declared_classes_are_public():
    schema, _ = estimated(Wanted("dose", drop=("copy",)))
    assert schema.label.bounds is not None
    assert schema.label.bounds_from == PRIVATE
    low, high = schema.label.bounds
    doses = np.concatenate([clinic(seed=seed)["dose"] for seed in (0, 1)])  # values but for the rarest, some more
    (first, last), margin = np.quantile(doses, [0.01, 0.99]), 0.2 * np.ptp(doses)
    assert doses.min() - margin < low < first
    assert last < high < doses.max() + margin
    schema, excluded = estimated(Wanted("ill", classes=("yes", "no"), keep=("patient_id",)), epsilon=2.0)
    assert (schema.label.classes, schema.label.classes_from) == (("yes", "no"), PUBLIC)
    assert "patient_id" not in excluded


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("no", "yes"), ("no", "yes")),
        ((0, 1), ("0", "1")),
        (("1", "-1"), ("-1", "1")),
        ((False, True), ("False", "True")),
        (("NEG", "POS"), ("NEG", "POS")),
        (("no", "Yes"), None),  # of two pairs
        (("healthy", "ill"), None),
    ],
)
def test_usual_classes_are_found_where_no_name_would_be_listed(names, found):
    """At this ε a name is listed if some 1,000 records of one table have it."""
    frames = [clinic(1200, seed) for seed in (0, 1)]
    for frame in frames:
        frame["ill"] = np.where(frame["ill"] == "yes", names[1], names[0])
    for seed in range(3):
        if found is None:
            with pytest.raises(DataError, match="declare its classes"):
                estimated(epsilon=0.13, frames=frames, seed=seed)
        else:
            assert estimated(epsilon=0.13, frames=frames, seed=seed).schema.label.classes == found


def test_a_usual_pair_among_other_labels_is_not_the_classes():
    """A sixth of the records have a third label: names that enough records have are all listed."""
    frames = [clinic(seed=seed) for seed in (0, 1)]
    for frame in frames:
        frame.loc[::6, "ill"] = "unknown"
    assert estimated(frames=frames).schema.label.classes == ("no", "unknown", "yes")


def test_the_file_says_what_it_cost_and_is_read_back(tmp_path):
    schema, _ = estimated()
    schema.save(tmp_path / "schema.toml")
    assert Schema.load(tmp_path / "schema.toml") == schema
    text = (tmp_path / "schema.toml").read_text()
    assert 'origin = "private"' in text
    assert "ε = 8" in text
    assert "adds to this one" in schema.coverage_notes()[0]
    assert schema.as_public().privacy is None
    with pytest.raises(DataError, match="no \\[privacy\\]"):
        Schema.from_dict({key: value for key, value in schema.to_dict().items() if key != "privacy"})
    with pytest.raises(DataError, match="epsilon=0"):
        Schema.from_dict({**schema.to_dict(), "privacy": {"epsilon": 0.0, "delta": 1e-5}})
    # a cell that is no number counts as missing: nobody has looked at it
    odd = clinic(20).assign(age=["forty", "inf", *["50"] * 18])
    assert np.isfinite(schema.encode(odd, labels="ignore").x).all()


def test_a_column_whose_values_do_not_stand_out_keeps_the_bounds_of_the_survey():
    estimates = object.__new__(_Estimates)
    estimates._names, estimates._ranges, estimates._sum_std = {}, {"level": (0.0, 1.0)}, 10.0
    estimates._cells = {"level": np.zeros((3, 64), int)}
    assert estimates.column("level") == Numeric.with_bounds("level", (0.0, 1.0), PRIVATE)
    estimates._cells["level"][0, [8, 16, 56]] = 1000
    estimates._outer = {"level": (0.0, 1.0)}
    assert estimates.column("level").missing == pytest.approx(16.5 / 64, abs=0.01)  # the median


def test_values_in_one_bin_are_spread_over_it():
    """A uniform distribution over a bin of width 0.5 has the deviation 0.5 / sqrt(12)."""
    estimates = object.__new__(_Estimates)
    estimates._names, estimates._ranges, estimates._sum_std = {}, {"level": (0.0, 32.0)}, 10.0
    estimates._cells, estimates._outer = {"level": np.zeros((3, 64), int)}, {"level": (0.0, 32.0)}
    estimates._cells["level"][0, 20] = 1000
    assert estimates.column("level").standard == pytest.approx((10.25, 0.5 / np.sqrt(12)), abs=0.01)


@pytest.mark.parametrize(("scale", "rounded"), [(9.9, 59.6), (10.0, 60), (99.0, 60), (100.0, 60), (1000.0, 100)])
def test_values_are_rounded_as_far_as_a_tenth_of_the_scale_allows(scale, rounded):
    assert _rounded(59.64, scale) == rounded


def test_a_label_that_is_no_class_blanks_its_record():
    """An error would show that there is such a record: to everybody, where a party no longer takes part."""
    odd = clinic(20).assign(ill=["maybe", "", *["yes", "no"] * 9])
    schema, _ = estimated()
    assert schema.encode_labels(odd).tolist() == [-1, -1, *[1, 0] * 9]
    declared, _ = estimated(Wanted("ill", classes=("no", "yes")))
    assert declared.encode_labels(odd).tolist() == [-1, -1, *[1, 0] * 9]
    with pytest.raises(DataError, match="is empty in row 2"):
        schema.as_public().encode_labels(odd)
    numbers, _ = estimated(Wanted("dose", drop=("copy",)))
    doses = numbers.encode_labels(clinic(20).assign(dose=["x", "", "inf", *["6"] * 17]))
    assert doses[:3].tolist() == [-1] * 3
    assert (doses[3:] > 0).all()
    with pytest.raises(DataError, match="row 1 holds 'x'"):
        numbers.as_public().encode_labels(clinic(20).assign(dose=["x", *["6"] * 19]))


@pytest.mark.parametrize(
    "record",
    [
        {"age": "9e99", "grade": "unique", "ill": "no"},
        {"age": "text", "grade": "low", "ill": "maybe"},
        {"year": -5},
    ],
)
def test_blanking_a_record_moves_no_question_further_than_its_noise_is_for(asked, record):
    frame, worlds = clinic(400).astype(object), []
    for last in ({**frame.iloc[0].to_dict(), **record}, {}):
        asked.clear()
        estimated(frames=[pd.concat([frame, pd.DataFrame([last])], ignore_index=True)], epsilon=50.0)
        worlds.append(list(asked))
    for (question, counts), (same, others) in zip(*worlds, strict=True):
        assert question == same  # the noise is so small that nothing else follows from the answers
        if question.kind != NAMES:
            assert np.sum(np.square(counts[0] - others[0])) <= question.touched
    questions = [question for question, _ in worlds[0]]
    assert sum(question.share for question in questions) == pytest.approx(1)  # all of the budget, no more
    assert not any("ill" in question.columns for question in questions if question.kind == HISTOGRAM)


def test_every_file_is_charged_before_the_first_look(tmp_path):
    files = [tmp_path / "north.csv", tmp_path / "south.csv"]
    for seed, file in enumerate(files):
        clinic(600, seed).to_csv(file, index=False)
    book = tmp_path / "ledger.sqlite"
    arguments = ["data", "schema", *map(str, files), "--label", "ill", "--ledger", str(book), "--private"]
    assert CliRunner().invoke(app, arguments).exit_code != 0  # --epsilon is missing
    for wrong in (["--epsilon", "0"], ["--epsilon", "1", "--drop", "weight"]):
        assert CliRunner().invoke(app, [*arguments, *wrong]).exit_code != 0
    assert not book.exists()
    out = tmp_path / "schema.toml"
    result = CliRunner().invoke(app, [*arguments, "--epsilon", "9", "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["privacy"]["epsilon"] == 9.0
    assert facts["read_from_data"] == []
    assert Schema.load(out).name == tmp_path.name
    ledger = Ledger(book)
    spent = [each for dataset in ledger.datasets() for each in ledger.spent(dataset)]
    assert all(8.9 < each.epsilon <= 9.0 for each in spent)
    assert spent[0].runs == spent[1].runs == (facts["privacy"]["charge"],)
    spec = {
        "data.path": [str(file) for file in files],
        "data.schema": str(out),
        "data.split": "rows",
        "privacy.epsilon": 1.0,
    }
    report = account(_chosen(spec))
    assert [part.what for part in report.split] == ["schema", "training", "everything together"]
    assert report.split[-1].not_covered == ("what else was charged for these records",)
    schema, training, together = (part.epsilon for part in report.split)
    assert max(schema, training) < together < schema + training
    parts = account(_chosen({**spec, "privacy.adjacency": "replace-one"})).split
    assert parts[0].epsilon > 2 * schema, "for the neighbours of the row beside it"
    assert not any("split" in text for row in report.epsilon.table for text in row.not_covered)


def _chosen(spec):
    from dither.experiment.build import choose

    return choose(spec).spec


def test_a_budget_that_cannot_pay_stops_it(tmp_path, monkeypatch):
    file = tmp_path / "north.csv"
    clinic(300).to_csv(file, index=False)
    monkeypatch.setattr(Counting, "total", lambda *_: pytest.fail("looked"))
    assert (
        CliRunner()
        .invoke(app, ["budget", "set", str(file), "--epsilon", "0.1", "--ledger", str(tmp_path / "l.sqlite")])
        .exit_code
        == 0
    )
    with pytest.raises(BudgetExhausted):
        private_schema([file], Wanted("ill"), epsilon=1.0, ledger=tmp_path / "l.sqlite")


def test_records_of_another_ledger_are_refused_unless_the_owner_confirms(tmp_path, monkeypatch):
    file, other = tmp_path / "north.csv", tmp_path / "other.sqlite"
    clinic(300).to_csv(file, index=False)
    values = {"wanted": Wanted("ill"), "epsilon": 8.0, "words": seeded(0)}
    private_schema([file], **values, ledger=tmp_path / "first.sqlite")
    with monkeypatch.context() as patch:
        patch.setattr(Counting, "total", lambda *_: pytest.fail("looked"))
        with pytest.raises(DataError, match="in another ledger"):
            private_schema([file], **values, ledger=other)
    assert not any(Ledger(other).spent(dataset) for dataset in Ledger(other).datasets())
    assert private_schema([file], **values, ledger=other, new_ledger=True).schema.privacy.charge


def test_mistakes_are_named(tmp_path):
    with pytest.raises(DataError, match="label column 'il' is not in every table; did you mean 'ill'"):
        estimated(Wanted("il"))
    with pytest.raises(SpecError, match="task='ranking'"):
        estimated(Wanted("ill", task="ranking"))
    for classes in (("yes",), ("yes", "no", "yes")):
        with pytest.raises(SpecError, match="give at least two, each once"):
            estimated(Wanted("ill", classes=classes))
    with pytest.raises(DataError, match="declare its classes"):
        estimated(Wanted("visit", task="classification"))
    with pytest.raises(DataError, match="no column besides"):
        estimated(Wanted("ill"), frames=[clinic()[["patient_id", "ill"]]])
    empty = pd.DataFrame({"age": [""] * 50, "ill": ["yes", "no"] * 25})
    with pytest.raises(DataError, match="no column of 'clinics' can be a feature at this ε"):
        estimated(Wanted("ill", classes=("yes", "no")), frames=[empty])
    file = tmp_path / "north.csv"
    empty.to_csv(file, index=False)
    with pytest.raises(DataError, match=r"'north\.csv' is given twice"):
        private_schema([file, file], Wanted("ill"), epsilon=1.0, ledger=tmp_path / "l.sqlite")
    assert not Ledger(tmp_path / "l.sqlite").datasets()


def test_columns_are_of_the_expected_kinds():
    kinds = {column.name: type(column) for column in estimated(seed=3).schema.columns}
    assert kinds == {"age": Numeric, "year": Numeric, "grade": Categorical, "dose": Numeric}


def counted_by_class(counts, std):
    estimates = object.__new__(_Estimates)
    estimates._std, estimates._cells = std, {"ill": counts}
    estimates._label = SimpleNamespace(classes=("no", "yes"), wanted=SimpleNamespace(label="ill"))
    return estimates


@pytest.mark.parametrize(("std", "told"), [(570.0, True), (2000.0, False)])
def test_a_copy_of_the_label_is_told_from_counts_whose_noise_allows_it(std, told):
    """Of 200,000 records 8% are ill, as in benchmarks/messy.py, where 60 columns make the deviation 570."""
    counts = np.array([[184_000, 0, 0], [0, 16_000, 0], [0, 0, 0]])
    estimates = counted_by_class(counts, std)
    assert estimates._copies_label(counts) is told
    helpful = np.array([[150_000, 34_000, 0], [4_000, 12_000, 0], [0, 0, 0]])
    assert not estimates._copies_label(helpful)


def test_without_noise_a_copy_of_the_label_is_told_from_few_records():
    """Of ten errors of a constant a copy leaves fewer than one: none."""
    counts = np.array([[10, 0, 0], [0, 10, 0], [0, 0, 0]])
    estimates = counted_by_class(counts, 0.0)
    assert estimates._copies_label(counts)
    assert not estimates._copies_label(np.array([[10, 0, 0], [1, 9, 0], [0, 0, 0]]))


def test_a_copy_of_the_label_is_seen_although_some_labels_are_of_no_class():
    estimates = object.__new__(_Estimates)
    estimates._label = SimpleNamespace(wanted=SimpleNamespace(label="outcome"), classes=("no", "yes"))
    estimates._std = 1.0
    estimates._cells = {"outcome": np.array([[700.0, 0.0, 0.0], [0.0, 300.0, 0.0], [0.0, 0.0, 200.0]])}
    copied = np.array([[700.0, 0.0], [0.0, 300.0], [100.0, 100.0]])  # the last row: labels of no class
    unrelated = np.array([[350.0, 350.0], [150.0, 150.0], [100.0, 100.0]])
    assert estimates._copies_label(copied)
    assert not estimates._copies_label(unrelated)


@pytest.mark.parametrize(("outer", "reach"), [(10.0, 1.7), (1.5, 1.5)])
def test_bounds_leave_room_for_tails_that_the_noise_hides_but_not_beyond_the_survey(outer, reach):
    estimates = object.__new__(_Estimates)
    estimates._names, estimates._sum_std = {}, 5.0
    estimates._ranges, estimates._outer = {"x": (-10.0, 10.0)}, {"x": (-outer, outer)}
    counts = np.where(np.abs(np.linspace(-9.75, 9.75, 40)) < 1, 1000.0, 0.0)  # even over -1 to 1: std 0.58
    estimates._cells = {"x": counts[None]}
    low, high = estimates.column("x").bounds
    assert -reach - 0.1 <= low <= -reach
    assert reach <= high <= reach + 0.1


def test_a_column_without_a_cell_above_the_noise_keeps_the_range_of_the_survey():
    estimates = object.__new__(_Estimates)
    estimates._names, estimates._sum_std = {}, 50.0
    estimates._ranges, estimates._cells = {"x": (-10.0, 10.0)}, {"x": np.zeros((1, 40))}
    low, high = estimates.column("x").bounds
    assert low <= -10 < 10 <= high


def test_a_column_with_too_many_values_or_that_is_not_there_is_named():
    estimates = object.__new__(_Estimates)
    estimates._names, estimates._sum_std = {"city": ("a", "b")}, 1.0
    estimates._cells = {"city": np.array([[200.0, 100.0, 700.0]])}  # the last: none of the listed
    assert "too many different values" in estimates.why_no_feature("city")
    for wanted, said in ((Wanted("ill"), "label column 'ill'"), (Wanted("age", drop=("ill",)), "^column 'ill'")):
        with pytest.raises(DataError, match=said):
            wanted.features(["age", "sex"])


def test_classes_are_listed_by_number_and_words_after_them():
    found = _Label(Wanted("ill"), ("low", "10", "high", "2", "-1"), None)
    assert found.classes == ("-1", "2", "10", "high", "low")
    declared = _Label(Wanted("ill", classes=("yes", "no")), (), None)
    assert declared.classes == ("yes", "no")  # in the order of the owner


def test_the_bounds_of_a_label_are_those_of_its_own_numbers():
    """Also where there are features of numbers, in other parts of their ranges, and where there are none."""
    label = np.repeat([-90.0, -40.0], 1000)
    features = {"level": np.repeat([60.0, 61.0], 1000), "kind": np.tile(["a", "b"], 1000)}
    for dropped in ((), ("level",)):
        frame = pd.DataFrame({**features, "outcome": label})
        wanted = Wanted("outcome", task="regression", drop=dropped)
        schema, _ = estimated(wanted, epsilon=50.0, frames=[frame])
        low, high = schema.label.bounds
        assert -110 < low <= -90
        assert -40 <= high < -20


def counted(cells, std=1.0, names=()):
    """Estimates that have counted a column "level" by the three classes of a label."""
    estimates = object.__new__(_Estimates)
    estimates._label = _Label(Wanted("ill"), ("a", "b"), None)
    estimates._names = dict.fromkeys(names, ("x", "y", "z"))
    estimates._cells = {"level": np.array([cells, [0] * len(cells), [0] * len(cells)])}
    estimates._cells["ill"] = np.diag([500, 400, 0])
    estimates._std = estimates._sum_std = std
    return estimates


@pytest.mark.parametrize(
    ("cells", "constant"),
    [
        ([396, 3, 3, 3], True),  # 396 > 0.99 · 405 - 5: the noise of four cells is 2.5 · 2
        ([385, 3, 3, 3], False),
        ([98, 1, 1, 1], True),  # 5 < 5% of 101
        ([97, 1, 1, 1], False),
        ([396, 5, 3, 3], False),  # two cells stand out, above 4.05
    ],
)
def test_a_constant_is_told_where_the_noise_allows_it(cells, constant):
    assert ("same value" in counted(cells).why_no_feature("level")) is constant


@pytest.mark.parametrize(("cells", "too_many"), [([100, 150, 0, 251], True), ([100, 151, 0, 251], False)])
def test_categories_must_cover_half_of_the_values(cells, too_many):
    said = counted(cells, names=("level",)).why_no_feature("level")
    assert ("too many different values" in said) is too_many
    assert "too many" not in counted(cells).why_no_feature("level")  # of numbers there is no such thing


@pytest.mark.parametrize(
    ("diagonal", "classes", "task", "found"),
    [
        ([500, 400], 2, "auto", "classes"),
        ([500, 399], 2, "auto", "bounds"),  # not nine of ten of 1,000 records
        ([500, 400], 2, "regression", "bounds"),
        ([15] * 64, 64, "auto", "classes"),
        ([15] * 65, 65, "auto", "bounds"),
    ],
)
def test_a_label_is_a_number_where_its_classes_do_not_cover_it(diagonal, classes, task, found):
    estimates = object.__new__(_Estimates)
    names = tuple(map(str, range(classes)))
    estimates._label, estimates._records = _Label(Wanted("ill", task=task), names, (0.0, 64.0)), 1000
    estimates._cells = {"ill": np.diag([*diagonal, 0])}
    estimates._label_cells, estimates._sum_std = np.array([0, *[100] * 8, *[0] * 55]), 1.0
    label = estimates.label()
    assert label.classes == (names if found == "classes" else ())
    if found == "bounds":  # bins 1 to 8, and a tenth of their width more
        assert label.bounds == pytest.approx((0.2, 9.8), abs=0.3)


def test_one_class_is_no_label():
    estimates = counted([1, 1])
    estimates._records, estimates._label = 900, _Label(Wanted("ill"), ("a",), None)
    with pytest.raises(DataError, match="has 1 class that enough records share"):
        estimates.label()


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        ({"no": 600, "yes": 400}, ("no", "yes")),
        ({"no": 600, "yes": 6}, ()),  # names stand out above 6.99
        ({"no": 600, "yes": 7}, ("no", "yes")),
        ({"no": 600, "yes": 370, None: 28}, ("no", "yes")),  # two of a hundred may be something else, and noise
        ({"no": 600, "yes": 370, None: 32}, ()),
        ({"no": 600, "Yes": 400}, ()),
    ],
)
def test_a_usual_pair_is_found_where_both_names_stand_out_and_little_else(cells, found):
    names = private_schema_module._usual_question("ill").categories[0]
    counts = np.array([[cells.get(name, 0) for name in (*names, None)]])
    counter = SimpleNamespace(total=lambda question: ([counts], 2.0))
    assert private_schema_module._usual_classes(counter, "ill") == found
