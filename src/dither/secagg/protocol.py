"""Secure aggregation as two state machines without input or output of their own.

`ClientSession` (client.py) and `ServerSession` (server.py) turn messages (messages.py) into messages. The rest of
the room: roster.py says who belongs to a federation and under which rules, cohort.py what follows from one
announcement, state.py survives restarts, session.py runs a whole federation in one process. docs/secagg.md has the
threat model and the reasons.

    client                                server
    hello()              ── HELLO ───►    hello(·)                once per federation
    confirm(·)           ◄── ROSTER ──    make_roster()
                         ── CONFIRM ──►   confirm(·)
    confirmed(·)         ◄─ CONFIRMED ─   confirmed()

    upload(·, vector)    ◄─ ANNOUNCE ──   announce(t, cohort, d)  each round;
                         ── UPLOAD ───►   upload(·)               reannounce() where some are missing
    unseal(·)            ◄── UNSEAL ───   unseal()
                         ── SHARES ───►   shares(·)
    release(·)           ◄── DISPUTE ──   disputes()              where shares were no use: to who made them
                         ── RELEASE ──►   released(·)
                                          liars()
                                          open() -> the sum
"""

from dither.secagg.client import ClientSession
from dither.secagg.roster import Rules
from dither.secagg.server import ServerSession

__all__ = ["ClientSession", "Rules", "ServerSession"]
