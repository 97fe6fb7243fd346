"""Units that answers carry: names to SI factors, so that 1 m equals 100 cm and never 1 cm."""

import re
from fractions import Fraction

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
