"""A run's folder has one owner, and a crash of the owner frees it."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from quads.errors import UserError
from quads.run.lock import own_folder
from tests.helpers import REPOSITORY, command_env
from tests.tiny_run import make_world, options, train_rows

HOLD = "import sys, time; from pathlib import Path; from quads.run.lock import own_folder\n"
HOLD += "with own_folder(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"


def test_a_folder_is_held_by_one_and_left_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "a"
    with own_folder(out):
        assert (out / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
        with pytest.raises(UserError, match=f"runs/a' belongs to a run that is still going .process {os.getpid()} on"):
            with own_folder(out):
                pass
        with own_folder(tmp_path / "runs" / "b"):  # another folder is free
            pass
        fork = os.fork()
        if fork == 0:  # it does not keep the lock
            time.sleep(60)
            os._exit(0)
    assert not (tmp_path / "runs").exists()
    with own_folder(out):
        (out / "metrics.jsonl").write_text("")
    assert [path.name for path in out.iterdir()] == ["metrics.jsonl"]
    os.kill(fork, signal.SIGKILL)
    os.waitpid(fork, 0)


def test_a_second_run_is_refused_and_a_killed_one_frees_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = make_world(tmp_path / "world"), tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(out)]
    holder = subprocess.Popen(command, cwd=REPOSITORY, env=command_env(), stdout=subprocess.PIPE, text=True)
    assert holder.stdout and holder.stdout.readline() == "held\n"
    with pytest.raises(SystemExit) as ended:
        train.main(["--config", str(config), *options(train__out=out, train__steps=1)])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert f"belongs to a run that is still going (process {holder.pid} on {socket.gethostname()})" in message
    assert [path.name for path in out.iterdir()] == [".lock"]
    holder.kill()
    holder.wait()
    assert (out / ".lock").exists()  # what it left behind does not matter
    assert len(train_rows(config, out, train__steps=1, eval__every=0)) == 1
    assert not (out / ".lock").exists()
