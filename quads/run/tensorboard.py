"""TensorBoard events, written at once by the caller: torch's writer does it in a thread, whose errors end nothing."""

import os
import socket
import time
from importlib import import_module
from pathlib import Path
from typing import Any


class EventFile:
    """One new file of scalars in `folder`. OSError where it cannot be written.

    Args:
        resume_step: events of later steps, in older files of the folder, are void.
    """

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        # Slow to import, and only wanted here.
        event_pb2, summary_pb2 = (
            import_module(f"tensorboard.compat.proto.{name}_pb2") for name in ("event", "summary")
        )
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self._file = open(folder / name, "xb", buffering=0)
        self._records = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        if resume_step:
            self._add(step=resume_step + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, step: int, row: dict[str, Any]) -> None:
        """The numbers of a row, by name."""
        numbers = {name: value for name, value in row.items() if name != "step" and isinstance(value, int | float)}
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add(step=step, summary=self._summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _add(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
