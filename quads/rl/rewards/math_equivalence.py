"""Are two expressions equal for every value of their variables?

By their exact difference where they are rational numbers, else by its value to 100 digits, at several points where they
have variables: fast, and safe (a difference below 1e-100 is not an accident).
"""

from collections.abc import Iterable
from typing import Any

import sympy
from sympy.core.expr import Expr

from quads.rl.rewards.math_values import PRIME

DIGITS = 100
# Where expressions with variables are compared: positive, then of both signs. Rational, so that evaluation is exact.
POINTS = ((17, 7), (139, 101), (7, 23), (-11, 9), (-167, 53))
WHOLE_POINTS = ((3, 4), (5, 7), (4, 3))  # first value and step: for n! and floor(n), which live on whole numbers


def same_expression(ours: Expr, theirs: Expr) -> bool:
    """Equal for every value of their variables (where both are real)."""
    if ours == theirs:
        return True
    if isinstance(ours, sympy.Rational) and isinstance(theirs, sympy.Rational):
        return False
    if not (_finite(ours) and _finite(theirs)):
        return False
    difference = ours - theirs
    if difference == 0:
        return True
    symbols = sorted(difference.free_symbols, key=str)
    if any(str(symbol).startswith(PRIME) for symbol in symbols):
        return _huge_difference_is_zero(difference)
    compared = 0
    for values in _points(symbols, whole=difference.has(sympy.factorial, sympy.binomial, sympy.floor, sympy.ceiling)):
        scale, gap = _value(ours, values), _value(difference, values)
        if scale is None or gap is None:
            continue
        if min(values.values(), default=0) < 0:
            other = _value(theirs, values)
            if scale.is_real is not True or other is None or other.is_real is not True:
                continue  # sqrt(x^2) and log(x) of negative numbers: only real values are compared
        if abs(gap) > sympy.Float(10, 15) ** (-DIGITS) * (1 + abs(scale)):
            return False
        compared += 1
    return compared > 0


def _points(symbols: list[Any], whole: bool) -> Iterable[dict[Any, Any]]:
    """Values of the variables, all different."""
    if whole:
        for first, step in WHOLE_POINTS:
            yield {symbol: sympy.Rational(first + step * i) for i, symbol in enumerate(symbols)}
        return
    for shift, (numerator, denominator) in enumerate(POINTS if symbols else POINTS[:1]):
        step = 2 if numerator > 0 else -2
        yield {
            symbol: sympy.Rational(numerator + step * i, denominator + i + shift) for i, symbol in enumerate(symbols)
        }


def _finite(value: Expr) -> bool:
    return not value.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)


def _huge_difference_is_zero(difference: Expr) -> bool:
    """Is a sum with powers of prime symbols zero? Factors of those primes move from coefficients into the powers."""
    primes = {int(str(s).removeprefix(PRIME)): s for s in difference.free_symbols if str(s).startswith(PRIME)}
    while True:
        terms: list[Any] = []
        for term in sympy.Add.make_args(sympy.expand(difference)):
            parts: Any = term.as_coeff_Mul()
            coefficient: Any = parts[0]
            rest: Any = parts[1]
            for prime, symbol in primes.items():
                if isinstance(coefficient, sympy.Rational) and coefficient != 0:
                    up: Any = sympy.multiplicity(prime, coefficient.p)
                    down: Any = sympy.multiplicity(prime, coefficient.q)
                    coefficient = coefficient / sympy.Rational(prime) ** (up - down)
                    rest = rest * symbol ** (up - down)
            terms.append(coefficient * rest)
        moved = sympy.Add(*terms)
        if moved == 0 or moved == difference:
            return bool(moved == 0)
        difference = moved


def _value(expression: Expr, values: dict[Any, Any]) -> Any:
    """A number to DIGITS digits, or None where there is none."""
    try:
        value = expression.evalf(DIGITS + 10, subs=values, maxn=4 * DIGITS)
    except (ValueError, TypeError, ZeroDivisionError, OverflowError):
        return None
    return value if value.is_number and _finite(value) and (value.is_real or value.is_complex) else None
