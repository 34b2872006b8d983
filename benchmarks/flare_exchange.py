"""The FLARE job of benchmarks/federation.py: masked rounds of light parties, several of which may share a site."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from masked_exchange import coordinate
from nvflare.apis.controller_spec import Task
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable

from dither.federation.nvflare.apps import AuxTransport


class SharedSites(AuxTransport):
    """Parties that share sites: party p is at site p modulo the number of sites."""

    parties = sites = 0

    def nodes(self) -> dict[int, str]:
        present = super().nodes()
        by_site = {int(site.rsplit("-", 1)[1]): present.get(at) for site, at in self._numbers.items()}
        marks = {party: by_site.get(party % self.sites) for party in range(self.parties)}
        return {party: mark for party, mark in marks.items() if mark}

    def push(self, bodies: Mapping[int, bytes], *, ttl: float) -> dict[int, str]:
        at = {int(site.rsplit("-", 1)[1]): address for site, address in self._numbers.items()}
        waves: dict[int, dict[int, bytes]] = {}
        for party, body in bodies.items():
            wave = waves.setdefault(party // self.sites, {})
            wave[at[party % self.sites]] = party.to_bytes(4, "little") + body
        numbers = {wave: super(SharedSites, self).push(sent, ttl=ttl) for wave, sent in waves.items()}
        return {party: numbers[party // self.sites][at[party % self.sites]] for party in bodies}


class ExchangeController(Controller):
    """Runs the benchmark's coordinator."""

    def __init__(self, config: dict[str, str]) -> None:
        super().__init__()
        self._config = config

    def start_controller(self, fl_ctx: Any) -> None:
        self._transport = SharedSites(fl_ctx.get_engine(), fl_ctx)
        self._transport.parties, self._transport.sites = (int(self._config[k]) for k in ("parties", "sites"))

    def stop_controller(self, fl_ctx: Any) -> None:
        pass

    def process_result_of_unknown_task(self, client: Any, task_name: str, *_: Any) -> None:
        pass

    def control_flow(self, abort_signal: Any, fl_ctx: Any) -> None:
        self.broadcast(Task("take_part", Shareable()), fl_ctx, min_responses=0)
        coordinate(self._transport, self._config)
