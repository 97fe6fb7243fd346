"""The inside of a sandboxed process: give up every right, then become the generated program. Standard library only.

It runs in a fresh fork of the sandbox server. The program finds what a script finds: `__main__`, standard streams,
argv, `exit`, an empty folder to work in. What it must not find is not in this process: expected outputs never enter it.
"""

import atexit
import builtins
import json
import os
import resource
import site
import sys
import threading
import traceback
import types
from dataclasses import dataclass
from typing import Any, NoReturn

from quads.sandbox import linux as linux
from quads.sandbox import seccomp as seccomp

NOBODY = 65534
BOX = "/box"  # the program's folder in a root of its own
RESULT_FD = 3  # where the value of a called function goes, apart from what the program prints
STACK_BYTES = 64 << 20
OPEN_FILES = 64

# Names that LiveCodeBench and the function-call data sets take for granted in front of a solution.
PRELUDE = """
import bisect, collections, copy, datetime, functools, heapq, io, itertools, json, math, operator, random, re
import statistics, string, sys
from bisect import *
from collections import *
from copy import *
from functools import *
from heapq import *
from itertools import *
from math import *
from operator import *
from statistics import *
from string import *
from typing import *
pow = __builtins__["pow"] if isinstance(__builtins__, dict) else __builtins__.pow
"""


@dataclass(frozen=True)
class Limits:
    """What one program may use. Times in seconds, sizes in bytes."""

    time_s: float  # wall-clock time of one test; CPU time is limited to the next whole second above
    memory: int  # address space
    output: int  # of stdout in one test
    disk: int  # of its folder, and of each file
    threads: int


@dataclass(frozen=True)
class Confinement:
    """How the server confines programs. mechanism: namespaces, bubblewrap, landlock or none."""

    mechanism: str
    box: str  # the program's folder
    readable: tuple[str, ...]  # for Landlock: what can be read besides,
    listable: tuple[str, ...]  # and where names of files can be
    drop_uid: bool  # become nobody: the namespace maps it


def become_program(job: dict[str, Any], index: int, limits: Limits, confinement: Confinement) -> NoReturn:
    """Confine this process and run test `index` of the job in it. stdin, stdout and stderr are 0, 1, 2 already."""
    code = 1
    try:
        _confine(limits, confinement)
        code = _run(job, index)
    except BaseException:
        _complain()
    finally:
        os._exit(code)


def _confine(limits: Limits, confinement: Confinement) -> None:
    os.chdir(confinement.box)
    cpu_s = int(limits.time_s) + 1
    # The server and its supervisors count too where they share the program's user.
    processes = limits.threads + (0 if confinement.drop_uid else 4)
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
    if confinement.mechanism == "namespaces":  # elsewhere the count includes all that the user runs
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    stack = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, stack))
    if confinement.mechanism == "none":
        return
    if confinement.drop_uid:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.drop_capabilities()
    if confinement.mechanism == "landlock":
        linux.landlock(list(confinement.readable), list(confinement.listable), confinement.box)
    seccomp.restrict(os.getpid(), alone=confinement.mechanism == "namespaces")


def _run(job: dict[str, Any], index: int) -> int:
    """Exit status of the program, as the interpreter would give it."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __file__="main.py")
    sys.modules["__main__"] = main
    sys.argv[:] = ["main.py"]
    sys.set_int_max_str_digits(50_000)  # what judges of such problems allow; Python's own limit is 4300
    site.setquit()  # exit() and quit()
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    status = 0
    try:
        if job["prelude"]:
            exec(PRELUDE, main.__dict__)
            main.__dict__.pop(job["function"], None)  # operator.add is no answer to a problem that asks for `add`
            sys.setrecursionlimit(50_000)
        exec(compile(job["code"], "main.py", "exec"), main.__dict__)
        if job["function"]:
            _call(main, job["function"], job["inputs"][index])
    except SystemExit as request:
        status = _exit_status(request.code)
    except BaseException:
        _complain()
        status = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # wait for threads, as the interpreter does at its end
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        status = status or 120  # what the interpreter gives when it cannot flush
    return status


def _call(main: types.ModuleType, name: str, arguments: list[Any]) -> None:
    """Call the function, or the method of class Solution, and write its value to RESULT_FD as JSON."""
    holder = main.Solution() if hasattr(main, "Solution") else main
    value = getattr(holder, name)(*arguments)
    data = json.dumps(value, default=_plain).encode()
    while data:
        data = data[os.write(RESULT_FD, data) :]


def _plain(value: Any) -> Any:
    """numpy numbers and arrays as JSON knows them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no JSON value")


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _complain() -> None:
    try:
        traceback.print_exc()
        sys.stderr.flush()
    except BaseException:
        return  # the program may have replaced anything
