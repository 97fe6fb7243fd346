"""The inside of a sandboxed process: give up every right, then become the generated program. Standard library only.

It runs in a fresh fork of the sandbox server. The program finds what a script finds: `__main__`, standard streams,
argv, `exit`, an empty folder to work in. What it must not find is not in this process: expected outputs never enter it.
"""

import atexit
import builtins
import json
import os
import site
import sys
import threading
import traceback
import types
from typing import Any, NoReturn

from quads.sandbox.confinement import Confinement, Limits, confine

RESULT_FD = 3  # where the value of a called function goes, apart from what the program prints

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


def become_program(job: dict[str, Any], index: int, limits: Limits, confinement: Confinement, box: str) -> NoReturn:
    """Confine this process and run test `index` of the job in it. stdin, stdout and stderr are 0, 1, 2 already.

    box: the program's own empty folder.
    """
    code = 1
    try:
        confine(limits, confinement, box)
        code = _run(job, index)
    except BaseException:
        _complain()
    finally:
        os._exit(code)


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
