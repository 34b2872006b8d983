"""FLARE's startup kits: made in one place (`provision`), or from requests of parties that keep their private keys.

    request     at a party: a private key that stays, and `NAME.request.zip`, which asks for a certificate
    establish   at the organiser: FLARE's CA, and the kits of the server and of its coordinator
    approve     at the organiser: the signed answer to a request
    package     at the party: its kit, from the answer and its own private key

The last four are `nvflare cert` and `nvflare package`, FLARE's own distributed provisioning. Either way a kit is
closed down: a site allows one class in jobs, no code in jobs, no shell commands, and no logs to the server.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.x509.oid import NameOID

from dither.errors import ConfigError, FederationError
from dither.experiment.folder import write_text
from dither.federation.keys import transport_ca
from dither.federation.nvflare import ADMIN_KIT, KIT

_PROJECT, ORGANISATION, ADMIN = "dither", "dither", "coordinator@dither.org"
CONTROLLER = "dither.federation.nvflare.apps.CoordinatorController"
EXECUTOR = "dither.federation.nvflare.apps.RelayExecutor"
_REQUEST = "nvflare-request"  # in a party's folder: its private key for FLARE
_ROLES = ("project_admin", "lead")  # of the coordinator, by `provision` and by `establish`
_MOST_SITES = 10_000

# At a site nobody but the party itself may run code or read files; jobs are started and stopped from the server.
_RIGHTS = {
    **dict.fromkeys(("submit_job", "manage_job", "view", "operate"), "any"),
    **dict.fromkeys(("clone_job", "download_job", "shell_commands", "byoc", "server-predeployed-flwr"), "none"),
}


def provision(folder: Path, names: Sequence[str], *, host: str, port: int) -> None:
    """Make FLARE's startup kits for a federation that `keys.create` made: mutual TLS, one site for each party."""
    for name in names:
        _check_name(name)
    with tempfile.TemporaryDirectory(prefix="dither-nvflare-") as scratch:
        project = Path(scratch) / "project.json"  # JSON is YAML
        project.write_text(json.dumps(_project(names, host, port)), encoding="utf-8")
        command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", str(project), "-w", scratch]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=scratch)
        kits = Path(scratch) / _PROJECT / "prod_00"
        if done.returncode or not kits.is_dir():
            lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            raise FederationError(f"`nvflare provision` failed: {lines[-1] if lines else done.returncode}")
        shutil.copytree(kits / host, folder / "server" / KIT)
        shutil.copytree(kits / ADMIN, folder / "server" / ADMIN_KIT)
        for name in names:
            shutil.copytree(kits / name, folder / "parties" / name / KIT)
        shutil.copytree(Path(scratch) / _PROJECT / "state", folder / "ca" / KIT)  # FLARE's own CA
    _protect_server(folder / "server" / KIT)
    for name in names:
        _protect_site(folder / "parties" / name / KIT)
    for path in folder.rglob("*.key"):
        path.chmod(0o600)


def _project(names: Sequence[str], host: str, port: int) -> dict[str, Any]:
    def participant(name: str, kind: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "type": kind, "org": ORGANISATION, **more}

    def builder(path: str, **arguments: Any) -> dict[str, Any]:
        return {"path": f"nvflare.lighter.impl.{path}", "args": arguments}

    return {
        "api_version": 3,
        "name": _PROJECT,
        "description": "A federation of Dither",
        "participants": [
            participant(host, "server", fed_learn_port=port, admin_port=port),
            *(participant(name, "client") for name in names),
            participant(ADMIN, "admin", role="project_admin"),
        ],
        "builders": [
            builder("workspace.WorkspaceBuilder", template_file=["master_template.yml"]),
            builder("static_file.StaticFileBuilder", config_folder="config", scheme="tcp"),
            builder("cert.CertBuilder"),
            builder("signature.SignatureBuilder"),
        ],
    }


def _protect_site(kit: Path) -> None:
    """One class in jobs, no code in jobs, no shell commands, no logs to the server."""
    resources = read(kit / "local" / "resources.json.default")
    resources["allow_log_streaming"] = False
    resources["components"] = [each for each in resources["components"] if each["id"] != "site_log_streamer"]
    _protect(kit, resources, EXECUTOR)
    # Client and job process meet at a port of this machine: nobody else on it may join them.
    own = {"scheme": "tcp", "resources": {"host": "localhost", "connection_security": "mtls"}}
    write(kit / "local" / "comm_config.json", {"allow_adhoc_conns": False, "internal": own})


def _protect_server(kit: Path) -> None:
    resources = read(kit / "local" / "resources.json.default")
    resources["servers"][0]["max_num_clients"] = _MOST_SITES
    _protect(kit, resources, CONTROLLER)


def _protect(kit: Path, resources: dict[str, Any], allowed: str) -> None:
    write(kit / "local" / "resources.json", {**resources, "class_allow_list": [allowed]})
    rights = {"format_version": "1.0", "permissions": dict.fromkeys(_ROLES, _RIGHTS)}
    write(kit / "local" / "authorization.json", rights)


def server_of(kit: Path) -> str:
    """The server's address in a site's kit."""
    return str(read(kit / "startup" / "fed_client.json")["servers"][0]["service"]["target"])


def point_site(kit: Path, server: str) -> None:
    """Let a site's kit name the server's address as the party gives it."""
    config = read(kit / "startup" / "fed_client.json")
    config["servers"][0]["service"]["target"] = server
    write(kit / "startup" / "fed_client.json", config)


# Parties that make their own keys


def request(folder: Path, name: str) -> Path:
    """Make a party's private key for FLARE in its folder, and the request for a certificate."""
    _check_name(name)
    path = folder / f"{name}.request.zip"
    _make_request(folder / _REQUEST, {"name": name, "type": "client"}, path)
    return path


def establish(folder: Path, *, host: str, port: int) -> None:
    """FLARE's CA and the kits of server and coordinator, for a federation that `keys.create_from` made."""
    ca = folder / "ca" / KIT
    address = {"host": host, "fed_learn_port": port, "admin_port": port}
    profile = {"name": _PROJECT, "scheme": "tcp", "connection_security": "mtls", "server": address}
    write(folder / "ca" / "nvflare-profile.json", profile)
    _nvflare("cert", "init", "--profile", str(folder / "ca" / "nvflare-profile.json"), "-o", str(ca))
    (ca / "rootCA.key").chmod(0o600)
    server = {"name": host, "type": "server", "fed_learn_port": port, "admin_port": port}
    for participant, kit in ((server, KIT), ({"name": ADMIN, "type": "admin", "role": "lead"}, ADMIN_KIT)):
        with tempfile.TemporaryDirectory(prefix="dither-nvflare-") as scratch:
            asked, signed = Path(scratch) / "own.request.zip", Path(scratch) / "own.signed.zip"
            _make_request(Path(scratch) / "request", participant, asked)
            _sign(folder, asked, signed)
            _package(Path(scratch) / "request", signed, transport_ca(folder), folder / "server" / kit)
    _protect_server(folder / "server" / KIT)


def approve(folder: Path, name: str, asked: Path, signed: Path) -> None:
    """Sign a party's request with FLARE's CA of the federation in that folder: as that party's site, and as
    nothing else. Who wrote the request chose what it asks for, and FLARE signs servers and administrators, too."""
    with tempfile.TemporaryDirectory(prefix="dither-nvflare-") as scratch:
        _sign(folder, asked, made := Path(scratch) / "signed.zip")
        with zipfile.ZipFile(made) as content:
            names = [each for each in content.namelist() if each.endswith(".crt")]
            subjects = [x509.load_pem_x509_certificate(content.read(each)).subject for each in names]
        if [_role(subject) for subject in subjects] != [(name, "client")]:
            raise FederationError(f"{str(asked)!r} asks for more than a certificate for the site of {name!r}")
        signed.unlink(missing_ok=True)
        shutil.copyfile(made, signed)


def _role(subject: x509.Name) -> tuple[str, str]:
    """Whom a certificate of FLARE's names, and as what."""
    name, role = (
        "/".join(str(each.value) for each in subject.get_attributes_for_oid(oid))
        for oid in (NameOID.COMMON_NAME, NameOID.UNSTRUCTURED_NAME)
    )
    return name, role


def _sign(folder: Path, asked: Path, signed: Path) -> None:
    ca, profile = folder / "ca" / KIT, folder / "ca" / "nvflare-profile.json"
    _nvflare("cert", "approve", str(asked), "-c", str(ca), "--profile", str(profile), "--out", str(signed))


def package(folder: Path, signed: Path, root: str) -> None:
    """The kit of the party whose folder this is; `root` is the fingerprint of FLARE's CA that it expects."""
    _package(folder / _REQUEST, signed, root, folder / KIT)
    _protect_site(folder / KIT)


def _check_name(name: str) -> None:
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"party name {name!r}: NVIDIA FLARE takes letters, digits, '-' and '_'")


def _make_request(folder: Path, participant: dict[str, Any], path: Path) -> None:
    described = folder.with_name("nvflare-participant.json")  # JSON is YAML
    write(described, {"name": _PROJECT, "participants": [{"org": ORGANISATION, **participant}]})
    made = _nvflare("cert", "request", "-p", str(described), "--out", str(folder))
    described.unlink()
    for private in folder.glob("*.key"):
        private.chmod(0o600)
    shutil.copyfile(made["request_zip"], path)


def _package(asked: Path, signed: Path, root: str, kit: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="dither-nvflare-") as scratch:
        made = _nvflare(
            *("package", str(signed), "--request-dir", str(asked), "--fingerprint", root, "-w", scratch)
        )
        shutil.rmtree(kit, ignore_errors=True)
        shutil.copytree(made["output_dir"], kit)
    for private in kit.rglob("*.key"):
        private.chmod(0o600)


def _nvflare(*arguments: str) -> dict[str, Any]:
    """What a command of FLARE's says it did."""
    command = [sys.executable, "-m", "nvflare.cli", "--format", "json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    lines = [line for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()]
    try:
        said = json.loads(lines[-1])
        if said["status"] == "ok":
            data: dict[str, Any] = said["data"]
            return data
        why = said["message"]
    except (IndexError, KeyError, TypeError, ValueError):
        why = lines[-1] if lines else f"exit code {done.returncode}"
    raise FederationError(f"`nvflare {' '.join(arguments[:2])}` failed: {why}")


def read(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def write(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")
