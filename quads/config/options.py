"""Options of command lines: numbers within bounds, which the types of argparse do not check, and single options beside
those of a config.

parser.add_argument("--jobs", type=whole(1))
parser.add_argument("--minutes", type=real(above=0.0))
out = take_option(argv, "--out")
"""

import argparse
import math
from collections.abc import Callable

from quads.errors import UserError


def whole(low: int) -> Callable[[str], int]:
    """A `type` for argparse: a whole number of at least `low`. ArgumentTypeError says so, and argparse exits with 2."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least {low}")
        return value

    return parse


def real(*, low: float = -math.inf, above: float = -math.inf, high: float = math.inf) -> Callable[[str], float]:
    """A parser of finite numbers for argparse. `low` and `high` are inclusive, `above` is not."""
    bounds = {"of at least": low, "above": above, "of at most": high}
    wanted = " and ".join(f"{words} {bound:g}" for words, bound in bounds.items() if math.isfinite(bound))

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high and value > above):
            raise argparse.ArgumentTypeError(f"{text} must be a number {wanted}".rstrip())
        return value

    return parse


def take_option(argv: list[str], name: str) -> str:
    """Remove `name VALUE` or `name=VALUE` from a command line and return VALUE, "" when absent."""
    joined = next((word for word in argv if word.startswith(f"{name}=")), None)
    if joined is not None:
        argv.remove(joined)
        return joined.partition("=")[2]
    if name not in argv:
        return ""
    at = argv.index(name)
    if at + 1 >= len(argv):
        raise UserError(f"{name} needs a value")
    value = argv[at + 1]
    del argv[at : at + 2]
    return value
