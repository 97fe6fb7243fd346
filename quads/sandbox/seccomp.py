"""A seccomp filter: which system calls a confined process may make. Standard library only.

An allow list: what an interpreter needs for computing, threads, pipes and files; calls of kernels to come are refused
as well. Beside namespaces or Landlock, not a wall by itself. What neither of the two refuses, and only this list does:
new processes and programs, every socket but a connected pair, signals to others by any way (also by F_SETOWN), nice
values and processors of other processes, debugging, shared memory that counts against no limit, and under Landlock
changes of modes, times and attributes of files that are in sight.

Numbers are (x86_64, aarch64), from the kernel's tables; -1 where an architecture lacks the call.
"""

import ctypes
import os
import struct

from quads.sandbox.linux import PR_SET_SECCOMP, prctl

Numbers = tuple[int, int]
Line = tuple[int, int, int, int]

ALLOWED: dict[str, Numbers] = {
    # files and folders; which ones is up to the mounts or Landlock
    "open": (2, -1), "openat": (257, 56), "creat": (85, -1), "close": (3, 57), "close_range": (436, 436),
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287),
    "sendfile": (40, 71), "copy_file_range": (326, 285), "lseek": (8, 62), "fsync": (74, 82), "fdatasync": (75, 83),
    "truncate": (76, 45), "ftruncate": (77, 46), "fadvise64": (221, 223), "stat": (4, -1), "fstat": (5, 80),
    "lstat": (6, -1), "newfstatat": (262, 79), "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44),
    "access": (21, -1), "faccessat": (269, 48), "faccessat2": (439, 439), "getdents": (78, -1), "getdents64": (217, 61),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "umask": (95, 166), "readlink": (89, -1),
    "readlinkat": (267, 78), "rename": (82, -1), "renameat": (264, 38), "renameat2": (316, 276), "link": (86, -1),
    "linkat": (265, 37), "symlink": (88, -1), "symlinkat": (266, 36), "unlink": (87, -1), "unlinkat": (263, 35),
    "rmdir": (84, -1),
    # descriptors and waiting
    "dup": (32, 23), "dup2": (33, -1), "dup3": (292, 24), "pipe": (22, -1), "pipe2": (293, 59), "poll": (7, -1),
    "ppoll": (271, 73), "select": (23, -1), "pselect6": (270, 72), "epoll_create": (213, -1),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, -1), "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441), "eventfd2": (290, 19), "recvfrom": (45, 207), "recvmsg": (47, 212),
    "shutdown": (48, 210), "getsockname": (51, 204), "getpeername": (52, 205), "setsockopt": (54, 208),
    "getsockopt": (55, 209),
    # memory
    "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "msync": (26, 227), "madvise": (28, 233),
    "brk": (12, 214),
    # threads, signals, time
    "futex": (202, 98), "futex_waitv": (449, 449), "set_robust_list": (273, 99), "get_robust_list": (274, 100),
    "set_tid_address": (218, 96), "rseq": (334, 293), "arch_prctl": (158, -1), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126), "getpriority": (140, 141),
    "getcpu": (309, 168), "exit": (60, 93), "exit_group": (231, 94), "wait4": (61, 260), "waitid": (247, 95),
    "pause": (34, -1), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128), "alarm": (37, -1), "getitimer": (36, 102), "setitimer": (38, 103),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, -1), "times": (100, 153),
    # what one may know about oneself
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getpgrp": (111, -1), "getpgid": (121, 155),
    "getsid": (124, 156), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158), "uname": (63, 160),
    "sysinfo": (99, 179), "getrusage": (98, 165), "getrlimit": (97, 163), "setrlimit": (160, 164),
    "getrandom": (318, 278),
}  # fmt: skip
# In namespaces every file that can be written is in a memory of its own, which goes with the process. Elsewhere a
# folder would hide files from the quota, and a mode or time can be changed of any file that can be reached by name.
ALLOWED_ALONE: dict[str, Numbers] = {
    "mkdir": (83, -1), "mkdirat": (258, 34), "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53),
    "fchmodat2": (452, 452), "utime": (132, -1), "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88),
}  # fmt: skip
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)  # duplicate, flags of descriptor and file; no owner, signal, lock or lease
IOCTL_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal, bytes waiting, flags
PRCTL_OPTIONS = (15, 16, 0x53564D41)  # names of threads and of memory; the death signal stays as it is
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

LOAD, AND, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_SET, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS, NEW_CALLS = 1, 38, 424  # since 424 numbers are the same everywhere; a C library tries such calls first
CLONE_THREAD, AF_UNIX, SOCK_STREAM, MAP_SHARED, MAP_ANONYMOUS = 0x00010000, 1, 1, 0x01, 0x20
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; low word first on both machines
REFUSE: Line = (RETURN, 0, 0, ERRNO | EPERM)
PASS: Line = (RETURN, 0, 0, ALLOW)


def supported() -> bool:
    """Is there a filter for this machine?"""
    return os.uname().machine in ARCHITECTURES


def restrict(own_pid: int, alone: bool) -> None:
    """Filter this process and its threads from here on. Needs no_new_privs.

    own_pid: whom it may still signal. alone: it has namespaces of its own, so that no file of others is in sight.
    """
    program = _program(own_pid, alone)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))

    class SockFprog(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    fprog = SockFprog(len(program), ctypes.cast(code, ctypes.c_void_p))
    prctl(PR_SET_SECCOMP, 2, ctypes.byref(fprog))


def _program(own_pid: int, alone: bool) -> list[Line]:
    """Classic BPF. Each check of a call ends in its own return, so jumps are short."""
    column, audit = ARCHITECTURES[os.uname().machine]
    lines = [(LOAD, 0, 0, ARCHITECTURE), (JUMP_EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL_PROCESS), (LOAD, 0, 0, NUMBER)]
    if column == 0:  # the x32 calls of x86_64
        lines += [(JUMP_GREATER_EQUAL, 0, 1, 0x40000000), (RETURN, 0, 0, KILL_PROCESS)]
    for numbers in (ALLOWED | (ALLOWED_ALONE if alone else {})).values():
        if numbers[column] >= 0:
            lines += [(JUMP_EQUAL, 0, 1, numbers[column]), PASS]
    for numbers, check in _checks(own_pid, alone):
        lines += [(JUMP_EQUAL, 0, len(check), numbers[column]), *check]
    return [*lines, (JUMP_GREATER_EQUAL, 0, 1, NEW_CALLS), (RETURN, 0, 0, ERRNO | ENOSYS), REFUSE]


def _checks(own_pid: int, alone: bool) -> list[tuple[Numbers, list[Line]]]:
    """Calls that are allowed by their arguments."""
    # A shared map of a file that is open no more holds blocks of the disk that no quota sees.
    mapped = [_load(3), (JUMP_SET, 2, 0, MAP_ANONYMOUS), (JUMP_SET, 0, 1, 0 if alone else MAP_SHARED), REFUSE, PASS]
    # To whom it is already connected: with an address, a pair of datagram sockets reaches every socket by its path.
    no_address = [_load(4), (JUMP_EQUAL, 1, 0, 0), REFUSE, _load(4, high=True), (JUMP_EQUAL, 1, 0, 0), REFUSE, PASS]
    stream = [_load(0), (JUMP_EQUAL, 1, 0, AF_UNIX), REFUSE, _load(1), (AND, 0, 0, 0xF), *_one_of(SOCK_STREAM)]
    return [
        ((9, 222), mapped),
        ((44, 206), no_address),  # sendto
        ((53, 199), stream),  # socketpair
        ((56, 220), [_load(0), (JUMP_SET, 0, 1, CLONE_THREAD), PASS, REFUSE]),
        ((72, 25), [_load(1), *_one_of(*FCNTL_COMMANDS)]),  # fcntl
        ((16, 29), [_load(1), *_one_of(*IOCTL_COMMANDS)]),
        ((157, 167), [_load(0), *_one_of(*PRCTL_OPTIONS)]),
        ((62, 129), [_load(0), *_one_of(own_pid)]),  # kill
        ((234, 131), [_load(0), *_one_of(own_pid)]),  # tgkill
        ((302, 261), [_load(0), *_one_of(0)]),  # prlimit64
    ]


def _load(argument: int, high: bool = False) -> Line:
    return (LOAD, 0, 0, ARGUMENTS + 8 * argument + 4 * high)


def _one_of(*values: int) -> list[Line]:
    lines: list[Line] = []
    for value in values:
        lines += [(JUMP_EQUAL, 0, 1, value), PASS]
    return [*lines, REFUSE]
