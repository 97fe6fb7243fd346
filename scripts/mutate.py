"""Mutation check of the core: one line is broken at a time, and the tests that must notice are run.

    python scripts/mutate.py [--only TEXT] [--jobs 1] [--out mutations.json]

scripts/mutations.toml lists the mutations: groups of (old text, new text) in one file, with the tests that must fail
under each. A text that does not stand exactly once in its file is an error: the list has gone stale. Every job works on
a copy of the tracked files of its own, so the checkout is never touched. Exit code 1 if a mutation survives that the
list does not call equivalent, with the reason, in `survivors`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

REPOSITORY = Path(__file__).resolve().parents[1]
LIMIT_S = 600  # a mutation may make a test hang; that is noticed, too


@dataclass(frozen=True)
class Mutation:
    """One change of one file."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    argued: str  # why no test can notice it; "" for all others


@dataclass(frozen=True)
class Result:
    """What became of a mutation."""

    file: str
    old: str
    new: str
    outcome: str  # "killed", "survived" or "argued"
    seconds: float


def read_mutations(path: Path) -> list[Mutation]:
    """The list, checked against the files. SystemExit for a text that is missing or not alone, or tests that are."""
    found = []
    for group in tomllib.loads(path.read_text(encoding="utf-8"))["group"]:
        source = (REPOSITORY / group["file"]).read_text(encoding="utf-8")
        survivors = {old: why for old, why in group.get("survivors", [])}
        if gone := [test for test in group["tests"] if not (REPOSITORY / test.partition("::")[0]).is_file()]:
            sys.exit(f"{path.name}: {gone[0]} of {group['file']} does not exist")
        for old, new in group["mutations"]:
            if source.count(old) != 1:
                sys.exit(f"{path.name}: {old!r} stands {source.count(old)} times in {group['file']}, not once")
            found.append(Mutation(group["file"], old, new, tuple(group["tests"]), survivors.get(old, "")))
    return found


def copy_checkout(target: Path) -> None:
    """The tracked files of the repository, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    for name in listed.decode().split("\0"):
        if name and (REPOSITORY / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name)


def run_tests(folder: Path, tests: tuple[str, ...]) -> bool:
    """Whether the tests pass in a copy."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def check(mutation: Mutation, folder: Path) -> Result:
    """Break the line, run its tests, mend it."""
    path = folder / mutation.file
    source = path.read_text(encoding="utf-8")
    start = time.monotonic()
    path.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        passed = run_tests(folder, mutation.tests)
    finally:
        path.write_text(source, encoding="utf-8")
    outcome = "killed" if not passed else "argued" if mutation.argued else "survived"
    result = Result(mutation.file, mutation.old, mutation.new, outcome, round(time.monotonic() - start, 1))
    print(f"{outcome:<9}{mutation.file}: {mutation.old!r} -> {mutation.new!r}", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="mutations whose file or text holds this")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at a time, each in a copy of the files")
    parser.add_argument("--out", type=Path, help="also write the results as JSON")
    options = parser.parse_args()
    mutations = read_mutations(Path(__file__).with_name("mutations.toml"))
    chosen = [m for m in mutations if options.only in m.file or options.only in m.old]
    with tempfile.TemporaryDirectory(prefix="quads-mutate-") as scratch:
        folders: SimpleQueue[Path] = SimpleQueue()
        for job in range(options.jobs):
            copy_checkout(Path(scratch) / str(job))
            folders.put(Path(scratch) / str(job))

        def work(mutation: Mutation) -> Result:
            folder = folders.get()
            try:
                return check(mutation, folder)
            finally:
                folders.put(folder)

        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(work, chosen))
    count = {outcome: sum(r.outcome == outcome for r in results) for outcome in ("killed", "survived", "argued")}
    print(f"{len(results)} mutations: {count['killed']} killed, {count['argued']} argued, {count['survived']} survived")
    if options.out:
        options.out.write_text(json.dumps({"count": count, "results": [asdict(r) for r in results]}, indent=1) + "\n")
    return 1 if count["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
