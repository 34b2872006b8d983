"""What the documentation names exists: dotted names, files, headings, spec keys, presets, commands."""

import importlib
import re
import shlex
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from dither import spec
from dither.experiment.check import Steps

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

# `dither.methods.local.train`, also inside a longer expression; not the file names dither.toml or dither/papers
DOTTED = re.compile(r"(?<![\w/.-])dither(?:\.[A-Za-z_]\w*)+(?![\w/]|\.\w)")
IMPORT = re.compile(r"from (dither[\w.]*) import ([\w, ]+)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SETTING = re.compile(r"--set[ =]([\w.]+)=")
KEY = re.compile(
    r"`((?:data|model|privacy|secagg|federation|method_options)\.(?!npz|json|py`|safetensors)\w+)(?: ?=[^`]*)?`"
)
RUN = re.compile(r"\bdither (run|account|presets) +([\w./-]+)")


def text_of(page):
    return page.read_text(encoding="utf-8")


def options():
    return {key for entry in spec.METHODS.values() for key in entry.options}


def is_key(key):
    head, _, rest = key.partition(".")
    own = key.startswith("model.options.")  # whatever a factory takes
    return key in spec.all_keys() or own or (head == "method_options" and rest in options())


def resolve(name):
    """The object of a dotted name: the longest module prefix is imported, the rest looked up."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        where = ".".join(parts[:length])
        try:
            found = importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name and not (where == error.name or where.startswith(error.name + ".")):
                raise
            continue
        for attribute in parts[length:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(name)


def is_module(name):
    try:
        importlib.import_module(f"dither.{name}")
    except ModuleNotFoundError:
        return False
    return True


def anchors(page):
    """The heading anchors of a page, as hosting sites form them."""
    without_code = FENCE.sub("", text_of(page))
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", without_code, re.MULTILINE)
    }


def is_spec(values):
    return "columns" not in values and ("method" in values or "privacy" in values or "data" in values)


@PAGE
def test_dotted_names_resolve(page):
    missing = []
    text = text_of(page)
    imported = {
        f"{module}.{name.split(' as ')[0].strip()}"
        for module, names in IMPORT.findall(text)
        for name in names.split(",")
    }
    for name in sorted(imported | set(DOTTED.findall(text))):
        try:
            resolve(name)
        except (AttributeError, ModuleNotFoundError):
            missing.append(name)
    assert not missing


@PAGE
def test_links_lead_somewhere(page):
    broken = []
    for target in LINK.findall(FENCE.sub("", text_of(page))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert not broken


@PAGE
def test_spec_keys_exist(page):
    text = text_of(page)
    # `privacy.clipping` is a room of the house, `federation.toml` a file
    inline = {key for key in KEY.findall(text) if not is_module(key) and not key.endswith(".toml")}
    described = {entry.name for entry in fields(Steps)} if page.name == "check.md" else set()  # not of a spec
    assert (
        sorted(key for key in inline | set(SETTING.findall(text)) if not is_key(key) and key not in described)
        == []
    )


@PAGE
def test_toml_examples_are_valid(page):
    for language, block in FENCE.findall(text_of(page)):
        if language == "toml":
            values = tomllib.loads(block)
            if is_spec(values):
                spec.Spec.from_toml(block, where=str(page))


@PAGE
def test_settings_in_commands_are_accepted(page):
    """Commands that start from a preset make a valid spec with all their --set."""
    blocks = [block for language, block in FENCE.findall(text_of(page)) if language in ("", "sh", "console")]
    for line in "\n".join(blocks).splitlines():
        found = RUN.search(line)
        if not found or found[1] == "presets" or found[2] not in spec.preset_names():
            continue
        words = shlex.split(line[found.start() :], comments=True)
        given = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        spec.Spec.from_preset(found[2]).with_values(dict(spec.parse_setting(each) for each in given))


@PAGE
def test_presets_exist(page):
    """What `dither run` or `dither account` is given: a preset, a file of the reader's or a placeholder."""
    fenced = "\n".join(block for _, block in FENCE.findall(text_of(page)))
    inline = "\n".join(re.findall(r"`([^`\n]+)`", FENCE.sub("", text_of(page))))
    own = {"hospital", "RUN", "PRESET", "my-run"}  # run folders of the examples
    unknown = {
        name
        for _, name in RUN.findall(fenced + "\n" + inline)
        if name not in spec.preset_names()
        and name not in own
        and not name.startswith("-")
        and not name.endswith((".toml", ".csv"))
        and "/" not in name
    }
    assert unknown == set()


def test_every_paper_has_a_page_and_the_index_names_it():
    pages = {page.stem for page in (ROOT / "docs" / "papers").glob("*.md")}
    assert pages >= {"secure-fedavg", "nbafl", "dp-scaffold", "cpfed", "concentrated"}
    assert pages <= set(spec.METHODS)
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(text_of(index))}
    unlinked = [page for page in PAGES if page.parent != ROOT and page not in (index, *linked)]
    assert unlinked == [], "docs/index.md is the table of contents: name these pages there"


def test_the_checks_see_what_is_wrong():
    with pytest.raises(AttributeError):
        resolve("dither.methods.cpfed.no_such_formula")
    assert resolve("dither.spec.Spec.from_preset")
    assert not is_key("privacy.epsilom")
    assert not is_key("method_options.no_such_option")
    assert is_key("privacy.epsilon")
    assert is_key("method_options.param_clip")
    assert DOTTED.findall("`dither.types.Release`, dither.toml/x and src/dither/types.py") == [
        "dither.types.Release"
    ]
    assert RUN.findall("$ dither run cpfed --set a=1") == [("run", "cpfed")]


@PAGE
def test_a_paragraph_is_not_cut_by_a_comment_and_a_list_begins_after_an_empty_line(page):
    """Else browsers show the text after the comment as a paragraph of its own, and the list as text."""
    before = ""
    for line in FENCE.sub("", text_of(page)).split("\n"):
        text = re.match(r"( {4})?(?![-*#|><]|\d+\. )\S", before)
        assert not (text and line.startswith(("<!--", "- "))), f"after {before!r}"
        before = line
