"""Which machine each engine of a run is on, where torchrun's agents start them; and rules on `rollout.engine_machines`.

Machines have numbers: NODE_RANK of launch/torchrun.sh. Engines are dealt to them in turns.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.rules import Findings, Idle, idle, rule_of_rl, wrong
from rlhf_megatron.config.rules.run import GPUS, NODES, actor_ranks
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.source import Loaded

MACHINES, COLOCATED, TRANSPORT = "rollout.engine_machines", "rollout.colocated", "rollout.weight_transport"


def machines_of_engines(c: RunConfig) -> list[int]:
    """Return the machine of each engine that the run starts; all are on 0 but under torchrun on several machines."""
    if c.trainer.runtime != "torchrun" or c.rollout.endpoints:
        return [0] * c.rollout.num_engines
    reached = machines_with_copies(c) if c.rollout.weight_transport == "tensor" else range(c.trainer.nnodes)
    machines = c.rollout.engine_machines or reached or (0,)
    return [machines[index % len(machines)] for index in range(c.rollout.num_engines)]


def machines_with_copies(c: RunConfig) -> list[int]:
    """Return the machines whose ranks hold the actor whole: only there can weights go through memory."""
    megatron, each = c.actor.megatron, c.trainer.n_gpus_per_node
    tp = megatron.tensor_model_parallel_size
    of_experts = megatron.expert_model_parallel_size * (megatron.expert_tensor_parallel_size or tp)
    size = max(tp, of_experts)
    if c.trainer.nnodes == 1:
        return [0]
    if megatron.pipeline_model_parallel_size > 1 or c.actor.backend != "megatron" or size % tp or size % of_experts:
        return []
    found = []
    for machine in range(c.trainer.nnodes):
        first = -(-machine * each // size) * size
        if first + size <= min((machine + 1) * each, actor_ranks(c)):
            found.append(machine)
    return found


def told(c: RunConfig) -> str:
    """Return a line for the log: the engines of each machine. Empty: all are on one."""
    by_machine: dict[int, list[str]] = {}
    for index, machine in enumerate(machines_of_engines(c)):
        by_machine.setdefault(machine, []).append(f"engine{index}")
    if set(by_machine) == {0} and c.trainer.nnodes == 1:
        return ""
    return "; ".join(f"machine {machine}: {', '.join(names)}" for machine, names in sorted(by_machine.items()))


@idle
def idle_engine_machines(c: RunConfig) -> Iterator[Idle]:
    yield bool(c.rollout.endpoints), (MACHINES,), "rollout.endpoints", "let the run start the servers"
    yield c.trainer.runtime != "torchrun", (MACHINES,), "trainer.runtime", "set that to torchrun"


@rule_of_rl
def engine_machines(loaded: Loaded) -> Findings:
    c = loaded.config
    if c.rollout.endpoints or c.trainer.runtime != "torchrun":
        return
    given = c.rollout.engine_machines
    yield wrong(
        any(machine < 0 for machine in given) or len(set(given)) < len(given),
        f"{MACHINES} ({list(given)}) must name each machine once, by a number from 0 on; correct it.",
        (MACHINES,),
    )
    used, with_copies, num_ranked = set(machines_of_engines(c)), machines_with_copies(c), c.trainer.nnodes
    pp = c.actor.megatron.pipeline_model_parallel_size
    is_split = c.rollout.weight_transport == "tensor" and num_ranked > 1
    unreached = sorted(used - set(with_copies)) if c.rollout.weight_transport == "tensor" else []
    if unreached and (unreached != [0] or (is_split and pp > 1)):
        why = f"{pp} pipeline stages lie on several machines" if pp > 1 else "no whole copy of the actor is there"
        yield Problem(
            f"{TRANSPORT} (tensor) does not reach engines on machines {unreached} of {num_ranked} with ranks ({NODES}):"
            f" {why}; use process_group or disk, 1 stage with groups that a machine holds whole, or one machine.",
            (TRANSPORT, MACHINES, NODES, "actor.megatron.pipeline_model_parallel_size"),
        )
    if c.rollout.colocated:
        with_engine = used & set(range(num_ranked))
        yield wrong(
            len(with_engine) < num_ranked or used != with_engine,
            f"{COLOCATED} (true) needs an engine on each machine with ranks, 0 to {num_ranked - 1}, and no other, but"
            f" rollout.num_engines ({c.rollout.num_engines}) are on {sorted(used)}: devices of a machine without one"
            f" would have nobody to take turns with; raise rollout.num_engines, change {MACHINES}, or set colocated:"
            " false.",
            (COLOCATED, "rollout.num_engines", MACHINES, NODES, GPUS),
        )
