"""The keys of a federation: a certificate authority, a server certificate, and two keys a party.

    DIR/
      ca/            ca.key, ca.pem                         keep offline once everything is made
      server/        ca.pem, server.key, server.pem, identity.key, federation.json, nodes/NAME.pub
      parties/NAME/  ca.pem, node.key, node.pub, identity.key, federation.json, party.json

TLS: the parties know the server by its certificate, which must come from this CA. Transport: the server knows a
party by its node key (ECDSA P-384, the kind Flower authenticates nodes with). Messages: every message is signed by
the sender's identity key (Ed25519), and `federation.json`, the same in all folders, lists all of them: so a server
cannot add parties that the others do not know, and no party can speak for another. The same identity signs in
secure aggregation.

Whoever runs `init` holds every private key until the folders are handed out. If secure aggregation is to protect
the parties from the server, somebody other than the server's operator must run it.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dither.errors import ConfigError, DamagedFile, FederationError
from dither.experiment.folder import read_checked, write_bytes, write_checked, write_text

FORMAT = 1
_ADVICE = "get the folder again from whoever made the federation"
_T = TypeVar("_T")
CA_DAYS = 3650
SERVER_DAYS = 825
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_RAW = (serialization.Encoding.Raw, serialization.PublicFormat.Raw)


@dataclass(frozen=True)
class PartyKeys:
    """A party as everybody knows it."""

    name: str
    identity: bytes  # Ed25519 public key
    node_key: str  # OpenSSH public key of its transport


@dataclass(frozen=True)
class Keyring:
    """federation.json: who belongs to it."""

    id: str
    server: bytes  # Ed25519 public key of the server
    parties: tuple[PartyKeys, ...]

    def party(self, name: str) -> PartyKeys:
        for party in self.parties:
            if party.name == name:
                return party
        known = ", ".join(party.name for party in self.parties)
        raise FederationError(f"{name!r} is no party of this federation; known: {known}")

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "id": self.id,
            "server": self.server.hex(),
            "parties": [
                {"name": party.name, "identity": party.identity.hex(), "node_key": party.node_key}
                for party in self.parties
            ],
        }

    @classmethod
    def load(cls, folder: Path) -> Keyring:
        path = folder / "federation.json"
        if not path.is_file():
            raise ConfigError(f"{str(folder)!r} has no federation.json; make one with `dither federation init`")
        found = read_checked(path, _ADVICE, old=("format", "id", "server", "parties"))
        try:
            if found["format"] != FORMAT:
                raise ConfigError(f"{str(path)!r} has format {found['format']}, this Dither reads {FORMAT}")
            parties = tuple(
                PartyKeys(each["name"], bytes.fromhex(each["identity"]), each["node_key"])
                for each in found["parties"]
            )
            return cls(found["id"], bytes.fromhex(found["server"]), parties)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise DamagedFile(f"{str(path)!r} is damaged: {error}; {_ADVICE}") from None


class Identity:
    """An Ed25519 signing key."""

    def __init__(self, private: bytes) -> None:
        self._key = ed25519.Ed25519PrivateKey.from_private_bytes(private)
        self.private = private
        self.public = self._key.public_key().public_bytes(*_RAW)

    @classmethod
    def load(cls, folder: Path) -> Identity:
        path = folder / "identity.key"
        if not path.is_file():
            raise ConfigError(
                f"{str(path)!r} is missing; the folder is not one that `dither federation init` made"
            )
        try:
            return cls(bytes.fromhex(path.read_text(encoding="ascii").strip()))
        except ValueError:
            raise DamagedFile(f"{str(path)!r} is damaged: 64 hexadecimal digits are needed; {_ADVICE}") from None

    def sign(self, content: bytes) -> bytes:
        return self._key.sign(content)


def verify(public: bytes, signature: bytes, content: bytes) -> bool:
    """Whether the holder of the key signed the content."""
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(public).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


# Making


def create(
    folder: Path,
    names: Sequence[str],
    *,
    hosts: Sequence[str],
    days: int = SERVER_DAYS,
    now: datetime | None = None,
) -> Keyring:
    """A new federation of these parties, whose server is reached under these host names or addresses."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{str(folder)!r} already exists and is not empty; give another folder")
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigError(f"parties {list(names)}: at least 2 different names are needed")
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"party name {name!r}: use letters, digits, '.', '_' and '-' (at most 63)")
    ca = folder / "ca"
    ca_key = ec.generate_private_key(ec.SECP256R1())
    certificate = _authority(ca_key, secrets.token_hex(4), now or datetime.now(UTC))
    _secret(ca / "ca.key", _pem(ca_key))
    write_bytes(ca / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM))
    server = Identity(secrets.token_bytes(32))
    made: list[tuple[PartyKeys, Identity, bytes]] = []
    for name in names:
        key = ec.generate_private_key(ec.SECP384R1())
        identity = Identity(secrets.token_bytes(32))
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        made.append((PartyKeys(name, identity.public, public.decode()), identity, private))
    keyring = Keyring(secrets.token_hex(32), server.public, tuple(party for party, _, _ in made))
    for party, identity, private in made:
        own = folder / "parties" / party.name
        _secret(own / "node.key", private)
        _secret(own / "identity.key", identity.private.hex().encode())
        write_text(own / "node.pub", party.node_key + "\n")
        write_checked(own / "party.json", {"name": party.name})
        write_checked(own / "federation.json", keyring.to_dict())
        write_bytes(own / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM))
        write_text(folder / "server" / "nodes" / f"{party.name}.pub", party.node_key + "\n")
    _secret(folder / "server" / "identity.key", server.private.hex().encode())
    write_checked(folder / "server" / "federation.json", keyring.to_dict())
    write_bytes(folder / "server" / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM))
    issue(folder, hosts=hosts, days=days, now=now)
    return keyring


def issue(folder: Path, *, hosts: Sequence[str], days: int = SERVER_DAYS, now: datetime | None = None) -> None:
    """A server key and certificate from the federation's CA, new or in place of the old ones."""
    if days < 1:
        raise ConfigError(f"days={days} must be at least 1")
    if not (folder / "ca" / "ca.key").is_file():
        raise ConfigError(f"{str(folder / 'ca' / 'ca.key')!r} is missing: only its holder can issue certificates")
    authority = _parsed(folder / "ca" / "ca.key", lambda text: serialization.load_pem_private_key(text, None))
    if not isinstance(authority, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{str(folder / 'ca' / 'ca.key')!r} is not an elliptic-curve key")
    issuer = certificate_of(folder / "ca" / "ca.pem")
    key = ec.generate_private_key(ec.SECP256R1())
    start = now or datetime.now(UTC)
    names = list(dict.fromkeys([*hosts, "localhost", "127.0.0.1"]))  # the server's own processes use loopback
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - timedelta(minutes=5))
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([_san(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )
    _secret(folder / "server" / "server.key", _pem(key))
    write_bytes(folder / "server" / "server.pem", certificate.public_bytes(serialization.Encoding.PEM))


def expiry(path: Path) -> datetime:
    """When a certificate ends."""
    return certificate_of(path).not_valid_after_utc


def certificate_of(path: Path) -> x509.Certificate:
    """The certificate in a file."""
    return _parsed(path, x509.load_pem_x509_certificate)


def check_party(folder: Path) -> None:
    """DamagedFile unless a party's keys are those that federation.json lists and the CA is whole."""
    party = Keyring.load(folder).party(party_name(folder))
    if Identity.load(folder).public != party.identity:
        raise DamagedFile(f"{str(folder / 'identity.key')!r} is not the one federation.json lists; {_ADVICE}")
    key: Any = _parsed(folder / "node.key", lambda text: serialization.load_ssh_private_key(text, None))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    if public.decode() != party.node_key:
        raise DamagedFile(f"{str(folder / 'node.key')!r} is not the one federation.json lists; {_ADVICE}")
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
            f"{str(folder)!r} is not a party's folder (no party.json); `dither federation init` makes them"
        )
    found = read_checked(path, _ADVICE, old=("name",))
    if not isinstance(found.get("name"), str):
        raise DamagedFile(f"{str(path)!r} names no party; {_ADVICE}")
    return str(found["name"])


def _authority(key: ec.EllipticCurvePrivateKey, mark: str, now: datetime) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Dither federation {mark}")])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _san(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _secret(path: Path, content: bytes) -> None:
    """A file that its owner alone may read, never readable by others in between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(content)
