"""Colours are legible in light and dark: contrast computed from the style sheet (WCAG 2.2, AA)."""

import re
from pathlib import Path

import pytest

import dither

SHEET = (Path(dither.__file__).parent / "web" / "static" / "style.css").read_text(encoding="utf-8")
# Text on what it stands on: 4.5 : 1.
TEXT = [
    *((ink, ground) for ink in ("ink", "muted") for ground in ("bg", "surface", "soft")),
    *((ink, "surface") for ink in ("accent", "claimed", "proven", "attacked", "good", "warn", "bad")),
    *((ink, ground) for ink in ("claimed", "proven", "attacked", "muted") for ground in ("soft", "run-bg")),
    ("accent-ink", "accent"),
    ("good", "good-bg"),
    ("warn", "warn-bg"),
    ("bad", "bad-bg"),
    ("ink", "warn-bg"),
    ("ink", "bad-bg"),
    ("accent", "bg"),
]
# Lines of charts, outlines of what has the focus: 3 : 1.
SHAPES = [*((f"s{number}", "surface") for number in range(1, 8)), ("focus", "surface"), ("focus", "bg")]


def themes():
    light = dict(re.findall(r"--([\w-]+): (#\w{6})", SHEET.partition("@media (prefers-color-scheme: dark)")[0]))
    dark = SHEET.partition("@media (prefers-color-scheme: dark)")[2].partition("\n}")[0]
    return {"light": light, "dark": {**light, **dict(re.findall(r"--([\w-]+): (#\w{6})", dark))}}


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, two):
    bright, dim = sorted((luminance(one), luminance(two)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def test_contrast_is_computed_as_it_is_defined():
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)  # the known limit of AA


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everything_can_be_read(theme):
    colours = themes()[theme]
    assert colours["bg"] != themes()[{"light": "dark", "dark": "light"}[theme]]["bg"]
    poor = {
        f"{ink} on {ground}": round(found, 2)
        for least, pairs in ((4.5, TEXT), (3.0, SHAPES))
        for ink, ground in pairs
        if (found := contrast(colours[ink], colours[ground])) < least
    }
    assert poor == {}
