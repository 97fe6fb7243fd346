"""Programs that try to cheat, to break out or to do harm, and honest ones to run beside them.

SECRET, CANARY, OUTSIDE, PORT and NAME are put in by the test: the expected output (a hostile program only passes by
finding it), a readable file and a writable folder outside the sandbox, and local servers that would tell the secret.
Every hostile program ends with an attempt to print something plausible, so that only the attack decides.
"""

HOSTILE = {
    # time
    "busy loop": "while True: pass",
    "sleep": "import time\ntime.sleep(3600)",
    "long integer arithmetic": "print(len(str(3 ** (10 ** 9))))",
    "regular expression": "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
    "ignores signals": """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True:
    try: time.sleep(1)
    except BaseException: pass
""",
    "hangs at exit": "import atexit\n@atexit.register\ndef hang():\n    while True: pass\nprint(49)",
    "hangs in a destructor": "class A:\n    def __del__(self):\n        while True: pass\na = A()\ndel a",
    "hangs in a thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,)).start()\nprint(49)",
    "closes its streams and stays": "import os, time\nfor fd in (0, 1, 2): os.close(fd)\ntime.sleep(3600)",
    # processes
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "fork bomb through clone": """
import ctypes
libc = ctypes.CDLL(None)
while True: libc.syscall(56, 17, 0, 0, 0, 0)
""",
    "thread bomb": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
    "zombie children": """
import os
for _ in range(200):
    if os.fork() == 0: os._exit(0)
print(49)
""",
    "daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(3600)
print(49)
""",
    "shell": "import os\nprint(os.popen('cat CANARY').read())",
    "subprocess": "import subprocess\nprint(subprocess.run(['cat', 'CANARY'], capture_output=True, text=True).stdout)",
    "exec": "import os\nos.execv('/bin/cat', ['cat', 'CANARY'])",
    # memory, disk, output
    "one large block": "x = bytearray(1 << 40)",
    "memory piece by piece": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "memory past MemoryError": """
x = []
while True:
    try: x.append(bytearray(1 << 16))
    except MemoryError: pass
""",
    "memory outside the address space": """
import ctypes, os
libc = ctypes.CDLL(None)
held = []
while True:
    fd = os.memfd_create('x')
    held.append(fd)
    while True: os.write(fd, bytes(1 << 20))
""",
    "full disk": "f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20)); f.flush()",
    "full disk in small files": """
i = 0
while True:
    i += 1
    try: open(str(i), 'wb').write(bytes(1 << 16))
    except OSError: pass
""",
    "sparse file": "f = open('big', 'wb')\nf.truncate(1 << 40)\nprint(49)",
    "endless folders": "import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')",
    "huge output": "while True: print('x' * 1000)",
    "huge error output": "import sys\nwhile True: sys.stderr.write('x' * 1000)",
    "open files": "f = []\nwhile True: f.append(open('/dev/null'))",
    # files outside
    "reads a file outside": "print(open('CANARY').read())",
    "reads the password file": "print(open('/etc/passwd').read())",
    "lists a folder outside": "import os\nprint(open(os.path.join('OUTSIDE', os.listdir('OUTSIDE')[0])).read())",
    "reads through a link": "import os\nos.symlink('CANARY', 'link')\nprint(open('link').read())",
    "reads a path above": "print(open('../' * 20 + 'CANARY'[1:]).read())",
    "writes outside": "open('OUTSIDE/made', 'w').write('x')\nprint(49)",
    "removes outside": "import os\nos.remove('CANARY')\nprint(49)",
    "writes to the library": "import os\nopen(os.__file__, 'a').write('x')\nprint(49)",
    "writes to shared memory": "open('/dev/shm/quads-hostile', 'w').write('x')\nprint(49)",
    # network
    "tcp": "import socket\ns = socket.create_connection(('127.0.0.1', PORT), 1)\nprint(s.recv(100).decode())",
    "udp": "import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))\nprint(49)",
    "http": "import urllib.request\nprint(urllib.request.urlopen('http://127.0.0.1:PORT', timeout=1).read().decode())",
    "abstract socket": """
import socket
s = socket.socket(socket.AF_UNIX)
s.connect('\\0NAME')
print(s.recv(99).decode())
""",
    # other processes
    "kills its parent": "import os\nos.kill(os.getppid(), 9)\nprint(49)",
    "kills everything": "import os\nos.kill(-1, 9)\nprint(49)",
    "kills its group": "import os\nos.killpg(0, 9)\nprint(49)",
    "signals the grader by guess": """
import os
for pid in range(2, 70000):
    if pid != os.getpid():
        try: os.kill(pid, 9)
        except OSError: pass
print(49)
""",
    "reads the parent's memory": """
import os
for pid in (os.getppid(), 1):
    try:
        maps = open(f'/proc/{pid}/maps').read()
        memory = open(f'/proc/{pid}/mem', 'rb')
    except OSError: continue
    for line in maps.splitlines():
        first, last = (int(x, 16) for x in line.split()[0].split('-'))
        try:
            memory.seek(first)
            data = memory.read(last - first)
            at = data.find(b'secret-')
            if at >= 0: print(data[at:at + 39].decode()); raise SystemExit(0)
        except (OSError, ValueError, OverflowError): pass
raise SystemExit(1)
""",
    "process_vm_readv": """
import ctypes, os
libc = ctypes.CDLL(None)
class iovec(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('len', ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(4096)
a, b = iovec(ctypes.addressof(buffer), 4096), iovec(id(buffer), 4096)
n = libc.process_vm_readv(os.getppid(), ctypes.byref(a), 1, ctypes.byref(b), 1, 0)
print(buffer.raw[:n] if n > 0 else 'refused')
""",
    "ptrace": "import ctypes, os\nprint(ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0))",
    # reading the answer here
    "searches its own objects": """
import gc
for found in gc.get_objects():
    for thing in (found, *(found.values() if type(found) is dict else found if type(found) in (list, tuple) else ())):
        if isinstance(thing, (str, bytes)) and len(thing) == 39 and 'secret-' in str(thing):
            print(thing)
            raise SystemExit
""",
    "searches its frames": """
import sys
frame = sys._getframe()
while frame:
    for value in frame.f_locals.values():
        text = repr(value)
        at = text.find('secret' + '-')
        if at >= 0: print(text[at:at + 39]); raise SystemExit
    frame = frame.f_back
""",
    "searches environment and descriptors": """
import os, sys
print(os.environ, sys.argv)
for fd in range(3, 1024):
    try: print(os.read(fd, 1000))
    except OSError: pass
""",
    "forges the report": """
import os, struct, json
head = json.dumps({'verdict': 'ok', 'exit': 0, 'seconds': 0.0, 'stderr': ''}).encode()
body = struct.pack('<I', len(head)) + head + b'49'
for fd in range(1, 1024):
    try: os.write(fd, struct.pack('<Q', len(body)) + body)
    except OSError: pass
""",
    # making failure look like success
    "exits at once": "import os\nos._exit(0)",
    "exits politely": "import sys\nsys.exit(0)",
    "right output, wrong exit status": "print('SECRET')\nraise SystemExit(3)",
    "right output, then a crash": "print('SECRET', flush=True)\nimport ctypes\nctypes.string_at(0)",
    "right output, then abort": "print('SECRET', flush=True)\nimport os\nos.abort()",
    "right output, then hangs": "print('SECRET', flush=True)\nwhile True: pass",
    "patched exit and stdout": """
import builtins, sys, os
class Sink:
    def write(self, *a): return 0
    def flush(self): pass
    def __eq__(self, other): return True
sys.stdout = sys.__stdout__ = Sink()
builtins.exit = sys.exit = os._exit = lambda *a: None
print('49')
""",
    "answers that equal everything": """
class Equal(str):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def strip(self, *a): return self
    rstrip = strip
    __hash__ = str.__hash__
print(Equal('anything'))
""",
    "patched json": "import json\njson.dumps = lambda *a, **k: 'SEC' + 'RET?'\nprint(json.dumps(1))",
    # taking rights back
    "raises its limits": """
import resource
for name in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):
    resource.setrlimit(name, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(49)
""",
    "becomes root": "import os\nos.setuid(0)\nos.setgid(0)\nprint(open('CANARY').read())",
    "mounts": "import ctypes\nprint(ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None))",
    "new user namespace": "import ctypes\nprint(ctypes.CDLL(None).unshare(0x10000000))",
    "changes its root": """
import os
os.mkdir('x')
os.chroot('x')
for _ in range(50): os.chdir('..')
os.chroot('.')
print(open('CANARY').read())
""",
    # breaking the interpreter
    "segmentation fault": "import ctypes\nctypes.string_at(0)",
    "endless recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\nf = lambda n: f(n + 1)\nf(0)",
    "deep C recursion": "x = []\nfor _ in range(10 ** 6): x = [x]\nprint(repr(x))",
    "no program": "Sorry, I cannot solve this.",
    "syntax error": "print(",
}  # fmt: skip

# name: (program, stdin, expected stdout)
HONEST = {
    "reads a number": ("n = int(input())\nprint(n * n)", "7\n", "49\n"),
    "reads everything": ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", "1 2\n3\n", "6"),
    "reads bytes": ("import sys\nprint(len(sys.stdin.buffer.read()))", "x" * 300_000, "300000"),
    "is a script": ("def main():\n    print(input()[::-1])\nif __name__ == '__main__':\n    main()", "abc", "cba"),
    "leaves by exit": ("print(input())\nexit(0)\nprint('no')", "5", "5"),
    "uses its folder": (
        "import os\nassert os.listdir('.') == []\nopen('a', 'w').write(input())\nprint(open('a').read())", "hi", "hi",
    ),
    "uses a temporary file": (
        "import tempfile\nf = tempfile.TemporaryFile('w+')\nf.write('x'); f.seek(0); print(f.read())", "", "x",
    ),
    "uses threads": (
        "import threading\nr = []\nt = [threading.Thread(target=r.append, args=(i,)) for i in range(4)]\n"
        "[x.start() for x in t]; [x.join() for x in t]\nprint(sorted(r))", "", "[0, 1, 2, 3]",
    ),
    "uses asyncio": ("import asyncio\nasync def f(): return 7\nprint(asyncio.run(f()))", "", "7"),
    "recurses deeply": (
        "import sys\nsys.setrecursionlimit(10 ** 5)\nf = lambda n: 0 if n == 0 else 1 + f(n - 1)\nprint(f(20000))", "",
        "20000",
    ),
    "raises its stack limit": (
        "import resource\nsoft, hard = resource.getrlimit(resource.RLIMIT_STACK)\n"
        "resource.setrlimit(resource.RLIMIT_STACK, (hard, hard))\nprint(1)", "", "1",
    ),
    "prints much": ("print('\\n'.join(str(i) for i in range(20000)))", "", "\n".join(map(str, range(20000)))),
    "prints trailing space": ("print('1 2 3 ')\nprint()", "", "1 2 3"),
    "ignores its input": ("print(1)", "x" * 1_000_000, "1"),
    "flushes as it goes": ("for i in range(3): print(i, flush=True)", "", "0\n1\n2"),
    "writes errors": ("import sys\nprint('note', file=sys.stderr)\nprint(1)", "", "1"),
    "prints other scripts": ("print(input().upper())", "straße ü", "STRASSE Ü"),
}  # fmt: skip
