"""A plan against what a run measured: each phase's time and memory, and their ratio."""

import statistics
from collections.abc import Iterator
from pathlib import Path

from quads.errors import UserError
from quads.memory import MemoryEstimate
from quads.plan.step_time import StepTime
from quads.run.folder import read_rows

COMPILING = 2  # first steps of a process compile and capture; they are left out where more follow


def measured_medians(run: Path) -> dict[str, float]:
    """Medians of a run's metrics over its steps after the first two.

    Raises:
        UserError: the folder has no metrics.
    """
    path = run / "metrics.jsonl"
    rows = read_rows(path) if path.is_file() else []
    if not rows:
        raise UserError(f"no metrics of a run in {path}; give the folder of a run")
    steady = rows[COMPILING:] or rows
    keys = [key for key in steady[-1] if key.startswith(("time/", "memory/", "response/length"))]
    return {key: statistics.median(row[key] for row in steady if row.get(key) is not None) for key in keys}


def compare(run: Path, times: StepTime, memory: MemoryEstimate) -> Iterator[str]:
    """Lines: planned, measured, planned / measured of each phase."""
    medians = measured_medians(run)
    yield f"against {run}"
    yield f"  {'':<18} {'planned':>9} {'measured':>9} {'ratio':>6}"
    rows = [(f"{name}, s", seconds, medians.get(f"time/{name}_s")) for name, seconds in times.phases.items()]
    rows += [(f"{name}, GiB", memory.of(name), medians.get(f"memory/{name}_gib")) for name in memory.phases]
    for name, planned, measured in rows:
        if measured is None:
            yield f"  {name:<18} {planned:>9.2f} {'-':>9}"
        else:
            yield f"  {name:<18} {planned:>9.2f} {measured:>9.2f} {planned / max(measured, 1e-9):>6.2f}"
