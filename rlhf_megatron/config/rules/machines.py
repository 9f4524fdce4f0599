"""Which machine each engine of a run is on, where torchrun's agents start them; and rules on `rollout.engine_machines`.

Machines have numbers: NODE_RANK of launch/torchrun.sh. Engines are dealt to them in turns; one that spans machines
(nnodes of SGLang) has a part on each, and the parts are dealt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.rules import Findings, Idle, idle, rule_of_rl, wrong
from rlhf_megatron.config.rules.parts import entry_of, num_parts, num_ranks, reads
from rlhf_megatron.config.rules.run import GPUS, NODES, actor_ranks, has_served_model
from rlhf_megatron.config.schema import RolloutConfig, RunConfig
from rlhf_megatron.config.source import Loaded

MACHINES, COLOCATED, TRANSPORT = "rollout.engine_machines", "rollout.colocated", "rollout.weight_transport"


def part_names(rollout: RolloutConfig) -> list[str]:
    """Name the parts of the engines that a run starts: engine0, engine0-part1, engine1, ..."""
    parts = range(num_parts(rollout))
    return [part_name(index, part) for index in range(rollout.num_engines) for part in parts]


def part_name(engine: int, part: int = 0) -> str:
    return f"engine{engine}-part{part}" if part else f"engine{engine}"


def machines_of_parts(c: RunConfig) -> list[int]:
    """Return the machine of each of `part_names`; all are on 0 where nobody deals them out."""
    count = len(part_names(c.rollout))
    if not _are_dealt(c):
        return [0] * count
    machines = _usable(c)
    return [machines[index % len(machines)] for index in range(count)]


def _are_dealt(c: RunConfig) -> bool:
    """Return whether engines are dealt to numbered machines. Under Ray only those that take turns with ranks are."""
    is_dealt = c.trainer.runtime == "torchrun" or (c.trainer.runtime == "ray" and c.rollout.colocated)
    return is_dealt and not c.rollout.endpoints


def _usable(c: RunConfig) -> Sequence[int]:
    """Return the machines that engines are dealt to."""
    is_rays = c.trainer.runtime == "ray"
    is_limited = c.rollout.weight_transport == "tensor" and not is_rays
    reached = machines_with_copies(c) if is_limited else range(c.trainer.nnodes)
    return c.rollout.engine_machines or reached or (0,)


def machines_of_servers(c: RunConfig) -> list[int]:
    """Return the machine of each server of the reward model."""
    machines = c.reward_model.served.machines or (0,)
    count = c.reward_model.served.num_servers if has_served_model(c) else 0
    return [machines[index % len(machines)] for index in range(count)]


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
    if c.rollout.endpoints:
        return ""
    if not _are_dealt(c) and c.trainer.nnodes > 1:
        return "where Ray finds room" if _is_anywhere(c) else "all on the driver's"
    by_machine: dict[int, list[str]] = {}
    for name, machine in zip(part_names(c.rollout), machines_of_parts(c), strict=True):
        by_machine.setdefault(machine, []).append(name)
    for index, machine in enumerate(machines_of_servers(c)):
        by_machine.setdefault(machine, []).append(f"reward{index}")
    if set(by_machine) == {0} and c.trainer.nnodes == 1:
        return ""
    return "; ".join(f"machine {machine}: {', '.join(names)}" for machine, names in sorted(by_machine.items()))


def _is_anywhere(c: RunConfig) -> bool:
    """Return whether weights reach engines over a network."""
    kind = entry_of("engine", c.rollout.engine)
    return kind is not None and kind.build.is_elsewhere and c.rollout.weight_transport != "tensor"


@idle
def idle_engine_machines(c: RunConfig) -> Iterator[Idle]:
    yield bool(c.rollout.endpoints), (MACHINES,), "rollout.endpoints", "let the run start the servers"
    yield c.trainer.runtime != "torchrun", (MACHINES,), "trainer.runtime", "set that to torchrun"


@rule_of_rl
def engines_over_machines(loaded: Loaded) -> Findings:
    c, key = loaded.config, "rollout.sglang.args.nnodes"
    parts, ranks, runtime = num_parts(c.rollout), num_ranks(c.rollout), c.trainer.runtime
    given = c.rollout.sglang.args.get("nnodes")
    is_wrong = given is not None and str(given) != str(parts) and reads(c.rollout, "rollout.sglang")
    yield wrong(is_wrong, f"{key} ({given!r}) must be a number of machines, 1 or more; correct it.", (key,))
    if parts == 1 or c.rollout.endpoints:
        return
    yield wrong(
        c.rollout.weight_transport == "tensor",
        f"{TRANSPORT} (tensor) goes through memory of one machine, which an engine on {parts} ({key}) does not share;"
        " use process_group or disk.",
        (TRANSPORT, key),
    )
    yield wrong(
        ranks % parts,
        f"{key} ({parts}) must divide the ranks of an engine (tp_size {ranks}): each machine has as many; correct"
        " either.",
        (key, "rollout.sglang.args"),
    )
    machines = len(_usable(c)) if runtime == "torchrun" else parts if runtime == "ray" else 1
    yield wrong(
        machines < parts,
        f"{key} ({parts}) needs so many machines for one engine, but engines can be on {machines} ({NODES},"
        f" {MACHINES}, trainer.runtime {runtime}); name more, or lower nnodes.",
        (key, NODES, MACHINES, "trainer.runtime"),
    )


@rule_of_rl
def engine_machines(loaded: Loaded) -> Findings:
    c = loaded.config
    if not _are_dealt(c):
        return
    given = c.rollout.engine_machines
    yield wrong(
        any(machine < 0 for machine in given) or len(set(given)) < len(given),
        f"{MACHINES} ({list(given)}) must name each machine once, by a number from 0 on; correct it.",
        (MACHINES,),
    )
    used, with_copies, num_ranked = set(machines_of_parts(c)), machines_with_copies(c), c.trainer.nnodes
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
