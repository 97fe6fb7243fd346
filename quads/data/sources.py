"""Rows from files and from the hub: JSONL read here, everything else through Hugging Face `datasets`.

A source is read once, checked (rows.py) and filtered (filters.py). Streams are read as training needs them.
"""

import codecs
import glob
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quads.config.sections import SourceSettings
from quads.data.order import Shuffled, stable_seed
from quads.data.rows import AnswerReader, BadRow, Row, needed_columns, read_rows
from quads.errors import UserError

FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow"}
SHUFFLE_BUFFER = 4096  # rows a stream holds to pick the next one from. Our own: the library's changes between versions


@dataclass
class RowReader:
    """Reads the checked rows of one split; `dropped` counts what `where` filtered out."""

    name: str
    settings: SourceSettings
    reader: AnswerReader
    test: bool  # the test split or file, not the training one
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """What is read: a file, or a data set and its split."""
        settings = self.settings
        other = settings.eval_path if self.test else ""
        if settings.kind == "jsonl":
            return other or settings.path
        split = (settings.eval_split if self.test else "") or settings.split
        return f"{other or settings.dataset} ({split})" if settings.kind == "datasets" else settings.dataset

    def __call__(self) -> Iterator[Row]:
        settings = self.settings
        if settings.kind == "jsonl":
            lines = read_jsonl(Path(self.place), f"[sources.{self.name}] path")
            yield from read_rows(self.name, settings, self.reader, lines, self.place, "line", self.dropped)
            return
        data, place = load_hub(self.name, settings, self.test, streaming=False)
        columns = _columns(self.name, data, settings, self.reader, place)
        yield from read_rows(self.name, settings, self.reader, _table(data, columns), place, "row", self.dropped)

    def stream(self, seed: int, epoch: int) -> Iterator[Row]:
        """The rows in the order of one pass: the stream's own, shuffled within a buffer."""
        data, place = load_hub(self.name, self.settings, self.test, streaming=True)
        raw = enumerate(_shorten(values, data.features) for values in data)
        rows = read_rows(self.name, self.settings, self.reader, raw, place, "row", self.dropped)
        yield from _shuffled(rows, stable_seed(seed, self.name, epoch))


def load_hub(name: str, settings: SourceSettings, test: bool, streaming: bool) -> tuple[Any, str]:
    """-> (datasets.Dataset or IterableDataset, what to call it in messages). Any failure is a UserError."""
    import datasets  # slow, and only these sources need it

    split = (settings.eval_split if test else "") or settings.split
    dataset = (settings.eval_path if test else "") or settings.dataset
    place = f"{dataset} ({split})"
    where = f"[sources.{name}] dataset = {dataset!r}"
    suffix = Path(dataset).suffix
    try:
        if suffix in FORMATS:
            if "://" not in dataset and not glob.glob(dataset):
                raise UserError(f"{where}: no such file")
            data = datasets.load_dataset(FORMATS[suffix], data_files={split: dataset}, split=split, streaming=streaming)
            return data, dataset
        saved = Path(dataset)
        if (saved / "dataset_dict.json").is_file():  # written by save_to_disk
            saved = saved / split
        if (saved / "dataset_info.json").is_file() and (saved / "state.json").is_file():
            data = datasets.Dataset.load_from_disk(str(saved))
            return (data.to_iterable_dataset() if streaming else data), place
        return datasets.load_dataset(dataset, settings.subset or None, split=split, streaming=streaming), place
    except UserError:
        raise
    except Exception as error:  # the library raises what its many back ends raise
        cause = error.__cause__ or error  # "an error occurred while generating the dataset" is raised from the reason
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        hint = "for a local copy set dataset to its folder or files"
        raise UserError(f"{where} split {split!r} cannot be loaded: {reason}; {hint}") from None


class FileRows:
    """All rows of a source in memory, endlessly reshuffled: `rows[index]`."""

    def __init__(self, rows: list[Row], name: str, seed: int):
        self.rows = rows
        self._order = Shuffled(len(rows), stable_seed(seed, name))

    def __getitem__(self, index: int) -> Row:
        return self.rows[self._order[index]]


class StreamRows:
    """Rows of a streamed source by index. Forward it reads on; backward (a resumed run) it starts over and skips.

    open_pass: epoch -> its filtered rows; each call starts a fresh pass.
    """

    def __init__(self, open_pass: Callable[[int], Iterator[Row]], name: str):
        self.open_pass, self.name = open_pass, name
        self._next, self._epoch = 0, 0
        self._rows: Iterator[Row] = iter(())

    def __getitem__(self, index: int) -> Row:
        if index < self._next or self._next == 0:
            self._next, self._epoch = 0, 0
            self._rows = self.open_pass(0)
        while True:
            row = next(self._rows, None)
            if row is None:
                if self._next == 0:
                    raise UserError(f"[sources.{self.name}] has no usable rows")
                self._epoch += 1
                self._rows = self.open_pass(self._epoch)
                continue
            self._next += 1
            if self._next == index + 1:
                return row


def _shuffled(rows: Iterator[Row], seed: int) -> Iterator[Row]:
    rng = random.Random(seed)
    buffer = list(itertools.islice(rows, SHUFFLE_BUFFER))
    for row in rows:
        place = int(rng.random() * len(buffer))
        yield buffer[place]
        buffer[place] = row
    while buffer:
        yield buffer.pop(int(rng.random() * len(buffer)))


def read_jsonl(path: Path, where: str) -> Iterator[tuple[int, Any]]:
    """(line number, object or BadRow); blank lines are passed over. where: what the path is called in an error."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if not line.strip():
                    continue
                try:
                    yield number, json.loads(line.decode("utf-8").rstrip(), object_pairs_hook=_object)
                except BadRow as reason:
                    yield number, reason
                except UnicodeDecodeError as error:
                    yield number, BadRow(f"is not UTF-8 text (byte {error.start + 1} of the line)")
                except json.JSONDecodeError as error:
                    yield number, BadRow(f"is not JSON: {error.msg} (column {error.colno})")
                except RecursionError:
                    yield number, BadRow("is not usable JSON: nested too deeply")
                except ValueError:
                    yield number, BadRow("is not usable JSON: a number of more than 4300 digits; write it as text")
    except OSError as error:
        raise UserError(f"{where} = {str(path)!r} cannot be read: {error.strerror}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. BadRow for a key that it has twice: which value is meant?"""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise BadRow(f"has the key {twice!r} twice")
    return found


def _columns(name: str, data: Any, settings: SourceSettings, reader: AnswerReader, place: str) -> list[str]:
    """The columns to read, so that large unused ones are never decoded. UserError if one is missing."""
    wanted = needed_columns(settings, reader)
    for column in wanted:
        if column not in data.column_names:
            have = ", ".join(data.column_names)
            raise UserError(f"[sources.{name}] {place} has no column {column!r}; there is: {have}")
    if reader.whole_row:
        return list(data.column_names)
    own_id = settings.id_column.partition(".")[0]
    return [*wanted, own_id] if own_id in data.column_names and own_id not in wanted else wanted


def _table(data: Any, columns: list[str]) -> Iterator[tuple[int, Any]]:
    """Rows of a datasets.Dataset, numbered from 0, decoded a thousand at a time."""
    data = data.select_columns(columns)
    number = 0
    for start in range(0, len(data), 1000):
        stop = min(start + 1000, len(data))
        try:
            batch = data[start:stop]
        except UnicodeDecodeError:
            batch = None  # one of them is not UTF-8: find out which
        for i in range(stop - start):
            try:
                values = data[start + i] if batch is None else {column: batch[column][i] for column in columns}
            except UnicodeDecodeError as error:
                values = BadRow(f"is not UTF-8 text (byte {error.start + 1})")
            yield number, _shorten(values, data.features)
            number += 1


def _shorten(value: Any, feature: Any) -> Any:
    """The value with numbers of narrow columns in the shortest form that such a column tells apart; datasets gives the
    0.1 of a float32 column as 0.10000000149011612.

    feature: what `datasets` says of the column, for a row a dict of columns; None if it says nothing.
    """
    if isinstance(value, float):
        kind = getattr(feature, "dtype", "")
        return float(str(np.dtype(kind).type(value))) if kind in ("float32", "float16") else value
    if isinstance(value, dict) and isinstance(feature, dict):
        return {name: _shorten(item, feature.get(name)) for name, item in value.items()}
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
        return value if inner is None else [_shorten(item, inner) for item in value]
    return value
