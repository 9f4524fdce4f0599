"""Servers that span machines: what each part is told, that one part's end is the end of all, and
which part is named. Small scripts stand for SGLang; tests/end_to_end/test_launch_machines.py
has the real one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from sglang_tools import STARTUP_S
from test_sglang_process import SERVER, fake_sglang

from rlhf_megatron.rollout.engine_interface import EngineError
from rlhf_megatron.rollout.fleet.server_process import EngineServers
from rlhf_megatron.rollout.sglang.sglang_arguments import ServerOption, encode_options
from rlhf_megatron.rollout.sglang.sglang_client import REQUIRED_PATHS
from rlhf_megatron.rollout.sglang.sglang_environment import MachineGpus, check_sglang_environment
from rlhf_megatron.rollout.sglang.sglang_launch import start_sglang_engines

pytestmark = pytest.mark.dist
OPTIONS = [
    ServerOption((name,), name.replace("-", "_"), "_StoreAction", type="int")
    for name in ("nnodes", "tp-size")
]
ARGUMENTS = {"nnodes": 2, "tp_size": 4}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # where the known arguments of a version are kept
    return tmp_path


def interpreter(folder: Path, script: str) -> str:
    (folder / "server.py").write_text(
        SERVER.replace("PATHS", json.dumps({path: {} for path in REQUIRED_PATHS}))
    )
    python = fake_sglang(folder, script)
    known = f"""if [[ "$2" == *ServerArgs* ]]; then echo '{encode_options(OPTIONS)}'; exit; fi"""
    python.write_text(python.read_text().replace("#!/bin/bash\n", f"#!/bin/bash\n{known}\n", 1))
    return str(python)


def start(folder: Path, script: str = 'serve "$@"') -> EngineServers:
    return start_sglang_engines(
        "model",
        1,
        folder,
        python=interpreter(folder, script),
        transfer_dir=folder,
        dtype="float32",
        arguments=ARGUMENTS,
        env={},
        startup_timeout_s=STARTUP_S,
        machine_gpus=MachineGpus(is_placed_by_launcher=True),
    )


def told(folder: Path, part: str) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load((folder / "engines" / f"{part}.yaml").read_text())
    return settings


def test_parts_are_told_their_number_and_where_they_meet(folder: Path) -> None:
    with start(folder) as servers:
        first = told(folder, "engine0")
        other = told(folder, "engine0-part1")
        assert (first["node-rank"], other["node-rank"]) == (0, 1)
        assert first["nnodes"] == other["nnodes"] == 2
        assert first["dist-init-addr"] == other["dist-init-addr"]
        assert first["port"] != other["port"], "two may be on one machine"
        (address,) = servers.addresses
        assert address.name == "engine0" and address.tp_size == 4
        assert address.url == f"http://127.0.0.1:{first['port']}", "the first part is asked"


def test_the_end_of_one_part_is_the_end_of_all_and_all_are_started_again(folder: Path) -> None:
    with start(folder, 'echo "part $4"; serve "$@"') as servers:
        first, other = servers.processes[0]._parts  # type: ignore[attr-defined]
        assert servers.describe_exit("engine0") is None
        before = told(folder, "engine0")["dist-init-addr"]
        other.send_signal(9)
        other._process.wait(60)
        assert "it exited with code -9; the end of" in (
            words := servers.describe_exit("engine0") or ""
        )
        assert "engine0-part1.yaml" in words, "the log of the part that ended"
        servers.restart_server("engine0")
        assert first.exit_code is not None, "no part of the former server is left"
        assert servers.describe_exit("engine0") is None
        assert told(folder, "engine0")["dist-init-addr"] != before
        assert (
            told(folder, "engine0-part1")["dist-init-addr"]
            == told(folder, "engine0")["dist-init-addr"]
        )
        assert (folder / "engines" / "engine0-part1.1.log").exists()
        running = servers.processes
    assert all(process.exit_code is not None for process in running)


def test_a_part_that_does_not_start_is_named(folder: Path) -> None:
    script = '[[ $4 == *part1* ]] && { echo "ValueError: no GPU"; exit 3; }; sleep 600'
    words = (
        r"(?s)engine0 is on 2 machines, and engine0-part1 did not start: .*exited with code 3"
        r" .*ValueError: no GPU"
    )
    with pytest.raises(EngineError, match=words):
        start(folder, script)


def test_other_servers_are_of_one_machine(folder: Path) -> None:
    """Those of a reward model, of `serve`, of the command `engine`."""
    with pytest.raises(
        ValueError, match=r"rollout\.sglang\.args\.nnodes \(2\) needs several machines"
    ):
        check_sglang_environment(interpreter(folder, ""), ARGUMENTS, {})
