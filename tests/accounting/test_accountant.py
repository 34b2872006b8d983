"""From releases and cohorts to the table: the bound holds for every client, and calibration meets its target."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dither
from dither import accounting, models
from dither.accounting import accountant, views
from dither.errors import BudgetExhausted, NoProof, SpecError
from dither.experiment import build
from dither.methods import prepare
from dither.privacy.sampling import of_round
from dither.spec import METHODS, Spec
from dither.types import ExactNoise, Lattice, Release, RoundInfo, Sampling, Uses
from tests.conftest import make_plan


def planned(releases, sizes, cohorts, **changes):
    """An accountant for clients of those sizes, three of them in a sum."""
    values = {"cohort_size": 3, "delta": 1e-5, "noise_ratio": 1.0, "adjacency": "replace-one", **changes}
    plan = make_plan(np.asarray(sizes), cohorts=tuple(cohorts), **values)
    return accountant.Accountant(plan, releases)


CONVEX = {"convex": True, "smoothness": 1.0, "view": "sum"}


def decaying(info: RoundInfo) -> tuple[Release, ...]:
    """Less noise every round: who takes part late reveals more."""
    sampling = Sampling("fixed", 5 / info.size, "replace-one", 0.0, 5, info.size)
    return (Release("uplink", 4.0 * 0.9**info.index, 1.0, 2, sampling, "test"),)


def exact(releases, sizes, cohorts, client, delta=1e-5):
    rounds = [t for t, cohort in enumerate(cohorts) if client in cohort]
    own = accounting.compress(releases(RoundInfo(t, client, int(sizes[client]), 3)) for t in rounds)
    return accounting.proven(own, delta, view="upload", adjacency="replace-one").value


@given(seed=st.integers(0, 1000), num_sizes=st.integers(1, 3))
@settings(max_examples=8, deadline=None)
def test_the_bound_holds_for_every_single_client(seed, num_sizes):
    rng = np.random.default_rng(seed)
    sizes = rng.choice([50, 51, 80][:num_sizes], size=6)
    cohorts = [rng.choice(6, 3, replace=False) for _ in range(7)]
    bound = planned(decaying, sizes, cohorts).epsilon()
    each = [exact(decaying, sizes, cohorts, client) for client in range(6)]
    assert bound >= max(each) * (1 - 1e-6)
    assert bound <= max(each) * 1.5  # and it is not empty words


def test_every_recipe_is_listed_where_a_client_of_another_size_never_took_part():
    tried = planned(decaying, [60, 60, 60, 80], [np.arange(3)] * 2).tried()
    assert tried == planned(decaying, [60, 60, 60], [np.arange(3)] * 2).tried()
    assert len(tried) == 3 * (1 + 2 + 3 + 3)  # upload; and sum; and downlink, twice


def test_constant_noise_gives_the_exact_value_of_the_busiest_client():
    def constant(info):
        return decaying(info._replace(index=3))

    rng = np.random.default_rng(1)
    sizes = np.full(8, 60)
    cohorts = [rng.choice(8, 3, replace=False) for _ in range(12)]
    bound = planned(constant, sizes, cohorts).epsilon()
    assert bound == pytest.approx(max(exact(constant, sizes, cohorts, c) for c in range(8)), rel=1e-6)


def test_many_different_clients_are_bounded_jointly():
    sizes = np.arange(40, 80)
    cohorts = [np.arange(40) for _ in range(3)]
    jointly = planned(decaying, sizes, cohorts)
    assert len(jointly.clients) == 1
    assert jointly.epsilon() >= max(exact(decaying, sizes, cohorts, client) for client in (0, 20, 39))


# Learning rates (R6')


def fading(info: RoundInfo, decay=0.3) -> tuple[Release, ...]:
    """Three local steps of falling rates; the noise is the same in all rounds."""
    rates = tuple(1.0 / (1 + decay * (3 * info.index + step)) for step in range(3))
    return (Release("uplink", 4.0, 1.0, 3, Sampling("full", 1.0, "replace-one"), "test", rates),)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_joint_bound_charges_cut_batches_as_the_client_with_the_smallest_rate_does(steps):
    """Cut batches cost more δ the less often a record is drawn: one of these clients alone has no proof."""
    sizes, cohorts = np.append(np.arange(100, 130), 10_000), [np.arange(31)] * 25

    def cut(info: RoundInfo) -> tuple[Release, ...]:
        sampling = Sampling("poisson", 10 / info.size, "add/remove", 1e-9, 10, info.size)
        noise = 0.3 if info.size == 10_000 else 50.0
        return (Release("uplink", noise, 1.0, 1, of_round(sampling, steps) if steps > 1 else sampling, "test"),)

    (joint,) = accountant.classes(cut, sizes, cohorts)
    alone = accounting.compress(cut(RoundInfo(t, 30, 10_000, 31)) for t in range(25))
    for delta in (1e-5, 1e-3):
        bounds = [accounting.proven(of, delta, view="upload").value for of in (joint.most, alone)]
        assert bounds[0] >= bounds[1]
        assert math.isinf(bounds[0]) == (delta == 1e-5)


def test_rates_of_every_round_are_charged_where_all_take_part():
    everyone = [np.arange(3)] * 4
    value = planned(fading, np.full(3, 60), everyone, **CONVEX).epsilon()
    mus = [
        accounting.aggregated_round_mu(
            4.0, 3, rates=fading(RoundInfo(t, 0, 60, 3))[0].rates, others=2, smoothness=1.0, convex=True
        )
        for t in range(4)
    ]
    assert len(set(mus)) == 4
    assert value == pytest.approx(accounting.gaussian_epsilon(math.hypot(*mus), 1e-5), rel=1e-9)


def test_rates_that_differ_between_rounds_earn_no_credit_where_cohorts_differ():
    """Rates put rounds in no order of strength, so that no envelope over clients is known: what is left is the
    bound of those who see every upload, and it is no more work than with one rate."""
    cohorts = [np.array([0, 1, 2]), np.array([1, 2, 3]), np.array([0, 2, 3])]
    differing = planned(fading, np.full(4, 60), cohorts, **CONVEX)
    (group,) = differing.clients
    assert [count for _, count in group.most] == [3]
    uploads = differing.epsilon("upload")
    assert differing.epsilon("sum") == uploads
    steady = planned(lambda info: fading(info._replace(index=0)), np.full(4, 60), cohorts, **CONVEX)
    assert steady.epsilon("sum") < uploads  # one and the same course in all rounds is an order


def test_who_sees_every_upload_asks_one_question_whatever_the_rates():
    def question(decay, view):
        who = planned(lambda info: fading(info, decay), np.full(3, 60), [np.arange(3)] * 4, **CONVEX)
        return accountant.question_of([group.most for group in who.clients], who.conditions, view)

    assert question(0.1, "upload") == question(0.3, "upload")
    ((asked,), _) = question(0.3, "upload")
    assert [count for _, count in asked] == [4]
    assert question(0.1, "sum") != question(0.3, "sum")


def test_noise_of_clients_is_compared_step_by_step():
    def releases(stds):
        def of(info):
            whole = Sampling("full", 1.0, "replace-one")
            rate = (0.1 * (1 + info.client),) if info.size == 1 else (0.1,)
            return tuple(Release("uplink", std * (1 + info.client), 1.0, 1, whole, "", rate) for std in stds)

        return type("Algorithm", (), {"releases": staticmethod(of)})

    ones = np.ones(3)
    assert accountant.noise_ratio(releases([1.0, 0.1]), np.full(3, 60), ones) == pytest.approx(1 / 3)
    assert accountant.noise_ratio(releases([1.0]), np.full(3, 60), 1 / (1 + np.arange(3))) == pytest.approx(1)
    assert accountant.noise_ratio(releases([1.0]), np.full(3, 1), ones) == 0.0  # rates that differ: no credit


def spec_for(method, **values):
    base = {
        "method": method,
        "num_clients": 6,
        "cohort_size": 3,
        "num_rounds": 8,
        "local_steps": 1 if method in ("dp-sgd", "dp-dsgd") else 2,
        "batch_size": 8,
        "batch_sampling": "poisson",
        "sampling_rate": 0.1,
        "client_lr": 0.1,
        "data.name": "breast-cancer",
        "privacy.epsilon": 1.5,
        "privacy.delta": 1e-4,
        "privacy.noise": "proven",
        "privacy.adjacency": "zero-out",
    }
    return Spec().with_values({**base, **values})


PRIVATE = [name for name in METHODS if name not in ("fedavg", "fedprox", "scaffold")]


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize("method", PRIVATE)
def test_proven_noise_meets_its_target_for_every_method(method, adjacency):
    values = {"privacy.adjacency": adjacency}
    if method in ("secure-fedavg", "nbafl"):  # their sensitivities are stated for a replaced record
        values |= {"batch_sampling": "fixed", "sampling_rate": 0.0, "privacy.clip": "batch"}
    if method == "dp-fedavg":  # a trusted server: only what is broadcast is protected
        values |= {"privacy.view": "broadcast"}
    spec = spec_for(method, **values)
    experiment = build.build_experiment(spec)
    rows = experiment.accountant().table()
    (row,) = [
        r for r in rows if (r.view, r.adjacency) == (spec.privacy.view, spec.adjacency) and "message" not in r.unit
    ]
    assert row.value <= 1.5 * (1 + 1e-9)
    assert row.value >= 1.5 * (1 - 1e-3)
    louder = build.build_experiment(spec.with_values({"privacy.epsilon": 0.75}))
    for name in experiment.plan.noise_names:
        assert np.all(np.asarray(louder.prepared.hyper[name]) >= np.asarray(experiment.prepared.hyper[name]))


def test_a_target_per_message_is_met_per_message():
    values = {
        "privacy.adjacency": "replace-one",
        "batch_sampling": "fixed",
        "sampling_rate": 0.0,
        "privacy.clip": "batch",
    }
    experiment = build.build_experiment(spec_for("secure-fedavg", **values, **{"privacy.unit": "message"}))
    (row,) = [r for r in experiment.accountant().table() if r.unit == "message" and r.adjacency == "replace-one"]
    assert row.value == pytest.approx(1.5, rel=1e-3)


def test_views_are_ordered_and_carry_everything():
    rows = build.build_experiment(spec_for("cpfed")).accountant().table()
    for adjacency in accounting.ADJACENCIES:
        values = {r.view: r.value for r in rows if r.adjacency == adjacency and r.unit == "run"}
        assert values["upload"] >= values["sum"] >= values["broadcast"] >= values["final"]
    for row in rows:
        assert {"view", "adjacency", "value", "delta", "unit", "recipe", "not_covered", "assumed"} <= set(
            row.to_json()
        )


def test_what_no_theorem_covers_is_refused():
    with pytest.raises(NoProof, match=r"no noise has a proven ε for view='sum' .*; choose another"):
        build.build_experiment(spec_for("fedavg").with_values({"method": "dp-fedavg", "privacy.view": "sum"}))
    with pytest.raises(SpecError, match="adds no noise"):
        build.build_experiment(spec_for("fedavg"))
    experiment = build.build_experiment(spec_for("fedavg", **{"privacy.noise": "none"}))
    assert all(math.isinf(row.value) for row in experiment.accountant().table())


def test_neural_networks_get_no_credit_for_the_others_noise():
    """Sums of a network's updates are proved no better than the updates themselves (G7)."""
    network = build.build_experiment(spec_for("cpfed", **{"model.name": "mlp", "model.hidden": [4]}))
    values = {(r.view, r.unit): r.value for r in network.accountant().table() if r.adjacency == "zero-out"}
    assert values["sum", "run"] == values["upload", "run"]


@pytest.mark.parametrize("alike", [True, False])
def test_rates_are_kept_where_all_clients_of_a_joint_class_share_them(alike):
    def steps(info):
        rates = (0.1, 0.2) if alike or info.client else (0.3, 0.4)
        return (Release("uplink", 2.0 + info.client, 1.0, 2, Sampling("full", 1.0, "replace-one"), "test", rates),)

    (joint,) = accountant.classes(steps, np.array([5, 5]), [np.arange(2)] * 3, joint=True)
    assert joint.most == [((steps(RoundInfo(0, 0, 5, 2))[0]._replace(rates=(0.1, 0.2) if alike else ()),), 3)]


def test_clients_that_never_take_part_reveal_nothing():
    table = planned(decaying, [50, 50, 80], [np.array([0, 1])] * 3).table()
    *run, message = (row for row in table if row.adjacency == "replace-one")
    assert all(row.clients.min == 0 < row.value for row in run)
    alone = accounting.proven(
        [(decaying(RoundInfo(2, 0, 50, 3)), 1)], 1e-5, view="upload", adjacency="replace-one"
    )
    assert message.value == pytest.approx(alone.value)


def test_an_assumed_credit_is_labelled_in_the_table():
    def full(info):
        return (Release("uplink", 2.0, 1.0, 5, Sampling("full", 1.0, "replace-one"), "test", rates=(0.1,)),)

    for asked in (True, False):
        rows = planned(full, [20] * 6, [np.arange(6)] * 4, cohort_size=6, assume_credit=asked).table()
        sums, uploads = (
            next(r for r in rows if r.view == view and r.adjacency == "replace-one" and r.unit == "run")
            for view in ("sum", "upload")
        )
        assert (sums.assumed, uploads.assumed) == (asked, False)
        assert (sums.value < uploads.value) is asked


def test_accounting_of_unequal_noise_is_per_client():
    scale = [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    experiment = build.build_experiment(spec_for("cpfed", cohort_size=6, **{"privacy.noise_scale": scale}))
    groups = experiment.accountant().clients
    values = [accounting.proven(g.most, 1e-4, experiment.plan.conditions(), view="upload").value for g in groups]
    assert len(groups) >= 2
    assert max(values) == pytest.approx(1.5, rel=2e-3)
    assert min(values) < 0.8
    rows = experiment.accountant().table()
    spread = next(r for r in rows if r.view == "upload" and r.adjacency == "zero-out").clients
    assert spread.min < spread.max


def test_more_classes_than_are_bounded_one_by_one_do_not_mix_targets():
    """Of 30 clients of different sizes, those with the smaller target have rows of their own."""
    sizes, targets = 50 + np.arange(30), (0.5, 2.0) * 15

    def releases(info):
        sampling = Sampling("fixed", 5 / info.size, "replace-one", 0.0, 5, info.size)
        return (Release("uplink", 2.0 / targets[info.client], 1.0, 1, sampling, "test"),)

    plan = make_plan(sizes, cohorts=(np.arange(30),) * 4, cohort_size=30, delta=1e-5, epsilons=targets)
    joint = accountant.Accountant(plan, releases)
    assert len(joint.clients) == 30  # 15 classes of each target
    many = accountant.Accountant(plan._replace(epsilons=(), adjacency="replace-one"), releases)
    assert len(many.clients) == 1
    strict = joint.of([0]).epsilon(adjacency="replace-one")
    own = accounting.compress(releases(RoundInfo(t, 0, 50, 30)) for t in range(4))
    assert strict == pytest.approx(accounting.proven(own, 1e-5, view="upload", adjacency="replace-one").value)
    assert strict < 0.5 * many.epsilon(adjacency="replace-one")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"privacy.epsilons": [1.0, 2.0]}, "epsilons has 2 entries for num_clients=6"),
        ({"privacy.epsilons": [2.0] * 6}, "no client may exceed privacy.epsilon=1.5"),
        ({"privacy.epsilons": [1.0] * 6, "privacy.noise": "paper"}, "needs privacy.noise='proven'"),
        ({"privacy.epsilons": [1.0] * 6, "privacy.noise_scale": [1.0] * 6}, "not both"),
        ({"privacy.epsilons": [1.0] * 6, "method": "secure-fedavg"}, "not secure-fedavg"),
        ({"privacy.epsilons": [1.0] * 6, "method": "dp-scaffold"}, "not dp-scaffold"),
    ],
)
def test_targets_that_cannot_be_kept_are_refused(values, problem):
    with pytest.raises(SpecError, match=problem):
        build.build_experiment(spec_for("cpfed", cohort_size=6).with_values(values))


def test_cohorts_on_the_host_are_those_of_the_compiled_rounds():
    from dither.simulation import engine

    spec = Spec.from_preset("secure-fedavg").with_values(
        {"data.name": "breast-cancer", "num_clients": 10, "cohort_size": 4, "num_rounds": 25}
    )
    experiment = build.build_experiment(spec)
    result = engine.simulate(
        experiment.prepared.build,
        experiment.model,
        experiment.problem,
        num_rounds=25,
        cohort_size=experiment.prepared.cohort_size_at,
        seeds=[0],
        hyper={k: np.asarray(v)[None] for k, v in experiment.prepared.hyper.items()},
        eval_every=25,
    )
    counted = np.bincount(np.concatenate(experiment.cohorts), minlength=10)
    assert counted.tolist() == result.participation[0].tolist()


@pytest.mark.parametrize("name", ["secure-fedavg", "nbafl", "cpfed", "concentrated", "dp-scaffold"])
def test_releases_do_not_depend_on_the_model(name):
    """A method's releases are functions of public conditions: sizes, clip, noise and schedule."""
    spec = spec_for(
        name, batch_sampling="fixed", sampling_rate=0.0, **{"privacy.noise": "given", "privacy.noise_std": 0.5}
    )
    if name == "secure-fedavg":
        spec = spec.with_values({"privacy.noise": "paper"})
    info = RoundInfo(1, 0, 70, 3)
    sizes = np.full(6, 70)
    seen = set()
    for model in (models.logistic(30), models.mlp(30, 2, (5,))):
        prepared = prepare(spec, model, client_sizes=sizes, num_params=10)
        seen.add(prepared.releases(info))
    assert len(seen) == 1


@pytest.mark.parametrize("name", METHODS)
def test_clients_that_are_alike_in_one_round_are_alike_in_all(name):
    """What `accountant.alike` rests on: it looks at three rounds."""
    values = {"batch_sampling": "fixed", "sampling_rate": 0.0, "privacy.noise": "given", "privacy.noise_std": 0.5}
    if name in ("cpfed", "concentrated", "dp-scaffold"):  # those that take a schedule and unequal noise
        values |= {"privacy.noise_schedule": "rounds", "privacy.noise_decay": 0.9}
        values |= {"privacy.noise_scale": [1.0, 2.0, 1.0, 2.0, 1.0, 1.0]}
    spec = spec_for(name, **values, **{"privacy.unit": "run"})
    if name in ("secure-fedavg", "fedavg", "fedprox", "scaffold"):
        spec = spec.with_values({"privacy.noise": "paper" if name == "secure-fedavg" else "none"})
    sizes = np.array([70, 70, 70, 90, 90, 70])
    prepared = prepare(spec, models.logistic(30), client_sizes=sizes, num_params=31)
    releases = prepared.releases
    groups = accountant.alike(releases, sizes, [np.arange(3)])
    assert sorted(np.concatenate(groups).tolist()) == list(range(6))
    for index in range(8):
        for group in groups:
            assert len({releases(RoundInfo(index, int(c), int(sizes[c]), 3)) for c in group}) == 1
    if "privacy.noise_scale" in values:
        assert {tuple(group.tolist()) for group in groups} == {(0, 2, 5), (1,), (3,), (4,)}


def test_clients_whose_noise_parts_later_are_not_taken_for_each_other():
    """A method of one's own may let the noise of some clients fade: the loudest must not stand for the others."""
    sizes = np.full(4, 50)

    def releases(info):
        fades = info.client % 2 and info.index > 3
        sampling = Sampling("fixed", 0.1, "replace-one", 0.0, 5, 50)
        return (Release("uplink", 0.1 if fades else 1.0, 1.0, 1, sampling, "a method of one's own"),)

    cohorts = [np.arange(4)] * 8
    groups = accountant.alike(releases, sizes, cohorts)
    assert [group.tolist() for group in groups] == [[0, 2], [1, 3]]
    (everyone,) = accountant.classes(releases, sizes, cohorts, joint=True, groups=groups)
    assert sum(count for kind, count in everyone.most if kind[0].noise_std == 0.1) == 4


def test_what_many_clients_reveal_is_asked_once(tmp_path):
    """Not at every payment, nor in every round: a federation may have a hundred thousand."""
    from dither.accounting.ledger import Ledger
    from dither.accounting.ledger.runs import Spending

    asked = []

    def counting(info):
        asked.append(info.client)
        return decaying(info)

    sizes = np.arange(500) % 40 + 40
    cohorts = [np.arange(t, t + 5) for t in range(40)]
    run = Spending(
        Ledger(tmp_path / "ledger"),
        planned(counting, sizes, cohorts),
        run="r",
        dataset="d",
        clients=None,
        replay=True,
    )
    for start in range(0, 40, 10):
        run.pay(start, start + 10)
    rounds = 10 + 20 + 30 + 40  # each payment looks at all rounds so far, by one client of each of 40 sizes
    assert len(asked) <= 3 * 500 + 40 * rounds  # and everyone is asked once, for three rounds


# Counterexamples that an earlier version got wrong


def test_a_message_is_bounded_for_clients_of_every_size():
    """Sizes differ, so sampling rates do: the largest per-message ε over all clients, by brute force."""
    values = {"batch_sampling": "fixed", "sampling_rate": 0.0, "privacy.clip": "batch", "privacy.unit": "message"}
    spec = spec_for("secure-fedavg", **values, **{"privacy.adjacency": "replace-one"})
    sizes = np.array([400, 300, 200, 150, 120, 9])
    prepared = prepare(spec, models.logistic(6), client_sizes=sizes, num_params=7)
    cohorts = [np.arange(6)] * 3
    plan = prepared.plan._replace(cohorts=tuple(cohorts), epsilon=0.5)
    factor = accountant.Accountant(plan, prepared.releases).noise_factor()
    multiplier = factor * np.asarray(prepared.hyper["noise_multiplier"])
    releases = prepared.build({**prepared.hyper, "noise_multiplier": multiplier}).releases
    each = [
        accounting.proven(
            [(releases(RoundInfo(t, c, int(sizes[c]), 6)), 1)], 1e-4, view="upload", adjacency="replace-one"
        ).value
        for c in range(6)
        for t in range(3)
    ]
    assert max(each) <= 0.5 * (1 + 1e-6)
    assert max(each) > 0.49


def test_dp_fedavg_counts_participations_or_credits_sampling_but_not_both():
    spec = spec_for("dp-fedavg", sampling_rate=0.0, batch_sampling="fixed", **{"privacy.adjacency": "replace-one"})
    spec = spec.with_values({"privacy.noise": "paper", "method_options.noise_multiplier": 1.0, "num_rounds": 30})
    experiment = build.build_experiment(spec)
    most = int(np.bincount(np.concatenate(experiment.cohorts)).max())
    row = next(r for r in experiment.accountant().table() if (r.view, r.adjacency) == ("broadcast", "replace-one"))
    assert row.value == pytest.approx(accounting.gaussian_epsilon(2 * math.sqrt(most), 1e-4), rel=1e-6)
    # Before the draw, if nobody outside learns who takes part, a cohort is a batch of clients (R2).
    ex_ante = experiment.accountant()._hidden_cohorts(30)  # among the rows of `before_the_draw`
    hidden = [r for r in ex_ante if r.view == "broadcast"]
    recipes = {"zero-out": "R4 downlink hidden", "replace-one": "R2 downlink hidden"}  # half of all take part
    assert {r.adjacency: r.recipe for r in hidden} == recipes
    assert all(r.assumed and "who takes part" in r.detail for r in hidden)
    client = Release("downlink", 1.0, 1.0, 1, Sampling("fixed", 0.5, "zero-out"), "test")
    uploads = Release("uplink", 0.0, math.inf, 1, Sampling("full", 1.0, "replace-one"), "test")
    by_hand = accounting.proven([((uploads, client), 30)], 1e-4, view="broadcast", adjacency="replace-one")
    assert hidden[1].value == pytest.approx(by_hand.value, rel=1e-9)
    assert build.build_experiment(spec_for("cpfed", num_rounds=2)).accountant()._hidden_cohorts(2) == []
    # Nor where clients remember which batches they have used, and so whether they took part.
    remembering = build.build_experiment(spec.with_values({"batch_sampling": "shuffled"}))
    assert remembering.accountant()._hidden_cohorts(30) == []


def test_poisson_batches_amplify_nbafl_and_every_batch_of_a_round_is_charged():
    values = {"batch_sampling": "poisson", "sampling_rate": 0.02, "batch_size": 10, "local_steps": 3}
    values |= {"privacy.clip": "none", "method_options.param_clip": 1.0, "privacy.adjacency": "zero-out"}
    experiment = build.build_experiment(spec_for("nbafl", **values))
    (release,) = [r for r in experiment.prepared.releases(RoundInfo(0, 0, 70, 3)) if r.channel == "uplink"]
    assert release.sampling.kind == "poisson-round"
    assert release.sampling.rate == pytest.approx(1 - 0.98**3)
    row = experiment.accountant().proven("upload")
    assert row.recipe == "R5"
    # The rate of a batch is 0.02, not batch_size over the count: three batches of a round may be cut.
    cut = release._replace(sampling=release.sampling._replace(truncation=1e-9))
    failure, others = views._failures([((cut,), 1, 1.0)])
    assert failure >= 3e-9
    assert others >= 3e-9 / 0.02 * (1 - 1e-6)


def test_secure_fedavg_without_a_clip_has_no_proof():
    with pytest.raises(SpecError, match="leaves eq"):
        build.build_experiment(
            spec_for(
                "secure-fedavg",
                batch_sampling="fixed",
                sampling_rate=0.0,
                **{"privacy.clip": "none", "privacy.adjacency": "replace-one"},
            )
        )


@pytest.mark.parametrize(
    "values", [{"privacy.clip": "batch"}, {"batch_sampling": "poisson", "sampling_rate": 0.9, "batch_size": 2}]
)
def test_the_credit_for_sums_needs_convex_steps_that_do_not_expand(values):
    base = {"cohort_size": 6, "batch_sampling": "full", "sampling_rate": 0.0, "client_lr": 0.01}
    given = {"privacy.noise": "given", "privacy.noise_std": 0.05, "privacy.adjacency": "replace-one"}
    credited = build.build_experiment(spec_for("cpfed", **base, **given))
    refused = build.build_experiment(spec_for("cpfed", **{**base, **given, "client_lr": 0.2, **values}))

    def views(experiment):
        rows = [r for r in experiment.accountant().table() if r.adjacency == "replace-one" and r.unit == "run"]
        return {r.view: r.value for r in rows}

    assert views(credited)["sum"] < 0.9 * views(credited)["upload"]
    assert views(refused)["sum"] == views(refused)["upload"]


@pytest.mark.parametrize(
    ("clip", "sampling", "l2"), [("example", "poisson", 0.0), ("example", "fixed", 20.0), ("batch", "fixed", 0.0)]
)
def test_no_pair_of_data_sets_moves_secure_fedavg_by_more_than_its_stated_sensitivity(clip, sampling, l2):
    """All records flipped: the noiseless uploads of two worlds, against the sensitivity of the release."""
    import jax
    import jax.numpy as jnp

    from dither.types import Keys, Records, Round

    rate = 0.9 if sampling == "poisson" else 0.0
    values = {
        "batch_sampling": sampling,
        "sampling_rate": rate,
        "batch_size": 2,
        "local_steps": 6,
        "client_lr": 0.2,
    }
    spec = spec_for(
        "secure-fedavg", **values, **{"privacy.clip": clip, "model.l2": l2, "privacy.adjacency": "replace-one"}
    )
    size = 12
    prepared = prepare(spec, models.logistic(3), client_sizes=np.array([size] * 6), num_params=4)
    quiet = {**prepared.hyper, "noise_multiplier": np.zeros(6)}
    stated = prepared.releases(RoundInfo(0, 0, size, 6))[0].sensitivity
    x = jnp.full((size, 3), 2.0)
    key = jax.random.key(0)

    @jax.jit
    def client(labels):
        records = Records(x, labels, jnp.arange(size), jnp.int32(0), jnp.int32(size))
        start = models.logistic(3).init(key)
        hyper = {name: jnp.asarray(value, jnp.float32) for name, value in quiet.items()}
        return prepared.build(hyper).client(
            Keys(key, key, key), start, (), records, Round(jnp.int32(0), jnp.int32(0), jnp.int32(6))
        )

    def end(labels):
        result = client(labels)
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result.upload)]) / float(result.weight)

    moved = np.linalg.norm(end(jnp.ones(size, jnp.int32)) - end(jnp.zeros(size, jnp.int32)))
    assert moved <= stated * (1 + 1e-5)
    assert moved > 0.1 * stated  # and the bound is not empty words


def test_colluders_know_their_own_noise_in_nbafl():
    base = {"batch_sampling": "full", "sampling_rate": 0.0, "cohort_size": 6, "privacy.adjacency": "replace-one"}
    values = {"privacy.noise": "given", "privacy.noise_std": 40.0}
    rows = {}
    for colluders in (0, 5):
        experiment = build.build_experiment(
            spec_for("nbafl", **base, **values, **{"privacy.colluders": colluders})
        )
        rows[colluders] = next(
            r.value for r in experiment.accountant().table() if (r.view, r.adjacency) == ("final", "replace-one")
        )
    assert rows[5] > 1.5 * rows[0]


def test_before_the_cohorts_are_drawn_the_mixture_over_participations_is_reported():
    spec = spec_for("cpfed", batch_sampling="fixed", sampling_rate=0.0, **{"privacy.adjacency": "replace-one"})
    given = spec.with_values({"privacy.noise": "given", "privacy.noise_std": 0.2})
    rows = [r for r in dither.account(given, ex_ante=True).ex_ante if r.adjacency == "replace-one"]
    uploads = [r for r in rows if r.view == "upload"]
    assert uploads[0].recipe.endswith("R4")
    realised = [r for r in dither.account(given).epsilon.table if r.view == "upload" and r.unit == "run"]
    everyone = dither.account(given.with_values({"cohort_size": 6})).epsilon.table
    always = next(r for r in everyone if r.view == "upload" and r.adjacency == "replace-one")
    assert 0 < uploads[0].value < always.value
    assert realised
    with pytest.raises(SpecError, match="nothing left to draw"):
        dither.account(spec_for("concentrated", batch_sampling="shuffled", sampling_rate=0.0,
                               **{"privacy.adjacency": "replace-one"}), ex_ante=True)  # fmt: skip


def test_before_the_draw_a_late_round_of_everyone_counts_for_sure():
    def releases(info):
        return (
            Release("uplink", 1.0 if info.index else 1e3, 1.0, 1, Sampling("full", 1.0, "replace-one"), "test"),
        )

    asked = planned(releases, [50] * 6, [np.arange(6)] * 2).before_the_draw(lambda index: 6 if index else 3)
    (shown,) = (row.value for row in asked if row.view == "upload" and row.adjacency == "replace-one")
    assert shown >= accounting.gaussian_epsilon(1.0, 1e-5)


def test_before_the_draw_the_worst_class_of_clients_counts():
    """Clients of different sizes have different sampling rates: the smallest reveals most."""
    sizes = {"data.partition": "dirichlet", "data.alpha": 5.0, "num_clients": 3, "cohort_size": 2, "batch_size": 4}
    spec = spec_for("cpfed", **sizes, batch_sampling="fixed", sampling_rate=0.0)
    spec = spec.with_values(
        {"privacy.noise": "given", "privacy.noise_std": 0.5, "privacy.adjacency": "replace-one"}
    )
    experiment = build.build_experiment(spec)
    rows = [r for r in dither.account(spec, ex_ante=True).ex_ante if r.adjacency == "replace-one"]
    (shown,) = [r.value for r in rows if r.view == "upload"]
    releases = experiment.prepared.releases
    drawn = accounting.Conditions(participation=accounting.binomial(8, 2 / 3))
    each = [
        accounting.proven(
            [(releases(RoundInfo(0, client, int(size), 2)), 8)],
            1e-4,
            drawn,
            view="upload",
            adjacency="replace-one",
        ).value
        for client, size in enumerate(experiment.partition.size)
    ]
    assert len(set(each)) > 1
    assert shown == pytest.approx(max(each), rel=1e-6)


def shuffled(sizes, steps, batch, decay=1.0):
    def releases(info):
        sampling = Sampling("shuffled", batch / info.size, "replace-one", 0.0, batch, info.size)
        return (Release("uplink", 1.0 * decay**info.index, 1.0, steps, sampling, "test"),)

    return releases


def test_a_joint_bound_covers_clients_whose_rounds_straddle_two_epochs():
    """6 batches an epoch align with 3 steps, 7 and 8 do not: the joint class must cover the straddling client."""
    for sizes in ([60, 70], [60, 80], [134, 106]):
        sizes = np.array(sizes)
        releases = shuffled(sizes, steps=3, batch=10 if sizes[0] == 60 else 16, decay=0.5)
        cohorts = [np.arange(2)] * 5
        each = planned(releases, sizes, cohorts, own_epochs=True)
        (joint,) = accountant.classes(releases, sizes, cohorts, joint=True)
        together = accounting.proven(
            joint.most, 1e-5, each.conditions, view="upload", adjacency="replace-one"
        ).value
        assert together >= each.epsilon() * (1 - 1e-9)


def test_a_message_of_a_shuffled_epoch_may_straddle_two():
    epochs = planned(shuffled([40], steps=3, batch=8), [40], [np.arange(1)] * 5, own_epochs=True)
    value = epochs.epsilon(unit="message")
    assert value == pytest.approx(accounting.gaussian_epsilon(math.sqrt(2), 1e-5), rel=1e-6)


def test_a_round_released_again_with_fresh_noise_is_charged_again(tmp_path):
    from dither.accounting.ledger import Ledger
    from dither.accounting.ledger.runs import EVERY_RECORD, Spending

    sizes = np.array([60, 60])
    cohorts = [np.array([t >= 10]).astype(int) for t in range(20)]  # client 0 first, then client 1

    def spent(replay, again):
        ledger = Ledger(tmp_path / f"{replay}-{again}.sqlite")
        run = Spending(
            ledger, planned(decaying, sizes, cohorts), run="r", dataset="d", clients=None, replay=replay
        )
        for start, stop in [(0, 10), (10, 20)] + [(10, 20)] * again:
            assert run.pay(start, stop) == stop
        assert replay or run.stretches() == [(0, 20)] + [(10, 20)] * again
        (account,) = [s for s in ledger.spent("d", adjacency="replace-one") if s.client == EVERY_RECORD]
        return account.participations, account.epsilon

    once, redone = spent(False, 0), spent(False, 3)
    assert redone[0] >= once[0] + 30
    assert redone[1] > once[1]
    assert spent(True, 3) == spent(True, 0)  # the same bits again reveal nothing new


def test_only_rounds_of_this_very_run_are_taken_off_what_it_pays(tmp_path):
    """A run that goes on from another one's checkpoint: client 0 was exposed there, client 1 is exposed here."""
    from dither.accounting.ledger import Ledger
    from dither.accounting.ledger.runs import EVERY_RECORD, Spending

    ledger, cohorts = Ledger(tmp_path / "ledger"), [np.array([t >= 10]).astype(int) for t in range(30)]

    def steady(info):
        return (Release("uplink", 1.0, 1.0, 1, Sampling("full", 1.0, "replace-one"), ""),)

    def paid(run, chunks):
        account = Spending(
            ledger, planned(steady, [60, 60], cohorts), run=run, dataset="d", clients=None, replay=True
        )
        for start, stop in chunks:
            account.pay(start, stop)
        return ledger.spent("d", EVERY_RECORD)[0].participations

    assert paid("one", [(0, 10), (10, 20), (20, 30)]) == 20  # client 1, in rounds 10 to 29
    assert paid("one", [(10, 20), (20, 30)]) == 20  # resumed: the same bits
    assert paid("other", [(20, 30)]) == 30
    assert paid("other", [(10, 20)]) == 40


def test_two_processes_that_continue_one_run_at_once_pay_for_both(tmp_path):
    """With fresh noise: client 0 first, then client 1, and both processes make the second half."""
    from dither.accounting.ledger import Ledger
    from dither.accounting.ledger.runs import EVERY_RECORD, Spending

    def steady(info):
        return (Release("uplink", 1.0, 1.0, 1, Sampling("full", 1.0, "replace-one"), ""),)

    cohorts = [np.array([t >= 10]).astype(int) for t in range(20)]
    first, second = (
        Spending(
            Ledger(tmp_path / "ledger"),
            planned(steady, [60, 60], cohorts),
            run="r",
            dataset="d",
            clients=None,
            replay=False,
        )
        for _ in range(2)
    )
    first.pay(0, 10)
    for index in range(10, 20):
        first.pay(index, index + 1)
        second.pay(index, index + 1)
    # Client 1 has taken part ten times in the rounds of either process.
    assert Ledger(tmp_path / "ledger").spent("d", EVERY_RECORD)[0].participations == 20


def test_a_budget_ends_a_seeded_run_by_its_most_exposed_client(tmp_path):
    """Two clients by turns: rounds that add nothing to what the other one has revealed are free."""
    from dither.accounting.ledger import Budget, Ledger
    from dither.accounting.ledger.runs import EVERY_RECORD, Spending

    def steady(info):
        return (Release("uplink", 5.0, 1.0, 1, Sampling("full", 1.0, "replace-one"), ""),)

    ledger, cohorts = Ledger(tmp_path / "ledger"), [np.array([t % 2]) for t in range(60)]
    limit = accounting.gaussian_epsilon(math.sqrt(12) / 5, 1e-5)  # 12 participations
    ledger.set_budget("d", Budget(limit * (1 + 1e-6), 1e-5, "upload", "replace-one"))

    def account():
        return Spending(
            ledger, planned(steady, [60, 60], cohorts), run="r", dataset="d", clients=None, replay=True
        )

    first = account()
    assert [first.pay(0, 10), first.pay(10, 20), first.pay(20, 60)] == [10, 20, 24]
    resumed = account()
    assert [resumed.pay(10, 20), resumed.pay(20, 24)] == [20, 24]
    with pytest.raises(BudgetExhausted):
        resumed.pay(24, 30)
    assert ledger.spent("d", EVERY_RECORD)[0].participations == 12


def test_dp_scaffold_stops_at_its_budget_by_either_epsilon():
    base = spec_for(
        "dp-scaffold", batch_sampling="fixed", sampling_rate=0.0, **{"privacy.adjacency": "replace-one"}
    )
    given = base.with_values({"privacy.noise": "given", "privacy.noise_std": 0.5, "num_rounds": 40})
    whole = build.build_experiment(given.with_values({"method_options.stop_at_budget": "no"}))
    assert build.planned_rounds(whole) == 40
    budget = whole.proven_epsilon(17)
    stopped = build.build_experiment(
        given.with_values({"method_options.stop_at_budget": "proven", "privacy.epsilon": budget * (1 + 1e-9)})
    )
    made = build.planned_rounds(stopped)
    assert made >= 17
    assert whole.proven_epsilon(made) <= budget * (1 + 1e-6)
    assert whole.proven_epsilon(made + 1) > budget
    claimed = build.build_experiment(given.with_values({"privacy.epsilon": whole.prepared.claim.value * 0.9}))
    assert 0 < build.planned_rounds(claimed) < 40


def test_clients_with_shuffled_epochs_are_counted_as_the_shortest_whose_rounds_straddle():
    def client(population):
        return Release("uplink", 1.0, 1.0, 2, Sampling("shuffled", 0.1, "zero-out", 0.0, 4, population), "test")

    for populations, epoch in (((24, 32), 6), ((24, 28), 5)):  # 7 batches are no whole rounds of 2: nor are 5
        joined = accountant._straddling(client(24).sampling, 2, [client(size) for size in populations])
        assert (joined.population, joined.rate) == (4 * epoch, pytest.approx(1 / epoch))


def test_a_run_without_rounds_reveals_nothing():
    nothing = planned(decaying, [60, 80], [])
    (one,) = nothing.clients
    assert one.members.tolist() == [0, 1]
    assert one.least == one.median == one.most == []
    assert nothing.epsilon() == 0.0


def test_rounds_that_were_repeated_are_drawn_already():
    repeated = planned(decaying, [60] * 6, [np.arange(3)] * 2, round_numbers=(0, 0))
    with pytest.raises(SpecError, match="their participants are already drawn"):
        repeated.before_the_draw(lambda index: 3)


def by_use(steps, share, rate=0.1):
    sampling = Sampling("fixed-round", 0.2, "replace-one", 0.0, 5, 50)
    uses = None if share is None else Uses(steps, share, rate)
    return (Release("uplink", 1.0, 1.0, 1, sampling, "test", by_use=uses),)


def test_releases_that_differ_by_use_count_with_the_largest_share_if_they_can_be_compared():
    small, large, unknown = by_use(4, 0.2), by_use(4, 0.3), by_use(4, None)
    for pair in ([small, large], [large, small]):
        assert accountant._with_largest_share(small, pair) == large
    assert accountant._with_largest_share(small, [small, small]) is small
    for other in (unknown, by_use(5, 0.1), by_use(4, 0.1, rate=0.2)):
        assert accountant._with_largest_share(small, [small, other]) == unknown


def test_a_method_for_whole_clients_moves_a_record_twice_as_far():
    """Blanking a client removes its update; blanking a record may turn it round. A replacement is that already."""
    (blanked,) = (accountant._of_a_record(one) for one in decaying(RoundInfo(0, 0, 50, 3)))
    assert (blanked.sensitivity, blanked.sampling.adjacency) == (1.0, "replace-one")
    one = blanked._replace(sampling=blanked.sampling._replace(adjacency="zero-out"))
    assert accountant._of_a_record(one) == one._replace(sensitivity=2.0, sampling=blanked.sampling)


def test_strength_counts_rounding_of_grids_and_of_exact_noise():
    (one,) = decaying(RoundInfo(0, 0, 50, 3))  # two uses of noise 4
    assert accountant._information(one) == 2 / 16
    assert accountant._information(one._replace(noise_std=0.0)) == math.inf
    grid = Lattice(0.5, 9)
    assert accountant._information(one, grid) == 2 * (1 + 1.5) ** 2 / 16
    assert accountant._information(one._replace(channel="downlink"), grid) == 2 / 16
    exactly = one._replace(exact=ExactNoise(0.25, 0.0))
    assert accountant._information(exactly) == 2 * (1 + 0.25 * 4) ** 2 / 16


def test_answers_are_kept_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(accountant, "_ANSWERS", {})
    monkeypatch.setattr(accountant, "_MOST_ANSWERS", 2)
    asked = []

    def answer(question):
        return accountant._answered(question, lambda: asked.append(question) or question)

    assert [answer(each) for each in (1, 2, 1, 2)] == [1, 2, 1, 2]
    assert asked == [1, 2]
    assert answer(3) == 3
    assert len(accountant._ANSWERS) == 2
    assert [answer(each) for each in (2, 3, 1)] == [2, 3, 1]  # the oldest was given up
    assert asked == [1, 2, 3, 1]


def test_the_ratio_of_noise_is_that_of_weighted_steps():
    def algorithm(*rows):
        return SimpleNamespace(releases=lambda info: rows[info.client])

    def step(std, rate=(), channel="uplink"):
        return Release(channel, std, 1.0, 1, Sampling("full", 1.0, "zero-out"), "test", rates=rate)

    sizes = np.array([10, 20])

    def ratio(first, second, weights=(1.0, 1.0)):
        return accountant.noise_ratio(algorithm(first, second), sizes, np.array(weights))

    assert ratio((step(2.0),), (step(2.0),)) == 1.0
    assert ratio((step(2.0),), (step(4.0),)) == 0.5
    assert ratio((step(2.0),), (step(4.0),), (2.0, 1.0)) == 1.0
    assert ratio((step(2.0), step(3.0)), (step(2.0), step(1.0))) == pytest.approx(1 / 3)  # the worst of the steps
    assert ratio((step(2.0, (0.1,)),), (step(2.0, (0.2,)),)) == 0.0
    assert ratio((step(2.0),), (step(2.0), step(2.0))) == 0.0
    assert ratio((step(0.0),), (step(0.0),)) == 1.0
    assert ratio((step(2.0), step(1.0, channel="downlink")), (step(2.0), step(9.0, channel="downlink"))) == 1.0


def steady(info):
    """The same in every round; clients with 80 records add twice the noise."""
    noise_std = 4.0 if info.size == 60 else 8.0
    return (Release("uplink", noise_std, 1.0, 1, Sampling("full", 1.0, "replace-one"), "test"),)


def test_the_table_has_the_least_the_median_and_the_most_exposed_client():
    """Clients 0 to 2 take part in 1, 2 and 6 of six rounds; 3 to 6, with half of the cost each, in 2 of them."""
    cohorts = [np.array([0, 1, 2, 3, 4, 5, 6]), np.array([1, 2, 3, 4, 5, 6]), *[np.array([2])] * 4]
    table = planned(steady, [60, 60, 60, 80, 80, 80, 80], cohorts).table()
    (row,) = (r for r in table if (r.view, r.adjacency, r.unit) == ("upload", "replace-one", "run"))

    def epsilon(square):
        return pytest.approx(accounting.gaussian_epsilon(math.sqrt(square), 1e-5), rel=1e-6)

    assert row.value == row.clients.max == epsilon(6 / 16)
    assert row.clients.min == epsilon(2 / 64)
    assert row.clients.median == epsilon(2 / 64)
    (message,) = (r for r in table if (r.adjacency, r.unit) == ("replace-one", "message"))
    assert message.value == epsilon(1 / 16)
    assert message.clients is None
    views_of = [r.view for r in table if r.adjacency == "replace-one" and r.unit == "run"]
    assert views_of == list(accounting.VIEWS)


def test_a_row_that_rests_on_others_says_against_how_many_colluders():
    ready = planned(steady, [60] * 3, [np.arange(3)], colluders=1, aggregation="ideal")
    rows = {r.view: r for r in ready.table() if r.adjacency == "replace-one" and r.unit == "run"}
    assert rows["upload"].against == ""
    assert rows["sum"].recipe.endswith(" sum")
    assert rows["sum"].against == "against a server that colludes with 1 of the 3 parties"
    for recipe in ("R6 G7b", "R6 discrete", "R1 downlink", "R1 joint", "R2+R4"):
        row = ready.row(replace(rows["upload"], recipe=recipe))
        assert bool(row.against) == (recipe != "R2+R4")
