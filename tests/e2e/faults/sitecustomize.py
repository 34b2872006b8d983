"""Faults and taps inside the processes of a federation, for tests alone.

Python imports a module of this name when it starts, if PYTHONPATH shows the way. With DITHER_TEST_FAULTS=FOLDER a
process kills itself (SIGKILL) when it reaches a phase that FOLDER/faults.json lists, each once: a mark in FOLDER
says which have happened. With DITHER_TEST_TAPS=FOLDER processes write down what they are given (see TAPS).

    faults.json    [[phase, round or null], ...]
"""

import importlib.abc
import importlib.util
import itertools
import json
import os
import pickle
import signal
import sys
from pathlib import Path

_LAST = ["", -1]  # kind and round of the message that a node handled last


def _handled(message):
    if message.kind == "round":
        _LAST[:] = ["round", message.fields["round"]]
    else:
        _LAST[0] = message.kind
    return message.kind


# Phase -> where it is (module, name), before or after that call, and from its arguments the round it belongs to;
# None: it is another call.


def _index(self, index, *_):
    return index


def _of_kind(wanted):
    def place(self, kind, questions, *_):
        found = [fields.get("round", -1) for fields, _ in questions.values()]
        return (max(found) if found else -1) if kind == wanted else None

    return place


_NODE, _FLEET = "dither.federation.party", "dither.federation.flower.fleet"
_COORDINATOR, _SESSION = "dither.federation.server", "dither.secagg.server"
_JOURNAL = "dither.federation.state"

PHASES = {
    # A node, in the order of a round
    "terms": (_NODE, "Party._agree_to", "after", lambda *_: -1),
    "roster": (_NODE, "_Training.secagg", "after", lambda self, m, *_: -1 if m.kind == "roster" else None),
    "enrolled": (_NODE, "_Training.secagg", "after", lambda self, m, *_: -1 if m.kind == "confirmed" else None),
    "announce": (_NODE, "_Training._check_turn", "before", _index),
    "charging": (_NODE, "_Training._charge", "before", _index),
    "charged": (_NODE, "_Training._charge", "after", _index),
    "trained": ("dither.federation.engines", "ClientEngine.answer", "after", lambda self, m, own, i, *_: i),
    "before upload": (
        _NODE,
        "Party._handle",
        "after",
        lambda self, m, *_: _LAST[1] if m.kind == "round" else None,
    ),
    "after upload": (_FLEET, "_Connection.reply", "after", lambda *_: _LAST[1] if _LAST[0] == "round" else None),
    "unseal asked": (
        _NODE,
        "Party._handle",
        "before",
        lambda self, m, *_: _LAST[1] if m.kind == "unseal" else None,
    ),
    "unseal saved": (
        _NODE,
        "Party._handle",
        "after",
        lambda self, m, *_: _LAST[1] if m.kind == "unseal" else None,
    ),
    "unseal sent": (_FLEET, "_Connection.reply", "after", lambda *_: _LAST[1] if _LAST[0] == "unseal" else None),
    # The server, in the order of a round
    "server: terms": (_JOURNAL, "Journal.save_agreement", "after", lambda *_: -1),
    "server: roster": (
        _COORDINATOR,
        "Coordinator._everybody",
        "before",
        lambda s, kind, *_: -1 if kind == "roster" else None,
    ),
    "server: confirmed": (
        _COORDINATOR,
        "Coordinator._everybody",
        "before",
        lambda s, kind, *_: -1 if kind == "confirmed" else None,
    ),
    "server: announce": ("dither.federation.messages", "Mailbox.ask", "before", _of_kind("round")),
    "server: collecting": (
        _SESSION,
        "ServerSession.upload",
        "after",
        lambda self, *_: self._open().cohort.round_index if len(self._open().uploaded) == 2 else None,
    ),
    "server: one answer": (_COORDINATOR, "Coordinator._checked", "after", lambda self, answer, index, *_: index),
    "server: unseal": (
        _SESSION,
        "ServerSession.shares",
        "before",
        lambda self, *_: self._open().cohort.round_index,
    ),
    "server: opened": (_SESSION, "ServerSession.open", "after", lambda self, *_: self._open().cohort.round_index),
    "server: half a line": (
        "dither.experiment.folder",
        "RunFolder.save_checkpoint",
        "before",
        lambda self, checkpoint, *_: checkpoint.round - 1,
    ),
    "server: complete": (_JOURNAL, "Journal.complete", "after", lambda self, line, *_: line["round"]),
}


def _faults(folder):
    wanted = json.loads((folder / "faults.json").read_text())
    found = []
    for number, (phase, at) in enumerate(wanted):
        module, name, when, place = PHASES[phase]

        def die(arguments, number=number, at=at, place=place):
            mark = folder / f"done-{number}"
            if place(*arguments) == (-1 if at is None else at) and not mark.exists():
                mark.touch()
                above = os.environ.get("DITHER_SERVE_PROCESS", "")
                if above:
                    os.kill(int(above), signal.SIGKILL)  # the whole server, not its coordinator alone
                os.kill(os.getpid(), signal.SIGKILL)

        found.append((module, name, when, die))
    return found


# Taps: what each process is given or computes, as one file a thing


def _taps(folder):
    numbers = itertools.count()  # several threads may keep things at once

    def keep(what, content):
        (folder / f"{what}-{os.getpid()}-{next(numbers)}").write_bytes(content)

    def frame(arguments):
        """What a process of NVIDIA FLARE has taken out of TLS: its server's (which hands it on), or its job's."""
        program = Path(sys.argv[0])
        if program.parent.name == "server":
            keep({"server_train": "gate", "runner_process": "job"}[program.stem], bytes(arguments[1]))

    def passed_on(arguments):
        """What the gate has taken out of TLS and hands on to the SuperLink."""
        from dither.federation.flower.gate import _Line

        honest = _Line.ask

        async def ask(self, request, body):
            async def kept():
                parts = []
                async for part in body:
                    parts.append(part)
                    yield part
                keep("gate", b"".join(parts))

            return await honest(self, request, kept())

        if not getattr(honest, "tapped", False):
            ask.tapped = True
            _Line.ask = ask

    def answers(found):
        for _, body in found:
            if body is not None:
                keep("coordinator", body)

    return [
        ("dither.federation.flower.gate", "Gate.__enter__", "before", passed_on),
        (
            "dither.federation.flower.apps",
            "GridTransport.pull",
            "result",
            answers,
        ),
        ("nvflare.fuel.f3.connection", "Connection.process_frame", "before", frame),
        ("dither.federation.nvflare.apps", "AuxTransport.pull", "result", answers),
        (_SESSION, "ServerSession.open", "result", lambda words: keep("sum", pickle.dumps(words))),
        (
            "dither.federation.state",
            "PartyStore.save",
            "before",
            lambda arguments: hasattr(arguments[1], "row") and keep("row", pickle.dumps(arguments[1].row)),
        ),
    ]


class _Patch(importlib.abc.MetaPathFinder):
    """Runs what is wanted right after a module was imported."""

    def __init__(self, wanted):
        self._wanted = wanted
        self._busy = set()

    def find_spec(self, fullname, path, target=None):
        mine = [each for each in self._wanted if each[0] == fullname]
        if not mine or fullname in self._busy:
            return None
        self._busy.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        honest = spec.loader.exec_module

        def exec_module(module):
            honest(module)
            for _, name, when, call in mine:
                _wrap(module, name, when, call)

        spec.loader.exec_module = exec_module
        return spec


def _wrap(module, name, when, call):
    owner = module
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    honest = getattr(owner, last)

    def wrapped(*arguments, **more):
        if name == "Party._handle":
            _handled(arguments[1])
        if when == "before":
            call(arguments)
        result = honest(*arguments, **more)
        if when == "after":
            call((*arguments, result))
        if when == "result":
            call(result)
        return result

    setattr(owner, last, wrapped)


_wanted = []
if os.environ.get("DITHER_TEST_FAULTS"):
    # Whoever waits for uploads must know which round a node is in, also where no fault is wanted there.
    _wanted += [(_NODE, "Party._handle", "none", None), *_faults(Path(os.environ["DITHER_TEST_FAULTS"]))]
if os.environ.get("DITHER_TEST_TAPS"):
    _wanted += _taps(Path(os.environ["DITHER_TEST_TAPS"]))
if _wanted:
    sys.meta_path.insert(0, _Patch(_wanted))
