"""Two nodes: two torchrun agents on this machine, at a loopback address or in network
namespaces of their own.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from end_to_end_tools import (
    DP2,
    MARKER,
    ONE_RANK,
    Finished,
    processes_with,
    train,
    wait_for_the_end,
    write_config,
)
from launch_tools import TIMEOUT_S, TORCHRUN, Nodes, environment, start_nodes
from places import ROOT, SUPPORT

from rlhf_megatron.rollout.socket_limits import find_interface_towards

pytestmark = pytest.mark.dist
TWO_NODES = DP2 | {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 1}
QUICK = {"warmup.max_steps": 0, "trainer.val_before_train": False}
ENDLESS = QUICK | {"trainer.total_training_steps": 100_000}
SECONDS = ("timing_", "perf/", "sync/seconds", "seconds")

# A namespace has interfaces and a loopback of its own: only one pair joins the two, and names
# resolve to nothing.
NAMESPACES = """
set -euo pipefail
unshare --net sleep 3600 & other=$!
trap 'kill $other' EXIT
until [[ $(readlink /proc/$other/ns/net) != $(readlink /proc/self/ns/net) ]]; do sleep 0.1; done
ip link add towards1 type veth peer name towards0
ip link set towards0 netns $other
ip address add 10.77.0.1/24 dev towards1 && ip link set towards1 up && ip link set lo up
inside() { nsenter --net --target $other "$@"; }
inside ip address add 10.77.0.2/24 dev towards0 && inside ip link set towards0 up && inside ip \
link set lo up
export NNODES=2 NPROC_PER_NODE=1 MASTER_ADDR=10.77.0.1 MASTER_PORT=29500
NODE_RANK=1 inside "$@" >console1 2>&1 & node1=$!
NODE_RANK=0 "$@" >console0 2>&1 && code0=0 || code0=$?
wait $node1 && code1=0 || code1=$?
echo $code0 $code1
"""


def has_namespaces() -> bool:
    try_it = [
        "unshare",
        "--net",
        "--map-root-user",
        "ip",
        "link",
        "add",
        "towards1",
        "type",
        "veth",
    ]
    return (
        bool(shutil.which("unshare") and shutil.which("ip"))
        and subprocess.run(try_it).returncode == 0
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))  # torch listens on all addresses
        return int(found.getsockname()[1])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Nodes] = []

    def begin(
        settings: dict[str, Any], only_on: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    ) -> Nodes:
        started.append(
            start_nodes(write_config(tmp_path), TWO_NODES | settings, free_port(), only_on)
        )
        return started[-1]

    yield begin
    for nodes in started:
        nodes.end()


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The same two replicas on one node."""
    run = train(write_config(tmp_path_factory.mktemp("one_node")), DP2)
    assert run.exit_code == 0, run.console
    return run


def numbers(run: Finished) -> list[dict[str, Any]]:
    rows = [row for kind in ("warmup", "evaluation", "step") for row in run.rows(kind)]
    return [
        {key: value for key, value in row.items() if not key.startswith(SECONDS)} for row in rows
    ]


def assert_same(directory: Path, console: str, one_node: Finished) -> None:
    two = Finished(directory, directory / "runs" / "tiny", 0, console, "")
    assert numbers(two) == numbers(one_node), "all numbers, bit for bit"
    steps = two.rows("step")
    assert len(steps) == 2 and all(row["actor/grad_norm"] > 0 for row in steps)
    assert two.summary()["layout"] == "tp1 pp1 dp2"
    assert "[actor dp1 pp0 tp0]" in (two.run_dir / "logs" / "rank1.log").read_text()


def test_two_nodes_give_the_numbers_of_one(start, one_node: Finished) -> None:
    nodes = start({})
    assert nodes.wait() == [0, 0], nodes.console(0) + nodes.console(1)
    assert nodes.console(1) == "", "node 0 alone has something to say"
    assert_same(nodes.directory, nodes.console(0), one_node)
    assert nodes.left_over() == []


@pytest.mark.long
def test_a_critic_on_the_other_node_gives_the_numbers_of_one_rank(
    start, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Node 0 has the actor's pool and node 1 the critic's; on one rank they take turns."""
    critic = QUICK | {
        "algorithm.adv_estimator": "gae",
        "critic.value_head_init_std": 0.1,
        "critic.optim.lr": 1e-3,
    }
    alone = train(write_config(tmp_path_factory.mktemp("one_rank")), ONE_RANK | critic)
    assert alone.exit_code == 0, alone.console
    nodes = start(critic | {"critic.num_ranks": 1})
    assert nodes.wait() == [0, 0], nodes.console(0) + nodes.console(1)
    two = Finished(nodes.directory, nodes.directory / "runs" / "tiny", 0, nodes.console(0), "")
    assert numbers(two) == numbers(alone), "all numbers, bit for bit"
    assert all(
        row["critic/vf_loss"] > 0 and row["critic/grad_norm"] > 0 for row in two.rows("step")
    )
    assert "[actor dp0 pp0 tp0]" in (two.run_dir / "logs" / "rank0.log").read_text()
    assert "[critic dp0 pp0 tp0]" in (two.run_dir / "logs" / "rank1.log").read_text()
    assert nodes.left_over() == []


@pytest.mark.long
@pytest.mark.skipif(not has_namespaces(), reason="needs unprivileged network namespaces")
def test_two_network_namespaces_give_the_numbers_of_one(tmp_path: Path, one_node: Finished) -> None:
    """Each has another loopback: what should go over the network and does not, does not arrive."""
    marker = os.urandom(16).hex()
    words = [
        str(TORCHRUN),
        str(write_config(tmp_path)),
        *(f"{key}={value}" for key, value in PLAIN.items()),
    ]
    command = [
        "unshare",
        "--net",
        "--map-root-user",
        "bash",
        "-c",
        NAMESPACES,
        "namespaces",
        *words,
    ]
    script = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(marker),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    nodes = Nodes(tmp_path, [script], marker)
    try:
        codes = script.communicate(timeout=TIMEOUT_S)[0]
        assert codes.split() == [b"0", b"0"], nodes.console(0) + nodes.console(1)
        assert_same(tmp_path, nodes.console(0), one_node)
        assert nodes.left_over() == []
    finally:
        nodes.end()


KILLED_TEST = """
import subprocess, sys
from pathlib import Path
from launch_tools import Nodes, environment

sleeper = subprocess.Popen(["sleep", "600"], env=environment(sys.argv[1]), start_new_session=True)
nodes = Nodes(Path(), [sleeper], sys.argv[1])
print("begun", flush=True)
sys.stdin.read()
"""


def test_a_test_that_is_killed_leaves_no_processes() -> None:
    marker = os.urandom(16).hex()
    own = {**os.environ, "PYTHONPATH": f"{SUPPORT}:{ROOT}"}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_TEST, marker],
        env=own,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as test:
        assert test.stdout is not None and test.stdout.readline() == b"begun\n"
        assert len(processes_with(f"{MARKER}={marker}")) == 1
        test.kill()
    assert wait_for_the_end(f"{MARKER}={marker}", TIMEOUT_S) == []


PLAIN = {
    "trainer.nnodes": 2,
    "trainer.n_gpus_per_node": 1,
    "actor.megatron.tensor_model_parallel_size": 1,
    "actor.megatron.pipeline_model_parallel_size": 1,
}


def test_a_killed_rank_of_the_other_node_ends_both_and_is_named(start) -> None:
    nodes = start(ENDLESS)
    metrics = nodes.directory / "runs" / "tiny" / "metrics.jsonl"
    nodes.wait_for(lambda: metrics.exists() and "step" in metrics.read_text())
    os.kill(nodes.host_of(1), signal.SIGKILL)
    assert nodes.wait() == [1, 137]
    assert "HostLostError: [actor dp1 pp0 tp0] (process " in nodes.console(0)
    assert nodes.left_over() == []


def test_a_node_with_other_settings_ends_both(start) -> None:
    """Before any rank is registered, and long before the deadline of the start (600 s)."""
    nodes = start(QUICK, only_on=({}, {"actor.optim.lr": 3e-4, "trainer.seed": 7}))
    assert nodes.wait() == [2, 2]
    theirs = nodes.console(1)
    ours = nodes.console(0)
    for line in (
        "actor.optim.lr: 0.0003 here, but actor.optim.lr: 0.0002 on rank 0;",
        "trainer.seed: 7 here, but",
    ):
        assert line in theirs
    assert (
        "node 1 ended with exit code 2 before this run was over; the output there says why." in ours
    )
    assert nodes.left_over() == []


def test_a_node_0_that_does_not_start_ends_the_other(start) -> None:
    nodes = start(QUICK, only_on=({"model.path": "nowhere"}, {}))
    assert nodes.wait() == [2, 1]
    assert "nowhere) is not a directory" in nodes.console(0)
    # torch may warn before it: its rendezvous finds the store gone, where node 0 ends
    # while node 1 joins.
    assert nodes.console(1).endswith(
        "node 0 has ended before this run was over; the output there says why.\n"
    )
    assert nodes.left_over() == []


def test_a_stop_of_all_nodes_is_a_stop_not_a_loss(start) -> None:
    """A scheduler that ends a job signals all its processes at about the same time."""
    nodes = start(ENDLESS)
    metrics = nodes.directory / "runs" / "tiny" / "metrics.jsonl"
    nodes.wait_for(lambda: metrics.exists() and "step" in metrics.read_text())
    for process in reversed(nodes.processes):
        process.send_signal(signal.SIGTERM)
    assert nodes.wait() == [75, 75], "with its state saved"
    assert "Error" not in nodes.console(0) and nodes.console(1) == ""
    assert list((nodes.directory / "transfer").iterdir()) == [], "the controller has cleaned up"
    assert nodes.left_over() == []


def test_an_agent_that_hangs_when_another_node_has_ended_is_ended() -> None:
    """Its main thread may sit in a call to a store that is gone, where no signal handler
    of Python runs.
    """
    code = """if True:
        import time
        from torch.distributed import TCPStore
        from rlhf_megatron.runtime.torchrun import node_watch
        node_watch.POLL_S, node_watch.GRACE_S, node_watch.LIMIT_S = 0.1, 0.2, 0.5
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        say = lambda word: lambda: print(word, flush=True)
        node_watch.OtherNodesWatcher("127.0.0.1", server.port, 1, say("end"), say("kill"))
        server.set("rlhf_megatron/ended", "2 17")
        time.sleep(300)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (17, ["end", "kill"])
    assert (
        done.stderr
        == "node 2 ended with exit code 17 before this run was over; the output there says why.\n"
    )


def test_the_interface_that_leads_to_an_address() -> None:
    assert find_interface_towards("127.0.0.3") == "lo"
    assert find_interface_towards("no.such.name.invalid") is None
