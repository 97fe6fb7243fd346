"""Which part of a response is scored. A response may be hostile: every scan is linear, and has a bound.

The last attempt counts. One that is begun and never ended is no answer; an earlier, finished one does not stand in for
it, as it would reward a response for what it went on to replace.
"""

import re
from collections.abc import Iterator
from itertools import islice

LONGEST = 1 << 20  # characters; a longer response has no answer
MOST_FENCES = 8192  # lines; looking at each takes 1 to 3 us
FENCE = re.compile(r"^([ \t]*+)(`{3,}+|~{3,}+)([^\n]*+)$", re.MULTILINE)
PYTHON = ("", "python", "py", "python3", "py3", "python2")
# Python's text up to the next triple quote: other characters, strings of one line, comments.
PLAIN = re.compile(r"""(?:[^'"#]++|'(?!'')(?:\\.|[^'\\\n])*+'?+|"(?!"")(?:\\.|[^"\\\n])*+"?+|#[^\n]*+)*+""", re.DOTALL)
TRIPLE = {
    quote: re.compile(rf"(?:[^{quote}\\]++|\\.|{quote}(?!{quote * 2}))*+{quote * 3}", re.DOTALL) for quote in ("'", '"')
}


def tagged(text: str, tag: str) -> str | None:
    """What stands in the last <tag>...</tag>, or without a tag the whole text; None where it is missing or left open.

    Example: `tagged("<a>1</a> no, <a>2</a>", "a")` -> '2'
    """
    if len(text) > LONGEST:
        return None
    if not tag:
        return text.strip()
    start = text.rfind(f"<{tag}>")
    end = text.find(f"</{tag}>", start)
    return None if start < 0 or end < 0 else text[start + len(tag) + 2 : end].strip()


def extract_code(response: str) -> str | None:
    """The last fenced block after any `</think>`; a response without fences is taken to be code itself.

    A fence is three or more backticks or tildes; as many or more of the same end it. In a block of Python, one inside
    a triple-quoted string is part of the string. None if the last block is left open, and for thousands of fences.
    """
    if len(response) > LONGEST:
        return None
    response = response.rpartition("</think>")[2].replace("\r\n", "\n")
    fences = list(islice(FENCE.finditer(response), MOST_FENCES + 1))
    if len(fences) > MOST_FENCES:
        return None
    code: str | None = response
    for indent, start, end in _blocks(response, fences):
        code = None if end is None else response[start:end]
        if code and indent:  # a block inside a list item is indented with its fence
            code = re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
    return code


def _blocks(text: str, fences: list[re.Match[str]]) -> Iterator[tuple[str, int, int | None]]:
    """(the fence's indent, where the block's lines start, where they end or None for one left open) of each block."""
    inside: re.Match[str] | None = None
    strings = _Strings(text)
    for fence in fences:
        marks, info = fence[2], fence[3].strip()
        if inside is None:
            if marks[0] == "~" or "`" not in info:
                inside = fence
                strings.restart(fence.end(), python=info.partition(" ")[0].lower() in PYTHON)
        elif info == "" and marks.startswith(inside[2]) and not strings.cover(fence.start()):
            yield inside[1], inside.end() + 1, fence.start()
            inside = None
    if inside is not None:
        yield inside[1], inside.end() + 1, None


class _Strings:
    """Which places of Python text are inside a triple-quoted string. Places are asked in their order."""

    def __init__(self, text: str):
        self._text = text
        self._at, self._python = 0, False
        self._endless: set[str] = set()  # quotes that were once not closed: no strings, or each would be sought again

    def restart(self, at: int, python: bool) -> None:
        self._at, self._python = at, python

    def cover(self, place: int) -> bool:
        while self._python and self._at < place:
            plain = PLAIN.match(self._text, self._at, place)
            assert plain
            self._at = plain.end()
            if self._at >= place:
                break
            quote = self._text[self._at]
            end = None if quote in self._endless else TRIPLE[quote].match(self._text, self._at + 3)
            if end is None:
                self._endless.add(quote)
                self._at += 3
            else:
                self._at = end.end()
        return self._python and self._at > place
