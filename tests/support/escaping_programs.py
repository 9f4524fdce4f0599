"""Programs that cheat the limits of time and disk, or try to end in another way than their own
doing deserves. Each is bounded in itself. One that gets what it wants prints PAID as its last act
and ends with code 0, as a program with the right answer does.
"""

from __future__ import annotations

from dataclasses import dataclass

PAID = "PAID"
# What a program may come to. A program that was refused a call ends by itself, unpaid.
TIMEOUT = ("timeout",)
REFUSED = ("exit",)
REFUSED_OR_TIMEOUT = ("exit", "timeout")
KILLED = ("died", "exit", "timeout")
DISK = ("exit", "files")
DISK_OR_TIMEOUT = (*DISK, "timeout")
CROWD = ("exit", "processes", "timeout")


@dataclass(frozen=True)
class EscapingProgram:
    """One program. `endings`: the endings of its last run that are no escape."""

    code: str
    endings: tuple[str, ...]
    num_runs: int = 1  # of one session: what a run leaves behind meets the next one


PRELUDE = """
import ctypes, fcntl, mmap, os, resource, select, signal, socket, struct, subprocess, sys
import threading, time

LIBC = ctypes.CDLL(None, use_errno=True)
VFORK, PARENT = 0x4000, 0x8000
LONG_S = 3.0  # three times the limit
ENDLESS_S = 12.0  # more than ten times the limit, after which every run ends
WORD = ctypes.create_string_buffer(8)


def call(number, *arguments):
    return LIBC.syscall(
        ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    )


def clone(flags, end_signal=17):
    return call(56, flags | end_signal, 0, 0, 0, 0)


def doze(seconds=LONG_S):
    LIBC.usleep(int(seconds * 1e6))


def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def spin(seconds=ENDLESS_S):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def leave(code=0):
    LIBC._exit(code)


def get_paid():
    os.write(1, b"PAID\\n")
    leave()


def in_child(act, flags=0):
    pid = clone(flags) if flags else os.fork()
    if pid == 0:
        try:
            act()
        finally:
            leave()
    return pid


def fall_back(*attempts):
    # tries each of them, and goes on whatever it came to
    for attempt in attempts:
        try:
            attempt()
        except Exception:
            pass
"""
ACTS = {
    "sleeps": "doze()",
    "pauses": "LIBC.pause()",
    "stops": "os.kill(os.getpid(), signal.SIGSTOP)",
    "burns": "spin()",
    "executes": "os.execv('/bin/sleep', ['sleep', '3'])",
    "waits_for_a_futex": "call(202, WORD, 0, 0, 0, 0, 0)",
}
FLAGS = {
    "vfork": "VFORK",
    "vfork_of_a_sibling": "VFORK | PARENT",
    "sibling": "PARENT",
}
PROGRAMS: dict[str, EscapingProgram] = {}


def add_program(
    name: str, code: str, endings: tuple[str, ...] = TIMEOUT, num_runs: int = 1
) -> None:
    """Add a program to the table, behind what all of them use."""
    assert name not in PROGRAMS, f"{name} is in the table"
    PROGRAMS[name] = EscapingProgram(PRELUDE + code, endings, num_runs)


# ---- every way to wait for a child, with everything that the child can do ----

for flag_name, flags in FLAGS.items():
    for act_name, act in ACTS.items():
        # a child that executes something else is waited for no longer
        is_waited_for = "VFORK" in flags and act_name != "executes"
        then = "" if is_waited_for else "doze(ENDLESS_S)"
        add_program(
            f"{flag_name}_that_{act_name}", f"in_child(lambda: {act}, {flags})\n{then}\nget_paid()"
        )

# ---- chains of them ----

add_program(
    "chain_of_vforks",
    """
def nest(depth):
    if depth == 0:
        doze()
    else:
        in_child(lambda: nest(depth - 1), VFORK)
nest(6)
get_paid()
""",
)
add_program(
    "chain_of_vforks_of_siblings",
    """
def nest(depth):
    if depth == 0:
        doze()
    else:
        in_child(lambda: nest(depth - 1), VFORK | PARENT)
nest(6)
get_paid()
""",
)
add_program(
    "vforks_in_slices",
    """
end = time.monotonic() + LONG_S
while time.monotonic() < end:
    in_child(lambda: doze(0.05), VFORK)
    os.wait()
get_paid()
""",
)
add_program(
    "siblings_in_slices",
    """
end = time.monotonic() + LONG_S
while time.monotonic() < end:
    in_child(lambda: doze(0.05), VFORK | PARENT)
get_paid()
""",
)
add_program(
    "vfork_by_the_c_library",
    """
if LIBC.vfork() == 0:
    LIBC.sleep(1000)
get_paid()
""",
)
add_program(
    "vfork_without_a_signal",
    """
if clone(VFORK, 0) == 0:
    doze(); leave()
get_paid()
""",
)
add_program(
    "two_branches_of_vforks",
    """
in_child(lambda: in_child(doze, VFORK))
in_child(doze, VFORK | PARENT)
get_paid()
""",
)
add_program(
    "chain_of_forks",
    """
# each lives for a moment only, and the last one is paid
end = time.monotonic() + LONG_S
reads, writes = os.pipe()
if os.fork() == 0:
    while time.monotonic() < end:
        doze(0.01)
        if os.fork():
            leave()
    os.write(writes, b'x'); leave()
os.read(reads, 1)
get_paid()
""",
)
add_program(
    "chain_of_threads",
    """
end = time.monotonic() + LONG_S
while time.monotonic() < end:
    thread = threading.Thread(target=time.sleep, args=(0.01,)); thread.start(); thread.join()
get_paid()
""",
)
add_program(
    "chain_of_executions",
    r"""
text = 'import os, sys, time\n' + 'time.sleep(0.3)\n' + '''
number = int(sys.argv[1])
if number == 0:
    print("PAID")
else:
    words = [sys.executable, "-S", "-c", sys.argv[2], str(number - 1), sys.argv[2]]
    os.execv(sys.executable, words)
'''
os.execv(sys.executable, [sys.executable, '-S', '-c', text, '9', text])
""",
    REFUSED_OR_TIMEOUT,
)

# ---- everything that one process can wait for ----

add_program(
    "sleep",
    """
time.sleep(LONG_S)
get_paid()
""",
)
add_program(
    "pause",
    """
signal.signal(14, lambda *_: None); signal.alarm(3)
signal.pause()
get_paid()
""",
)
add_program(
    "futex_without_end",
    """
call(202, WORD, 0, 0, 0, 0, 0)
get_paid()
""",
)
add_program(
    "deadlock",
    """
lock = threading.Lock(); lock.acquire(); lock.acquire()
get_paid()
""",
)
add_program(
    "select",
    """
select.select([], [], [], LONG_S)
get_paid()
""",
)
add_program(
    "epoll",
    """
select.epoll().poll(LONG_S)
get_paid()
""",
)
add_program(
    "wait_for_a_signal",
    """
signal.pthread_sigmask(signal.SIG_BLOCK, {10}); signal.sigtimedwait({10}, LONG_S)
get_paid()
""",
)
add_program(
    "all_signals_blocked",
    """
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
time.sleep(LONG_S)
get_paid()
""",
)
add_program(
    "signals_ignored",
    """
for number in range(1, 65):
    fall_back(lambda: signal.signal(number, signal.SIG_IGN))
time.sleep(LONG_S)
get_paid()
""",
)
add_program(
    "timer_storm",
    """
signal.signal(14, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
time.sleep(LONG_S)
get_paid()
""",
)
add_program(
    "timer_file",
    """
timer = call(283, 1, 0)
call(286, timer, 0, struct.pack('qqqq', 0, 0, 3, 0), None)
os.read(timer, 8)
get_paid()
""",
)
add_program(
    "sleep_until",
    """
call(230, 1, 1, struct.pack('qq', int(time.monotonic()) + 4, 0), None)
get_paid()
""",
)
add_program(
    "empty_pipe",
    """
reads, writes = os.pipe()
in_child(lambda: (doze(), os.write(writes, b'x')))
os.read(reads, 1)
get_paid()
""",
)
add_program(
    "queue_by_name",
    """
os.mkfifo('queue')
open('queue').read()
get_paid()
""",
)
add_program(
    "silent_socket",
    """
first, second = socket.socketpair()
in_child(lambda: (doze(), os.write(first.fileno(), b'x')))
os.read(second.fileno(), 1)
get_paid()
""",
)
add_program(
    "lock_of_a_file",
    """
file = open('lock', 'w')
in_child(lambda: (fcntl.lockf(file, fcntl.LOCK_EX), doze()))
doze(0.2)
fcntl.lockf(file, fcntl.LOCK_EX)
get_paid()
""",
)
add_program(
    "wait_for_a_child",
    """
in_child(doze)
os.wait()
get_paid()
""",
)
add_program(
    "shell",
    """
os.system('sleep 3')
get_paid()
""",
)
add_program(
    "popen",
    """
subprocess.run(['/bin/sleep', '3'], check=True)
get_paid()
""",
)
add_program(
    "spawn",
    """
pid = os.posix_spawn('/bin/sleep', ['sleep', '3'], {})
os.waitpid(pid, 0)
get_paid()
""",
)
add_program(
    "leader_that_has_ended",
    """
# the first thread is a zombie, and its process lives on
def act():
    doze(); get_paid()
threading.Thread(target=act).start()
call(60, 0)
""",
)
add_program(
    "execution_by_a_thread",
    """
threading.Thread(target=lambda: os.execv('/bin/sh', ['sh', '-c', 'sleep 3; echo PAID'])).start()
time.sleep(1000)
""",
)
add_program(
    "name_that_looks_like_a_state",
    """
LIBC.prctl(15, b') R 1 (', 0, 0, 0)
time.sleep(LONG_S)
get_paid()
""",
)
add_program(
    "sleep_at_the_end",
    """
import atexit
atexit.register(time.sleep, LONG_S)
print('PAID')
""",
)
add_program(
    "thread_at_the_end",
    """
threading.Thread(target=time.sleep, args=(LONG_S,)).start()
print('PAID')
""",
)
add_program(
    "slow_flush",
    """
class Slow:
    closed = False
    def write(self, text): os.write(1, text.encode())
    def flush(self): time.sleep(LONG_S)
sys.stdout = Slow()
print('PAID')
""",
)

# ---- stopping whoever counts ----

add_program(
    "stop_itself",
    """
os.kill(os.getpid(), signal.SIGSTOP)
get_paid()
""",
)
add_program(
    "terminal_stop",
    """
os.kill(os.getpid(), signal.SIGTSTP)
time.sleep(LONG_S)
get_paid()
""",
)
add_program(
    "stopped_and_continued",
    """
me = os.getpid()
in_child(lambda: (doze(), os.kill(me, signal.SIGCONT)))
os.kill(me, signal.SIGSTOP)
get_paid()
""",
)
add_program(
    "stopped_in_turns",
    """
me = os.getpid()
def toggle():
    while True:
        os.kill(me, signal.SIGSTOP); doze(0.02); os.kill(me, signal.SIGCONT); doze(0.001)
in_child(toggle)
time.sleep(LONG_S)
get_paid()
""",
)
add_program(
    "stop_the_harness",
    """
fall_back(lambda: os.kill(os.getppid(), signal.SIGSTOP))
time.sleep(LONG_S)
get_paid()
""",
)
add_program(
    "stop_the_harness_and_end",
    r"""
os.write(1, b'PAID\n')
try:
    os.kill(os.getppid(), signal.SIGSTOP)
except OSError:
    leave(1)
if os.getppid() == 1:
    leave(1)  # process 1 of a namespace takes no signal from inside
""",
    REFUSED_OR_TIMEOUT,
)
add_program(
    "stop_the_harness_for_a_while",
    """
harness = os.getppid()
in_child(lambda: (doze(), os.kill(harness, signal.SIGCONT)))
fall_back(lambda: os.kill(harness, signal.SIGSTOP))
doze()
get_paid()
""",
)
add_program(
    "stop_all",
    """
fall_back(lambda: os.kill(-1, signal.SIGSTOP))
time.sleep(LONG_S)
get_paid()
""",
)
add_program(
    "stop_groups",
    """
for group in {os.getpgid(os.getppid()), os.getsid(0), os.getpgrp()}:
    fall_back(lambda: os.killpg(group, signal.SIGSTOP))
time.sleep(LONG_S)
get_paid()
""",
)
add_program(
    "stop_every_number",
    """
me = os.getpid()
for pid in range(2, 65536):
    if pid != me:
        LIBC.kill(pid, signal.SIGSTOP)
time.sleep(LONG_S)
get_paid()
""",
)
add_program(
    "kill_the_harness",
    """
fall_back(lambda: os.kill(os.getppid(), signal.SIGKILL))
time.sleep(LONG_S)
get_paid()
""",
    KILLED,
)
add_program(
    "kill_all",
    """
fall_back(lambda: os.kill(-1, signal.SIGKILL))
time.sleep(LONG_S)
get_paid()
""",
    KILLED,
)
add_program(
    "kill_every_number",
    """
me = os.getpid()
for pid in range(2, 65536):
    if pid != me:
        LIBC.kill(pid, signal.SIGKILL)
time.sleep(LONG_S)
get_paid()
""",
    KILLED,
)
add_program(
    "sessions_of_daemons",
    """
def daemon():
    os.setsid(); in_child(doze); leave()
for _ in range(5):
    in_child(daemon)
time.sleep(LONG_S)
get_paid()
""",
)
add_program(
    "traced_by_its_parent",
    """
call(101, 0, 0, 0, 0)
os.kill(os.getpid(), signal.SIGSTOP)
get_paid()
""",
)
add_program(
    "stop_by_tracing",
    """
child = in_child(doze)
for pid in (child, os.getppid()):
    call(101, 0x4206, pid, 0, 0); call(101, 0x4207, pid, 0, 0)
time.sleep(LONG_S)
get_paid()
""",
)
add_program(
    "stop_of_the_next_run",
    """
harness = os.getppid()
def wait_and_stop():
    os.setsid(); doze(0.3)
    fall_back(lambda: os.kill(harness, signal.SIGSTOP))
in_child(wait_and_stop)
if os.path.exists('ran'):
    time.sleep(LONG_S)
    get_paid()
open('ran', 'w').close()
""",
    num_runs=2,
)
add_program(
    "kill_of_the_next_run",
    """
harness = os.getppid()
def wait_and_kill():
    os.setsid(); doze(0.3)
    fall_back(lambda: os.kill(harness, signal.SIGKILL))
in_child(wait_and_kill)
if os.path.exists('ran'):
    time.sleep(LONG_S)
    get_paid()
open('ran', 'w').close()
""",
    KILLED,
    num_runs=2,
)

# ---- CPU time that belongs to nobody ----

add_program(
    "burn",
    """
burn(LONG_S)
get_paid()
""",
)
add_program(
    "children_reaped",
    """
for _ in range(30):
    in_child(lambda: burn(0.1)); os.wait()
get_paid()
""",
)
add_program(
    "children_of_children_reaped",
    """
def act():
    in_child(lambda: burn(0.1)); os.wait()
for _ in range(30):
    in_child(act); os.wait()
get_paid()
""",
)
add_program(
    "children_never_reaped",
    """
for _ in range(20):
    in_child(lambda: burn(0.2))
    doze(0.03)
for _ in range(20):
    doze(0.1)
get_paid()
""",
    CROWD,
)
add_program(
    "orphans_in_turn",
    """
def act():
    in_child(lambda: burn(0.1)); leave()
for _ in range(40):
    in_child(act); os.wait(); doze(0.05)
get_paid()
""",
    CROWD,
)
add_program(
    "orphans_of_a_subreaper",
    """
LIBC.prctl(36, 1, 0, 0, 0)
def act():
    in_child(lambda: burn(0.1)); leave()
for _ in range(40):
    in_child(act); os.wait(); os.wait()
get_paid()
""",
)
add_program(
    "children_ignored",
    """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(40):
    in_child(lambda: burn(0.1)); doze(0.02)
get_paid()
""",
    REFUSED,
)
add_program(
    "children_ignored_by_hand",
    """
action = ctypes.create_string_buffer(struct.pack('QQQQ', 1, 0, 0, 0))
if call(13, 17, action, None, 8) < 0:
    leave(1)
for _ in range(40):
    in_child(lambda: burn(0.1)); doze(0.02)
get_paid()
""",
    REFUSED,
)
add_program(
    "children_not_waited_for",
    """
# SA_NOCLDWAIT, in an action whose address has no lower half
mapped = LIBC.mmap
mapped.restype = ctypes.c_void_p
place = mapped(ctypes.c_void_p(1 << 32), 4096, 3, 0x100022, -1, 0)
ctypes.memmove(place, struct.pack('QQQQ', 0, 2, 0, 0), 32)
if call(13, 17, ctypes.c_void_p(place), None, 8) < 0:
    leave(1)
for _ in range(40):
    in_child(lambda: burn(0.1)); doze(0.02)
get_paid()
""",
    REFUSED,
)
add_program(
    "children_without_a_signal",
    """
for _ in range(25):
    if clone(0, 0) == 0:
        burn(0.2); leave()
    doze(0.03)
for _ in range(10):
    doze(0.1)
get_paid()
""",
    CROWD,
)
add_program(
    "two_processors",
    """
in_child(lambda: burn(0.9))
burn(0.9)
os.wait()
get_paid()
""",
)
add_program(
    "threads_that_have_ended",
    """
for _ in range(20):
    thread = threading.Thread(target=burn, args=(0.15,)); thread.start(); thread.join()
get_paid()
""",
)
add_program(
    "time_of_the_kernel",
    """
while True:
    os.urandom(1 << 25)
""",
)
add_program(
    "one_long_call",
    """
print(len(str(10**4_000_000 // 7)))
get_paid()
""",
)

# ---- waits that are bought ----

add_program(
    "crowd_of_spinners",
    """
for _ in range(20):
    in_child(spin)
time.sleep(ENDLESS_S)
get_paid()
""",
    CROWD,
)
add_program(
    "crowd_of_threads",
    """
for _ in range(20):
    threading.Thread(target=spin, daemon=True).start()
time.sleep(ENDLESS_S)
get_paid()
""",
    CROWD,
)
add_program(
    "crowd_of_sleepers",
    """
def nap():
    end = time.monotonic() + ENDLESS_S
    while time.monotonic() < end:
        time.sleep(1e-4)
for _ in range(20):
    in_child(nap)
time.sleep(ENDLESS_S)
get_paid()
""",
    CROWD,
)
add_program(
    "yielding",
    """
def act():
    end = time.monotonic() + ENDLESS_S
    while time.monotonic() < end:
        os.sched_yield()
in_child(act); in_child(act)
time.sleep(ENDLESS_S)
get_paid()
""",
)
add_program(
    "low_priority",
    """
fall_back(lambda: os.nice(19), lambda: os.sched_setscheduler(0, 5, os.sched_param(0)),
          lambda: open('/proc/self/autogroup', 'w').write('19'))
in_child(spin)
time.sleep(ENDLESS_S)
get_paid()
""",
)
add_program(
    "one_processor",
    """
fall_back(lambda: os.sched_setaffinity(0, {0}))
for _ in range(8):
    in_child(spin)
time.sleep(ENDLESS_S)
get_paid()
""",
)

# ---- other clocks ----

add_program(
    "clocks_replaced",
    """
time.monotonic = time.time = lambda: 0.0
for module in list(sys.modules.values()):
    if hasattr(module, 'monotonic'):
        module.monotonic = lambda: 0.0
time.sleep(LONG_S)
get_paid()
""",
)
add_program(
    "clock_of_the_machine",
    """
fall_back(lambda: time.clock_settime(time.CLOCK_REALTIME, time.time() - 100))
call(97, 0x80); call(272, 0x80)
fall_back(lambda: open('/proc/self/timens_offsets', 'w').write('monotonic -1000 0'))
time.sleep(LONG_S)
get_paid()
""",
)
add_program(
    "limits_raised",
    """
fall_back(lambda: resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000)),
          lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1)))
burn(LONG_S)
get_paid()
""",
)
add_program(
    "not_to_be_killed",
    """
fall_back(lambda: open('/proc/self/oom_score_adj', 'w').write('-1000'))
time.sleep(LONG_S)
get_paid()
""",
)
add_program(
    "answer_of_its_own",
    r"""
answer = b'{"code":0,"stdout":"PAID","stderr":"","value":null,"took_s":0,"cpu_s":0}\n'
for number in range(3, 300):
    fall_back(lambda: os.write(number, answer))
time.sleep(LONG_S)
""",
)
add_program(
    "crashes",
    """
for _ in range(200):
    in_child(lambda: ctypes.string_at(1)); os.wait()
time.sleep(LONG_S)
get_paid()
""",
)
add_program(
    "disk_without_rest",
    """
end = time.monotonic() + LONG_S
with open('file', 'wb') as file:
    while time.monotonic() < end:
        file.seek(0); file.write(bytes(1 << 22)); file.flush(); os.fsync(file.fileno())
get_paid()
""",
)

# ---- disk: 64 MiB are allowed ----

FILL = """
def fill(path, mebibytes):
    file = os.open(path, os.O_CREAT | os.O_RDWR)
    for _ in range(mebibytes):
        os.write(file, bytes(1 << 20))
    return file


"""


def add_disk_program(name: str, code: str, endings: tuple[str, ...] = DISK_OR_TIMEOUT) -> None:
    """Add a program that is paid if it has had more than the limit on disk for 0.3 s."""
    add_program(name, f"{FILL}{code}\ndoze(0.3)\nget_paid()", endings)


add_disk_program(
    "disk_below_long_paths",
    """
for _ in range(18):
    os.mkdir('d' * 255); os.chdir('d' * 255)
for i in range(6):
    os.close(fill(f'f{i}', 40))
""",
)
add_disk_program(
    "disk_at_the_end_of_the_limit_of_depth",
    """
for _ in range(48):
    os.mkdir('d' * 255); os.chdir('d' * 255)
for i in range(6):
    os.close(fill(f'f{i}', 40))
""",
)
add_disk_program(
    "disk_below_many_folders",
    """
for _ in range(3000):
    os.mkdir('d'); os.chdir('d')
""",
)
add_disk_program(
    "disk_in_folders_put_together",
    """
os.mkdir('top')
for i in range(4):
    os.makedirs('/'.join([f'part{i}'] + ['d' * 255] * 12))
    os.close(fill('/'.join([f'part{i}'] + ['d' * 255] * 12 + ['f']), 40))
place = os.open('top', os.O_RDONLY)
for i in range(4):
    os.rename(f'part{i}', f'n{i}', dst_dir_fd=place)
    place = os.open(f'n{i}', os.O_RDONLY, dir_fd=place)
""",
)
add_disk_program(
    "disk_in_many_files",
    """
for i in range(900):
    os.close(fill(f'f{i}', 1))
""",
)
add_disk_program(
    "disk_at_once",
    """
for i in range(8):
    os.close(fill(f'f{i}', 60))
get_paid()
""",
)
add_disk_program(
    "disk_behind_a_closed_folder",
    """
os.umask(0)
os.mkdir('closed', 0o300)
for i in range(6):
    os.close(fill(f'closed/f{i}', 40))
""",
)
add_disk_program(
    "disk_behind_a_mask",
    """
os.umask(0o444)
os.mkdir('closed')
for i in range(6):
    os.close(fill(f'closed/f{i}', 40))
""",
)
add_disk_program(
    "disk_behind_a_moving_folder",
    """
os.mkdir('a'); os.mkdir('b'); os.mkdir('a/d')
for i in range(3):
    os.close(fill(f'a/d/f{i}', 40))
end = time.monotonic() + 0.5
while time.monotonic() < end:
    os.rename('a/d', 'b/d'); os.rename('b/d', 'a/d')
""",
)
add_disk_program(
    "disk_in_files_without_names",
    """
files = []
for i in range(12):
    files.append(fill('f', 40)); os.unlink('f')
""",
)
add_disk_program(
    "disk_in_files_that_never_had_names",
    """
for i in range(12):
    file = os.open('.', os.O_TMPFILE | os.O_RDWR)
    for _ in range(40):
        os.write(file, bytes(1 << 20))
""",
)
add_disk_program(
    "disk_in_files_of_children",
    """
def act():
    file = fill(f'f{os.getpid()}', 40); os.unlink(f'f{os.getpid()}'); doze()
for _ in range(8):
    in_child(act)
doze(0.4)
""",
)
add_disk_program(
    "disk_in_maps_of_files",
    """
for i in range(6):
    file = fill('f', 40); os.unlink('f')
    LIBC.mmap.restype = ctypes.c_void_p
    LIBC.mmap(None, 4096, 1, 1, file, 0)
    os.close(file)
""",
)
add_disk_program(
    "disk_hidden_from_the_guardian",
    """
LIBC.prctl(4, 0, 0, 0, 0)
files = []
for i in range(12):
    files.append(fill('f', 40)); os.unlink('f')
""",
)
add_disk_program(
    "disk_by_maps",
    """
maps = []
for i in range(6):
    file = os.open(f'f{i}', os.O_CREAT | os.O_RDWR); os.ftruncate(file, 40 << 20)
    maps.append(mmap.mmap(file, 40 << 20))
    for place in range(0, 40 << 20, 4096):
        maps[-1][place] = 1
""",
    (*DISK_OR_TIMEOUT, "memory"),
)
add_disk_program(
    "disk_by_outputs",
    """
for number in (0, 1, 2, 3):
    for _ in range(60):
        os.write(number, bytes(1 << 20))
""",
)
add_disk_program(
    "disk_by_links",
    """
for i in range(8000):
    os.symlink('x' * 4000, f'l{i}')
""",
)
add_disk_program(
    "disk_by_attributes",
    """
for i in range(900):
    open(f'f{i}', 'w').close()
    for name in 'abcd':
        os.setxattr(f'f{i}', f'user.{name}', bytes(60000))
""",
)
add_disk_program(
    "disk_elsewhere",
    """
num_written = 0
for place in ('/dev/shm', '/var/tmp', '/run', '/', '/proc', '/tmp/..', '/dev'):
    try:
        os.close(fill(place + '/escaped', 40)); num_written += 1
    except OSError:
        pass
if num_written == 0:
    leave(1)
""",
)
