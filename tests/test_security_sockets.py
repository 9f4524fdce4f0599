"""Where the processes of a run listen: every socket of every one of them is on a loopback address."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from end_to_end_tools import DP2, MARKER, ROOT, overrides, processes_with, write_config

from rlhf_megatron.runtime.bound_store import BoundStore

TIMEOUT_S = 300.0
LISTENS = "0A"  # TCP_LISTEN in the kernel's table


def listening(pid: int) -> list[str]:
    """Addresses, with ports, at which a process listens for TCP."""
    inodes = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                    inodes.add(match[1])
    return [address for inode, address in table() if inode in inodes]


def table() -> list[tuple[str, str]]:
    """(inode, address:port) of all listening sockets of this machine."""
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS:
                raw, port = fields[1].split(":")
                words = b"".join(bytes.fromhex(raw[i : i + 8])[::-1] for i in range(0, len(raw), 8))
                found.append((fields[9], f"{socket.inet_ntop(family, words)} {int(port, 16)}"))
    return found


def is_loopback(address: str) -> bool:
    return address.startswith(("127.", "::1 ", "::ffff:127."))


def role(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    for name, words in (("engine", "local.server"), ("agent", "runtime.agent"), ("controller", "controller")):
        if words in command:
            return name
    return "host" if "rlhf_megatron train" in command else "other"


def test_the_table_is_read_as_the_kernel_writes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("0.0.0.0", 0)) as two:
        expected = {f"127.0.0.1 {one.getsockname()[1]}", f"0.0.0.0 {two.getsockname()[1]}"}
        assert expected <= set(listening(os.getpid()))
    assert not expected & set(listening(os.getpid()))
    assert is_loopback("127.0.0.1 80") and is_loopback("::1 80")
    assert not is_loopback("0.0.0.0 80") and not is_loopback(":: 80") and not is_loopback("10.0.0.1 80")


def test_torchs_store_listens_where_it_is_told_to() -> None:
    store = BoundStore("127.0.0.1", 0, 1, True)
    assert [address for address in listening(os.getpid()) if address.endswith(f" {store.port}")] == [
        f"127.0.0.1 {store.port}"
    ]
    client = BoundStore("127.0.0.1", store.port, 1, False)
    store.set("key", "value")
    assert client.get("key") == b"value"


@pytest.mark.dist
def test_a_run_listens_on_loopback_addresses_only(tmp_path: Path) -> None:
    config, marker = write_config(tmp_path), uuid.uuid4().hex
    strange = ("TORCHELASTIC_", "MASTER_", "GLOO_")
    given = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
    command = [sys.executable, "-m", "rlhf_megatron", "train", str(config), *overrides(DP2)]
    seen: dict[str, set[str]] = {}
    with (tmp_path / "console").open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**given, MARKER: marker, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            for pid in processes_with(f"{MARKER}={marker}"):
                with contextlib.suppress(OSError):
                    if addresses := listening(pid):
                        seen.setdefault(role(pid), set()).update(addresses)
            time.sleep(0.2)
    finally:
        for pid in {process.pid, *processes_with(f"{MARKER}={marker}")}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        exit_code = process.wait()
    assert exit_code == 0, (tmp_path / "console").read_text()[-3000:]
    assert {"agent", "host", "engine"} <= seen.keys(), seen  # torch's store, gloo, the bundled server
    assert not {who: bad for who, all_ in seen.items() if (bad := [a for a in all_ if not is_loopback(a)])}, seen
