"""How a process is shut off: first the server that programs are forked from, then each fork. Standard library only.

    namespaces  `enter` leaves the user, mount, network, IPC and host-name namespaces and builds a root folder that
                holds only libraries, packages and four devices, all read-only
    landlock    `enter` notes what may be read; `confine` lets the process reach nothing else
    none        limits only

`confine` then gives up user, capabilities and system calls for good.
"""

import os
import resource
import signal
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from quads.sandbox import linux as linux
from quads.sandbox import seccomp as seccomp

NOBODY = 65534
BOX = "/box"  # a program's folder in a root of its own
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SHARED_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
STACK_BYTES = 64 << 20
OPEN_FILES = 64


@dataclass(frozen=True)
class Limits:
    """What one program or call may use. Times in seconds, sizes in bytes."""

    time_s: float  # wall-clock time of one test; CPU time is limited to the next whole second above
    memory: int  # address space
    output: int  # of stdout in one test
    disk: int  # of its folder, and of each file
    threads: int


@dataclass(frozen=True)
class Confinement:
    """How a server confines what it forks. mechanism: namespaces, landlock or none."""

    mechanism: str
    readable: tuple[str, ...]  # for Landlock: what can be read,
    listable: tuple[str, ...]  # and where names of files can be
    drop_uid: bool  # become nobody: the namespace maps it

    @property
    def alone(self) -> bool:
        return self.mechanism == "namespaces"


def enter(mechanism: str, packages: dict[str, str], hide_others: bool) -> Confinement:
    """Confine this process as far as it still can work, for good. OSError if the kernel does not let it.

    packages: folders that forks may read -> where they lie from then on, in a root of its own.
    hide_others: whether the interpreter's other third-party packages are out of sight.
    """
    libraries = [*library_paths(), *(path for path in SHARED_LIBRARIES if os.path.exists(path)), *_libpython_path()]
    if mechanism == "namespaces":
        mapped = _new_namespaces()
        _build_root(libraries, packages, hide_others)
        return Confinement(mechanism, (), (), mapped)
    listable = tuple({os.path.dirname(package) for package in packages})
    readable = [*libraries, *packages, *DEVICES, "/etc/ld.so.cache"]
    return Confinement(mechanism, tuple(path for path in readable if os.path.exists(path)), listable, False)


def confine(limits: Limits, confinement: Confinement, box: str) -> None:
    """Give up every right, in a fork of the server. box: where files may be made; "" for nowhere."""
    parent = os.getppid()
    os.chdir(box or "/")
    cpu_s = int(limits.time_s) + 1
    for kind, value in (
        (resource.RLIMIT_AS, limits.memory),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, limits.disk),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (value, value))
    if confinement.alone:  # elsewhere the count includes all that the user runs
        # The server and its supervisors count too where they share the program's user.
        processes = limits.threads + (0 if confinement.drop_uid else 4)
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    stack = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, stack))
    if confinement.drop_uid:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    die_with(parent)  # after the change of user, which would undo it
    if confinement.mechanism == "none":
        return
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.drop_capabilities()
    if confinement.mechanism == "landlock":
        linux.landlock(list(confinement.readable), list(confinement.listable), box)
    seccomp.restrict(os.getpid(), alone=confinement.alone)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, for whatever reason."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def library_paths() -> list[str]:
    """The standard library and its extension modules."""
    dynamic = sysconfig.get_config_var("DESTSHARED") or f"{os.path.dirname(os.__file__)}/lib-dynload"
    return list(dict.fromkeys([os.path.dirname(os.path.realpath(os.__file__)), os.path.realpath(dynamic)]))


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


def _build_root(libraries: list[str], packages: dict[str, str], hide_others: bool) -> None:
    """Replace the root folder of this mount namespace. What was there before is out of reach for good."""
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", "/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755,size=4m")
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
    for library in libraries if hide_others else ():
        for name in ("site-packages", "dist-packages", "python3/dist-packages"):
            if os.path.isdir(f"{library}/{name}"):
                linux.mount("tmpfs", f"{library}/{name}", "tmpfs", linux.MS_RDONLY, "mode=755,size=4k")
    for package, target in packages.items():
        if not os.path.exists(target):
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
    if not os.path.exists("/tmp"):  # a package may lie there
        os.symlink(BOX, "/tmp")
    linux.detach("/old")
    os.rmdir("/old")
    linux.mount("none", "/", "", linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV)


def _libpython_path() -> list[str]:
    """Where a shared libpython and what it brings along lie, if not among the system's libraries."""
    folder = os.path.realpath(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    return [folder] if os.path.isdir(folder) and sysconfig.get_config_var("Py_ENABLE_SHARED") else []


def volunteer_for_oom_kill() -> None:
    """Out of memory, the kernel should take programs before the trainer."""
    try:
        Path("/proc/self/oom_score_adj").write_text("600")
    except OSError:
        return  # not ours to set here
