"""The sandbox server: a small process that runs programs, one at a time, each shut off from everything else.

    python -S -s -m quads.sandbox.server JSON        (started by pool.py; standard library only)

    server      enters its confinement (confinement.py), then forks for each job; ends when the trainer does
     |
    supervisor  process 1 of a fresh process namespace with a private folder in memory; reads the job, forks for each
     |          test, feeds stdin, collects output, keeps the clock; its end kills whatever is left
    program     gives up its user, capabilities and system calls, then runs (program.py)

With Landlock in place of namespaces the supervisor (supervisor.py) is an ordinary child. The server itself never reads
a job, so that nothing of one program is in the memory the next one is forked from.
"""

import json
import os
import signal
import sys
from typing import NoReturn

from quads.sandbox import linux as linux
from quads.sandbox.boxes import remove
from quads.sandbox.confinement import Confinement, Limits, die_with, enter, library_paths, volunteer_for_oom_kill
from quads.sandbox.supervisor import FRAME, supervise, write_all
from quads.sandbox.watch import Watch, kill_children

PACKAGE_FOLDER = "/packages"


def main(argv: list[str]) -> None:
    watch = Watch()
    settings = json.loads(argv[0])
    limits, folder, packages = Limits(**settings["limits"]), settings["folder"], settings["packages"]
    if settings["mechanism"] != "none":
        sys.path[:] = [path for path in sys.path if path in library_paths()]
    volunteer_for_oom_kill()
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)  # what a killed supervisor leaves comes to us, and is killed
    targets = {package: f"{PACKAGE_FOLDER}/{os.path.basename(package)}" for package in packages}
    confinement = enter(settings["mechanism"], targets, hide_others=True)
    sys.path.extend([PACKAGE_FOLDER] if confinement.alone else confinement.listable)
    write_all(1, FRAME.pack(0))  # ready
    status = 0
    while status == 0 and watch.request():
        me, job = os.getpid(), os.fork()
        if job == 0:
            _job_process(me, limits, confinement, folder)
        if not watch.child(job):
            os.kill(job, signal.SIGKILL)
        _, status = os.waitpid(job, 0)  # not 0: what is left of the job in the pipe cannot be told from the next one
    kill_children()
    if folder:
        remove(folder)
    os._exit(status and 1)


def _job_process(server: int, limits: Limits, confinement: Confinement, folder: str) -> NoReturn:
    """A child of the server: the supervisor, or in namespaces the parent of process 1."""
    status = 1
    try:
        die_with(server)
        if confinement.alone:
            linux.unshare(linux.CLONE_NEWPID | linux.CLONE_NEWNS | linux.CLONE_NEWIPC)
            supervisor = os.fork()
            if supervisor:
                _, status = os.waitpid(supervisor, 0)
                os._exit(status and 1)
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        else:
            linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        supervise(limits, confinement, folder)
        status = 0
    except BaseException as error:
        os.write(2, f"sandbox: {error}\n".encode())
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
