"""Cleaned LaTeX -> tokens. A token is (kind, value): number, name, command, text, unit words and operators."""

import re
from fractions import Fraction
from typing import NamedTuple

from quads.rl.rewards.math_units import WORDS


class Token(NamedTuple):
    """Example: `Token("number", Fraction(1, 2))`, `Token("symbol", "x_1")`, `Token("op", "+")`."""

    kind: str  # number, symbol, command, text, env, op
    value: str | Fraction


class Unreadable(Exception):
    """The text is no expression this parser knows."""


GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho sigma tau upsilon "
    "phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell hbar".split()
)
FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth exp log ln lg det gcd lcm max min".split()
)
WORD_COMMANDS = frozenset({"sqrt", "pi", "infty", "infinity", "inf", "oo"}) | FUNCTIONS | GREEK
TEXT_COMMANDS = frozenset("text textbf textit textrm textsf mathrm mbox operatorname hbox rm emph textnormal".split())

MAX_DIGITS = 4000  # of one number; Python refuses more by default, and no answer needs them

NUMBER = re.compile(
    r"""
      (?P<recurring>\d*\.(?P<fixed>\d*)\\(?:overline|bar)\s*\{(?P<period>\d+)\})
    | (?P<grouped>\d{1,3}(?:(?:\{,\})\d{3})+(?:\.\d+)?)
    | (?P<comma>\d{1,3}(?:,\d{3})+(?![\d])(?:\.\d+)?)
    | (?P<spaced>\d{1,3}(?:\ \d{3})+(?![\d])(?:\.\d+)?)
    | (?P<plain>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    """,
    re.VERBOSE,
)
COMMAND = re.compile(r"\\([a-zA-Z]+)\*?\s*")
WORD = re.compile(r"[a-zA-Z]+")


def tokenize(text: str) -> list[Token]:
    """Tokens of cleaned text. Commas between digits group thousands outside brackets and separate items inside."""
    tokens: list[Token] = []
    depth = 0  # of ( [ \{ : inside them a comma separates
    at = 0
    while at < len(text):
        character = text[at]
        if character.isspace():
            at += 1
        elif character.isdigit() or (character == "." and text[at + 1 : at + 2].isdigit()):
            at = _number(text, at, depth, tokens)
        elif character == "\\":
            at, change = _command(text, at, tokens)
            depth += change
        elif character.isalpha() and character.isascii():
            at = _word(text, at, tokens)
        elif character in "+-*/^_=<>!'%,;:|()[]{}&":
            two = text[at : at + 2]
            if two in ("<=", ">=", "!="):
                tokens.append(Token("op", two))
                at += 2
                continue
            depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
            tokens.append(Token("op", character))
            at += 1
        elif character in "€£¥₹":
            tokens.append(Token("text", {"€": "euros", "£": "sterling"}.get(character, character)))
            at += 1
        else:
            raise Unreadable(f"character {character!r}")
    return tokens


def _number(text: str, at: int, depth: int, tokens: list[Token]) -> int:
    found = NUMBER.match(text, at)
    assert found
    if found["comma"] and depth > 0 or found["spaced"] and _follows_number(tokens):
        found = re.compile(r"(?P<plain>\d+\.?\d*)").match(text, at)
        assert found
        value = _fraction(found["plain"])
    elif found["recurring"]:
        period, fixed = found["period"], found["fixed"]
        head = found["recurring"].partition("\\")[0]
        value = _fraction(head if head != "." else "0") + Fraction(
            int(period), (10 ** len(period) - 1) * 10 ** len(fixed)
        )
    else:
        value = _fraction(re.sub(r"\{,\}|[, ]", "", found[0]))
    tokens.append(Token("number", value))
    return found.end()


def _follows_number(tokens: list[Token]) -> bool:
    return bool(tokens) and tokens[-1].kind == "number"


def _fraction(digits: str) -> Fraction:
    mantissa, _, exponent = digits.lower().partition("e")
    if len(digits) > MAX_DIGITS or (exponent and abs(int(exponent)) > MAX_DIGITS):
        raise Unreadable("a number too long to compare")
    return Fraction(mantissa.rstrip(".") or "0") * Fraction(10) ** int(exponent or 0)


def _command(text: str, at: int, tokens: list[Token]) -> tuple[int, int]:
    """-> (position after it, change of bracket depth)."""
    following = text[at + 1 : at + 2]
    if following == "{":
        tokens.append(Token("op", "\\{"))
        return at + 2, 1
    if following == "}":
        tokens.append(Token("op", "\\}"))
        return at + 2, -1
    if following == "|":
        tokens.append(Token("op", "|"))
        return at + 2, 0
    if following == "\\":
        end = re.compile(r"\\\\\s*(\[[^\]]*\])?").match(text, at)
        assert end
        tokens.append(Token("op", "\\\\"))
        return end.end(), 0
    found = COMMAND.match(text, at)
    if not found:
        raise Unreadable(f"{text[at : at + 2]!r}")
    name = found[1]
    at = found.end()
    if name in TEXT_COMMANDS:
        content, at = _braced(text, at)
        if name in ("mathrm", "operatorname", "rm") and content.strip() in WORD_COMMANDS | {"d", "e", "i"}:
            stripped = content.strip()
            tokens.append(Token("command", stripped) if stripped in WORD_COMMANDS else Token("symbol", stripped))
        elif re.match(r"\s*[-+]?\d", content):  # \\text{12 cm}
            tokens.extend(tokenize(content))
        elif content.strip():
            tokens.append(_words(content))
        return at, 0
    if name in ("begin", "end"):
        content, at = _braced(text, at)
        if name == "begin" and content == "array":  # its column layout says nothing
            _, at = _braced(text, at)
        tokens.append(Token("env", f"{name} {content}"))
        return at, 1 if name == "begin" else -1
    if name == "mathbb":
        content, at = _braced(text, at)
        tokens.append(Token("command", f"mathbb {content}"))
        return at, 0
    tokens.append(Token("command", name))
    return at, {"langle": 1, "lbrace": 1, "rangle": -1, "rbrace": -1}.get(name, 0)


def _words(text: str) -> Token:
    words = " ".join(text.split())
    return Token("op", "%") if words.lower() in ("percent", "per cent", "pct") else Token("text", words)


def _braced(text: str, at: int) -> tuple[str, int]:
    """The content of `{...}` at `at`, or the next word where the braces are missing."""
    if at < len(text) and text[at] == "{":
        depth = 0
        for i in range(at, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[at + 1 : i], i + 1
        return text[at + 1 :], len(text)
    found = re.compile(r"\s*([a-zA-Z]+|.)").match(text, at)
    return (found[1], found.end()) if found else ("", at)


def _word(text: str, at: int, tokens: list[Token]) -> int:
    """A run of letters: a function or constant by name, words of English, or one-letter symbols."""
    found = WORD.match(text, at)
    assert found
    word = found[0]
    if word in WORD_COMMANDS:
        tokens.append(Token("command", {"infinity": "infty", "inf": "infty", "oo": "infty"}.get(word, word)))
    elif word.lower() in ("and", "or") or word in WORDS or (len(word) >= 4 and len(set(word.lower())) > 1):
        end = (
            re.compile(r"[a-zA-Z]+(?:[ -]+[a-zA-Z]{2,})*").match(text, at)
            if word.lower() not in ("and", "or")
            else found
        )
        assert end
        phrase = end[0]
        cut = re.search(r"\s+(?:and|or)\b", phrase)
        phrase = phrase[: cut.start()] if cut else phrase
        tokens.append(_words(phrase))
        return at + len(phrase)
    else:
        tokens.extend(Token("symbol", letter) for letter in word)
    return found.end()
