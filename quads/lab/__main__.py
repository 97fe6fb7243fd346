"""`python -m quads.lab COMMAND [options]`: the analyses of the paper on any checkpoint, one file a command."""

import importlib
import sys

from quads.errors import UserError, main_guard

COMMANDS = (
    "recipes",
    "scores",
    "gap",
    "ratio",
    "layers",
    "channels",
    "decompose",
    "drift",
    "curves",
    "report",
    "upcycle",
    "warmup",
)


@main_guard
def main(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{__doc__}\n")
        for name in COMMANDS:
            print(f"  {name:<10} {importlib.import_module(f'quads.lab.{name}').HELP}")
        print("\nEvery command explains its options: python -m quads.lab COMMAND --help")
        return
    if argv[0] not in COMMANDS:
        raise UserError(f"unknown command {argv[0]!r}; known: {', '.join(COMMANDS)}")
    importlib.import_module(f"quads.lab.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
