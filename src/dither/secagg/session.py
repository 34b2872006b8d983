"""A whole federation in one process, for simulation and tests: every message is really serialised and parsed.

    federation = LocalFederation(16, FixedPoint(num_clients=10))
    summed = federation.sum(0, {3: words, 5: words, 9: words}, lost={9: "before-upload"})
    summed.total        # words of 3 plus words of 5, modulo 2^k
    summed.survivors    # (3, 5)

Nothing is protected from someone who reads this process's memory: it shows what a deployment computes and costs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dither.errors import ProtocolAbort, SpecError
from dither.secagg import primitives
from dither.secagg.client import ClientSession
from dither.secagg.encoding import FixedPoint
from dither.secagg.graph import Rules
from dither.secagg.server import ServerSession

LOST = ("before-upload", "after-upload")


class Summed(NamedTuple):
    """What a round of secure aggregation gave and cost.

    `total` is the sum of the survivors' words modulo 2^k. A client lost after its upload survives in the sum,
    unless another one's loss made a new attempt necessary. Bytes are those of all the round's messages, by client.
    `mask_seconds` is what all clients together spent on masking (key derivation and signing included),
    `unmask_seconds` what the server spent on adding and opening (signatures included).
    """

    total: np.ndarray
    survivors: tuple[int, ...]
    attempts: int
    bytes_up: dict[int, int]
    bytes_down: dict[int, int]
    mask_seconds: float
    unmask_seconds: float


class LocalFederation:
    """`num_clients` clients, numbered from 0, enrolled with one server.

    `agreed` are fields of `Rules`, whose `min_clients` is raised to colluders + 2 if it is lower. Keys are fresh
    from the operating system; no sum depends on them.
    """

    def __init__(self, num_clients: int, fixed_point: FixedPoint, **agreed: int) -> None:
        self.fixed_point = fixed_point.check()
        rules = Rules(**{**agreed, "modulus_bits": fixed_point.modulus_bits})
        rules = rules._replace(min_clients=max(rules.min_clients, rules.colluders + 2)).check()
        if num_clients < rules.min_clients:
            raise SpecError(f"num_clients={num_clients} is below min_clients={rules.min_clients}")
        federation = primitives.fresh_key()
        self.server = ServerSession(federation=federation, rules=rules)
        public = self.server.signing.public
        self.clients = [
            ClientSession(who, federation=federation, server=public, rules=rules) for who in range(num_clients)
        ]
        for client in self.clients:
            self.server.hello(client.hello())
        roster = self.server.make_roster()
        for client in self.clients:
            self.server.confirm(client.confirm(roster))
        confirmed = self.server.confirmed()
        for client in self.clients:
            client.confirmed(confirmed)

    def sum(
        self, round_index: int, encodings: Mapping[int, np.ndarray], *, lost: Mapping[int, str] | None = None
    ) -> Summed:
        """The sum of the encodings (client to words), each masked before it leaves its client.

        `lost[client]` is "before-upload" (never heard of in this round) or "after-upload" (vanishes after its
        first upload). Rounds must increase from call to call. `ProtocolAbort` where too few clients are left.
        """
        lost = dict(lost or {})
        for who, when in lost.items():
            if when not in LOST:
                raise SpecError(f"lost[{who}]={when!r} is not one of {', '.join(LOST)}")
        for who in encodings:
            if not 0 <= who < len(self.clients):
                raise SpecError(f"client {who} is not one of the {len(self.clients)} of this federation")
        if len(encodings) > self.fixed_point.num_clients:
            raise SpecError(
                f"{len(encodings)} encodings; the range is checked for num_clients={self.fixed_point.num_clients}"
            )
        if not encodings:
            raise ProtocolAbort("a cohort of 0 clients")
        dimension = len(next(iter(encodings.values())))
        up, down = dict.fromkeys(sorted(encodings), 0), dict.fromkeys(sorted(encodings), 0)
        masking = unmasking = 0.0
        gone = {who for who, when in lost.items() if when == "before-upload"}
        message = self.server.announce(round_index, encodings, dimension)
        while True:
            for who in self.server.cohort:
                down[who] += len(message)
                if who in gone:
                    continue
                began = time.perf_counter()
                upload = self.clients[who].upload(message, encodings[who])
                between = time.perf_counter()
                self.server.upload(upload)
                masking += between - began
                unmasking += time.perf_counter() - between
                up[who] += len(upload)
            gone |= set(lost)
            if not self.server.missing:
                break
            message = self.server.reannounce()
        for who, request in self.server.unseal().items():
            down[who] += len(request)
            if who in gone:
                continue
            answer = self.clients[who].unseal(request)
            up[who] += len(answer)
            self.server.shares(answer)
        began = time.perf_counter()
        total = self.server.open()
        unmasking += time.perf_counter() - began
        return Summed(total, self.server.cohort, self.server.attempt + 1, up, down, masking, unmasking)
