"""Several machines on this one: network namespaces of their own, joined by a bridge. Each has
another loopback, /dev/shm and host name, so that what should go over the network and does not,
does not arrive.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from end_to_end_tools import overrides
from launch_tools import TIMEOUT_S, TORCHRUN, Nodes, environment

SCRIPT = """
set -euo pipefail
exec 3<&0
num=$1; shift
ip link add switch type bridge && ip link set switch up
holders=()
trap 'kill "${holders[@]}"' EXIT
for ((n = 0; n < num; n++)); do
    unshare --net --mount --uts bash -c \
        "mount -t tmpfs tmpfs /dev/shm && hostname machine$n && touch ready$n && exec sleep 3600" \
& holders+=($!)
done
inside() { nsenter --net --mount --uts --target "${holders[$1]}" "${@:2}"; }
for ((n = 0; n < num; n++)); do
    until [[ -e ready$n ]]; do sleep 0.05; done
    ip link add "towards$n" type veth peer name towards netns "${holders[n]}"
    ip link set "towards$n" master switch up
    if [[ $n != 0 && -n ${OWN_FILES:-} ]]; then inside $n mount -t tmpfs tmpfs "$OWN_FILES"; fi
    inside $n ip address add "10.77.0.$((n + 1))/24" dev towards
    inside $n ip link set towards up && inside $n ip link set lo up
done
export MASTER_ADDR=${MASTER_ADDR:-10.77.0.1} MASTER_PORT=29500
pids=()
begin() { NODE_RANK=$2 inside $1 "${@:3}" >"console$1" 2>&1 & pids+=($!); }
for ((n = 0; n < num - SPARES; n++)); do
    begin $n $n "$@"
done
while read -r -u 3 verb n rank; do
    if [[ $verb == cut ]]; then ip link set "towards$n" down; else begin $n $rank "$@"; fi
done
for pid in "${pids[@]}"; do
    wait $pid && code=0 || code=$?
    echo $code
done
"""


def has_namespaces() -> bool:
    """Whether this user may make them."""
    try_it = [
        "unshare",
        "--net",
        "--mount",
        "--uts",
        "--map-root-user",
        "ip",
        "link",
        "add",
        "switch",
        "type",
        "bridge",
    ]
    return (
        bool(shutil.which("unshare") and shutil.which("ip"))
        and subprocess.run(try_it).returncode == 0
    )


class Machines(Nodes):
    """launch/torchrun.sh, or another program, on each."""

    def __init__(
        self,
        config: Path,
        settings: dict[str, Any],
        num_machines: int,
        num_spares: int = 0,
        program: Path = TORCHRUN,
        **variables: str,
    ) -> None:
        """`settings` has trainer.nnodes; later machines have engines alone, and the last ones begin
        with `join`. `variables`: of launch/torchrun.sh, or OWN_FILES: a directory in whose place
        later machines have one of their own.
        """
        words: Sequence[str] = [str(program), str(config), *overrides(settings)]
        marker = os.urandom(16).hex()
        nnodes = settings["trainer.nnodes"]
        each = settings["trainer.n_gpus_per_node"]
        alone = num_machines - num_spares - nnodes
        own = {"NNODES": str(nnodes), "ENGINE_NODES": str(alone), "SPARES": str(num_spares)}
        own["NPROC_PER_NODE"] = str(each)
        script = subprocess.Popen(
            [
                "unshare",
                "--net",
                "--mount",
                "--map-root-user",
                "bash",
                "-c",
                SCRIPT,
                "machines",
                str(num_machines),
                *words,
            ],
            cwd=config.parent,
            env=environment(marker, **own | variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        super().__init__(config.parent, [script], marker)
        self.num_machines = num_machines

    def cut(self, machine: int) -> None:
        """Takes the machine off the network: nobody hears of it any more, nor of its end."""
        self._say(b"cut %d\n" % machine)

    def join(self, machine: int, node_rank: int) -> None:
        """A spare machine takes the place of another."""
        self._say(b"join %d %d\n" % (machine, node_rank))

    def _say(self, line: bytes) -> None:
        pipe = self.processes[0].stdin
        assert pipe is not None
        pipe.write(line)
        pipe.flush()

    def wait(self) -> list[int]:
        """The exit code of each machine."""
        said = self.processes[0].communicate(timeout=TIMEOUT_S)[0]
        return [int(word) for word in said.split()]

    def consoles(self) -> str:
        return "\n".join(self.console(machine) for machine in range(self.num_machines))
