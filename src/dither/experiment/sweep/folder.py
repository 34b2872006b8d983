"""The folder of a sweep, written so that a kill at any moment loses the batch under way and nothing else.

sweep.json    spec, grid, versions, device, timing; complete: true once all is there
batches/      one file a finished batch, written whole
runs.csv      one row a run                 curves.csv    every evaluation, in long form
plot.png      accuracy against rounds, and against the first varied number
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dither.errors import RunExists
from dither.experiment.folder import read_checked, to_json, write_bytes, write_checked, write_text
from dither.experiment.sweeps import Outcome
from dither.spec import Spec
from dither.types import Claim

# Keys of sweep.json before it had a checksum.
_OLD = (
    *("spec", "specs", "vary", "runs", "proven", "complete", "programs", "batches", "memory", "settings"),
    *("not_covered", "troubles", "made_by", "seconds", "timing"),
)


class Record(NamedTuple):
    """A finished run of a sweep."""

    outcome: Outcome
    proven: dict[str, Any] | None  # None: not asked for
    seconds: float  # its share of its batch
    made: dict[str, str]  # versions and device


class SweepFolder:
    """Reads and writes the files of one sweep."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def claim(self, plan: Mapping[str, Any]) -> None:
        """Make the folder, or find the same sweep in it."""
        known = self.summary()
        plain = json.loads(to_json(plan))
        if known is not None:
            other = next((key for key in plan if known.get(key) != plain[key]), None)
            if other is not None:
                raise RunExists(
                    f"{str(self.path)!r} holds a sweep with another {other}; give another --out, or continue it "
                    "with the command it was made with"
                )
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise RunExists(f"{str(self.path)!r} already exists and is no sweep; give another --out")
        for left in self.path.rglob(".*.tmp"):
            left.unlink(missing_ok=True)
        if known is None:
            self.save_summary({**plan, "complete": False})

    def summary(self) -> dict[str, Any] | None:
        """sweep.json, or None."""
        path = self.path / "sweep.json"
        if not path.is_file():
            return None
        return read_checked(path, "give another --out: finished runs of this one are in batches/", old=_OLD)

    def save_summary(self, summary: Mapping[str, Any]) -> None:
        """Write sweep.json."""
        write_checked(self.path / "sweep.json", json.loads(to_json(summary)))

    # Batches

    def save_batch(self, records: Sequence[Record]) -> None:
        """Keep a finished batch."""
        runs = [_plain(record) for record in records]
        name = hashlib.sha256("".join(run["digest"] for run in runs).encode()).hexdigest()[:24]
        # mtime=0: the same batch is the same file
        write_bytes(self.path / "batches" / f"{name}.json.gz", gzip.compress(to_json(runs).encode(), mtime=0))

    def finished(self, specs: Sequence[Spec]) -> dict[int, Record]:
        """Those of the specs whose runs are kept here, by position. A damaged file is as if it were not there."""
        wanted = {spec.digest(): (number, spec) for number, spec in enumerate(specs)}
        found: dict[int, Record] = {}
        for path in sorted(self.path.glob("batches/*.json.gz")):
            try:
                runs = json.loads(gzip.decompress(path.read_bytes()))
                read = [(*wanted[run["digest"]], run) for run in runs if run["digest"] in wanted]
                found |= {number: _record(spec, run) for number, spec, run in read}
            except (OSError, EOFError, ValueError, KeyError, TypeError):
                continue
        return found

    def save_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows as CSV."""
        text = io.StringIO()
        names = dict.fromkeys(key for row in rows for key in row)
        lines = csv.DictWriter(text, list(names), lineterminator="\n", restval="")
        lines.writeheader()
        lines.writerows(rows)
        write_text(self.path / name, text.getvalue())


def _plain(record: Record) -> dict[str, Any]:
    outcome = record.outcome
    return {
        "digest": outcome.spec.digest(),
        "metrics": outcome.metrics,
        "claim": outcome.claim._asdict(),
        "participation": outcome.participation,
        "seen": dict(outcome.seen),
        "proven": record.proven,
        "seconds": record.seconds,
        "made": record.made,
    }


def _record(spec: Spec, run: Mapping[str, Any]) -> Record:
    claim = run["claim"]
    conditions = tuple((text, bool(holds)) for text, holds in claim["conditions"])
    proven = run["proven"]
    outcome = Outcome(
        spec=spec,
        metrics=[
            {name: value if name == "round" else float(value) for name, value in row.items()}
            for row in run["metrics"]
        ],
        claim=Claim(**{**claim, "value": float(claim["value"]), "conditions": conditions}),
        participation=np.asarray(run["participation"]),
        seen=run["seen"],
    )
    proven = proven and {**proven, "value": float(proven["value"])}
    return Record(outcome, proven, run["seconds"], run["made"])
