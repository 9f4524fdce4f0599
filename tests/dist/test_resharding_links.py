"""Weights shard to shard over process groups: real ranks of a trainer, the bundled engine, and the
ranks of a larger one, here threads that take what SGLang's ranks would. test_sync_matrix.py has
SGLang itself.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import DistPool
from test_resharding_sender import EXPERTS, LLAMA, SEED

from rlhf_megatron.ranks.resharding.shard_sender import SendRounds, plan_send_rounds
from rlhf_megatron.rollout.engine_interface import EngineAddress
from rlhf_megatron.rollout.engine_kinds import connect_engine
from rlhf_megatron.rollout.local.local_launch import start_local_engines
from rlhf_megatron.weights.bucket_manifest import BucketManifest, TensorEntry
from rlhf_megatron.weights.bucket_messages import (
    EngineRankLinks,
    HeldSpansByRank,
    iterate_receivers_in_rotation,
    make_entry_key,
    pack_message,
    plan_bucket_exchange,
    plan_bucket_message,
    receive_bucket,
)
from rlhf_megatron.weights.bucket_plan import WeightBucket
from rlhf_megatron.weights.engine_links import EngineLink
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.shard_plan import EngineLayout, find_engine_span
from rlhf_megatron.weights.tensor_digest import digest_tensor, format_digest
from rlhf_megatron.weights.weight_source import generate_random_hf_tensors
from rlhf_megatron.weights.weight_table import TensorSpan, WeightRule, select_stage_rules

pytestmark = pytest.mark.dist
CPU = torch.device("cpu")
BUCKET_BYTES = 10_000


def filled(
    bucket: WeightBucket, whole: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, list[TensorEntry]]:
    """What a rank lays into its buffer."""
    memory = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    entries = []
    for slot in bucket.slots:
        if not slot.num_bytes:
            continue
        tensor = whole[slot.hf_tensor.name]
        values = tensor.narrow(slot.span.dim, slot.span.start, slot.span.num_entries).contiguous()
        memory[slot.offset : slot.offset + slot.num_bytes] = values.view(-1).view(torch.uint8)
        part = (
            None
            if values.shape == slot.hf_tensor.shape
            else (slot.span.dim, slot.span.start, slot.span.num_entries)
        )
        name = str(tensor.dtype).removeprefix("torch.")
        entries.append(
            TensorEntry(slot.hf_tensor.name, name, slot.hf_tensor.shape, slot.offset, "", part)
        )
    return memory, entries


def roster_of(
    rules: Iterable[WeightRule], engine: EngineLayout
) -> list[dict[str, list[TensorSpan]]]:
    """What the ranks of stock SGLang would tell."""
    found: list[dict[str, list[TensorSpan]]] = [{} for _ in range(engine.tp)]
    for rule in rules:
        for hf in rule.hf_tensors:
            for rank in range(engine.tp):
                span = find_engine_span(rule, hf, engine, rank)
                if span is not None and span.num_entries:
                    found[rank][hf.name] = [span]
    return found


def exchange(
    rounds: SendRounds, whole: dict[str, torch.Tensor], roster: HeldSpansByRank
) -> list[list[dict[str, Any]]]:
    """By number of a bucket and rank of the engine what came; senders and takers are ranks of
    one gloo group.
    """
    num = len(rounds.buckets_by_rank)
    num_targets = len(roster)
    host = EngineLink.make_inviting_link("links", "127.0.0.1", num + num_targets, "gloo", 60.0)

    def send(place: int) -> None:
        link = host if place == 0 else EngineLink(host.invitation, place, 60.0)
        link.join_group()
        link.open_connections(num, CPU, 60.0)
        for bucket in rounds.buckets_by_rank[place]:
            memory, _ = filled(bucket, whole)
            for target in iterate_receivers_in_rotation(num_targets, place):
                message = plan_bucket_message(place, bucket, "bfloat16", roster[target])
                if message.num_bytes:
                    link.exchange_tensors(
                        [(pack_message(message, bucket, "bfloat16", memory), num + target)],
                        [],
                        60.0,
                    )

    def receive(rank: int) -> list[dict[str, Any]]:
        links = EngineRankLinks()
        found = []
        links.join_link(host.invitation, "dp0 pp0 tp0", num, rank, CPU)
        for number in range(rounds.num_rounds):
            now = [mine[number] if number < len(mine) else None for mine in rounds.buckets_by_rank]
            entries = [
                entry for bucket in now if bucket is not None for entry in filled(bucket, whole)[1]
            ]
            manifest = BucketManifest(1, "dp0 pp0 tp0", number, "", 0, tuple(entries))
            told = plan_bucket_exchange("links", now, "bfloat16", roster)
            found.append(receive_bucket(told, manifest, links.find_link("links"), rank, CPU, 60.0))
        links.close_link("links")
        with pytest.raises(ValueError, match="in no link 'links'"):
            links.find_link("links")
        return found

    with ThreadPoolExecutor(num + num_targets) as pool:
        senders = [pool.submit(send, place) for place in range(num)]
        takers = [pool.submit(receive, rank) for rank in range(num_targets)]
        for sender in senders:
            sender.result()
        by_rank = [taker.result() for taker in takers]
    host.close()
    return [[of_rank[number] for of_rank in by_rank] for number in range(rounds.num_rounds)]


@pytest.mark.parametrize(
    ("layout", "config", "engine"),
    [
        (ParallelLayout(2, tp=2), LLAMA, EngineLayout(2)),
        (ParallelLayout(4, tp=4), LLAMA, EngineLayout(2)),
        (ParallelLayout(2, pp=2), LLAMA, EngineLayout(2)),
        (ParallelLayout(2, ep=2), EXPERTS, EngineLayout(2, 2)),
        (ParallelLayout(2, ep=2), EXPERTS, EngineLayout(2)),
        (ParallelLayout(2, tp=2, sequence_parallel=True, ep=2, etp=1), EXPERTS, EngineLayout(4, 2)),
    ],
    ids=str,
)
def test_each_rank_of_an_engine_gets_its_own_parts_and_no_byte_more(
    layout: ParallelLayout, config: dict[str, Any], engine: EngineLayout
) -> None:
    tensors = {
        n: t if n.endswith("bias") else t.bfloat16()
        for n, t in generate_random_hf_tensors(config, SEED)
    }
    table = make_weight_table(config, layout.tp)
    moved = needed = 0
    got: list[dict[str, torch.Tensor]] = [{} for _ in range(engine.tp)]
    for stage in range(layout.pp):
        rules = select_stage_rules(table, stage, layout)
        rounds = plan_send_rounds(rules, layout, "bfloat16", BUCKET_BYTES, alignment=1)
        assert rounds.num_rounds > 1
        roster = roster_of(rules, engine)
        for number, by_rank in enumerate(exchange(rounds, tensors, roster)):
            sent = [
                (p, mine[number])
                for p, mine in enumerate(rounds.buckets_by_rank)
                if number < len(mine)
            ]
            of_ranks = [
                plan_bucket_message(*one, "bfloat16", held) for one in sent for held in roster
            ]
            moved += sum(message.num_bytes for message in of_ranks)
            names = {
                make_entry_key(slot.hf_tensor, slot.span): slot.hf_tensor.name
                for _, bucket in sent
                for slot in bucket.slots
            }
            for rank, came in enumerate(by_rank):
                for key, (span, values) in came.items():
                    whole = got[rank].setdefault(names[key], torch.zeros_like(tensors[names[key]]))
                    whole.narrow(span.dim, span.start, span.num_entries).copy_(values)
    for rule in table:
        for hf in rule.hf_tensors:
            for rank in range(engine.tp):
                span = find_engine_span(rule, hf, engine, rank)
                expected = torch.zeros_like(tensors[hf.name])
                if span is not None and span.num_entries:
                    true = tensors[hf.name].narrow(span.dim, span.start, span.num_entries)
                    expected.narrow(span.dim, span.start, span.num_entries).copy_(true)
                    needed += prod(true.shape) * true.element_size()
                assert torch.equal(got[rank].get(hf.name, torch.zeros_like(expected)), expected), (
                    hf.name,
                    rank,
                )
    assert needed <= moved <= 1.05 * needed


def sync_twice(
    world: Any,
    config: dict[str, Any],
    engines: list[EngineAddress],
    transfer_dir: Path,
    victim: int,
) -> dict[str, Any]:
    """On every rank. `victim`: process of engine0, killed between the two syncs; 0: it lives."""
    from rlhf_megatron.ranks.checkpoint.model_weights import (
        iterate_local_shards,
        load_weights_on_rank,
    )
    from rlhf_megatron.ranks.models.megatron_model_builder import build_megatron_model
    from rlhf_megatron.rollout.transports.process_group_transport import EngineProcessGroups
    from rlhf_megatron.rollout.transports.weight_delivery import deliver_weights
    from rlhf_megatron.weights.weight_source import make_random_source

    table = make_weight_table(config, world.layout.tp)
    model = build_megatron_model(config, world, torch.float32)
    clients = [connect_engine(address, transfer_dir) for address in engines if world.rank == 0]
    groups = EngineProcessGroups()
    reports = []
    names = []
    standing = {}
    for version in (1, 2):
        load_weights_on_rank(model.chunks, table, make_random_source(config, version), world)
        for client in clients:
            client.begin_weight_update(version)
        if version == 2 and victim and world.rank == 0:
            os.kill(victim, signal.SIGKILL)
        dist.barrier()
        shards = iterate_local_shards(model.chunks, table)
        how = {
            "version": version,
            "engines": engines,
            "transfer_dir": transfer_dir,
            "bucket_bytes": BUCKET_BYTES,
        }
        reports.append(
            deliver_weights(
                shards, world, groups, engine_dtype="float32", transport_kind="process_group", **how
            )
        )
        found = [groups.find_group(address) for address in engines]
        names.append([None if link is None else link.name for link in found])
        dist.barrier()
        for client in clients:
            if client.address.name not in reports[-1].failures:
                client.commit_weight_update(version)
                standing[client.address.name] = (
                    client.get_served_version(),
                    client.get_weight_digests(),
                )
    groups.close()
    return {"reports": reports, "names": names, "standing": standing}


@pytest.mark.parametrize(
    ("layout", "config", "is_killed"),
    [
        ({"tp": 2}, LLAMA, True),
        pytest.param({"tp": 2}, LLAMA, False, marks=pytest.mark.long),
        pytest.param({"pp": 2}, LLAMA, False, marks=pytest.mark.long),
        pytest.param({"dp": 2, "ep": 2}, EXPERTS, False, marks=pytest.mark.long),
        pytest.param({"dp": 2}, LLAMA, False, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_what_stands_in_the_bundled_engine_is_what_the_ranks_have(
    dist_pool: DistPool,
    tmp_path: Path,
    layout: dict[str, int],
    config: dict[str, Any],
    is_killed: bool,
) -> None:
    """Twice, over the same groups; an engine that dies between is left out, and the other
    gets everything.
    """
    (tmp_path / "model").mkdir()
    (tmp_path / "transfer").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with start_local_engines(
        tmp_path / "model", 2, tmp_path, transfer_dir=tmp_path / "transfer", load_weights=False
    ) as servers:
        engines = list(servers.addresses)
        victim = servers.processes[0].pid if is_killed else 0
        results = dist_pool.run(
            sync_twice,
            **layout,
            config=config,
            engines=engines,
            transfer_dir=tmp_path / "transfer",
            victim=victim,
            timeout_s=300.0,
        )
        of_first = results[0]
        for version, name in ((1 if is_killed else 2, "engine0"), (2, "engine1")):
            expected = {
                n: format_digest(digest_tensor(t))
                for n, t in generate_random_hf_tensors(config, version)
            }
            assert of_first["standing"][name] == (version, expected), name
    last = [result["reports"][-1] for result in results]
    assert {name for report in last for name in report.failures} == (
        {"engine0"} if is_killed else set()
    )
    for report in (result["reports"][0] for result in results):
        assert report.bytes_needed <= report.bytes_moved <= 1.05 * report.bytes_needed
    whole = sum(tensor.nbytes for _, tensor in generate_random_hf_tensors(config, 1))
    assert sum(result["reports"][0].bytes_needed for result in results) == 2 * whole
    for result in results:
        first, second = result["names"]
        # groups are kept
        assert any(first) and second == ([None, first[1]] if is_killed else first)
    assert list((tmp_path / "transfer").iterdir()) == []  # nothing passes through files
