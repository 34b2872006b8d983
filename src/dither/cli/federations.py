"""dither serve, dither join, dither federation."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from dither.cli import common
from dither.cli.privacy import print_split
from dither.errors import ConfigError, FederationError
from dither.types import ADVERSARIES, epsilon_text

if TYPE_CHECKING:
    from dither.experiment.report import Report

app = common.Commands(
    help="A real federation: keys, certificates, and whether a party can take part.", no_args_is_help=True
)
ServerFolder = Annotated[
    Path, Option("--federation", metavar="DIR", help="The server's folder from `dither federation init`.")
]
MadeFolder = Annotated[Path, Argument(metavar="DIR", help="The folder created by `init`, with its ca.")]
Hosts = Annotated[list[str] | None, Option("--host", help="Name or address under which parties reach the server.")]
Transport = Annotated[
    str, Option(help="Transport of the messages: flower, or nvflare (NVIDIA FLARE, for many parties).")
]
Days = Annotated[int, Option(min=1, max=36500, help="Days until the server's certificate expires.")]
PartyFolder = Annotated[
    Path,
    Option("--federation", metavar="DIR", help="Your party's folder, from `dither federation request` or `init`."),
]


# reason: one parameter an option, as Typer has it
def serve(
    what: Annotated[str, Argument(metavar="PRESET | SPEC.toml", help="What to train.")],
    federation: ServerFolder,
    address: Annotated[str, Option(help="Where to listen: HOST:PORT.")] = "127.0.0.1:9440",
    out: Annotated[Path | None, Option(help="Run folder; an unfinished one is continued.")] = None,
    settings: common.Settings = None,
    min_clients: Annotated[
        int | None, Option(help="Smallest number of answers for a round (federation.min_clients).")
    ] = None,
    without: Annotated[
        list[str] | None, Option("--without", metavar="PARTY", help="Leave a party out of this run.")
    ] = None,
    wait: Annotated[float, Option(help="Seconds to wait for the parties to connect and agree.")] = 3600.0,
    health: Annotated[str, Option(metavar="HOST:PORT", help="Answer GET /health there, in plain HTTP.")] = "",
    data_dir: common.DataDir = None,
) -> None:
    """Run a federation: wait for the parties, agree, train, and write a run folder."""
    from dither.federation.local import host_and_port
    from dither.spec import Spec

    host, port = host_and_port(address, "--address")
    rule = {} if min_clients is None else {"federation.min_clients": min_clients}
    spec = Spec.from_any(what).with_values(common.values_of(settings) | rule)
    folder = out or Path("runs") / f"federation-{Path(spec.method).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    from dither.federation import serving

    _term_as_interrupt()
    with (
        common.on_interrupt(f"continue with the same command and --out {shlex.quote(str(folder))}"),
        _health_endpoint(health, folder),
        _ServerView() as view,
    ):
        report = serving.serve(
            spec, keys_folder=federation, run_folder=folder, host=host, port=port,
            without=tuple(without or ()), wait_seconds=wait, data_dir=data_dir, on_event=view,
        )  # fmt: skip
    if common.output().json:
        common.print_event("done", folder=str(folder), **report.to_dict())
    elif common.output().text:
        _print_outcome(report, folder)


def _health_endpoint(address: str, folder: Path) -> Any:
    if not address:
        return nullcontext()
    from dither.federation.health import Endpoint
    from dither.federation.local import host_and_port

    return Endpoint(*host_and_port(address, "--health"), folder)


# reason: one parameter an option, as Typer has it
def join(
    data: Annotated[Path, Option("--data", help="Your records: .csv, .parquet or .npz. They stay here.")],
    federation: PartyFolder,
    server: Annotated[str, Option(help="Where the server is: HOST:PORT.")] = "127.0.0.1:9440",
    label: Annotated[str, Option(help="Label column (default: the label of the federation's schema).")] = "",
    ledger: common.LedgerFile = None,
    new_ledger: common.NewLedger = False,
    yes: Annotated[
        bool, Option("--yes", help="Approve the first agreement within --epsilon or your budget, without asking.")
    ] = False,
    approve: Annotated[
        str, Option(metavar="DIGEST", help="Approve the agreement with this digest, without asking.")
    ] = "",
    method: Annotated[
        list[Path] | None,
        Option(metavar="FILE.py", help="File of a method that the agreement may name. Read it first."),
    ] = None,
    model: Annotated[
        list[Path] | None,
        Option(metavar="FILE.py", help="File of a model that the agreement may name. Read it first."),
    ] = None,
    epsilon: Annotated[
        float | None,
        Option(help="Largest ε that a run may cost one of your records; anything larger is refused."),
    ] = None,
    delta: Annotated[float, Option(help="Largest δ allowed with --epsilon.")] = 1e-5,
    test: Annotated[bool, Option("--test", help="Accept noise from a public seed: no protection.")] = False,
    patience: Annotated[float, Option(help="Seconds to keep trying without a connection.")] = 3600.0,
    idle: Annotated[float, Option(help="Seconds to wait for a request from the server.")] = 86400.0,
    behind_supernode: Annotated[
        bool, Option("--behind-supernode", help="Serve a Flower SuperNode on this machine.")
    ] = False,
) -> None:
    """Take part in a federation with your own records, until the run is over."""
    from dither.accounting.ledger import Budget
    from dither.federation import joining, keys
    from dither.federation.agreement import approved_digest

    _term_as_interrupt()
    asked = common.output()

    def ask(agreement: Any, experiment: Any) -> str:
        rows = agreement.describe(keys.party_name(federation), experiment)
        table = [{"what": what, "agreement": value} for what, value in rows]  # some have several rows
        if asked.json:
            common.print_event("terms", digest=agreement.digest, terms=table)
        elif asked.text:
            common.print_table(table, title="What you are asked to agree to")
        before = approved_digest(federation, agreement.purpose)
        warnings = [value for what, value in rows if what == "WARNING" and not test]
        silent = not asked.text
        return _approval(agreement.digest, before, yes=yes, named=approve, silent=silent, warnings=warnings)

    with common.on_interrupt("run the same command to continue"):
        result = joining.join(
            data, label=label, server=server, folder=federation, ledger=ledger, new_ledger=new_ledger,
            approve=ask, files=[*(method or ()), *(model or ())], seeded=test, patience=patience, idle=idle,
            target=None if epsilon is None else Budget(epsilon, delta), behind_supernode=behind_supernode,
            say=_notes(), structured=common.output().json, unread=yes and not approve,
        )  # fmt: skip
    outcome = result.outcome or {}
    if common.output().json:
        spent = [
            {"epsilon": each.epsilon, "budget": each.budget.epsilon if each.budget else None, "delta": each.delta,
             "view": each.view, "adjacency": each.adjacency, "participations": each.participations}
            for each in result.spent
        ]  # fmt: skip
        common.print_event("done", party=result.party, answered=result.answered, outcome=outcome, spent=spent)
    if not common.output().text:
        return
    typer.echo(f"the run is over: {outcome.get('rounds')} rounds, this party answered {result.answered}")
    for charged in result.spent:
        limit = f" of {charged.budget.epsilon:.15g}" if charged.budget else ""
        gaps = "".join(f"; not covered: {gap}" for gap in charged.numbers)
        typer.echo(
            f"ledger: proven ε {epsilon_text(charged.epsilon)}{limit} spent on this file in "
            f"{charged.participations} rounds (δ = {charged.delta:.4g}, {charged.adjacency}, against "
            f"{ADVERSARIES[charged.view]}){gaps}"
        )


def _notes() -> Callable[[str], None]:
    """Prints a line on the way, as text or as an event."""
    asked = common.output()  # known to this thread alone

    def say(line: str) -> None:
        if asked.json:
            common.print_event("note", text=line)
        elif asked.text:
            typer.echo(line)

    return say


# reason: the agreement, what its owner is warned of, and the ways to approve it
def _approval(
    digest: str, before: str | None, *, yes: bool, named: str, silent: bool, warnings: Sequence[str] = ()
) -> str:
    """How the owner approves the agreement with this digest (`before`: one approved earlier), or
    FederationError. What has a warning must be read."""
    if named:
        if named == digest:
            return "--approve"
        raise FederationError(f"the agreement has digest {digest[:16]}, --approve names {named[:16]}")
    if yes:
        if before is None and warnings:
            raise FederationError(
                f"--yes approves no agreement with a warning: {warnings[0]}; read it, and use --approve {digest}"
            )
        if before is None:
            return "--yes"
        raise FederationError(
            f"this is not the agreement approved here ({before[:16]}); approve it with --approve {digest}"
        )
    if silent or not sys.stdin.isatty():
        raise FederationError(
            f"the agreement needs approval, and no terminal is attached; approve it with --approve {digest}"
        )
    try:
        agreed = typer.confirm("Take part under this agreement?")
    except typer.Abort:  # Ctrl-C is no refusal, which would end the run of everybody
        raise KeyboardInterrupt from None
    if not agreed:
        raise FederationError("the owner does not approve the agreement")
    return "asked"


# reason: one parameter an option, as Typer has it
@app.command("init")
def init(
    folder: Annotated[Path, Argument(metavar="DIR", help="Folder to create.")],
    parties: Annotated[
        str, Option(help="Comma-separated names of parties; their keys are created here, too.")
    ] = "",
    requests: Annotated[
        list[Path] | None,
        Option("--request", metavar="FILE", help="A party's request (`dither federation request`)."),
    ] = None,
    host: Hosts = None,
    days: Days = 825,
    transport: Transport = "flower",
    port: Annotated[int, Option(help="Port of the server (nvflare).")] = 9440,
) -> None:
    """Create a federation from the requests of its parties, or with everybody's keys in one place."""
    from dither.federation import keys

    names, hosts = list(common.names_in(parties)), host or ["localhost"]
    if bool(names) == bool(requests):
        raise ConfigError(
            "give either --request FILE for each party, or --parties NAMES to create their keys here"
        )
    if transport != "flower":
        _require(transport)
    if requests:
        keyring = keys.create_from(folder, [keys.read_request(path) for path in requests], hosts=hosts, days=days)
        if transport == "nvflare":
            from dither.federation.nvflare import kits

            kits.establish(folder, host=hosts[0], port=port)
            keyring = keys.publish(folder, keyring)  # with the fingerprint of FLARE's CA
            for path in requests:
                _approve_kit(folder, path)
        _print_members(folder, keyring)
        return
    keys.create(folder, names, hosts=hosts, days=days)
    if transport == "nvflare":
        from dither.federation.nvflare.kits import provision

        provision(folder, names, host=hosts[0], port=port)
    handed = {name: folder / "parties" / name for name in names}
    made = {"server": folder / "server", "parties": handed, "keep_offline": folder / "ca"}
    if not common.emit(made):
        return
    typer.echo(f"server: {folder / 'server'}")
    for name, path in handed.items():
        typer.echo(f"hand to {name}: {path}")
    typer.echo(f"keep offline: {folder / 'ca'} (its holder can impersonate the server)")
    typer.echo("this machine has seen every private key; with --request the parties create their own")


def _approve_kit(folder: Path, path: Path) -> None:
    """Sign the request to NVIDIA FLARE that lies beside a party's request."""
    from dither.federation import keys
    from dither.federation.nvflare import kits

    name = keys.read_request(path).name
    asked = path.with_name(f"{name}.request.zip")
    if not asked.is_file():
        raise ConfigError(f"{str(asked)!r} is missing: {name} makes it with `dither federation request "
                          f"{name} --transport nvflare`; put it next to {path.name!r}")  # fmt: skip
    kits.approve(folder, name, asked, keys.invitation_file(folder, name).with_name(f"{name}.signed.zip"))


def _require(transport: str) -> None:
    from dither.federation import flower, nvflare

    if transport not in ("flower", "nvflare"):
        raise ConfigError(f"--transport {transport!r}: choose flower or nvflare")
    (nvflare if transport == "nvflare" else flower).require()


def _print_members(folder: Path, keyring: Any) -> None:
    from dither.federation import keys

    invitations = {party.name: keys.invitation_file(folder, party.name) for party in keyring.parties}
    facts = {"server": folder / "server", "invitations": invitations, "fingerprint": keyring.fingerprint}
    if common.emit(facts):
        typer.echo(f"server: {folder / 'server'}; keep offline: {folder / 'ca'}")
        for name, path in invitations.items():
            kit = path.with_name(f"{name}.signed.zip")
            also = f" and {kit}" if kit.is_file() else ""
            typer.echo(f"send to {name}: {path}{also} (nothing in it is secret)")
        typer.echo(f"fingerprint, for the parties to compare: {keyring.fingerprint}")


@app.command("request")
def request(
    name: Annotated[str, Argument(metavar="NAME", help="Your party's name in the federation.")],
    folder: Annotated[
        Path | None, Option("--out", metavar="DIR", help="Folder to create (default: NAME).")
    ] = None,
    transport: Transport = "flower",
) -> None:
    """Create your party's keys and the request to send to the organiser."""
    from dither.federation import keys

    folder = folder or Path(name)
    if transport != "flower":
        _require(transport)
    party = keys.request(folder, name)
    paths = [folder / f"{name}.request.json"]
    if transport == "nvflare":
        from dither.federation.nvflare import kits

        paths.append(kits.request(folder, name))
    facts = {"folder": folder, "request": paths[0], "also": paths[1:], "identity": party.identity.hex()}
    if common.emit(facts):
        typer.echo(f"your folder: {folder} (its private keys never leave it)")
        typer.echo(f"send to the organiser: {' and '.join(map(str, paths))} (public keys, signed)")


@app.command("accept")
def accept(
    invitation: Annotated[Path, Argument(metavar="FILE", help="The organiser's invitation.")],
    federation: PartyFolder,
) -> None:
    """Store the list of members in your party's folder, and show what changed."""
    from dither.federation import keys

    keyring, before = keys.accept(federation, invitation)
    kit = invitation.with_name(f"{keys.party_name(federation)}.signed.zip")
    if root := keyring.transport_ca:
        if not kit.is_file():
            raise ConfigError(f"{str(kit)!r} is missing: ask the organiser for it; it belongs to the invitation")
        from dither.federation.nvflare import kits

        kits.package(federation, kit, root)
    names = [party.name for party in keyring.parties]
    known = names if before is None else [party.name for party in before.parties]
    added, removed = [name for name in names if name not in known], [name for name in known if name not in names]
    facts = {"parties": names, "added": added, "removed": removed, "fingerprint": keyring.fingerprint}
    if common.emit(facts):
        typer.echo(f"members: {', '.join(names)}")
        for what, changed in (("added", added), ("removed", removed)):
            if changed:
                typer.echo(f"{what}: {', '.join(changed)}")
        typer.echo(f"fingerprint: {keyring.fingerprint}; compare it with the other parties by telephone")


@app.command("add")
def add(
    folder: MadeFolder, path: Annotated[Path, Argument(metavar="FILE", help="The new party's request.")]
) -> None:
    """Add a party. Everybody gets a new invitation; runs that have begun are not affected."""
    from dither.federation import keys, nvflare

    over_flare = bool(keys.transport_ca(folder))
    if nvflare.is_used(folder / "server") and not over_flare:
        raise ConfigError(
            f"the keys of {str(folder)!r} were made in one place (`init --parties`): NVIDIA FLARE gives nobody "
            "a certificate later: create a new federation with `init --request`"
        )
    keyring = keys.add(folder, keys.read_request(path), lambda: _approve_kit(folder, path) if over_flare else None)
    _print_members(folder, keyring)


@app.command("revoke")
def revoke(
    folder: MadeFolder, name: Annotated[str, Argument(metavar="NAME", help="The party to remove.")]
) -> None:
    """Remove a party. Copy server/ to the server and restart it: it no longer admits the party."""
    from dither.federation import keys

    _print_members(folder, keys.revoke(folder, name))


@app.command("status")
def status(
    folder: Annotated[Path, Argument(metavar="DIR", help="A run folder, or a server's or party's folder.")],
) -> None:
    """Show the state of a run, or the members of a federation (exit code 6: something is wrong)."""
    from dither.federation import health

    facts = health.of_folder(folder)
    if common.emit(facts):
        for name, value in facts.items():
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            if value not in (None, "", []):
                typer.echo(f"{name.replace('_', ' ')}: {shown}")
    sys.exit(0 if facts["healthy"] else FederationError.exit_code)


@app.command("verify")
def verify(
    folder: Annotated[Path, Argument(metavar="RUN", help="A run folder, or a party's folder of a run.")],
    federation: PartyFolder,
) -> None:
    """Check a run folder against the signatures of the server and the parties, or a party's own record of what it
    released in a run."""
    from dither.federation import keys, messages, state
    from dither.federation.agreement import digest_of

    keyring = keys.Keyring.load(federation)
    if (folder / state.RELEASES).is_file():
        signed = state.check_record(folder, keyring)
        last = f"{signed['releases']} messages, the last is {signed['head'][:16]}"
        said = [f"signed by {signed['party']}, nothing changed{' or missing' * signed['complete']}: {last}"]
        if not signed["complete"]:
            said.append("only the server's releases.json shows whether lines are missing at the end")
    else:
        journal = state.Journal(folder)
        signed = journal.verify(keyring)
        said = [f"signed by the server of this federation: {', '.join(sorted(signed['files']))}"]
        agreed = journal.agreed()
        stated = state.load_statements(folder, digest_of(agreed), keyring) if agreed else {}
        silent = [name for name in agreed.get("names", ()) if name not in stated]
        signed |= {"releases": stated, "unstated": silent}
        said += [
            f"{n} released {each['releases']} messages, the last is {each['head'][:16]}"
            for n, each in stated.items()
        ]
        if signed["unsigned"]:  # such as an audit that was made afterwards
            said.append(f"not signed, so anyone's: {messages.printable(', '.join(signed['unsigned']))}")
        said += [f"{n} did not say what it released, or is no longer a member of this federation" for n in silent]
    if common.emit(signed):
        typer.echo("\n".join(said))


@app.command("renew")
def renew(folder: MadeFolder, host: Hosts = None, days: Days = 825) -> None:
    """Issue a new certificate for the server; parties need not change anything."""
    from dither.federation import keys

    keys.issue(folder, hosts=host or ["localhost"], days=days)
    ends = keys.expiry(folder / "server" / "server.pem")
    if common.emit({"server": folder / "server", "until": f"{ends:%Y-%m-%d}"}):
        typer.echo(f"new certificate in {folder / 'server'}, until {ends:%Y-%m-%d}")


@app.command("check")
def check(
    federation: PartyFolder,
    data: Annotated[Path | None, Option("--data", help="Your records.")] = None,
    label: Annotated[str, Option(help="Label column.")] = "",
    server: Annotated[str, Option(help="Where the server is: HOST:PORT.")] = "",
    ledger: common.LedgerFile = None,
) -> None:
    """Check whether this party can take part: keys, versions, data, connection, clock, budget."""
    from dither.federation import joining

    findings = joining.check(federation, data=data, label=label, server=server, ledger=ledger)
    wrong = sum(not finding.good for finding in findings)
    if common.emit([finding._asdict() for finding in findings]):
        for finding in findings:
            mark = "[green]ok[/]  " if finding.good else "[red]no[/]  "
            common.terminal().print(f"{mark}{common.escape(finding.what)}", highlight=False, soft_wrap=True)
        left_out = [name for name, given in (("--data", data), ("--server", server)) if not given]
        said = "this party can take part" + f"; not checked without {' and '.join(left_out)}" * bool(left_out)
        said = f"this party cannot take part yet: {wrong} of {len(findings)} checks failed" if wrong else said
        common.terminal().print(said, soft_wrap=True)
    sys.exit(FederationError.exit_code if wrong else 0)


@app.command("demo")
def demo(
    folder: Annotated[
        Path | None,
        Option("--out", help="Folder (default: runs/federation-demo-TIME); a stopped demonstration is continued."),
    ] = None,
    parties: Annotated[int, Option(min=3, max=64, help="How many institutions.")] = 4,
    transport: Transport = "flower",
    data_dir: common.DataDir = None,
) -> None:
    """Run a server and its parties on this machine: TLS, authenticated nodes, secure aggregation, CPFed, Adult."""
    _require(transport)
    from dither.federation import demo
    from dither.federation.local import free_port

    folder = folder or Path("runs") / f"federation-demo-{datetime.now():%Y%m%d-%H%M%S}"
    if folder.exists() and not demo.stopped(folder):
        raise ConfigError(f"{str(folder)!r} already exists; give another --out")
    _term_as_interrupt()
    asked = common.output()
    flags = ["--json"] * asked.json + ["--quiet"] * (asked.quiet and not asked.json)
    with common.on_interrupt(f"continue with: dither federation demo --out {shlex.quote(str(folder))}"):
        code = demo.run(
            folder, port=free_port(), parties=parties, transport=transport, data_dir=data_dir,
            say=_notes(), flags=flags,
        )  # fmt: skip
    sys.exit(code)


_LINES = {  # by event
    "listening": "listening on {address} for {parties}",
    "waiting": "waiting for {parties} to {to}",
    "excluded": "{party} is excluded from round {number} on: {why}",
    "joined": "{party} is here with {records:,} records",
    "accepted": "{party} takes part",
    "enrolled": "enrolled for secure aggregation: the server sees masked words and their sum",
    "restart": "{what} died; restarting it",
    "left out": "continuing without {party} until the server is restarted: {why}",
}


class _ServerView(common.Live):
    """Live progress of a federation: a bar on a terminal, lines elsewhere; JSON lines with --json."""

    def __init__(self) -> None:
        super().__init__()
        self._as_json, self._console = common.output().json, common.terminal()
        self._score = ""  # of a server without test records

    def __call__(self, event: str, facts: dict[str, Any]) -> None:
        if self._as_json:
            common.print_event(event, **facts)
        if self.silent:
            return
        line = self._line(event, facts)
        if event == "start" and self._console.is_terminal:
            task = {"total": facts["rounds"], "completed": facts["done"], "score": self._score}
            self._start_bar(common.ROUNDS, "{task.fields[score]}", self._console, **task)
        if event == "round" and self._bar is not None:
            self._bar.update(self._task, completed=facts["round"] + 1, score=self._score)
            line = "" if not facts["missing"] and not facts["refused"] else line
        if line:
            self._console.print(common.escape(line), highlight=False, soft_wrap=True)

    def _line(self, event: str, facts: dict[str, Any]) -> str:
        if event == "terms":
            warning = f"\nWARNING: {facts['warning']}" * bool(facts["warning"])
            safe = f"; {facts['collusion']}" * bool(facts["collusion"])
            return f"agreement {facts['digest'][:16]} sent to {len(facts['parties'])} parties{safe}{warning}"
        if event == "start":
            return f"continuing after round {facts['done']}" if facts["done"] else ""
        if event == "round":
            for name, text in (("test_accuracy", "accuracy"), ("test_r2", "R²")):
                if facts.get(name) is not None:
                    self._score = f"{text} {facts[name]:.4f}"
            parts = [f"round {facts['round'] + 1}/{facts['of']}", f"{len(facts['counted'])} parties"]
            if facts["missing"]:
                parts.append(f"missing {', '.join(facts['missing'])}")
            parts += [f"{name} refused: {why}" for name, why in facts["refused"].items()]
            return "  ".join([*parts, *filter(None, [self._score]), f"{facts['seconds']:.2f} s"])
        told = {**facts, "parties": ", ".join(facts.get("parties", ())), "number": facts.get("round", 0) + 1}
        return _LINES.get(event, "").format_map(told)


def _print_outcome(report: Report, folder: Path) -> None:
    totals = report.federation
    if totals is None:
        raise FederationError(f"{str(folder)!r} holds no run of a federation")
    common.print_table(
        [
            {
                "party": name,
                "records": party.records,
                "counted": party.counted,
                "missing": party.missing,
                "refused": party.refused,
                "KiB up": round(party.bytes_up / 1024),
                "KiB down": round(party.bytes_down / 1024),
            }
            for name, party in totals.parties.items()
        ],
        title="Rounds by party",
    )
    common.print_report(report)
    print_split(totals.split)
    if (folder / "scores.json").is_file():
        from dither.experiment.evaluation import PrivateScores

        scores = PrivateScores.from_json((folder / "scores.json").read_text(encoding="utf-8"))
        common.print_table(
            scores.rows(),
            title=f"Private scores on {scores.records:,} records that training left out",
            footer=f"one ε = {report.spec.privacy.project_epsilon:.15g} at δ = {report.spec.privacy.delta:g} "
            "covers schema, training and evaluation, if nothing else was spent; each party's ledger shows it",
        )


def _term_as_interrupt() -> None:
    """SIGTERM stops a server or a node as Ctrl-C does: children are ended, files are whole."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
