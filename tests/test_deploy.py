"""deploy/constraints.txt: the image installs what pyproject.toml asks for, each package by its hashes alone."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def test_the_image_gets_what_the_project_asks_for():
    text = (ROOT / "deploy" / "constraints.txt").read_text()
    assert "://" not in text  # no index's address
    assert "--index" not in text
    entries = re.split(r"\n(?=\S)", text.strip())
    assert all("--hash=sha256:" in entry for entry in entries)
    listed = dict(re.match(r"([\w.-]+)==([\w.+!-]+)", entry).groups() for entry in entries)
    versions = {canonicalize_name(name): version for name, version in listed.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(text) for text in (*project["dependencies"], *extras["deploy"], *extras["nvflare"])]
    for each in wanted:
        assert versions[canonicalize_name(each.name)] in each.specifier, each
