"""Which rows of a data set are trained on: filters in a fixed order, each with a count of what it dropped."""

from collections.abc import Iterable, Iterator
from itertools import islice

from quads.config.sections import SourceSettings
from quads.data.prompts import PromptBuilder
from quads.data.rows import AnswerReader, Prompt, Row

BATCH = 128


class RowFilter:
    """Drops rows of one source by language, missing answer, repeated prompt, unreadable answer, length.

    `counts` holds how many rows each reason dropped, in words for people. Prompts are remembered, so a filter serves
    one pass over one source.

    Args:
        reader: the source's reward, which tells which answers can be read.
    """

    def __init__(
        self,
        name: str,
        settings: SourceSettings,
        builder: PromptBuilder,
        max_prompt_tokens: int,
        reader: AnswerReader,
    ):
        self.name, self.settings, self.builder = name, settings, builder
        self.max_tokens = settings.max_prompt_tokens or max_prompt_tokens
        self.reader = reader
        self.counts: dict[str, int] = {}
        self._seen: dict[bytes, int] = {}  # prompts, with the gist of their answers

    def __call__(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows that stay, in order. Reads ahead by up to 128 rows, to tokenize them together."""
        kept = (row for row in rows if self._keep(row) and not self._far_too_long(row))
        while batch := list(islice(kept, BATCH)):
            reasons = self.reader.unreadable([row.answer for row in batch])
            for reason in filter(None, reasons):
                self.count(reason)
            batch = [row for row, reason in zip(batch, reasons, strict=True) if not reason]
            if not batch:
                continue
            ids = self.builder.ids(self.builder.word(self.name, self.settings, row) for row in batch)
            for row, row_ids in zip(batch, ids, strict=True):
                if self.fits(len(row_ids)):
                    yield row

    def _far_too_long(self, row: Row) -> bool:
        """Known from a part of the prompt: tokenizing 10 MB of text takes minutes."""
        if not self.builder.far_longer(row.prompt, self.max_tokens):
            return False
        return not self.fits(self.max_tokens + 1)

    def fits(self, num_tokens: int) -> bool:
        """Is a prompt of this length used? Counts it if not."""
        if num_tokens > self.max_tokens:
            self.count(f"prompt longer than {self.max_tokens} tokens")
            return False
        if num_tokens < max(1, self.settings.min_prompt_tokens):
            self.count(f"prompt shorter than {max(1, self.settings.min_prompt_tokens)} tokens")
            return False
        return True

    def answerable(self, row: Row) -> bool:
        """Has the row an answer that can be given? Counts it if not."""
        reason = "answer missing" if row.answer is None else self.reader.unreadable([row.answer])[0]
        if reason:
            self.count(reason)
        return not reason

    def count(self, reason: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1

    def report(self) -> str:
        """What was dropped, in words: `12 repeated prompt, 3 answer missing`; "" if nothing was."""
        return ", ".join(f"{count:,} {reason}" for reason, count in self.counts.items() if count)

    def _keep(self, row: Row) -> bool:
        if self.settings.language and not in_language(row.prompt, self.settings.language):
            self.count(f"not in language {self.settings.language}")
        elif row.answer is None:
            self.count("answer missing")
        else:
            key, gist = row.key, self.reader.gist(row.answer)
            if key not in self._seen:
                self._seen[key] = gist
                return True
            self.count("repeated prompt" if self._seen[key] == gist else "repeated prompt with another answer")
        return False


def in_language(prompt: Prompt, language: str) -> bool:
    """By script: `zh` needs a tenth of the letters in Han script, `en` nine tenths in the Latin alphabet of ASCII.

    Mathematics is written with Latin letters everywhere, hence the low bar for Han. A prompt without letters fits.
    """
    text = prompt if isinstance(prompt, str) else " ".join(message["content"] for message in prompt)
    letters = [character for character in text if character.isalpha()]
    if not letters:
        return True
    if language == "zh":
        return sum("\u4e00" <= c <= "\u9fff" for c in letters) >= 0.1 * len(letters)
    return sum(c.isascii() for c in letters) >= 0.9 * len(letters)
