"""Secure aggregation: two state machines that open the sum of the clients' vectors and nothing else.

`ClientSession` (client.py) and `ServerSession` (server.py) turn messages (messages.py) into messages, without any
input or output. graph.py has the rules of a federation, roster.py its members and what follows from one
announcement; it also has what both sessions share. encoding.py turns floats into integers, and session.py runs a
whole federation in one process. docs/secagg.md has the threat model and the reasons.

    client                                server
    hello()              ── HELLO ───►    hello(·)                once per federation
    confirm(·)           ◄── ROSTER ──    make_roster()
                         ── CONFIRM ──►   confirm(·)
    confirmed(·)         ◄─ CONFIRMED ─   confirmed()

    upload(·, vector)    ◄─ ANNOUNCE ──   announce(t, cohort, d)  each round;
                         ── UPLOAD ───►   upload(·)               reannounce() if some are missing
    unseal(·)            ◄── UNSEAL ───   unseal()
                         ── SHARES ───►   shares(·)
    release(·)           ◄── DISPUTE ──   disputes()              if shares were useless: to their maker
                         ── RELEASE ──►   released(·)
                                          liars()
                                          open() -> the sum
"""
