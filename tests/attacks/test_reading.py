"""One record that changes how the others are read: then the ε of one record says nothing."""

import warnings

import pandas as pd
import pytest

from dither.data.schema import factorize
from dither.data.tables import read_table
from dither.errors import DataError
from dither.experiment.counting import Columns, Institution, Question


def test_equal_values_of_other_kinds_do_not_spell_each_other():
    """To pandas True == 1 == 1.0: the first of them would name them all."""
    others = [1, 1.0, "1", 1]
    for record in (True, None, 1.0, "1.0", 0):
        codes, texts = factorize(pd.Series([record, *others], dtype=object))
        assert [texts[code] for code in codes[1:]] == ["1"] * 4


@pytest.mark.parametrize("record", ["1,2,3,4", "1,2,3,", "1,2,3", "1,2"])
def test_a_long_row_is_an_error_wherever_it_stands(tmp_path, record):
    """pandas would let the first row say how long the others may be, and cut their cells off."""
    path = tmp_path / "table.csv"
    for rows in ([record, "5,6,7,8"], ["5,6,7,8", record], [record, "5,6,7", "5,6,7,8"]):
        path.write_text("\n".join(["a,b,c", *rows, ""]))
        with pytest.raises(DataError, match="has more cells than the header"):
            read_table(path)
    for rows in ([record, "5,6,7,"], ["5,6,7,", record]):  # a delimiter may end a row
        path.write_text("\n".join(["a,b,c", *rows, ""]))
        if record == "1,2,3,4":
            with pytest.raises(DataError, match="has more cells"):
                read_table(path)
        else:
            assert ["5", "6", "7"] in read_table(path).to_numpy().tolist()


def test_no_warning_tells_of_a_huge_number():
    question = Question("histogram", ("a",), 1.0, ((0.0, 0.5),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Institution(Columns(pd.DataFrame({"a": [0.1, 1.7e308]})), 1.0, 0.0).answer(question)
