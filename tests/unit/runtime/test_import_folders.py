"""Python imports from no folder that other users can write: not in the guardian of sandboxes, not
in the processes of rewards, not in what the command line starts.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from rlhf_megatron import import_folders
from rlhf_megatron.import_folders import (
    NO_USER_SITE,
    PACKAGE_PARENT,
    PYTHON_PATH,
    SAFE_PATH,
    add_import_folder,
    add_working_directory,
    find_foreign_writer,
    make_import_environment,
)
from rlhf_megatron.rewards.sandbox.local_sandbox import GUARDIAN_FLAGS

SYSTEM_PYTHON = "/usr/bin/python3"  # in no virtual environment, so that it has a user's site folder
SITE_BELOW_HOME = f".local/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
MARKING = """
import os, sys
with open({marker!r}, "a") as file:
    file.write(f"{{__name__}} in {{sys.orig_argv}}\\n")
"""
SANDBOX = """
from rlhf_megatron.rewards.sandbox.local_sandbox import LocalSandbox, SandboxSettings
from rlhf_megatron.rewards.sandbox.sandbox_protocol import SandboxProgram
sandbox = LocalSandbox(SandboxSettings(preload={preload!r}), 20.0)
with sandbox.open_session(SandboxProgram({code!r})) as session:
    print(session.run_program().stdout)
sandbox.close()
"""
LOOK_AROUND = """
import os, site, sys
print(sys.flags.no_user_site, site.ENABLE_USER_SITE, "" in sys.path, [
    folder for folder in sys.path if os.path.isdir(folder) and os.stat(folder).st_mode & 2
])
"""
TEMPLATE = """
from rlhf_megatron.rewards.service.worker_processes import start_reward_template
reward = {{"name": "function", "params": {{"path": {path!r}}}, "key": "reward"}}
template = start_reward_template([reward], None, 1)
template.wait_until_ready()
template.close()
print("ready")
"""


@pytest.fixture(autouse=True)
def _forget() -> None:
    import_folders.log_refused_folder.cache_clear()


def make_folder(path: Path, mode: int) -> Path:
    path.mkdir(parents=True)
    path.chmod(mode)
    return path


def run_with_system_python(
    code: str, home: Path, cwd: str = "/", python_path: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the code with a Python that is no virtual environment's, with this one's packages. That
    process itself is safe: what it starts is under test.
    """
    version = subprocess.run(
        [SYSTEM_PYTHON, "-S", "-c", "import sys; print(sys.version_info[:2])"],
        capture_output=True,
        text=True,
    )
    if version.stdout.strip() != str(sys.version_info[:2]):
        pytest.skip(f"needs {SYSTEM_PYTHON} of this version of Python")
    packages = (PACKAGE_PARENT, sysconfig.get_paths()["purelib"])
    paths_of_children = os.pathsep.join((*packages, *python_path))
    boot = (
        f"import sys; sys.path[:0] = {list(packages)!r}\n"
        f"import os; os.environ[{PYTHON_PATH!r}] = {paths_of_children!r}\n"
    )
    environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
    return subprocess.run(
        [SYSTEM_PYTHON, "-P", "-c", boot + code],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
    )


def plant(folder: Path, module_name: str, marker: Path) -> None:
    """Write a module that notes where it is imported."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{module_name}.py").write_text(MARKING.format(marker=str(marker)))


def read_children_of_others(marker: Path) -> list[str]:
    """Return the notes of all processes but the one that the test itself has started."""
    lines = marker.read_text().splitlines() if marker.exists() else []
    return [line for line in lines if "import sys; sys.path[:0]" not in line]


# ---- who can write a folder ----


@pytest.mark.parametrize(
    ("mode", "parent_mode", "is_named", "expected"),
    [
        (0o700, 0o700, True, ""),
        (0o755, 0o755, False, ""),
        (0o777, 0o700, True, "everybody can write {folder}"),
        (0o1777, 0o700, True, "everybody can write {folder}"),
        (0o755, 0o777, True, "everybody can write {parent}"),
        (0o755, 0o1777, True, ""),
        (0o755, 0o1777, False, ""),
        (0o775, 0o755, True, ""),
    ],
)
def test_who_can_write_a_folder(
    tmp_path: Path, mode: int, parent_mode: int, is_named: bool, expected: str
) -> None:
    parent = make_folder(tmp_path / "parent", 0o700)
    folder = make_folder(parent / "folder", mode)
    parent.chmod(parent_mode)
    text = expected.format(folder=folder, parent=parent)
    assert find_foreign_writer(str(folder), is_named) == text


def test_a_folder_that_somebody_could_make(tmp_path: Path) -> None:
    parent = make_folder(tmp_path / "parent", 0o1777)
    missing = str(parent / ".local" / "lib")
    assert find_foreign_writer(missing, False) == f"everybody can write {parent}"
    parent.chmod(0o755)
    assert find_foreign_writer(missing, False) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_folders_of_others(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "folder", 0o775)
    os.chown(folder, 64321, 0)
    assert find_foreign_writer(str(folder), True) == "", "the user has named it"
    assert find_foreign_writer(str(folder), False) == f"{folder} belongs to user 64321"
    os.chown(folder, 0, 64321)
    assert find_foreign_writer(str(folder), False) == f"group 64321 can write {folder}"
    shared = make_folder(tmp_path / "shared", 0o1777)
    link = shared / "link"
    link.symlink_to(make_folder(tmp_path / "target", 0o755))
    assert find_foreign_writer(str(link), True) == ""
    os.lchown(link, 64321, 0)
    assert find_foreign_writer(str(link), True) == f"{link} belongs to user 64321"


# ---- environments of child interpreters ----


def test_folders_leave_pythonpath_with_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    safe = make_folder(tmp_path / "safe", 0o755)
    shared = make_folder(tmp_path / "shared", 0o777)
    monkeypatch.chdir(safe)
    paths = os.pathsep.join((str(shared), str(safe), PACKAGE_PARENT))
    with caplog.at_level(logging.WARNING):
        environment = make_import_environment({PYTHON_PATH: paths, "KEY": "x"})
        make_import_environment({PYTHON_PATH: paths})
    assert environment[PYTHON_PATH] == os.pathsep.join((str(safe), PACKAGE_PARENT))
    assert environment["KEY"] == "x" and SAFE_PATH not in environment
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and f"imports nothing from {shared}: everybody can write" in lines[0]
    assert make_import_environment({PYTHON_PATH: str(shared)}).get(PYTHON_PATH) is None
    assert make_import_environment({}).get(PYTHON_PATH) is None


def test_a_working_directory_of_everybody_is_not_imported_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_folder(tmp_path / "shared", 0o1777))
    environment = make_import_environment({})
    assert environment[SAFE_PATH] == "1"
    assert environment[PYTHON_PATH] == PACKAGE_PARENT, "the package is imported all the same"
    before = list(sys.path)
    add_working_directory()
    assert sys.path == before
    add_import_folder(str(make_folder(tmp_path / "safe", 0o755)))
    assert sys.path == [str(tmp_path / "safe"), *before]
    sys.path.remove(str(tmp_path / "safe"))


def test_a_home_of_everybody_has_no_site_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_folder(tmp_path / "home", 0o755)
    monkeypatch.chdir(home)
    monkeypatch.setattr("site.USER_SITE", str(home / SITE_BELOW_HOME))
    assert NO_USER_SITE not in make_import_environment({})
    home.chmod(0o1777)
    assert make_import_environment({})[NO_USER_SITE] == "1"
    home.chmod(0o755)
    # of another version of Python, which may be SGLang's
    make_folder(home / SITE_BELOW_HOME, 0o755)
    make_folder(home / ".local" / "lib" / "python3.9" / "site-packages", 0o777)
    assert make_import_environment({})[NO_USER_SITE] == "1"


# ---- the processes ----


def test_the_guardian_imports_nothing_below_home(tmp_path: Path) -> None:
    home = make_folder(tmp_path / "home", 0o777)
    plant(home / SITE_BELOW_HOME, "usercustomize", tmp_path / "marker")
    command = [SYSTEM_PYTHON, *GUARDIAN_FLAGS, "-c", "pass"]
    subprocess.run(command, env={"HOME": str(home)}, check=True)
    assert not (tmp_path / "marker").exists()
    done = run_with_system_python(SANDBOX.format(preload=(), code=LOOK_AROUND), home)
    assert done.stdout.split() == ["1", "False", "False", "[]"], done.stderr
    assert read_children_of_others(tmp_path / "marker") == []


def test_packages_of_the_user_can_be_preloaded(tmp_path: Path) -> None:
    """`pip install --user` puts them below HOME."""
    home = make_folder(tmp_path / "home", 0o755)
    folder = make_folder(home / SITE_BELOW_HOME, 0o755)
    (folder / "of_the_user.py").write_text("NUMBER = 6 * 7\n")
    code = SANDBOX.format(
        preload=("of_the_user",), code="import of_the_user; print(of_the_user.NUMBER)"
    )
    done = run_with_system_python(code, home)
    assert done.stdout == "42\n\n", done.stderr
    folder.chmod(0o777)
    done = run_with_system_python(code, home)
    assert "No module named 'of_the_user'" in done.stderr
    assert f"imports nothing from {folder}: everybody can write {folder}" in done.stderr


def test_folders_of_editable_packages_are_no_exception(tmp_path: Path) -> None:
    home = make_folder(tmp_path / "home", 0o755)
    folder = make_folder(home / SITE_BELOW_HOME, 0o755)
    shared = make_folder(tmp_path / "shared", 0o755)
    (shared / "of_everybody.py").write_text("NUMBER = 6 * 7\n")
    (folder / "editable.pth").write_text(f"{shared}\n")
    code = SANDBOX.format(preload=("of_everybody",), code="print(1)")
    assert run_with_system_python(code, home).stdout == "1\n\n"
    shared.chmod(0o777)
    done = run_with_system_python(code, home)
    assert "No module named 'of_everybody'" in done.stderr
    assert f"imports nothing from {shared}: everybody can write {shared}" in done.stderr


def test_processes_of_rewards_import_nothing_of_others(tmp_path: Path) -> None:
    home = make_folder(tmp_path / "home", 0o777)
    cwd = make_folder(tmp_path / "cwd", 0o1777)
    shared = make_folder(tmp_path / "shared", 0o777)
    marker = tmp_path / "marker"
    plant(home / SITE_BELOW_HOME, "usercustomize", marker)
    for folder in (cwd, shared):
        for module_name in ("socket", "traceback", "json", "faulthandler", "neighbour"):
            plant(folder, module_name, marker)
    rewards = make_folder(tmp_path / "rewards", 0o755)
    (rewards / "neighbour.py").write_text("SCORE = 1.0\n")
    (rewards / "scores.py").write_text(
        "import neighbour\ndef score(response):\n    return neighbour.SCORE\n"
    )
    code = TEMPLATE.format(path=f"{rewards}/scores.py:score")
    done = run_with_system_python(code, home, str(cwd), (str(shared),))
    assert done.stdout == "ready\n", done.stderr
    assert read_children_of_others(marker) == []


def test_the_command_line_imports_nothing_of_others(tmp_path: Path) -> None:
    cwd = make_folder(tmp_path / "cwd", 0o1777)
    shared = make_folder(tmp_path / "shared", 0o777)
    for folder in (cwd, shared):
        plant(folder, "late_import", tmp_path / "marker")
    code = (
        "sys.path[:0] = ['', sys.argv[1]]\n"
        "from rlhf_megatron.cli.main import main\n"
        "try:\n    main(['--version'])\nexcept SystemExit:\n    pass\n"
        "try:\n    import late_import\nexcept ModuleNotFoundError:\n    print('refused')"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys\n{code}", str(shared)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, PYTHON_PATH: PACKAGE_PARENT},
    )
    assert done.stdout.splitlines()[-1:] == ["refused"], done.stderr
    assert not (tmp_path / "marker").exists()
