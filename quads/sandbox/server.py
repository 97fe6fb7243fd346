"""The sandbox server: a small process that runs programs, one at a time, each shut off from everything else.

    python -S -s -m quads.sandbox.server JSON        (started by pool.py; standard library only)

    server      leaves the user, mount, network, IPC and host-name namespaces and builds a root folder that holds only
     |          the interpreter's library, shared libraries and four devices, all read-only; then forks for each job
    supervisor  process 1 of a fresh process namespace with a private folder in memory; reads the job, forks for each
     |          test, feeds stdin, collects output, keeps the clock; its end kills whatever is left
    program     gives up its user, capabilities and system calls (program.py), then runs

With bubblewrap or Landlock in place of own namespaces the supervisor (supervisor.py) is an ordinary child. The
server itself never reads a job, so that nothing of one program is in the memory the next one is forked from.
"""

import json
import os
import select
import signal
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

from quads.sandbox import linux as linux
from quads.sandbox.program import BOX, NOBODY, Confinement, Limits
from quads.sandbox.supervisor import FRAME, supervise, write_all

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
PACKAGE_FOLDER = "/packages"
SHARED_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")


def main(argv: list[str]) -> None:
    settings = json.loads(argv[0])
    limits = Limits(**settings["limits"])
    sys.path[:] = [path for path in sys.path if path in _library_paths()]
    _volunteer_for_oom_kill()
    confinement = _confine_server(settings["mechanism"], settings["box"], settings["packages"])
    write_all(1, FRAME.pack(0))  # ready
    poller = select.poll()
    poller.register(0, select.POLLIN)
    while True:
        (_, events), *_ = poller.poll()
        if not events & select.POLLIN:
            return  # the trainer is gone
        child = os.fork()
        if child == 0:
            _job_process(limits, confinement)
        _, status = os.waitpid(child, 0)
        if status:
            os._exit(1)  # what is left of the job in the pipe cannot be told from the next one


def _job_process(limits: Limits, confinement: Confinement) -> NoReturn:
    """A child of the server: the supervisor, or in namespaces the parent of process 1."""
    status = 1
    try:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if confinement.mechanism == "namespaces":
            linux.unshare(linux.CLONE_NEWPID | linux.CLONE_NEWNS | linux.CLONE_NEWIPC)
            supervisor = os.fork()
            if supervisor:
                _, status = os.waitpid(supervisor, 0)
                os._exit(status and 1)
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        else:
            linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        supervise(limits, confinement)
        status = 0
    except BaseException as error:
        os.write(2, f"sandbox: {error}\n".encode())
    finally:
        os._exit(status)


def _confine_server(mechanism: str, box: str, packages: list[str]) -> Confinement:
    libraries = [*_library_paths(), *(path for path in SHARED_LIBRARIES if os.path.exists(path)), *_libpython_path()]
    if mechanism == "namespaces":
        mapped = _new_namespaces()
        _build_root(libraries, packages)
        sys.path.append(PACKAGE_FOLDER)
        return Confinement(mechanism, BOX, (), (), mapped)
    if mechanism == "bubblewrap":  # the command that started us built the root
        sys.path.append(PACKAGE_FOLDER)
        return Confinement(mechanism, BOX, (), (), False)
    folders = tuple({os.path.dirname(package) for package in packages})
    sys.path.extend(folders)
    readable = [*libraries, *packages, *DEVICES, "/etc/ld.so.cache"]
    return Confinement(mechanism, box, tuple(path for path in readable if os.path.exists(path)), folders, False)


def _new_namespaces() -> bool:
    """-> can programs become `nobody`? Only root may map a second user into a namespace."""
    flags = linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC
    flags |= linux.CLONE_NEWUTS | linux.CLONE_NEWCGROUP
    uid, gid, me = os.getuid(), os.getgid(), os.getpid()
    if uid != 0:
        linux.unshare(flags)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        return False
    # The map of several users has to be written from outside.
    receive, send = os.pipe()
    writer = os.fork()
    if writer == 0:
        status = 1
        try:
            os.close(send)
            if os.read(receive, 1):
                for kind in ("uid", "gid"):
                    Path(f"/proc/{me}/{kind}_map").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
                status = 0
        finally:
            os._exit(status)
    try:
        linux.unshare(flags)
        os.write(send, b"x")
    finally:
        os.close(send)
        os.close(receive)
        _, status = os.waitpid(writer, 0)
    if status:
        raise OSError("the user map of the new namespace cannot be written")
    return True


def _build_root(libraries: list[str], packages: list[str]) -> None:
    """Replace the root folder of this mount namespace. What was there before is out of reach for good."""
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", "/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755,size=1m")
    os.mkdir("/tmp/old")
    linux.pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    for path in libraries:
        if os.path.exists(path):  # inside a folder that is there already
            continue
        if os.path.islink(f"/old{path}"):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(os.readlink(f"/old{path}"), path)
        else:
            os.makedirs(path)
            linux.bind_read_only(f"/old{path}", path)
    for library in libraries:  # third-party packages of the interpreter are not the program's business
        for name in ("site-packages", "dist-packages", "python3/dist-packages"):
            if os.path.isdir(f"{library}/{name}"):
                linux.mount("tmpfs", f"{library}/{name}", "tmpfs", linux.MS_RDONLY, "mode=755,size=4k")
    for package in packages:
        target = f"{PACKAGE_FOLDER}/{os.path.basename(package)}"
        os.makedirs(target)
        linux.bind_read_only(f"/old{package}", target)
    os.mkdir("/dev")
    for device in DEVICES:
        os.close(os.open(device, os.O_CREAT | os.O_WRONLY, 0o644))
        linux.bind(f"/old{device}", device)
    if os.path.exists("/old/etc/ld.so.cache"):
        os.mkdir("/etc")
        Path("/etc/ld.so.cache").write_bytes(Path("/old/etc/ld.so.cache").read_bytes())
    os.mkdir(BOX)
    os.symlink(BOX, "/tmp")
    linux.detach("/old")
    os.rmdir("/old")
    linux.mount("none", "/", "", linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV)


def _library_paths() -> list[str]:
    """The standard library and its extension modules."""
    dynamic = sysconfig.get_config_var("DESTSHARED") or f"{os.path.dirname(os.__file__)}/lib-dynload"
    return list(dict.fromkeys([os.path.dirname(os.path.realpath(os.__file__)), os.path.realpath(dynamic)]))


def _libpython_path() -> list[str]:
    """Where a shared libpython and what it brings along lie, if not among the system's libraries."""
    folder = os.path.realpath(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    return [folder] if os.path.isdir(folder) and sysconfig.get_config_var("Py_ENABLE_SHARED") else []


def _volunteer_for_oom_kill() -> None:
    """Out of memory, the kernel should take programs before the trainer."""
    try:
        Path("/proc/self/oom_score_adj").write_text("600")
    except OSError:
        return  # not ours to set here


if __name__ == "__main__":
    main(sys.argv[1:])
