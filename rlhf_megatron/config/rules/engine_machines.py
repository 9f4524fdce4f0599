"""Which machine each engine of a run is on, where torchrun's agents start them; and rules
on `rollout.engine_machines`.

Machines have numbers: NODE_RANK of launch/torchrun.sh. Engines are dealt to them in turns; one that
spans machines (nnodes of SGLang) has a part on each, and the parts are dealt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlhf_megatron.config.errors import ConfigProblem
from rlhf_megatron.config.rules import (
    IdleSettings,
    OptionalProblems,
    make_problem_if,
    register_idle_rule,
    register_rl_rule,
)
from rlhf_megatron.config.rules.part_rules import (
    count_machines_per_engine,
    count_ranks_per_engine,
    find_registered_part,
    has_engine_setting,
)
from rlhf_megatron.config.rules.run_rules import GPUS, NODES, count_actor_ranks, has_served_model
from rlhf_megatron.config.schema import RolloutConfig, RunConfig
from rlhf_megatron.config.yaml_nodes import LoadedConfig

MACHINES = "rollout.engine_machines"
COLOCATED = "rollout.colocated"
TRANSPORT = "rollout.weight_transport"
NUM_ENGINES = "rollout.num_engines"
TRANSFER_DIR = "rollout.transfer_dir"
MAX_ENGINES_PER_MACHINE = 64  # processes with a model each; no machine has more devices


def list_engine_part_names(rollout: RolloutConfig) -> list[str]:
    """Return the names of all parts of the engines that the run starts, in order: engine0,
    engine0-part1, engine1, ... An engine has one part on each of its machines.
    """
    parts = range(count_machines_per_engine(rollout))
    return [
        format_engine_part_name(index, part)
        for index in range(rollout.num_engines)
        for part in parts
    ]


def format_engine_part_name(engine_index: int, part_index: int = 0) -> str:
    """Return the name of a part of an engine: "engine0" for part 0, "engine0-part1" for part 1."""
    return f"engine{engine_index}-part{part_index}" if part_index else f"engine{engine_index}"


def assign_part_machines(config: RunConfig) -> list[int]:
    """Return the machine number of each engine part, in the order of `list_engine_part_names`. All
    are 0 where the run does not distribute engines over numbered machines.
    """
    count = len(list_engine_part_names(config.rollout))
    if not _are_engines_dealt(config):
        return [0] * count
    machines = _list_usable_machines(config)
    return [machines[index % len(machines)] for index in range(count)]


def _are_engines_dealt(config: RunConfig) -> bool:
    """Return whether the run assigns engines to numbered machines: under torchrun, and under Ray if
    engines are colocated with ranks, but never if rollout.endpoints names running servers.
    """
    is_dealt = config.trainer.runtime == "torchrun" or (
        config.trainer.runtime == "ray" and config.rollout.colocated
    )
    return is_dealt and not config.rollout.endpoints


def _list_usable_machines(config: RunConfig) -> Sequence[int]:
    """Return the numbers of the machines that engines may be assigned to: rollout.engine_machines,
    else the machines of the trainer, but under torchrun with weight_transport tensor only those
    that hold the whole actor; (0,) if there is none.
    """
    is_rays = config.trainer.runtime == "ray"
    is_limited = config.rollout.weight_transport == "tensor" and not is_rays
    reached = (
        find_machines_with_actor_copies(config) if is_limited else range(config.trainer.nnodes)
    )
    return config.rollout.engine_machines or reached or (0,)


def assign_reward_server_machines(config: RunConfig) -> list[int]:
    """Return the machine number of each server of a served reward model, in turns over
    reward_model.served.machines; an empty list without a served model.
    """
    machines = config.reward_model.served.machines or (0,)
    count = config.reward_model.served.num_servers if has_served_model(config) else 0
    return [machines[index % len(machines)] for index in range(count)]


def find_machines_with_actor_copies(config: RunConfig) -> list[int]:
    """Return the numbers of the machines whose own ranks hold the whole actor: only there can
    weights reach an engine through memory. Several machines with pipeline stages, or with another
    backend than megatron, have none.
    """
    megatron = config.actor.megatron
    each = config.trainer.n_gpus_per_node
    tp = megatron.tensor_model_parallel_size
    of_experts = megatron.expert_model_parallel_size * (megatron.expert_tensor_parallel_size or tp)
    size = max(tp, of_experts)
    if config.trainer.nnodes == 1:
        return [0]
    if (
        megatron.pipeline_model_parallel_size > 1
        or config.actor.backend != "megatron"
        or size % tp
        or size % of_experts
    ):
        return []
    found = []
    for machine in range(config.trainer.nnodes):
        first = -(-machine * each // size) * size
        if first + size <= min((machine + 1) * each, count_actor_ranks(config)):
            found.append(machine)
    return found


def describe_engine_placement(config: RunConfig) -> str:
    """Return a text for the log that says on which machine the engines and reward servers are;
    empty where all are on one machine or the run attaches to running servers.
    """
    if config.rollout.endpoints:
        return ""
    if not _are_engines_dealt(config) and config.trainer.nnodes > 1:
        return "where Ray finds room" if _can_engines_be_anywhere(config) else "all on the driver's"
    by_machine: dict[int, list[str]] = {}
    for name, machine in zip(
        list_engine_part_names(config.rollout), assign_part_machines(config), strict=True
    ):
        by_machine.setdefault(machine, []).append(name)
    for index, machine in enumerate(assign_reward_server_machines(config)):
        by_machine.setdefault(machine, []).append(f"reward{index}")
    if set(by_machine) == {0} and config.trainer.nnodes == 1:
        return ""
    return "; ".join(
        f"machine {machine}: {', '.join(names)}" for machine, names in sorted(by_machine.items())
    )


def _can_engines_be_anywhere(config: RunConfig) -> bool:
    """Return whether the engines can be on machines without ranks, because weights reach this kind
    of engine over a network.
    """
    kind = find_registered_part("engine", config.rollout.engine)
    return (
        kind is not None
        and kind.build.can_run_elsewhere
        and config.rollout.weight_transport != "tensor"
    )


@register_idle_rule
def list_idle_machine_settings(config: RunConfig) -> Iterator[IdleSettings]:
    """Yield two entries for rollout.engine_machines. They say whether the setting is ignored
    because of rollout.endpoints, and because the runtime is not torchrun.
    """
    yield (
        bool(config.rollout.endpoints),
        (MACHINES,),
        "rollout.endpoints",
        "let the run start the servers",
    )
    yield (
        config.trainer.runtime != "torchrun",
        (MACHINES,),
        "trainer.runtime",
        "set {switch} to torchrun",
    )


@register_rl_rule
def check_engine_count(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem for more engines on a machine than any machine can start. Yield nothing where
    the run attaches to running servers, or where Ray finds the machines of a cluster.
    """
    c = loaded.config
    is_on_cluster = c.trainer.runtime == "ray" and c.ray.address is not None
    if c.rollout.endpoints or (is_on_cluster and not _are_engines_dealt(c)):
        return
    num_machines = len(_list_usable_machines(c)) if _are_engines_dealt(c) else 1
    num_parts = c.rollout.num_engines * count_machines_per_engine(c.rollout)
    most = MAX_ENGINES_PER_MACHINE * num_machines
    machines = "one machine" if num_machines == 1 else f"{num_machines} machines"
    yield make_problem_if(
        num_parts > most,
        (
            f"{NUM_ENGINES} ({c.rollout.num_engines}) must be at most"
            f" {most // count_machines_per_engine(c.rollout)} on {machines}: each engine is a"
            f" process with a model of its own, and a machine starts {MAX_ENGINES_PER_MACHINE} at"
            " most; set as many as there are devices for them, 1 on a machine without."
        ),
        (NUM_ENGINES, MACHINES, NODES),
    )


@register_rl_rule
def check_multi_machine_engines(loaded: LoadedConfig) -> OptionalProblems:
    """Yield problems for engines that span several machines (nnodes of SGLang): a bad number of
    machines, transport tensor, ranks that the machines do not divide, or fewer machines than an
    engine needs.
    """
    c = loaded.config
    key = "rollout.sglang.args.nnodes"
    parts = count_machines_per_engine(c.rollout)
    ranks = count_ranks_per_engine(c.rollout)
    runtime = c.trainer.runtime
    given = c.rollout.sglang.args.get("nnodes")
    is_wrong = (
        given is not None
        and str(given) != str(parts)
        and has_engine_setting(c.rollout, "rollout.sglang")
    )
    yield make_problem_if(
        is_wrong, f"{key} ({given!r}) must be a number of machines, 1 or more; correct it.", (key,)
    )
    if parts == 1 or c.rollout.endpoints:
        return
    yield make_problem_if(
        c.rollout.weight_transport == "tensor",
        (
            f"{TRANSPORT} (tensor) goes through memory of one machine, which an engine on {parts}"
            f" ({key}) does not share; use process_group or disk."
        ),
        (TRANSPORT, key),
    )
    yield make_problem_if(
        ranks % parts,
        (
            f"{key} ({parts}) must divide the ranks of an engine (tp_size {ranks}): each machine"
            " has as many; correct either."
        ),
        (key, "rollout.sglang.args"),
    )
    if runtime == "torchrun":
        machines = len(_list_usable_machines(c))
    elif runtime == "ray":
        machines = parts
    else:
        machines = 1
    yield make_problem_if(
        machines < parts,
        (
            f"{key} ({parts}) needs so many machines for one engine, but engines can be on"
            f" {machines} ({NODES}, {MACHINES}, trainer.runtime {runtime}); name more, or"
            " lower nnodes."
        ),
        (key, NODES, MACHINES, "trainer.runtime"),
    )


@register_rl_rule
def check_transfer_directory(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem for engines on other machines than the controller's without a directory that
    all machines see: what the servers say of a weight sync is a file there. Yield nothing for
    transport disk, whose files are in the run's directory, and for engines that weights reach
    through memory of their own machine alone.
    """
    c = loaded.config
    if c.rollout.endpoints or c.rollout.transfer_dir is not None:
        return
    kind = find_registered_part("engine", c.rollout.engine)
    if kind is None or not kind.build.can_run_elsewhere or c.rollout.weight_transport == "disk":
        return
    machines = sorted(set(assign_part_machines(c)))
    if not _are_engines_dealt(c) and _can_engines_be_anywhere(c):
        machines = [*range(c.trainer.nnodes)]  # where Ray finds room
    yield make_problem_if(
        any(machine != 0 for machine in machines),
        (
            f"{TRANSFER_DIR} (null) must name a directory that all machines see: engines of"
            f" {c.rollout.engine} can be on machines {machines}, and what they say of a weight sync"
            " comes back through it; name one on a shared file system, or keep the engines on"
            " machine 0."
        ),
        (TRANSFER_DIR, MACHINES, NODES, "rollout.engine"),
    )


@register_rl_rule
def check_engine_machines(loaded: LoadedConfig) -> OptionalProblems:
    """Yield problems of the machines of the engines: a machine that is named twice or negative,
    machines that weight_transport tensor does not reach, and colocated machines without an engine.
    Yield nothing where the run does not distribute the engines.
    """
    c = loaded.config
    if not _are_engines_dealt(c):
        return
    given = c.rollout.engine_machines
    yield make_problem_if(
        any(machine < 0 for machine in given) or len(set(given)) < len(given),
        (
            f"{MACHINES} ({list(given)}) must name each machine once, by a number from 0 on;"
            " correct it."
        ),
        (MACHINES,),
    )
    used = set(assign_part_machines(c))
    with_copies = find_machines_with_actor_copies(c)
    num_ranked = c.trainer.nnodes
    pp = c.actor.megatron.pipeline_model_parallel_size
    is_split = c.rollout.weight_transport == "tensor" and num_ranked > 1
    unreached = sorted(used - set(with_copies)) if c.rollout.weight_transport == "tensor" else []
    if unreached and (unreached != [0] or (is_split and pp > 1)):
        why = (
            f"{pp} pipeline stages lie on several machines"
            if pp > 1
            else "no whole copy of the actor is there"
        )
        yield ConfigProblem(
            (
                f"{TRANSPORT} (tensor) does not reach engines on machines {unreached} of"
                f" {num_ranked} with ranks ({NODES}): {why}; use process_group or disk, 1 stage"
                " with groups that a machine holds whole, or one machine."
            ),
            (TRANSPORT, MACHINES, NODES, "actor.megatron.pipeline_model_parallel_size"),
        )
    if c.rollout.colocated:
        with_engine = used & set(range(num_ranked))
        yield make_problem_if(
            len(with_engine) < num_ranked or used != with_engine,
            (
                f"{COLOCATED} (true) needs an engine on each machine with ranks, 0 to"
                f" {num_ranked - 1}, and no other, but rollout.num_engines"
                f" ({c.rollout.num_engines}) are on {sorted(used)}: devices of a machine without"
                " one would have nobody to take turns with; raise rollout.num_engines, change"
                f" {MACHINES}, or set colocated: false."
            ),
            (COLOCATED, "rollout.num_engines", MACHINES, NODES, GPUS),
        )
