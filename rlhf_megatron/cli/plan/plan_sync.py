"""`rlhf-megatron plan sync RUN.yaml --network NAME`: what a weight sync moves over which links, and
how long that takes at least.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from html import escape
from math import prod
from pathlib import Path

from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.rules.engine_rules import count_engines
from rlhf_megatron.config.rules.run_rules import count_actor_ranks
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.planning.network_cost import (
    MEDIA,
    NETWORKS,
    EngineGroup,
    NetworkBandwidths,
    SyncNetworkCost,
    compute_sync_cost,
    estimate_broadcast_seconds,
)
from rlhf_megatron.weights.bucket_manifest import DTYPE_BYTES
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.fp8_engine_weights import make_engine_table
from rlhf_megatron.weights.hf_reader import read_hf_config
from rlhf_megatron.weights.parallel_layout import ParallelLayout, make_parallel_layout
from rlhf_megatron.weights.shard_plan import (
    EngineLayout,
    StageLinkBytes,
    compute_stage_link_bytes,
    count_serving_copies,
)
from rlhf_megatron.write_errors import write_text_file

NUM_LINKS_SHOWN = 5
# of the picture, pixels and cells
_CELL_PIXELS = 10
_LEFT_PIXELS = 90
_TOP_PIXELS = 46
_MAX_ROWS = 128
_MAX_COLUMNS = 64
_BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def run_plan_sync_command(args: argparse.Namespace) -> None:
    """Print the bytes of a weight sync over each kind of link and the least time it takes, and draw
    --picture. Raise ConfigError or ValueError for a configuration or model that cannot be planned.
    """
    config = load_run_config(args.config, args.overrides, with_files=False).config
    network = NETWORKS[args.network]
    layout = make_parallel_layout(config.actor.megatron, count_actor_ranks(config))
    engines = make_planned_engines(config)
    dtype = config.rollout.dtype or config.model.dtype
    table = make_weight_table(read_hf_config(Path(config.model.path)), layout.tp)
    table = make_engine_table(table, dtype, config.rollout.quantization)
    stages = compute_stage_link_bytes(table, layout, engines.layout, dtype)
    num_bytes = sum(
        prod(hf.shape) * DTYPE_BYTES[rule.get_sent_dtype(hf, dtype)]
        for rule in table
        for hf in rule.hf_tensors
    )
    cost = compute_sync_cost(stages, layout, engines, network)
    place = "on the trainer's GPUs" if engines.is_colocated else "on machines of their own"
    kind = config.rollout.quantization or dtype
    print(
        f"weights        {format_size(num_bytes)} as {kind}; trainer {layout},"
        f" {layout.world_size} ranks"
    )
    dp = f" dp{engines.layout.dp}" if engines.layout.dp > 1 else ""
    print(
        f"engines        {engines.num_engines} of tp{engines.layout.tp}"
        f" ep{engines.layout.ep}{dp}, {place}"
    )
    for line in format_sync_cost_lines(cost, args.network, layout, stages):
        print(line)
    if reason := explain_whole_tensors(config):
        print(f"this run       sends whole tensors: {reason}")
    if not engines.is_colocated:
        seconds = estimate_broadcast_seconds(
            [found.stage_bytes for found in stages], engines, network
        )
        print(
            f"whole tensors  {seconds:.2f} s at least: one rank a stage broadcasts to each engine"
        )
    if args.picture is not None:
        write_text_file(args.picture, render_link_svg(stages, layout, engines))
        print(f"picture        {args.picture}")


def explain_whole_tensors(config: RunConfig) -> str:
    """Return why this run on GPUs would send whole tensors instead of shards
    (`transports.delivery`), or "" if it sends shards.
    """
    if config.rollout.weight_transport == "disk":
        return f"rollout.weight_transport is {config.rollout.weight_transport}"
    if config.actor.backend == "fsdp":
        return "actor.backend is fsdp"
    return ""


def make_planned_engines(config: RunConfig) -> EngineGroup:
    """Return the layout and number of the run's engines. Raise ValueError for impossible sizes."""
    return EngineGroup(
        EngineLayout.from_rollout_config(config.rollout),
        count_engines(config),
        config.rollout.colocated,
    )


def format_sync_cost_lines(
    cost: SyncNetworkCost,
    network_name: str,
    layout: ParallelLayout,
    stages: Sequence[StageLinkBytes],
) -> Iterator[str]:
    """Yield the lines on the network, the senders, the bytes by medium, the busiest links, and the
    least time.
    """
    network: NetworkBandwidths = cost.network
    yield (
        f"network        {network_name}: {network.gpus_per_machine} GPUs a machine; a GPU has"
        f" {format_size(network.nvlink_bytes_per_s)}/s of NVLink and"
        f" {format_size(network.network_bytes_per_s)}/s of network in each direction"
    )
    loads = [num_bytes for found in stages for num_bytes in found.bytes_by_sender.values()]
    yield (
        f"senders        {layout.pp} stages x {count_serving_copies(layout)} copies x"
        f" {layout.copy_size} ranks; to one engine a rank sends {format_size(max(loads))} at most,"
        f" {format_size(sum(loads) / len(loads))} on average"
    )
    for medium in MEDIA:
        if not cost.bytes_by_link[medium]:
            continue
        yield (
            f"{medium:<15}{format_size(cost.sum_bytes(medium))} over"
            f" {len(cost.bytes_by_link[medium])} links"
        )
        for (rank, target), num_bytes in cost.bytes_by_link[medium].most_common(NUM_LINKS_SHOWN):
            yield f"{'':<15}rank {rank} to {target}: {format_size(num_bytes)}"
        for one in cost.find_busiest_endpoints():
            if one.medium == medium:
                verb = "sends" if one.is_sending else "receives"
                yield (
                    f"{'':<15}{one.endpoint} {verb} most: {format_size(one.num_bytes)},"
                    f" {one.seconds:.3f} s"
                )
    floor = cost.find_slowest_endpoint()
    verb = "sends" if floor.is_sending else "receives"
    yield (
        f"floor          {floor.seconds:.2f} s: {floor.endpoint} {verb}"
        f" {format_size(floor.num_bytes)} by {floor.medium}"
    )


def format_size(num_bytes: float) -> str:
    """Return a number of bytes in words, as in "59 GB"; powers of ten, as networks count."""
    for unit, name in _BYTE_UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes:.0f} B"


def render_link_svg(
    stages: Sequence[StageLinkBytes], layout: ParallelLayout, engines: EngineGroup
) -> str:
    """Return an SVG with the bytes between ranks in a weight sync: a row for each sending rank of
    one copy, a column for each rank of one engine, darker cells for more bytes. In large layouts
    neighbours share a row or a column.
    """
    num_rows = layout.pp * layout.copy_size
    columns = min(engines.layout.tp, _MAX_COLUMNS)
    together = -(-num_rows // _MAX_ROWS)
    cells: dict[tuple[int, int], int] = {}
    for stage, found in enumerate(stages):
        for (place, target), num_bytes in found.bytes_by_link.items():
            cell = (
                (stage * layout.copy_size + place) // together,
                target * columns // engines.layout.tp,
            )
            cells[cell] = cells.get(cell, 0) + num_bytes
    most = max(cells.values())
    rows = -(-num_rows // together)
    width = max(_LEFT_PIXELS + columns * _CELL_PIXELS + 10, 380)
    height = _TOP_PIXELS + rows * _CELL_PIXELS + 10
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}">'
        ),
        "<style>text{font:11px sans-serif;fill:#56606e}.cell{fill:#0072b2}</style>",
        (
            '<text x="4" y='
            '"16">'
            f"{escape(f'bytes of a weight sync: ranks of {layout} to the ranks of one engine')}"
            "</text>"
        ),
        (
            '<text x="4" y="34">'
            f"{escape(f'the darkest is {format_size(most)}; rows: stage and place in its copy')}</"
            "text>"
        ),
    ]
    for stage in range(layout.pp):
        y = _TOP_PIXELS + stage * layout.copy_size // together * _CELL_PIXELS + _CELL_PIXELS - 1
        parts.append(f'<text x="4" y="{y}">stage {stage}</text>')
    for (row, column), num_bytes in sorted(cells.items()):
        parts.append(
            f'<rect class="cell" x="{_LEFT_PIXELS + column * _CELL_PIXELS}"'
            f' y="{_TOP_PIXELS + row * _CELL_PIXELS}" width="{_CELL_PIXELS - 1}"'
            f' height="{_CELL_PIXELS - 1}" fill-opacity="{max(num_bytes / most, 0.05):.2f}"/>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"
