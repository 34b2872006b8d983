"""Damaged files: each is named in one line, and none changes an ε or a key silently."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dither
from dither.errors import DitherError
from dither.experiment import folder as runs
from dither.experiment import train
from dither.experiment.build import build_experiment
from dither.federation import keys
from dither.federation.agreement import approved_digest
from dither.federation.state import COMPUTED, ChargedRound, ClientState, PartyStore, PendingUpload
from dither.spec import Spec
from dither.web.files import SafeFolder
from dither.web.index import RunIndex
from tests.attacks.test_outputs import CATALOGUE, Killed, killed_after, proven

SEED = 20


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    dither.run(Spec().with_values({**CATALOGUE, "num_rounds": 4}), out=folder, checkpoint_seconds=0)
    return folder


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Path:
    folder, spec = tmp_path_factory.mktemp("interrupted") / "run", Spec().with_values(CATALOGUE)
    with pytest.raises(Killed):
        dither.run(spec, out=folder, checkpoint_seconds=0, on_evaluation=killed_after(2))
    return folder


def damages(folder: Path, per_file: int, seed: int = SEED):
    """What was done, to which file, and its bytes then (None: it is gone): a few of each kind for every file."""
    generator = np.random.default_rng(seed)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, content = str(path.relative_to(folder)), path.read_bytes()
        yield "gone", name, None
        yield "empty", name, b""
        yield "cut", name, content[: int(generator.integers(len(content)))] if content else b""
        for _ in range(per_file):
            flipped = bytearray(content)
            if flipped:
                flipped[int(generator.integers(len(flipped)))] ^= 1 << int(generator.integers(8))
            yield "flipped", name, bytes(flipped)


def try_all(folder: Path, look: Callable[[Path], Any], place: Path, per_file: int = 5) -> dict[str, int]:
    """Do each damage to a copy: `look` says what it said before, or raises one line."""
    whole, seen = look(folder), {"right": 0, "named": 0}
    for number, (how, name, content) in enumerate(damages(folder, per_file)):
        copy = place / str(number)
        shutil.copytree(folder, copy)
        if content is None:
            (copy / name).unlink()
        else:
            (copy / name).write_bytes(content)
        try:
            assert look(copy) == whole, f"{name} {how}: silently another result"
            seen["right"] += 1
        except DitherError as error:
            text = str(error)
            assert len(text.splitlines()) == 1, f"{name} {how}: {text}"
            assert Path(name).name.split(".")[0] in text or "spec.toml" in text, f"{name} {how}: {text}"
            seen["named"] += 1
        shutil.rmtree(copy)
    return seen


def test_a_finished_run(finished, tmp_path):
    x = np.linspace(-1, 1, 30, dtype=np.float32)[None]

    def look(folder: Path):
        run = dither.load(folder)
        kept = runs.RunFolder.open(folder)
        kept.audit()
        return run.spec, run.epsilon, run.evaluations, run.predict(x).tolist(), kept.begun()

    seen = try_all(finished, look, tmp_path)
    assert seen["named"] > 40
    assert sum(seen.values()) > 90


def test_an_interrupted_run(interrupted, tmp_path):
    """What resuming reads. An older checkpoint is as good as the newest: rounds after it are begun again."""
    assert runs.RunFolder(interrupted).begun() == [(0, 4)]

    def look(folder: Path):
        kept = runs.RunFolder.open(folder)
        checkpoint = kept.load_checkpoint()
        assert checkpoint is not None
        with np.load(interrupted / f"local/checkpoints/round-{checkpoint.round:08d}.npz") as wanted:
            assert all(np.array_equal(leaf, wanted[f"leaf{i}"]) for i, leaf in enumerate(checkpoint.leaves))
        kept.metrics(), kept.local_metrics()
        return kept.spec(), kept.run_id(), kept.summary(), kept.begun()

    seen = try_all(interrupted, look, tmp_path)
    assert seen["named"] > 30


def test_an_interrupted_run_with_a_damaged_newest_checkpoint_counts_what_it_repeats(interrupted, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(interrupted, copy)
    newest = copy / "local/checkpoints/round-00000004.npz"
    newest.write_bytes(newest.read_bytes()[:-7])
    made = train.resume(copy)
    assert runs.RunFolder(copy).begun() == [(0, 4), (2, 6)]
    assert made.summary["repeated_rounds"] == 2
    # Also where no ledger counts: it is the ε of eight rounds, two of them made twice.
    experiment = build_experiment(made.spec)
    happened = {"proven": [row.to_json() for row in experiment.realised([(0, 4), (2, 6)]).accountant().table()]}
    planned = {"proven": [row.to_json() for row in experiment.accountant().table()]}
    assert proven(made.summary) == proven({"epsilon": happened})
    assert proven(made.summary)["replace-one"] > 1.1 * proven({"epsilon": planned})["replace-one"]


def test_the_page_shows_no_damaged_run(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "runs" / "whole")
    whole = RunIndex(SafeFolder(tmp_path / "runs"))
    whole.refresh()
    (row,) = whole.rows()
    assert row["state"] == "finished"
    assert row["proven"]["value"] > 0
    for number, (_, name, content) in enumerate(damages(finished, 2)):
        if content is None or name not in ("spec.toml", "summary.json", "digests.json", "provenance.json"):
            continue
        root = tmp_path / str(number)
        shutil.copytree(finished, root / "run")
        (root / "run" / name).write_bytes(content)
        index = RunIndex(SafeFolder(root))
        index.refresh()
        (shown,) = index.rows()
        assert shown["state"] == "broken", name
        assert shown["proven"] is None
        assert name in shown["state_reason"]


def test_a_folder_of_the_version_before_loads(finished, tmp_path):
    copy = tmp_path / "old"
    shutil.copytree(finished, copy)
    shutil.move(copy / "local" / "checkpoints", copy / "checkpoints")
    shutil.rmtree(copy / "local")
    (copy / "digests.json").unlink()
    text = (copy / "provenance.json").read_text()
    (copy / "provenance.json").write_text(text.replace(f',\n  "format": {runs.FORMAT}', ""))
    assert dither.load(copy).summary == dither.load(finished).summary


def test_a_federation(tmp_path):
    keys.create(tmp_path / "fed", ["ann", "bob"], hosts=["localhost"])
    server, party = tmp_path / "fed" / "server", tmp_path / "fed" / "parties" / "ann"

    def look_at_server(folder: Path):
        keys.check_server(folder)
        found = keys.Keyring.load(folder)
        if keys.Identity.load(folder).public != found.server:  # as the coordinator does
            raise DitherError("identity.key is not the one federation.json lists")
        return found

    def look_at_party(folder: Path):
        keys.check_party(folder)
        return keys.Keyring.load(folder), keys.party_name(folder), approved_digest(folder)

    runs.write_checked(party / "approved.json", {"digest": "a" * 64, "run": "r", "approved": "now", "how": "test"})
    (party / "node.pub").unlink()  # for people: nothing reads it
    shutil.rmtree(server / "nodes")
    for folder, look in ((server, look_at_server), (party, look_at_party)):
        if folder == party:  # approved.json may be gone: then the owner is asked again
            keep = (party / "approved.json").read_bytes()
            (party / "approved.json").unlink()
            assert try_all(party, look, tmp_path / "gone", per_file=8)["named"] > 20
            (party / "approved.json").write_bytes(keep)
            for number, (how, name, content) in enumerate(damages(party, 8)):
                if name == "approved.json" and how != "gone":
                    (party / name).write_bytes(content)
                    with pytest.raises(DitherError, match=r"approved.json"):
                        look(party)
                    assert number
        else:
            assert try_all(folder, look, tmp_path / "server", per_file=8)["named"] > 20


def test_a_partys_memory(tmp_path):
    store = PartyStore(tmp_path / "store")
    store.secret()
    store.save(ClientState(3, [np.arange(40.0, dtype=np.float32)]))
    store.save(PendingUpload(4, "b" * 64, [np.arange(50.0, dtype=np.float32), np.ones(3, np.float32)]))
    store.save(ChargedRound(4, COMPUTED))

    def look(folder: Path):
        memory = PartyStore(folder)
        kept, pending, charged = (memory.load(kind) for kind in (ClientState, PendingUpload, ChargedRound))
        if kept is None or pending is None or not memory.has_secret() or charged is None:
            raise DitherError("the folder does not remember: state pending secret intent")  # as the node does
        rows = [kept.leaves[0].tolist(), pending.row.tolist(), pending.state[0].tolist()]
        return memory.secret(), kept.round, pending.round, rows, charged

    assert try_all(tmp_path / "store", look, tmp_path / "copies", per_file=10)["named"] > 30
