"""Print how many machines and ranks a job needs, for the scripts of launch/:
`python -m rlhf_megatron.cli.launch_size JOB CONFIG ...`.

The output is one line, "NNODES NPROC_PER_NODE ENGINE_NODES": machines with ranks, ranks on each,
and machines with engines alone. The words are those of the job's own command. The exit code is 2,
without a line, for words or a configuration that cannot be read, or with a number out of range: the
job itself explains them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_megatron.cli.main import USAGE_ERROR, parse_arguments
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.engine_machines import (
    assign_part_machines,
    assign_reward_server_machines,
)
from rlhf_megatron.config.rules.validate import find_numbers_out_of_range
from rlhf_megatron.config.schema import RunConfig


@dataclass(frozen=True)
class LaunchSize:
    """The numbers with which launch/torchrun.sh starts a run on each of its machines."""

    num_rank_machines: int
    num_ranks_per_machine: int
    num_engine_machines: int  # those that have servers and no ranks

    @classmethod
    def from_config(cls, config: RunConfig) -> LaunchSize:
        """Return the numbers of a configuration. Machines without ranks are numbered after those
        with ranks, up to the largest number that a setting names.
        """
        trainer = config.trainer
        engine_machines = assign_part_machines(config) if config.job == "train" else ()
        server_machines = [*engine_machines, *assign_reward_server_machines(config)]
        num_machines = max((machine + 1 for machine in server_machines), default=0)
        return cls(trainer.nnodes, trainer.n_gpus_per_node, max(0, num_machines - trainer.nnodes))

    @property
    def num_machines(self) -> int:
        """Return the number of machines of the run."""
        return self.num_rank_machines + self.num_engine_machines


def main(words: Sequence[str]) -> int:
    """Print the numbers of the job whose command line, from the command on, is `words`. Return 2,
    and print nothing, where its configuration cannot be read or has a number out of range.
    """
    args = parse_arguments(words)
    try:
        loaded = read_run_config(args.config, args.overrides)
    except (ConfigError, ValueError, OSError):
        return USAGE_ERROR
    if any(find_numbers_out_of_range(loaded)):
        return USAGE_ERROR
    size = LaunchSize.from_config(loaded.config)
    numbers = (size.num_rank_machines, size.num_ranks_per_machine, size.num_engine_machines)
    print(*numbers)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
