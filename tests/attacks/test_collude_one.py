"""A server and one member read an honest member's upload word for word.

Every honest client is an unchanged `ClientSession` and keeps every rule. The server chooses the attempt numbers,
which seed the committee's hash: it searches until the committee is its accomplice, who hands over the seed of its
seal. Two attempts that differ in one honest client then differ by that client's vector.
"""

import math

import numpy as np
import pytest

from dither.errors import ProtocolAbort
from dither.experiment import build
from dither.experiment.build import least_clients
from dither.federation.agreement import federated_spec
from dither.secagg import primitives
from dither.secagg.client import ClientSession
from dither.secagg.graph import Rules
from dither.secagg.messages import Kind
from dither.secagg.roster import AnnouncedCohort
from dither.secagg.server import ServerSession, _OpenAttempt
from tests.federation.parties import small_spec

FEDERATION, LENGTH = bytes(range(32)), 5


class Federation:
    """Clients that follow the rules which a spec without a word about colluders comes to, and the server's key."""

    def __init__(self, count):
        spec = federated_spec(
            small_spec(num_clients=count, cohort_size=count, **{"secagg.mode": "real", "privacy.colluders": -1}),
            count,
            "x",
        )
        self.rules = Rules(32, 0, spec.privacy.colluders, least_clients(spec), 0).check()
        self.server = ServerSession(federation=FEDERATION, rules=self.rules)
        public = self.server.signing.public
        self.clients = [
            ClientSession(who, federation=FEDERATION, server=public, rules=self.rules) for who in range(count)
        ]
        for client in self.clients:
            self.server.hello(client.hello())
        roster = self.server.make_roster()
        for client in self.clients:
            self.server.confirm(client.confirm(roster))
        for client in self.clients:
            client.confirmed(self.server.confirmed())
        self.vectors = [np.arange(LENGTH, dtype=np.uint32) + 100 * who for who in range(count)]

    def cohort(self, ids, attempt, round_index=0):
        threshold = self.rules.threshold_for(len(self.clients))
        return AnnouncedCohort(self.server.roster, round_index, attempt, threshold, LENGTH, tuple(ids))

    def upload(self, who, cohort):
        return self.clients[who].upload(self.server._pack(Kind.ANNOUNCE, cohort.pack(), cohort), self.vectors[who])

    def total(self, cohort, accomplices):
        """The sum of an attempt, less the seals of those who work with the server."""
        self.server._attempt = _OpenAttempt.empty(cohort)
        for who in cohort.ids:
            self.server.upload(self.upload(who, cohort))
        total = self.server._attempt.total.copy()
        seeds = {who: self.clients[who]._attempt.seed for who in accomplices if who in cohort.committee}
        primitives.mask(total, [(cohort.seal_key(seed, who), -1) for who, seed in seeds.items()])
        return total


def search(federation, ids, accomplices, start):
    """The next attempt whose committee helps the server most; nobody is asked for it."""
    return max(range(start, start + 50), key=lambda a: len(set(federation.cohort(ids, a).committee) & accomplices))


@pytest.mark.parametrize("count", [4, 6])
def test_a_server_and_one_member_read_nobodys_upload(count):
    federation, accomplices = Federation(count), {count - 1}
    everybody, fewer = range(count), range(1, count)
    try:
        first = search(federation, everybody, accomplices, 0)
        all_of_them = federation.total(federation.cohort(everybody, first), accomplices)
        second = search(federation, fewer, accomplices, first + 1)
        without = federation.total(federation.cohort(fewer, second), accomplices)
    except ProtocolAbort:
        return  # an honest client would not have it
    assert not np.array_equal(all_of_them - without, federation.vectors[0])


def test_nor_do_as_many_as_the_rules_allow_for_whatever_the_committees():
    """Attempts 0 and 1 of many rounds, as the rules want them: someone honest is in every committee."""
    federation = Federation(6)
    accomplices = set(range(6 - federation.rules.colluders, 6))
    helpful = 0
    for index in range(60):
        cohorts = [federation.cohort(ids, attempt, index) for attempt, ids in enumerate((range(6), range(1, 6)))]
        all_of_them, without = (federation.total(cohort, accomplices) for cohort in cohorts)
        assert not np.array_equal(all_of_them - without, federation.vectors[0])
        helpful += any(accomplices <= set(cohort.committee) for cohort in cohorts)
    assert helpful  # the server was as lucky as it can be


@pytest.mark.parametrize("count", [3, 4, 5, 6, 10])
def test_a_third_of_the_cohort_may_collude_by_default(count):
    assert Federation(count).rules.colluders >= count / 3


def test_attempts_of_a_round_are_consecutive():
    federation = Federation(6)
    with pytest.raises(ProtocolAbort, match="attempt"):
        federation.upload(0, federation.cohort(range(6), 1))  # a round begins with attempt 0
    federation.upload(0, federation.cohort(range(6), 0))
    with pytest.raises(ProtocolAbort, match="attempt"):
        federation.upload(0, federation.cohort(range(5), 2))
    federation.upload(0, federation.cohort(range(5), 1))


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"privacy.colluders": 2}, ""),
        ({"privacy.colluders": 1, "federation.refused": "continue"}, " while the noise of 1 more is missing"),
    ],
)
def test_an_epsilon_that_counts_on_others_says_against_whom(changes, lost):
    spec = small_spec(local_steps=1, client_lr=0.1, batch_sampling="full", **{"secagg.mode": "ideal", **changes})
    rows = [row for row in build.build_experiment(spec).accountant().table() if math.isfinite(row.value)]
    credited = [row for row in rows if row.recipe == "R1 sum"]
    assert credited
    words = f"against a server that colludes with {changes['privacy.colluders']} of the 4 parties{lost}"
    assert {row.against for row in credited} == {words}
    assert {row.against for row in rows if row.view == "upload"} == {""}
