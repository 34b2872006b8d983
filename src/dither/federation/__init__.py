"""A real federation, without any transport (`federation.flower` or `federation.nvflare` carries the messages).

keys        who belongs to it: certificates, transport keys and signing keys, one folder for each party
messages    signed messages as bytes; the mailbox: questions to parties and their answers
agreement   what everybody agrees on, its digest, and the owner's approval
state       what a party and the server must still know after a restart, and a party's record of what it released
engines     one client, or the server, of a simulated round by itself
party       a party: it answers messages, charges its own ledger, adds its own noise
server      the coordinator: enrolment, rounds, deadlines, who was missing
surveys     private statistics at the server, and a project with one ε
local       ports, processes and sockets of this machine
serving     `dither serve`: the transport's server and the coordinator as processes
health      how a run stands
joining     `dither join` and `dither federation check`
demo        `dither federation demo`
"""
