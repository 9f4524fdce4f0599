"""What is asked of the environment that has sglang, before a server is started."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from sglang_tools import CPU_ARGUMENTS, CPU_ENV, needs_sglang, sglang_python

from rlhf_megatron.config.cuda_environment import remove_expandable_segments
from rlhf_megatron.rollout.sglang.sglang_environment import (
    OLDEST_SGLANG,
    TESTED_VERSIONS,
    check_nccl_versions,
    check_sglang_environment,
    check_sglang_version,
    find_interpreter,
    find_unfit_arguments,
    make_colocation_arguments,
    make_deterministic_arguments,
    make_search_paths_absolute,
)

WORDS_ON_A_CPU = (
    "--disable-overlap-schedule",
    "--enable-deterministic-inference",
    "--sleep-on-idle",
)


def option(name: str, kind: str, *more: str) -> dict[str, Any]:
    action = "_StoreTrueAction" if kind == "bool" else "_StoreAction"
    nargs = 0 if kind == "bool" else None
    names = [name.replace("_", "-"), *more]
    return {
        "names": names,
        "field": name,
        "action": action,
        "nargs": nargs,
        "type": kind,
        "choices": None,
    }


TWO = (option("tp_size", "int", "tensor-parallel-size"), option("device", ""))


def fake_python(folder: Path, version: str, options: Sequence[dict[str, Any]] = TWO) -> Path:
    """An interpreter that answers the question for the version, then the one for the arguments."""
    names = list(options)
    path = folder / "python"
    path.write_text(
        f"""#!/bin/sh
case "$2" in
  *metadata*) {version};;
  *) echo 'a line of noise'; echo '{json.dumps(names)}'; echo asked >> '{folder}/asked';;
esac
"""
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_interpreter_is_asked_once_a_version(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "echo 0.5.21")
    for _ in range(2):
        found = check_sglang_environment(
            str(python), {"tp_size": 2}, {"A": "b"}, tmp_path / "cache"
        )
        assert (found.python, found.version, found.server_env) == (
            str(python),
            "0.5.21",
            {"A": "b"},
        )
        assert found.arguments.value_by_option == found.arguments.file_settings == {"tp-size": 2}
    assert (tmp_path / "asked").read_text() == "asked\n"
    fake_python(tmp_path, "echo 0.6.0")
    with pytest.raises(ValueError, match=r"args.tq is no argument of sglang 0.6.0"):
        check_sglang_environment(str(python), {"tq": 2}, {}, tmp_path / "cache")
    assert (tmp_path / "asked").read_text() == "asked\nasked\n"


def test_an_old_or_missing_sglang(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "echo 0.5.20")
    with pytest.raises(ValueError, match=r"is 0.5.20, but 0.5.21 or newer is needed"):
        check_sglang_environment(str(python), {}, {})
    fake_python(tmp_path, "echo 'PackageNotFoundError: sglang' >&2; exit 1")
    with pytest.raises(
        ValueError, match=r"has no sglang; install it there .*make sglang-cpu.*PackageNotFoundError"
    ):
        check_sglang_environment(str(python), {}, {})


@pytest.mark.parametrize(
    ("ours", "theirs", "refused"),
    [
        ("2.11.0 2.28.9", "2.11.0 2.28.9", False),
        ("2.11.0 2.28.9", "2.10.0 2.28.3", False),
        ("2.11.0 2.28.9", "2.9.1 2.27.5", True),
        ("2.11.0+cpu none", "2.10.0 2.28.3", False),  # it would be gloo's
    ],
)
def test_a_communicator_needs_one_nccl(
    ours: str,
    theirs: str,
    refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    for name, versions in (("own", ours), ("servers", theirs)):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {versions}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "own"))
    python = str(tmp_path / "servers")
    if refused:
        with pytest.raises(
            ValueError, match=r"process_group.*2\.27\.5.*Install the same torch in both"
        ):
            check_nccl_versions(python, {})
        return
    check_nccl_versions(python, {})
    assert ("2.28.3" in caplog.text) == (ours != theirs)


def test_relative_paths_count_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_python(tmp_path, "echo 0.5.21")
    monkeypatch.chdir(tmp_path)
    assert find_interpreter("./python") == str(tmp_path / "python")
    assert make_search_paths_absolute({"PYTHONPATH": "a:/b", "X": "1"}) == {
        "PYTHONPATH": f"{tmp_path}/a:/b",
        "X": "1",
    }
    with pytest.raises(
        ValueError, match=r"rollout.sglang.python \(no/python\) must be an executable"
    ):
        find_interpreter("no/python")


def test_a_link_to_an_interpreter_is_kept(tmp_path: Path) -> None:
    """A virtual environment is known by the link, not by what it points at."""
    os.symlink(fake_python(tmp_path, "echo 0.5.21"), tmp_path / "link")
    assert find_interpreter(str(tmp_path / "link")) == str(tmp_path / "link")


def test_the_arguments_of_the_cpu_configuration(tmp_path: Path) -> None:
    """As the installed version is asked for them below, where there is one."""
    kinds = {"bool": "bool", "int": "int", "float": "float", "str": ""}
    options = [option(name, kinds[type(value).__name__]) for name, value in CPU_ARGUMENTS.items()]
    python = fake_python(tmp_path, "echo 0.5.21", [TWO[0], *options])
    found = check_sglang_environment(
        str(python), {**CPU_ARGUMENTS, "tp_size": 2}, CPU_ENV, tmp_path / "cache"
    )
    assert found.arguments.command_words == WORDS_ON_A_CPU
    assert found.arguments.value_by_option == {
        name.replace("_", "-"): value for name, value in {**CPU_ARGUMENTS, "tp_size": 2}.items()
    }
    with pytest.raises(ValueError, match="did you mean mem-fraction-static"):
        check_sglang_environment(
            str(python), {"mem_fraction_statik": 0.3}, CPU_ENV, tmp_path / "cache"
        )


@needs_sglang
@pytest.mark.sglang
@pytest.mark.dist
def test_the_installed_version_knows_the_arguments_of_the_cpu_configuration(tmp_path: Path) -> None:
    found = check_sglang_environment(
        str(sglang_python()), {**CPU_ARGUMENTS, "tp_size": 2}, CPU_ENV, tmp_path
    )
    assert found.arguments.value_by_option["tp-size"] == 2
    assert found.arguments.value_by_option["enable-deterministic-inference"] is True
    assert found.arguments.command_words == WORDS_ON_A_CPU
    with pytest.raises(ValueError, match="did you mean mem-fraction-static"):
        check_sglang_environment(
            str(sglang_python()), {"mem_fraction_statik": 0.3}, CPU_ENV, tmp_path
        )


def test_what_a_deterministic_run_asks_of_the_servers() -> None:
    assert make_deterministic_arguments({"tp-size": 2}, {}) == {
        "enable-deterministic-inference": True
    }
    assert make_deterministic_arguments({"enable-deterministic-inference": True}, {}) != {}
    with pytest.raises(
        ValueError, match=r"enable_deterministic_inference, which is set to False; remove it"
    ):
        make_deterministic_arguments({"enable-deterministic-inference": False}, {})
    for arguments, env in (({"device": "cpu"}, {}), ({}, {"SGLANG_USE_CPU_ENGINE": "1"})):
        with pytest.raises(ValueError, match=r"not on a CPU; use rollout\.engine: local"):
            make_deterministic_arguments(arguments, env)


def test_which_versions_are_supported() -> None:
    assert check_sglang_version(TESTED_VERSIONS[0], "python") is None
    assert check_sglang_version("0.5.21.post1", "python") == (
        "sglang in python is 0.5.21.post1, which is newer than what was tested (0.5.21); what it"
        " can do is asked, not taken for granted."
    )
    for version in ("0.5.20", "0.5.21rc1", "0.4.9.post6"):
        with pytest.raises(
            ValueError, match=r"but 0.5.21 or newer is needed \(weight-update sessions\); upgrade"
        ):
            check_sglang_version(version, "python")
    with pytest.raises(ValueError, match=r"says that its version is 'local'; use a released one"):
        check_sglang_version("local", "python")


def test_what_no_server_of_a_run_may_do(tmp_path: Path) -> None:
    assert (
        list(
            find_unfit_arguments(
                {"dp_size": 1, "quantization": None, "enable-lora": False, "tp_size": 8}
            )
        )
        == []
    )
    assert (
        list(find_unfit_arguments({"dp_size": 2, "enable_dp_attention": True, "tp_size": 8})) == []
    )
    for name, value in {
        "dp_size": 2,
        "speculative_algorithm": "EAGLE",
        "quantization": "fp8",
    }.items():
        assert [found[:2] for found in find_unfit_arguments({name: value})] == [
            (name.replace("_", "-"), value)
        ]
    python = fake_python(tmp_path, "echo 0.5.21")
    path = tmp_path / "python"
    path.write_text(
        path.read_text()
        .replace('"names": ["device"]', '"names": ["quantization"]')
        .replace('"device"', '"quantization"')
    )
    with pytest.raises(
        ValueError,
        match=r"args.quantization \('fp8'\) cannot be: what stands in the engine .*start it w",
    ):
        check_sglang_environment(str(python), {"quantization": "fp8"}, {}, tmp_path / "cache")


def test_what_a_colocated_run_asks_of_the_servers() -> None:
    assert make_colocation_arguments({}, {}) == {"enable-memory-saver": True}
    with pytest.raises(
        ValueError, match=r"needs rollout.sglang.args.enable_memory_saver, which is set to False"
    ):
        make_colocation_arguments({"enable-memory-saver": False}, {})
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        with pytest.raises(ValueError, match=rf"{name} \(expandable_segments:True\) must not have"):
            make_colocation_arguments({}, {name: "expandable_segments:True"})
        make_colocation_arguments({}, {name: "expandable_segments:False"})


def test_engines_do_not_inherit_expandable_segments() -> None:
    kept = {
        "HOME": "/root",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2]",
    }
    given = {**kept, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    given["PYTORCH_ALLOC_CONF"] = f"expandable_segments:True,{kept['PYTORCH_ALLOC_CONF']}"
    assert remove_expandable_segments(given) == kept
    assert remove_expandable_segments(kept) == kept


def test_the_supported_versions_are_those_of_the_installation() -> None:
    setup = (ROOT / "setup.py").read_text()
    install = (ROOT / "docs" / "install.md").read_text()
    assert f'"sglang": ["sglang>={OLDEST_SGLANG}"]' in setup
    assert (
        f"| sglang (extra, see below) | {OLDEST_SGLANG} and newer | {', '.join(TESTED_VERSIONS)} |"
        in install
    )
    assert f"pip install 'sglang>={OLDEST_SGLANG}'" in install
    assert f"sglang=={TESTED_VERSIONS[-1]} " in (ROOT / "Makefile").read_text()
