"""Whoever is given a run folder gets nothing secret with it: a run is signed so that it can be passed on."""

from pathlib import Path

from dither.federation import keys
from tests.federation.parties import NAMES, Parties, small_spec


def secrets_in(run: Path, federation: Path) -> list[str]:
    """Files of a run folder that hold a private key: of the server, of the CA or of a party, in any form."""
    owners = [federation / "server", *(federation / "parties" / name for name in NAMES)]
    identities = [keys.Identity.load(folder).private for folder in owners]
    known = [b"PRIVATE KEY", *identities, *(each.hex().encode() for each in identities)]
    files = [path for path in run.rglob("*") if path.is_file()]
    assert files
    return [str(path.relative_to(run)) for path in files if any(each in path.read_bytes() for each in known)]


def test_a_run_folder_holds_no_private_key(tmp_path):
    """The state of secure aggregation had the server's identity key in it, with which anybody signs runs."""
    Parties(tmp_path, small_spec(**{"secagg.mode": "real", "num_rounds": 1})).coordinator().run()
    assert (tmp_path / "run" / "secagg.json").is_file()
    assert secrets_in(tmp_path / "run", tmp_path / "keys") == []
