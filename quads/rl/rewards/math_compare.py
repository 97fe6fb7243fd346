"""Are two answers equal? Exact: 0.333 is not 1/3, 5 cm is not 5 m, (0, 1) is not [0, 1].

Equal in other forms: fractions and decimals, simplified and not, `x = 5` and `5`, lists in any order, an inequality and
its interval, units that convert. A unit on one side only is ignored. 25% is 1/4; with `percent_as_unit` also 25.
"""

import re
from itertools import pairwise
from typing import Any, TypeGuard

import sympy

from quads.rl.rewards.math_expression import Expression, same_expression
from quads.rl.rewards.math_shapes import Combined, Group, Matrix, Quantity, Relation, Several, Words
from quads.rl.rewards.math_text import Unreadable
from quads.rl.rewards.math_units import read_unit

MAX_ITEMS = 100
MAKE = {"<": sympy.Lt, "<=": sympy.Le, ">": sympy.Gt, ">=": sympy.Ge, "!=": sympy.Ne, "=": sympy.Eq}


class Comparison:
    """`same(gold, answer)` of shapes as `read_shape` gives them; percent_as_unit: does 25% also answer 25?"""

    def __init__(self, percent_as_unit: bool):
        self._percent_as_unit = percent_as_unit

    def same(self, gold: Any, answer: Any) -> bool:
        """Does `answer` equal `gold`?"""
        gold, answer = _point(gold, answer), _point(answer, gold)
        if isinstance(gold, Words) or isinstance(answer, Words):
            return isinstance(gold, Words) and isinstance(answer, Words) and gold.text.lower() == answer.text.lower()
        if isinstance(gold, Quantity) and isinstance(answer, Quantity):
            return self._same_quantity(gold, answer)
        if isinstance(gold, Relation) and isinstance(answer, Relation):
            return self._same_relations(gold, answer)
        if _is_equation(answer) and not isinstance(gold, Several):
            return self._says(answer, gold)
        if _is_equation(gold) and not isinstance(answer, Several):
            return gold.named and self.same(gold.sides[-1], answer)
        for ours, theirs in ((gold, answer), (answer, gold)):
            if isinstance(ours, Relation) and ours.operators == ("in",) and not isinstance(theirs, Matrix):
                return self.same(ours.sides[-1], theirs)
        if isinstance(gold, Group | Matrix) and isinstance(answer, Group | Matrix):
            return self._same_groups(gold, answer)
        if isinstance(gold, Several) and isinstance(answer, Several) and self._same_items(gold, answer):
            return True
        return self._same_sets(gold, answer)

    def _same_relations(self, gold: Relation, answer: Relation) -> bool:
        if gold.operators == answer.operators == ("in",):
            return self.same(gold.sides[-1], answer.sides[-1])
        if _is_equation(gold) and _is_equation(answer):
            if gold.named and answer.named and self.same(gold.sides[0], answer.sides[0]):
                return self.same(gold.sides[-1], answer.sides[-1])
            return _same_equation(gold, answer)
        if gold.operators == answer.operators and all(map(self.same, gold.sides, answer.sides)):
            return True
        return self._same_sets(gold, answer)

    def _says(self, answer: Relation, value: Any) -> bool:
        """`anything = 5` says 5. `3^2 = 8` is false and says nothing, `2x = 5` says what x is, and it is not 5."""
        if not answer.named and _is_name(answer.texts[-1]):  # 5 = x
            return self.same(value, answer.sides[0])
        quantities = [side for side in answer.sides if isinstance(side, Quantity)]
        constants = [side for side in quantities if not side.expression.symbols]
        if not all(self._same_quantity(a, b) for a, b in pairwise(constants)):
            return False
        first = answer.sides[0]
        if isinstance(first, Quantity) and not answer.named and len(first.expression.symbols) == 1:
            (x,) = first.expression.symbols
            if first.expression.value is not None and (first.expression.value / x).is_number:
                return False
        return self.same(value, answer.sides[-1])

    def _same_items(self, gold: Several, answer: Several) -> bool:
        """In any order. Repeats count between lists, never in sets."""
        ours, theirs = list(gold.items), list(answer.items)
        if max(len(ours), len(theirs)) > MAX_ITEMS:
            raise Unreadable("too many items to compare")
        if "{}" in (gold.joined, answer.joined):
            ours, theirs = self._different(ours), self._different(theirs)
        for item in ours:
            match = next((other for other in theirs if self.same(item, other)), None)
            if match is None:
                return False
            theirs.remove(match)
        return not theirs

    def _different(self, items: list[Any]) -> list[Any]:
        kept: list[Any] = []
        for item in items:
            if not any(self.same(item, other) for other in kept):
                kept.append(item)
        return kept

    def _same_sets(self, gold: Any, answer: Any) -> bool:
        if not all(isinstance(v, Combined | Relation | Group | sympy.Set) or _collects(v) for v in (gold, answer)):
            return False
        if (
            isinstance(gold, Combined)
            and isinstance(answer, Combined)
            and gold.operation == answer.operation != "setminus"
        ):
            if self._same_items(Several("{}", gold.parts), Several("{}", answer.parts)):
                return True
        ours, theirs = as_set(gold), as_set(answer)
        if ours is None or theirs is None:
            return False
        return ours == theirs or sympy.SymmetricDifference(ours, theirs).simplify() == sympy.S.EmptySet

    def _same_groups(self, gold: Any, answer: Any) -> bool:
        """By items; a row or a column equals the same vector written (1, 2, 3)."""
        if isinstance(gold, Matrix) and isinstance(answer, Matrix):
            ours, theirs = sum(gold.rows, ()), sum(answer.rows, ())
            return len(gold.rows) == len(answer.rows) and len(ours) == len(theirs) and all(map(self.same, ours, theirs))
        ours, theirs = _vector(gold), _vector(answer)
        if ours is None or theirs is None or len(ours) != len(theirs):
            return False
        if isinstance(gold, Group) and isinstance(answer, Group):
            if gold.brackets != answer.brackets:
                return False
            if gold.brackets == ":":
                return all(
                    same_expression(_product(a, theirs[0]), _product(b, ours[0]))
                    for a, b in zip(ours, theirs, strict=True)
                )
        return all(map(self.same, ours, theirs))

    def _same_quantity(self, gold: Quantity, answer: Quantity) -> bool:
        # `5 m` typed without \text: the m is a unit if the other side shows that it is.
        if gold.unit and not answer.unit:
            answer = _letter_unit(answer)
        elif answer.unit and not gold.unit:
            gold = _letter_unit(gold)
        if (gold.unit and answer.mark == "deg") or (answer.unit and gold.mark == "deg"):
            return False
        ours, theirs = gold.expression, answer.expression
        if gold.unit and answer.unit:
            if gold.unit[0] != answer.unit[0]:
                return False
            ours, theirs = ours.times(sympy.Rational(gold.unit[1])), theirs.times(sympy.Rational(answer.unit[1]))
        if gold.mark == answer.mark:
            return same_expression(ours, theirs)
        return any(
            same_expression(ours.times(a), theirs.times(b))
            for a in self._meanings(gold.mark)
            for b in self._meanings(answer.mark)
        )

    def _meanings(self, mark: str) -> list[Any]:
        """What a percentage and an angle may stand for."""
        if mark == "%":
            return [sympy.Rational(1, 100), 1] if self._percent_as_unit else [sympy.Rational(1, 100)]
        return [1, sympy.pi / 180] if mark == "deg" else [1]


def as_set(value: Any) -> Any:
    """Intervals, inequalities, finite sets and their combinations as sympy sets; None for what is none."""
    if isinstance(value, sympy.Set):
        return value
    if isinstance(value, Group) and value.brackets != ":" and len(value.items) == 2:
        low, high = (_number(item) for item in value.items)
        if low is None or high is None or not (low.is_extended_real and high.is_extended_real):
            return None
        return sympy.Interval(low, high, value.brackets[0] == "(", value.brackets[1] == ")")
    if isinstance(value, Several) and value.joined == "{}":
        items = [_number(item) for item in value.items]
        return None if any(item is None for item in items) else sympy.FiniteSet(*items)
    if isinstance(value, Combined | Several):
        parts = [as_set(part) for part in (value.parts if isinstance(value, Combined) else value.items)]
        if any(part is None for part in parts):
            return None
        if isinstance(value, Combined):
            return {"cup": sympy.Union, "cap": sympy.Intersection, "setminus": sympy.Complement}[value.operation](
                *parts
            )
        both = sympy.Intersection(*parts)
        return (
            both if value.joined == "and" or (value.joined == "," and both != sympy.S.EmptySet) else sympy.Union(*parts)
        )
    return _solutions(value) if isinstance(value, Relation) else None


def _solutions(relation: Relation) -> Any:
    """Real solutions of a chain of relations in one variable."""
    if relation.operators == ("in",):
        return as_set(relation.sides[-1])
    sides = [side.expression.value for side in relation.sides if isinstance(side, Quantity)]
    symbols = {symbol for side in sides if side is not None for symbol in side.free_symbols}
    if len(sides) < len(relation.sides) or None in sides or "in" in relation.operators or len(symbols) != 1:
        return None
    x = sympy.Symbol("x", real=True)
    solutions: Any = sympy.S.Reals
    for operator, (left, right) in zip(
        relation.operators, pairwise(side.subs(symbols.copy().pop(), x) for side in sides), strict=True
    ):
        step = MAKE[operator](left, right)
        if step in (sympy.true, sympy.false):
            solutions = solutions if step == sympy.true else sympy.S.EmptySet
        elif operator in ("=", "!="):
            roots = sympy.solveset(left - right, x, sympy.S.Reals)
            solutions = solutions & roots if operator == "=" else solutions - roots
        else:
            solutions = solutions & sympy.solve_univariate_inequality(step, x, relational=False)
    return solutions


def _collects(value: Any) -> bool:
    return isinstance(value, Several) and (
        value.joined == "{}" or all(isinstance(i, Relation | Group) and not _is_equation(i) for i in value.items)
    )


def _number(value: Any) -> Any:
    return value.expression.value if isinstance(value, Quantity) and not value.unit else None


def _point(value: Any, other: Any) -> Any:
    """`x = 3, y = 4` where the other side is the point (3, 4): in the order of the names."""
    if isinstance(other, Group | Matrix) and isinstance(value, Several) and value.joined in (",", "and"):
        if all(_is_equation(item) and len(item.sides) == 2 and _is_name(item.texts[0]) for item in value.items):
            named = sorted(value.items, key=lambda item: item.texts[0].strip())
            if len({item.texts[0].strip() for item in named}) == len(named):
                return Group("()", tuple(item.sides[-1] for item in named))
    return value


def _is_name(text: str) -> bool:
    return bool(re.fullmatch(r"\s*(?:[a-zA-Z]|\\[a-z]+)(?:_\{?\w+\}?)?\s*", text))


def _is_equation(value: Any) -> TypeGuard[Relation]:
    return isinstance(value, Relation) and set(value.operators) == {"="}


def _same_equation(gold: Relation, answer: Relation) -> bool:
    """2x + y = 3 and y = 3 - 2x: the differences of their sides are proportional."""
    sides: list[Any] = [_number(side) for side in (*gold.sides, *answer.sides)]
    if len(sides) != 4 or any(side is None for side in sides):
        return False
    ours, theirs = sides[0] - sides[1], sides[2] - sides[3]
    if ours == 0 or theirs == 0 or ours.free_symbols != theirs.free_symbols:
        return False
    ratio = sympy.cancel(ours / theirs)
    return bool(ratio.is_number and ratio != 0)


def _vector(value: Any) -> tuple[Any, ...] | None:
    if isinstance(value, Matrix):
        return sum(value.rows, ()) if 1 in (len(value.rows), len(value.rows[0])) else None
    return value.items


def _product(a: Quantity, b: Quantity) -> Expression:
    if a.expression.value is None or b.expression.value is None:
        raise Unreadable("a ratio of numbers too large")
    return Expression(a.expression.value * b.expression.value)


def _letter_unit(value: Quantity) -> Quantity:
    """5 m, five times the symbol m, as a quantity of a unit. Asked where the other side has a unit."""
    found = re.fullmatch(r"(.*\d.*?)([a-zA-Z](?:\^\{?\d\}?)?)\s*", value.text)
    unit = read_unit(found[2]) if found else None
    if not found or not unit or value.expression.value is None or len(value.expression.symbols) != 1:
        return value
    (symbol,) = value.expression.symbols
    return Quantity(Expression(value.expression.value.subs(symbol, 1)), unit, value.mark, found[1])
