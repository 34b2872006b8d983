"""`dither web` from the outside, and its pages in a real browser (Debian's chromium, driven by Playwright).

Screenshots go to $DITHER_SCREENSHOTS, or to the test's own folder. Look at them.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from dither.spec import Spec
from tests.web.folders import make_run

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")

EVIL = '<script>window.sprung = 1</script><img src=x onerror="window.sprung = 1">'
DIGITS = {
    "data.name": "digits",
    "data.encoding": "minmax",
    "model.name": "softmax",
    "num_clients": 10,
    "cohort_size": 5,
    "batch_size": 16,
    "sampling_rate": 0.1,
    "num_rounds": 20,
    "eval_every": 2,
    "compare": False,
}


# The command


def start(*arguments):
    process = subprocess.Popen(
        [sys.executable, "-m", "dither", "web", *map(str, arguments), "--no-open"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = process.stdout.readline().strip()
    if "http://" not in line:
        pytest.fail(f"no address in {line!r}: {process.communicate(timeout=30)}")
    return process, line


def stop(process):
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in process.communicate(timeout=30)[1]
    assert process.returncode == 0


def fetch(address, **headers):
    for _ in range(100):
        try:
            with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except urllib.error.URLError:
            time.sleep(0.1)
    raise AssertionError(f"{address} does not answer")


def test_the_command_serves_this_machine_alone(tmp_path):
    make_run(tmp_path, "one")
    process, address = start(tmp_path, "--port", 0, "--quiet")
    try:
        page, token = re.fullmatch(r"(http://127\.0\.0\.1:\d+/)\?token=(\S{32})", address).groups()
        status, text = fetch(page + "api/runs", Cookie=f"dither-web={token}")
        assert status == 200
        assert [row["id"] for row in json.loads(text)["rows"]] == ["one"]
        assert fetch(page + "api/runs")[0] == 401  # another user of this machine, a web site
    finally:
        stop(process)
    process, address = start(tmp_path, "--port", 0, "--quiet")
    stop(process)
    assert address.endswith(f"?token={token}")  # an open page goes on


def test_another_address_asks_for_a_token_of_its_own(tmp_path):
    process, line = start(tmp_path, "--port", 0, "--host", "0.0.0.0", "--json")
    try:
        told = json.loads(line)
        port, token = re.search(r":(\d+)/\?token=(\S{32})$", told["address"]).groups()
        assert (told["event"], told["token"]) == ("serving", token)
        assert fetch(f"http://127.0.0.1:{port}/api/runs")[0] == 401
        assert fetch(f"http://127.0.0.1:{port}/api/runs", Cookie=f"dither-web={token}")[0] == 200
    finally:
        stop(process)


def test_a_folder_that_is_not_there_is_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "dither", "web", str(tmp_path / "none"), "--no-open"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: no folder")


# The browser


@pytest.fixture(scope="module")  # Playwright keeps an event loop open: not beyond these tests
def browser():
    sync = pytest.importorskip("playwright.sync_api", reason="pip install 'dither[browser]'")
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium on this machine (apt-get install chromium, or set $CHROMIUM)")
    with sync.sync_playwright() as play:
        made = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made
        made.close()


class Serving:
    """The page served from a thread, on a free port."""

    def __init__(self, folder, reports):
        from dither.web.app import create_app

        app = create_app(folder, reports_folder=reports, poll_seconds=0.2)
        config = uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.02)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"

    def close(self):
        self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    import dither
    from dither.auditing import report
    from dither.experiment.folder import RunFolder

    root = tmp_path_factory.mktemp("page")
    runs, reports = root / "runs", root / "reports" / "quick"
    for seed in (0, 1):
        dither.run("adult", values={**DIGITS, "seed": seed}, out=runs / f"digits-seed{seed}")
    dither.run("adult", values={**DIGITS, "privacy.epsilon": 8.0}, out=runs / "digits-loud")
    spec = RunFolder.open(runs / "digits-loud").spec()
    report.save(dither.audit(spec, views=("upload",), trials=300, rounds=1), runs / "digits-loud")
    make_run(runs, f"evil {EVIL.replace('/', '∕')}", notes=[EVIL], why=EVIL, stopped=EVIL)
    make_run(runs, "broken", spec_text="method = [")
    reports.mkdir(parents=True)
    page = "<!doctype html><title>r</title><style>h1 { color: teal }</style><h1>Figures</h1>"
    (reports / "trap.html").write_text(f"{page}<script>document.title = 'ran'</script>")
    (reports / "report.html").write_text(page)
    serving = Serving(runs, root / "reports")
    serving.runs = runs
    yield serving
    serving.close()


@pytest.fixture
def shots(tmp_path):
    folder = Path(os.environ.get("DITHER_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Visit:
    """A page that must not complain and must not ask another host."""

    def __init__(self, browser, served, **context):
        settings = {"viewport": {"width": 1360, "height": 900}, **context}
        self.context = browser.new_context(**settings)
        self.page, self.complaints, self.served = self.context.new_page(), [], served
        self.page.on("console", lambda m: m.type in ("error", "warning") and self.complaints.append(m.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._own_host)

    def _own_host(self, request):
        if not request.url.startswith((self.served.address, "data:", "blob:")):
            self.complaints.append(f"asked {request.url}")

    def open(self, path):
        self.page.goto(self.served.address + path)
        self.page.wait_for_selector("h1")
        return self.page

    def finish(self, shot=None):
        if shot is not None:
            self.page.wait_for_timeout(300)
            self.page.screenshot(path=str(shot), full_page=True)
        wide = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        self.context.close()
        assert self.complaints == []
        assert wide <= 0, f"the page is {wide} px wider than the window"


def until(page, condition, seconds=60):
    """Wait until an expression holds. (Playwright's own way needs eval, which the page's policy forbids.)"""
    end = time.time() + seconds
    while not page.evaluate(condition):
        assert time.time() < end, f"never: {condition}"
        page.wait_for_timeout(50)


@pytest.fixture
def visit(browser, served):
    return lambda **context: Visit(browser, served, **context)


READY = {
    "/": "tr[data-run=digits-loud]",
    "/run?id=digits-loud": "[data-ready=yes]",
    "/run?id=broken": ".chip.broken",
    "/plan": ".chart.tall[data-drawn]",
    "/noise": "[data-upload]",
    "/reports": "iframe.report",
}
LOOKS = {
    "light": {},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("path", READY)
def test_every_page_renders_without_a_complaint(visit, shots, path, look):
    one = visit(**LOOKS[look])
    one.open(path).wait_for_selector(READY[path], timeout=120_000)
    name = re.sub(r"\W+", "-", path).strip("-") or "runs"
    one.finish(shots / f"{name}-{look}.png")


# What a screen reader and a keyboard need, on any page.
TROUBLE = """() => {
  const found = [];
  const all = (query) => [...document.querySelectorAll(query)];
  const named = (e) => e.labels?.length || e.getAttribute("aria-label") || e.innerText?.trim() || e.title;
  for (const e of all("input, select, button, a, iframe, meter, progress")) if (!named(e)) found.push(`no name: ${e.outerHTML.slice(0, 80)}`);
  for (const e of all("img")) if (!e.hasAttribute("alt")) found.push(`no alt: ${e.outerHTML.slice(0, 80)}`);
  for (const e of all("svg.spark, .chart")) if (e.getAttribute("role") !== "img" || !e.getAttribute("aria-label")) found.push("a picture without a name");
  for (const e of all("th")) if (!e.scope) found.push(`th without scope: ${e.innerText}`);
  for (const e of all("table")) if (!e.caption) found.push("a table without a caption");
  const levels = all("h1, h2, h3, h4").map((e) => Number(e.tagName[1]));
  if (levels.filter((level) => level === 1).length !== 1) found.push("not one h1");
  levels.forEach((level, i) => { if (i && level > levels[i - 1] + 1) found.push(`h${levels[i - 1]} then h${level}`); });
  const ids = all("[id]").map((e) => e.id).filter((id) => !/^(defs|topdefs|clip|legend|g|plotly|modebar)/.test(id));
  ids.forEach((id, i) => { if (ids.indexOf(id) !== i) found.push(`id twice: ${id}`); });
  for (const query of ["header", "nav[aria-label]", "main", "footer", "html[lang]"]) if (!document.querySelector(query)) found.push(`no ${query}`);
  for (const e of all("[tabindex]")) if (Number(e.getAttribute("tabindex")) > 0) found.push("an order of its own");
  return found;
}"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize("path", READY)
def test_names_roles_headings_and_the_keyboard(visit, path):
    one = visit()
    page = one.open(path)
    page.wait_for_selector(READY[path], timeout=120_000)
    assert page.evaluate(TROUBLE) == []
    # Tab leads through every control and link that can be seen, from the skip link on.
    seen = "e => e.checkVisibility() && !e.disabled && !e.closest('iframe')"
    wanted = page.evaluate(
        f"() => [...document.querySelectorAll('a, button, input, select, summary')].filter({seen}).length"
    )
    page.evaluate("document.activeElement.blur(); window.reached = new Set()")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.innerText") == "Skip to content"
    for _ in range(wanted + 40):
        page.evaluate("() => { window.reached.add(document.activeElement) }")
        page.keyboard.press("Tab")
    count = "[...window.reached].filter(e => e.matches('a, button, input, select, summary')).length"
    radios = page.evaluate("document.querySelectorAll('input[type=radio]:not(:checked)').length")  # by arrows
    assert page.evaluate(count) == wanted - radios
    one.finish()


@pytest.mark.slow
def test_the_attacked_epsilon_and_the_bound_with_its_terms(visit, shots):
    one = visit()
    page = one.open("/run?id=digits-loud")
    page.wait_for_selector("[data-ready=yes]", timeout=120_000)
    assert "≥" in page.inner_text(".tile .attacked")
    assert "confidence" in page.inner_text("tr:has(th.attacked)")
    assert page.query_selector("a[download]:text('audit.json')")
    page.click("text=Compute the bound")
    page.wait_for_selector("section:has(h2:text('Convergence')) [data-ready=yes]", timeout=240_000)
    chart = "document.querySelector('[aria-label^=\"The paper\\'s convergence bound\"]')"
    page.check("input[type=radio][value=stacked]")
    until(page, f"{chart}.data.filter(t => t.stackgroup === 'terms').length >= 2")
    assert page.evaluate(f"{chart}.data.some(t => t.name === 'measured')")
    page.locator("section:has(h2:text('Convergence'))").screenshot(path=str(shots / "bound-stacked.png"))
    page.check("input[type=radio][value=log]")
    until(page, f"{chart}.data.some(t => t.name === 'bound (sum of the terms)')")
    page.locator("section:has(h2:text('Convergence'))").screenshot(path=str(shots / "bound-log.png"))
    with page.expect_download() as waiting:
        page.click("a[download]:text('spec.toml')")
    assert "method" in waiting.value.path().read_text()
    one.finish()


# When the first and the thousandth row are drawn: two frames after they are in the document.
CLOCK = """
const waited = [1, 1000];
new MutationObserver(() => {
  while (waited.length && document.querySelectorAll("tr[data-run]").length >= waited[0]) {
    waited.shift();
    requestAnimationFrame(() => requestAnimationFrame(() => { (window.times ??= []).push(performance.now()); }));
  }
}).observe(document, { subtree: true, childList: true });
"""


@pytest.mark.slow
def test_a_thousand_runs_are_all_there(browser, tmp_path, capsys):
    first = make_run(tmp_path / "runs", "run-0000", rounds=100)
    for number in range(1, 1000):
        shutil.copytree(first, tmp_path / "runs" / f"run-{number:04}")
    serving = Serving(tmp_path / "runs", tmp_path / "reports")
    try:
        fetch(f"{serving.address}/api/runs")  # what `dither web` does before it opens the browser
        times = []
        for _ in range(3):
            one = Visit(browser, serving)
            one.page.add_init_script(CLOCK)
            one.page.goto(serving.address)
            until(one.page, "window.times?.length === 2")
            times.append(one.page.evaluate("window.times"))
            assert one.page.inner_text("text=1000 runs") == "1000 runs"
            one.finish()
    finally:
        serving.close()
    first, last = (min(each[which] for each in times) / 1000 for which in (0, 1))
    with capsys.disabled():
        print(f" [1,000 runs in the browser: shown after {first:.2f} s, the last row after {last:.2f} s] ", end="")


@pytest.mark.slow
def test_names_and_notes_are_shown_as_text_and_never_executed(visit, served):
    one = visit()
    page = one.open("/")
    page.wait_for_selector("tr[data-run^=evil]")
    assert "<script>" in page.inner_text("tr[data-run^=evil] .name")
    page.click("tr[data-run^=evil] a")
    page.wait_for_selector("section.card li")
    assert "onerror=" in page.inner_text("main")
    page.go_back()
    page.check("tr[data-run^=evil] input")
    page.click("button.primary")
    page.wait_for_selector("[data-ready=round]")
    assert page.evaluate("window.sprung") is None
    assert page.query_selector("main img, main script") is None
    one.finish()


@pytest.mark.slow
def test_a_running_job_updates_without_reload(visit, served, shots):
    folder = make_run(served.runs, "live", rounds=40, done=6, summary=False)
    one = visit()
    page = one.open("/")
    page.wait_for_selector("tr[data-run=live] .chip.running")
    page.wait_for_selector(".live.on")
    page.evaluate("window.same = true")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"round": 8, "test_accuracy": 0.8642, "loss": 0.3, "seconds": 1.0}) + "\n")
    until(page, "document.querySelector('tr[data-run=live]').innerText.includes('0.8642')")
    make_run(served.runs, "newborn", rounds=4)
    page.wait_for_selector("tr[data-run=newborn]", timeout=10_000)
    assert page.evaluate("window.same")
    page.screenshot(path=str(shots / "live.png"))
    page.goto(f"{served.address}/run?id=live")
    page.wait_for_selector(".chip.running")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"round": 10, "test_accuracy": 0.8751, "loss": 0.3, "seconds": 1.2}) + "\n")
    until(page, "document.querySelector('.tiles').innerText.includes('0.8751')")
    for name in ("live", "newborn"):
        shutil.rmtree(served.runs / name)
    one.finish()


@pytest.mark.slow
def test_compare_against_rounds_epsilon_and_bytes(visit, shots):
    one = visit()
    page = one.open("/")
    for run in ("digits-seed0", "digits-seed1", "digits-loud"):
        page.check(f"tr[data-run={run}] input")
    page.click("text=Compare >> nth=0")
    seen = {}
    for axis in ("round", "epsilon", "bytes"):
        page.check(f"input[name=axis][value={axis}]")
        page.wait_for_selector(f"[data-ready={axis}]", timeout=120_000)
        traces = page.evaluate(
            "document.querySelector('.chart').data.map(t => ({x: Array.from(t.x), band: t.fill === 'toself'}))"
        )
        seen[axis] = [trace for trace in traces if not trace["band"]]
        assert sum(trace["band"] for trace in traces) == 1  # two seeds of one spec
        assert len(seen[axis]) == 2
    assert seen["round"][0]["x"][-1] == 20
    largest = sorted(trace["x"][-1] for trace in seen["epsilon"])
    assert largest == pytest.approx([1.0, 8.0], rel=0.02)
    assert seen["bytes"][0]["x"][-1] == pytest.approx(20 * 5 * 2600, rel=0.01)
    page.screenshot(path=str(shots / "compare.png"))
    one.finish()


@pytest.mark.slow
def test_filters_sort_and_keyboard(visit):
    one = visit()
    page = one.open("/")
    page.fill("input[type=search]", "seed1")
    until(page, "document.querySelectorAll('tr[data-run]').length === 1")
    page.fill("input[type=search]", "")
    page.click("th button:text('Run')")
    names = page.eval_on_selector_all("tr[data-run]", "rows => rows.map(row => row.dataset.run)")
    assert names == sorted(names)
    assert page.get_attribute("th[aria-sort=ascending] button", "type") is None
    page.focus("tr[data-run=digits-loud] input")
    page.keyboard.press("Space")
    assert page.is_checked("tr[data-run=digits-loud] input")
    page.focus("button.primary")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-ready=round]")
    unnamed = page.eval_on_selector_all(
        "input, select, button, a",
        "all => all.filter(e => !(e.labels?.length || e.getAttribute('aria-label') || e.innerText.trim())).length",
    )
    assert unnamed == 0
    one.finish()


@pytest.mark.slow
def test_sliders_change_the_plan_and_its_curve(visit, shots):
    one = visit(permissions=["clipboard-read", "clipboard-write"])
    page = one.open("/plan")
    page.wait_for_selector(".chart[data-drawn]", timeout=120_000)
    before = float(page.get_attribute("[data-multiplier]", "data-multiplier"))
    drawn = page.evaluate("Array.from(document.querySelector('.chart').data[0].y)")
    spec = page.inner_text("pre")
    page.focus("#epsilon-slider")
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    until(page, f"Number(document.querySelector('[data-multiplier]').dataset.multiplier) < {0.8 * before}")
    until(page, f"document.querySelector('.chart').data[0].y[0] !== {drawn[0]}")
    assert page.inner_text("pre") != spec
    page.select_option("#method", "nbafl")
    until(page, "document.querySelector('pre').innerText.includes('method = \"nbafl\"')")
    assert page.input_value("#adjacency") == "zero-out"  # every method has a proof under it
    page.click("text=Copy spec")
    until(page, "[...document.querySelectorAll('button')].some(b => b.innerText === 'Copied')")
    copied = Spec.from_toml(page.evaluate("navigator.clipboard.readText()"))
    assert (copied.method, copied.privacy.noise) == ("nbafl", "proven")
    page.wait_for_timeout(2500)
    page.screenshot(path=str(shots / "plan-nbafl.png"), full_page=True)
    one.finish()


@pytest.mark.slow
def test_a_report_runs_no_script(visit):
    one = visit()
    page = one.open("/reports?name=quick%2Ftrap.html")
    frame = page.wait_for_selector("iframe.report").content_frame()
    frame.wait_for_selector("h1")
    assert frame.inner_text("h1") == "Figures"
    assert frame.title() == "r"
    assert all("sandbox" in text or "Content Security" in text for text in one.complaints)  # it was blocked
    one.complaints.clear()
    one.finish()
