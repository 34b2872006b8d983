"""The command line. It parses, calls the library and prints; nothing imports it.

Exit codes: 0 done, 1 something failed, 2 a given value is wrong, 3 the privacy budget is spent, 4 the ledger or
another file is damaged, 5 an audit shows more than was proved, 6 a federation cannot continue, 7 training
diverged, 130 interrupted (a line says how to continue).
"""

from __future__ import annotations

from functools import partial

from dither.cli import common, datasets, federations, look, plans, privacy, runs

app = common.Commands(
    name="dither",
    cls=common.Program,
    help="Differentially private federated learning that reports claimed, proven and attacked ε.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = (
    *(runs.start, runs.run, runs.presets, runs.keys, runs.evaluate, runs.predict, runs.sweep),
    *(federations.serve, federations.join, plans.plan, look.reproduce),
    *(privacy.stats, privacy.check, privacy.statement, privacy.account, privacy.audit, look.web, look.doctor),
)
GROUPS = {"federation": federations.app, "budget": privacy.budget, "data": datasets.app}
# How `dither --help` groups them.
PANELS = {
    "Train": ("start", "run", "sweep", "evaluate", "predict", "presets", "keys", "data"),
    "Privacy": ("account", "audit", "check", "plan", "statement", "stats", "budget"),
    "Look": ("web", "reproduce", "doctor"),
    "A real federation": ("serve", "join", "federation"),
}
_PANEL = {name: panel for panel, names in PANELS.items() for name in names}
for _command in COMMANDS:
    _quiet = "Print only the address." if _command is look.web else common.QUIET
    app.command(rich_help_panel=_PANEL.get(_command.__name__), quiet=_quiet)(_command)
for _name, _group in GROUPS.items():
    app.add_typer(_group, name=_name, rich_help_panel=_PANEL.get(_name))

app.callback(invoke_without_command=True)(common.top)
main = partial(common.run_program, app)
