"""`rlhf-megatron plan placement RUN.yaml`: which ranks and engines of a run stand on which machine,
with which GPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rlhf_megatron.cli.plan.plan_sync import make_planned_engines
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.rules.engine_machines import (
    MACHINES,
    assign_part_machines,
    list_engine_part_names,
)
from rlhf_megatron.config.rules.part_rules import count_machines_per_engine
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.runtime.rank_pools import PoolSpec, build_pool_specs, find_pool_of_rank

DRIVER_MACHINE = 0  # the machine where controller, reward workers and router are


@dataclass
class PlannedMachine:
    """A machine of a planned run. Its first `num_taken_gpus` GPUs are in use: first by ranks, then
    by one engine after another.
    """

    ranks: range
    num_taken_gpus: int
    engine_texts: list[str] = field(default_factory=list)


def run_plan_placement_command(args: argparse.Namespace) -> int:
    """Print the ranks and engines of each machine. Return 1 where a machine needs more GPUs than it
    has, else 0. Raise ConfigError for a wrong configuration.
    """
    config = load_run_config(args.config, args.overrides, with_files=False).config
    machines = plan_machines(config, args.gpus)
    for line in (
        *format_machine_lines(config, machines),
        *format_weight_sync_lines(config),
        *_format_idle_lines(config),
    ):
        print(line)
    shortages = list(_describe_shortages(machines, args.gpus))
    if shortages:
        hint = (
            " Or let engines and ranks take turns with the GPUs (rollout.colocated=true)."
            if _can_be_colocated(args)
            else ""
        )
        print(f"does not fit: {'; '.join(shortages)}. {_suggest_fix(config, args.gpus)}{hint}")
    return 1 if shortages else 0


def _can_be_colocated(args: argparse.Namespace) -> bool:
    """Return whether the run that was asked about is a valid one that fits, if its engines are
    colocated and nothing else is changed.
    """
    overrides = [*args.overrides, "rollout.colocated=true"]
    try:
        config = load_run_config(args.config, overrides, with_files=False).config
    except ConfigError:
        return False
    return not list(_describe_shortages(plan_machines(config, args.gpus), args.gpus))


def _format_idle_lines(config: RunConfig) -> Iterator[str]:
    """Yield a line where colocated engines are fewer than the GPUs of the ranks can hold."""
    trainer = config.trainer
    rollout = config.rollout
    if not rollout.colocated or rollout.endpoints or config.job != "train":
        return
    num_gpus = trainer.nnodes * trainer.n_gpus_per_node
    size = make_planned_engines(config).layout.tp
    num_idle = num_gpus - rollout.num_engines * size
    if num_idle >= size:
        yield (
            f"idle        {num_idle} of {num_gpus} GPUs while engines generate;"
            f" rollout.num_engines={num_gpus // size} uses all"
        )


def _describe_shortages(machines: Sequence[PlannedMachine], gpus_per_machine: int) -> Iterator[str]:
    """Yield a text for each series of machines that need more GPUs than a machine has, and equally
    many.
    """
    numbered = [
        (number, machine.num_taken_gpus)
        for number, machine in enumerate(machines)
        if machine.num_taken_gpus > gpus_per_machine
    ]
    # Consecutive machines have the same difference to their place in the list.
    for (_, num_gpus), items in groupby(
        enumerate(numbered), lambda item: (item[1][0] - item[0], item[1][1])
    ):
        numbers = [number for _, (number, _) in items]
        span = _format_number_span("machine", range(numbers[0], numbers[-1] + 1))
        verbs = ("needs", "has") if len(numbers) == 1 else ("need", "have")
        yield f"{span} {verbs[0]} {num_gpus} GPUs and {verbs[1]} {gpus_per_machine}"


def plan_machines(config: RunConfig, gpus_per_machine: int) -> list[PlannedMachine]:
    """Return the machines of a run with their ranks and engines, as the launcher fills them.

    Under Ray, engines that weights reach over a network go to free GPUs, here in order, and new
    machines follow those of the ranks. Under torchrun a rule assigns engines to machines; all other
    engines are on the driver's machine. A machine may be given more than `gpus_per_machine` GPUs'
    worth of engines. Bundled engines of a run on one machine are dealt to the GPUs that the ranks
    leave free, or to those of the ranks where no GPU is free.
    """
    trainer = config.trainer
    rollout = config.rollout
    each = trainer.n_gpus_per_node
    num_free_gpus = max(gpus_per_machine - each, 0)
    machines = [
        PlannedMachine(range(i * each, (i + 1) * each), each) for i in range(trainer.nnodes)
    ]
    size = make_planned_engines(config).layout.tp // count_machines_per_engine(rollout)
    for index, name in enumerate(
        () if rollout.endpoints or config.job != "train" else list_engine_part_names(rollout)
    ):
        if _is_placed_by_ray(config):
            if not any(machine.num_taken_gpus + size <= gpus_per_machine for machine in machines):
                machines.append(PlannedMachine(range(0), 0))
            place = next(
                (m for m in machines if m.num_taken_gpus + size <= gpus_per_machine), machines[-1]
            )
        else:
            number = assign_part_machines(config)[index]
            machines += [PlannedMachine(range(0), 0) for _ in range(len(machines), number + 1)]
            place = machines[number]
        index_on_machine = len(place.engine_texts)
        is_shared = rollout.colocated
        if rollout.colocated:
            first = size * index_on_machine % each
        elif _are_bundled_engines_of_one_machine(config):
            is_shared = index_on_machine >= num_free_gpus
            first = (
                each + index_on_machine % num_free_gpus
                if num_free_gpus
                else index_on_machine % each
            )
        else:
            first = place.num_taken_gpus
        place.engine_texts.append(
            f"{name} on {_format_number_span('GPU', range(first, first + size))}"
        )
        if is_shared:
            place.num_taken_gpus = max(place.num_taken_gpus, size)
        else:
            place.num_taken_gpus += size
    return machines


def _are_bundled_engines_of_one_machine(config: RunConfig) -> bool:
    """Return whether the run starts bundled engines where its ranks are, on one machine: they need
    no GPU of their own (`rollout.local.local_launch.assign_local_devices`).
    """
    return (
        config.rollout.engine == "local"
        and config.trainer.runtime != "ray"
        and config.trainer.nnodes == 1
        and not config.rollout.engine_machines
    )


def _is_placed_by_ray(config: RunConfig) -> bool:
    """Return whether Ray chooses the machines of the engines."""
    rollout = config.rollout
    is_ray = config.trainer.runtime == "ray"
    return (
        is_ray
        and not rollout.colocated
        and rollout.engine == "sglang"
        and rollout.weight_transport != "tensor"
    )


def format_machine_lines(config: RunConfig, machines: Sequence[PlannedMachine]) -> Iterator[str]:
    """Yield the lines of the plan: launcher, layout, and for each machine its ranks with their
    coordinates and its engines.
    """
    trainer = config.trainer
    pools = build_pool_specs(config)
    start = f"rlhf-megatron {config.job}"
    if trainer.runtime == "ray":
        start += " on the driver's machine, Ray on all"
    elif len(machines) > 1:
        start = (
            f"launch/torchrun.sh on each of {len(machines)} machines, or sbatch"
            f" --nodes={len(machines)} launch/slurm.sbatch"
        )
    yield f"launcher    {trainer.runtime}: {start}"
    yield f"layout      {', '.join(map(str, pools))}"
    for number, machine in enumerate(machines):
        parts = ["controller"] if number == DRIVER_MACHINE else []
        if machine.ranks:
            ranks = _format_number_span("rank", machine.ranks)
            devices = _format_number_span("GPU", range(len(machine.ranks)))
            parts.append(f"{ranks} on {devices}: {_format_held_coordinates(machine.ranks, pools)}")
        yield f"machine {number:<3} {'; '.join([*parts, *machine.engine_texts])}"
    if config.rollout.endpoints:
        yield f"attached    {', '.join(config.rollout.endpoints)}"


def format_weight_sync_lines(config: RunConfig) -> Iterator[str]:
    """Yield the lines on how weights reach the engines and which ranks send them at least; nothing
    for a job without engines.
    """
    rollout = config.rollout
    layout = build_pool_specs(config)[0].layout
    if config.job != "train":
        return
    over = {
        "tensor": "memory of the engines' machines",
        "process_group": "a process group of each copy and engine",
        "disk": (
            f"files in {rollout.transfer_dir or 'the run directory'}, which all machines must see"
        ),
    }
    senders = [layout.compute_rank(0, stage, 0) for stage in range(layout.pp)]
    if rollout.weight_transport == "tensor" and len(used := set(assign_part_machines(config))) > 1:
        each = config.trainer.n_gpus_per_node
        size = layout.copy_size
        senders = [-(-machine * each // size) * size for machine in sorted(used)]
    places = ", ".join(
        f"{rank} (machine {rank // config.trainer.n_gpus_per_node})" for rank in senders
    )
    yield (
        f"weights     {rollout.weight_transport}:"
        f" {over.get(rollout.weight_transport, 'a transport of a plugin')}"
    )
    yield f"senders     {places}"


def _format_held_coordinates(ranks: range, pools: Sequence[PoolSpec]) -> str:
    """Return the pools and coordinates that these ranks hold, as in "actor pp0 dp0-1 tp0-3"."""
    found = []
    for pool in dict.fromkeys(find_pool_of_rank(pools, rank) for rank in ranks):
        at = [
            pool.layout.locate_rank(rank - pool.first_rank)
            for rank in ranks
            if pool.first_rank <= rank < pool.end_rank
        ]
        axes = [
            (name, sorted({getattr(place, name) for place in at}))
            for name in ("pp", "dp", "cp", "tp")
        ]
        texts = [
            f"{name}{_format_range(v[0], v[-1])}"
            for name, v in axes
            if name != "cp" or pool.layout.cp > 1
        ]
        found.append(f"{pool.name} {' '.join(texts)}")
    return ", ".join(found)


def _format_number_span(noun: str, numbers: range) -> str:
    """Return "rank 3" or "ranks 0-7" for a noun and consecutive numbers."""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {_format_range(numbers[0], numbers[-1])}"


def _format_range(first: int, last: int) -> str:
    """Return "first-last", or one number if both are the same."""
    return str(first) if first == last else f"{first}-{last}"


def _suggest_fix(config: RunConfig, gpus_per_machine: int) -> str:
    """Return advice for a run that does not fit on its machines; its settings, in the form of the
    command line, are those with which it fits.
    """
    trainer = config.trainer
    rollout = config.rollout
    if trainer.n_gpus_per_node > gpus_per_machine:
        return (
            f"Lower trainer.n_gpus_per_node ({trainer.n_gpus_per_node}) to {gpus_per_machine} and"
            " raise trainer.nnodes, or say how many GPUs a machine has (--gpus)."
        )
    tp = make_planned_engines(config).layout.tp
    if rollout.colocated:
        return (
            f"An engine on the GPUs of the ranks has at most {gpus_per_machine} of them; lower its"
            f" tp_size ({tp}, rollout.sglang.args)."
        )
    num_parts = count_machines_per_engine(rollout)
    settings = []
    if tp // num_parts > gpus_per_machine:
        num_parts = next(n for n in range(1, tp + 1) if tp % n == 0 and tp // n <= gpus_per_machine)
        settings.append(f"rollout.sglang.args.nnodes={num_parts}")
    if rollout.weight_transport == "tensor":
        network = "process_group" if rollout.engine == "sglang" else "disk"
        settings.append(f"rollout.weight_transport={network}")
    if trainer.runtime == "ray":
        return f"Set {' '.join(settings)}: Ray then finds room for the engines."
    parts_per_machine = gpus_per_machine * num_parts // tp
    num_machines = -(-rollout.num_engines * num_parts // parts_per_machine)
    numbers = range(trainer.nnodes, trainer.nnodes + num_machines)
    own_machines = f"{MACHINES}=[{','.join(map(str, numbers))}]"
    under_ray = ["trainer.runtime=ray", *settings]
    if rollout.transfer_dir is None:
        own_machines += ", and rollout.transfer_dir to a folder that all machines see"
    return (
        f"The engines need {num_machines} machine(s) of their own: set"
        f" {' '.join([*settings, own_machines])};"
        f" sbatch --nodes={trainer.nnodes + num_machines} then starts them. Or let Ray place them"
        f" ({' '.join(under_ray)}), or start them elsewhere (rollout.endpoints)."
    )
