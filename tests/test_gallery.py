"""The examples of docs/gallery.md run, and print what the page stores, whatever the digits."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def load():
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "tools" / "gallery.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shape(text):
    """The words of an output: digits, ids, rules and spaces vary with noise, time and width."""
    return re.findall(r"[^\W\d_]{3,}", re.sub(r"\b[0-9a-f]{8}\b", "", text))


def test_every_example_stores_its_output():
    found = load().examples()
    assert len(found) >= 6
    assert all(output.strip() for _, output in found)


@pytest.mark.slow
def test_the_examples_run(tmp_path):
    gallery = load()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for commands, stored in gallery.examples():
        assert shape(gallery.run(commands, tmp_path)) == shape(stored), commands
