"""The FLARE job of benchmarks/federation.py: exchanges without training, and what they cost the server."""

import json
import os
import time
from pathlib import Path

from nvflare.apis.controller_spec import Task
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable

from dither.federation.nvflare.apps import AuxTransport


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class ExchangeController(Controller):
    """Sends a message of `size` bytes to every site and waits for the answers, `rounds` times."""

    def __init__(self, config):
        super().__init__()
        self._config = config

    def start_controller(self, fl_ctx):
        self._transport = AuxTransport(fl_ctx.get_engine(), fl_ctx)

    def stop_controller(self, fl_ctx):
        pass

    def process_result_of_unknown_task(self, client, task_name, *_):
        pass

    def control_flow(self, abort_signal, fl_ctx):
        self.broadcast(Task("take_part", Shareable()), fl_ctx, min_responses=0)
        count, rounds, size = (int(self._config[name]) for name in ("nodes", "rounds", "size"))
        transport, rows = self._transport, []
        while len(transport.nodes()) < count:
            time.sleep(0.1)
        processes = (os.getppid(), os.getpid())  # FLARE's server, and this job
        for _ in range(rounds + 1):
            began, before = time.perf_counter(), [cpu_seconds(each) for each in processes]
            body = os.urandom(size)
            waiting = set(transport.push(dict.fromkeys(transport.nodes(), body), ttl=300).values())
            while waiting:
                waiting -= {number for number, _ in transport.pull(waiting)}
                if waiting:
                    transport.pause()
            seconds = time.perf_counter() - began
            cpu = [cpu_seconds(each) - was for each, was in zip(processes, before, strict=True)]
            rows.append({"seconds": seconds, "server": cpu[0], "job": cpu[1]})
        Path(self._config["result"]).write_text(json.dumps(rows[1:]))  # the first one finds everything cold
