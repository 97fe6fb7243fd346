"""A seccomp filter: which system calls a generated program may make. Standard library only.

A deny list in front of namespaces or Landlock, not a wall by itself. What it takes away: new processes (threads are
allowed) and new programs, sockets other than AF_UNIX, signals to other processes, shared memory that counts against no
limit, debugging, mounts, namespaces, keys, io_uring and the rest of what only exploits need. Refused calls give EPERM.

Numbers are (x86_64, aarch64), from the kernel's tables; -1 where an architecture lacks the call.
"""

import ctypes
import os
import struct

from quads.sandbox.linux import PR_SET_SECCOMP, prctl

DENIED = {
    "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "personality": (135, 92), "syslog": (103, 116), "acct": (163, 89), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, -1), "ioperm": (173, -1),
    "modify_ldt": (154, -1), "kcmp": (312, 272), "vhangup": (153, 58), "lookup_dcookie": (212, 18),
}  # fmt: skip
# Denied too where the program shares a host's sockets, or a folder that the server has to clean.
DENIED_IN_COMPANY = {"mkdir": (83, -1), "mkdirat": (258, 34), "socket": (41, 198)}
CLONE, CLONE3, SOCKET, KILL, TGKILL, PRLIMIT = (56, 220), (435, 435), (41, 198), (62, 129), (234, 131), (302, 261)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS, CLONE_THREAD, AF_UNIX = 1, 38, 0x00010000, 1
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; low word first on both machines


def supported() -> bool:
    """Is there a filter for this machine?"""
    return os.uname().machine in ARCHITECTURES


def restrict(own_pid: int, alone: bool) -> None:
    """Filter this process and its threads from here on. Needs no_new_privs.

    own_pid: whom it may still signal. alone: it has namespaces of its own.
    """
    program = _program(own_pid, DENIED if alone else {**DENIED, **DENIED_IN_COMPANY})
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))

    class SockFprog(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    fprog = SockFprog(len(program), ctypes.cast(code, ctypes.c_void_p))
    prctl(PR_SET_SECCOMP, 2, ctypes.byref(fprog))


def _program(own_pid: int, denied: dict[str, tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    """Classic BPF. Each check of a call ends in its own return, so jumps are short."""
    column, audit = ARCHITECTURES[os.uname().machine]
    lines = [(LOAD, 0, 0, ARCHITECTURE), (JUMP_EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL_PROCESS), (LOAD, 0, 0, NUMBER)]
    if column == 0:  # the x32 calls of x86_64
        lines += [(JUMP_GREATER_EQUAL, 0, 1, 0x40000000), (RETURN, 0, 0, KILL_PROCESS)]
    for numbers in denied.values():
        if numbers[column] >= 0:
            lines += [(JUMP_EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, ERRNO | EPERM)]
    lines += [(JUMP_EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, ERRNO | ENOSYS)]  # glibc then falls back to clone
    checks = [
        (CLONE, JUMP_SET, CLONE_THREAD),
        (SOCKET, JUMP_EQUAL, AF_UNIX),
        (KILL, JUMP_EQUAL, own_pid),
        (TGKILL, JUMP_EQUAL, own_pid),
        (PRLIMIT, JUMP_EQUAL, 0),
    ]
    for numbers, test, value in checks:
        lines += [
            (JUMP_EQUAL, 0, 4, numbers[column]),
            (LOAD, 0, 0, FIRST_ARGUMENT),
            (test, 0, 1, value),
            (RETURN, 0, 0, ALLOW),
            (RETURN, 0, 0, ERRNO | EPERM),
        ]
    return [*lines, (RETURN, 0, 0, ALLOW)]
