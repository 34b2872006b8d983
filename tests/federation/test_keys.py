"""Keys and certificates: one folder each, secrets for their owner alone, certificates that TLS accepts."""

import shutil
import socket
import ssl
import threading
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from typer.testing import CliRunner

from dither.cli import app
from dither.errors import ConfigError, DamagedFile, FederationError
from dither.experiment.folder import read_checked, write_checked
from dither.federation import keys
from tests.federation.parties import days_ago


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation") / "keys"
    keys.create(folder, ["ann", "bob"], hosts=["fed.example", "10.1.2.3"])
    return folder


def test_every_folder_holds_what_its_owner_needs(made):
    everywhere = (made / "server" / "federation.json").read_bytes()
    for name in ("ann", "bob"):
        own = made / "parties" / name
        assert sorted(path.name for path in own.iterdir()) == sorted(
            ["ca.pem", "federation.json", "identity.key", "node.key", "node.pub", "party.json"]
        )
        assert (own / "federation.json").read_bytes() == everywhere
        federation = keys.Keyring.load(own)
        assert federation.party(name).identity == keys.Identity.load(own).public
        assert keys.party_name(own) == name
    assert keys.Identity.load(made / "server").public == keys.Keyring.load(made / "server").server
    assert not list((made / "server").rglob("ca.key"))


def test_secrets_are_their_owners_alone(made):
    secret = list(made.rglob("*.key"))
    assert len(secret) == 7
    for path in secret:
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize(
    ("names", "reason"),
    [(["ann"], "at least 2"), (["ann", "ann"], "different"), (["ann", "../x"], "'../x'"), (["ann", ""], "''")],
)
def test_names_that_cannot_be_used(tmp_path, names, reason):
    with pytest.raises(ConfigError, match=reason):
        keys.create(tmp_path / "keys", names, hosts=["localhost"])


def test_a_folder_is_never_overwritten(made):
    with pytest.raises(ConfigError, match=r"not empty"):
        keys.create(made, ["ann", "bob"], hosts=["localhost"])


def test_unknown_party(made):
    with pytest.raises(FederationError, match=r"'eve' is not a party.*ann, bob"):
        keys.Keyring.load(made / "server").party("eve")


def handshake(server, ca, name):
    """A TLS handshake inside this process; raises what the client's side raises."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server / "server.pem", server / "server.key")
    ours, theirs = socket.socketpair()

    def serve():
        try:
            context.wrap_socket(theirs, server_side=True).close()
        except OSError:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        ssl.create_default_context(cafile=str(ca)).wrap_socket(ours, server_hostname=name).close()
    finally:
        ours.close()
        thread.join()


@pytest.mark.parametrize("name", ["fed.example", "10.1.2.3", "localhost", "127.0.0.1"])
def test_the_servers_certificate_is_good_for_its_names(made, name):
    handshake(made / "server", made / "parties" / "ann" / "ca.pem", name)


def test_another_name_another_ca_and_an_old_certificate_are_refused(made, tmp_path, monkeypatch):
    ca = made / "parties" / "ann" / "ca.pem"
    with pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for"):
        handshake(made / "server", ca, "evil.example")
    keys.create(tmp_path / "other", ["ann", "bob"], hosts=["fed.example"])
    with pytest.raises(
        ssl.SSLCertVerificationError, match=r"unable to get local issuer|certificate signature failure"
    ):
        handshake(tmp_path / "other" / "server", ca, "fed.example")
    with days_ago(monkeypatch, 30):
        keys.create(tmp_path / "old", ["ann", "bob"], hosts=["fed.example"], days=7)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"expired"):
        handshake(tmp_path / "old" / "server", tmp_path / "old" / "ca" / "ca.pem", "fed.example")
    keys.issue(tmp_path / "old", hosts=["fed.example"])  # what `renew` does; parties keep their folders
    handshake(tmp_path / "old" / "server", tmp_path / "old" / "parties" / "ann" / "ca.pem", "fed.example")


# Parties that make their own keys


@pytest.fixture
def joined(tmp_path):
    """A federation of ann and bob, who made their own keys; the organiser's folder, and theirs."""
    homes = {name: tmp_path / name for name in ("ann", "bob", "eve")}
    for name, home in homes.items():
        keys.request(home, name)
    requests = [keys.read_request(homes[name] / f"{name}.request.json") for name in ("ann", "bob")]
    keys.create_from(tmp_path / "fed", requests, hosts=["localhost"])
    for name in ("ann", "bob"):
        keys.accept(homes[name], keys.invitation_file(tmp_path / "fed", name))
    return tmp_path / "fed", homes


def test_the_organiser_sees_no_private_key_of_a_party(joined):
    folder, homes = joined
    secret = [path.read_bytes() for home in homes.values() for path in home.glob("*.key")]
    assert len(secret) == 6
    seen = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    seen += b"".join((home / f"{name}.request.json").read_bytes() for name, home in homes.items())
    assert not any(each.strip() in seen for each in secret)
    for name in ("ann", "bob"):
        keys.check_party(homes[name])
        assert keys.Keyring.load(homes[name]) == keys.Keyring.load(folder / "server")


def test_parties_are_added_and_revoked(joined):
    folder, homes = joined
    before = keys.Keyring.load(homes["ann"])
    keys.add(folder, keys.read_request(homes["eve"] / "eve.request.json"))
    after, known = keys.accept(homes["ann"], keys.invitation_file(folder, "ann"))
    assert known == before
    assert [party.name for party in after.parties] == ["ann", "bob", "eve"]
    assert after.id == before.id
    assert after.fingerprint != before.fingerprint
    with pytest.raises(ConfigError, match="belongs to this federation already"):
        keys.add(folder, keys.read_request(homes["eve"] / "eve.request.json"))
    old = keys.invitation_file(folder, "ann").rename(folder / "old.json")
    keys.revoke(folder, "bob")
    assert keys.revoked(folder / "server") == {"bob"}
    rest, _ = keys.accept(homes["ann"], keys.invitation_file(folder, "ann"))
    assert [party.name for party in rest.parties] == ["ann", "eve"]
    assert not (folder / "server" / "nodes" / "bob.pub").exists()
    with pytest.raises(FederationError, match="older than the list of members"):  # signed, and bob is in it
        keys.accept(homes["ann"], old)
    assert keys.Keyring.load(homes["ann"]) == rest
    with pytest.raises(ConfigError, match="at least 2"):
        keys.revoke(folder, "eve")


def test_the_fingerprint_covers_the_certificate_authorities(joined, tmp_path):
    """Whoever can change an invitation on its way could bring a CA of its own, and so read what travels by TLS.
    All keys of members are as they should be."""
    folder, homes = joined
    keys.create_from(tmp_path / "theirs", list(keys.Keyring.load(folder / "server").parties), hosts=["localhost"])
    (tmp_path / "theirs" / "ca").rename(folder / "ca-of-others")
    (folder / "ca").rename(folder / "ca-of-ours")
    (folder / "ca-of-others").rename(folder / "ca")
    keys.publish(folder, keys.Keyring.load(folder / "server"))
    for name in ("ca.pem", "federation.json"):
        (homes["ann"] / name).unlink()  # it accepts its first invitation
    forged, _ = keys.accept(homes["ann"], keys.invitation_file(folder, "ann"))
    honest = keys.Keyring.load(homes["bob"])
    assert (forged.id, forged.server, forged.parties) == (honest.id, honest.server, honest.parties)
    assert forged.fingerprint != honest.fingerprint


def test_two_lists_with_one_fingerprint_are_out_of_reach(joined):
    """An organiser who shows each party a list of its own looks for two lists that agree in what parties compare:
    of 128 bits, 2^64 hashes find them."""
    _, homes = joined
    shown = keys.Keyring.load(homes["ann"]).fingerprint
    assert 4 * len(shown.replace(" ", "")) >= 192


@pytest.mark.parametrize("name", ["eve\nfingerprint: 0000 0000\x1b[8m", "(server)", "../eve"])
def test_no_name_in_an_invitation_forges_what_is_shown(joined, monkeypatch, name):
    """The organiser signs it, and has every program of its own: what `accept` prints must still be the fingerprint
    of the list, which parties compare."""
    folder, homes = joined
    keyring = keys.add(folder, keys.read_request(homes["eve"] / "eve.request.json"))
    forged = replace(keyring, parties=(*keyring.parties[:2], replace(keyring.parties[2], name=name)))
    monkeypatch.setattr(keys, "_check_names", lambda names: None)  # the organiser's
    keys.publish(folder, forged)
    monkeypatch.undo()
    with pytest.raises(DamagedFile, match="is not an invitation"):
        keys.accept(homes["ann"], keys.invitation_file(folder, "ann"))


@pytest.mark.parametrize("kind", ["RSA", "a comment"])
def test_a_request_with_a_key_that_no_transport_takes(joined, kind):
    """Flower refused to start for everybody, with an error that named nobody."""
    _, homes = joined
    eve, identity = homes["eve"] / "eve.request.json", keys.Identity.load(homes["eve"])
    node_key = keys.read_request(eve).node_key + " comment"
    if kind == "RSA":
        node_key = keys._openssh(rsa.generate_private_key(65537, 2048))
    write_checked(eve, identity.signed(keys.PartyKeys("eve", identity.public, node_key).to_dict()))
    with pytest.raises(DamagedFile, match="is not a party's request"):
        keys.read_request(eve)


def test_a_revoked_name_is_not_given_again_where_its_certificate_is_still_good(joined):
    """NVIDIA FLARE knows sites by their names: who was revoked could take the place of the new party."""
    folder, homes = joined
    eve = keys.read_request(homes["eve"] / "eve.request.json")
    keys.add(folder, eve)
    keys.revoke(folder, "eve")
    shutil.copytree(folder, folder.with_name("flare"))
    (folder.with_name("flare") / "ca" / "nvflare").mkdir()
    shutil.copy(folder / "ca" / "ca.pem", folder.with_name("flare") / "ca" / "nvflare" / "rootCA.pem")
    with pytest.raises(ConfigError, match=r"'eve' was revoked, .* another name"):
        keys.add(folder.with_name("flare"), eve)
    assert keys.add(folder, eve).party("eve") == eve  # Flower knows nodes by their keys


def test_a_party_without_its_request_to_flare_is_not_let_in(joined, tmp_path):
    """It was, without a certificate. Then it belonged to the federation already and, once revoked, needed another
    name: there was no way to give it its certificate."""
    folder = tmp_path / "flare"
    shutil.copytree(joined[0], folder)
    (folder / "ca" / "nvflare").mkdir()
    shutil.copyfile(folder / "ca" / "ca.pem", folder / "ca" / "nvflare" / "rootCA.pem")
    keys.request(tmp_path / "fay", "fay")
    before = keys.Keyring.load(folder / "server")
    arguments = ["federation", "add", str(folder), str(tmp_path / "fay" / "fay.request.json")]
    said = CliRunner().invoke(app, arguments)
    assert "fay.request.zip" in str(said.exception or said.output)
    assert keys.Keyring.load(folder / "server") == before


def test_nobody_is_added_to_a_federation_over_flare_whose_keys_were_made_in_one_place(joined, tmp_path):
    """The new party could have no certificate, and the server waited for it; a revoked name was given again."""
    folder = tmp_path / "flare"
    shutil.copytree(joined[0], folder)
    (folder / "server" / "nvflare").mkdir()
    keys.request(tmp_path / "fay", "fay")
    before = keys.Keyring.load(folder / "server")
    arguments = ["federation", "add", str(folder), str(tmp_path / "fay" / "fay.request.json")]
    said = CliRunner().invoke(app, arguments)
    assert "init --request" in str(said.exception or said.output)
    assert keys.Keyring.load(folder / "server") == before


def test_a_party_brings_no_key_of_another(joined):
    """Whoever asked for a member's public key as its own kept the server from starting."""
    folder, homes = joined
    eve, identity = homes["eve"] / "eve.request.json", keys.Identity.load(homes["eve"])
    ann = keys.Keyring.load(folder / "server").party("ann")
    write_checked(eve, identity.signed(replace(ann, name="eve", identity=identity.public).to_dict()))
    with pytest.raises(ConfigError, match="'eve' has a key of 'ann'"):
        keys.add(folder, keys.read_request(eve))
    assert len(keys.Keyring.load(folder / "server").parties) == 2


def test_a_request_that_its_key_did_not_sign(joined):
    _, homes = joined
    path = homes["eve"] / "eve.request.json"
    saved = read_checked(path, "")
    write_checked(path, {**saved, "name": "ann"})
    with pytest.raises(DamagedFile, match="not signed with the key it names"):
        keys.read_request(path)


def test_invitations_that_are_refused(joined, tmp_path):
    folder, homes = joined
    path = keys.invitation_file(folder, "ann")
    saved = read_checked(path, "")
    keys.request(tmp_path / "mallory", "bob")
    mallory = keys.read_request(tmp_path / "mallory" / "bob.request.json").to_dict()
    members = [each if each["name"] == "ann" else mallory for each in saved["federation"]["parties"]]
    forged = {**saved, "federation": {**saved["federation"], "parties": members}}
    write_checked(tmp_path / "forged.json", forged)
    with pytest.raises(DamagedFile, match="not signed by the CA it brings"):
        keys.accept(homes["ann"], tmp_path / "forged.json")
    # Somebody with the CA's key: another key for bob, or another federation
    keys.publish(folder, keys.Keyring.from_dict(forged["federation"], path))
    with pytest.raises(FederationError, match="changes the keys of bob"):
        keys.accept(homes["ann"], path)
    parties = [keys.read_request(homes[name] / f"{name}.request.json") for name in ("ann", "bob")]
    keys.create_from(tmp_path / "other", parties, hosts=["localhost"])
    with pytest.raises(FederationError, match="a different CA"):
        keys.accept(homes["ann"], keys.invitation_file(tmp_path / "other", "ann"))
    with pytest.raises(FederationError, match="'eve' is not a party"):
        keys.accept(homes["eve"], path)
