"""Tests of `dither.account` and of how results show themselves."""

import pytest

import dither
from dither.experiment.report import Overview

VALUES = {
    "num_rounds": 4,
    "num_clients": 4,
    "cohort_size": 4,
    "data.name": "breast-cancer",
    "data.features": "all",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return dither.run("cpfed", values=VALUES, out=tmp_path_factory.mktemp("account") / "run")


def test_account_takes_what_run_takes(tmp_path, finished):
    spec = dither.Spec.from_any("cpfed").with_values(VALUES)
    (tmp_path / "spec.toml").write_text(spec.to_toml())
    expected = dither.account("cpfed", values=VALUES)
    assert dither.account(spec) == expected
    assert dither.account(tmp_path / "spec.toml") == expected
    assert dither.account(spec.to_dict()) == expected
    assert dither.account(finished.folder).epsilon == finished.epsilon
    assert expected.epsilon.proven().value == pytest.approx(finished.epsilon.proven().value, rel=1e-9)


def test_every_bound_is_listed_when_asked_for(finished):
    assert not dither.account(finished.folder).tried
    report = dither.account(finished.folder, every_recipe=True, ex_ante=True)
    assert len(report.tried) > len(report.epsilon.table)
    assert report.ex_ante


def test_results_fit_a_screen(finished):
    results = [finished, dither.account(finished.folder), dither.sweep("cpfed", {"seed": [0, 1]}, values=VALUES)]
    for result in results:
        assert isinstance(result, Overview)
        lines = repr(result).splitlines()
        assert 2 <= len(lines) <= 24
        assert max(map(len, lines)) <= 100
        assert "proven" in repr(result)
        assert result._repr_html_().startswith("<table>")


def test_every_public_name_can_be_had():
    for name in dither.__all__:
        assert getattr(dither, name) is not None
