"""All 27 figures, without training: what they ask for is valid, and their criteria and panels read any numbers."""

import hashlib
from collections.abc import Mapping

import numpy as np
import pytest

from dither.errors import SpecError
from dither.reproduction import drawing, nbafl, report, running
from dither.reproduction import figure as figures
from dither.reproduction.figure import FinishedRun
from dither.reproduction.judging import FAILS, HOLDS, INCONCLUSIVE, NOT_JUDGED, JudgedCriterion, Verdict

STATUSES = (HOLDS, FAILS, INCONCLUSIVE, NOT_JUDGED)
METRICS = ("test_accuracy", "train_loss", "loss", "gradient_sq")


class Invented(Mapping):
    """A run for every key, with numbers made from the key."""

    def __getitem__(self, key):
        rng = np.random.default_rng(int(hashlib.sha256(key.encode()).hexdigest()[:8], 16))
        columns = {name: rng.random(4).tolist() for name in METRICS}
        claim = {"value": 1.0, "unit": "run"}
        return FinishedRun(
            {"round": [0, 1, 2, 3], **columns}, claim, 1.0, "cpu: none", {"dither": "0", "jax": "0"}
        )

    def __contains__(self, key):
        return True

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0


class Answers:
    """An accountant that has always the same answer."""

    def proven_epsilon(self, spec, unit="run"):
        return 1.0

    def proven_stop(self, spec, budget):
        return 3

    def estimated(self, name, spec, estimate):
        values = {"smoothness": 11.0, "lipschitz": 1.1, "pl_constant": 0.05, "dissimilarity": 3.6}
        return {**values, "initial_gap": 2.3, "rounds": [0, 5], "loss": [2.3, 1.0], "num_params": 10}


def test_all_27_figures_and_39_criteria():
    found = {criterion.id for figure in figures.select("all") for criterion in figure.criteria}
    wanted = {f"SF-A{i}" for i in range(1, 9)} | {f"NB-A{i}" for i in range(1, 11)}
    wanted |= {f"SC-A{i}" for i in range(1, 6)} | {f"{p}-A{i}" for p in ("CP", "CD") for i in range(1, 9)}
    assert len(figures.names()) == 27
    assert len(wanted) == 39
    assert found == wanted


@pytest.mark.parametrize("scale", ["smoke", "quick", "full"])
@pytest.mark.parametrize("name", figures.names())
def test_claims_and_panels(name, scale):
    figure = figures.load(name)
    views = figure.views(scale, Invented(), Answers())
    for view in views:
        for panel in figure.panels(view):
            for line in panel.lines:
                series = drawing.series(view, panel, line)
                assert series.values.shape == (max(1, len(series.seeds)), len(series.x))
        for criterion in figure.criteria:
            if criterion.proven or not view.proven:
                verdict = criterion.verdict(view)
                assert verdict.status in STATUSES, verdict
                assert verdict.text
    if scale == "full":
        assert views[0].reductions() == []
        assert figure.id == "dp-scaffold/fig3" or figure.scales["full"].seeds == 5
        assert figure.proven is not None or figure.proven_note, "say why there is no proven panel"


@pytest.mark.parametrize("scale", ["quick", "full"])
def test_quick_and_full_are_about_the_papers_data(scale):
    used = {figure.views(scale)[0].base.data.name for figure in figures.select("all")}
    assert used == {"adult", "mnist", "emnist-bymerge"}


def test_the_smallest_scale_needs_no_download():
    points = running.points(figures.select("all"), "smoke")
    assert points
    assert {point.spec.data.name for point in points} == {"digits", "breast-cancer"}


def test_no_noise_is_the_same_run_in_both_views():
    printed, proven = figures.load("secure-fedavg/fig1").views("full")  # Dither deploys what is printed
    free = {"privacy.epsilon": float("inf")}
    assert printed.spec(free, 0) == proven.spec(free, 0)
    assert printed.spec({"privacy.epsilon": 0.5}, 0) != proven.spec({"privacy.epsilon": 0.5}, 0)
    assert proven.spec({"privacy.epsilon": 0.5}, 0).privacy.noise == "proven"


def test_select_knows_papers_and_figures_and_refuses_others():
    assert [figure.id for figure in figures.select("dp-scaffold")] == ["dp-scaffold/fig3", "dp-scaffold/fig4"]
    twice = figures.select(["nbafl/fig9", "nbafl/fig2", "nbafl/fig9"])
    assert [figure.id for figure in twice] == ["nbafl/fig2", "nbafl/fig9"]
    with pytest.raises(SpecError, match="nbafl/fig2"):
        figures.select("nbafl/fig22")


def test_printed_numbers_of_dp_scaffold():
    figure = figures.load("dp-scaffold/fig3")
    rows = figure.tables(figure.views("smoke")[0])[0].rows
    computed = [row["computed"] for row in rows]
    assert computed[0] == "11.51472"  # printed 11.5147
    assert computed[2] == "7.67672"  # printed 7.6769
    assert computed[6:10] == ["493", "496", "438", "441"]  # printed 497 and 428


def test_formulas_of_dp_scaffold_do_not_depend_on_the_scale():
    figure = figures.load("dp-scaffold/fig3")
    verdicts = {criterion.id: criterion.judge(figure.views("smoke")[0]) for criterion in figure.criteria}
    assert verdicts["SC-A3"].status == HOLDS
    assert "from R = 203 on" in verdicts["SC-A3"].text
    assert verdicts["SC-A4"].status == HOLDS


def test_disagreements_are_between_decided_claims_only():
    def claim(status, proven=None):
        printed, other = Verdict(status, ""), Verdict(proven, "") if proven else None
        return JudgedCriterion("X", "", "", (), "", printed, proven=other)

    assert report.disagreements([claim(HOLDS)], [claim(FAILS)]) == ["X, printed: holds here, fails there"]
    assert report.disagreements([claim(HOLDS)], [claim(INCONCLUSIVE)]) == []
    assert report.disagreements([claim(HOLDS, FAILS)], [claim(HOLDS, HOLDS)]) == [
        "X, proven: fails here, holds there"
    ]


def test_a_figure_counts_the_seeds_that_an_undecided_criterion_was_given(tmp_path):
    figure = figures.load("secure-fedavg/fig2")
    printed = figure.views("full", Invented(), Answers())[:1]
    judged = running._judged_figure(figure, printed, {}, {})
    most = max(row["seeds"] for claim in judged.claims for row in claim.printed.numbers)
    assert most > judged.seeds == 5
    assert judged.runs > len(printed[0].needed())
    assert f"<dd>5; up to {most} where a criterion was undecided</dd>" in report._figure(judged, tmp_path)


@pytest.mark.parametrize(("status", "shown"), [(FAILS, True), (NOT_JUDGED, False)])
def test_what_is_not_judged_is_not_explained(status, shown):
    claim = JudgedCriterion("X", "", "", (), "the reason", Verdict(status, ""))
    assert ("the reason" in report._claim(claim)) == shown


def test_tables_that_a_phone_has_no_room_for_are_stacked():
    number = {"setting": "K = 10", "mean": 0.70123456, "standard error": 0.01234, "seeds": 5}
    narrow, wide = report._rows([report._number(number)]), report._rows([{"the paper": "long " * 20, "here": ""}])
    assert '<td data-label="mean ± standard error">0.70123 ± 0.012</td>' in narrow
    assert 'class="stack"' in wide
    assert 'class="stack"' not in narrow
    assert report._number({**number, "seeds": 0})["mean ± standard error"] == "0.70123"  # a formula


# What the papers leave open


@pytest.mark.parametrize("name", figures.names())
def test_open_settings(name):
    """Each is explained, and each alternative is a valid spec that changes runs of the figure."""
    figure = figures.load(name)
    assert figure.open
    reference = figures.View(figure, "robust", {}, Answers())
    shown = [values for _, values in reference.settings()]
    tuned = figure.options.get("tuned")  # a change takes the place of tuning
    for setting in figure.open:
        assert all((setting.title, setting.paper, setting.reference, setting.why, setting.alternatives))
    for change in figure.changes():
        changed = figures.View(figure, "robust", {}, Answers(), changed=change.values)
        differs = any(changed.spec(values, 0) != reference.spec(values, 0) for values in shown)
        assert changed.formula or differs or tuned in change.values, f"{change.label} changes nothing"


def test_changes_are_single_or_pairs_that_interact():
    figure = figures.load("dp-scaffold/fig4")
    settings = [change.settings for change in figure.changes()]
    assert settings.count(("rate",)) == 3
    assert settings.count(("rate", "clip")) == 3 * 2
    factor = next(change for change in figure.changes() if change.label == "rate: one for all, × 3")
    tripled = figures.View(figure, "quick", {}, None, changed=factor.values)
    assert tripled.base.client_lr == pytest.approx(3 * figure.views("quick")[0].base.client_lr)


def test_literal_and_deployed():
    printed, deployed, proven = figures.load("cpfed/fig6").views("full")
    assert (printed.base.privacy.clip, deployed.base.privacy.clip) == ("none", "example")
    assert proven.base == deployed.base
    printed, deployed, _ = figures.load("concentrated/fig5").views("full")
    assert printed.base.method_options["exact_epochs"]
    assert printed.base.privacy.clip == "example"
    assert not deployed.base.method_options.get("exact_epochs")


def test_settings_that_a_paper_gives_and_formulas_without_any_are_no_open_settings():
    figure = figures.load("dp-scaffold/fig4")
    assert {change.settings for change in figure.changes() if change.beyond} == {("regime",)}
    assert [criterion.id for criterion in running.judged_criteria(figure)] == ["SC-A2"]
    view = figures.View(figure, "robust", Invented(), Answers())
    rows = [running.changed_row(figure.criteria[1], change, view) for change in figure.changes()]
    assert [row["setting"] for row in rows if row.get("beyond")] == [
        "regime: medium privacy",
        "regime: low privacy",
    ]


@pytest.mark.parametrize(("least", "status"), [(2, FAILS), (30, HOLDS), (150, FAILS)])
def test_experiment_and_bound_have_one_range(least, status, monkeypatch):
    """NbAFL Fig. 8: a bound that is least outside the range of the experiment has another shape."""
    view = figures.load("nbafl/fig8").views("full", Invented(), Answers())[0]
    rounds = np.arange(1, 201)
    monkeypatch.setattr(nbafl, "bound", lambda *_: (rounds, np.abs(rounds - least)))
    *_, bound = nbafl.same_shape(view)
    assert bound.status == status


# Noise-free twins


def test_settings_that_differ_in_noise_have_one_twin():
    view = figures.load("cpfed/fig4").views("full")[0].twin()
    levels = [{"privacy.noise": "given", "privacy.noise_std": std} for std in (1e-5, 1e-3)]
    assert view.spec(levels[0], 0) == view.spec(levels[1], 0)
    schemes = [{"privacy.noise_schedule": kind, "privacy.noise_decay": 0.99} for kind in ("rounds", "steps")]
    view = figures.load("dp-scaffold/fig4").views("full")[0].twin()
    assert view.spec(schemes[0], 0) == view.spec(schemes[1], 0)


@pytest.mark.parametrize(("noiseless", "status"), [(HOLDS, FAILS), (FAILS, HOLDS), (INCONCLUSIVE, HOLDS)])
def test_a_finding_about_noise_must_vanish_without_noise(noiseless, status):
    view = figures.load("cpfed/fig4").views("quick")[0]

    def judge(view):
        return Verdict(noiseless if view.noiseless else HOLDS, "text")

    assert figures.Criterion("X", "", judge, control=True).verdict(view).status == status
    assert figures.Criterion("X", "", judge).verdict(view).status == HOLDS


def test_statements_about_noise_have_a_control():
    controlled = {c.id for figure in figures.select("all") for c in figure.criteria if c.control}
    assert controlled >= {"CP-A3", "CD-A3", "NB-A4", "NB-A6", "NB-A9", "NB-A10", "SC-A2", "SF-A7"}


# Fair rivals


class Scored(Invented):
    """Runs on validation records, of which those at one rate do best."""

    def __init__(self, specs, rate):
        self.best = {key for key, spec in specs.items() if spec.client_lr == rate}

    def __getitem__(self, key):
        run = super().__getitem__(key)
        return run._replace(metrics={**run.metrics, "test_accuracy": [0.0, float(key in self.best)]})


def test_method_and_rivals_are_tuned_alike_on_validation_records():
    figure = figures.load("cpfed/fig6")
    view = figure.views("full")[0]
    tuning = view.needed()
    assert {spec.data.split for spec in tuning.values()} == {"validation"}
    methods = [(spec.method, str(spec.method_options), spec.client_lr, spec.seed) for spec in tuning.values()]
    rates = view.grid("client_lr")
    assert len(methods) == len(set(methods)) == 3 * len(rates) * figures.TUNING_SEEDS
    for rate in rates[:2]:
        tuned = figures.View(figure, "full", Scored(tuning, rate), None)
        shown = [spec for spec in tuned.needed().values() if spec.data.split == "per-client"]
        assert {spec.client_lr for spec in shown} == {rate}
    fixed = figures.View(figure, "full", {}, None, changed={"client_lr": 0.1})
    assert {spec.client_lr for spec in fixed.needed().values()} == {0.1}


def test_each_scheme_of_noise_has_the_rate_that_is_best_where_it_stops():
    figure = figures.load("dp-scaffold/fig4")
    view = figures.View(figure, "robust", {}, Answers())
    (judge,) = [criterion for criterion in figure.criteria if criterion.id == "SC-A2"]
    tuning = view.needs(judge.judge)
    assert {spec.data.split for spec in tuning.values()} == {"validation"}
    rounds = {spec.privacy.noise_schedule: spec.num_rounds for spec in tuning.values()}
    assert (rounds["constant"], rounds["rounds"], rounds["steps"]) == (150, 123, 109)
    assert len(tuning) == 3 * len(view.grid("client_lr")) * figure.options["tuning_seeds"]
    best = figures.View(figure, "robust", Scored(tuning, 0.01), Answers())
    judged = [spec for spec in best.needs(judge.judge).values() if spec.data.split != "validation"]
    assert {spec.client_lr for spec in judged} == {0.01}
    assert {spec.num_rounds for spec in judged} == {150}
    one_for_all = figures.View(figure, "robust", {}, Answers(), changed={"client_lr": "× 3"})
    (alike,) = {(spec.client_lr, spec.data.split) for spec in one_for_all.needs(judge.judge).values()}
    assert alike == (pytest.approx(0.06), "given")
    _, deployed, proven = figure.views("full", {}, Answers())  # the noise differs, the rates do not
    assert proven.needs(judge.judge).keys() == deployed.needs(judge.judge).keys()
