"""`rlhf-megatron doctor --cluster`: what differs between nodes is named."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from launch_tools import agent_command, environment

from rlhf_megatron.cli.doctor import node_probe
from rlhf_megatron.cli.doctor.cluster_rows import GIB, RankReport, make_cluster_rows
from rlhf_megatron.cli.doctor.node_probe import (
    RankFacts,
    find_unseen_files,
    leave_marker_file,
    measure_clock_offset,
    serve_clock,
)
from rlhf_megatron.cli.doctor.trainer_rows import DoctorRow

ALIKE = {
    "device": "NVIDIA H200, 139 GiB",
    "torch": "2.13.0+cu130",
    "NCCL": "2.29.7",
    "driver": "580.65",
    "InfiniBand": "mlx5_0",
    "NCCL_DEBUG": "WARN",
}
NO_DEBUG = {name: value for name, value in ALIKE.items() if name != "NCCL_DEBUG"}


def reports(**of_last: Any) -> list[RankReport]:
    """Three nodes of two ranks. `of_last`: what the first rank of the last node reports
    in another way.
    """
    ranks = [
        RankReport(
            RankFacts(
                rank,
                rank % 2,
                rank // 2,
                f"gpu-{'abc'[rank // 2]}",
                ALIKE["device"],
                f"id{rank}",
                GIB,
                ALIKE,
            ),
            node_bytes_per_s=400e9,
            world_bytes_per_s=90e9,
            next_node_bytes_per_s=45e9,
        )
        for rank in range(6)
    ]
    facts = {
        name: of_last.pop(name)
        for name in list(of_last)
        if name in ("uniform_values", "device_id", "used_bytes")
    }
    ranks[4] = dataclasses.replace(
        ranks[4], facts=dataclasses.replace(ranks[4].facts, **facts), **of_last
    )
    return ranks


def row(path: str, num_ranks: int = 6, **of_last: Any) -> DoctorRow:
    (found,) = [
        row for row in make_cluster_rows(reports(**of_last), "/runs", num_ranks) if row.path == path
    ]
    return found


def test_nodes_that_are_alike() -> None:
    rows = {row.path: row for row in make_cluster_rows(reports(), "/runs", 6)}
    assert {row.state for row in rows.values()} == {"live"}
    assert rows["alike on all"].taken.startswith(
        "device NVIDIA H200, 139 GiB; torch 2.13.0+cu130; NCCL 2.29.7; driver"
    )
    assert rows["ranks"].taken == "6 on 3 node(s)"
    assert rows["all-reduce, all ranks"].taken == "90.0 GB/s bus bandwidth"
    assert rows["message to the next node"].taken == "45.0 GB/s in the median of 3 nodes"


@pytest.mark.parametrize(
    ("path", "state", "words", "of_last"),
    [
        (
            "torch",
            "broken",
            "differs: 2.12.1 on node 2 (gpu-c)",
            {"uniform_values": {**ALIKE, "torch": "2.12.1"}},
        ),
        (
            "device",
            "broken",
            "differs: NVIDIA H100, 80 GiB on",
            {"uniform_values": {**ALIKE, "device": "NVIDIA H100, 80 GiB"}},
        ),
        (
            "driver",
            "broken",
            "differs: 570.86 on node 2 (gpu-c)",
            {"uniform_values": {**ALIKE, "driver": "570.86"}},
        ),
        (
            "NCCL",
            "broken",
            "differs: 2.28.3 on node 2 (gpu-c)",
            {"uniform_values": {**ALIKE, "NCCL": "2.28.3"}},
        ),
        (
            "InfiniBand",
            "not live",
            "differs: none on node 2 (gpu-c)",
            {"uniform_values": {**ALIKE, "InfiniBand": "none"}},
        ),
        (
            "NCCL_DEBUG",
            "not live",
            "differs: none on node 2 (gpu-c)",
            {"uniform_values": NO_DEBUG},
        ),
        ("devices", "broken", "ranks 0, 4 have the same one", {"device_id": "id0"}),
        ("devices", "broken", "node 2 (gpu-c)", {"why_no_device": "torch finds no CUDA device"}),
        ("memory", "broken", "20 GiB in use on device 0 of node 2", {"used_bytes": 20 * GIB}),
        (
            "ports",
            "broken",
            "node 0 cannot be reached from node 2 (gpu-c)",
            {"unreachable_nodes": {"0": "timed out"}},
        ),
        ("clocks", "not live", "node 2 (gpu-c) is -3.2 s from node 0", {"clock_offset_s": -3.2}),
        (
            "shared folder",
            "broken",
            "node 2 (gpu-c) does not see what other nodes write",
            {"unseen_nodes": [0, 1]},
        ),
        (
            "shared folder",
            "broken",
            "Read-only file system",
            {"folder_why_not": "Read-only file system"},
        ),
        (
            "all-reduce in a node",
            "not live",
            "slower from node 2 (gpu-c): 50.0 GB/s",
            {"node_bytes_per_s": 50e9},
        ),
        (
            "message to the next node",
            "not live",
            "slower from node 2 (gpu-c): 1.0 GB/s",
            {"next_node_bytes_per_s": 1e9},
        ),
        (
            "collectives",
            "broken",
            "unhandled system error",
            {"speed_why_not": "unhandled system error"},
        ),
    ],
)
def test_a_node_that_differs_is_named(
    path: str, state: str, words: str, of_last: dict[str, Any]
) -> None:
    found = row(path, **of_last)
    assert found.state == state
    assert words in f"{found.taken} | {found.why}"


def test_ranks_of_another_number_than_the_run_has() -> None:
    assert row("ranks", num_ranks=8).why == "trainer.nnodes x trainer.n_gpus_per_node is 8"


def test_clocks_and_folders_are_asked(tmp_path: Path) -> None:
    with serve_clock("127.0.0.1") as port:
        offset, why_not = measure_clock_offset("127.0.0.1", port)
    assert offset is not None and abs(offset) < 5.0 and not why_not
    assert measure_clock_offset("127.0.0.1", port)[0] is None
    with leave_marker_file(tmp_path, "there") as why_not:
        assert not why_not and find_unseen_files(tmp_path, ["there"]) == []
    assert list(tmp_path.iterdir()) == []
    with leave_marker_file(tmp_path / "gone", "there") as why_not:
        assert "No such file" in why_not


def test_nodes_that_do_not_answer_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 of them, one after the other, would take longer than the other ranks wait."""

    together = threading.Barrier(20)

    def silent(address: tuple[str, int], timeout: float) -> None:
        together.wait(120)
        raise OSError(f"no {address[1]}")

    monkeypatch.setattr(node_probe.socket, "create_connection", silent)
    assert node_probe.measure_clock_offsets([("10.0.0.1", port) for port in range(100)]) == [
        (None, f"no {port}") for port in range(100)
    ]


@pytest.mark.dist
def test_two_nodes_of_this_machine(tmp_path: Path) -> None:
    """Under torchrun, over gloo. One has another setting."""
    base = {
        "JOB": "doctor",
        "NNODES": "2",
        "NPROC_PER_NODE": "2",
        "MASTER_ADDR": "127.0.0.2",
        "MASTER_PORT": "29731",
    }
    nodes = []
    for number in range(2):
        more = {"NODE_RANK": str(number), "NCCL_DEBUG": ("INFO", "WARN")[number]}
        variables = environment("doctor", **base, **more)
        command = agent_command(["--cluster", "--json"], tmp_path, variables)
        with (tmp_path / f"console{number}").open("w") as console:
            nodes.append(
                subprocess.Popen(
                    command, cwd=tmp_path, env=variables, stdout=console, stderr=console
                )
            )
    codes = [node.wait(timeout=300) for node in nodes]
    consoles = [(tmp_path / f"console{number}").read_text() for number in range(2)]
    assert codes == [0, 0], consoles
    rows = {row["path"]: row for row in json.loads(consoles[0])["rows"]}
    assert rows["ranks"]["taken"] == "4 on 2 node(s)" and rows["ports"]["state"] == "live"
    assert (
        rows["shared folder"]["taken"] == os.fspath(tmp_path)
        and rows["shared folder"]["state"] == "live"
    )
    assert "WARN on node 1" in rows["NCCL_DEBUG"]["taken"]
    for path in ("all-reduce, all ranks", "all-reduce in a node", "message to the next node"):
        assert "B/s" in rows[path]["taken"], rows[path]
    assert not consoles[1] and not list(tmp_path.glob(".doctor*"))
