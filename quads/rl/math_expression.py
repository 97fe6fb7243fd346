"""Tokens -> expressions, by recursive descent: sums, products, powers, roots, functions, matrices, things in brackets.

A small parser of its own instead of a LaTeX grammar: it answers in microseconds, and takes the slips people make
(braces never closed, units in words). What it does not know (integrals, sums, limits) is `Unreadable`.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import sympy

from quads.rl.math_tokens import FUNCTIONS, GREEK, Token, Unreadable
from quads.rl.math_values import (
    DEGREE,
    INVERSE_FUNCTIONS,
    PERCENT,
    SIMPLE_FUNCTIONS,
    Group,
    SetOf,
    arithmetic,
    factorial,
    is_text,
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


class ExpressionParser:
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

    def sum(self) -> Any:
        value = self._signed_term()
        while self._peek() in (("op", "+"), ("op", "-"), ("command", "pm"), ("command", "mp")):
            sign = self._sign()
            value = arithmetic("+", value, negate(self.product(), sign))
        return value

    def _signed_term(self) -> Any:
        sign = 1
        while self._peek() in (("op", "+"), ("op", "-"), ("command", "pm"), ("command", "mp")):
            sign *= self._sign()
        return negate(self.product(), sign)

    def _sign(self) -> int:
        value = self._next().value
        if value in ("pm", "mp"):
            self.saw_plus_minus = True
            return self.sign if value == "pm" else -self.sign
        return 1 if value == "+" else -1

    def product(self) -> Any:
        value, ratio = self.implicit(), []
        while True:
            token = self._peek()
            if token in (("op", "*"), ("command", "cdot"), ("command", "times"), ("command", "ast")):
                self.at += 1
                value = arithmetic("*", value, self._factor_after_operator())
            elif token in (("op", "/"), ("command", "div")):
                self.at += 1
                value = arithmetic("/", value, self._factor_after_operator())
            elif token in (("op", ":"), ("command", "colon")):
                self.at += 1
                ratio.append(value)
                value = self._factor_after_operator()
            else:
                break
        if len(ratio) == 1:
            return arithmetic("/", ratio[0], value)
        return Group(":", (*ratio, value)) if ratio else value

    def _factor_after_operator(self) -> Any:
        sign = 1
        while self._peek() in (("op", "+"), ("op", "-")):
            sign *= self._sign()
        return negate(self.implicit(), sign)

    def implicit(self, in_function: bool = False) -> Any:
        """Factors written side by side."""
        start = self.at
        value = self.power()
        while self._starts_factor(in_function):
            before, token = self.tokens[self.at - 1], self._peek()
            if before.kind == "number" and self.at - 1 == start and self._mixed_number():
                value = arithmetic("+", value, self.power())
                if self._peek() == ("op", "/"):  # `1 1/2`
                    raise Unreadable("two slashes")
                continue
            if token.kind == "number" and before.kind == "number":
                value = arithmetic("+", value, self._slashed_fraction(value))
                continue
            factor = self.power()
            if not isinstance(value, sympy.Basic) and is_text(factor):
                continue  # words after a set or an interval
            value = arithmetic("*", value, factor)
        return value

    def _mixed_number(self) -> bool:
        """Is the next factor the fraction of a mixed number, `2\\frac{1}{3}`?"""
        t = self.tokens[self.at - 1 : self.at + 8]
        whole = isinstance(t[0].value, Fraction) and t[0].value.denominator == 1
        return (
            whole
            and len(t) >= 8
            and t[1] == ("command", "frac")
            and [t[2], t[4], t[5], t[7]] == [("op", "{"), ("op", "}"), ("op", "{"), ("op", "}")]
            and t[3].kind == t[6].kind == "number"
            and t[3].value < t[6].value  # type: ignore[operator]
        )

    def _slashed_fraction(self, whole: Any) -> Any:
        """The 1/2 of `3 1/2`."""
        t = self.tokens[self.at : self.at + 3]
        numbers = len(t) == 3 and t[0].kind == t[2].kind == "number" and t[1] == ("op", "/")
        if not (numbers and getattr(whole, "is_Integer", False) and t[0].value < t[2].value):  # type: ignore[operator]
            raise Unreadable("two numbers side by side")
        self.at += 3
        return sympy.Rational(t[0].value) / sympy.Rational(t[2].value)

    def _starts_factor(self, in_function: bool) -> bool:
        kind, value = self._peek()
        if kind in ("number", "symbol") or (kind == "env" and str(value).startswith("begin")):
            return True
        if kind == "text":
            return str(value).lower().strip(" ,") not in ("and", "or")
        if kind == "op":
            return value in ("(", "{") or (value == "|" and not self.in_bars) or (value == "[" and not in_function)
        if kind != "command":
            return False
        if in_function and value in FUNCTIONS:
            return False
        return str(value) in ATOM_COMMANDS

    def power(self) -> Any:
        value = self.atom()
        while True:
            token = self._peek()
            if token == ("op", "^"):
                self.at += 1
                value = power(value, self._script())
            elif token == ("op", "!"):
                self.at += 1
                value = factorial(value)
            elif token == ("op", "%"):
                self.at += 1
                value = arithmetic("*", value, PERCENT)
            elif token == ("command", "deg"):
                self.at += 1
                value = arithmetic("*", value, DEGREE)
            elif token == ("op", "_"):
                self.at += 1
                value = self._subscript(value)
            elif token == ("op", "'"):
                self.at += 1
                value = sympy.Symbol(f"{value}'")
            else:
                return value

    def _script(self) -> Any:
        """What stands after ^ or _: one atom, with a sign if there is one."""
        sign = 1
        while self._peek() in (("op", "+"), ("op", "-")):
            sign *= self._sign()
        return negate(self.atom(), sign)

    def _subscript(self, value: Any) -> Any:
        script = self._script()
        if isinstance(value, sympy.Integer) and isinstance(script, sympy.Integer):  # 1011_2
            try:
                return sympy.Integer(int(str(value), int(script)))
            except ValueError:
                raise Unreadable(f"{value} is no number in base {script}") from None
        return sympy.Symbol(f"{value}_{script}")

    # ---- atoms

    def atom(self) -> Any:
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
