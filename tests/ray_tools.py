"""A Ray cluster that runs as long as a test wants it, for drivers that join it.

python -m ray_tools DIRECTORY MACHINES    (in tests/): makes one, says where on stdout, and ends it when stdin ends

Its machines are raylets of this one: Ray tells them apart, though all have the address 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).parent
NUM_CPUS = 8
JOINED_BY = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")


@contextmanager
def running_cluster(num_machines: int = 1) -> Iterator[dict[str, str]]:
    """The environment of a driver that joins it. Each machine has NUM_CPUS."""
    with tempfile.TemporaryDirectory(prefix="ray-test-", ignore_cleanup_errors=True) as directory:
        command = [sys.executable, "-m", "ray_tools", directory, str(num_machines)]
        with subprocess.Popen(command, cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as head:
            assert head.stdin is not None and head.stdout is not None
            try:
                yield json.loads(head.stdout.readline())
            finally:
                head.stdin.close()
                head.wait(60)


def free_cpus(environment: dict[str, str]) -> float:
    """CPUs of that cluster that nobody holds, as Ray says."""
    program = "import ray; ray.init(log_to_driver=False); print(ray.available_resources().get('CPU', 0))"
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
    from rlhf_megatron.runtime import ray_environment

    ray_environment.prepare(None, os.environ)
    import ray

    from rlhf_megatron.runtime.ray import Cluster

    with Cluster(None, Path(directory), NUM_CPUS):
        joined = {name: os.environ[name] for name in JOINED_BY}
        address = ray.get_runtime_context().gcs_address
        more = [str(Path(sys.executable).with_name("ray")), "start", f"--address={address}", f"--num-cpus={NUM_CPUS}"]
        more += ["--block", f"--temp-dir={directory}", "--object-store-memory=80000000", "--disable-usage-stats"]
        with contextlib.ExitStack() as stack:
            for _ in range(num_machines - 1):
                machine = subprocess.Popen(more, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
                stack.callback(machine.wait, 60)
                stack.callback(machine.terminate)
            while len([node for node in ray.nodes() if node["Alive"]]) < num_machines:
                time.sleep(0.1)
            print(json.dumps({"RAY_ADDRESS": address, **joined}), flush=True)
            sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
