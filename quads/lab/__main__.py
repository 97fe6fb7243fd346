"""`python -m quads.lab COMMAND [options]`: the analyses of the paper on any checkpoint, one file a command."""

import importlib
import sys

from quads.errors import UserError, main_guard

COMMANDS = {  # with the modules that hold them, imported when asked for
    "recipes": "quads.lab.runs.recipes",
    "scores": "quads.lab.runs.scores",
    "gap": "quads.lab.gap",
    "ratio": "quads.lab.ratio",
    "layers": "quads.lab.layers",
    "channels": "quads.lab.channels",
    "decompose": "quads.lab.decompose",
    "drift": "quads.lab.drift",
    "curves": "quads.lab.runs.curves",
    "formats": "quads.lab.formats.command",
    "report": "quads.lab.report.build",
    "upcycle": "quads.lab.smollm2.upcycle",
    "warmup": "quads.lab.smollm2.warmup",
}


@main_guard
def main(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{__doc__}\n")
        for name, module in COMMANDS.items():
            print(f"  {name:<10} {importlib.import_module(module).HELP}")
        print("\nEvery command explains its options: python -m quads.lab COMMAND --help")
        return
    if argv[0] not in COMMANDS:
        raise UserError(f"unknown command {argv[0]!r}; known: {', '.join(COMMANDS)}")
    importlib.import_module(COMMANDS[argv[0]]).main(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
