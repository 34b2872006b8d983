"""The keys of a federation: a certificate authority, a server certificate, and two keys a party.

    DIR/
      ca/            ca.key, ca.pem                         keep offline once everything is made
      server/        ca.pem, server.key, server.pem, identity.key, federation.json, nodes/NAME.pub
      invitations/   NAME.json                              public: members, ca.pem, signature
      parties/NAME/  ca.pem, node.key, node.pub, identity.key, federation.json, party.json

TLS: the parties know the server by its certificate, which must come from this CA. Transport: the server knows a
party by its node key (ECDSA P-256, one of the curves that Flower takes). Messages: every message is signed by the
sender's identity key (Ed25519), and `federation.json`, the same in all folders, lists all of them: so a server
cannot add parties that the others do not know, and no party can speak for another. The same identity signs in
secure aggregation.

Each party creates its own keys (`request`) and sends the public ones. The list of members comes back as an
invitation signed with the CA's key (`accept`), also when parties are added or revoked. `create` creates
everybody's keys in one place, for demonstrations: the person who runs it holds every private key.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dither.errors import ConfigError, DamagedFile, FederationError, ProtocolAbort
from dither.experiment.folder import read_checked, write_bytes, write_checked, write_text
from dither.secagg import primitives

FORMAT = 1
_ADVICE = (
    "restore this file from a backup; without one, delete federation.json and accept the invitation again "
    "(`dither federation accept`) or, where a private key is lost, make new ones (`dither federation request`)"
)
_T = TypeVar("_T")
CA_DAYS = 3650
SERVER_DAYS = 825
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True)
class PartyKeys:
    """A party as everybody knows it."""

    name: str
    identity: bytes  # Ed25519 public key
    node_key: str  # OpenSSH public key of its transport

    def to_dict(self) -> dict[str, str]:
        return {**vars(self), "identity": self.identity.hex()}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> PartyKeys:
        return cls(str(saved["name"]), bytes.fromhex(saved["identity"]), str(saved["node_key"]))


@dataclass(frozen=True)
class Keyring:
    """federation.json: who belongs to it."""

    id: str
    server: bytes  # Ed25519 public key of the server
    parties: tuple[PartyKeys, ...]
    serial: int = 0  # how often parties were added or revoked
    ca: str = ""  # fingerprints of the CA, and of the transport's own (NVIDIA FLARE); empty without one
    transport_ca: str = ""

    def party(self, name: str) -> PartyKeys:
        for party in self.parties:
            if party.name == name:
                return party
        names = ", ".join(party.name for party in self.parties)
        raise FederationError(f"{name!r} is not a party of this federation; known: {names}")

    def to_dict(self) -> dict[str, Any]:
        parties = [party.to_dict() for party in self.parties]
        return {**vars(self), "format": FORMAT, "server": self.server.hex(), "parties": parties}

    @property
    def fingerprint(self) -> str:
        """For people to compare over the telephone: who belongs to the federation, with which keys, and who
        certifies its server."""
        # 192 bits: an organiser who wants two lists with one fingerprint must try 2^96, not 2^64.
        digest = hashlib.sha256(canonical(self.to_dict())).hexdigest()
        return " ".join(digest[at : at + 4] for at in range(0, 48, 4))

    @classmethod
    def load(cls, folder: Path) -> Keyring:
        path = folder / "federation.json"
        if not path.is_file():
            inside = folder / "server"
            advice = "create one with `dither federation init`"
            if (folder / "party.json").is_file():
                advice = "put the organiser's invitation there with `dither federation accept`"
            elif (inside / "federation.json").is_file():
                advice = f"did you mean {str(inside)!r}?"
            raise ConfigError(f"{str(folder)!r} has no federation.json; {advice}")
        return cls.from_dict(read_checked(path, _ADVICE, old=("format", "id", "server", "parties")), path)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], path: Path) -> Keyring:
        if saved.get("format", FORMAT) != FORMAT:
            raise ConfigError(f"{str(path)!r} has format {saved['format']}, this Dither reads {FORMAT}")
        try:
            parties = tuple(map(PartyKeys.from_dict, saved["parties"]))
            _check_names([party.name for party in parties])  # they are shown beside the fingerprint
            authorities = [str(saved.get(name, "")) for name in ("ca", "transport_ca")]
            server, serial = bytes.fromhex(saved["server"]), int(saved.get("serial", 0))
            return cls(saved["id"], server, parties, serial, *authorities)
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedFile(f"{str(path)!r} is damaged: {error}; {_ADVICE}") from None


class Identity(primitives.SigningKey):
    """The Ed25519 key by which a party or the server signs messages."""

    @classmethod
    def load(cls, folder: Path) -> Identity:
        path = folder / "identity.key"
        if not path.is_file():
            raise ConfigError(f"{str(path)!r} is missing; {_ADVICE}")
        try:
            return cls(bytes.fromhex(path.read_text(encoding="ascii").strip()))
        except ValueError:
            raise DamagedFile(f"{str(path)!r} is damaged: 64 hexadecimal digits are needed; {_ADVICE}") from None

    def signed(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """A JSON object with this key's signature in it."""
        return {**content, "signature": self.sign(canonical(content)).hex()}


def verify(public: bytes, signature: bytes, content: bytes) -> bool:
    """Whether the holder of the key signed the content."""
    try:
        primitives.verify(public, signature, content, "the holder")
    except ProtocolAbort:
        return False
    return True


def is_signed(content: Mapping[str, Any], public: bytes) -> bool:
    """Whether the holder of the key signed this JSON object (`Identity.signed`)."""
    try:
        signature = bytes.fromhex(content["signature"])
    except (KeyError, TypeError, ValueError):
        return False
    return verify(public, signature, canonical({k: v for k, v in content.items() if k != "signature"}))


# Making


def create(folder: Path, names: Sequence[str], *, hosts: Sequence[str], days: int = SERVER_DAYS) -> Keyring:
    """A new federation whose parties' keys are made here, too: one folder for each of them, to be handed over."""
    _check_new(folder)
    _check_names(names)
    requests = [request(folder / "parties" / name, name) for name in names]
    keyring = create_from(folder, requests, hosts=hosts, days=days)
    for name in names:
        accept(folder / "parties" / name, invitation_file(folder, name))
        (folder / "parties" / name / f"{name}.request.json").unlink()
    shutil.rmtree(folder / "invitations")
    return keyring


def create_from(
    folder: Path, requests: Sequence[PartyKeys], *, hosts: Sequence[str], days: int = SERVER_DAYS
) -> Keyring:
    """A new federation of parties that made their own keys: the CA, the server's folder, the list of members and
    their invitations. Whoever runs this sees no private key of a party's."""
    _check_new(folder, besides="parties")
    _check_names([party.name for party in requests])
    ca_key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Dither federation {secrets.token_hex(4)}")])
    ca = _certificate(subject, subject, ca_key.public_key(), days=CA_DAYS, is_ca=True).sign(
        ca_key, hashes.SHA256()
    )
    ca_pem = ca.public_bytes(serialization.Encoding.PEM)
    _write_secret(folder / "ca" / "ca.key", _pem(ca_key))
    write_bytes(folder / "ca" / "ca.pem", ca_pem)
    server = Identity(secrets.token_bytes(32))
    _write_secret(folder / "server" / "identity.key", server.private.hex().encode())
    write_bytes(folder / "server" / "ca.pem", ca_pem)
    keyring = Keyring(secrets.token_hex(32), server.public, tuple(requests))
    keyring = publish(folder, keyring)
    issue(folder, hosts=hosts, days=days)
    return keyring


def _check_new(folder: Path, besides: str = "") -> None:
    if folder.exists() and any(path.name != besides for path in folder.iterdir()):
        raise ConfigError(f"{str(folder)!r} already exists and is not empty; give another folder")


def _check_names(names: Sequence[str]) -> None:
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigError(f"a federation needs at least 2 parties with different names, not {', '.join(names)}")
    for name in names:
        _check_name(name)


def _check_members(parties: Sequence[PartyKeys]) -> None:
    _check_names([party.name for party in parties])
    owners: dict[str | bytes, str] = {}
    for party in parties:
        for key in (party.identity, party.node_key):
            if (owner := owners.setdefault(key, party.name)) != party.name:
                raise ConfigError(f"{party.name!r} has a key of {owner!r}; ask both for new requests")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"party name {name!r}: use at most 63 letters, digits, '.', '_' and '-', a letter or digit first"
        )


# Who belongs to it: requests, invitations, and what changes later


def request(folder: Path, name: str) -> PartyKeys:
    """Make a party's two private keys in a new folder, and its request to be let in: `NAME.request.json`, which
    holds public keys, signed with the private one."""
    _check_name(name)
    _check_new(folder)
    node_key, identity = ec.generate_private_key(ec.SECP256R1()), Identity(secrets.token_bytes(32))
    party = PartyKeys(name, identity.public, _openssh(node_key))
    _write_secret(folder / "node.key", _pem(node_key, serialization.PrivateFormat.OpenSSH))
    _write_secret(folder / "identity.key", identity.private.hex().encode())
    write_text(folder / "node.pub", party.node_key + "\n")
    write_checked(folder / "party.json", {"name": name})
    write_checked(folder / f"{name}.request.json", identity.signed(party.to_dict()))
    return party


def read_request(path: Path) -> PartyKeys:
    """The keys in a party's request, if their holder signed it."""
    advice = "ask that party for its request again (`dither federation request`)"
    saved = _received(path, advice)
    try:
        party = PartyKeys.from_dict(saved)
        node_key: Any = serialization.load_ssh_public_key(party.node_key.encode())
        # A transport starts with no other kind of key, nor with one key twice: there is one way to write it.
        if not isinstance(getattr(node_key, "curve", None), ec.SECP256R1) or _written(node_key) != party.node_key:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise DamagedFile(f"{str(path)!r} is not a party's request; {advice}") from None
    if not is_signed({**party.to_dict(), "signature": saved.get("signature")}, party.identity):
        raise DamagedFile(f"{str(path)!r} is not signed with the key it names; {advice}")
    return party


def add(folder: Path, party: PartyKeys, certify: Callable[[], None] = lambda: None) -> Keyring:
    """Let one more party in; everybody gets a new invitation. `certify` is what a transport does for the party,
    which is not let in if that fails."""
    keyring = Keyring.load(folder / "server")
    if any(each.name == party.name for each in keyring.parties):
        raise ConfigError(f"{party.name!r} belongs to this federation already; revoke it first for new keys")
    if party.name in revoked(folder / "server") and transport_ca(folder):
        raise ConfigError(
            f"{party.name!r} was revoked, but its certificate for NVIDIA FLARE is still good: let the party in "
            "under another name"
        )
    keyring = replace(keyring, parties=(*keyring.parties, party), serial=keyring.serial + 1)
    _check_members(keyring.parties)
    certify()
    _save_revoked(folder, revoked(folder / "server") - {party.name})
    return publish(folder, keyring)


def revoke(folder: Path, name: str) -> Keyring:
    """Take a party out: the server admits it no more, and the others learn it from their new invitation."""
    keyring = Keyring.load(folder / "server")
    keyring.party(name)
    rest = tuple(each for each in keyring.parties if each.name != name)
    _check_names([each.name for each in rest])
    keyring = replace(keyring, parties=rest, serial=keyring.serial + 1)
    _save_revoked(folder, revoked(folder / "server") | {name})
    (folder / "server" / "nodes" / f"{name}.pub").unlink(missing_ok=True)
    for ending in ("json", "signed.zip"):
        (folder / "invitations" / f"{name}.{ending}").unlink(missing_ok=True)
    return publish(folder, keyring)


def revoked(server: Path) -> set[str]:
    """Names of parties that were taken out; a transport with certificates of its own (NVIDIA FLARE) must know."""
    path = server / "revoked.json"
    return set(read_checked(path, _ADVICE)["names"]) if path.is_file() else set()


def _save_revoked(folder: Path, names: set[str]) -> None:
    if names or (folder / "server" / "revoked.json").is_file():
        write_checked(folder / "server" / "revoked.json", {"names": sorted(names)})


def invitation_file(folder: Path, name: str) -> Path:
    return folder / "invitations" / f"{name}.json"


def publish(folder: Path, keyring: Keyring) -> Keyring:
    """Write the list of members for the server, and an invitation for each party, signed with the CA's key. The
    list names the certificate authorities as they are now."""
    _check_members(keyring.parties)
    ca_key = _ca_key(folder)
    ca = certificate_of(folder / "ca" / "ca.pem")
    keyring = replace(keyring, ca=_fingerprint_of(ca), transport_ca=transport_ca(folder))
    ca_pem = (folder / "ca" / "ca.pem").read_text(encoding="ascii")
    content = {"federation": keyring.to_dict(), "ca": ca_pem}
    signature = ca_key.sign(canonical(content), ec.ECDSA(hashes.SHA256())).hex()
    write_checked(folder / "server" / "federation.json", keyring.to_dict())
    first = invitation_file(folder, keyring.parties[0].name)
    write_checked(first, {**content, "signature": signature})
    invitation = first.read_bytes()  # the same for all, and long where there are many
    for party in keyring.parties:
        write_text(folder / "server" / "nodes" / f"{party.name}.pub", party.node_key + "\n")
        write_bytes(invitation_file(folder, party.name), invitation)
    return keyring


def accept(folder: Path, invitation: Path) -> tuple[Keyring, Keyring | None]:
    """Store an invitation in a party's folder; the members, and those before where there were any. It must list
    this party's own keys, and a later one must come from the same CA and speak of the same federation."""
    advice = "ask for the invitation again"
    saved = _received(invitation, advice)
    try:
        content = {name: saved[name] for name in ("federation", "ca")}
        keyring, signature = Keyring.from_dict(saved["federation"], invitation), bytes.fromhex(saved["signature"])
        ca = x509.load_pem_x509_certificate(saved["ca"].encode())
        signer: Any = ca.public_key()
        signer.verify(signature, canonical(content), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise DamagedFile(f"{str(invitation)!r} is not signed by the CA it brings; {advice}") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DamagedFile(f"{str(invitation)!r} is not an invitation; {advice}") from None
    if keyring.ca != _fingerprint_of(ca):
        raise FederationError(f"{str(invitation)!r} brings another CA than its list of members names")
    name = party_name(folder)
    if keyring.party(name).identity != Identity.load(folder).public:
        raise FederationError(f"{str(invitation)!r} lists a key for {name!r} that is not identity.key")
    before = Keyring.load(folder) if (folder / "federation.json").is_file() else None
    if before is not None:
        if _fingerprint_of(certificate_of(folder / "ca.pem")) != keyring.ca:
            raise FederationError(
                f"{str(invitation)!r} comes from a different CA than this folder's; use a new folder"
            )
        if before.id != keyring.id or before.server != keyring.server:
            raise FederationError(f"{str(invitation)!r} belongs to a different federation than this folder")
        if keyring.serial < before.serial:  # it would bring back who was revoked
            raise FederationError(
                f"{str(invitation)!r} is older than the list of members in this folder; ask for the newest one"
            )
        changed = [each.name for each in before.parties if each not in keyring.parties]
        renamed = [each for each in changed if any(each == other.name for other in keyring.parties)]
        if renamed:
            raise FederationError(
                f"{str(invitation)!r} changes the keys of {', '.join(renamed)}; ask by telephone if they have new "
                "ones: then delete federation.json in your folder, accept it again, and compare the fingerprint"
            )
    write_text(folder / "ca.pem", saved["ca"])  # first: a folder with a list of members has its CA
    write_checked(folder / "federation.json", keyring.to_dict())
    return keyring, before


def transport_ca(folder: Path) -> str:
    """The fingerprint of the transport's own CA (NVIDIA FLARE), as invitations carry it; empty without one."""
    path = folder / "ca" / "nvflare" / "rootCA.pem"
    return _fingerprint_of(certificate_of(path)) if path.is_file() else ""


def _fingerprint_of(certificate: x509.Certificate) -> str:
    content = certificate.public_bytes(serialization.Encoding.DER)
    return f"SHA256:{hashlib.sha256(content).digest().hex(':').upper()}"


def canonical(content: Mapping[str, Any]) -> bytes:
    """The bytes of a JSON object that are signed."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def issue(folder: Path, *, hosts: Sequence[str], days: int = SERVER_DAYS) -> None:
    """A server key and certificate from the federation's CA, new or in place of the old ones."""
    if days < 1:
        raise ConfigError(f"days={days} must be at least 1")
    ca_key = _ca_key(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    names = list(dict.fromkeys([*hosts, "localhost", "127.0.0.1"]))  # the server's own processes use loopback
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    issuer = certificate_of(folder / "ca" / "ca.pem").subject
    certificate = (
        _certificate(subject, issuer, key.public_key(), days=days, is_ca=False)
        .add_extension(x509.SubjectAlternativeName([_san(name) for name in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    _write_secret(folder / "server" / "server.key", _pem(key))
    write_bytes(folder / "server" / "server.pem", certificate.public_bytes(serialization.Encoding.PEM))


def _ca_key(folder: Path) -> ec.EllipticCurvePrivateKey:
    path = folder / "ca" / "ca.key"
    if not path.is_file():
        raise ConfigError(f"{str(path)!r} is missing: only its holder can issue certificates")
    ca_key = _parsed(path, lambda text: serialization.load_pem_private_key(text, None))
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{str(path)!r} is not an elliptic-curve key")
    return ca_key


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, *, days: int, is_ca: bool
) -> x509.CertificateBuilder:
    """What the certificates of the CA and of the server have in common."""
    start = datetime.now(UTC)
    others = "content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only"
    denied = dict.fromkeys(others.split(), False)
    usage = x509.KeyUsage(digital_signature=not is_ca, key_cert_sign=is_ca, crl_sign=is_ca, **denied)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - timedelta(minutes=5))
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _san(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey, form: Any = serialization.PrivateFormat.PKCS8) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _openssh(key: Any) -> str:
    """The public half of a key, as OpenSSH writes it."""
    return _written(key.public_key())


def _written(public: Any) -> str:
    encoding, form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return bytes(public.public_bytes(encoding, form)).decode()


def _write_secret(path: Path, content: bytes) -> None:
    """A file in a folder, both of which their owner alone may read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    write_bytes(path, content, private=True)


# Checking


def expiry(path: Path) -> datetime:
    """When a certificate ends."""
    return certificate_of(path).not_valid_after_utc


def certificate_of(path: Path) -> x509.Certificate:
    """The certificate in a file."""
    return _parsed(path, x509.load_pem_x509_certificate)


def check_party(folder: Path) -> None:
    """DamagedFile unless a party's keys are those that federation.json lists and the CA is whole."""
    party = Keyring.load(folder).party(party_name(folder))
    node_key = _parsed(folder / "node.key", lambda text: serialization.load_ssh_private_key(text, None))
    own = {"identity.key": (Identity.load(folder).public, party.identity)}
    for name, (held, listed) in {**own, "node.key": (_openssh(node_key), party.node_key)}.items():
        if held != listed:
            raise DamagedFile(f"{str(folder / name)!r} is not the one federation.json lists; {_ADVICE}")
    _check_issued(folder / "ca.pem", folder)


def check_server(folder: Path) -> None:
    """DamagedFile unless the server's key, certificate and CA belong together."""
    key: Any = _parsed(folder / "server.key", lambda text: serialization.load_pem_private_key(text, None))
    if certificate_of(folder / "server.pem").public_key() != key.public_key():
        raise DamagedFile(f"{str(folder / 'server.key')!r} is not the key of server.pem; {_ADVICE}")
    for name in ("ca.pem", "server.pem"):
        _check_issued(folder / name, folder)


def _check_issued(path: Path, folder: Path) -> None:
    issuer, certificate = certificate_of(folder / "ca.pem"), certificate_of(path)
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, ValueError, TypeError):
        raise DamagedFile(f"{str(path)!r} does not bear the signature of ca.pem; {_ADVICE}") from None


def _received(path: Path, advice: str) -> dict[str, Any]:
    """What somebody sent in a file."""
    if not path.is_file():
        raise ConfigError(f"file {str(path)!r} not found; check the path")
    return read_checked(path, advice)


def _parsed(path: Path, parse: Callable[[bytes], _T]) -> _T:
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise DamagedFile(f"{str(path)!r} cannot be read ({error.strerror}); {_ADVICE}") from None
    except Exception:  # whatever comes of damaged bytes
        raise DamagedFile(f"{str(path)!r} is damaged; {_ADVICE}") from None


def party_name(folder: Path) -> str:
    """Whose folder this is."""
    path = folder / "party.json"
    if not path.is_file():
        raise ConfigError(
            f"{str(folder)!r} is not a party's folder (no party.json); create one with `dither federation request`"
        )
    saved = read_checked(path, _ADVICE, old=("name",))
    if not isinstance(saved.get("name"), str):
        raise DamagedFile(f"{str(path)!r} names no party; {_ADVICE}")
    return str(saved["name"])
