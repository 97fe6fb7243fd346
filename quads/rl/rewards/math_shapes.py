"""The shape of an answer: lists, sets, intervals, points, relations and matrices around expressions with units.

Text is cut where brackets are closed, at separators, relations and set operations, down to expressions, which
math_expression.py reads. What every piece stands for is decided here and not by a grammar, which takes (4, 3) for an
empty interval.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import sympy

from quads.rl.rewards.math_expression import Expression, read_expression
from quads.rl.rewards.math_text import Unreadable
from quads.rl.rewards.math_units import mark_words, read_unit

SEPARATORS = {",": ",", ";": ",", r"\lor": "or", r"\land": "and"}
RELATIONS = {
    "=": "=", "<": "<", ">": ">", r"\le": "<=", r"\leq": "<=", r"\leqslant": "<=", r"\ge": ">=", r"\geq": ">=",
    r"\geqslant": ">=", r"\ne": "!=", r"\neq": "!=", r"\lt": "<", r"\gt": ">", r"\in": "in", r"\approx": "approx",
    r"\equiv": "=",
}  # fmt: skip
SET_OPERATIONS = {r"\cup": "cup", r"\cap": "cap", r"\setminus": "setminus", r"\backslash": "setminus"}
NUMBER_SETS = {
    r"\mathbb{R}": sympy.S.Reals, r"\mathbb{Z}": sympy.S.Integers, r"\mathbb{N}": sympy.S.Naturals,
    r"\mathbb{Q}": sympy.S.Rationals, r"\emptyset": sympy.S.EmptySet, r"\varnothing": sympy.S.EmptySet,
}  # fmt: skip
OPEN = {"(", "[", "{", r"\{", r"\langle", r"\lbrace", r"\begin"}
CLOSE = {")", "]", "}", r"\}", r"\rangle", r"\rbrace", r"\end"}
PIECE = re.compile(r"\\[a-zA-Z]+|\\.|⟦[^⟧]*⟧|.", re.DOTALL)
GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\{,\}|[, ])\d{3})+(?![\d,])|(?<![\d.,])\d{1,3}(?:\{,\}\d{3})+(?!\d)")
TRAILING_WORDS = re.compile(r"⟦([^⟧]*)⟧\s*(?:\^\s*\{?\s*(-?\d)\s*\}?)?\s*$")
LEADING_WORDS = re.compile(r"\s*⟦([^⟧]*)⟧\s*")
NOT_SAID = re.compile(r"\b(?:not?|never|less|more|fewer|least|most|than)\b", re.IGNORECASE)
ANGLES = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
MATRIX = re.compile(r"\\begin\{([pbBv]?matrix|smallmatrix|array)\}(?:\{[clr|\s]*\})?(.*)\\end\{\1\}", re.DOTALL)
NAME = re.compile(
    r"(?:⟦[^⟧]*⟧|\\(?:angle|triangle)\s*[A-Z]{1,3}|\\(?:vec|hat|bar|overline)\s*\{[^{}]*\}|(?:[a-zA-Z]|\\[a-zA-Z]+)"
    r"(?:_(?:\{[^{}]*\}|\w)|'|\s)*(?:\([^()\d]+\)|\(\d+\))?)\s*"
)


@dataclass(frozen=True)
class Words:
    """An answer in words: `no solution`, `Monday`."""

    text: str


@dataclass(frozen=True)
class Quantity:
    """A number or an expression. unit: (dimension, factor to SI). mark: `%`, `deg` or ''. text: as it was written."""

    expression: Expression
    unit: tuple[str, Fraction] | None
    mark: str
    text: str


@dataclass(frozen=True)
class Several:
    """Answers in no order. joined: `,`, `or`, `and`, or `{}` for a set, which counts nothing twice."""

    joined: str
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Group:
    """Items in order between brackets: a point or an open interval `(1, 2)`, `[0, 1)`, a ratio `1:2:3`."""

    brackets: str
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of quantities."""

    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Relation:
    """`x = 5`, `1 < x <= 2`. texts: of its sides."""

    operators: tuple[str, ...]
    sides: tuple[Any, ...]
    texts: tuple[str, ...]

    @property
    def named(self) -> bool:
        """Is the left side a mere name: `x`, `f(x)`, a word?"""
        return bool(NAME.fullmatch(self.texts[0].strip()))


@dataclass(frozen=True)
class Combined:
    """Sets joined by one operation: cup, cap or setminus."""

    operation: str
    parts: tuple[Any, ...]


def read_shape(text: str) -> Any:
    """What a cleaned answer stands for. Unreadable if nothing."""
    if "⟦" in text or "⟧" in text:
        raise Unreadable("reserved characters")
    text = _balanced(mark_words(text))
    if "⟦" in text and not re.sub(r"⟦[^⟧]*⟧", "", text).strip(" .,;{}"):
        return Words(" ".join(re.findall(r"⟦([^⟧]*)⟧", text)))
    if re.search(r"\\[pm][mp](?![a-zA-Z])", text):
        plus, minus = text.replace(r"\pm", "+").replace(r"\mp", "-"), text.replace(r"\pm", "-").replace(r"\mp", "+")
        return Several(",", tuple(i for t in (plus, minus) for i in _items(_read(t))))
    return _read(text)


def _items(value: Any) -> tuple[Any, ...]:
    return value.items if isinstance(value, Several) and value.joined != "{}" else (value,)


# ---- cutting


def _read(text: str) -> Any:
    """A list, or one item of it."""
    text = GROUPED.sub(lambda found: re.sub(r"\{,\}|[, ]", "", found[0]), text) if _outside_brackets(text) else text
    pieces, cuts = _cut(text, SEPARATORS)
    if len(pieces) == 1:
        return _relation(text)
    if not pieces[-1].strip():  # a trailing comma
        pieces, cuts = pieces[:-1], cuts[:-1]
    pairs = list(zip(pieces, ["", *cuts], strict=False))
    kept = [piece for piece, cut in pairs if piece.strip() or cut in ("", ",")]  # `, and`
    joined = next((cut for cut in cuts if cut != ","), ",")
    return Several(joined, tuple(leaf for piece in kept for leaf in _items(_relation(piece))))


def _relation(text: str) -> Any:
    pieces, cuts = _cut(text, RELATIONS)
    if len(pieces) == 1:
        return _set(text)
    if not pieces[0].strip():  # `= 5`
        return _relation(text.strip()[len(cuts[0]) :] if cuts[0] == "=" else text.strip().partition(" ")[2])
    sides = [_side(piece) for piece in pieces]
    if "approx" in cuts:  # what is written before it is meant, unless that is only a name
        at = cuts.index("approx")
        if isinstance(sides[at], Quantity) and not sides[at].expression.symbols:
            sides, pieces, cuts = sides[: at + 1], pieces[: at + 1], cuts[:at]
        cuts = ["=" if cut == "approx" else cut for cut in cuts]
    return Relation(tuple(cuts), tuple(sides), tuple(pieces)) if cuts else sides[0]


def _side(text: str) -> Any:
    """A side that is a name may be anything."""
    try:
        return _set(text)
    except Unreadable:
        if NAME.fullmatch(text.strip()) or re.fullmatch(r"[\\\w\s|(){}⟦⟧+\-^*/]+", text):
            return Words(text.strip())
        raise


def _set(text: str) -> Any:
    pieces, cuts = _cut(text, SET_OPERATIONS)
    value = _item(pieces[0])
    for piece, operation in zip(pieces[1:], cuts, strict=True):
        if isinstance(value, Combined) and value.operation == operation != "setminus":
            value = Combined(operation, (*value.parts, _item(piece)))
        else:
            value = Combined(operation, (value, _item(piece)))
    return value


def _item(text: str) -> Any:
    """A bracket, a matrix, a ratio, a quantity."""
    text = text.strip()
    while text.startswith("{") and _closing(text) == len(text):
        text = text[1:-1].strip()
    if text.replace(" ", "") in NUMBER_SETS:
        return NUMBER_SETS[text.replace(" ", "")]
    matrix = MATRIX.fullmatch(re.sub(r"\^\s*\{?T\}?$", "", text))
    if matrix and r"\begin" not in matrix[2]:
        rows = [row for row in re.split(r"\\\\\s*(?:\[[^\]]*\])?", matrix[2]) if row.strip()]
        cells = tuple(tuple(_quantity(cell) for cell in row.split("&")) for row in rows)
        if len({len(row) for row in cells}) != 1:
            raise Unreadable("rows of different length")
        return (
            _determinant(cells)
            if matrix[1] == "vmatrix"
            else Matrix(tuple(zip(*cells, strict=True)) if "^" in text[matrix.end() :] else cells)
        )
    bracketed = re.sub(r"(?<=[)\]}])\s*⟦[^⟧]*⟧$", "", text)  # words after a set or an interval
    opening = re.match(r"\\\{|\\l(?:angle|brace)(?![a-zA-Z])|[(\[]", bracketed)
    if opening and _closing(bracketed) == len(bracketed):
        closing = re.search(r"(\\\}|\\r(?:angle|brace)|[)\]])$", bracketed)
        inside = bracketed[opening.end() : closing.start()] if closing else ""
        pieces, _ = _cut(inside, {",": ",", ";": ","})
        if len(pieces) == 1 and inside.lstrip().startswith("\\begin"):
            return _item(inside)
        if opening[0] in (r"\{", r"\lbrace"):
            return Several("{}", tuple(_relation(piece) for piece in pieces if piece.strip()))
        if len(pieces) > 1 and closing:
            brackets = "()" if opening[0] == r"\langle" else opening[0] + closing[0]
            return Group(brackets, tuple(_relation(piece) for piece in pieces))
    ratio, _ = _cut(text, {":": ":"})
    if len(ratio) > 1:
        return Group(":", tuple(_quantity(part) for part in ratio))
    return _quantity(text)


def _determinant(cells: tuple[tuple[Quantity, ...], ...]) -> Quantity:
    matrix = sympy.Matrix([[cell.expression.value for cell in row] for row in cells])
    return Quantity(Expression(matrix.det()), None, "", "")


def _cut(text: str, at: dict[str, str]) -> tuple[list[str], list[str]]:
    """Pieces between separators that stand in no bracket, and which separators those were."""
    pieces, cuts, start = [], [], 0
    for piece, place, depth in _pieces(text):
        if depth == 0 and piece in at:
            pieces.append(text[start:place])
            cuts.append(at[piece])
            start = place + len(piece)
    return [*pieces, text[start:]], cuts


def _pieces(text: str) -> Iterator[tuple[str, int, int]]:
    """(command, character or words; where; how many brackets are open there)."""
    depth = 0
    for found in PIECE.finditer(text):
        depth -= found[0] in CLOSE
        yield found[0], found.start(), depth
        depth += found[0] in OPEN


def _closing(text: str) -> int:
    """Where the bracket that the text begins with is closed."""
    return next((at + len(p) for p, at, depth in _pieces(text) if at > 0 and depth == 0 and p in CLOSE), 0)


def _outside_brackets(text: str) -> bool:
    return not re.search(r"[(\[]|\\\{|\\langle|\\lbrace", text) or "{,}" in text


def _balanced(text: str) -> str:
    """Supply braces that were never closed, drop ones that were never opened."""
    depth, kept = 0, []
    for piece in PIECE.findall(text):
        if piece == "}" and depth == 0:
            continue
        depth += (piece == "{") - (piece == "}")
        kept.append(piece)
    return "".join(kept) + "}" * depth


# ---- quantities


def _quantity(text: str) -> Quantity:
    """An expression, with words before and after it: its unit, or words that say nothing."""
    text, units, mark = text.strip(), [], ""
    while True:
        after, before = TRAILING_WORDS.search(text), LEADING_WORDS.match(text)
        words = after or before
        if words and NOT_SAID.search(words[1]):
            raise Unreadable("words that change what is meant")
        if after:
            power = f"^{after[2]}" if after[2] else ""
            units.insert(0, f"({after[1]}){power}" if power and " " in after[1] else after[1] + power)
            text = text[: after.start()].strip()
        elif before:
            units.append(before[1])
            text = text[before.end() :].strip()
        elif text.endswith("%"):
            text, mark = text[:-1].strip(), "%"
        elif text.endswith(r"\deg") and not ANGLES.search(text):
            text, mark = text[:-4].strip(), "deg"
        else:
            break
    unit = read_unit(" ".join(units)) if units else None
    if unit and unit[0] == "A1":
        unit, mark = None, "deg"
    return Quantity(read_expression(text), unit, mark, text)
