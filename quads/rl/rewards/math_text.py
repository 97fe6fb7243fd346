"""LaTeX as people and models write it: cleaned to one spelling, then written in the few characters of the grammar.

What cleaning removes carries no meaning: math delimiters, sizes, spaces, fonts. It keeps apart `\\{` of a set and `{`
of a group, text and symbols, `{,}` and `,` between digits.

The grammar sees no text of a response, only what `restricted` writes: operators, commands of a fixed list, and a letter
for each number and each variable. So nothing of it is ever parsed as Python, as sympy does with text; and what the
grammar does to numbers (it rounds decimals, and reads 3(2) as 3 + 2) has no hold.
"""

import re
from fractions import Fraction
from typing import Any

import sympy

MAX_WRITTEN = 300  # characters given to the grammar
MAX_DEPTH = 7  # brackets within brackets: the grammar's time doubles with each
MAX_BARS = 8
MAX_COMMANDS = 40
MAX_DIGITS = 4_000

CHARACTERS = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/",
    "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
    "°": r"^\circ ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}",
    "∈": r"\in ", "±": r"\pm ", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "φ": r"\phi ",
    "⟨": r"\langle ", "⟩": r"\rangle ", "’": "'", "′": "'", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "⁄": "/",
    "\u200b": "", "\u200c": "", "\u200d": "", "\u2060": "", "\ufeff": "",
}  # fmt: skip
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
FULL_WIDTH = str.maketrans("０１２３４５６７８９，．（）＝＋－", "0123456789,.()=+-")

SPACES = re.compile(
    r"(?<!\\)\\[,;:! ]|\\(?:quad|qquad|enspace|thinspace|medspace|thickspace|nobreakspace)(?![a-zA-Z])|~"
)
SIZES = re.compile(
    r"\\(?:left|right|bigl?|bigr|Bigl?|Bigr|biggl?|biggr|Biggl?|Biggr|middle|displaystyle|textstyle|limits|mathstrut)"
    r"(?![a-zA-Z])(?:\s*\.(?!\d))?"
)
FONTS = re.compile(r"\\(?:mathbf|mathit|boldsymbol|bm|mathsf|mathcal|ensuremath|displaylines|underline)(?![a-zA-Z])\s*")
HIDDEN = re.compile(r"\\(?:hspace|vspace|phantom|label|tag)\*?\s*\{[^{}]*\}")

GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho sigma tau upsilon "
    "phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell hbar angle".split()
)
FUNCTIONS = frozenset("sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh ln log exp max min".split())
COMMANDS = FUNCTIONS | frozenset("frac sqrt binom pi infty cdot sum prod int lim to lfloor rfloor lceil rceil".split())
SPELLED = {
    "dbinom": r"\binom ", "tbinom": r"\binom ", "times": r"\cdot ", "ast": r"\cdot ", "div": "/", "lvert": "|",
    "rvert": "|", "vert": "|", "rightarrow": r"\to ", "colon": "/",
}  # fmt: skip
# d is a differential, and the grammar knows e, i, E, I, N, O, Q, S, T
LETTERS = "abcfghjklmnopqrstuvwxyzABCDFGHJKLMPRUVWXYZ"
TOKEN = re.compile(
    r"\\([a-zA-Z]+)|([a-zA-Z])|(\d+\.?\d*|\.\d+)(?:e([+-]?\d+))?|([-+*/^_(){}\[\]|!,='])|(\s+)|(.)", re.S
)
NAME = re.compile(r"\\(?:vec|hat|bar|overline)\s*\{\s*\\?[a-zA-Z]+\s*\}|\\?[a-zA-Z]+")
SUBSCRIPT = re.compile(r"\s*_\s*(\{[\w,+\s-]*\}|\w)|\s*'")
DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\\deg(?![a-zA-Z])")
RECURRING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}")
MIXED = re.compile(r"(?<![\d.^_{])\s*(\d+)\s*(\\frac\{(\d+)\}\{(\d+)\}|\s(\d+)/(\d+))(?![\d/])")
INVERSE = re.compile(r"\\(sin|cos|tan|cot)\s*\^\s*\{\s*-\s*1\s*\}")


class Unreadable(Exception):
    """The text is no expression that this file knows."""


def clean(text: str) -> str:
    """One spelling of LaTeX for the parser. Idempotent."""
    for character, latex in CHARACTERS.items():
        if character in text:
            text = text.replace(character, latex)
    text = re.sub(r"[⁰¹²³⁴-⁹⁻]+", lambda found: "^{" + found[0].translate(SUPERSCRIPTS) + "}", text)
    text = re.sub(r"[₀-₉]+", lambda found: "_{" + found[0].translate(SUBSCRIPTS) + "}", text)
    text = text.translate(FULL_WIDTH)
    text = text.replace(r"\$", r"\text{dollars}").replace("$", " ")
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text)  # delimiters; not the \\[2pt] of a matrix row
    text = HIDDEN.sub("", text)
    text = re.sub(r"(?<!\\)\\!", "", text)  # a negative space: 11,\!000 is one number
    text = SPACES.sub(" ", SIZES.sub("", text))
    text = FONTS.sub("", text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\\frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*([0-9a-zA-Z])\s*(?=\{)", r"\\frac{\1}", text)
    text = re.sub(r"\\frac\s*(\{[^{}]*\})\s*([0-9a-zA-Z])", r"\\frac\1{\2}", text)
    text = re.sub(r"(?<![\\a-zA-Z])(frac|sqrt)(?=\s*\{)", r"\\\1", text)  # a lost backslash
    text = re.sub(r"\\(begin|end)\s+\{", r"\\\1{", text)
    text = text.replace(r"\%", "%").replace(r"\&", "&").replace(r"\#", "#").replace(r"\_", "_")
    text = text.replace("**", "^")
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])", r"\\deg ", text)
    return text.strip().rstrip(".,;: \n").strip()


def plain_words(text: str) -> str:
    """Letters and digits of an answer in lower case, commands and their braces left out: `\\text{(B)}` -> `b`."""
    text = re.sub(r"\\[a-zA-Z]+", " ", clean(text))
    return "".join(character for character in text.lower() if character.isalnum())


# ---- text for the grammar


def restricted(text: str) -> tuple[str, dict[Any, str]]:
    """(text for the grammar, of a fixed alphabet; number or variable -> its letter)."""
    text = RECURRING.sub(_recurring, text)
    text = MIXED.sub(_mixed, text)
    text = DEGREES.sub(r"{(\\frac{\1\\pi}{180})}", text)
    text = INVERSE.sub(r"\\arc\1 ", text)
    text = re.sub(r"\\sqrt\s*([0-9a-zA-Z]|\\pi(?![a-z]))", r"\\sqrt{\1}", text)
    index_i = re.search(r"\\(?:sum|prod)_\{?\s*i", text)
    letters: dict[Any, str] = {}
    written: list[str] = []
    at, depth, was_number = 0, 0, False
    while at < len(text):
        token = TOKEN.match(text, at)
        assert token
        command, letter, number, power, operator, space, other = token.groups()
        end = token.end()
        if other or operator == "'" or (number and was_number):
            raise Unreadable(f"{token[0]!r} where it cannot stand")
        last = written[-1] if written else ""
        script = last in ("^", "_")
        if operator == "_" and not last.startswith("\\") or operator == "^" and written[-2:-1] == ["^"]:
            raise Unreadable("a script of a script")
        if number:
            written.append(_letter(_number(number, power), letters))
        elif operator:
            depth += (operator in "([{") - (operator in ")]}")
            written.append(r"\cdot " if operator == "*" else operator)
        elif command in FUNCTIONS and last[1:-1] in FUNCTIONS:
            raise Unreadable("a function of a function without brackets")
        elif command in COMMANDS:
            plain_log = command == "log" and not text[end:].lstrip().startswith("_")
            written.append("\\ln " if plain_log else f"\\{command} ")
        elif command == "lg":
            written.append(f"\\log_{{{_letter(sympy.Integer(10), letters)}}} ")
        elif command in SPELLED:
            written.append(SPELLED[command])
        elif letter == "e":
            written.append("e")
        elif letter == "d" and "\\int" in text and re.match(r"\s*[a-zA-Z]", text[end:]):
            written.append("d")
        elif letter or command in GREEK or command in ("vec", "hat", "bar", "overline"):
            name = NAME.match(text, at) if command else token
            assert name
            end = name.end()
            while script := SUBSCRIPT.match(text, end):
                end = script.end()
            variable = re.sub(r"[\s{}]", "", text[at:end])
            written.append(_letter(sympy.I if variable == "i" and not index_i else sympy.Symbol(variable), letters))
        elif not space:
            raise Unreadable(f"\\{command}")
        was_number = (bool(number) and not script) or (bool(space) and was_number)
        if depth > MAX_DEPTH:
            raise Unreadable("too deep")
        at = end
    result = "".join(written).strip()
    if len(result) > MAX_WRITTEN or result.count("|") > MAX_BARS or result.count("\\") > MAX_COMMANDS:
        raise Unreadable("too long")
    return result, letters


def _letter(meant: Any, letters: dict[Any, str]) -> str:
    if meant not in letters and len(letters) == len(LETTERS):
        raise Unreadable("too many numbers and variables")
    return letters.setdefault(meant, LETTERS[len(letters) % len(LETTERS)])


def _number(digits: str, power: str | None) -> Any:
    if len(digits) + abs(int(power or 0)) > MAX_DIGITS:
        raise Unreadable("a number too long to compare")
    return sympy.Rational(Fraction(digits.rstrip(".")) * Fraction(10) ** int(power or 0))


def _recurring(found: re.Match[str]) -> str:
    head, period = found[1] + found[2], found[3]
    nines = (10 ** len(period) - 1) * 10 ** len(found[2])
    return f"\\frac{{{int(head or 0) * (10 ** len(period) - 1) + int(period)}}}{{{nines}}}"


def _mixed(found: re.Match[str]) -> str:
    above, below = found[3] or found[5], found[4] or found[6]
    return f"({found[1]}+\\frac{{{above}}}{{{below}}})" if int(above) < int(below) else found[0]
