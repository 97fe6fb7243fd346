"""Words in answers, and the units among them: names to SI factors, so that 1 m equals 100 cm and never 1 cm."""

import re
from fractions import Fraction

from quads.rl.rewards.math_text import FUNCTIONS, GREEK

# (dimension, names, factor to SI). L length, M mass, T time, A angle, $ € £ money, E energy, F force, P power.
TABLE = (
    ("L", "mm millimeter millimeters millimetre millimetres", "1/1000"),
    ("L", "cm centimeter centimeters centimetre centimetres", "1/100"),
    ("L", "m meter meters metre metres", "1"),
    ("L", "km kilometer kilometers kilometre kilometres", "1000"),
    ("L", "in inch inches", "127/5000"),
    ("L", "ft foot feet", "381/1250"),
    ("L", "yd yard yards", "1143/1250"),
    ("L", "mi mile miles", "201168/125"),
    ("M", "mg milligram milligrams", "1/1000000"),
    ("M", "g gram grams", "1/1000"),
    ("M", "kg kilogram kilograms", "1"),
    ("M", "lb lbs pound pounds", "45359237/100000000"),
    ("M", "oz ounce ounces", "45359237/1600000000"),
    ("M", "ton tons tonne tonnes", "1000"),
    ("T", "ms millisecond milliseconds", "1/1000"),
    ("T", "s sec secs second seconds", "1"),
    ("T", "min mins minute minutes", "60"),
    ("T", "h hr hrs hour hours", "3600"),
    ("T", "day days", "86400"),
    ("T", "week weeks", "604800"),
    ("T", "month months", "2629800"),
    ("T", "year years yr yrs", "31557600"),
    ("L^3", "L liter liters litre litres", "1/1000"),
    ("L^3", "mL ml milliliter milliliters millilitre millilitres", "1/1000000"),
    ("L^3", "gallon gallons gal", "473176473/125000000000"),
    ("$", "dollar dollars usd", "1"),
    ("$", "cent cents", "1/100"),
    ("€", "euro euros eur", "1"),
    ("£", "sterling quid", "1"),
    ("A", "degree degrees deg", "1"),
    ("E", "J joule joules", "1"),
    ("E", "kJ kilojoule kilojoules", "1000"),
    ("F", "N newton newtons", "1"),
    ("P", "W watt watts", "1"),
    ("P", "kW kilowatt kilowatts", "1000"),
)
UNITS = {name: (dimension, Fraction(factor)) for dimension, names, factor in TABLE for name in names.split()}

# Single letters are units only where they are written as text: "5 m" may be five times m.
WORDS = frozenset(name for name in UNITS if len(name) > 1 and name not in ("in", "ms", "mi"))
TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mbox|operatorname|hbox|rm|emph|textnormal)\*?\s*"
    r"(?:\{([^{}]*)\}|([a-zA-Z])(?![a-zA-Z]))"
)
WORD = re.compile(r"⟦[^⟧]*⟧|\\(?:begin|end)\{\w+\}|\\[a-zA-Z]+|[a-zA-Z]{2,}(?:[ -]+[a-zA-Z]{2,})*")
NAMES = FUNCTIONS | GREEK | {"sqrt", "pi", "infty"}
FRACTION_OF_WORDS = re.compile(r"\\frac\s*\{\s*⟦([^⟧]*)⟧\s*\}\s*\{\s*⟦([^⟧]*)⟧\s*(?:\^\{?(\d)\}?)?\s*\}")


def read_unit(text: str) -> tuple[str, Fraction] | None:
    """`square meters`, `cm^2`, `m/s`, `km per hour` -> (dimension, factor to SI); None for words that are no unit."""
    text = text.strip().rstrip(".")
    words = re.sub(r"\bper\b", "/", text)
    words = re.sub(r"\b(square|sq\.?)\s+(\w+)", r"\2^2", words)
    words = re.sub(r"\b(cubic|cu\.?)\s+(\w+)", r"\2^3", words)
    words = re.sub(r"(\w+)\s+squared\b", r"\1^2", words)
    words = re.sub(r"(\w+)\s+cubed\b", r"\1^3", words)
    dimension: dict[str, int] = {}
    factor = Fraction(1)
    sign = 1
    for part in re.findall(r"/|[^\s/*·]+", words):
        if part == "/":
            sign = -1
            continue
        found = re.fullmatch(r"([A-Za-z]+)(?:\^?\{?(-?\d)\}?)?", part)
        if not found:
            return None
        name = found[1] if found[1] in UNITS else found[1].lower()
        if name not in UNITS:
            return None
        power = sign * int(found[2] or 1)
        base, _, exponent = UNITS[name][0].partition("^")
        dimension[base] = dimension.get(base, 0) + power * int(exponent or 1)
        factor *= UNITS[name][1] ** power
    if not dimension:
        return None
    return " ".join(f"{base}{exponent}" for base, exponent in sorted(dimension.items()) if exponent), factor


def mark_words(text: str) -> str:
    """Words, as \\text or bare, between ⟦ and ⟧; names of functions as commands; two-letter relations as commands."""
    text = TEXT.sub(_text, text)
    text = WORD.sub(_word, text)
    for written, command in (("<=", r"\le "), (">=", r"\ge "), ("!=", r"\ne ")):
        text = text.replace(written, command)
    text = FRACTION_OF_WORDS.sub(lambda m: f"⟦{m[1]}/{m[2]}{m[3] or ''}⟧", text)
    return re.sub(r"[€£¥₹]", lambda m: f"⟦{ {'€': 'euros', '£': 'sterling'}.get(m[0], m[0]) }⟧", text)


def _text(found: re.Match[str]) -> str:
    content = (found[1] if found[1] is not None else found[2]).strip()
    if content in NAMES:
        return f"\\{content} "
    if content in ("d", "e", "i") and not found[0].startswith(r"\text"):
        return content
    if re.match(r"[-+]?\d", content) or not content:  # \text{12 cm}
        return f" {content} "
    return _marked(content)


def _word(found: re.Match[str]) -> str:
    phrase = found[0]
    if phrase[0] in "⟦\\":
        return phrase
    joint = re.search(r"[ -]+(?:and|or)\b", phrase)
    if joint:
        rest = phrase[joint.end() :].lstrip(" -")
        joint_word = joint[0].strip(" -")
        return _word_of(phrase[: joint.start()]) + _marked(joint_word) + (WORD.sub(_word, rest) if rest else "")
    return _word_of(phrase)


def _word_of(phrase: str) -> str:
    first = re.split(r"[ -]", phrase)[0]
    if first in ("infinity", "inf", "oo"):
        return r"\infty "
    if phrase in NAMES:
        return f"\\{phrase} "
    if first.lower() in ("and", "or"):
        return _marked(first) + phrase[len(first) :]
    if first in WORDS or (len(first) >= 4 and len(set(first.lower())) > 1):
        return _marked(phrase)
    return phrase


def _marked(content: str) -> str:
    words = " ".join(content.split())
    special = {"and": r"\land ", "or": r"\lor ", "percent": "%", "per cent": "%", "pct": "%"}
    return special.get(words.lower().strip(" ,"), f"⟦{words}⟧")
