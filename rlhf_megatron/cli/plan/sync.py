"""`rlhf-megatron plan sync RUN.yaml --network NAME`: what a weight sync moves over which links, and how long that takes
at least."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from html import escape
from math import prod
from pathlib import Path

from rlhf_megatron.checkpoint.hf_reader import read_hf_config
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.rules.engines import num_engines
from rlhf_megatron.config.rules.run import actor_ranks
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.parallel.layout import Layout, layout_of
from rlhf_megatron.resharding.manifest import DTYPE_BYTES
from rlhf_megatron.resharding.network import MEDIA, NETWORKS, Cost, Engines, Network, cost_of, seconds_whole
from rlhf_megatron.resharding.quantised import engine_table
from rlhf_megatron.resharding.shards import EngineLayout, StageLinks, num_copies, stage_links

LINKS_SHOWN = 5
_CELL, _LEFT, _TOP, _MOST_ROWS, _MOST_COLUMNS = 10, 90, 46, 128, 64  # of the picture, pixels and cells
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def sync(args: argparse.Namespace) -> None:
    """Print the plan. Raises ConfigError, ValueError."""
    config = load_run_config(args.config, args.overrides, with_files=False).config
    network, layout = NETWORKS[args.network], layout_of(config.actor.megatron, actor_ranks(config))
    engines, dtype = engines_of(config), config.rollout.dtype or config.model.dtype
    table = table_for(read_hf_config(Path(config.model.path)), layout.tp)
    table = engine_table(table, dtype, config.rollout.quantization)
    stages = stage_links(table, layout, engines.layout, dtype)
    num_bytes = sum(prod(hf.shape) * DTYPE_BYTES[rule.type_of(hf, dtype)] for rule in table for hf in rule.hf)
    cost = cost_of(stages, layout, engines, network)
    place = "on the trainer's GPUs" if engines.is_colocated else "on machines of their own"
    kind = config.rollout.quantization or dtype
    print(f"weights        {size(num_bytes)} as {kind}; trainer {layout}, {layout.world_size} ranks")
    dp = f" dp{engines.layout.dp}" if engines.layout.dp > 1 else ""
    print(f"engines        {engines.count} of tp{engines.layout.tp} ep{engines.layout.ep}{dp}, {place}")
    for line in lines(cost, args.network, layout, stages):
        print(line)
    if reason := why_whole(config):
        print(f"this run       sends whole tensors: {reason}")
    if not engines.is_colocated:
        seconds = seconds_whole([found.stage_bytes for found in stages], engines, network)
        print(f"whole tensors  {seconds:.2f} s at least: one rank a stage broadcasts to each engine")
    if args.picture is not None:
        args.picture.write_text(picture(stages, layout, engines), encoding="utf-8")
        print(f"picture        {args.picture}")


def why_whole(config: RunConfig) -> str:
    """Why such a run on GPUs does not go shard to shard (`transports.delivery`); "": it can."""
    if config.rollout.weight_transport == "disk":
        return f"rollout.weight_transport is {config.rollout.weight_transport}"
    if config.actor.backend == "fsdp":
        return "actor.backend is fsdp"
    return ""


def engines_of(config: RunConfig) -> Engines:
    """The engines of a run. Raises ValueError for sizes that cannot be."""
    return Engines(EngineLayout.of(config.rollout), num_engines(config), config.rollout.colocated)


def lines(cost: Cost, name: str, layout: Layout, stages: Sequence[StageLinks]) -> Iterator[str]:
    """Print the bytes by medium, the busiest links and the least time."""
    network: Network = cost.network
    yield (
        f"network        {name}: {network.gpus} GPUs a machine; a GPU has {size(network.nvlink)}/s of NVLink and"
        f" {size(network.network)}/s of network in each direction"
    )
    loads = [num_bytes for found in stages for num_bytes in found.sent.values()]
    yield (
        f"senders        {layout.pp} stages x {num_copies(layout)} copies x {layout.copy_size} ranks; to one engine a"
        f" rank sends {size(max(loads))} at most, {size(sum(loads) / len(loads))} on average"
    )
    for medium in MEDIA:
        if not cost.links[medium]:
            continue
        yield f"{medium:<15}{size(cost.total(medium))} over {len(cost.links[medium])} links"
        for (rank, target), num_bytes in cost.links[medium].most_common(LINKS_SHOWN):
            yield f"{'':<15}rank {rank} to {target}: {size(num_bytes)}"
        for one in cost.busiest():
            if one.medium == medium:
                verb = "sends" if one.is_sending else "receives"
                yield f"{'':<15}{one.who} {verb} most: {size(one.num_bytes)}, {one.seconds:.3f} s"
    floor = cost.floor()
    verb = "sends" if floor.is_sending else "receives"
    yield f"floor          {floor.seconds:.2f} s: {floor.who} {verb} {size(floor.num_bytes)} by {floor.medium}"


def size(num_bytes: float) -> str:
    """ "59.0 GB"; powers of ten, as networks count."""
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes:.0f} B"


def picture(stages: Sequence[StageLinks], layout: Layout, engines: Engines) -> str:
    """An SVG: a row a sending rank of one copy, a column a rank of one engine, the darker the more bytes. Of large
    layouts neighbours share a row."""
    num_rows, columns = layout.pp * layout.copy_size, min(engines.layout.tp, _MOST_COLUMNS)
    together = -(-num_rows // _MOST_ROWS)
    cells: dict[tuple[int, int], int] = {}
    for stage, found in enumerate(stages):
        for (place, target), num_bytes in found.by_link.items():
            cell = ((stage * layout.copy_size + place) // together, target * columns // engines.layout.tp)
            cells[cell] = cells.get(cell, 0) + num_bytes
    most, rows = max(cells.values()), -(-num_rows // together)
    width, height = max(_LEFT + columns * _CELL + 10, 380), _TOP + rows * _CELL + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<style>text{font:11px sans-serif;fill:#56606e}.cell{fill:#0072b2}</style>",
        f'<text x="4" y="16">{escape(f"bytes of a weight sync: ranks of {layout} to the ranks of one engine")}</text>',
        f'<text x="4" y="34">{escape(f"the darkest is {size(most)}; rows: stage and place in its copy")}</text>',
    ]
    for stage in range(layout.pp):
        y = _TOP + stage * layout.copy_size // together * _CELL + _CELL - 1
        parts.append(f'<text x="4" y="{y}">stage {stage}</text>')
    for (row, column), num_bytes in sorted(cells.items()):
        parts.append(
            f'<rect class="cell" x="{_LEFT + column * _CELL}" y="{_TOP + row * _CELL}" width="{_CELL - 1}"'
            f' height="{_CELL - 1}" fill-opacity="{max(num_bytes / most, 0.05):.2f}"/>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"
