"""A real federation: keys, agreement, the node at each party and the coordinator, without any transport.

    keys          who belongs to it: certificates, transport keys and signing keys, one folder a party
    wire          signed messages: a header and arrays, as bytes
    agreement         what everybody agrees on, its digest, and the owner's approval
    store         what a node must still know after a restart
    node          a party: it answers messages, charges its own ledger, adds its own noise
    journal       what the server must still know after a restart
    post          questions to parties and their answers
    coordinator   the server: enrolment, rounds, deadlines, who was missing
    transport     how the coordinator reaches nodes: an interface, and one inside a process
    serving       `dither serve`: the SuperLink, the gate and the coordinator as processes
    joining       `dither join`: a node, connected until the run is over
    checking      `dither federation check`
    demo          `dither federation demo`

`dither.federation.flower` carries the messages; nothing here imports Flower.
"""
