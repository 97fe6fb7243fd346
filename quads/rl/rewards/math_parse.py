"""The value of a whole answer: expressions (math_expression.py) and the lists, sets and relations around them."""

from typing import Any

from quads.rl.rewards.math_expression import ExpressionParser
from quads.rl.rewards.math_tokens import GREEK, Token, Unreadable, tokenize
from quads.rl.rewards.math_values import Combined, Relation, Seq, Words, settle

RELATIONS = {
    "=": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=", "le": "<=", "leq": "<=", "leqslant": "<=",
    "ge": ">=", "geq": ">=", "geqslant": ">=", "ne": "!=", "neq": "!=", "lt": "<", "gt": ">", "in": "in",
    "approx": "=", "equiv": "=",
}  # fmt: skip
SET_OPERATIONS = {"cup": "cup", "cap": "cap", "setminus": "setminus", "backslash": "setminus"}


def parse_answer(text: str) -> Any:
    """Value of a cleaned answer. Unreadable if it is none."""
    tokens = _balance(tokenize(text))
    if not tokens:
        raise Unreadable("nothing there")
    if all(token.kind == "text" for token in tokens):
        return Words(" ".join(str(token.value) for token in tokens))
    parser = _AnswerParser(tokens, sign=1)
    value = parser.answer()
    if parser.saw_plus_minus:
        return Seq((*_items(value), *_items(_AnswerParser(tokens, sign=-1).answer())))
    return value


def _items(value: Any) -> tuple[Any, ...]:
    return value.items if isinstance(value, Seq) else (value,)


def _balance(tokens: list[Token]) -> list[Token]:
    """Supply braces that were never closed, drop ones that were never opened."""
    balanced: list[Token] = []
    depth = 0
    for token in tokens:
        if token == ("op", "}") and depth == 0:
            continue
        depth += _depth_change(token)
        balanced.append(token)
    return balanced + [Token("op", "}")] * depth


class _AnswerParser(ExpressionParser):
    def __init__(self, tokens: list[Token], sign: int):
        super().__init__(tokens, sign)
        self.item = self.relation

    def answer(self) -> Any:
        items = [self.relation()]
        while self.at < len(self.tokens):
            if not self._separator():
                raise Unreadable(f"unexpected {self._peek().value!r}")
            if self.at == len(self.tokens):  # a trailing comma
                break
            items.append(self.relation())
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def relation(self) -> Any:
        start = self.at
        sides, operators, named = [self.combined()], [], False
        while (operator := RELATIONS.get(str(self._peek().value))) and self._peek().kind in ("op", "command"):
            if not operators:
                named = self._is_name(start, self.at)
            self.at += 1
            operators.append(operator)
            sides.append(self.combined())
        return Relation(tuple(operators), tuple(sides), named) if operators else sides[0]

    def combined(self) -> Any:
        value = settle(self.sum())
        while self._peek().kind == "command" and self._peek().value in SET_OPERATIONS:
            operation = SET_OPERATIONS[str(self._next().value)]
            other = settle(self.sum())
            if isinstance(value, Combined) and value.operation == operation and operation != "setminus":
                value = Combined(operation, (*value.parts, other))
            else:
                value = Combined(operation, (value, other))
        return value

    def _separator(self) -> bool:
        """Skip `,`, `;`, `and`, `or` and runs of them."""
        start = self.at
        while self._peek() in (("op", ","), ("op", ";"), ("command", "land"), ("command", "lor")) or (
            self._peek().kind == "text" and str(self._peek().value).lower().strip(" ,") in ("and", "or")
        ):
            self.at += 1
        return self.at > start

    def _is_name(self, start: int, end: int) -> bool:
        """x, x_1, f(x), P(A), \\angle ABC, words."""
        tokens = self.tokens[start:end]
        if all(token.kind == "text" for token in tokens) or (
            tokens and tokens[0].kind == "command" and tokens[0].value in ("angle", "vec", "hat", "bar", "overline")
        ):
            return True
        if not tokens or not _is_letter(tokens[0]):
            return False
        if len(tokens) > 2 and tokens[1] == ("op", "("):
            return tokens[-1] == ("op", ")") and all(t.kind != "number" or len(tokens) == 4 for t in tokens[2:-1])
        depth = 0  # a subscript may follow
        for index, token in enumerate(tokens[1:], 1):
            if depth == 0 and token != ("op", "_") and tokens[index - 1] != ("op", "_") and token != ("op", "'"):
                return False
            depth += _depth_change(token)
        return True


def _depth_change(token: Token) -> int:
    return (token == ("op", "{")) - (token == ("op", "}"))


def _is_letter(token: Token) -> bool:
    return token.kind == "symbol" or (token.kind == "command" and token.value in GREEK)
