"""A Ray cluster that runs as long as a test wants it, for drivers that join it.

python -m ray_tools DIRECTORY MACHINES    (in tests/): makes one, says where on stdout, and ends it
                                          when stdin ends

Its machines are raylets of this one: Ray tells them apart, though all have the address 127.0.0.1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from places import SUPPORT

NUM_CPUS = 8
JOINED_BY = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")


@contextmanager
def running_cluster(num_machines: int = 1) -> Iterator[dict[str, str]]:
    """The environment of a driver that joins it. Each machine has NUM_CPUS."""
    with tempfile.TemporaryDirectory(prefix="ray-test-", ignore_cleanup_errors=True) as directory:
        command = [sys.executable, "-m", "ray_tools", directory, str(num_machines)]
        with subprocess.Popen(
            command, cwd=SUPPORT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as head:
            assert head.stdin is not None and head.stdout is not None
            try:
                yield json.loads(head.stdout.readline())
            finally:
                head.stdin.close()
                head.wait(60)


def free_cpus(environment: dict[str, str]) -> float:
    """CPUs of that cluster that nobody holds, as Ray says."""
    program = (
        "import ray; ray.init(log_to_driver=False); print(ray.available_resources().get('CPU', 0))"
    )
    return float(_say(program, environment))


def _say(program: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip().splitlines()[-1]


def main(directory: str, num_machines: int) -> None:
    from rlhf_megatron.runtime.ray import ray_environment

    ray_environment.set_ray_defaults(None, os.environ)
    os.environ["RAY_TMPDIR"] = directory
    # where the cluster writes its address; Ray takes for granted that it is there
    (Path(directory) / "ray").mkdir()
    from ray.cluster_utils import Cluster

    options = {"num_cpus": NUM_CPUS, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "temp_dir": directory})
    try:
        for _ in range(num_machines - 1):
            cluster.add_node(**options)
        joined = {name: os.environ[name] for name in JOINED_BY}
        print(json.dumps({"RAY_ADDRESS": cluster.address, **joined}), flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
