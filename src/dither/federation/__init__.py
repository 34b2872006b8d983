"""A real federation, without any transport (`dither.federation.flower` carries the messages).

keys        who belongs to it: certificates, transport keys and signing keys, one folder for each party
messages    signed messages: a header and arrays, as bytes
agreement   what everybody agrees on, its digest, and the owner's approval
state       what a party and the server must still know after a restart
engines     one client, or the server, of a simulated round by itself
party       a party: it answers messages, charges its own ledger, adds its own noise
mailbox     questions to parties and their answers
server      the coordinator: enrolment, rounds, deadlines, who was missing
serving     `dither serve`: the SuperLink, the gate and the coordinator as processes
joining     `dither join` and `dither federation check`
demo        `dither federation demo`
"""
