"""Tokens -> what stands between operators: numbers, symbols, functions, matrices, things in brackets.

The operators around atoms are read in math_expression.py, by a subclass; an atom that holds an expression asks it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import sympy

from quads.rl.rewards.math_tokens import FUNCTIONS, GREEK, Token, Unreadable
from quads.rl.rewards.math_values import (
    DEGREE,
    INVERSE_FUNCTIONS,
    SIMPLE_FUNCTIONS,
    Group,
    SetOf,
    arithmetic,
    negate,
    power,
    root,
    text_symbol,
)

NUMBER_SETS = {"R": sympy.S.Reals, "Z": sympy.S.Integers, "N": sympy.S.Naturals, "Q": sympy.S.Rationals}
CONSTANTS = {
    "pi": sympy.pi, "infty": sympy.oo, "imath": sympy.I, "mathbb R": NUMBER_SETS["R"], "mathbb Z": NUMBER_SETS["Z"],
    "mathbb N": NUMBER_SETS["N"], "mathbb Q": NUMBER_SETS["Q"], "emptyset": SetOf(()), "varnothing": SetOf(()),
}  # fmt: skip
ENCLOSED = {
    "lvert": ("rvert", sympy.Abs), "vert": ("vert", sympy.Abs), "lfloor": ("rfloor", sympy.floor),
    "lceil": ("rceil", sympy.ceiling),
}  # fmt: skip
ATOM_COMMANDS = {"frac", "sqrt", "binom", "tbinom", "dbinom", "langle", "lbrace", "angle", "triangle", "pi", "infty",
                 "imath", "overline", "vec", "hat", "bar", *FUNCTIONS, *GREEK, *ENCLOSED} - {"vert"}  # fmt: skip
END = Token("end", "")


class AtomParser(ABC):
    """One pass over a token list; every method consumes what it reads. sign: what \\pm stands for in this pass."""

    def __init__(self, tokens: list[Token], sign: int):
        self.tokens, self.at, self.sign = tokens, 0, sign
        self.saw_plus_minus = False
        self.in_bars = 0
        self.item: Callable[[], Any] = self.sum  # what stands between the commas of a bracket

    def _peek(self) -> Token:
        return self.tokens[self.at] if self.at < len(self.tokens) else END

    def _next(self) -> Token:
        token = self._peek()
        self.at += 1
        return token

    def _expect(self, kind: str, value: str) -> None:
        if self._next() != (kind, value):
            raise Unreadable(f"{value!r} is missing")

    @abstractmethod
    def sum(self) -> Any:
        """The longest expression from here."""

    @abstractmethod
    def implicit(self, in_function: bool = False) -> Any:
        """Factors written side by side. in_function: they are its argument, which ends at a bracket or function."""

    def _sign(self) -> int:
        value = self._next().value
        if value in ("pm", "mp"):
            self.saw_plus_minus = True
            return self.sign if value == "pm" else -self.sign
        return 1 if value == "+" else -1

    def _script(self) -> Any:
        """What stands after ^ or _: one atom, with a sign if there is one."""
        sign = 1
        while self._peek() in (("op", "+"), ("op", "-")):
            sign *= self._sign()
        return negate(self.atom(), sign)

    def atom(self) -> Any:
        """One number, symbol, function with its argument, matrix or bracket."""
        kind, value = self._next()
        if kind == "number":
            return sympy.Rational(value)
        value = str(value)
        if kind == "symbol":
            return {"i": sympy.I, "e": sympy.E}.get(value, sympy.Symbol(value))
        if kind == "text":
            return text_symbol(value)
        if kind == "env" and value.startswith("begin "):
            return self._matrix(value.removeprefix("begin "))
        if kind == "op":
            return self._bracket(value)
        if kind == "command":
            return self._command(value)
        raise Unreadable(f"{value or 'the end'} where a value should be")

    def _bracket(self, opening: str) -> Any:
        if opening == "|":
            self.in_bars += 1
            inside = self.sum()
            self.in_bars -= 1
            self._expect("op", "|")
            return sympy.Abs(inside)
        if opening not in ("(", "[", "{", "\\{"):
            raise Unreadable(f"{opening!r} where a value should be")
        closings = {"(": (")", "]"), "[": (")", "]"), "{": ("}",), "\\{": ("\\}",)}[opening]
        bars, self.in_bars = self.in_bars, 0
        items, closing = self._list(("op", closings))
        self.in_bars = bars
        if opening == "\\{" or (opening == "{" and len(items) > 1):
            return SetOf(tuple(items))
        if len(items) == 1:
            return items[0]
        if opening == "{":
            raise Unreadable("empty braces")
        return Group(opening + closing, tuple(items))

    def _list(self, end: tuple[str, tuple[str, ...]]) -> tuple[list[Any], str]:
        """Items up to the closing bracket, and which one it was."""
        items = []
        while not (self._peek().kind == end[0] and self._peek().value in end[1]):
            if items and self._next() not in (("op", ","), ("op", ";")):
                raise Unreadable("a bracket is not closed")
            items.append(self.item())
        return items, str(self._next().value)

    def _command(self, name: str) -> Any:
        if name in CONSTANTS:
            return CONSTANTS[name]
        if name in GREEK:
            return sympy.Symbol(name)
        if name in ("frac", "binom", "tbinom", "dbinom"):
            first, second = self.atom(), self.atom()
            if name == "frac":
                return arithmetic("/", first, second)
            return sympy.binomial(*_expressions(first, second))
        if name == "sqrt":
            degree: Any = sympy.Integer(2)
            if self._peek() == ("op", "["):
                self.at += 1
                degree = self.sum()
                self._expect("op", "]")
            return root(self.atom(), degree)
        if name in ENCLOSED:
            closing, function = ENCLOSED[name]
            inside = self.sum()
            self._expect("command", closing)
            return function(*_expressions(inside))
        if name == "langle":
            items, _ = self._list(("command", ("rangle",)))
            return Group("()", tuple(items))
        if name == "lbrace":
            items, _ = self._list(("command", ("rbrace",)))
            return SetOf(tuple(items))
        if name in ("angle", "triangle", "overline", "vec", "hat", "bar"):
            return sympy.Symbol(f"{name} {self.atom() if name not in ('angle', 'triangle') else self.implicit()}")
        if name in FUNCTIONS:
            return self._function(name)
        raise Unreadable(f"\\{name}")

    def _function(self, name: str) -> Any:
        """\\sin x, \\sin^2 x, \\sin^{-1} x, \\log_2 8, \\max(1, 2)."""
        base: Any = None
        exponent: Any = None
        while self._peek() in (("op", "_"), ("op", "^")):
            if self._next().value == "_":
                base = self._script()
            else:
                exponent = self._script()
        if self._peek() in (("op", "("), ("op", "{"), ("op", "[")):
            inside = self.atom()
            arguments = inside.items if isinstance(inside, Group) else (inside,)
        else:
            arguments = (self.implicit(in_function=True),)
        if name == "det":
            return SIMPLE_FUNCTIONS[name](arguments[0])
        arguments = tuple(argument.subs(DEGREE, sympy.pi / 180) for argument in _expressions(*arguments))
        if exponent == -1 and name in INVERSE_FUNCTIONS:
            return INVERSE_FUNCTIONS[name](*arguments)
        try:
            value = SIMPLE_FUNCTIONS[name](*arguments) if base is None else sympy.log(*arguments, base)
        except (TypeError, ValueError) as error:
            raise Unreadable(str(error)) from None
        return value if exponent is None else power(value, exponent)

    def _matrix(self, environment: str) -> Any:
        if environment not in ("pmatrix", "bmatrix", "Bmatrix", "matrix", "smallmatrix", "vmatrix", "array"):
            raise Unreadable(f"environment {environment}")
        rows: list[list[Any]] = [[]]
        while self._peek() != ("env", f"end {environment}"):
            if self._peek() == ("op", "\\\\"):
                self.at += 1
                rows.append([])
            elif self._peek() == ("op", "&"):
                self.at += 1
            elif self._peek() == END:
                raise Unreadable("a matrix is not closed")
            else:
                rows[-1].append(self.sum())
        self.at += 1
        rows = [row for row in rows if row]
        if not rows or len({len(row) for row in rows}) > 1:
            raise Unreadable("rows of different length")
        matrix = sympy.ImmutableMatrix([_expressions(*row) for row in rows])
        return matrix.det() if environment == "vmatrix" else matrix


def _expressions(*values: Any) -> tuple[Any, ...]:
    for value in values:
        if not isinstance(value, sympy.Expr):
            raise Unreadable(f"a {type(value).__name__} where an expression should be")
    return values
