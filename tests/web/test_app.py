"""The addresses: what they answer, what they refuse, and that no field of a run becomes markup."""

import asyncio
import json
import os
import re
import shutil
from importlib.resources import files

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient

from dither.experiment.folder import RunFolder, write_checked
from dither.web.app import PAGES, create_app
from dither.web.files import SafeFolder
from dither.web.guard import is_loopback, kept_token
from dither.web.index import RunIndex, Watcher
from tests.web.folders import make_run

EVIL = '<script>alert("x")</script><img src=x onerror=alert(1)>'


@pytest.fixture
def runs(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    make_run(tmp_path / "runs", "one")
    return tmp_path / "runs"


@pytest.fixture
def client(runs, tmp_path):
    return visitor(create_app(runs, reports_folder=tmp_path / "reports"))


def visitor(app, host="127.0.0.1"):
    return TestClient(app, base_url=f"http://{host}:8765", follow_redirects=False)


@pytest.mark.parametrize("path", PAGES)
def test_pages_forbid_outside_hosts_and_inline_scripts(client, path):
    answer = client.get(path)
    assert answer.status_code == 200
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|javascript:|https?://", answer.text)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert 'lang="en"' in answer.text


def test_a_run_tells_what_its_score_lies_between(client, runs):
    scores = {
        "records": 9,
        "model": {"accuracy": 0.7},
        "trivial": {"accuracy": 0.6},
        "trivial_predictor": "always 'a'",
    }
    make_run(runs, "scored", scores=scores, test_accuracy_without_noise=0.8, classes=["a", "b"])
    answer = client.get("/api/run", params={"id": "scored"}).json()
    assert answer["references"] == [{"name": "always 'a'", "value": 0.6}, {"name": "without noise", "value": 0.8}]
    assert client.get("/api/run", params={"id": "one"}).json()["references"] == []


def test_scripts_never_parse_html_and_name_no_other_host():
    for path in files("dither.web").joinpath("static").iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|\beval\(|new Function", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc", text), path.name


def test_plotly_comes_from_its_own_package(client):
    answer = client.get("/plotly.min.js")
    assert answer.status_code == 200
    assert len(answer.content) > 1_000_000
    assert answer.headers["content-type"].startswith("text/javascript")


def test_the_framework_own_pages_are_off(client):
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert client.get(path).status_code == 404


# Runs


def test_runs_and_one_run(client):
    (row,) = client.get("/api/runs").json()["rows"]
    assert row["state"] == "finished"
    assert "ledger" not in row
    run = client.get("/api/run", params={"id": "one"}).json()
    assert run["metrics"]["round"][-1] == 20
    assert run["bytes"] == 420 * 16
    assert run["claimed"]["conditions"] == [{"text": "it averages (C1)", "holds": False}]
    assert list(run["errata"]) == ["C1"]
    first = run["proven"][0]
    assert first["of_spec"]
    assert "factor of at most 2.72" in first["explanation"]
    assert [row["value"] for row in run["proven"]].count("inf") == 1
    assert {file["name"] for file in run["files"]} == {
        "spec.toml",
        "summary.json",
        "metrics.jsonl",
        "provenance.json",
    }


IDS = ["..", "../", "/etc", "one/..", "one/../../secret.txt", "./one", "one/", "", "%2e%2e", "one\0", "no-such"]


@pytest.mark.parametrize("run", IDS)
@pytest.mark.parametrize("address", ["/api/run", "/api/file", "/api/analysis", "/api/epsilon", "/api/bound"])
def test_an_id_that_is_no_run_is_not_found(client, address, run):
    answer = client.get(address, params={"id": run, "name": "spec.toml"})
    assert answer.status_code == 404
    assert "secret" not in answer.text


NAMES = [
    "../../secret.txt",
    "/etc/passwd",
    "..%2f..%2fsecret.txt",
    "checkpoints",
    "ledger-anchor.json",
    "",
    "spec.toml/",
]


@pytest.mark.parametrize("name", NAMES)
def test_only_the_files_of_a_run_can_be_downloaded(client, name):
    assert client.get("/api/file", params={"id": "one", "name": name}).status_code == 404


def test_downloads(client, runs):
    answer = client.get("/api/file", params={"id": "one", "name": "spec.toml"})
    assert answer.content == (runs / "one" / "spec.toml").read_bytes()
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["content-type"] == "application/octet-stream"


def test_a_link_out_of_a_run_is_no_file_of_it(client, runs, tmp_path):
    os.symlink(tmp_path / "secret.txt", runs / "one" / "model.safetensors")
    (runs / "one" / "summary.json").unlink()
    os.symlink(tmp_path / "secret.txt", runs / "one" / "summary.json")
    assert client.get("/api/file", params={"id": "one", "name": "model.safetensors"}).status_code == 404
    assert "secret" not in client.get("/api/run", params={"id": "one"}).text


@pytest.mark.parametrize(
    "path", ["/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static//etc/passwd"]
)
def test_static_files_are_those_of_the_page(client, path):
    assert client.get(path).status_code == 404


def test_fields_arrive_as_data_and_never_as_html(client, runs):
    make_run(
        runs, "evil" + EVIL.replace("/", "∕"), values={"data.column": EVIL}, notes=[EVIL], why=EVIL, stopped=EVIL
    )
    for path in PAGES:
        assert "onerror" not in client.get(path).text
    answer = client.get("/api/runs")
    assert answer.headers["content-type"].startswith("application/json")
    assert EVIL in [row["stopped"] for row in answer.json()["rows"]]


def test_a_method_file_named_by_a_run_is_never_executed(client, runs, tmp_path):
    trap = tmp_path / "trap.py"
    trap.write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\nOPTIONS = {{}}\ndef prepare(model, setting): ...\n")
    text = (runs / "one" / "spec.toml").read_text().replace('method = "cpfed"', f'method = "{trap}"')
    make_run(runs, "trap", spec_text=text)
    assert client.get("/api/run", params={"id": "trap"}).status_code == 200
    for address in ("/api/analysis", "/api/epsilon", "/api/bound"):
        answer = client.get(address, params={"id": "trap"})
        assert answer.status_code == 200  # a refusal, no error in the browser's console
        assert "does not execute" in answer.json()["refused"]
    assert not (tmp_path / "sprung").exists()


def test_a_table_named_by_a_run_is_never_opened(client, runs, tmp_path):
    (tmp_path / "people.csv").write_text("name,illness,label\nAnn,flu,1\n")
    make_run(
        runs, "own", values={"data.path": str(tmp_path / "people.csv"), "data.label": "nothing", "data.name": ""}
    )
    answer = client.get("/api/analysis", params={"id": "own"})
    assert "illness" not in answer.text
    assert "dither account" in answer.json()["refused"]


def test_the_user_may_let_it_open_tables_but_nothing_is_estimated_on_them(runs, tmp_path):
    rows = [f"{i % 7},{'ab'[i % 2]},{'xyz'[i % 3]}" for i in range(90)]
    (tmp_path / "people.csv").write_text("\n".join(["size,kind,home", *rows]) + "\n")
    own = {"data.path": str(tmp_path / "people.csv"), "data.label": "kind", "data.name": "", "num_clients": 0}
    own |= {"data.partition": "column", "data.column": "home", "cohort_size": 3, "batch_size": 4}
    make_run(runs, "own", values={**own, "sampling_rate": 0.2})
    client = visitor(create_app(runs, own_data=True))
    found = client.get("/api/analysis", params={"id": "own"}).json()
    assert found["clients"]["names"] == ["x", "y", "z"]
    assert found["epsilon"]["values"][-1] == pytest.approx(1.0, rel=0.01)
    assert "your own records" in client.get("/api/bound", params={"id": "own"}).json()["refused"]


@pytest.mark.parametrize("running", [True, False])
def test_what_only_a_federation_knows_is_not_guessed(client, runs, running):
    totals = {"id": "ab", "terms": "cd", "parties": {}, "excluded": {}, "aggregation": "off", "colluders": 0}
    totals |= {"most_missing": 0, "void_rounds": 0, "seconds_a_round": 1.0}
    folder = make_run(runs, "served", summary=not running, federation=totals)
    if running:
        (folder / "provenance.json").write_text(json.dumps({"run": "ab", "versions": {"north": {}}}))
    answer = client.get("/api/analysis", params={"id": "served"})
    assert "federation" in answer.json()["refused"]


@pytest.mark.parametrize("running", [True, False])
def test_of_rounds_made_twice_no_smaller_epsilon_is_shown(client, runs, running):
    again = {} if running else {"repeated_rounds": 2}
    folder = make_run(runs, "again", summary=not running, **again)
    if running:
        write_checked(folder / "digests.json", {"files": {}, "begun": []})
        RunFolder(folder).begin(0, 4)
        RunFolder(folder).begin(2, 8)
    for address in ("/api/analysis", "/api/epsilon"):
        assert "dither account" in client.get(address, params={"id": "again"}).json()["refused"]


def test_a_ledger_named_by_a_run_is_never_opened(runs, tmp_path):
    make_run(runs, "charged", ledger={"file": str(tmp_path / "theirs.sqlite"), "dataset": "abc"})
    app = create_app(runs, ledger=tmp_path / "ours.sqlite")
    found = {row["id"]: row for row in visitor(app).get("/api/runs").json()["rows"]}
    assert found["charged"]["budget"] is None
    assert not list(tmp_path.glob("*.sqlite*"))


def test_budget_left_by_the_page_own_ledger(runs, tmp_path):
    from dither.accounting.ledger.runs import EVERY_RECORD, Budget, Charge, Ledger, data_id

    book = Ledger(tmp_path / "ours.sqlite")
    dataset = data_id(book, name="adult")
    book.set_budget(dataset, Budget(3.0, 1e-5, "upload", "replace-one"))
    make_run(runs, "charged", ledger={"file": str(tmp_path / "ours.sqlite"), "dataset": dataset})
    found = {row["id"]: row for row in visitor(create_app(runs, ledger=book.path)).get("/api/runs").json()["rows"]}
    assert found["charged"]["budget"] == {"budget": 3.0, "spent": 0.0, "left": 3.0, "data": "this data set"}
    assert found["one"]["budget"] is None
    book.charge("ab-cd-seed:ef", dataset, [Charge(EVERY_RECORD, [])], rounds=(0, 1))
    found = {row["id"]: row for row in visitor(create_app(runs, ledger=book.path)).get("/api/runs").json()["rows"]}
    assert found["charged"]["budget"]["data"].startswith("this data set; not covered: noise from a seed")


def test_of_several_files_the_page_shows_the_budget_with_the_least_left(runs, tmp_path):
    """It showed none: the run's data set is a list, which no account is called."""
    from dither.accounting.ledger.runs import Budget, Ledger

    book = Ledger(tmp_path / "ours.sqlite")
    datasets = [f"{number:032x}" for number in range(20)]
    for number in (5, 11):
        book.set_budget(datasets[number], Budget(8.0 - number / 2, 1e-5))
    book.identify(datasets[11], file="south.csv", name="south")
    make_run(runs, "charged", ledger={"file": str(book.path), "dataset": ", ".join(datasets)})
    make_run(runs, "unlimited", ledger={"file": str(book.path), "dataset": ", ".join(datasets[:3])})
    found = {row["id"]: row for row in visitor(create_app(runs, ledger=book.path)).get("/api/runs").json()["rows"]}
    assert found["charged"]["budget"] == {"budget": 2.5, "spent": 0.0, "left": 2.5, "data": "south (south.csv)"}
    assert found["unlimited"]["budget"] is None


# Who may ask


@pytest.mark.parametrize(
    "host", ["evil.example", "192.168.1.7", "127.0.0.1.evil.example", "localhost.evil.example"]
)
def test_a_foreign_name_for_this_machine_is_refused(runs, host):
    assert visitor(create_app(runs), host).get("/api/runs").status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.8.8.8"])
def test_loopback_names_are_answered(runs, host):
    assert is_loopback(host)
    answer = visitor(create_app(runs), "localhost").get("/api/runs", headers={"host": f"{host}:8765"})
    assert answer.status_code == 200


def test_a_token_is_asked_for_and_becomes_a_cookie(runs):
    client = visitor(create_app(runs, token="right"), "workstation.example")
    for wrong in ("/", "/api/runs", "/static/dom.js", "/?token=wrong", "/?token=", "/api/runs?token=righ"):
        assert client.get(wrong).status_code == 401
    client.cookies.set("dither-web", "wrong")
    assert client.get("/api/runs").status_code == 401
    client.cookies.clear()
    welcome = client.get("/plan?a=1&token=right")
    assert (welcome.status_code, welcome.headers["location"]) == (303, "/plan?a=1")
    assert "HttpOnly" in welcome.headers["set-cookie"]
    assert "SameSite=strict" in welcome.headers["set-cookie"]
    assert client.get("/api/runs").status_code == 200
    again = client.get("//evil.example/?token=right")
    assert not again.headers.get("location", "/").startswith("//")


def test_the_token_of_this_machine_is_the_users_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("DITHER_STATE", str(tmp_path))
    token = kept_token()
    assert len(token) == 32
    assert kept_token() == token
    assert (tmp_path / "web" / "token").stat().st_mode & 0o777 == 0o600
    (tmp_path / "web" / "token").unlink()
    assert kept_token() != token


def test_nothing_can_be_changed(client):
    for path in ("/", "/api/runs", "/api/run?id=one", "/api/plan"):
        assert client.post(path).status_code == 405
        assert client.delete(path).status_code == 405


# Live


def test_a_run_that_grows_and_one_that_appears_are_told(tmp_path):
    make_run(tmp_path, "a", done=4, summary=False)
    index = RunIndex(SafeFolder(tmp_path))
    index.refresh()

    async def watch():
        events = Watcher(index, 0.02, lambda row: row).events()
        assert "hello" in await anext(events)
        with open(tmp_path / "a" / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"round": 6, "test_accuracy": 0.75}) + "\n")
        grown = await asyncio.wait_for(anext(events), 10)
        make_run(tmp_path, "b")
        born = await asyncio.wait_for(anext(events), 10)
        await events.aclose()
        return grown, born

    for event, run in zip(asyncio.run(watch()), ("a", "b"), strict=True):
        _, name, data, *_ = event.split("\n")
        assert name == "event: runs"
        (row,) = json.loads(data.removeprefix("data: "))["rows"]
        assert row["id"] == run
    assert index.row("a")["accuracy"] == 0.75


def test_what_another_page_saw_first_is_told_all_the_same(tmp_path):
    """A page that loads looks at the folder, too: what it finds is news to the pages that are open."""
    make_run(tmp_path, "a")
    make_run(tmp_path, "b")
    index = RunIndex(SafeFolder(tmp_path))
    index.refresh()
    before = index.position
    make_run(tmp_path, "c")
    shutil.rmtree(tmp_path / "b")
    index.refresh()  # another page's look

    async def first(since):
        events = Watcher(index, 0.02, lambda row: row).events(since)
        assert "hello" in await anext(events)
        told = await asyncio.wait_for(anext(events), 10)
        await events.aclose()
        return told.split("\n")

    mark, _, data, *_ = asyncio.run(first(before))
    told = json.loads(data.removeprefix("data: "))
    assert ([row["id"] for row in told["rows"]], told["removed"], told["all"]) == (["c"], ["b"], False)
    assert index.since(mark.removeprefix("id: ")) == (index.position, ([], []))
    assert index.since(f"{index.position}²")[1] is None
    data = asyncio.run(first("another-7"))[2]  # of a program that is gone
    told = json.loads(data.removeprefix("data: "))
    assert ({row["id"] for row in told["rows"]}, told["all"]) == ({"a", "c"}, True)


# Reports


def test_reports_are_listed_and_can_do_nothing(client, tmp_path):
    report = tmp_path / "reports" / "nbafl"
    report.mkdir(parents=True)
    (report / "report.html").write_text(f"<title>r</title>{EVIL}")
    (report / "report.json").write_text(
        json.dumps({"scale": "quick", "figures": [1, 2], "made": {"command": "dither reproduce"}})
    )
    (report / "notes.txt").write_text("not a page")
    os.symlink(tmp_path / "secret.txt", report / "link.html")
    (found,) = client.get("/api/reports").json()["reports"]
    assert (found["name"], found["scale"], found["figures"]) == ("nbafl/report.html", "quick", 2)
    page = client.get("/report/nbafl/report.html")
    assert page.status_code == 200
    assert page.headers["content-security-policy"].startswith("sandbox; default-src 'none'")
    for name in (
        "nbafl/notes.txt",
        "../secret.txt",
        "..%2fsecret.txt",
        "nbafl/link.html",
        "nbafl/../../secret.txt",
        "",
    ):
        assert client.get(f"/report/{name}").status_code == 404, name
