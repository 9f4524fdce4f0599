"""`rlhf-megatron plan placement RUN.yaml`: which ranks and engines of a run stand on which machine, with which GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rlhf_megatron.cli.plan.sync import engines_of
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.rules.machines import machines_of_parts, part_names
from rlhf_megatron.config.rules.parts import num_parts
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.runtime.pool import PoolSpec, pool_of_rank, pools_of

DRIVER = 0  # the machine where controller, reward workers and router are


@dataclass
class Machine:
    """`taken` GPUs in their order: those of ranks, then engine after engine."""

    ranks: range
    taken: int
    engines: list[str] = field(default_factory=list)


def placement(args: argparse.Namespace) -> int:
    """Print the machines of a run on GPUs; return 1 where one needs more than it has. Raises ConfigError."""
    config = load_run_config(args.config, args.overrides, with_files=False).config
    machines = machines_of(config, args.gpus)
    for line in (*lines(config, machines), *weights(config)):
        print(line)
    short = [
        f"machine {i} needs {m.taken} GPUs and has {args.gpus}" for i, m in enumerate(machines) if m.taken > args.gpus
    ]
    if short:
        print(f"does not fit: {'; '.join(short)}. {_way_out(config)}")
    return 1 if short else 0


def machines_of(config: RunConfig, gpus: int) -> list[Machine]:
    """Return the machines as the launcher fills them; `gpus`: that each has.

    Under Ray, engines that weights reach over a network go where GPUs are free, here in order; other machines follow
    those of the ranks. Under torchrun they are dealt to machines by a rule; all other engines are on the driver's.
    """
    trainer, rollout = config.trainer, config.rollout
    each = trainer.n_gpus_per_node
    machines = [Machine(range(i * each, (i + 1) * each), each) for i in range(trainer.nnodes)]
    size = engines_of(config).layout.tp // num_parts(rollout)
    for index, name in enumerate(() if rollout.endpoints or config.job != "train" else part_names(rollout)):
        if _is_anywhere(config):
            if not any(machine.taken + size <= gpus for machine in machines):
                machines.append(Machine(range(0), 0))
            place = next((m for m in machines if m.taken + size <= gpus), machines[-1])
        else:
            number = machines_of_parts(config)[index]
            machines += [Machine(range(0), 0) for _ in range(len(machines), number + 1)]
            place = machines[number]
        first = size * len(place.engines) % each if rollout.colocated else place.taken
        place.engines.append(f"{name} on {_span('GPU', range(first, first + size))}")
        place.taken += 0 if rollout.colocated else size
    return machines


def _is_anywhere(config: RunConfig) -> bool:
    """Whether Ray chooses the machines of engines."""
    rollout, is_ray = config.rollout, config.trainer.runtime == "ray"
    return is_ray and not rollout.colocated and rollout.engine == "sglang" and rollout.weight_transport != "tensor"


def lines(config: RunConfig, machines: Sequence[Machine]) -> Iterator[str]:
    """Yield a line a machine, with what its ranks hold."""
    trainer, pools = config.trainer, pools_of(config)
    start = f"rlhf-megatron {config.job}"
    if trainer.runtime == "ray":
        start += " on the driver's machine, Ray on all"
    elif len(machines) > 1:
        num_alone = len(machines) - trainer.nnodes
        numbers = f"NNODES={trainer.nnodes} " + (f"ENGINE_NODES={num_alone} " if num_alone else "")
        start = f"{numbers}NPROC_PER_NODE={trainer.n_gpus_per_node} launch/torchrun.sh on each machine"
    yield f"launcher    {trainer.runtime}: {start}"
    yield f"layout      {', '.join(map(str, pools))}"
    for number, machine in enumerate(machines):
        parts = ["controller"] if number == DRIVER else []
        if machine.ranks:
            ranks, devices = _span("rank", machine.ranks), _span("GPU", range(len(machine.ranks)))
            parts.append(f"{ranks} on {devices}: {_held(machine.ranks, pools)}")
        yield f"machine {number:<3} {'; '.join([*parts, *machine.engines])}"
    if config.rollout.endpoints:
        yield f"attached    {', '.join(config.rollout.endpoints)}"


def weights(config: RunConfig) -> Iterator[str]:
    """Yield how weights reach the engines, and from which ranks at least."""
    rollout, layout = config.rollout, pools_of(config)[0].layout
    if config.job != "train":
        return
    over = {
        "tensor": "memory of the engines' machines",
        "process_group": "a process group of each copy and engine",
        "disk": f"files in {rollout.transfer_dir or 'the run directory'}, which all machines must see",
    }
    senders = [layout.rank(0, stage, 0) for stage in range(layout.pp)]
    if rollout.weight_transport == "tensor" and len(used := set(machines_of_parts(config))) > 1:
        each, size = config.trainer.n_gpus_per_node, layout.copy_size
        senders = [-(-machine * each // size) * size for machine in sorted(used)]
    places = ", ".join(f"{rank} (machine {rank // config.trainer.n_gpus_per_node})" for rank in senders)
    yield f"weights     {rollout.weight_transport}: {over.get(rollout.weight_transport, 'a transport of a plugin')}"
    yield f"senders     {places}"


def _held(ranks: range, pools: Sequence[PoolSpec]) -> str:
    """ "actor pp0 dp0-1 tp0-3" """
    found = []
    for pool in dict.fromkeys(pool_of_rank(pools, rank) for rank in ranks):
        at = [pool.layout.coordinates(rank - pool.first_rank) for rank in ranks if pool.first_rank <= rank < pool.end]
        axes = [(name, sorted({getattr(place, name) for place in at})) for name in ("pp", "dp", "cp", "tp")]
        texts = [f"{name}{_range(v[0], v[-1])}" for name, v in axes if name != "cp" or pool.layout.cp > 1]
        found.append(f"{pool.name} {' '.join(texts)}")
    return ", ".join(found)


def _span(noun: str, numbers: range) -> str:
    return f"{noun}{'s' if len(numbers) > 1 else ''} {_range(numbers[0], numbers[-1])}"


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _way_out(config: RunConfig) -> str:
    if config.trainer.runtime == "ray":
        return "Engines that take weights from memory stand there; use rollout.weight_transport: process_group or disk."
    return (
        "Name machines with free GPUs in rollout.engine_machines, let Ray place engines (trainer.runtime: ray), start"
        " them elsewhere (rollout.endpoints), or lower trainer.n_gpus_per_node or rollout.num_engines."
    )
