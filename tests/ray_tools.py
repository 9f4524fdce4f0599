"""A Ray cluster that runs as long as a test wants it, for drivers that join it.

python -m ray_tools DIRECTORY     (in tests/): makes one, says where on stdout, and ends it when stdin ends
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

TESTS = Path(__file__).parent
NUM_CPUS = 8
JOINED_BY = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")


@contextmanager
def running_cluster() -> Iterator[dict[str, str]]:
    """The environment of a driver that joins it."""
    with tempfile.TemporaryDirectory(prefix="ray-test-", ignore_cleanup_errors=True) as directory:
        command = [sys.executable, "-m", "ray_tools", directory]
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


def actors(environment: dict[str, str]) -> list[str]:
    """States of all actors that the cluster knows."""
    program = (
        "import ray; from ray._private.state import actors; ray.init(log_to_driver=False);"
        "print(','.join(sorted(actor['State'] for actor in actors().values())))"
    )
    return _say(program, environment).split(",")


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


def main(directory: str) -> None:
    from rlhf_megatron.runtime import ray_environment

    ray_environment.prepare(None, os.environ)
    import ray

    from rlhf_megatron.runtime.ray import Cluster

    with Cluster(None, Path(directory), NUM_CPUS):
        joined = {name: os.environ[name] for name in JOINED_BY}
        print(json.dumps({"RAY_ADDRESS": ray.get_runtime_context().gcs_address, **joined}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
