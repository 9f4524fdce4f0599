"""Starting SGLang servers: lost ports, the server's own error. Small scripts stand for the
server that fails.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from places import SUPPORT
from rollout_tools import tiny_qwen3
from sglang_tools import CPU_ARGUMENTS, CPU_ENV, STARTUP_S, needs_sglang, sglang_python

from rlhf_megatron.rollout.engine_interface import EngineError
from rlhf_megatron.rollout.fleet.server_process import EngineServers
from rlhf_megatron.rollout.sglang.rendezvous import PortAllocator, RendezvousFiles
from rlhf_megatron.rollout.sglang.sglang_arguments import CheckedArguments
from rlhf_megatron.rollout.sglang.sglang_client import REQUIRED_PATHS
from rlhf_megatron.rollout.sglang.sglang_environment import SGLangEnvironment
from rlhf_megatron.rollout.sglang.sglang_launch import (
    SGLangServerLaunch,
    extract_server_errors,
    start_sglang_engines,
)

SERVER = """
import http.server, json, sys, yaml
port = yaml.safe_load(open(sys.argv[1]))["port"]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"paths": PATHS}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def fake_sglang(folder: Path, start: str) -> Path:
    """An interpreter of an sglang whose server does `start`; $4 is its settings file, `attempt`
    counts from 1.
    """
    path = folder / "python"
    path.write_text(
        f"""#!/bin/bash
if [ "$1" = -c ]; then echo 0.5.21; exit; fi
echo x >> '{folder}/attempts'
attempt=$(wc -l < '{folder}/attempts')
serve() {{ exec '{Path(__import__("sys").executable)}' '{folder}/server.py' "$4"; }}
{start}
"""
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def start(folder: Path, script: str, paths: tuple[str, ...] = REQUIRED_PATHS) -> EngineServers:
    (folder / "server.py").write_text(
        SERVER.replace("PATHS", json.dumps({path: {} for path in paths}))
    )
    return start_sglang_engines(
        "model",
        1,
        folder,
        python=str(fake_sglang(folder, script)),
        transfer_dir=folder,
        dtype="float32",
        arguments={},
        env={},
        startup_timeout_s=STARTUP_S,
    )


@pytest.mark.dist
def test_a_lost_port_is_tried_again_with_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost = (
        'grep ^port "$4" >> ports; [ $attempt = 3 ] && serve "$@"; echo "[Errno 98] address already'
        ' in use"; exit 1'
    )
    with start(tmp_path, lost.replace("ports", str(tmp_path / "ports"))) as servers:
        ports = (tmp_path / "ports").read_text().splitlines()
        assert len(set(ports)) == 3
        assert servers.addresses[0].url.endswith(ports[2].removeprefix("port: "))
    assert caplog.text.count("lost its port") == 2
    assert "sglang ignores the seed of a sample" in caplog.text


@pytest.mark.dist
def test_ports_that_are_lost_again_and_again(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="already in use"):
        start(tmp_path, 'echo "OSError: [Errno 98] address already in use"; exit 1')
    assert (tmp_path / "attempts").read_text() == "x\n" * 3


@pytest.mark.dist
def test_a_server_that_hangs_without_its_port(tmp_path: Path) -> None:
    """As stock SGLang does: uvicorn says that it cannot bind, and nothing ends."""
    hang = (
        'echo "ERROR: [Errno 98] error while attempting to bind on address (1, 2): in'
        ' use"; sleep 600'
    )
    with start(tmp_path, f'[ $attempt = 2 ] && serve "$@"; {hang}') as servers:
        assert servers.processes[0].exit_code is None
    assert (tmp_path / "attempts").read_text() == "x\n" * 2


@pytest.mark.dist
def test_the_servers_own_error_is_shown_once_and_not_retried(tmp_path: Path) -> None:
    noise = (
        "echo 'ValueError: the model has no attention'; for i in $(seq 50); do echo noise;"
        " done; exit 3"
    )
    with pytest.raises(
        EngineError, match=r"code 3 (?s:.*)Its errors:\nValueError: the model has no attention"
    ):
        start(tmp_path, noise)
    assert (tmp_path / "attempts").read_text() == "x\n"


@pytest.mark.dist
def test_a_server_is_started_again_by_name(tmp_path: Path) -> None:
    with start(tmp_path, 'echo "attempt $attempt"; serve "$@"') as servers:
        before = servers.addresses[0]
        process = servers.processes[0]
        assert servers.describe_exit("engine0") is None
        os.killpg(process.pid, signal.SIGKILL)
        after = servers.restart_server("engine0")
        assert servers.addresses == (after,) and servers.describe_exit("engine0") is None
        assert after.name == "engine0" and after.url != before.url and after.token != before.token
        folder = tmp_path / "engines"
        assert (folder / "engine0.token").read_text() == after.token
        assert (folder / "engine0.1.log").read_text().startswith("attempt 1\n")
        assert process.log.read_text().startswith("attempt 2\n")
        servers.kill_server("engine0")
        assert "it exited with code -9" in (servers.describe_exit("engine0") or "")
        servers.restart_server("engine0")
        assert (folder / "engine0.2.log").exists()
    assert servers.describe_exit("engine0") is not None
    with pytest.raises(EngineError, match="are being stopped"):
        servers.restart_server("engine0")


@pytest.mark.dist
def test_a_server_that_fails_to_start_again_is_not_left_running(tmp_path: Path) -> None:
    script = '[ $attempt = 1 ] && serve "$@"; echo "ValueError: no memory"; exit 3'
    with start(tmp_path, script) as servers:
        with pytest.raises(EngineError, match=r"(?s)exited with code 3 .*ValueError: no memory"):
            servers.restart_server("engine0")
        assert servers.processes[0].exit_code == 3


@pytest.mark.dist
def test_servers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """A killed starter leaves nothing behind, though the server itself does not look after that
    and is stopped.
    """
    code = (
        "import sys, time; sys.path[:0] = sys.argv[1:3]; from test_sglang_process import start\n"
        "from pathlib import Path; s = start(Path(sys.argv[3]), 'serve \"$@\"')\n"
        "print(s.processes[0].pid, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(SUPPORT), str(Path(__file__).parent), str(tmp_path)]
    starter = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert starter.stdout is not None
    server = int(starter.stdout.readline())
    os.kill(server, signal.SIGSTOP)
    starter.kill()
    starter.wait(60)
    deadline = time.monotonic() + 120
    while is_alive(server):
        assert time.monotonic() < deadline, "the server outlived its starter"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.dist
def test_a_server_without_update_sessions_is_refused(tmp_path: Path) -> None:
    old = tuple(
        path
        for path in REQUIRED_PATHS
        if path not in ("/begin_weight_update", "/end_weight_update")
    )
    with pytest.raises(
        EngineError, match=r"has no /begin_weight_update, /end_weight_update; use sglang 0.5.21"
    ):
        start(tmp_path, 'serve "$@"', old)


def test_no_port_is_given_out_twice() -> None:
    ports = PortAllocator()
    counts = [1, 3, 1, 14, 1, 2]
    given = [
        port
        for count in counts
        for first in [ports.reserve_ports(count)]
        for port in range(first, first + count)
    ]
    assert len(set(given)) == sum(counts)
    with socket.socket() as other:  # in the middle of the next ones
        other.bind(("127.0.0.1", max(given) + 3))
        assert ports.reserve_ports(5) == max(given) + 4


@pytest.mark.dist
def test_servers_with_dp_attention_listen_each_to_ports_of_its_own(tmp_path: Path) -> None:
    """SGLang takes those at 1 to 6 and 13 behind the meeting's; without one, at 13 and at 234 to
    239 behind that of HTTP, which those of its neighbours would be.
    """
    python = str(fake_sglang(tmp_path, "exec sleep 600"))
    asked = CheckedArguments({"enable-dp-attention": True, "dp-size": 2, "tp-size": 2}, {}, ())
    installed = SGLangEnvironment(python, "0.5.21", {}, asked, [])
    ports = PortAllocator()
    place = RendezvousFiles()
    taken: list[int] = []
    for number in range(3):
        launch = SGLangServerLaunch(
            f"engine{number}", tmp_path, installed, {}, {}, {}, tmp_path, ports, place, None
        )
        launch.start()
        assert launch.process is not None
        launch.process.stop()
        settings = yaml.safe_load((tmp_path / f"engine{number}.yaml").read_text())
        host, _, meeting = settings["dist-init-addr"].partition(":")
        assert host == "127.0.0.1"
        taken += [settings["port"], *(int(meeting) + behind for behind in (*range(7), 13))]
    assert len(set(taken)) == len(taken)


def test_error_lines_of_a_log() -> None:
    log = "\n".join(
        [
            "INFO: fine",
            "[2026-01-01 00:00:00 TP0] RuntimeError: one",
            "  File x.py",
            "torch.cuda.OutOfMemoryError: two",
            "torch.cuda.OutOfMemoryError: two",
            "launch_server.py: error: unrecognized arguments: --tq 1",
            "bye",
        ]
    )
    lines = extract_server_errors(log).splitlines()
    assert lines[2:5] == [
        "[2026-01-01 00:00:00 TP0] RuntimeError: one",
        "torch.cuda.OutOfMemoryError: two",
        "launch_server.py: error: unrecognized arguments: --tq 1",
    ]
    assert lines[5].startswith(
        "What to do: a device, or the machine, is full: see what else uses it"
    )
    assert extract_server_errors("INFO: all is well") == ""


@pytest.mark.parametrize(
    "line, advice",
    [
        (
            (
                "RuntimeError: Not enough memory. Please try to increase"
                " --mem-fraction-static. Current"
            ),
            "do not fit into roll",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "is full: see what else uses it",
        ),
        ("Exception: Capture cuda graph failed: CUDA out of memory.", "is full"),
        ("RuntimeError: Rank 0 scheduler died during initialization (exit code: -9).", "is full"),
        (
            (
                "RuntimeError: [enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't"
                " allocate memory"
            ),
            "is full",
        ),
        (
            "ValueError: Model architectures ['XForCausalLM'] are not supported for now.",
            "does not serve the model",
        ),
        ("ModuleNotFoundError: No module named 'triton'", "`make sglang-cpu`"),
    ],
)
def test_errors_with_what_to_do(line: str, advice: str) -> None:
    shown = extract_server_errors(f"noise\n{line}\nnoise").splitlines()
    assert shown[:3] == ["", "Its errors:", line]
    assert shown[3].startswith("What to do: ") and advice in shown[3]


def test_an_error_that_nothing_is_known_of() -> None:
    assert extract_server_errors("KeyError: 'x'") == "\nIts errors:\nKeyError: 'x'"


@needs_sglang
@pytest.mark.sglang
@pytest.mark.long
def test_an_engine_that_runs_out_of_memory(tmp_path: Path) -> None:
    """Stock SGLang, with a share of the memory that even this model does not fit in."""
    tiny_qwen3(1).save_pretrained(tmp_path / "model")
    arguments = {name: value for name, value in CPU_ARGUMENTS.items() if name != "max_total_tokens"}
    words = (
        r"(?s)exited with code .*Its errors:\n"
        r".*ValueError: .*leave no GPU memory .*What to do: weights and key-val"
    )
    with pytest.raises(EngineError, match=words) as caught:
        start_sglang_engines(
            tmp_path / "model",
            1,
            tmp_path,
            python=str(sglang_python()),
            transfer_dir=tmp_path,
            dtype="float32",
            arguments={**arguments, "mem_fraction_static": 0.0001},
            env=CPU_ENV,
            startup_timeout_s=STARTUP_S,
        )
    assert (tmp_path / "engines" / "engine0.token").read_text() not in str(caught.value)


@needs_sglang
@pytest.mark.sglang
@pytest.mark.long
def test_a_port_that_another_process_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Stock SGLang: taken between the look for it and the server's own bind."""
    tiny_qwen3(1).save_pretrained(tmp_path / "model")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free = PortAllocator.reserve_ports
        given = [taken.getsockname()[1]]
        monkeypatch.setattr(
            PortAllocator, "reserve_ports", lambda self: given.pop() if given else free(self)
        )
        with start_sglang_engines(
            tmp_path / "model",
            1,
            tmp_path,
            python=str(sglang_python()),
            transfer_dir=tmp_path,
            dtype="float32",
            arguments=CPU_ARGUMENTS,
            env=CPU_ENV,
            startup_timeout_s=2 * STARTUP_S,
        ) as servers:
            assert not servers.addresses[0].url.endswith(f":{taken.getsockname()[1]}")
    assert caplog.text.count("lost its port") == 1
