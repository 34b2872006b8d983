"""A federation on one machine: a server and its parties as processes, over loopback, to see what it looks like.

Adult is dealt out by where people work: private companies, the government, the self-employed and all others are an
institution each, with 1,857 to 22,696 training records; any other number of institutions gets equal parts.
Everything else is as between institutions: TLS, node authentication, secure aggregation, noise from the operating
system, a ledger at each party.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dither.errors import DataError, FederationError
from dither.experiment.folder import write_text

INSTITUTIONS = {
    "companies": ("Private",),
    "government": ("Federal-gov", "Local-gov", "State-gov"),
    "self-employed": ("Self-emp-inc", "Self-emp-not-inc"),
}
OTHERS = "others"
_ANY_PORT = 9440  # in the kits; `serve` and `join` are told the one that is used
MARK = ".demonstration"  # a folder of this module's own


def tables(folder: Path, *, data_dir: str | Path | None = None, parties: int = 4) -> tuple[str, dict[str, Path]]:
    """The training records of Adult as one CSV an institution; where Adult cannot be had, parts of a small set
    that needs no download. Returns the data set's name and the files."""
    from dither import data
    from dither.data.catalog import read_adult

    try:
        (train, *_) = data.get("adult", data_dir=data_dir)
    except DataError:
        return "breast-cancer", _small_tables(folder, parties)
    frame = read_adult(train)
    if parties != 4:
        parts = {f"institution-{part + 1}": frame.iloc[part::parties] for part in range(parties)}
        return "adult", _written(folder, parts)
    where = frame["workclass"].astype(str).str.strip()
    home = {value: name for name, values in INSTITUTIONS.items() for value in values}
    institution = where.map(lambda value: home.get(value, OTHERS))
    return "adult", _written(folder, {name: frame[institution == name] for name in (*INSTITUTIONS, OTHERS)})


def _small_tables(folder: Path, parties: int) -> dict[str, Path]:
    import pandas as pd
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    frame = pd.DataFrame(bunch.data, columns=list(bunch.feature_names))
    frame["diagnosis"] = [str(bunch.target_names[target]) for target in bunch.target]
    return _written(folder, {f"clinic-{part + 1}": frame.iloc[part::parties] for part in range(parties)})


def _written(folder: Path, frames: dict[str, Any]) -> dict[str, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, frame in frames.items():
        frame.to_csv(folder / f"{name}.csv", index=False)
    return {name: folder / f"{name}.csv" for name in frames}


def stopped(folder: Path) -> bool:
    """Whether the folder is a demonstration that has not come to its end, and can."""
    return (folder / MARK).is_file() and not (folder / "run" / "summary.json").is_file()


def _prepared(folder: Path, data_dir: Path | None, parties: int, transport: str) -> dict[str, Path]:
    """The parties' files; created with keys and spec unless all of them exist. The spec is written last."""
    from dither.federation import keys

    if (folder / "spec.toml").is_file():
        return {path.stem: path for path in sorted((folder / "data").glob("*.csv"))}
    write_text(folder / MARK, "")
    for begun in ("data", "keys"):
        shutil.rmtree(folder / begun, ignore_errors=True)
    name_of_data, paths = tables(folder / "data", data_dir=data_dir, parties=parties)
    keys.create(folder / "keys", list(paths), hosts=["localhost"])
    if transport == "nvflare":
        from dither.federation.nvflare.kits import provision

        provision(folder / "keys", list(paths), host="localhost", port=_ANY_PORT)
    spec = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8").replace('"adult"', f'"{name_of_data}"')
    spec = spec.replace("num_clients = 4", f"num_clients = {parties}")
    write_text(folder / "spec.toml", spec.replace("cohort_size = 4", f"cohort_size = {parties}"))
    return paths


# reason: one parameter for each option of the command
def run(
    folder: Path,
    *,
    port: int,
    parties: int = 4,
    transport: str = "flower",
    data_dir: Path | None = None,
    settings: Sequence[str] = (),
    say: Callable[[str], None] = print,
    flags: Sequence[str] = (),
) -> int:
    """Make keys, start a server and the parties, and wait for the end. Returns the server's exit code. `settings`
    are given to the server as --set, `flags` as they are. A folder that was stopped is continued."""
    paths = _prepared(folder, data_dir, parties, transport)
    spec = folder / "spec.toml"
    say(f"keys, certificates, data and logs of this demonstration: {folder}")
    program = [sys.executable, "-m", "dither"]
    # Public records, in new ledgers each time: nothing to be remembered in the user's own folder.
    environment = {**os.environ, "DITHER_STATE": str(folder / "state")}
    environment |= {} if data_dir is None else {"DITHER_DATA": str(data_dir)}
    address, children = f"127.0.0.1:{port}", list[subprocess.Popen[Any]]()
    try:
        command = [*program, "serve", str(spec), "--federation", str(folder / "keys" / "server")]
        command += ["--address", address, "--out", str(folder / "run"), *flags]
        command += [word for setting in settings for word in ("--set", setting)]
        # A session of its own each: Ctrl-C reaches this process, which ends the others once and in order.
        with open(folder / "server.log", "ab") as log:
            server = subprocess.Popen(command, env=environment, stderr=log, start_new_session=True)
        children.append(server)
        for name, path in paths.items():
            home = folder / "keys" / "parties" / name
            command = [*program, "join", "--data", str(path), "--server", address, "--federation", str(home)]
            command += ["--ledger", str(home / "ledger.sqlite"), "--yes", "--epsilon", "1"]
            with open(folder / f"{name}.log", "ab") as log:
                streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
                children.append(subprocess.Popen(command, env=environment, start_new_session=True, **streams))
        code = server.wait()
        if code:
            last = (folder / "server.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            print(last[-1] if last else f"error: the server ended with exit code {code}", file=sys.stderr)
        until = time.monotonic() + 15
        for child in children[1:]:
            try:
                child.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                raise FederationError(f"a party did not end; see the logs in {folder}") from None
        return code
    finally:
        _end(children)


def _end(children: Sequence[subprocess.Popen[Any]]) -> None:
    for child in children:
        if child.poll() is None:
            child.terminate()
    for child in children:
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
