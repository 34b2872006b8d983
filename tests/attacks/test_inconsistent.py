"""A server that asks the parties of one masked sum different things. Every answer is masked, but the server knows
what it asked: if the others answer something whose result it knows, or if an old answer comes again in another
sum, then the sum reveals one party's answer (Pasquini, Francati, Ateniese, "Eluding secure aggregation in
federated learning via model inconsistency", CCS 2022).

Here parties count; the same with models is in tests/federation/test_hostile.py."""

import numpy as np
import pytest

from dither.experiment.counting import Question
from dither.federation import messages
from dither.federation.surveys import _Asked
from tests.federation.test_statistics import NAMES, Clinics

AGE = Question("histogram", ("age",), 0.2, ((0.0, 128.0),), bins=4)
NOBODY = AGE._replace(ranges=((1e6, 1e7),), share=0.8)  # all are in the first part: the answer is known


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "_LOOK_SECONDS", 0.0)
    return Clinics(tmp_path, 40).asking()


def opened(server, index, asked, places):
    """The sum of what the parties answer, each to its own question at its own place; None where one refuses."""
    session = server._session
    server._question, server.engine = asked["ann"], _Asked(4, [])
    server._announce(index, NAMES)
    for name in NAMES:
        fields = {"run": server.agreement.run, "round": places[name], "question": asked[name].to_dict()}
        arrays = {"announce": session.announcement()}
        replies = server.mailbox.ask(
            "question",
            {name: (fields, arrays)},
            seconds=5.0,
            take=lambda name, answer: session.upload(answer.bytes("upload")),
        )
        if replies.refused:
            return None
    server._ask_for_shares(index, "unseal", session.unseal(), session.shares)
    return np.asarray(session.open(), np.uint64).view(np.int64).copy()


def test_a_sum_is_of_one_question(server):
    """The others are asked what has a known answer: what is left is one party's histogram."""
    asked = {"ann": AGE, "bob": NOBODY, "cat": NOBODY}
    assert opened(server, 0, asked, dict.fromkeys(NAMES, 0)) is None


def test_an_answer_is_in_one_sum(server):
    """The first question is asked again beside another party's second one: the difference of the two sums is that
    of one party's two answers, one of which is known."""
    first = opened(server, 0, dict.fromkeys(NAMES, AGE), dict.fromkeys(NAMES, 0))
    assert first.sum() == pytest.approx(120, abs=60)
    asked = {"ann": NOBODY, "bob": AGE, "cat": AGE}
    assert opened(server, 1, asked, {"ann": 1, "bob": 0, "cat": 0}) is None
    assert opened(server, 2, dict.fromkeys(NAMES, AGE), dict.fromkeys(NAMES, 0)) is None  # nor in the same words
