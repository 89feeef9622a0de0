"""Where mathematical problems are read from: the hub, or local files."""

from __future__ import annotations

import glob
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from lightning.pytorch.utilities import rank_zero_warn

from lit_madrl.data.prompts import require_at_least

Row = Mapping[str, Any]

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


class MathProblem(NamedTuple):
    """What a row says: the question, its gold answer, a reference solution if there is one, and everything else."""

    question: str
    answer: str
    reference: str | None
    metadata: dict[str, Any]


class MathSource(ABC):
    """Problems in one published format; a new format is a subclass with ``columns`` and :meth:`read`.

    Local files are streamed: nothing of them enters a cache, so an edited file is read anew, and no network is asked.
    A data set of the hub is downloaded once into the usual cache of ``datasets``.

    Args:
        path: name of a data set on the hub, a local ``.jsonl``, ``.json``, ``.parquet`` or ``.csv`` file, or a folder
            of such files, whose names tell their splits (``train.jsonl``, ``data/test-00000-of-00001.parquet``).
        split: of a data set or folder; the rows of a single file are all of one split, whatever it is called.
        limit: only the first so many rows.
        name: begins the ids of the problems, and is the group under which evaluations report them; default the
            name of the format in lower case.
        config: of a data set that has several, such as one for each subject.
    """

    columns: ClassVar[tuple[str, ...]]
    """What a row must have: ``a|b`` is one of two columns, ``a.b`` field b of column a."""

    hub_config: ClassVar[str | None] = None
    """The configuration that a data set of the hub is read in when none is named."""

    def __init__(
        self,
        path: str,
        split: str = "train",
        limit: int | None = None,
        name: str | None = None,
        config: str | None = None,
    ) -> None:
        if limit is not None:
            require_at_least(1, limit=limit)
        self.path = path
        self.split = split
        self.limit = limit
        self.name = name or type(self).__name__.lower()
        self.config = config

    @abstractmethod
    def read(self, row: Row) -> MathProblem | None:
        """The problem in a row, which has all of ``columns``; None for a row that holds none."""

    def problems(self) -> dict[str, MathProblem]:
        """Every problem by its id ``name/number of the row``, in order. Rows without question or answer are left out.

        Raises:
            ValueError: the data cannot be read, or a column is missing.
        """
        found: dict[str, MathProblem] = {}
        count = 0
        for count, row in enumerate(self.rows(), start=1):
            if count == 1:
                self._check_columns(row)
            problem = self.read(row)
            if problem is not None and problem.question and problem.answer:
                found[f"{self.name}/{count - 1}"] = problem
        if len(found) < count:
            rank_zero_warn(
                f"{self}: left out {count - len(found)} of {count} rows without question or answer"
            )
        if not found:
            rank_zero_warn(f"{self}: no problems")
        return found

    def rows(self) -> Iterator[Row]:
        """The rows as published.

        Raises:
            ValueError: the data cannot be read.
        """
        try:
            yield from islice(self._dataset(), self.limit)
        except (OSError, ValueError) as error:  # of which those of datasets and pyarrow are subclasses
            raise ValueError(f"{self}: cannot be read: {error}") from error

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.path!r} (split {self.split!r})"

    def _dataset(self) -> Iterable[Row]:
        from datasets import load_dataset  # takes a second, which other data modules need not wait for

        local = Path(self.path).expanduser()
        dataset: Iterable[Row]
        if local.is_dir():
            dataset = load_dataset(glob.escape(str(local)), self.config, split=self.split, streaming=True)
        elif local.suffix in _BUILDERS or self.path.startswith(("/", ".", "~")):
            if not local.is_file() or local.suffix not in _BUILDERS:
                raise ValueError(f"expected a folder, or a file that ends in {', '.join(_BUILDERS)}")
            if not local.stat().st_size:  # of which datasets cannot tell the columns
                return ()
            files = {self.split: glob.escape(str(local))}
            dataset = load_dataset(
                _BUILDERS[local.suffix], data_files=files, split=self.split, streaming=True
            )
        else:
            dataset = load_dataset(self.path, self.config or self.hub_config, split=self.split)
        return dataset

    def _check_columns(self, row: Row) -> None:
        missing = [c for c in self.columns if not any(_has(row, name) for name in c.split("|"))]
        if missing:
            raise ValueError(
                f"{self}: expected the columns {', '.join(self.columns)}, got {', '.join(row)} "
                f"without {', '.join(missing)}"
            )


def value(row: Row, column: str) -> Any:
    """What a row has in the first of some columns that is not null, named as in ``MathSource.columns``."""
    for name in column.split("|"):
        found: Any = row
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is not None:
            return found
    return None


def text(row: Row, column: str) -> str:
    """:func:`value` as text without space around it: empty for null, 18 for the number 18.0."""
    found = value(row, column)
    if found is None or found != found:  # not a number, as a column of numbers has where one is missing
        return ""
    return str(int(found) if isinstance(found, float) and found.is_integer() else found).strip()


def _has(row: Row, name: str) -> bool:
    head, _, rest = name.partition(".")
    if head not in row:
        return False
    return not rest or row[head] is None or (isinstance(row[head], Mapping) and _has(row[head], rest))
