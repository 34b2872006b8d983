"""NVIDIA FLARE as transport, without its processes: questions and answers, who is there, what a site allows."""

import json
from contextlib import contextmanager

import pytest

pytest.importorskip("nvflare", reason="the extra 'nvflare' is not installed")

from nvflare.apis.shareable import Shareable

from dither.errors import ConfigError, FederationError
from dither.federation import keys
from dither.federation.nvflare import KIT, apps, kits


class Engine:
    """What the job process offers: handlers by topic, and what was sent."""

    def __init__(self):
        self.handlers, self.sent = {}, []

    def register_aux_message_handler(self, topic, handler):
        self.handlers[topic] = handler

    def multicast_aux_requests(self, topic, requests, timeout, context):
        assert timeout == 0.0  # nothing blocks
        keys = ("numbers",) if topic == apps._AGAIN else ("number", "body")
        self.sent.extend((site, *(request[key] for key in keys)) for site, request in requests.items())

    @contextmanager
    def new_context(self):
        yield None

    def tell(self, topic, site, **values):
        shareable = Shareable()
        shareable.update(values)
        self.handlers[topic](topic=topic, request=shareable, fl_ctx=Peer(site))


class Peer:
    def __init__(self, site):
        self.get_peer_context, self.get_identity_name = lambda: self, lambda: site


@pytest.fixture
def line(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(apps.time, "monotonic", lambda: now[0])
    engine = Engine()
    transport = apps.AuxTransport(engine, None)
    for site in ("ann", "bob"):
        engine.tell(apps._PRESENCE, site, mark="1", received=[])
    return engine, transport, now


def test_a_question_gets_its_answer_once(line):
    engine, transport, _ = line
    ids = transport.push({0: b"q0", 1: b"q1", 7: b"nobody"}, ttl=1.0)
    assert set(ids) == {0, 1}
    assert [(site, body) for site, _, body in engine.sent] == [("ann", b"q0"), ("bob", b"q1")]
    engine.tell(apps._ANSWER, "ann", number=ids[0], body=b"a0")
    engine.tell(apps._ANSWER, "ann", number=ids[0], body=b"again")
    engine.tell(apps._ANSWER, "bob", number="00" * 16, body=b"to no question")
    engine.tell(apps._ANSWER, "bob", number=ids[1], body=["no bytes"])
    assert transport.pull(list(ids.values())) == [(ids[0], b"a0")]
    assert transport.pull(list(ids.values())) == []
    engine.tell(apps._ANSWER, "bob", number=ids[1], body=None)  # the process behind the site died
    assert transport.pull(list(ids.values())) == [(ids[1], None)]


def test_no_site_can_stand_for_another(line, monkeypatch, tmp_path):
    """Sites can send each other messages. One that hands on a question of its own, a hello, which is for anyone,
    must not have the other's answer count as its own: the server would send it what is for the other."""
    engine, transport, _ = line
    (number,) = transport.push({1: b"hello, whoever you are"}, ttl=1.0).values()  # to bob, who asks ann
    engine.tell(apps._ANSWER, "ann", number=number, body=b"I am ann")
    engine.tell(apps._ANSWER, "nobody known", number=number, body=b"I am ann")
    assert transport.pull([number]) == []
    monkeypatch.setenv(apps.SOCKET, str(tmp_path / "nobody.sock"))
    site, flooded = apps.RelayExecutor(), Engine()
    flooded.register_aux_message_handler(apps._QUESTION, site._on_question)
    monkeypatch.setattr(apps, "_MOST_WAITING", 20_000)
    for count in range(100):
        flooded.tell(apps._QUESTION, "bob", number=str(count), body=b"x" * 976)
    assert site._questions.qsize() == len(site._received) == 10


def test_who_is_there(line):
    engine, transport, now = line
    assert transport.nodes() == {0: "1", 1: "1"}
    engine.tell(apps._PRESENCE, "bob", mark="", received=[])  # the site is there, `dither join` is not
    assert transport.nodes() == {0: "1"}
    now[0] += apps._SILENT_SECONDS + 1
    engine.tell(apps._PRESENCE, "bob", mark="2", received=[])
    assert transport.nodes() == {1: "2"}


def test_a_question_that_was_lost_on_the_way_is_given_back(line):
    engine, transport, now = line
    (number,) = transport.push({0: b"q"}, ttl=1.0).values()
    engine.tell(apps._PRESENCE, "ann", mark="1", received=[])
    assert transport.pull([number]) == []  # it may still be on its way
    now[0] += apps._LOST_SECONDS + 1
    engine.tell(apps._PRESENCE, "ann", mark="1", received=[number])
    engine.tell(apps._PRESENCE, "bob", mark="1", received=[])
    assert transport.pull([number]) == []  # ann has it
    engine.tell(apps._PRESENCE, "ann", mark="1", received=[])
    assert transport.pull([number]) == [(number, None)]


def test_an_answer_that_was_lost_on_the_way_is_asked_for_again(line, monkeypatch, tmp_path):
    engine, transport, _ = line
    (number,) = transport.push({0: b"q"}, ttl=1.0).values()
    engine.sent.clear()
    for listed in (["unknown", 3, ["x"]], "no list", None):
        engine.tell(apps._PRESENCE, "ann", mark="1", received=[number], answered=listed)
    engine.tell(apps._PRESENCE, "bob", mark="1", received=[], answered=[number])  # it is not bob's
    assert engine.sent == []
    engine.tell(apps._PRESENCE, "ann", mark="1", received=[number], answered=[number])
    assert engine.sent == [("ann", [number])]
    engine.tell(apps._ANSWER, "ann", number=number, body=b"a")
    engine.tell(apps._PRESENCE, "ann", mark="1", received=[number], answered=[number])
    assert len(engine.sent) == 1  # it has come
    monkeypatch.setenv(apps.SOCKET, str(tmp_path / "nobody.sock"))
    site, site_engine = apps.RelayExecutor(), Engine()
    site._engine = site_engine
    site._answers = {number: b"a", "newer": None}
    site_engine.register_aux_message_handler(apps._AGAIN, site._on_again)
    site_engine.tell(apps._AGAIN, "server", numbers=[number, "forgotten", 1])
    assert site_engine.sent == [("server", number, b"a")]


def test_a_kit_lets_the_server_run_one_class_and_read_nothing(tmp_path):
    keys.create(tmp_path / "fed", ["ann", "bob"], hosts=["localhost"])
    kits.provision(tmp_path / "fed", ["ann", "bob"], host="localhost", port=9440)
    kit = tmp_path / "fed" / "parties" / "ann" / KIT
    resources = json.loads((kit / "local" / "resources.json").read_text())
    assert resources["class_allow_list"] == ["dither.federation.nvflare.apps.RelayExecutor"]
    assert resources["class_list_enforcement_mode"] == "enforce"
    assert resources["allow_log_streaming"] is False
    assert not any("log" in each["path"].lower().split(".")[-1] for each in resources["components"])
    rights = json.loads((kit / "local" / "authorization.json").read_text())["permissions"]
    assert list(rights) == ["project_admin", "lead"]
    assert rights["lead"] == rights["project_admin"]
    assert {rights["project_admin"][each] for each in ("byoc", "shell_commands", "download_job")} == {"none"}
    client = json.loads((kit / "startup" / "fed_client.json").read_text())
    assert client["client"]["connection_security"] == "mtls"
    own = json.loads((kit / "local" / "comm_config.json").read_text())  # the port between its own processes
    assert own["internal"]["resources"] == {"host": "localhost", "connection_security": "mtls"}
    assert own["allow_adhoc_conns"] is False
    assert not any((tmp_path / "fed" / "parties").rglob("rootCA.key"))
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "fed").rglob("*.key"))


def _refused_as_a_server(folder, home, signed):
    """Nobody becomes the server of the others, or another party, by what a request asks for."""
    before = signed.read_bytes()
    server = {"name": "localhost", "type": "server", "fed_learn_port": 9440, "admin_port": 9440}
    for number, asked_for in enumerate((server, {"name": "ann", "type": "client"})):
        kits._make_request(home / f"{number}" / "request", asked_for, home / "bob.request.zip")
        with pytest.raises(FederationError, match="asks for more than a certificate for the site of 'bob'"):
            kits.approve(folder, "bob", home / "bob.request.zip", signed)
    assert signed.read_bytes() == before


@pytest.mark.slow
def test_a_kit_from_a_partys_own_key(tmp_path):
    """The organiser's folder never holds it, and a kit for another CA is refused."""
    home, folder = tmp_path / "ann", tmp_path / "fed"
    requests = [keys.request(tmp_path / name, name) for name in ("ann", "bob")]
    asked = kits.request(home, "ann")
    keyring = keys.create_from(folder, requests, hosts=["localhost"])
    kits.establish(folder, host="localhost", port=9440)
    keys.publish(folder, keyring)
    signed = tmp_path / "ann.signed.zip"
    kits.approve(folder, "ann", asked, signed)
    _refused_as_a_server(folder, tmp_path / "bob", signed)
    keys.accept(home, keys.invitation_file(folder, "ann"))
    with pytest.raises(FederationError, match="nvflare package"):
        kits.package(home, signed, "SHA256:" + ":".join(["00"] * 32))
    kits.package(home, signed, keys.Keyring.load(folder / "server").transport_ca)
    private = (home / KIT / "startup" / "client.key").read_bytes()
    assert not any(private in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert json.loads((home / KIT / "local" / "resources.json").read_text())["class_allow_list"] == [kits.EXECUTOR]
    assert set(json.loads((home / KIT / "local" / "authorization.json").read_text())["permissions"]) == set(
        kits._ROLES
    )
    assert (folder / "server" / KIT / "startup" / "server.key").is_file()


def test_a_name_that_flare_does_not_take(tmp_path):
    with pytest.raises(ConfigError, match=r"party name 'a.b': NVIDIA FLARE takes letters, digits"):
        kits.provision(tmp_path, ["a.b", "c"], host="localhost", port=9440)
