"""The final answer inside a response, and LaTeX as people and models write it cleaned to one spelling.

What cleaning removes carries no meaning: math delimiters, sizes, spaces, fonts. It keeps apart `\\{` of a set and `{`
of a group, text and symbols, `{,}` and `,` between digits.
"""

import re

FINAL_PATTERNS = (
    re.compile(r"####[ \t]*(.+)"),
    re.compile(r"final answer[ \t]*(?:is|=|:)+[ \t]*(.+)", re.IGNORECASE),
    re.compile(r"(?:answer|result|solution|value)\**[ \t]*(?:is|=|:)+\**[ \t]*(.+)", re.IGNORECASE),
)
BOXES = re.compile(r"\\(?:boxed|fbox)\s*")
# A sentence ends where a full stop is followed by space or the end; a decimal point is not.
SENTENCE_END = re.compile(r"\.(?=\s|$)")

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


def extract_answer(response: str) -> str | None:
    """The last boxed answer, else what follows the last `answer is`, else a response that is one bare expression.

    A closed `</think>` block is thinking, not answer. None: there is no answer.
    """
    response = response.rpartition("</think>")[2]
    boxes = list(BOXES.finditer(response))
    for box in reversed(boxes):
        inside = _boxed(response, box.end())
        if inside is not None:
            nested = list(BOXES.finditer(inside))
            return extract_answer(inside) if nested and inside.lstrip().startswith("\\") else inside
    for pattern in FINAL_PATTERNS:
        found = pattern.findall(response)
        if found:
            return _first_statement(found[-1])
    lines = response.strip().splitlines()
    if (
        len(lines) == 1
        and not boxes
        and len(re.findall(r"(?<!\\)\b[a-zA-Z]{2,}\b", re.sub(r"\\text\{[^}]*\}", "", lines[0]))) <= 1
    ):
        return _first_statement(lines[0])
    return None


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


def _boxed(response: str, start: int) -> str | None:
    """What is boxed at `start`, right after the command. A brace that is never closed ends with its line."""
    if start >= len(response):
        return None
    if response[start] != "{":  # \boxed 5
        found = re.match(r"[^\s$.,]+", response[start:])
        return found[0] if found else None
    depth = 0
    for i in range(start, len(response)):
        if response[i] in "{}" and response[i - 1] != "\\":
            depth += 1 if response[i] == "{" else -1
            if depth == 0:
                inside = response[start + 1 : i].strip()
                return inside or None
    inside = re.split(r"\n|\$|\\\]|\\\)", response[start + 1 :])[0].strip()
    return inside or None


def _first_statement(text: str) -> str | None:
    """The part of a line that is the answer: up to the end of the sentence, without Markdown and delimiters."""
    text = text.replace("**", "").strip()
    delimited = re.match(r"[^$\\]{0,40}?(\$\$?|\\\(|\\\[)(.+?)(\$\$?|\\\)|\\\])", text)
    if delimited and not re.match(r"\$\s*\d[\d,.]*\s*(?:[a-zA-Z.]|$)", text):  # `$5` is money, `$5$` is mathematics
        return delimited[2].strip() or None
    text = SENTENCE_END.split(text)[0].strip()
    return text or None


def plain_words(text: str) -> str:
    """Letters and digits of an answer in lower case, commands and their braces left out: `\\text{(B)}` -> `b`."""
    text = re.sub(r"\\[a-zA-Z]+", " ", clean(text))
    return "".join(character for character in text.lower() if character.isalnum())
