"""What an answer is made of: sympy expressions, and the few shapes around them; arithmetic that cannot explode.

A power that would not fit in memory is never evaluated: `10^{10^{10}}` becomes powers of symbols that stand for its
primes. Such values stay exact, so equal ones are found equal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.core.expr import Expr

from quads.rl.rewards.math_tokens import Unreadable

MAX_POWER_BITS = 200_000
MAX_FACTORIAL = 5_000
PERCENT, DEGREE = sympy.Symbol("%"), sympy.Symbol("°")
TEXT = "text:"  # prefix of symbols that stand for words, such as units
PRIME = "prime:"  # prefix of symbols that stand for the primes of huge powers
SIMPLE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan, "cot": sympy.cot, "sec": sympy.sec, "csc": sympy.csc,
    "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan, "arccot": sympy.acot, "sinh": sympy.sinh,
    "cosh": sympy.cosh, "tanh": sympy.tanh, "coth": sympy.coth, "exp": sympy.exp, "ln": sympy.log, "log": sympy.log,
    "lg": lambda x: sympy.log(x, 10), "max": sympy.Max, "min": sympy.Min, "det": lambda matrix: matrix.det(),
    "gcd": lambda *n: sympy.gcd(list(n)), "lcm": lambda *n: sympy.lcm(list(n)),
}  # fmt: skip
INVERSE_FUNCTIONS = {"sin": sympy.asin, "cos": sympy.acos, "tan": sympy.atan, "cot": sympy.acot}


@dataclass(frozen=True)
class Seq:
    """Several answers, in no order: `1, 2`, `x = 1 or x = 2`, `\\pm 3`."""

    items: tuple[Any, ...]


@dataclass(frozen=True)
class SetOf:
    """`{1, 2}`."""

    items: tuple[Any, ...]


@dataclass(frozen=True)
class Group:
    """Items in order between brackets: a point or an open interval `(1, 2)`, `[0, 1)`, a ratio `1:2:3`."""

    brackets: str
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Relation:
    """`x = 5`, `1 < x <= 2`. named: the left side is a mere name (`x`, `f(x)`, a word)."""

    operators: tuple[str, ...]
    sides: tuple[Any, ...]
    named: bool


@dataclass(frozen=True)
class Combined:
    """Sets joined by one operation: cup, cap or setminus."""

    operation: str
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Words:
    """An answer in words: `no solution`, `Monday`."""

    text: str


def text_symbol(text: str) -> sympy.Symbol:
    """Words inside an expression, such as the cm of 5 cm."""
    return sympy.Symbol(TEXT + " ".join(text.lower().split()) if len(text) > 1 else TEXT + text)


def is_text(value: Any) -> bool:
    """Only words, possibly to a power."""
    return (
        isinstance(value, sympy.Basic)
        and bool(value.free_symbols)
        and not value.is_Add
        and all(str(symbol).startswith(TEXT) for symbol in value.free_symbols)
    )


def arithmetic(operator: str, left: Any, right: Any) -> Any:
    """left operator right for expressions and matrices. Unreadable for shapes that have no arithmetic."""
    for value in (left, right):
        if not isinstance(value, Expr | sympy.MatrixBase):
            raise Unreadable(f"{operator} with a {type(value).__name__}")
    try:
        if operator == "+":
            return left + right
        if operator == "*":
            return left * right
        if right == 0:
            raise Unreadable("division by zero")
        return left / right
    except (TypeError, ValueError, sympy.ShapeError) as error:
        raise Unreadable(str(error)) from None


def negate(value: Any, sign: int) -> Any:
    """value or -value."""
    return value if sign > 0 else arithmetic("*", sympy.Integer(-1), value)


def power(base: Any, exponent: Any) -> Any:
    """base ** exponent, with huge numbers left as powers of symbols for primes."""
    if isinstance(base, sympy.MatrixBase):
        return base.T if exponent == sympy.Symbol("T") else base**exponent
    if not isinstance(base, Expr) or not isinstance(exponent, Expr):
        raise Unreadable("a power of something that is no expression")
    if isinstance(base, sympy.Rational) and base not in (0, 1, -1):
        huge = (
            exponent.is_Integer and abs(int(exponent)) * max(base.p.bit_length(), base.q.bit_length()) > MAX_POWER_BITS
        )
        if huge or any(str(symbol).startswith(PRIME) for symbol in exponent.free_symbols):
            return _huge_power(base, exponent)
    if exponent.is_Integer and abs(int(exponent)) > MAX_POWER_BITS and base.is_number and base not in (0, 1, -1):
        raise Unreadable("a power too large to compare")
    return base**exponent


def root(radicand: Any, degree: Any) -> Any:
    """The real root where there is one: the cube root of -8 is -2."""
    if not isinstance(radicand, Expr) or not isinstance(degree, Expr) or degree == 0:
        raise Unreadable("a root of something that is no expression")
    if degree.is_Integer and int(degree) % 2 and radicand.is_number and radicand.is_negative:
        return -((-radicand) ** (1 / degree))
    return radicand ** (1 / degree)


def factorial(value: Any) -> Any:
    """n!, unevaluated where it is long."""
    if not isinstance(value, Expr):
        raise Unreadable("a factorial of something that is no expression")
    return sympy.factorial(value, evaluate=not (value.is_Integer and int(value) > MAX_FACTORIAL))


def settle(value: Any) -> Any:
    """Put the primes back where what is left of a huge power is small: 2^{10^6} / 2^{10^6 - 3} is 8."""
    if not isinstance(value, Expr):
        return value
    primes = [symbol for symbol in value.free_symbols if str(symbol).startswith(PRIME)]
    if not primes:
        return value
    value = sympy.powsimp(sympy.expand(value)) if value.count_ops() < 200 else value
    for symbol in primes:
        exponents = [term.exp for term in value.atoms(sympy.Pow) if term.base == symbol]
        if all(exponent.is_Integer and abs(int(exponent)) < MAX_POWER_BITS // 32 for exponent in exponents):
            value = value.subs(symbol, int(str(symbol).removeprefix(PRIME)))
    return value


def _huge_power(base: Any, exponent: Any) -> Any:
    if max(abs(base.p), base.q) > 10**12:
        raise Unreadable("a power too large to compare")
    if base < 0:
        if not exponent.is_Integer:
            raise Unreadable("a huge power of a negative number")
        sign = -1 if int(exponent) % 2 else 1
        return sign * _huge_power(-base, exponent)
    product = sympy.Integer(1)
    primes: Any = sympy.factorrat(base)
    for prime, times in primes.items():
        product *= sympy.Symbol(f"{PRIME}{prime}", positive=True) ** (times * exponent)
    return product
