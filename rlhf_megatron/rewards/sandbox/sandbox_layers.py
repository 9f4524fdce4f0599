"""The kernel's layers around an untrusted program: namespaces, limits, Landlock,
capabilities, seccomp.

Standard library and ctypes only; none of them needs a privilege. A process takes them in this
order: namespaces, view, limits, `forbid_new_privileges`, Landlock, capabilities, seccomp. Linux on
x86-64 and aarch64.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import signal
import struct
from collections.abc import Sequence
from dataclasses import dataclass

LIBC = ctypes.CDLL(None, use_errno=True)
NAMESPACES = "namespaces"
LANDLOCK = "landlock"
SECCOMP = "seccomp"
LAYERS = (NAMESPACES, LANDLOCK, SECCOMP)  # limits and the guardian's clock are always there

PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
NEW_NAMESPACES = (
    0x10000000 | 0x20000000 | 0x40000000 | 0x20000 | 0x08000000 | 0x04000000 | 0x02000000
)
IS_ARM = platform.machine() in ("aarch64", "arm64")
AUDIT_ARCH = 0xC00000B7 if IS_ARM else 0xC000003E

# A limit of 0 bytes counts for files only. Where the kernel gives core dumps to a program, as to
# systemd-coredump, it takes a limit of 1 byte for "none".
NO_CORE_DUMP = 1

LAST_KNOWN = 466  # what a newer kernel adds is not there for the program

INSIDE = 1000  # user and group of a program in its user namespace

MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
AT_FDCWD = -100
AT_RECURSIVE = 0x8000
READ_ONLY = 1 | 2 | 4

# a folder that every system has; the namespace covers it by a file system of its own at once
STAGE = "/tmp"
# on that file system: no folder of the machine bears the name
NEW_ROOT = f"{STAGE}/root-of-sandbox"

EXECUTE = 1
WRITE = 2
READ = 4
READ_FOLDER = 8
TRUNCATE = 1 << 14

ALLOW = 0x7FFF0000
ERROR = 0x00050000
KILL = 0x80000000
LOAD = 0x20
AND = 0x54
EQUAL = 0x15
AT_LEAST = 0x35
ANY_BIT = 0x45
RETURN = 0x06
# offsets of what a filter reads
NUMBER = 0
ARCHITECTURE = 4
FIRST = 16
SECOND = 24
SECOND_HIGH = 28  # the upper half of the argument
THIRD = 32
FOURTH = 40
ALL_BITS = 0xFFFFFFFF
NAMESPACE_FLAGS = 0x7E020000
SHARED_ANONYMOUS = 0x21
# Others reach flags of files that are open for reading, leases on them, input of terminals, and
# signals to owners.
IOCTLS = (
    0x5401,
    0x5413,
    0x541B,
    0x5421,
    0x5450,
    0x5451,
)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
FCNTLS = (
    *range(8),
    36,
    37,
    38,
    1030,
    1032,
)  # descriptors, their flags, locks, F_DUPFD_CLOEXEC, F_GETPIPE_SZ
# of the flags of open
TRUNCATES = 0x200
ACCESS = 3
# O_DSYNC, which is in O_SYNC, and O_DIRECT
WRITES_THROUGH = 0x1000 | (0x10000 if IS_ARM else 0x4000)


@dataclass(frozen=True)
class SandboxLimits:
    """The resources that one program may use."""

    # address space of a process, and resident memory of all its processes together
    memory_mib: int = 1024
    cpu_s: int = 10  # of a process
    processes: int = 32  # and threads, of one program
    file_mib: int = 64  # of one file, and of its folder
    files: int = 1000  # in its folder
    output_bytes: int = 1 << 20  # that are read of what it prints


def raise_on_error(result: int, action: str) -> int:
    """Return the result of a C call. Raise OSError of errno, with `action` in the message, where
    the result is negative.
    """
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{action}: {os.strerror(ctypes.get_errno())}")
    return result


def call_syscall_unchecked(syscall_number: int, *arguments: object) -> int:
    """Call a system call and return its raw result, -1 where the call fails; pass the result to
    `raise_on_error` for an OSError. Integers become C longs.
    """
    return int(
        LIBC.syscall(
            ctypes.c_long(syscall_number),
            *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments],
        )
    )


def invoke_prctl(*arguments: int) -> int:
    """Call prctl with the arguments, filled up with zeros, and return its result. Raise OSError
    where the call fails.
    """
    return raise_on_error(
        LIBC.prctl(*[ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:5]]), "prctl"
    )


def parse_syscall_numbers(table: str) -> tuple[int, ...]:
    """Return this machine's numbers for a table of entries "name x86-64/aarch64", separated by
    commas. One number counts for both; "-" means that aarch64 has no such call.
    """
    found = []
    for entry in table.replace("\n", " ").split(","):
        on_x86, _, on_arm = entry.split()[1].partition("/")
        number = (on_arm or on_x86) if IS_ARM else on_x86
        found += [int(number)] if number != "-" else []
    return tuple(found)


DENIED = parse_syscall_numbers("""
    socket 41/198, connect 42/203, bind 49/200, listen 50/201, accept 43/202, accept4 288/242, \
sendto 44/206,
    ptrace 101/117, process_vm_readv 310/270, process_vm_writev 311/271, unshare 272/97, setns \
308/268,
    mount 165/40, umount2 166/39, pivot_root 155/41, chroot 161/51, bpf 321/280, perf_event_open \
298/241,
    keyctl 250/219, add_key 248/217, request_key 249/218, userfaultfd 323/282, memfd_create 319/279,
    kexec_load 246/104, kexec_file 320/294, init_module 175/105, finit_module 313/273, \
delete_module 176/106,
    reboot 169/142, swapon 167/224, swapoff 168/225, open_by_handle_at 304/265, name_to_handle_at \
303/264,
    personality 135/92, quotactl 179/60, acct 163/89, settimeofday 164/170, clock_settime 227/112, \
adjtimex 159/171,
    clock_adjtime 305/266, sethostname 170/161, setdomainname 171/162, shmget 29/194, msgget \
68/186, semget 64/190,
    shmat 30/196, shmctl 31/195, semop 65/193, semctl 66/191, semtimedop 220/192, msgsnd 69/189, \
msgrcv 70/188,
    msgctl 71/187, mq_open 240/180, mq_unlink 241/181, sendmsg 46/211, sendmmsg 307/269, \
inotify_init 253/-,
    inotify_init1 294/26, flock 73/32, modify_ldt 154/-, quotactl_fd 443,
    iopl 172/-, ioperm 173/-, syslog 103/116, lookup_dcookie 212/18, vhangup 153/58, fanotify_init \
300/262,
    move_pages 279/239, migrate_pages 256/238, mbind 237/235, kcmp 312/272, sched_setscheduler \
144/119,
    sched_setattr 314/274, setpriority 141/140, ioprio_set 251/30, io_setup 206/0, \
pidfd_send_signal 424,
    io_uring_setup 425, io_uring_enter 426, io_uring_register 427, open_tree 428, move_mount 429, \
fsopen 430,
    fsconfig 431, fsmount 432, pidfd_open 434, pidfd_getfd 438, mount_setattr 442, memfd_secret 447,
    sched_setaffinity 203/122, sched_setparam 142/118, process_madvise 440, process_mrelease 448
""")
# Landlock knows no right for them (for truncate from version 3 on; of openat2 no filter can read
# the flags), so without a mount namespace they would reach all files of the user.
METADATA = parse_syscall_numbers("""
    chmod 90/-, fchmod 91/52, fchmodat 268/53, fchmodat2 452, chown 92/-, lchown 94/-, fchown 93/55,
    fchownat 260/54, utime 132/-, utimes 235/-, futimesat 261/-, utimensat 280/88, setxattr 188/5, \
lsetxattr 189/6,
    fsetxattr 190/7, removexattr 197/14, lremovexattr 198/15, fremovexattr 199/16, setxattrat 463,
    removexattrat 466, truncate 76/45, openat2 437, fallocate 285/47
""")
SIGNALS = parse_syscall_numbers(
    "kill 62/129, tkill 200/130, tgkill 234/131, rt_sigqueueinfo 129/138, rt_tgsigqueueinfo 297/240"
)
# Of all disks of the machine, or waits that count as the machine's own: they succeed
# and do nothing.
SYNCS = parse_syscall_numbers(
    "sync 162/81, syncfs 306/267, fsync 74/82, fdatasync 75/83, msync 26/227,"
    " sync_file_range 277/84"
)


def find_syscall_number(name: str) -> int:
    """Return this machine's number of one of the four system calls that this module names."""
    known = {
        "capset": (126, 91),
        "seccomp": (317, 277),
        "pivot_root": (155, 41),
        "mount_setattr": (442, 442),
    }
    return known[name][IS_ARM]


def unshare_namespaces() -> None:
    """Move this process into new user, mount, network, IPC, UTS, cgroup and (for its next children)
    PID namespaces.
    """
    raise_on_error(LIBC.unshare(NEW_NAMESPACES), "unshare")


def map_namespace_users(pid: int) -> None:
    """Write the user and group maps of the process `pid`, which is in a new user namespace. Its
    parent must call it.

    An ordinary user becomes INSIDE there. Root stays root there, and INSIDE is mapped to a user
    that no other process has, which the program becomes: the kernel holds root to no limit of
    processes.
    """
    uid = os.getuid()
    gid = os.getgid()
    choices = [f"{INSIDE} {uid} 1"]
    if uid == 0:
        choices = [f"0 0 1\n{INSIDE} {one} 1" for one in (1_000_000_000 + pid, 65534)]
    for number, text in enumerate(choices):
        try:
            if uid != 0:
                _write_file(f"/proc/{pid}/setgroups", "deny")
            _write_file(f"/proc/{pid}/gid_map", text if uid == 0 else f"{INSIDE} {gid} 1")
            _write_file(f"/proc/{pid}/uid_map", text)
            return
        except OSError:
            if number == len(choices) - 1:
                raise


def _write_file(path: str, text: str) -> None:
    """Write the text to the file."""
    with open(path, "w") as file:
        file.write(text)


def become_inside_user() -> None:
    """Change from root to the user and group INSIDE, after `enter_private_root`; do nothing for an
    ordinary user.
    """
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(INSIDE, INSIDE, INSIDE)
        os.setresuid(INSIDE, INSIDE, INSIDE)


def mount_file_system(
    source: str | None,
    target: str,
    file_system_type: str | None,
    flags: int,
    data: str | None = None,
) -> None:
    """Call mount(2). Raise OSError where it fails."""
    texts = [
        None if text is None else os.fsencode(text)
        for text in (source, target, file_system_type, data)
    ]
    raise_on_error(
        LIBC.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {target}"
    )


def _make_read_only(target: str) -> None:
    """Make the mount at `target`, and all mounts below it, read-only, without device files and
    set-user-id programs.
    """
    attributes = ctypes.create_string_buffer(struct.pack("<QQQQ", READ_ONLY, 0, 0, 0), 32)
    path = ctypes.c_char_p(os.fsencode(target))
    raise_on_error(
        call_syscall_unchecked(
            find_syscall_number("mount_setattr"), AT_FDCWD, path, AT_RECURSIVE, attributes, 32
        ),
        f"read-only {target}",
    )


def enter_private_root(readable_paths: Sequence[str], limits: SandboxLimits) -> None:
    """Give this process, which is in a new mount namespace, a root of its own: `readable_paths`
    read-only, an empty /tmp of limited size, four devices, and a new /proc where the kernel allows
    that. The working directory becomes /tmp.

    There is no /dev/zero: shared mappings of it are memory that need not be resident.
    """
    mount_file_system(None, "/", None, MS_REC | MS_PRIVATE)
    mount_file_system(
        "tmpfs", STAGE, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=20,mode=755"
    )
    root = NEW_ROOT
    os.mkdir(root)
    mount_file_system(
        "tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=400,mode=755"
    )
    for path in readable_paths:
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path):
            os.makedirs(root + path, exist_ok=True)
            _bind_read_only(path, root)
        elif os.path.exists(path):
            _bind_read_only(path, root, is_file=True)
    os.makedirs(root + "/dev")
    for device in ("null", "full", "random", "urandom"):
        open(f"{root}/dev/{device}", "w").close()
        mount_file_system(f"/dev/{device}", f"{root}/dev/{device}", None, MS_BIND)
    for folder in ("/tmp", "/proc", "/old"):
        os.makedirs(root + folder, exist_ok=True)
    size = f"size={limits.file_mib}m,nr_inodes={limits.files},mode=1777"
    mount_file_system("tmpfs", root + "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, size)
    # where parts of /proc are masked, the kernel gives no new one
    with contextlib.suppress(OSError):
        mount_file_system("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    raise_on_error(
        call_syscall_unchecked(
            find_syscall_number("pivot_root"),
            ctypes.c_char_p(root.encode()),
            ctypes.c_char_p(f"{root}/old".encode()),
        ),
        "pivot",
    )
    os.chdir("/")
    raise_on_error(LIBC.umount2(b"/old", MNT_DETACH), "umount")
    os.rmdir("/old")
    attributes = ctypes.create_string_buffer(struct.pack("<QQQQ", READ_ONLY, 0, 0, 0), 32)
    raise_on_error(
        call_syscall_unchecked(
            find_syscall_number("mount_setattr"), AT_FDCWD, ctypes.c_char_p(b"/"), 0, attributes, 32
        ),
        "read-only root",
    )
    os.chdir("/tmp")


def _bind_read_only(path: str, root: str, is_file: bool = False) -> None:
    """Mount `path` read-only at the same path below `root`, where a directory exists already."""
    if is_file:
        open(root + path, "w").close()
    mount_file_system(path, root + path, None, MS_BIND | MS_REC)
    _make_read_only(root + path)


def set_resource_limits(limits: SandboxLimits, counts_all_of_user: bool) -> None:
    """Set this process's resource limits. With `counts_all_of_user` set no limit of processes,
    since the kernel would count the user's processes outside the sandbox too; the guardian counts
    alone then.
    """
    mib = 1 << 20
    sizes = {
        resource.RLIMIT_AS: limits.memory_mib * mib,
        resource.RLIMIT_FSIZE: limits.file_mib * mib,
        resource.RLIMIT_NOFILE: 64,  # what pipes and socket pairs hold counts in no process
        resource.RLIMIT_SIGPENDING: 64,  # which count for all of the user
        resource.RLIMIT_CORE: NO_CORE_DUMP,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if not counts_all_of_user:
        sizes[resource.RLIMIT_NPROC] = limits.processes
    for what, size in sizes.items():
        hard = resource.getrlimit(what)[1]
        size = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(what, (size, size))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))


def forbid_new_privileges() -> None:
    """Set no_new_privs: programs that this process executes gain no privileges."""
    invoke_prctl(PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Drop all capabilities of this process. A process that was forked and not executed would keep
    the capabilities of its new user namespace.
    """
    for capability in range(64):
        if LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    LIBC.prctl(PR_CAP_AMBIENT, 4, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    raise_on_error(
        call_syscall_unchecked(find_syscall_number("capset"), header, (ctypes.c_uint32 * 6)()),
        "capset",
    )


def query_landlock_version() -> int:
    """Return the kernel's Landlock version, or 0 where the kernel has no Landlock."""
    return max(0, call_syscall_unchecked(444, 0, 0, 1))


def apply_landlock(readable_paths: Sequence[str], writable_paths: Sequence[str]) -> None:
    """Restrict this process to reading and executing `readable_paths` and to all access to
    `writable_paths`. From version 4 on deny TCP too; from version 6 on also abstract sockets and
    signals out of the sandbox. Raise OSError where the kernel has no Landlock.
    """
    version = query_landlock_version()
    if version < 1:
        raise OSError(errno.ENOSYS, "this kernel has no Landlock")
    files = (1 << 13) - 1 | (1 << 13 if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    files |= 1 << 15 if version >= 5 else 0
    if version < 4:
        size = 8
    else:
        size = 16 if version < 6 else 24
    rights = struct.pack("<QQQ", files, 3, 3)[:size]
    rules = raise_on_error(
        call_syscall_unchecked(444, ctypes.create_string_buffer(rights, size), size, 0), "Landlock"
    )
    for paths, access in ((readable_paths, EXECUTE | READ | READ_FOLDER), (writable_paths, files)):
        for path in paths:
            try:
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            allowed = (
                access
                if os.path.isdir(path)
                else access & (EXECUTE | WRITE | READ | TRUNCATE) & files
            )
            rule = ctypes.create_string_buffer(struct.pack("<Qi", allowed, place), 12)
            raise_on_error(
                call_syscall_unchecked(445, rules, 1, rule, 0), f"Landlock rule for {path}"
            )
            os.close(place)
    raise_on_error(call_syscall_unchecked(446, rules, 0), "Landlock")
    os.close(rules)


def apply_seccomp_filter(denies_metadata: bool, denies_signals: bool) -> None:
    """Install a seccomp filter on this process. A denied call gives EPERM. clone3 gives ENOSYS: the
    C library takes clone then, whose flags the filter can read. Calls that sync disks succeed and
    do nothing. What happens at the end of a child (SIGCHLD) can be asked for and not be changed: a
    program that ignored it would have children whose CPU time the kernel adds to nobody's.

    `denies_metadata`, for programs on the guardian's own disk, also denies changes of files'
    metadata, truncation, and hiding of the files that a process holds; `denies_signals` denies the
    sending of signals.
    """
    clone, ioctl, prlimit, mmap, fcntl, openat, sigaction, prctl = (
        (220, 29, 261, 222, 25, 56, 134, 167) if IS_ARM else (56, 16, 302, 9, 72, 257, 13, 157)
    )
    denied = DENIED + (METADATA if denies_metadata else ()) + (SIGNALS if denies_signals else ())
    code: list[bytes] = []

    def add_instruction(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        """Append one BPF instruction to the filter."""
        code.append(struct.pack("<HBBI", operation, if_true, if_false, value))

    def answer_syscall(syscall_number: int, error: int) -> None:
        """Append instructions that answer the system call with this errno; 0 makes it succeed
        without effect.
        """
        add_instruction(EQUAL, syscall_number, 0, 1)
        add_instruction(RETURN, ERROR | error)

    add_instruction(LOAD, ARCHITECTURE)
    add_instruction(EQUAL, AUDIT_ARCH, 1, 0)
    add_instruction(RETURN, KILL)
    add_instruction(LOAD, NUMBER)
    add_instruction(AT_LEAST, 0x40000000, 0, 1)  # the x32 way into the same calls
    add_instruction(RETURN, KILL)
    add_instruction(AT_LEAST, LAST_KNOWN + 1, 0, 1)
    add_instruction(RETURN, ERROR | errno.ENOSYS)
    answer_syscall(435, errno.ENOSYS)
    for number in SYNCS:
        answer_syscall(number, 0)
    for number in denied:
        answer_syscall(number, errno.EPERM)
    calls = [
        (clone, FIRST, ALL_BITS, ANY_BIT, NAMESPACE_FLAGS),
        (prlimit, FIRST, ALL_BITS, ANY_BIT, ALL_BITS),  # of another process than the caller
        (
            mmap,
            FOURTH,
            SHARED_ANONYMOUS,
            EQUAL,
            SHARED_ANONYMOUS,
        ),  # memory that can be kept and not be resident
    ]
    # truncating without opening for writing, which Landlock sees from version 3 on
    if denies_metadata:
        opens = [(openat, THIRD)] if IS_ARM else [(openat, THIRD), (2, SECOND)]
        calls += [
            (call, flags, TRUNCATES | ACCESS, EQUAL, TRUNCATES | mode)
            for call, flags in opens
            for mode in (0, 3)
        ]
        calls += [(call, flags, WRITES_THROUGH, ANY_BIT, WRITES_THROUGH) for call, flags in opens]
        # the guardian reads which files a process holds, unless the process is not dumpable
        add_instruction(LOAD, NUMBER)
        add_instruction(EQUAL, prctl, 0, 5)
        add_instruction(LOAD, FIRST)
        add_instruction(EQUAL, PR_SET_DUMPABLE, 0, 3)
        add_instruction(LOAD, SECOND)
        add_instruction(EQUAL, 0, 0, 1)
        add_instruction(RETURN, ERROR | errno.EPERM)
    for call, offset, mask, test, value in calls:
        add_instruction(LOAD, NUMBER)
        add_instruction(EQUAL, call, 0, 4)
        add_instruction(LOAD, offset)
        add_instruction(AND, mask)
        add_instruction(test, value, 0, 1)
        add_instruction(RETURN, ERROR | errno.EPERM)
    add_instruction(LOAD, NUMBER)
    add_instruction(EQUAL, sigaction, 0, 7)
    add_instruction(LOAD, FIRST)
    add_instruction(EQUAL, signal.SIGCHLD, 0, 5)
    # a pointer to a new action, of which either half may be zero
    add_instruction(LOAD, SECOND)
    add_instruction(ANY_BIT, ALL_BITS, 2, 0)
    add_instruction(LOAD, SECOND_HIGH)
    add_instruction(ANY_BIT, ALL_BITS, 0, 1)
    add_instruction(RETURN, ERROR | errno.EPERM)
    for call, commands in ((ioctl, IOCTLS), (fcntl, FCNTLS)):
        add_instruction(LOAD, NUMBER)
        add_instruction(EQUAL, call, 0, len(commands) + 2)
        add_instruction(LOAD, SECOND)
        for place, command in enumerate(commands):
            add_instruction(EQUAL, command, len(commands) - place, 0)
        add_instruction(RETURN, ERROR | errno.EPERM)
    add_instruction(RETURN, ALLOW)
    text = ctypes.create_string_buffer(b"".join(code), 8 * len(code))
    program = ctypes.create_string_buffer(
        struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(text)), 16
    )
    raise_on_error(call_syscall_unchecked(find_syscall_number("seccomp"), 1, 0, program), "seccomp")
