"""Engines under Ray: an actor each, on the machine of its bundle, where the server is its child.

driver --- actor of engine0 --- server         The server ends with its actor, the actor with the driver.
       `-- actor of engine1 --- server         The actor is the server's keeper (`runtime.keepers`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rlhf_megatron.config.rules.parts import num_parts
from rlhf_megatron.config.schema import RolloutConfig
from rlhf_megatron.resharding.transfer_dir import TransferDir, make_transfer_dir_at
from rlhf_megatron.rollout.fleet.process import Launch
from rlhf_megatron.rollout.kinds import engine_kind
from rlhf_megatron.runtime.driver_gate import DriverGate
from rlhf_megatron.runtime.keepers import Answer, KeptLaunch, Remote, ServerKeeper
from rlhf_megatron.runtime.processes import machine_id
from rlhf_megatron.runtime.ray.cluster import Cluster, Whereabouts, whereabouts
from rlhf_megatron.runtime.ray.places import Seating, bundle_of_part, must_share_machine, seat_of


class SeatedKeeper(ServerKeeper):
    """A keeper in the actor's process, which finds out where Ray has put it."""

    def __init__(self, directory: str) -> None:
        """`directory`: the driver's, from which relative paths of the settings count, where this machine has it."""
        super().__init__()
        self._transfer: TransferDir | None = None  # made here
        with contextlib.suppress(OSError):
            os.chdir(directory)

    def begin_here(
        self,
        launch: Launch,
        seating: Seating,
        is_again: bool,
        timeout_s: float,
        makes_transfer_dir: bool,
        secret: bytes,
    ) -> str:
        """Begin, as `begin` does, on this machine. `makes_transfer_dir`: weights come through its memory alone.
        `secret`: of the run, where the machine starts drivers; b"": it starts none."""
        if secret and whereabouts().machine != seating.driver_machine:
            self.gate = DriverGate(whereabouts().address, secret)
        if makes_transfer_dir:
            self._transfer = make_transfer_dir_at(launch.transfer_dir)
        return self.begin(launch, partial(seat_of, whereabouts(), seating), is_again, timeout_s)

    def stop(self) -> None:
        super().stop()
        if self._transfer is not None:
            self._transfer.close()


class RayEngines:
    """A `rollout.fleet.process.Place`: each launch that it is given goes to an actor in its bundle."""

    def __init__(
        self,
        cluster: Cluster,
        rollout: RolloutConfig,
        num_machines: int,
        num_cpus: float,
        num_gpus: int,
        ranks: Callable[[], Sequence[Whereabouts]],
        environment: Mapping[str, str],
        secret: bytes,
        first_bundle: int | None = None,
    ) -> None:
        """`num_cpus`, `num_gpus`: of an engine on one machine; 0 GPUs on a CPU. `ranks`: where those of the trainer
        run, in order; it waits until they do. `environment`: of the actors, and so of the servers. `secret`: of the
        run, where other machines than the driver's start drivers. `first_bundle`: theirs, where they score and take
        no weights: others than the ranks and the driver ask them then."""
        self._cluster = cluster
        self._rollout = rollout
        self._num_machines = num_machines
        self._num_cpus = num_cpus
        self._num_gpus = num_gpus
        self._ranks = ranks
        self._environment = environment
        self._first_bundle = first_bundle
        self._secret = secret if rollout.num_drivers != 0 else b""
        self._num_placed = 0

    def __call__(self, launch: Launch) -> Launch:
        index = self._num_placed
        self._num_placed += 1
        rollout, is_shared, first = self._rollout, self._rollout.colocated, self._first_bundle
        is_known = first is None or self._cluster.is_own  # who asks it
        is_engine = first is None or is_shared
        number = bundle_of_part(self._num_machines, is_shared, index) if is_engine else (first or 0) + index

        def begin(is_again: bool) -> tuple[Remote, Answer]:
            seating = Seating(
                launch.name,
                machine_id() if is_known else "",
                tuple(self._ranks()),
                first is None and must_share_machine(rollout),
                self._num_gpus if is_shared else 0,
                index // self._num_machines * self._num_gpus,
                first is None and num_parts(rollout) > 1,
            )
            keeper = self._cluster.start(
                launch.name,
                SeatedKeeper,
                (os.getcwd(),),
                bundle=number,
                num_cpus=self._num_cpus,
                num_gpus=0 if is_shared else self._num_gpus,
                environment=self._environment,
            )
            makes = (
                first is None
                and is_shared
                and rollout.weight_transport == "tensor"
                and not engine_kind(rollout.engine).is_elsewhere
            )
            known = (launch, seating, is_again, rollout.startup_timeout_s, makes, self._secret)
            return keeper, keeper.submit("begin_here", *known)

        machine = index % self._num_machines if is_shared else 0
        return KeptLaunch(launch, begin, rollout.startup_timeout_s, machine)
