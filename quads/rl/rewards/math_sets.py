"""Answers as sets of real numbers: intervals, inequalities, finite sets, and what joins them."""

from typing import Any

import sympy
from sympy.core.expr import Expr

from quads.rl.rewards.math_values import Combined, Group, Relation, Seq, SetOf


def as_set(value: Any) -> sympy.Set | None:
    """Intervals, inequalities, finite sets and their combinations as sympy sets; None for what is none."""
    if isinstance(value, sympy.Set):
        return value
    if isinstance(value, SetOf):
        return sympy.FiniteSet(*value.items) if all(isinstance(item, Expr) for item in value.items) else None
    if isinstance(value, Group) and len(value.items) == 2 and value.brackets != ":":
        low, high = value.items
        if not all(isinstance(end, Expr) and end.is_extended_real for end in (low, high)):
            return None
        return sympy.Interval(low, high, value.brackets[0] == "(", value.brackets[1] == ")")
    if isinstance(value, Combined):
        parts = [as_set(part) for part in value.parts]
        if any(part is None for part in parts):
            return None
        join = {"cup": sympy.Union, "cap": sympy.Intersection, "setminus": sympy.Complement}[value.operation]
        return join(*parts)
    if isinstance(value, Seq):
        parts = [as_set(item) for item in value.items]
        return None if any(part is None for part in parts) else sympy.Union(*parts)
    if isinstance(value, Relation):
        return _solution_set(value)
    return None


def _solution_set(relation: Relation) -> sympy.Set | None:
    """Real solutions of a chain of inequalities in one variable."""
    if relation.operators == ("in",):
        return as_set(relation.sides[-1])
    if not all(isinstance(side, Expr) for side in relation.sides) or "in" in relation.operators:
        return None
    symbols = set().union(*(side.free_symbols for side in relation.sides))
    if len(symbols) != 1:
        return None
    x = sympy.Symbol("x", real=True)
    sides = [side.subs(next(iter(symbols)), x) for side in relation.sides]
    make = {"<": sympy.Lt, "<=": sympy.Le, ">": sympy.Gt, ">=": sympy.Ge, "!=": sympy.Ne, "=": sympy.Eq}
    solutions: sympy.Set = sympy.S.Reals
    for operator, left, right in zip(relation.operators, sides, sides[1:], strict=False):
        step = make[operator](left, right)
        if step in (sympy.true, sympy.false):
            solutions = solutions if step == sympy.true else sympy.S.EmptySet
        elif isinstance(step, sympy.Ne):
            solutions = solutions - sympy.solveset(left - right, x, sympy.S.Reals)
        elif isinstance(step, sympy.Eq):
            solutions = solutions & sympy.solveset(left - right, x, sympy.S.Reals)
        else:
            solutions = solutions & sympy.solve_univariate_inequality(step, x, relational=False)
    return solutions
