"""The Linux calls a sandbox needs and Python lacks: namespaces, mounts, capabilities, Landlock. Standard library only.

Every function raises OSError with the call's name. Numbers are those of the kernel's headers; calls since mount_setattr
have the same number on every architecture.
"""

import ctypes
import os
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38

SYS_MOUNT_SETATTR = 442
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
CAPABILITY_VERSION_3 = 0x20080522

# Landlock's rights over files are bits: 0 execute, 1 write, 2 read, 3 list, 4 and 5 remove, 6 to 12 make (character
# device, folder, file, socket, fifo, block device, link), 13 refer (since ABI 2), 14 truncate (3), 15 ioctl (5).
LANDLOCK_MINIMUM = 3  # Linux 6.2; before, any file that can be read can be truncated
LANDLOCK_SINCE = {1: 0b1111111111111, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
LANDLOCK_READ, LANDLOCK_LIST, LANDLOCK_FILE, LANDLOCK_DEVICE = 0b1100, 0b1000, 0b111, 0b110
LANDLOCK_BOX = 1 << 14 | 0b0000110111110  # files and folders, no devices, sockets, fifos or links

libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(number: int, what: str, *arguments: object) -> int:
    return _check(libc.syscall(ctypes.c_long(number), *arguments), what)


def unshare(flags: int) -> None:
    """Leave the named namespaces for new ones. A new process namespace begins with the next child."""
    _check(libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    data = options.encode() if options else None
    result = libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data)
    _check(result, f"mount {target}")


def bind_read_only(source: str, target: str) -> None:
    """Show `source` at `target`, everything below it included, unchangeable and without set-uid or devices."""
    mount(source, target, "", MS_BIND | MS_REC)
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0)
    _syscall(
        SYS_MOUNT_SETATTR,
        f"mount_setattr {target}",
        ctypes.c_int(AT_FDCWD),
        ctypes.c_char_p(target.encode()),
        ctypes.c_uint(AT_RECURSIVE),
        ctypes.c_char_p(attributes),
        ctypes.c_size_t(len(attributes)),
    )


def bind(source: str, target: str) -> None:
    mount(source, target, "", MS_BIND)


def pivot_root(new_root: str, put_old: str) -> None:
    """Make `new_root` the root; the old one moves to `put_old` below it."""
    number = SYS_PIVOT_ROOT[os.uname().machine]
    _syscall(number, "pivot_root", ctypes.c_char_p(new_root.encode()), ctypes.c_char_p(put_old.encode()))


def detach(target: str) -> None:
    _check(libc.umount2(target.encode(), ctypes.c_int(MNT_DETACH)), f"umount {target}")


def prctl(option: int, value: object, last: object = None) -> None:
    third = ctypes.c_ulong(value) if isinstance(value, int) else value
    _check(
        libc.prctl(ctypes.c_int(option), third, last or ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)),
        "prctl",
    )


def drop_capabilities() -> None:
    """Give up every capability for good (with no_new_privs set, none can come back)."""
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    data = struct.pack("IIIIII", 0, 0, 0, 0, 0, 0)
    number = SYS_CAPSET[os.uname().machine]
    _syscall(number, "capset", ctypes.c_char_p(header), ctypes.c_char_p(data))


def landlock_version() -> int:
    """Landlock's ABI version, 0 where the kernel has none."""
    result = libc.syscall(ctypes.c_long(SYS_LANDLOCK_CREATE), None, ctypes.c_size_t(0), ctypes.c_uint(1))
    return max(0, result)


def landlock(readable: list[str], listable: list[str], box: str) -> None:
    """From here on this process reaches files only below these paths, and can write only below `box`, "" for nowhere.

    readable: folders and files that can be read (devices also written); listable: folders whose names can be read.
    Needs no_new_privs. Where the kernel knows how, TCP and signals to processes outside are refused as well.
    """
    version = landlock_version()
    if version < LANDLOCK_MINIMUM:
        raise OSError(
            f"Landlock of version {LANDLOCK_MINIMUM} (Linux 6.2) is needed, this kernel has {version or 'none'}"
        )
    handled = sum(rights for since, rights in LANDLOCK_SINCE.items() if version >= since)
    network = 0b11 if version >= 4 else 0  # TCP bind and connect
    scoped = 0b11 if version >= 6 else 0  # abstract sockets, signals
    attributes = struct.pack("QQQ", handled, network, scoped)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _syscall(
        SYS_LANDLOCK_CREATE,
        "landlock_create_ruleset",
        ctypes.c_char_p(attributes),
        ctypes.c_size_t(size),
        ctypes.c_uint(0),
    )
    try:
        for path in readable:
            _landlock_rule(ruleset, path, LANDLOCK_READ if os.path.isdir(path) else LANDLOCK_READ & LANDLOCK_FILE)
            if path.startswith("/dev/"):
                _landlock_rule(ruleset, path, LANDLOCK_DEVICE)
        for path in listable:
            _landlock_rule(ruleset, path, LANDLOCK_LIST)
        if box:
            _landlock_rule(ruleset, box, handled & LANDLOCK_BOX)
        _syscall(SYS_LANDLOCK_RESTRICT, "landlock_restrict_self", ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)


def _landlock_rule(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, fd)
        _syscall(
            SYS_LANDLOCK_ADD,
            f"landlock {path}",
            ctypes.c_int(ruleset),
            ctypes.c_int(1),
            ctypes.c_char_p(rule),
            ctypes.c_uint(0),
        )
    finally:
        os.close(fd)
