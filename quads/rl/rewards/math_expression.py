"""One expression of an answer, read by math-verify's LaTeX grammar; and whether two are equal for all their variables.

The grammar gives a tree that is not evaluated. One whose numbers would not fit in memory is compared by its remainders,
all others by their values to 100 digits.
"""

import functools
import re
import secrets
from collections.abc import Iterator
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from sympy.core.expr import Expr
from sympy.core.function import AppliedUndef

from quads.rl.rewards.math_text import Unreadable, restricted

MAX_BITS = 200_000  # of a number that is written out
MAX_ROOT_BITS = 1_000  # of a number whose root is taken: sympy seeks its factors
MAX_TERMS = 1_000  # of a finite sum or product
DIGITS = 100
# Where expressions with variables are compared: positive, then of both signs. Rational, so that evaluation is exact.
POINTS = ((17, 7), (139, 101), (7, 23), (-11, 9), (-167, 53))
WHOLE_POINTS = ((3, 4), (5, 7), (4, 3))  # first value and step: for n! and sums to n, which live on whole numbers
STEPS = sympy.factorial, sympy.binomial, sympy.floor, sympy.ceiling, sympy.Sum, sympy.Product
LIMITS = sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit
CONFIG = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)

PLAIN = re.compile(
    r"([-+]?)\s*(?:\\frac\{(\d{1,40})\}\{(\d{1,40})\}|(\d{0,40})(?:\.(\d{0,40}))?(?:\s*/\s*(\d{1,40}))?)\s*"
)


class Huge(Unreadable):
    """Its numbers would not fit in memory."""


class Expression:
    """tree: as it was read, not evaluated; meant: its letters -> the number or variable that each stands for.

    `value` is the tree evaluated, None where that would not fit in memory.
    """

    def __init__(self, tree: Any, meant: dict[Any, Any] | None = None):
        self.tree, self.meant = tree, meant or {}
        try:
            self.value: Any = _evaluated(tree, self.meant)
        except Huge:
            self.value = None

    def times(self, factor: Any) -> "Expression":
        return self if factor == 1 else Expression(sympy.Mul(self.tree, factor, evaluate=False), self.meant)

    @property
    def symbols(self) -> set[Any]:
        if self.value is not None:
            return self.value.free_symbols
        return {symbol for letter in self.tree.free_symbols for symbol in self.meant[letter].free_symbols}

    def remainder(self, modulus: int, values: dict[Any, int] | None = None) -> int:
        """Of an integer or a fraction, however large, with values of its variables. Unreadable where there is none."""
        letters = {letter: values.get(meant) if values else None for letter, meant in self.meant.items()}
        return _remainder(self.tree, modulus, self.meant, {k: v for k, v in letters.items() if v is not None})


def read_expression(text: str) -> Expression:
    """The expression that cleaned LaTeX without words stands for. Unreadable if it is none."""
    number = PLAIN.fullmatch(text)
    if number and re.search(r"\d", text):  # most answers are: no grammar is needed
        sign, above, below, whole, decimals, divisor = number.groups()
        value = (
            sympy.Rational(int(above), int(below) or 0) if above else sympy.Rational(f"{whole or 0}.{decimals or 0}")
        )
        value = value / int(divisor) if divisor else value
        if not value.is_Rational:
            raise Unreadable("division by zero")
        return Expression(-value if sign == "-" else value)
    based = re.fullmatch(r"\s*(\d+)\s*_\s*\{?(\d+)\}?\s*", text)
    if based and 2 <= int(based[2]) <= 36:  # 1011_2
        return Expression(sympy.Integer(int(based[1], int(based[2]))))
    dividend, modulo, modulus = text.partition(r"\bmod")
    if modulo and modulus.strip().isdigit():
        return Expression(sympy.Integer(read_expression(dividend).remainder(int(modulus))))
    written, letters = restricted(text)
    if not written:
        raise Unreadable("nothing there")
    try:
        tree = latex2sympy(written, normalization_config=None, conversion_config=CONFIG)
    except Exception as error:  # the grammar raises many things on text that it does not know
        raise Unreadable(str(error)) from None
    if not isinstance(tree, Expr):
        raise Unreadable("no expression")
    return Expression(tree, {sympy.Symbol(letter): meant for meant, letter in letters.items()})


def same_expression(ours: Expression, theirs: Expression) -> bool:
    """Equal for every value of their variables (where both are real)."""
    a, b = ours.value, theirs.value
    if a is None or b is None:
        return _same_remainders(ours, theirs)
    if a == b:
        return not a.has(sympy.nan, sympy.zoo)
    if isinstance(a, sympy.Rational) and isinstance(b, sympy.Rational) or not (_finite(a) and _finite(b)):
        return False
    symbols = sorted((a - b).free_symbols, key=str)
    compared = 0
    for point in _points(symbols, whole=a.has(*STEPS) or b.has(*STEPS)):
        left, right = _at(a, point), _at(b, point)
        if left is None or right is None:
            continue
        real = left.is_real and right.is_real
        if min(point.values(), default=0) < 0 and not real:
            continue  # sqrt(x^2) and log(x) of negative numbers: only real values are compared
        if abs(left - right) > sympy.Float(10, 15) ** (-DIGITS) * (1 + abs(left)):
            return False
        compared += 1
    return compared > 0


# ---- values


def _evaluated(node: Any, meant: dict[Any, Any]) -> Any:
    """The tree, evaluated from its leaves up. Huge before a power or a factorial that would not fit."""
    if not node.args:
        return meant.get(node, node)
    parts = [_evaluated(part, meant) for part in node.args]
    if isinstance(node, AppliedUndef):  # a(x): the grammar takes a for a function
        return _evaluated(_factors(node), meant)
    if isinstance(node, sympy.Pow):
        return _power(*parts)
    if isinstance(node, sympy.exp):
        return _power(sympy.E, parts[0])
    if isinstance(node, sympy.factorial | sympy.binomial) and parts[0].is_Integer and parts[0] > 5_000:
        raise Huge("factorial")
    if isinstance(node, sympy.Sum | sympy.Product):
        terms = parts[1][2] - parts[1][1]
        if terms.is_finite and (terms > MAX_TERMS) == sympy.true:
            raise Huge("a sum of many terms")
    return parts[0] if isinstance(node, sympy.UnevaluatedExpr) else node.func(*parts)


def _factors(node: Any) -> Any:
    if len(node.args) != 1:
        raise Unreadable("a function of several arguments")
    return sympy.Mul(sympy.Symbol(node.func.__name__), node.args[0], evaluate=False)


def _power(base: Any, exponent: Any) -> Any:
    if exponent.is_number and not (base.is_Integer and abs(base) <= 1):
        bits = max(base.p.bit_length(), base.q.bit_length()) if base.is_Rational else 8 * base.count_ops() + 8
        if abs(exponent.evalf(15)) * bits > MAX_BITS or (not exponent.is_Integer and bits > MAX_ROOT_BITS):
            raise Huge("power")
    odd_root = exponent.is_Rational and not exponent.is_Integer and exponent.q % 2
    if odd_root and base.is_number and base.is_negative:  # the cube root of -8 is -2
        return (-1) ** exponent.p * (-base) ** exponent
    return base**exponent


def _same_remainders(ours: Expression, theirs: Expression) -> bool:
    """Of the same remainder by a large prime, with random values of the variables: equal but for a chance of 2^-120."""
    if ours.symbols != theirs.symbols:
        return False
    values = {symbol: secrets.randbelow(_prime()) for symbol in ours.symbols}
    return ours.remainder(_prime(), values) == theirs.remainder(_prime(), values)


@functools.cache
def _prime() -> int:
    """Drawn once a process, so that nobody can write an answer that is congruent to another."""
    return int(sympy.nextprime(2**127 + secrets.randbelow(2**127)))


def _remainder(node: Any, modulus: int, meant: dict[Any, Any], values: dict[Any, int]) -> int:
    def of(part: Any) -> int:
        return _remainder(part, modulus, meant, values)

    if isinstance(node, AppliedUndef):
        node = _factors(node)
    parts: Any = node.args
    if node in values:
        return values[node]
    if node.is_Add:
        return sum(map(of, parts)) % modulus
    if node.is_Mul:
        return functools.reduce(lambda a, b: a * b % modulus, map(of, parts))
    if node.is_Pow:
        exponent = _evaluated(parts[1], meant)
        if exponent.is_Integer:
            return pow(of(parts[0]), int(exponent), modulus)
    node = meant.get(node, node)
    if not node.is_Rational:
        raise Unreadable("no remainder")
    return int(node.p) * pow(int(node.q), -1, modulus) % modulus


def _finite(value: Any) -> bool:
    return not value.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan) or value.has(*LIMITS)


def _points(symbols: list[Any], whole: bool) -> Iterator[dict[Any, Any]]:
    """Values of the variables, all different."""
    for shift, (first, step) in enumerate(WHOLE_POINTS if whole else POINTS):
        if whole:
            yield {symbol: sympy.Integer(first + step * i) for i, symbol in enumerate(symbols)}
        else:
            sign = 2 if first > 0 else -2
            yield {s: sympy.Rational(first + sign * i, step + i + shift) for i, s in enumerate(symbols)}
        if not symbols:
            return


def _at(value: Any, point: dict[Any, Any]) -> Any:
    """A number to DIGITS digits, or None where there is none."""
    try:
        if value.has(*LIMITS):
            value, point = value.subs(point).doit(), {}
        value = value.evalf(DIGITS + 10, subs=point, maxn=4 * DIGITS)
    except (ValueError, TypeError, ZeroDivisionError, OverflowError, NotImplementedError):
        return None
    return value if value.is_number and not value.has(*LIMITS) and _finite(value) and value.is_complex else None
