"""Are two parsed answers equal? Exact: 0.333 is not 1/3, 5 cm is not 5 m, (0, 1) is not [0, 1].

Equal in other forms: fractions and decimals, simplified and not, `x = 5` and `5`, lists in any order, an inequality and
its interval, units that convert. A unit on one side only is ignored. 25% is 1/4; with `percent_as_unit` also 25.

This file says what is compared with what; sets and intervals are compared in math_sets.py, expressions in
math_equivalence.py.
"""

from typing import Any

import sympy
from sympy.core.expr import Expr

from quads.rl.rewards.math_equivalence import same_expression
from quads.rl.rewards.math_sets import as_set
from quads.rl.rewards.math_tokens import Unreadable
from quads.rl.rewards.math_units import read_unit
from quads.rl.rewards.math_values import DEGREE, PERCENT, TEXT, Combined, Group, Relation, Seq, SetOf, Words

MAX_ITEMS = 100


def equal(gold: Any, answer: Any, percent_as_unit: bool = False) -> bool:
    """Does `answer` equal `gold`? Both as `parse_answer` gives them."""
    return _Comparison(percent_as_unit).same(gold, answer)


class _Comparison:
    def __init__(self, percent_as_unit: bool):
        self.percent_as_unit = percent_as_unit

    def same(self, gold: Any, answer: Any) -> bool:
        if isinstance(gold, Words) or isinstance(answer, Words):
            return isinstance(gold, Words) and isinstance(answer, Words) and gold.text.lower() == answer.text.lower()
        if isinstance(gold, Relation) or isinstance(answer, Relation):
            return self._same_relation(gold, answer)
        if isinstance(gold, Seq | SetOf) or isinstance(answer, Seq | SetOf):
            return self._same_collection(gold, answer)
        if isinstance(gold, Combined | sympy.Set) or isinstance(answer, Combined | sympy.Set):
            return self._same_sets(gold, answer)
        if isinstance(gold, Group) or isinstance(answer, Group):
            return self._same_group(gold, answer)
        if isinstance(gold, sympy.MatrixBase) or isinstance(answer, sympy.MatrixBase):
            return self._same_matrix(gold, answer)
        return self._same_quantity(gold, answer)

    # ---- relations

    def _same_relation(self, gold: Any, answer: Any) -> bool:
        if isinstance(gold, Relation) and isinstance(answer, Relation):
            if gold.operators == answer.operators == ("in",):
                return self.same(gold.sides[-1], answer.sides[-1])
            if _is_equation(gold) and _is_equation(answer):
                if gold.named and answer.named and self.same(gold.sides[0], answer.sides[0]):
                    return self.same(gold.sides[-1], answer.sides[-1])
                return _same_equation(gold, answer)
            if gold.operators == answer.operators and len(gold.sides) == len(answer.sides):
                if all(map(self.same, gold.sides, answer.sides)):
                    return True
            return self._same_sets(gold, answer)
        relation, other = (gold, answer) if isinstance(gold, Relation) else (answer, gold)
        if relation.operators == ("in",):  # its pair in brackets is an interval, no vector
            return not isinstance(other, sympy.MatrixBase) and self.same(relation.sides[-1], other)
        if _is_equation(relation):
            # `x = 5` says 5, and `2 + 3 = 5` works it out; `2x = 10` does not say 5.
            if relation.named or not any(_symbols(side) for side in relation.sides):
                value = relation.sides[-1]
                return self.same(value, other) if relation is gold else self.same(other, value)
            return False
        return self._same_sets(gold, answer)

    # ---- lists and sets

    def _same_collection(self, gold: Any, answer: Any) -> bool:
        """In any order. Repeats count between lists, never in sets."""
        if isinstance(gold, Combined | sympy.Set) or isinstance(answer, Combined | sympy.Set):
            if isinstance(gold, SetOf) or isinstance(answer, SetOf):
                return self._same_sets(gold, answer)
        if not all(isinstance(value, Seq | SetOf) for value in (gold, answer)):
            # A set of one is no number; a list of one does not exist.
            single = gold if not isinstance(gold, Seq | SetOf) else answer
            several = answer if single is gold else gold
            return isinstance(several, SetOf) and isinstance(single, Relation) and self.same(several.items[0], single)
        ours, theirs = _flat(gold), _flat(answer)
        if max(len(ours), len(theirs)) > MAX_ITEMS:
            raise Unreadable("too many items to compare")
        if isinstance(gold, SetOf) or isinstance(answer, SetOf):
            ours, theirs = self._without_repeats(ours), self._without_repeats(theirs)
        if len(ours) != len(theirs):
            return False
        left = list(theirs)
        for item in ours:
            match = next((other for other in left if self.same(item, other)), None)
            if match is None:
                return False
            left.remove(match)
        return True

    def _without_repeats(self, items: list[Any]) -> list[Any]:
        kept: list[Any] = []
        for item in items:
            if not any(self.same(item, other) for other in kept):
                kept.append(item)
        return kept

    def _same_sets(self, gold: Any, answer: Any) -> bool:
        if isinstance(gold, Combined) and isinstance(answer, Combined) and gold.operation == answer.operation:
            if gold.operation != "setminus" and self._same_collection(SetOf(gold.parts), SetOf(answer.parts)):
                return True
        ours, theirs = as_set(gold), as_set(answer)
        if ours is None or theirs is None:
            return False
        return ours == theirs or sympy.SymmetricDifference(ours, theirs).simplify() == sympy.S.EmptySet

    # ---- brackets, matrices

    def _same_group(self, gold: Any, answer: Any) -> bool:
        if isinstance(gold, sympy.MatrixBase) or isinstance(answer, sympy.MatrixBase):
            return self._same_matrix(gold, answer)
        if not (isinstance(gold, Group) and isinstance(answer, Group)):
            return False
        if gold.brackets == answer.brackets == ":" and len(gold.items) == len(answer.items):
            return all(
                self.same(a * answer.items[0], b * gold.items[0]) for a, b in zip(gold.items, answer.items, strict=True)
            )
        return (
            gold.brackets == answer.brackets
            and len(gold.items) == len(answer.items)
            and all(map(self.same, gold.items, answer.items))
        )

    def _same_matrix(self, gold: Any, answer: Any) -> bool:
        """By cells; a row or column equals the same vector written (1, 2, 3)."""
        ours, theirs = _cells(gold), _cells(answer)
        if ours is None or theirs is None:
            return False
        shapes = [value.shape for value in (gold, answer) if isinstance(value, sympy.MatrixBase)]
        if len(shapes) == 2 and shapes[0] != shapes[1] or len(shapes) == 1 and 1 not in shapes[0]:
            return False
        return len(ours) == len(theirs) and all(map(self.same, ours, theirs))

    # ---- expressions and units

    def _same_quantity(self, gold: Any, answer: Any) -> bool:
        if not isinstance(gold, Expr) or not isinstance(answer, Expr):
            return False
        ours, our_unit = _split_unit(gold)
        theirs, their_unit = _split_unit(answer)
        # `5 m` typed without \text: the m is a unit if the other side shows that it is.
        if our_unit and not their_unit:
            theirs, their_unit = _split_letter_unit(answer)
        elif their_unit and not our_unit:
            ours, our_unit = _split_letter_unit(gold)
        if (our_unit and DEGREE in theirs.free_symbols) or (their_unit and DEGREE in ours.free_symbols):
            return False
        if our_unit and their_unit:
            if our_unit[0] != their_unit[0]:
                return False
            ours, theirs = ours * our_unit[1], theirs * their_unit[1]
        return any(same_expression(a, b) for a in self._readings(ours) for b in self._readings(theirs))

    def _readings(self, value: Expr) -> list[Any]:
        """What a percentage and an angle may stand for."""
        if PERCENT in value.free_symbols:
            parts = [value.subs(PERCENT, sympy.Rational(1, 100))]
            return [*parts, value.subs(PERCENT, 1)] if self.percent_as_unit else parts
        if DEGREE in value.free_symbols:
            return [value.subs(DEGREE, 1), value.subs(DEGREE, sympy.pi / 180)]
        return [value]


def _is_equation(value: Any) -> bool:
    return isinstance(value, Relation) and set(value.operators) == {"="}


def _same_equation(gold: Relation, answer: Relation) -> bool:
    """2x + y = 3 and y = 3 - 2x: the differences of their sides are proportional."""
    if len(gold.sides) != 2 or len(answer.sides) != 2:
        return False
    if not all(isinstance(side, Expr) for side in (*gold.sides, *answer.sides)):
        return False
    ours, theirs = gold.sides[0] - gold.sides[1], answer.sides[0] - answer.sides[1]
    if ours == 0 or theirs == 0 or ours.free_symbols != theirs.free_symbols:
        return False
    ratio = sympy.cancel(ours / theirs)
    return ratio.is_number and ratio != 0


def _symbols(value: Any) -> set[Any]:
    return {s for s in value.free_symbols if not str(s).startswith(TEXT)} if isinstance(value, Expr) else set()


def _flat(value: Any) -> list[Any]:
    """Items of a list or set, lists inside a list opened up."""
    return [leaf for item in value.items for leaf in (_flat(item) if isinstance(item, Seq) else [item])]


def _cells(value: Any) -> list[Any] | None:
    if isinstance(value, sympy.MatrixBase):
        return value.flat()
    return list(value.items) if isinstance(value, Group) and value.brackets == "()" else None


def _split_unit(value: Expr) -> tuple[Expr, tuple[str, Any] | None]:
    """5 cm^2 -> (5, unit of area). Words that are no unit say nothing and are dropped."""
    words = [symbol for symbol in value.free_symbols if str(symbol).startswith(TEXT)]
    if not words:
        return value, None
    amount, units = value.as_independent(*words, as_Add=False)
    if units.has(sympy.Add):
        return value, None
    total: tuple[str, Any] | None = None
    texts = []
    for factor in sympy.Mul.make_args(units):
        base, exponent = factor.as_base_exp()
        text = str(base).removeprefix(TEXT)
        texts.append(text if exponent == 1 else f"({text})^{exponent}" if " " in text else f"{text}^{exponent}")
    found = read_unit(" ".join(texts))
    if found:
        total = found[0], sympy.Rational(found[1].numerator, found[1].denominator)
    return amount, total


def _split_letter_unit(value: Expr) -> tuple[Expr, tuple[str, Any] | None]:
    """5 m, five times the symbol m: (5, unit of length). Asked where the other side has a unit."""
    symbols = list(value.free_symbols)
    if len(symbols) != 1:
        return value, None
    amount, letters = value.as_independent(symbols[0], as_Add=False)
    found = read_unit(str(letters).replace("**", "^"))
    if not found or not amount.is_number:
        return value, None
    return amount, (found[0], sympy.Rational(found[1].numerator, found[1].denominator))
