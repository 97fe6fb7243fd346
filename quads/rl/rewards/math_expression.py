"""Tokens -> expressions, by recursive descent: sums, products, powers, of the atoms of math_atoms.py.

A small parser of its own instead of a LaTeX grammar: it answers in microseconds, and takes the slips people make
(braces never closed, units in words). What it does not know (integrals, sums, limits) is `Unreadable`.
"""

from fractions import Fraction
from typing import Any

import sympy

from quads.rl.rewards.math_atoms import ATOM_COMMANDS, AtomParser
from quads.rl.rewards.math_tokens import FUNCTIONS, Unreadable
from quads.rl.rewards.math_values import DEGREE, PERCENT, Group, arithmetic, factorial, is_text, negate, power


class ExpressionParser(AtomParser):
    """Operators around atoms; `sum` reads a whole expression."""

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

    def _subscript(self, value: Any) -> Any:
        script = self._script()
        if isinstance(value, sympy.Integer) and isinstance(script, sympy.Integer):  # 1011_2
            try:
                return sympy.Integer(int(str(value), int(script)))
            except ValueError:
                raise Unreadable(f"{value} is no number in base {script}") from None
        return sympy.Symbol(f"{value}_{script}")
