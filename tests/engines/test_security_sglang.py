"""Stock SGLang as it is started here: nothing but health checks without the key, and the key stays
where it belongs.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3
from listening import is_loopback, listening
from rollout_tools import tiny_qwen3
from sglang_tools import CPU_ARGUMENTS, CPU_ENV, STARTUP_S, needs_sglang, sglang_python

from rlhf_megatron.rollout.fleet.server_process import EngineServers
from rlhf_megatron.rollout.sglang.sglang_launch import start_sglang_engines

pytestmark = [pytest.mark.sglang, needs_sglang]

# SGLang lets probes of clusters in
OPEN = {"/health", "/health_generate", "/ready", "/metrics", "/ping"}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServers]:
    folder = tmp_path_factory.mktemp("sglang")
    tiny_qwen3(1).save_pretrained(folder / "model")
    (folder / "transfer").mkdir()
    with start_sglang_engines(
        folder / "model",
        1,
        folder,
        python=str(sglang_python()),
        transfer_dir=folder / "transfer",
        dtype="float32",
        arguments=CPU_ARGUMENTS,
        env=CPU_ENV,
        startup_timeout_s=STARTUP_S,
    ) as started:
        yield started


def call(url: str, method: str, path: str, token: str | None) -> int:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    body = b"{}" if method == "POST" else None
    answer = urllib3.request(
        method, url + path, headers=headers, body=body, timeout=60, retries=False
    )
    return answer.status


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            found += family(int(entry.name)) if parent == pid else []
    return found


def test_every_verb_but_health_needs_the_key(servers: EngineServers) -> None:
    address = servers.addresses[0]
    headers = {"Authorization": f"Bearer {address.token}"}
    paths = json.loads(
        urllib3.request("GET", address.url + "/openapi.json", headers=headers, timeout=60).data
    )["paths"]
    assert len(paths) > 40
    admin = {
        "/update_weights_from_tensor",
        "/update_weights_from_disk",
        "/begin_weight_update",
        "/abort_request",
    }
    assert admin <= paths.keys()
    let_in = set()
    for path, methods in paths.items():
        for method in methods:
            for wrong in (None, address.token[:-1], "x"):
                if call(
                    address.url, method.upper(), path.replace("{", "").replace("}", ""), wrong
                ) not in (401, 403):
                    let_in.add(path)
    assert let_in <= OPEN, let_in - OPEN
    assert call(address.url, "GET", "/health", None) == 200
    assert call(address.url, "GET", "/model_info", address.token) == 200


def test_the_key_is_in_private_files_only(servers: EngineServers) -> None:
    token = servers.addresses[0].token
    process = servers.processes[0]
    holders = {
        path.name
        for path in process.log.parent.iterdir()
        if path.is_file() and token in path.read_text()
    }
    assert holders == {"engine0.token", "engine0.yaml"}
    for name in holders:
        assert stat.S_IMODE((process.log.parent / name).stat().st_mode) == 0o600
    pids = family(process.pid)
    assert len(pids) >= 3, "the scheduler and the detokenizer are processes of their own"
    for pid in pids:
        assert token.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert os.stat(f"/proc/{pid}").st_uid == os.getuid()


def test_where_its_processes_listen(servers: EngineServers) -> None:
    found = {address for pid in family(servers.processes[0].pid) for address in listening(pid)}
    port = servers.addresses[0].url.rpartition(":")[2]
    assert f"127.0.0.1 {port}" in found
    assert [address for address in found if not is_loopback(address)] == []
