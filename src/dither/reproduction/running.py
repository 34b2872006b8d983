"""`reproduce`: figures by name, computed, judged, drawn and reported."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from dither.errors import DataError
from dither.experiment.folder import to_json, write_bytes, write_text
from dither.reproduction import computing, drawing, figures, report
from dither.reproduction.accounts import Book
from dither.reproduction.cache import Cache
from dither.reproduction.figure import Claim, Figure, NotComputed, View
from dither.reproduction.judging import NOT_JUDGED, Verdict


class Result(NamedTuple):
    """What a reproduction found: one entry a figure, and where the report lies."""

    scale: str
    figures: list[dict[str, Any]]
    made: dict[str, Any]
    report: Path | None

    @property
    def claims(self) -> list[dict[str, Any]]:
        """Every verdict, in the papers' order."""
        return [{"figure": figure["id"], **claim} for figure in self.figures for claim in figure["claims"]]


def reproduce(
    what: str | Sequence[str] = "all",
    *,
    scale: str = "quick",
    out: str | Path | None = None,
    cache: str | Path | None = None,
    use_cache: bool = True,
    data_dir: str | Path | None = None,
    only_compute: bool = False,
    command: str = "",
    on_progress: Callable[[computing.Progress], None] | None = None,
    on_figure: Callable[[dict[str, Any]], None] | None = None,
) -> Result:
    """Compute, judge and draw figures: "all", a paper ("nbafl"), or one ("nbafl/fig2").

    `out` is the folder for pictures, CSVs and report.html; without it nothing is drawn. Finished runs are kept in
    `cache` (the platform's cache folder by default). `only_compute` fills the cache and stops there: draw the
    report later, elsewhere, from the same folder.
    """
    chosen = figures.select(list(what) if not isinstance(what, str) else what)
    throwaway = None if use_cache else tempfile.mkdtemp(prefix="dither-reproduce-")
    try:
        store = Cache(throwaway or cache)
        wanted = computing.points(chosen, scale)
        missing = computing.missing(wanted, store)
        refused = computing.compute(missing, store, data_dir=data_dir, on_progress=on_progress)
        made = {
            "command": command,
            "when": datetime.now().astimezone().isoformat(timespec="seconds"),
            "computed": len(missing),
            "runs": len(wanted),
            "seconds": round(sum(store[point.key].seconds for point in wanted if point.key in store), 1),
            "versions": computing.versions(),
        }
        if only_compute:
            if refused:
                raise DataError("; ".join(refused.values()))
            return Result(scale, [], made, None)
        book = Book(store, data_dir)
        entries = []
        for figure in chosen:
            entry = _entry(figure, scale, store, book, Path(out) if out else None, refused)
            entries.append(entry)
            if on_figure:
                on_figure(entry)
        result = Result(scale, entries, made, None)
        if out is None:
            return result
        page = Path(out) / "report.html"
        write_text(page, report.page(result))
        plain = {"scale": scale, "made": made, "figures": [_without_images(entry) for entry in entries]}
        write_text(Path(out) / "report.json", to_json(plain, indent=1))
        return result._replace(report=page)
    finally:
        if throwaway:
            shutil.rmtree(throwaway, ignore_errors=True)


def _entry(
    figure: Figure, scale: str, store: Cache, book: Book, out: Path | None, refused: dict[str, str]
) -> dict[str, Any]:
    """One figure, judged and drawn: plain values, as the report and --json show them."""
    views = figure.views(scale, store, book)
    printed = views[0]
    entry: dict[str, Any] = {
        "id": figure.id,
        "paper": figure.paper,
        "number": figure.number,
        "title": figure.title,
        "shows": figure.shows,
        "data": printed.base.data.name if printed.seeds else "",
        "scale": scale,
        "seeds": len(printed.seeds),
        "reduced": printed.reductions(),
        "settings": settings(figure, printed) if printed.seeds else "",
        "proven_note": figure.proven_note,
        "notes": list(figure.notes),
        "refused": "",
        **_cost(views),
    }
    try:
        entry["claims"] = [_judged(claim, views) for claim in figure.claims]
        entry["tables"] = [table._asdict() for table in figure.tables(printed)] if figure.tables else []
        entry["epsilons"] = [row for view in views for row in epsilons(view)]
    except (NotComputed, DataError) as error:
        reason = refused.get(printed.base.data.name, str(error))
        nothing = Verdict(NOT_JUDGED, reason)
        entry |= {"refused": reason, "tables": [], "epsilons": []}
        entry["claims"] = [_row(claim, nothing, None) for claim in figure.claims]
        return entry
    if out is not None:
        canvas = drawing.draw(figure, views)
        stem = figure.id.replace("/", "-")
        entry["png"] = drawing.encoded(canvas, "png")
        canvas.set_layout_engine("none")  # both pictures in the layout that was found for the first
        write_bytes(out / f"{stem}.png", entry["png"])
        write_bytes(out / f"{stem}.svg", drawing.encoded(canvas, "svg"))
        write_text(out / f"{stem}.csv", drawing.raw(figure, views))
        entry["files"] = [f"{stem}.{kind}" for kind in ("png", "svg", "csv")]
    return entry


def _judged(claim: Claim, views: Sequence[View]) -> dict[str, Any]:
    second = None
    if claim.proven and len(views) > 1:
        second = claim.judge(views[1])
    return _row(claim, claim.judge(views[0]), second)


def _row(claim: Claim, printed: Verdict, proven: Verdict | None) -> dict[str, Any]:
    return {
        "id": claim.id,
        "variant": claim.variant,
        "claim": claim.text,
        "errata": list(claim.errata),
        "note": claim.why,
        "printed": printed._asdict(),
        "proven": proven._asdict() if proven else None,
    }


def settings(figure: Figure, view: View) -> str:
    """The figure's base in one line."""
    base, privacy = view.base, view.base.privacy
    words = [
        f"{base.method} on {base.data.name}",
        f"{base.num_clients} clients, {base.cohort_size} a round",
        f"{base.num_rounds} rounds of {base.local_steps} local steps",
        "full batches"
        if base.batch_sampling == "full"
        else f"batches of {base.batch_size} ({base.batch_sampling})",
        f"learning rate {base.client_lr:g}",
        f"δ = {privacy.delta:g}",
    ]
    if privacy.clip != "none":
        words.append(f"clip {privacy.clip_norm:g} ({privacy.clip})")
    return "; ".join(words) + "; what the lines vary apart"


def _cost(views: Sequence[View]) -> dict[str, Any]:
    """How long the figure's runs took, where, and with which versions (runs may be shared with other figures)."""
    records = []
    for view in views:
        for _, values in view.settings():
            for seed in view.seeds:
                try:
                    records.append(view.record(values, seed))
                except NotComputed:
                    continue
    return {
        "runs": len(records),
        "seconds": round(sum(record.seconds for record in records), 1),
        "devices": dict(Counter(record.device for record in records)),
        "versions": sorted({f"dither {r.versions['dither']}, jax {r.versions['jax']}" for r in records}),
    }


def epsilons(view: View) -> list[dict[str, Any]]:
    """Claimed and proven ε of each setting (first seed)."""
    rows = []
    for name, values in view.settings():
        if not view.seeds:
            continue
        spec = view.spec(values, view.seeds[0])
        claim = view.record(values, view.seeds[0]).claim
        privacy = spec.privacy
        if claim["value"] == "inf":
            continue
        row = {
            "view": "at equal proven ε" if view.proven else "as printed",
            "setting": name,
            "claimed": f"{epsilon_text(claim['value'])} per {claim['unit']}",
            "proven": f"{epsilon_text(view.accounts.proven_epsilon(spec))} per run",
            "seen by the adversary": _SEEN[privacy.view],
        }
        if privacy.unit == "message":
            row["proven"] += f", {epsilon_text(view.accounts.proven_epsilon(spec, 'message'))} per message"
        rows.append(row)
    return rows


_SEEN = {
    "upload": "every upload",
    "sum": "sums of uploads",
    "broadcast": "broadcasts and one upload",
    "final": "model",
}


def epsilon_text(value: Any) -> str:
    """ε to three digits."""
    number = float(value)
    return "∞" if math.isinf(number) else f"{number:.3g}"


def _without_images(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "png"}
