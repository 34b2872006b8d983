"""An outsider who hears one upload of every client of NbAFL, in a round of its choice, learns the target's twice.

In one round it hears the target, in another all others: that broadcast less their uploads is the target's upload.
The bound for one upload of the target and all broadcasts (2.06) is then that of two uploads (2.95): the row must
say so.
"""

import numpy as np

from dither.accounting import views
from dither.types import Conditions, Release, Sampling

CLIENTS, STD, REACH = 17, 4.0, 2.0
EVERY = Sampling("full", 1.0, "replace-one", 0.0, 10, 10)
ROUND = (
    Release("uplink", STD, REACH, 1, EVERY, ""),
    Release("downlink", STD / np.sqrt(CLIENTS), REACH / CLIENTS, 1, EVERY, ""),
)


def test_the_row_says_whose_uploads_the_outsider_may_hear():
    rows = {row.view: row for row in views.account([(ROUND, 2)], 1e-5, Conditions(CLIENTS, exposures=1))}
    assert rows["broadcast"].value < 0.75 * rows["upload"].value
    assert views.OVERHEARD in rows["broadcast"].not_covered
    assert views.OVERHEARD not in rows["upload"].not_covered + rows["final"].not_covered
    uploads = np.random.default_rng(0).normal(size=CLIENTS)
    broadcast = np.mean(uploads)
    assert np.isclose(CLIENTS * broadcast - np.sum(uploads[1:]), uploads[0])  # no noise but the target's own


def test_where_every_round_may_be_heard_nothing_is_left_out():
    rows = {row.view: row for row in views.account([(ROUND, 1)], 1e-5, Conditions(CLIENTS, exposures=1))}
    assert rows["broadcast"].value == rows["upload"].value
