"""The ledger: a durable record of everything that was released about each data set, with budgets that cannot be
overspent.

    entries   budgets, charges and their canonical text
    sketch    which records a data set holds, keyed
    store     the file, its key, the hash chain, the anchors; what the user's state folder remembers of ledgers
    book      the accounts in memory, and their ε
    filter    what several runs cost together, when later ones are chosen after looking at earlier ones
    ledger    `Ledger`, which ties them together

A ledger is one SQLite file. For each (data set, client) it keeps every release that any run made. It stores
releases, not ε, so a budget may later be stated for another δ, view or adjacency. A charge is committed **before**
the release leaves, so a crash can only over-count. Checking all budgets and writing the new entry are one
transaction, exclusive among all processes.

What ε means here. It is `accounting.proven` over all participations ever charged, at the budget's δ, view and
adjacency, with participation as it happened. Assumptions are not counted. If there is no proof, ε is ∞ and a
client with a budget cannot pay. Shuffled epochs do not continue from one run to the next. Later runs may be
chosen by looking at earlier ones: over runs, ε is that of a privacy filter (`filter`, R10). With its first charge,
each run registers everything it will reveal. `Spent.not_covered` names what the filter does not cover.

What the file protects against. Every entry carries an HMAC over the previous one's and its own content, under
a random key in a file beside the ledger (mode 0600). Without the key, nobody can

- edit, insert, reorder or delete entries other than the newest: `verify`, and every program that opens the
  ledger, raises `LedgerError`;
- learn anything about the data from its id (`fingerprint` is keyed), or recognise it in another ledger.

What is detected **with an anchor** (one in the user's state folder is always kept, see `store`; others are
files kept apart, or heads that somebody remembers):

- the newest entries deleted, the file restored from an older copy, or its -wal file removed after a crash;
- two copies of one ledger that are both charged: each looks right by itself, but an anchor has seen only one of
  them;
- the ledger deleted together with its key, or another one in its place.

A keyed sketch recognises the same records in another file (`sketch` states its limits), also in another ledger of
the same user.

What is **not detected** at all:

- someone who holds the key can rewrite the whole chain; only anchors beyond their reach show it;
- an anchor that is rolled back or deleted together with the ledger, and entries newer than every anchor;
- records whose values were changed in many columns before they are charged;
- releases that a program makes without charging them.
"""

from dither.accounting.ledger.book import composed
from dither.accounting.ledger.entries import Budget, Charge, Entry, Spent
from dither.accounting.ledger.ledger import Ledger
from dither.accounting.ledger.store import Anchor, read_anchor

__all__ = ["Anchor", "Budget", "Charge", "Entry", "Ledger", "Spent", "composed", "read_anchor"]
