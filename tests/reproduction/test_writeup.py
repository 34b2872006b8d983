"""docs/reproduction.md says what results/report.json says."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_write_up_agrees_with_the_results():
    spec = importlib.util.spec_from_file_location("fill_reproduction", ROOT / "tools" / "fill_reproduction.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    report = json.loads(tool.REPORT.read_text(encoding="utf-8"))
    page = tool.PAGE.read_text(encoding="utf-8")
    assert page.count("<!--/-->") > 30
    assert tool.filled(page, report) == page, "run python tools/fill_reproduction.py"
    changed = json.loads(json.dumps(report))
    changed["figures"][0]["claims"][0]["printed"]["status"] = "not judged"
    assert tool.filled(page, changed) != page
