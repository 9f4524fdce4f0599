"""Which folders Python may import from: none that other users of the machine can write. Pure.

Python imports from the working directory (`python -m`, `python -c`), from PYTHONPATH and from the
user's own site folder below HOME, whoever can write them. Another local user who can write one of
these folders runs code as this user: `usercustomize.py` and `*.pth` there run at the start of every
interpreter. So child interpreters get an environment from `make_import_environment`, and a folder
is put on sys.path by `add_import_folder` only.

A folder that the user names (PYTHONPATH, the working directory, the folder of a reward) is refused
where everybody can write that folder, or replace it. The user's site folder, which nobody names,
must belong to the user or to root, with all folders above, and no group of several users may write
there.
"""

from __future__ import annotations

import grp
import logging
import os
import pwd
import site
import stat
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)
PYTHON_PATH = "PYTHONPATH"
SAFE_PATH = "PYTHONSAFEPATH"  # no working directory on sys.path, from Python 3.11 on
NO_USER_SITE = "PYTHONNOUSERSITE"
PACKAGE_PARENT = str(Path(__file__).parents[1])  # the folder that this package is imported from
WORKING_DIRECTORY = ""  # as an entry of sys.path
EDITABLE_MARK = "__editable__"
OVERFLOW_UID = 65534  # how a user namespace shows owners that it does not map, such as root


def find_foreign_writer(folder: str, is_named_by_user: bool) -> str:
    """Return a text that says who else can write the folder, or replace it by another one, and ""
    where nobody can. For `is_named_by_user` see the module.
    """
    for path in dict.fromkeys((os.path.abspath(folder), os.path.realpath(folder))):
        for place in (path, *map(str, Path(path).parents)):
            if reason := _find_writer_of_place(place, place == path, is_named_by_user):
                return reason
    return ""


def _find_writer_of_place(place: str, is_folder_itself: bool, is_named_by_user: bool) -> str:
    """Return a text that says who else can write this one folder, or "". In a folder above the one
    that is asked for, only those count who can replace what this user has there.
    """
    try:
        status = os.lstat(place)
    except OSError:
        # whoever can write the folder above can make this folder
        parent = os.path.dirname(place)
        return _find_writer_of_place(parent, True, is_named_by_user) if parent != place else ""
    if stat.S_ISLNK(status.st_mode):
        is_writable = False
    else:
        # with the sticky bit everybody can make new entries, and replace only what is their own
        is_sticky = bool(status.st_mode & stat.S_ISVTX) and not is_folder_itself
        is_writable = bool(status.st_mode & stat.S_IWOTH) and not is_sticky
    if is_writable:
        return f"everybody can write {place}"
    has_foreign_owner = not _is_owner_trusted(status.st_uid)
    if has_foreign_owner and (not is_named_by_user or _is_in_sticky_folder(place)):
        return f"{place} belongs to user {status.st_uid}"
    is_group_writable = bool(status.st_mode & stat.S_IWGRP) and not stat.S_ISLNK(status.st_mode)
    if is_group_writable and not is_named_by_user and not _is_private_group(status.st_gid):
        return f"group {status.st_gid} can write {place}"
    return ""


def _is_in_sticky_folder(place: str) -> bool:
    """Return whether everybody can make entries in the folder above `place`, such as /tmp."""
    try:
        return bool(os.stat(os.path.dirname(place)).st_mode & stat.S_IWOTH)
    except OSError:
        return False


def _is_owner_trusted(uid: int) -> bool:
    """Return whether a folder's owner is this user or root, which a user namespace may show as
    OVERFLOW_UID.
    """
    return uid in (0, os.geteuid()) or (uid == OVERFLOW_UID and _is_in_user_namespace())


@cache
def _is_in_user_namespace() -> bool:
    """Return whether this process is in a user namespace that does not map all users."""
    try:
        return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
    except OSError:
        return False


@cache
def _is_private_group(gid: int) -> bool:
    """Return whether nobody but this user and root is in the group: root's group, or this user's
    first group under the user's own name.
    """
    if gid == 0:
        return True
    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(gid)
    except KeyError:
        return gid == os.getegid() == os.geteuid()
    is_first_group = user.pw_gid == gid and group.gr_name == user.pw_name
    return is_first_group and set(group.gr_mem) <= {user.pw_name}


@cache
def log_refused_folder(folder: str, reason: str) -> None:
    """Log, once for each folder, that Python does not import from the folder."""
    logger.warning(
        "Python imports nothing from %s: %s, and could run code as this user there. Take away the"
        " right (chmod go-w), or move the modules to a folder that only you can write.",
        folder,
        reason,
    )


def is_import_folder_trusted(folder: str) -> bool:
    """Return whether Python may import from a folder that the user has named, and log a warning
    where not. The package's own folder and the interpreter's folders are trusted.
    """
    real = os.path.realpath(folder)
    if real in _list_trusted_folders():
        return True
    reason = find_foreign_writer(folder, is_named_by_user=True)
    if reason:
        log_refused_folder(folder, reason)
    return not reason


@cache
def _list_trusted_folders() -> frozenset[str]:
    """Return the real paths of this package's folder and of the interpreter's own folders."""
    folders = {PACKAGE_PARENT, *sysconfig.get_paths().values()}
    return frozenset(map(os.path.realpath, folders))


def add_import_folder(folder: str) -> None:
    """Put the folder at the front of sys.path, unless others can write it; then log a warning."""
    if is_import_folder_trusted(folder):
        sys.path.insert(0, folder)


def add_working_directory() -> None:
    """Put the working directory at the front of sys.path, where it is not on it, unless others can
    write it; then log a warning.
    """
    if os.getcwd() not in sys.path:
        add_import_folder(os.getcwd())


def find_user_site() -> str | None:
    """Return the user's own site folder (`pip install --user`), or None where this interpreter does
    not use one, or others can write the folder.
    """
    if not site.ENABLE_USER_SITE:
        return None
    folder = site.getusersitepackages()
    return None if _find_user_site_writer() or not os.path.isdir(folder) else folder


def _find_user_site_writer() -> str:
    """Return a text that says who else can write a user's site folder of any Python, or "", and log
    a warning where there is one.
    """
    folder = site.getusersitepackages()
    same_user_folders = Path(folder).parent.parent.glob("python*/site-packages")
    for place in {folder, *map(str, same_user_folders)}:
        if reason := find_foreign_writer(place, is_named_by_user=False):
            if site.ENABLE_USER_SITE:
                log_refused_folder(place, reason)
            return reason
    return ""


def make_import_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a child interpreter: without folders in PYTHONPATH that others can
    write, without the working directory and the user's site folder where others can write them.
    The package itself stays where it can be imported from.
    """
    protected = dict(environment)
    named_folders = protected.get(PYTHON_PATH, "")
    folders = filter_import_folders(named_folders.split(os.pathsep)) if named_folders else []
    if not _is_entry_trusted(WORKING_DIRECTORY):
        protected[SAFE_PATH] = "1"
    if SAFE_PATH in protected and not _is_package_installed() and PACKAGE_PARENT not in folders:
        folders.insert(0, PACKAGE_PARENT)
    if NO_USER_SITE not in protected and _find_user_site_writer():
        protected[NO_USER_SITE] = "1"
    if folders:
        protected[PYTHON_PATH] = os.pathsep.join(folders)
    else:
        protected.pop(PYTHON_PATH, None)
    return protected


def filter_import_folders(entries: Iterable[str]) -> list[str]:
    """Return the entries of PYTHONPATH or sys.path that nobody else can write, and log a warning
    for each of the others.
    """
    return [entry for entry in entries if _is_entry_trusted(entry)]


def _is_entry_trusted(entry: str) -> bool:
    """Return whether Python may import from this entry of sys.path. A package that is installed as
    editable adds a name that is no folder; a working directory that is gone has no modules.
    """
    if entry.startswith(EDITABLE_MARK):
        return True
    try:
        return is_import_folder_trusted(entry or os.getcwd())
    except FileNotFoundError:
        return True


def _is_package_installed() -> bool:
    """Return whether this package lies in a folder from which the interpreter imports anyway."""
    paths = sysconfig.get_paths()
    site_folders = (paths["purelib"], paths["platlib"])
    return os.path.realpath(PACKAGE_PARENT) in map(os.path.realpath, site_folders)


def protect_imports() -> None:
    """Take the folders that others can write out of this process's sys.path, and out of what its
    child interpreters import from (os.environ). The command line and the processes that import
    modules of the user call it first.
    """
    protected = make_import_environment(os.environ)
    for name in (PYTHON_PATH, SAFE_PATH, NO_USER_SITE):
        if name in protected:
            os.environ[name] = protected[name]
        else:
            os.environ.pop(name, None)
    sys.path[:] = filter_import_folders(sys.path)
    user_site = site.getusersitepackages()
    if NO_USER_SITE in protected and user_site in sys.path:
        sys.path.remove(user_site)
