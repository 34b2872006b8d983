"""What the page computes of a run is what the accountant says of it."""

import pytest

from dither.web import analysis
from dither.web.run_page import PageRefusal
from tests.web.folders import make_run

VALUES = {
    "data.name": "breast-cancer",
    "data.encoding": "minmax",
    "num_clients": 6,
    "cohort_size": 3,
    "batch_size": 5,
    "local_steps": 2,
    "sampling_rate": 0.05,
    "privacy.epsilon": 4.0,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return (make_run(tmp_path_factory.mktemp("runs"), rounds=8, values=VALUES) / "spec.toml").read_text()


@pytest.fixture(scope="module")
def experiment(text):
    return analysis.assemble(analysis.safe_spec(text, "run"))


@pytest.fixture(scope="module")
def found(experiment):
    return analysis.analysis(experiment, [2, 4, 6, 8])


def test_epsilon_by_round_grows_to_that_of_the_run(experiment, found):
    values = found["epsilon"]["values"]
    assert values == sorted(values)
    assert values[1] == experiment.proven_epsilon(4)
    table = [
        row for row in experiment.accountant().table() if row.view == "upload" and row.adjacency == "zero-out"
    ]
    assert values[-1] == pytest.approx(table[0].value)


def test_each_client_has_its_own_epsilon_and_the_largest_is_the_run(experiment, found):
    clients = found["clients"]
    assert max(clients["epsilon"]) == pytest.approx(found["epsilon"]["values"][-1], rel=1e-6)
    assert sum(clients["participations"]) == 8 * 3
    by_count = dict(zip(clients["participations"], clients["epsilon"], strict=True))
    assert [by_count[count] for count in sorted(by_count)] == sorted(by_count.values())


def test_the_map_is_who_took_part(experiment, found):
    grid = found["cohorts"]["took_part"]
    assert [sum(row) for row in grid] == found["clients"]["participations"]
    assert {client for client in range(6) if grid[client][0]} == set(experiment.cohorts[0].tolist())


def test_the_noise_is_what_the_method_releases(experiment, found):
    uplink = found["noise"]["uplink"]
    assert len(set(uplink["std"])) == 1
    assert uplink["multiplier"][0] == pytest.approx(uplink["std"][0] / uplink["sensitivity"][0])


def test_a_run_that_was_cut_short_is_judged_by_what_it_made(experiment):
    assert analysis.analysis(experiment, [2, 4])["epsilon"]["rounds"] == [2, 4]
    with pytest.raises(PageRefusal, match="no round"):
        analysis.analysis(experiment, [])


def test_what_is_not_on_this_machine_is_not_fetched(text, tmp_path, monkeypatch):
    def fetch(*_):
        raise AssertionError("the page asked another host")

    monkeypatch.setattr("dither.data.downloads._fetch", fetch)
    monkeypatch.setattr("dither.data.downloads.cache_folder", lambda: tmp_path)
    monkeypatch.delenv("DITHER_DATA", raising=False)
    spec = analysis.safe_spec(text.replace('name = "breast-cancer"', 'name = "adult"'), "run")
    with pytest.raises(PageRefusal, match="dither data get adult"):
        analysis.assemble(spec)


@pytest.mark.parametrize("text", ["method = [1]", "method = {}", "", "method = ", "a = " + "[" * 100_000])
def test_a_spec_that_is_none_is_refused_and_not_an_error_of_the_server(text):
    with pytest.raises(PageRefusal):
        analysis.safe_spec(text, "run")


@pytest.mark.slow
def test_the_bound_at_the_run_own_noise(experiment):
    bound = analysis.bound(experiment)
    assert bound["rounds"][-1] == 8
    total = [sum(term[i] for term in bound["terms"].values()) for i in range(len(bound["rounds"]))]
    assert bound["total"] == pytest.approx(total)
    assert bound["vacuous"] == (min(total) >= bound["initial_gap"])
