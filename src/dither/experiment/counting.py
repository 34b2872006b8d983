"""Private counts over institutions: the one mechanism behind statistics, private schemas and private evaluation.

A `Question` is public: which columns, which bins, which categories. Each institution counts its records into cells
and adds a discrete Gaussian to every cell (exact, on the integers: `privacy.discrete`). What one record can change
follows from the question alone, so that ε is fixed, and charged, before the first look. docs/privacy.md has the
proof. `Institution` is one institution's side, the same in a simulation and in a federation; `Counting` asks all
of them in one process.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from scipy.special import ndtri

from dither.accounting import ZERO_OUT, gaussian_mu
from dither.accounting.ledger import Charge, Ledger
from dither.data.drafts import UNSHARED
from dither.data.schema import MISSING, MISSING_NUMBER, canonical, factorize, parse_numbers
from dither.errors import DataError, SpecError
from dither.experiment.report import decode
from dither.privacy.discrete import Words, discrete_gaussian, os_words
from dither.simulation.aggregation import seeded_words
from dither.types import ExactNoise, Release, Sampling

if TYPE_CHECKING:
    import pandas as pd

PURPOSES = ("schema", "statistics", "evaluation")
SURVEY, NAMES, HISTOGRAM, CATEGORIES, SUMS = "survey", "names", "histogram", "categories", "sums"
WEIGHTS = "weights"
BINS = 64  # of a number's range
UNITS = 1 << 16  # in which sums are counted: of the largest value that a record may have
EXPONENTS = range(-20, 41)  # ranges are found among powers of two
MARK_CELL, TEXT_CELL, NUMBER_CELL, POWER_CELLS = 0, 1, 2, 3  # of a survey
MOST_NAMES = 64  # of a column that an institution lists
_SEED = 22  # tells streams of this noise from others of the same seed
_LONGEST_NAME = 1000  # characters
_MOST_LISTED = 1 << 19  # bytes of names in a question, which may list those of the label twice
MOST_CELLS = 1 << 20  # of one question
_ROUNDING = 4.0  # variance of a discrete Gaussian that the proof gives away (s = 2, docs/privacy.md)
_LEAST_SHARE = 1e-4  # so that there are at most 10,000 questions
_DISTANCE = 1e-20  # of all cells of all questions from a rounded Gaussian: below 10^13 of them, 10^-33 each


class Question(NamedTuple):
    """What every institution counts, in all `columns`. An empty cell of the table is counted nowhere.

    survey      marks for a missing number, texts, numbers, and the numbers by their power of two
    names       texts that enough records of one institution have; answered by a list, not by a sum
    histogram   numbers in `bins` equal parts of each column's range
    categories  texts: one cell for each of the column's categories, one for all others
    sums        numbers scaled by the range to [0, 1], and their squares, in units of 2^-16
    weights     numbers in `bins` equal parts of the range: for each row of `weights`, the sum, in units of 2^-16,
                of what the row gives to a record's part and class (class by class; no other class counts)

    With `label`, histograms and categories are counted for each of its `classes` (and one more for the rest).
    """

    kind: str
    columns: tuple[str, ...]
    share: float  # of the budget: of μ²
    ranges: tuple[tuple[float, float], ...] = ()
    categories: tuple[tuple[str, ...], ...] = ()
    bins: int = BINS
    label: str = ""
    classes: tuple[str, ...] = ()
    weights: tuple[tuple[float, ...], ...] = ()

    @property
    def touched(self) -> int:
        """The square of how far one record moves the counts, in ℓ2."""
        # Of each column a record adds the weights of its part, up to `UNITS` to two sums, 1 to two cells of a
        # survey, or 1 to one other cell.
        if self.kind == WEIGHTS:
            return len(self.columns) * int(np.max(np.sum(self.units() ** 2, axis=0)))
        return len(self.columns) * {SUMS: 2 * UNITS**2, SURVEY: 2}.get(self.kind, 1)

    def units(self) -> np.ndarray:
        """The weights in whole units."""
        return np.asarray(np.rint(np.array(self.weights) * UNITS), np.int64)

    def shapes(self) -> list[tuple[int, int]]:
        """The cells of each column: (classes, cells)."""
        if self.kind == WEIGHTS:
            return [(1, len(self.weights))] * len(self.columns)
        groups = len(self.classes) + 1 if self.label else 1
        if self.kind == CATEGORIES:
            return [(groups, len(listed) + 1) for listed in self.categories]
        width = {SURVEY: POWER_CELLS + 2 * len(EXPONENTS) + 1, SUMS: 2}.get(self.kind, self.bins)
        return [(groups, width)] * len(self.columns)

    def split(self, cells: np.ndarray) -> list[np.ndarray]:
        """The answer, column by column."""
        sizes = [math.prod(shape) for shape in self.shapes()]
        parts = np.split(np.asarray(cells), np.cumsum(sizes)[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes(), strict=True)]

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "categories": [list(each) for each in self.categories]}

    @classmethod
    def from_dict(cls, received: Mapping[str, Any]) -> Question:
        """A question from JSON that anybody may have written; `SpecError` if it is none."""
        try:
            question = decode(cls, received)
        except (TypeError, ValueError) as error:
            raise SpecError(f"a question that cannot be read: {type(error).__name__}") from None
        return question.check()

    def check(self) -> Question:
        """Itself, or `SpecError`."""
        if self.kind not in _COUNTERS and self.kind != NAMES:
            raise SpecError(f"a question of unknown kind {self.kind!r}")
        if not (_LEAST_SHARE <= self.share <= 1 and self.columns and 1 <= self.bins <= 1 << 12):
            raise SpecError(f"a question with share={self.share}, {len(self.columns)} columns, {self.bins} bins")
        if len(set(self.columns)) < len(self.columns):
            raise SpecError("a question that names a column twice")
        if self.kind in (HISTOGRAM, SUMS, WEIGHTS):
            good = [-1e300 < low < high < 1e300 and high - low > 1e-300 for low, high in self.ranges]
            if len(good) != len(self.columns) or not all(good):
                raise SpecError("a question needs a range low < high for each of its columns")
        if self.kind == WEIGHTS:
            cells = len(self.classes) * self.bins
            if not (self.label and self.weights and all(len(row) == cells for row in self.weights)):
                raise SpecError(
                    f"a question needs rows of {cells} weights, one for each part and class of a label"
                )
            if not all(-1 <= weight <= 1 for row in self.weights for weight in row):
                raise SpecError("a question with a weight that is not between -1 and 1")
        if self.kind == CATEGORIES and len(self.categories) != len(self.columns):
            raise SpecError("a question needs categories for each of its columns")
        counted = (len(self.classes) + 1) * self.bins * len(self.columns) if self.kind == WEIGHTS else 0
        if max(counted, sum(math.prod(shape) for shape in self.shapes())) > MOST_CELLS:
            raise SpecError(f"a question of more than {MOST_CELLS:,} cells")
        return self


# One institution


class Columns:
    """A table whose columns are read once, cell by cell: no record changes how another one is read."""

    def __init__(self, table: pd.DataFrame) -> None:
        self.table = table
        self._read: dict[tuple[str, bool], Any] = {}

    def __len__(self) -> int:
        return len(self.table)

    @property
    def names(self) -> list[str]:
        return [str(name) for name in self.table.columns]

    def texts(self, name: str) -> tuple[np.ndarray, list[str]]:
        """(codes, texts): cell i reads `texts[codes[i]]`; a missing cell has code -1."""
        if (name, False) not in self._read:
            column = self.table[name] if not self._holds_numbers(name) else self._floats(name)
            self._read[name, False] = factorize(column, MISSING)
        codes, texts = self._read[name, False]
        return codes, texts

    def numbers(self, name: str) -> np.ndarray:
        """The column as finite numbers, NaN for everything else."""
        if (name, True) not in self._read:
            if self._holds_numbers(name):  # the same numbers, without a detour by texts
                values = self._floats(name).to_numpy()
            else:
                codes, texts = self.texts(name)
                values = np.append(parse_numbers(texts), np.nan)[codes]
            self._read[name, True] = np.where(np.isfinite(values), values, np.nan)
        numbers: np.ndarray = self._read[name, True]
        return numbers

    def kinds(self, name: str) -> tuple[int, int, int]:
        """How many cells are marks for a missing number, are other texts, and are numbers."""
        numbers = self.numbers(name)
        count = int(np.isfinite(numbers).sum())
        if self._holds_numbers(name):
            return 0, int(self.table[name].notna().sum()) - count, count
        codes, texts = self.texts(name)
        mark = np.array([*(text in MISSING_NUMBER for text in texts), False])[codes]
        other = np.isnan(numbers) & (codes >= 0)
        return int((other & mark).sum()), int((other & ~mark).sum()), count

    def _floats(self, name: str) -> pd.Series:
        """A column of numbers as floats, whether or not a cell is empty (which makes floats of the others)."""
        import pandas as pd

        return pd.Series(self.table[name].to_numpy(np.float64, na_value=np.nan))

    def _holds_numbers(self, name: str) -> bool:
        """Whether the file itself declares a type of numbers (Parquet)."""
        import pandas as pd

        if name not in self.names:
            raise DataError(f"column {name!r} is not in the table; give every file the same header")
        kind = self.table[name].dtype
        return pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind)

    def codes(self, name: str, listed: Sequence[str]) -> np.ndarray:
        """The place of each cell in `listed`; its length for other texts, -1 for missing cells."""
        codes, texts = self.texts(name)
        place = {text: number for number, text in enumerate(listed)}
        answer: np.ndarray = np.array([*(place.get(text, len(listed)) for text in texts), -1], np.int64)[codes]
        return answer


class Institution:
    """One institution's side: it counts, adds its noise, and answers within its budget alone."""

    def __init__(self, table: Columns, mu: float, slip: float, words: Words = os_words) -> None:
        self.table, self.mu, self.slip, self.left = table, mu, slip, 1.0
        self._words = words

    def spend(self, question: Question) -> float:
        """The standard deviation of the noise of each cell. The question's share is spent from now on."""
        question.check()
        if question.share > self.left + 1e-9:
            raise SpecError(f"share={question.share:g} is more than the {self.left:g} of the budget that is left")
        self.left -= question.share
        return noise_std(question, self.mu)

    def answer(self, question: Question) -> np.ndarray:
        """The counts with noise, all cells in one row of whole numbers."""
        if question.kind == NAMES:
            raise SpecError("names are a list, not counts")
        std = self.spend(question)
        return self._noisy(_COUNTERS[question.kind](question, self.table), std)

    def names(self, question: Question) -> list[list[str]]:
        """Of each column the texts whose noisy count is above a threshold, the most frequent ones first."""
        std, threshold = self.spend(question), name_threshold(question, self.mu, self.slip)
        listed = []
        for codes, texts in [self.table.texts(name) for name in question.columns]:  # all are read before any noise
            counts = np.bincount(codes[codes >= 0], minlength=len(texts))
            kept = [i for i, text in enumerate(texts) if counts[i] and len(text) <= _LONGEST_NAME]
            noisy = self._noisy(counts[kept], std)
            order = np.argsort(-noisy, kind="stable")[:MOST_NAMES]
            listed.append([texts[kept[i]] for i in order if noisy[i] > threshold])
        return listed

    def _noisy(self, counts: np.ndarray, std: float) -> np.ndarray:
        counts = np.asarray(counts, np.int64).reshape(-1)
        return np.asarray(counts + discrete_gaussian(counts.size, Fraction(std**2), words=self._words))


def noise_std(question: Question, mu: float) -> float:
    """Of one institution's counts."""
    return math.sqrt(question.touched / (question.share * mu**2) + _ROUNDING)


def name_threshold(question: Question, mu: float, slip: float) -> float:
    """The noisy count above which an institution lists a text."""
    # A text that one record alone has is listed where its noise exceeds this: in no column of any question, but
    # for chance `slip`. Of the 2, one is that record, one a discrete Gaussian's tail beyond a continuous.
    return 2 - noise_std(question, mu) * float(ndtri(slip * question.share / len(question.columns)))


# Cells. A record touches one of every column in each of these (two in surveys and sums), a blank one none.


def _survey(question: Question, table: Columns) -> np.ndarray:
    columns = ((table.kinds(name), table.numbers(name)) for name in question.columns)
    return np.array([[*kinds, *_powers_of_two(numbers[np.isfinite(numbers)])] for kinds, numbers in columns])


def _powers_of_two(values: np.ndarray) -> np.ndarray:
    """How many values lie in each power of two: the negative ones from the largest down, 0, the positive ones."""
    # Exact, unlike a logarithm: a record counts in the same cell wherever it stands.
    size = np.clip(np.frexp(values)[1] - 1, EXPONENTS[0], EXPONENTS[-1])
    tiny = np.abs(values) < 2.0 ** EXPONENTS[0]
    place = np.where(tiny, 0, np.sign(values) * (size - EXPONENTS[0] + 1)).astype(np.int64)
    cells: np.ndarray = np.bincount(place + len(EXPONENTS), minlength=2 * len(EXPONENTS) + 1)
    return cells


def _scaled(question: Question, table: Columns, at: int) -> tuple[np.ndarray, np.ndarray]:
    """Which cells hold numbers, and these scaled by the range to [0, 1]."""
    low, high = question.ranges[at]
    values = table.numbers(question.columns[at])
    number = np.isfinite(values)
    with np.errstate(over="ignore"):  # no warning tells of a record
        return number, np.clip((values[number] - low) / (high - low), 0.0, 1.0)


def _groups(question: Question, table: Columns) -> np.ndarray | int:
    """The class of each record; one more for every other label, and for none."""
    if not question.label:
        return 0
    codes = table.codes(question.label, question.classes)
    return np.where(codes < 0, len(question.classes), codes)


def _by_group(groups: np.ndarray | int, kept: np.ndarray, place: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    first = groups[kept] if isinstance(groups, np.ndarray) else groups
    return np.bincount(first * shape[1] + place, minlength=shape[0] * shape[1])


def _histogram(question: Question, table: Columns) -> np.ndarray:
    groups, rows = _groups(question, table), []
    shape = (len(question.classes) + 1 if question.label else 1, question.bins)
    for at in range(len(question.columns)):
        number, scaled = _scaled(question, table, at)
        place = np.minimum((scaled * question.bins).astype(np.int64), question.bins - 1)
        rows.append(_by_group(groups, number, place, shape))
    return np.concatenate(rows)


def _weights(question: Question, table: Columns) -> np.ndarray:
    units = question.units()
    counts = _histogram(question, table).reshape(len(question.columns), -1)
    return np.asarray(counts[:, : units.shape[1]] @ units.T)  # the last group, of other labels, has no weight


def _categories(question: Question, table: Columns) -> np.ndarray:
    groups, rows = _groups(question, table), []
    for name, listed, shape in zip(question.columns, question.categories, question.shapes(), strict=True):
        codes = table.codes(name, listed)
        rows.append(_by_group(groups, codes >= 0, codes[codes >= 0], shape))
    return np.concatenate(rows)


def _sums(question: Question, table: Columns) -> np.ndarray:
    units = (
        np.rint(_scaled(question, table, at)[1] * UNITS).astype(np.int64) for at in range(len(question.columns))
    )
    return np.array([[unit.sum(), (unit * unit // UNITS).sum()] for unit in units])


_COUNTERS = {SURVEY: _survey, HISTOGRAM: _histogram, CATEGORIES: _categories, SUMS: _sums, WEIGHTS: _weights}


# All institutions


class Counter(Protocol):
    """Who asks all institutions: a simulation in this process, or the server of a federation."""

    records: int  # of all institutions: a public number (zero-out)

    def total(self, question: Question) -> tuple[list[np.ndarray], float]:
        """The sum over the institutions, column by column, and the standard deviation of its noise."""

    def names(self, question: Question) -> list[list[str]]:
        """Of each column the names that some institution lists, sorted."""


class Counting:
    """Counts over institutions in this process, within one privacy budget."""

    def __init__(
        self,
        tables: Sequence[pd.DataFrame],
        epsilon: float,
        delta: float,
        words: Words | Sequence[Words] = os_words,
        *,
        lists_names: bool = True,
    ) -> None:
        self.mu, slip = mu_and_slip(epsilon, delta, lists_names=lists_names)
        sources = [words] * len(tables) if callable(words) else list(words)
        self.institutions = [
            Institution(Columns(table), self.mu, slip, source)
            for table, source in zip(tables, sources, strict=True)
        ]
        self.records = sum(map(len, tables))

    def total(self, question: Question) -> tuple[list[np.ndarray], float]:
        answers = [each.answer(question) for each in self.institutions]
        return question.split(np.sum(answers, axis=0)), total_std(question, self.mu, len(answers))

    def names(self, question: Question) -> list[list[str]]:
        return union([each.names(question) for each in self.institutions])


def noise_words(randomness: str, seed: int, purpose: str, client: int) -> Words:
    """Where an institution's noise comes from: the operating system, or, for research, a seed."""
    # _SEED comes last: a number missing at the end counts as 0, and rounds give three (seed, round, client).
    return os_words if randomness != "seeded" else seeded_words(seed, PURPOSES.index(purpose), client, _SEED)


def total_std(question: Question, mu: float, institutions: int) -> float:
    """Of the noise in a sum over the institutions."""
    return noise_std(question, mu) * math.sqrt(institutions)


def is_name(listed: object) -> bool:
    """Whether an institution may list this as the name of a category: the spelling of a cell, not too long."""
    plain = type(listed) is str and len(listed) <= _LONGEST_NAME
    return plain and listed not in MISSING and canonical(listed) == listed


def union(answers: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """The names of each column that any institution lists, sorted."""
    return [sorted(set().union(*column)) for column in zip(*answers, strict=True)]


def fitting(listed: list[list[str]]) -> list[list[str]]:
    """The names that fit into a message: of too many, the longest are left out, whoever listed them."""
    sizes = np.sort([len(json.dumps(name)) for names in listed for name in names])
    (over,) = np.nonzero(np.cumsum(sizes) > _MOST_LISTED)
    if not over.size:
        return listed
    return [[name for name in names if len(json.dumps(name)) < sizes[over[0]]] for names in listed]


# What it costs


def check_budget(epsilon: float, delta: float) -> None:
    """`SpecError` unless ε and δ are possible."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise SpecError(f"epsilon={epsilon} must be a finite number above 0")
    if not 0 < delta < 1:
        raise SpecError(f"delta={delta} must lie between 0 and 1")


def mu_and_slip(epsilon: float, delta: float, *, lists_names: bool = True) -> tuple[float, float]:
    """μ of all counts together, and the chance that a name which only one record has is listed. That chance counts
    1 + exp(ε) times; the rest of δ is the Gaussian's."""
    factor = 1.0 + math.exp(min(epsilon, 600.0))
    slip = delta * min(1e-4, 0.1 / factor) if lists_names else 0.0
    return gaussian_mu(epsilon, delta - slip * factor) * (1 - 1e-4), slip  # rounded down


def release(epsilon: float, delta: float, *, lists_names: bool = True) -> Release:
    """What all questions together reveal, for a ledger: one Gaussian, and a name that slips through."""
    mu, slip = mu_and_slip(epsilon, delta, lists_names=lists_names)
    sampling = Sampling("full", 1.0, ZERO_OUT, slip)
    return Release("uplink", 1.0 / mu, 1.0, 1, sampling, "private statistics", exact=ExactNoise(0.0, _DISTANCE))


# reason: what is released of which files, and where it is charged
def identify(book: Ledger, files: Sequence[Path], contents: Sequence[str], new_ledger: bool) -> list[str]:
    """The accounts of the files, each of which holds the records of its own. `DataError` where another account
    has these records; nothing is charged."""
    from dither.accounting.ledger.runs import data_id
    from dither.data import check_unchanged, hash_records

    datasets = [data_id(book, path=str(file)) for file in files]
    for number, (file, dataset) in enumerate(zip(files, datasets, strict=True)):
        if dataset in datasets[:number]:
            raise DataError(f"{file.name!r} is given twice: its records would count, and be charged, twice")
    for file, dataset, content in zip(files, datasets, contents, strict=True):
        book.identify(dataset, partial(hash_records, file), file=file.name, new_ledger=new_ledger)
        check_unchanged(file, content)
    return datasets


def charge(
    ledger: str | Path | None,
    given: Sequence[Any],
    contents: Sequence[str],
    epsilon: float,
    delta: float,
    *,
    what: str = "statistics",
    lists_names: bool = True,
    new_ledger: bool = False,
) -> str:
    """Charge private statistics to the account of every file, in `ledger` or the user's own; returns the name of
    the charge. `BudgetExhausted` says that a file cannot pay; then none is charged (unless another process has
    spent in between). `contents` are the files' digests before they were read."""
    from dither.accounting.ledger.runs import EVERY_RECORD

    run = f"{what}-{os.urandom(16).hex()}"
    asked = [Charge(EVERY_RECORD, [((release(epsilon, delta, lists_names=lists_names),), 1)])]
    if any(not isinstance(each, str | Path) for each in given):
        raise SpecError("data frames cannot be charged to a ledger: give files, or declare public=True")
    book = Ledger(ledger or Ledger.default_path())
    datasets = identify(book, [Path(each) for each in given], contents, new_ledger)
    # Those that cannot pay come first: they raise before any other is charged.
    for dataset in sorted(datasets, key=lambda each: book.affordable(run, each, lambda _: asked, 1)):
        book.charge(run, dataset, asked, rounds=(0, 1), plan=lambda: asked)
    return run


# Tables


def digests(given: Sequence[Any]) -> list[str]:
    """The digest of each file or folder of arrays before it is read; "" for a data frame."""
    from dither.data import content_digest

    return [content_digest(each) if isinstance(each, str | Path) else "" for each in given]


def read(each: Any) -> pd.DataFrame:
    """A data frame, or the table in a file."""
    import pandas as pd

    if isinstance(each, pd.DataFrame):
        return each
    if not isinstance(each, str | Path):
        raise SpecError(f"{type(each).__name__} is not a table; give files or pandas data frames")
    from dither.data import read_table

    table: pd.DataFrame = read_table(each)
    return table


def unshared_columns(tables: Sequence[pd.DataFrame]) -> dict[str, str]:
    """Why each column that only some of the tables have is left out."""
    names = list(dict.fromkeys(str(name) for table in tables for name in table.columns))
    having = {name: sum(name in table.columns for table in tables) for name in names}
    count = len(tables)
    return {name: f"{UNSHARED}: {n} of {count}" for name, n in having.items() if n < count}


def shared_columns(tables: Sequence[pd.DataFrame], wanted: Sequence[str] = ()) -> list[str]:
    """The columns that all tables have, or those of them that are wanted: names are public."""
    shared = [name for name in map(str, tables[0].columns) if all(name in table.columns for table in tables)]
    for name in wanted:
        if name not in shared:
            raise DataError(f"column {name!r} is not in every table; these are: {', '.join(shared)}")
    if not (wanted or shared):
        raise DataError("the tables have no column in common; give every file the same header")
    return list(wanted) or shared
