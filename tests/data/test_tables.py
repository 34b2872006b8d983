"""CSV files in the dialects that institutions write, read as the same table."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from dither import data
from dither.data.schema import canonical, factorize, number_column
from dither.data.tables import table_files
from dither.errors import DataError

TABLE = pd.DataFrame(
    {
        "name": ["Zoë", "José; jr", "x, y", 'the "old"'],
        "weight": [70.5, 1234.25, None, 60.0],
        "outcome": ["yes", "no", "yes", "no"],
    }
)


def read(path: Path) -> tuple[list[str], list[float], list[str]]:
    frame = data.read_table(path)
    assert list(frame.columns) == ["name", "weight", "outcome"]
    weights = number_column(frame["weight"], "weight")
    return frame["name"].tolist(), weights.tolist(), frame["outcome"].tolist()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252", "utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("options", [{"sep": ","}, {"sep": ";", "decimal": ","}, {"sep": "\t"}, {"sep": "|"}])
def test_every_dialect_gives_the_same_table(tmp_path: Path, encoding: str, options: dict) -> None:
    path = tmp_path / "table.csv"
    TABLE.to_csv(path, index=False, encoding=encoding, lineterminator="\r\n", **options)
    names, weights, outcomes = read(path)
    assert names == TABLE["name"].tolist()
    assert weights[:2] + weights[3:] == [70.5, 1234.25, 60.0]
    assert weights[2] != weights[2]
    assert outcomes == TABLE["outcome"].tolist()


def test_the_records_do_not_decide_how_a_file_is_read(tmp_path: Path) -> None:
    """One record with semicolons and a byte that is not UTF-8 leaves the cells of the others as they were."""
    path = tmp_path / "table.csv"
    path.write_bytes("name,weight,outcome\nZoë,1,yes\nMax,2,no\n".encode())
    before = data.read_table(path)
    path.write_bytes("name,weight,outcome\nZoë,1,yes\n".encode() + b"a;b;c;d;\xeb\xff,2,no\n")
    after = data.read_table(path)
    pd.testing.assert_frame_equal(before.iloc[:1], after.iloc[:1])
    assert after["name"][1] == "a;b;c;d;ëÿ"


OTHERS = ['1, x,"2, 3"', ' 01,"the ""old""", "q, r"', ',  ,5" disk', '" y",02,"two\nlines"']


@pytest.mark.parametrize(
    "record", ["x,y,z", "short", '1, "quoted",2', '"a, ""b""", "c",d', "7,;;;;;;;;;;;,||", "a,,"]
)
@pytest.mark.parametrize(("header", "end"), [("a,b,c", "\n"), (",b,c", "\r\n"), ('a, "b", c', "\r")])
def test_no_record_changes_how_another_one_is_read(tmp_path: Path, record: str, header: str, end: str) -> None:
    """A cell too few, a quote after a space, delimiters of other dialects, a column without a name (whose type no
    reader may guess), line ends of any kind: the other cells stay as they were."""
    path = tmp_path / "table.csv"
    path.write_text(end.join([header, *OTHERS, record, ""]), newline="")
    cells = [[canonical(cell) for cell in row] for row in data.read_table(path).to_numpy()]
    assert cells[:-1] == [
        ["1", "x", "2, 3"],
        ["01", 'the "old"', "q, r"],
        ["", "", '5" disk'],
        ["y", "02", "two\nlines"],
    ]


@pytest.mark.parametrize("record", ["03,1", "x,1"])
def test_no_reader_guesses_what_a_column_without_a_name_holds(tmp_path: Path, record: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f",label\n01,0\n02,1\n{record}\n")
    assert data.read_table(path)[""].tolist()[:2] == ["01", "02"]


def test_a_quote_that_is_never_closed_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text('name,weight\na,1\nb,"2\nc,3\n')
    with pytest.raises(DataError, match="never closed"):
        data.read_table(path)
    path.write_text("name,name,weight\na,1,2\nb\n")
    with pytest.raises(DataError, match="two columns called 'name'"):
        data.read_table(path)


def test_a_parquet_cell_is_read_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    first = []
    for last in (0.0, -0.0, None):
        big = [2**53 + 1, 7, None if last is None else 1]
        pd.DataFrame({"sign": [last, 0.0, 1.0], "whole": big}).to_parquet(path)
        frame = data.read_table(path)
        texts = [factorize(frame[name]) for name in frame]
        first.append([[names[code] for code in codes[1:]] for codes, names in texts])
        assert texts[1][1][texts[1][0][0]] == "9007199254740992"
    assert first[0] == first[1] == [["0", "1"], ["7", "1"]]
    assert first[2][0] == first[0][0]
    pd.DataFrame({"scans": [[1], [2, 3]], "label": [0, 1]}).to_parquet(path)
    with pytest.raises(DataError, match=r"column 'scans' holds list.*make columns of its parts"):
        data.read_table(path)


def test_numbers_with_thousands_and_excels_first_line(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("sep=;\nname;weight;outcome\na;1.234.567,5;yes\nb;-3,25;no\nc;1.5;no\n")
    assert read(path)[1] == [1234567.5, -3.25, 1.5]


def test_words_for_a_missing_number_are_categories_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("age,rhesus,label\n-,-,a\n30,+,b\nunknown,-,a\nn/a,n/a,b\n")
    draft = data.draft(path, "label").schema
    rhesus = next(column for column in draft.columns if column.name == "rhesus")
    assert isinstance(rhesus, data.Categorical)
    assert rhesus.categories == ("+", "-")
    assert pd.Series(number_column(data.read_table(path)["age"], "age")).isna().tolist() == [
        True,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PK\x03\x04rest", ["Excel", "save the table as CSV"]),
        (b"\x1f\x8brest", ["gzip"]),
        (b"\xff\xfea", ["utf-16", "save it as CSV (UTF-8)"]),
    ],
)
def test_other_files_are_named(tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        data.read_table(path)
    for word in words:
        assert word in str(caught.value)


def test_files_of_a_folder_a_pattern_and_a_list(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv", "c.parquet", "notes.txt"):
        (tmp_path / name).write_text("x")
    assert [file.name for file in table_files(tmp_path)] == ["a.csv", "b.csv", "c.parquet"]
    assert [file.name for file in table_files(str(tmp_path / "*.csv"))] == ["a.csv", "b.csv"]
    assert [file.name for file in table_files([tmp_path / "b.csv", tmp_path / "a.csv"])] == ["b.csv", "a.csv"]
    assert table_files(tmp_path / "a.csv") == []
    with pytest.raises(DataError, match="no file matches"):
        table_files(str(tmp_path / "*.tsv"))
    with pytest.raises(DataError, match=r"'notes\.txt' is not a table"):
        table_files([tmp_path / "notes.txt"])
