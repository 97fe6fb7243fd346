"""What a run trains and is tested on: sources mixed by weight, in an order that is a pure function of the step.

Batch s of n prompts covers positions s*n ... s*n + n-1 of one endless sequence. A position names a source and a row of
it (order.py), so nothing has to be saved to resume, and every process of a run can ask for its share.

Test prompts come first and are never trained on: training rows with exactly the text of a test prompt of any source are
left out and counted, whether they come from files or are generated.
"""

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Protocol

from quads.config.sections import SourceSettings, TaskSettings
from quads.data.filters import RowFilter
from quads.data.order import Mixture, Shuffled, stable_seed
from quads.data.prompts import PromptBuilder
from quads.data.reasoning import ReasoningGym
from quads.data.rows import AnswerReader, Prompt, Row
from quads.data.sources import FileRows, RowReader, StreamRows
from quads.data.tokenizer import Tokenizer
from quads.errors import UserError
from quads.types import Example

ATTEMPTS = 1000  # fresh problems tried in place of one that may not be used
HELD_OUT, ALSO_TEST = "held out for the test", "also a test prompt"


class TrainRows(Protocol):
    """Endless training rows of one source."""

    def __getitem__(self, index: int) -> Row: ...


class Task:
    """Training batches and test sets of a run. Built by `build_task`."""

    def __init__(
        self,
        settings: Mapping[str, SourceSettings],
        readers: Mapping[str, AnswerReader],
        builder: PromptBuilder,
        train: dict[str, TrainRows],
        mixture: Mixture,
        test: dict[str, list[Row]],
        report: list[str],
    ):
        self.report = report  # one line a source, for people
        self._settings, self._readers, self._builder = settings, readers, builder
        self._train, self._mixture, self._test = train, mixture, test

    def batch(self, step: int, n: int) -> list[Example]:
        """The n training prompts of a step (from 0): the same for the same step, n and seed, whatever came before."""
        names = list(self._train)
        picked = []
        for position in range(step * n, (step + 1) * n):
            source, index = self._mixture[position]
            picked.append((names[source], self._train[names[source]][index]))
        return self._examples(picked)

    def eval_set(self, n: int) -> list[Example]:
        """The first n test prompts of each source, or all it has, source after source; n = 0: all."""
        return self._examples([(name, row) for name, rows in self._test.items() for row in (rows[:n] if n else rows)])

    def _examples(self, rows: list[tuple[str, Row]]) -> list[Example]:
        prompts = [self._builder.word(name, self._settings[name], row) for name, row in rows]
        all_ids = self._builder.ids(prompts)
        return [
            self._example(name, row, prompt, ids)
            for (name, row), prompt, ids in zip(rows, prompts, all_ids, strict=True)
        ]

    def _example(self, name: str, row: Row, prompt: Prompt, ids: list[int]) -> Example:
        return Example(row.id, name, prompt, ids, self._readers[name].unpack(row.answer))


def build_task(
    task: TaskSettings,
    sources: Mapping[str, SourceSettings],
    readers: Mapping[str, AnswerReader],
    tokenizer: Tokenizer,
    seed: int,
    max_prompt_tokens: int = 3072,
) -> Task:
    """Read and check every source that [task] names.

    Args:
        sources: by name; holds at least those named.
        readers: their rewards, by the same names.
        seed: of the order, of held-out rows and of generated problems.
        max_prompt_tokens: longer prompts are dropped and counted.

    Raises:
        UserError: anything wrong with a source, named with its file and row.
    """
    builder = PromptBuilder(task, tokenizer)
    loader = _Loader(sources, readers, builder, seed, max_prompt_tokens)
    test_names = task.eval or task.train
    test = {name: loader.test_rows(name, trained=name in task.train) for name in test_names}
    train = {name: loader.train_rows(name) for name in task.train}
    mixture = Mixture(list(task.weights) or [1.0] * len(train), stable_seed(seed, "mixture"))
    return Task(sources, readers, builder, train, mixture, test, loader.report)


class _Loader:
    """Builds the sources of one task, test sets first; remembers prompts across sources."""

    def __init__(
        self,
        sources: Mapping[str, SourceSettings],
        readers: Mapping[str, AnswerReader],
        builder: PromptBuilder,
        seed: int,
        max_prompt_tokens: int,
    ):
        self.sources, self.readers, self.builder, self.seed = sources, readers, builder, seed
        self.max_prompt_tokens = max_prompt_tokens
        self.report: list[str] = []
        self._read: dict[str, list[Row]] = {}  # usable rows of sources that give both test and training rows
        self._test_keys: dict[bytes, str] = {}  # of test prompts, and why a training row with one is left out
        self._train_keys: set[bytes] = set()

    def test_rows(self, name: str, trained: bool) -> list[Row]:
        """The test prompts of one source, all of them."""
        settings = self.sources[name]
        row_filter, reader = self._filter(name), RowReader(name, settings, self.readers[name], test=True)
        own_split = bool(settings.eval_split or settings.eval_path)
        held_out = trained and not own_split and settings.kind != "reasoning_gym"
        if settings.kind == "reasoning_gym":
            rows = self._generated_test(name, row_filter)
        elif settings.streaming and held_out:
            rows = list(itertools.islice(row_filter(reader.stream(self.seed, 0)), settings.eval_rows))
        else:
            rows = list(row_filter(reader()))
            if held_out:
                self._read[name] = rows
                rows = _hold_out(rows, settings.eval_rows, self.seed)
        if not rows and not (held_out and settings.eval_rows == 0):
            raise _no_rows(name, "test", row_filter, reader)
        for row in rows:
            self._test_keys[row.key] = HELD_OUT if held_out else ALSO_TEST
        self._note(name, "test", len(rows), row_filter, reader)
        return rows

    def train_rows(self, name: str) -> TrainRows:
        """Endless training rows of one source."""
        settings = self.sources[name]
        row_filter, reader = self._filter(name), RowReader(name, settings, self.readers[name], test=False)
        if settings.kind == "reasoning_gym":
            self.report.append(f"{name}: train {settings.size or 'fresh'} problems of reasoning-gym {settings.dataset}")
            gym = ReasoningGym(name, settings, self.readers[name], self.seed)
            return _GeneratedRows(gym, settings, self._test_keys, row_filter, self.builder, self.seed)
        if settings.streaming:
            self.report.append(f"{name}: train rows streamed from {settings.dataset}")
            return StreamRows(lambda epoch: self._open_pass(name, reader, epoch), name)
        usable = self._read[name] if name in self._read else row_filter(reader())
        rows = list(self._apart(usable, row_filter, self._train_keys))
        if not rows:
            raise _no_rows(name, "training", row_filter, reader)
        self._note(name, "train", len(rows), row_filter, reader)
        return FileRows(rows, name, self.seed)

    def _filter(self, name: str) -> RowFilter:
        return RowFilter(name, self.sources[name], self.builder, self.max_prompt_tokens, self.readers[name])

    def _open_pass(self, name: str, reader: RowReader, epoch: int) -> Iterator[Row]:
        row_filter = self._filter(name)
        return self._apart(row_filter(reader.stream(self.seed, epoch)), row_filter, set())

    def _apart(self, rows: Iterable[Row], row_filter: RowFilter, seen: set[bytes]) -> Iterator[Row]:
        """Rows that are neither test prompts nor, in `seen`, prompts of an earlier training source."""
        for row in rows:
            if row.key in self._test_keys:
                row_filter.count(self._test_keys[row.key])
            elif row.key in seen:
                row_filter.count("prompt of an earlier source")
            else:
                seen.add(row.key)
                yield row

    def _generated_test(self, name: str, row_filter: RowFilter) -> list[Row]:
        """Different problems from the test stream. Of a task with few problems, half are left to training."""
        settings = self.sources[name]
        gym = ReasoningGym(name, settings, self.readers[name], self.seed)
        problems = (gym.problem("eval", k) for k in range(max(ATTEMPTS, 4 * settings.eval_rows)))
        rows = list(itertools.islice(row_filter(problems), settings.eval_rows))
        if len(rows) < settings.eval_rows:
            rows = sorted(rows, key=lambda row: row.key)[: max(1, len(rows) // 2)]
        return rows

    def _note(self, name: str, what: str, kept: int, row_filter: RowFilter, reader: RowReader) -> None:
        left_out = _left_out(row_filter, reader)
        self.report.append(f"{name}: {what} {kept:,} prompts" + (f"; left out: {left_out}" if left_out else ""))


def _left_out(row_filter: RowFilter, reader: RowReader) -> str:
    """What was dropped, in words: `12 repeated prompt, 3 answer missing`; "" if nothing was."""
    return ", ".join(f"{n:,} {reason}" for reason, n in {**reader.dropped, **row_filter.counts}.items() if n)


def _no_rows(name: str, what: str, row_filter: RowFilter, reader: RowReader) -> UserError:
    left_out = _left_out(row_filter, reader) or "none"
    return UserError(
        f"[sources.{name}] has no usable {what} rows; left out: {left_out}; read from {reader.place}. Give it more, or "
        "loosen what left them out: the filters of the source, or [rollout] max_prompt_tokens"
    )


class _GeneratedRows:
    """Training problems by index: fresh for ever, or `size` of them reshuffled. One that is also a test prompt, or too
    long, is replaced by another that depends on its index alone."""

    def __init__(
        self,
        gym: ReasoningGym,
        settings: SourceSettings,
        test_keys: Container[bytes],
        row_filter: RowFilter,
        builder: PromptBuilder,
        seed: int,
    ):
        self.gym, self.settings, self.test_keys = gym, settings, test_keys
        self.filter, self.builder = row_filter, builder
        self.order = Shuffled(settings.size, stable_seed(seed, gym.name)) if settings.size else None

    def __getitem__(self, index: int) -> Row:
        k = self.order[index] if self.order else index
        for row in self._candidates(k):
            if row.key in self.test_keys:
                self.filter.count(ALSO_TEST)
                continue
            if not self.filter.answerable(row):
                continue
            (ids,) = self.builder.ids([self.builder.word(self.gym.name, self.settings, row)])
            if self.filter.fits(len(ids)):
                return row
        raise UserError(
            f"[sources.{self.gym.name}] gave no usable problem in {ATTEMPTS} attempts ({self.filter.report()}); "
            "make it harder, or lower eval_rows, or raise the prompt length"
        )

    def _candidates(self, k: int) -> Iterator[Row]:
        yield self.gym.problem("train", k)
        for attempt in range(ATTEMPTS):
            yield self.gym.problem(f"train/{k}", attempt)


def _hold_out(rows: list[Row], wanted: int, seed: int) -> list[Row]:
    """Test rows of a file without a test split: at most a fifth, chosen by prompt so that adding rows moves few."""
    number = min(wanted, max(1, len(rows) // 5))
    return sorted(rows, key=lambda row: stable_seed(seed, "hold out", row.key.hex()))[:number]
