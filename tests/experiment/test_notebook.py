"""The progress bar of a notebook, with a stand-in for its kernel."""

import sys
import types
from pathlib import Path

import pytest

from dither.experiment import train


class ZMQInteractiveShell:
    pass


@pytest.fixture
def shown(monkeypatch):
    """What the kernel is asked to show, newest last."""
    texts = []

    class Handle:
        def update(self, text):
            texts.append(text)

    def display(text, display_id):
        texts.append(text)
        return Handle()

    kernel = types.ModuleType("IPython")
    kernel.get_ipython = ZMQInteractiveShell
    screen = types.ModuleType("IPython.display")
    screen.HTML, screen.display = str, display
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "IPython.display", screen)
    return texts


def test_a_run_in_a_notebook_shows_its_rounds(shown, monkeypatch):
    def training(spec, values, options):
        monkeypatch.setattr("dither.experiment.build.planned_rounds", lambda _: 20)
        options.on_start(None, Path("run"), 0)
        options.on_evaluation({"round": 10, "test_accuracy": 0.75})

    monkeypatch.setattr(train, "_run", training)
    train.run("adult")
    assert shown == [
        '<progress value="0" max="20"></progress> round 0/20 ',
        '<progress value="10" max="20"></progress> round 10/20 test accuracy 0.7500',
    ]


def test_callbacks_of_the_caller_come_first(shown, monkeypatch):
    seen = []
    monkeypatch.setattr(train, "_run", lambda spec, values, options: options.on_evaluation({"round": 1}))
    train.run("adult", on_evaluation=seen.append)
    assert seen == [{"round": 1}]
    assert shown == []


def test_elsewhere_nothing_is_shown(monkeypatch):
    assert not train.in_notebook()
    options = []
    monkeypatch.setattr(train, "_run", lambda spec, values, given: options.append(given))
    train.run("adult")
    assert options[0].on_start is None
