"""Everything Dither raises on purpose.

    DitherError
    ├── ConfigError            a value from the user is wrong          (exit code 2)
    │   ├── SpecError          unknown key, preset or method; a value out of range
    │   ├── DataError          a table, schema or download that cannot be used
    │   ├── RunExists          the run folder is taken, or belongs to another spec
    │   └── DamagedFile        a file that Dither wrote does not hold what was written (exit code 4)
    ├── NoProof                no theorem covers this combination: the proven ε is ∞
    ├── BudgetExhausted        the next release would exceed the budget (exit code 3)
    ├── LedgerError            the ledger is damaged, tampered with, or older than an anchor says (exit code 4)
    ├── ProtocolAbort          a secure-aggregation step cannot continue safely
    ├── FederationError        a real federation cannot continue: no server, agreement refused (exit code 6)
    ├── ProcessError           the processes of one simulation cannot continue together
    └── ClientRefused          a client's update is not finite or does not fit

Each message is one line that names the bad value and the fix. The command line prints it without a
traceback; library users catch `DitherError`, or the leaf they care about.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DitherError(Exception):
    """Base class of all errors raised by Dither on purpose."""

    exit_code = 1


class ConfigError(DitherError, ValueError):
    """A value the user gave is wrong."""

    exit_code = 2


class SpecError(ConfigError):
    """A run specification that cannot be used."""


class DataError(ConfigError):
    """A table, schema or download that cannot be used."""


class DataWarning(UserWarning):
    """Cells of a table that are not taken for what they say."""


class RunExists(ConfigError):
    """The run folder is taken, or its checkpoint belongs to another spec."""


class DamagedFile(ConfigError):
    """A file that Dither wrote does not hold what was written."""

    exit_code = 4


class NoProof(DitherError):
    """No theorem covers this combination of sampler, clip, noise and adversary."""


class BudgetExhausted(DitherError):
    """The next release would exceed the privacy budget."""

    exit_code = 3


class LedgerError(DitherError):
    """The ledger is damaged, tampered with, or older than an anchor says."""

    exit_code = 4


class ProtocolAbort(DitherError):
    """A secure-aggregation step cannot continue safely."""


class FederationError(DitherError):
    """A real federation cannot continue: no server, a certificate or the agreement is refused, too few
    parties are there."""

    exit_code = 6


class ProcessError(DitherError):
    """Processes of one simulation cannot connect, differ, or have lost one of them. Its exit code is
    that of the process at fault, if it is known."""


class ClientRefused(DitherError):
    """A client's update is not finite or does not have the agreed shape."""


def extra(name: str) -> str:
    """How to install an extra of Dither. It is on no index: whatever has its name there is not this package."""
    return f"pip install '.[{name}]' in a clone of Dither"


def did_you_mean(name: str, known: Iterable[str], listed: str = "") -> str:
    """The text "; did you mean ...?" for an unknown name, or where none is close the known names (or `listed`)."""
    known = sorted(known)
    lower = {each.lower(): each for each in known}
    ends = [each for each in known if each.rpartition(".")[2] == name]
    if near := ends or difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.55):
        return f"; did you mean {lower[near[0].lower()]!r}?"
    return f"; {listed or 'known: ' + ', '.join(known)}"
