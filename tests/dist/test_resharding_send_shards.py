"""send_shards on real sharded models: each rank sends what it holds, and what arrives is
what was loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_pool import DistPool
from test_resharding_sender import CONFIG, EXPERTS, LLAMA, SEED, expect_failure_on_all

from benchmarks.parity.cases import EXPERT_FAMILIES
from benchmarks.parity.fused_experts import unfused
from rlhf_megatron.ranks.checkpoint.model_weights import iterate_local_shards, load_weights_on_rank
from rlhf_megatron.weights.bucket_manifest import BucketManifest
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.tensor_digest import digest_tensor, format_digest
from rlhf_megatron.weights.weight_source import generate_random_hf_tensors, make_random_source

pytestmark = pytest.mark.dist


def send(
    world: Any,
    config: dict,
    transfer_dir: Path,
    dtype: str,
    bucket_bytes: int,
    fail: str = "",
    fail_on: str = "",
) -> dict[str, Any]:
    """On every rank: build the real model, load it, send it; the first rank of a copy reads the
    buckets as an engine does. `fail`: "send" | "deliver" | "export" | "fill" | "plan", on the rank
    with coordinates `fail_on`.
    """
    from rlhf_megatron.ranks.models.megatron_model_builder import build_megatron_model
    from rlhf_megatron.ranks.resharding.shard_sender import send_shards
    from rlhf_megatron.ranks.resharding.weight_sender import SendRequest
    from rlhf_megatron.rollout.transports.tensor_transport import (
        SharedMemoryBuffers,
        attach_shared_buffers,
    )
    from rlhf_megatron.weights.bucket_buffers import (
        BucketBuffers,
        map_bucket_file,
        view_bucket_tensors,
    )

    table = make_weight_table(config, world.layout.tp)
    model = build_megatron_model(config, world, torch.float32)
    load_weights_on_rank(model.chunks, table, make_random_source(config, SEED), world)
    received: dict[str, torch.Tensor] = {}
    sizes: list[int] = []
    is_bad = str(world.coordinates) == fail_on

    def deliver(manifest: BucketManifest, raw: torch.Tensor) -> None:
        manifest = BucketManifest.parse_json(manifest.encode_json())
        if is_bad and fail == "deliver" and manifest.bucket == 1:
            raise OSError("engine0 said no")
        sizes.append(manifest.num_bytes)
        given = view_bucket_tensors(
            manifest, [(0, map_bucket_file(transfer_dir / manifest.file, manifest))]
        )
        for entry in manifest.tensors:
            whole = received.setdefault(
                entry.name, torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
            )
            span = entry.span
            target = whole.narrow(span.dim, span.start, span.num_entries)
            assert not target.any(), f"{entry.key} came twice"
            target.copy_(given[entry.key])

    def open_buffers(
        part_bytes: Sequence[int], num_buckets: int, devices: Sequence[str]
    ) -> BucketBuffers:
        assert list(devices) == [""] * len(part_bytes)
        buffers = SharedMemoryBuffers(
            transfer_dir, str(world.coordinates), sum(part_bytes), num_buckets, deliver
        )
        if is_bad and fail == "send":
            buffers.start_delivery = _raise  # type: ignore[method-assign]
        return buffers

    shards = list(iterate_local_shards(model.chunks, table))
    if is_bad and fail == "export":
        shards = (_raise() for _ in range(1))
    if is_bad and fail == "fill":  # a tensor that is not there, in the middle of the stage
        middle = next(
            i
            for i, (rule, _) in enumerate(shards)
            if rule.layer == 2 and rule.split == "gated_rows"
        )
        shards[middle] = (shards[middle][0], None)
    error = ""
    report = None
    try:
        report = send_shards(
            shards,
            world,
            SendRequest(
                3,
                getattr(torch, dtype),
                bucket_bytes * 8 if is_bad and fail == "plan" else bucket_bytes,
            ),
            open_buffers,
            partial(attach_shared_buffers, transfer_dir),
        )
    except Exception as exception:
        error = f"{type(exception).__name__}: {exception}"
    return {
        "received": received,
        "sizes": sizes,
        "report": report,
        "error": error,
        "place": str(world.coordinates),
    }


def _raise(*_: Any) -> Any:
    raise MemoryError("no memory left")


@pytest.mark.parametrize(
    ("layout", "config", "dtype", "bucket_bytes", "num_copies"),
    [
        ({}, CONFIG, "float32", 1 << 20, 1),
        ({"tp": 2}, LLAMA, "bfloat16", 4096, 1),
        ({"tp": 2, "pp": 2}, CONFIG, "float32", 10_000, 1),
        ({"dp": 2}, CONFIG, "bfloat16", 4096, 2),
        ({"dp": 2, "ep": 2}, EXPERTS, "bfloat16", 10_000, 1),
        ({"dp": 2, "etp": 2}, EXPERTS, "bfloat16", 10_000, 1),
        ({"tp": 2, "sequence_parallel": True, "ep": 2, "etp": 1}, EXPERTS, "bfloat16", 10_000, 1),
        ({"pp": 2, "dp": 2, "ep": 2, "first_layers": 1}, EXPERTS, "float32", 10_000, 1),
        (
            {"tp": 2, "sequence_parallel": True, "ep": 2, "etp": 1},
            EXPERT_FAMILIES["gpt_oss"],
            "bfloat16",
            10_000,
            1,
        ),
    ],
    ids=str,
)
def test_every_rank_sends_what_it_holds(
    dist_pool: DistPool,
    tmp_path: Path,
    layout: dict,
    config: dict,
    dtype: str,
    bucket_bytes: int,
    num_copies: int,
) -> None:
    results = dist_pool.run(
        send, **layout, config=config, transfer_dir=tmp_path, dtype=dtype, bucket_bytes=bucket_bytes
    )
    assert [result["error"] for result in results] == [""] * len(results)
    plain = unfused(dict(generate_random_hf_tensors(config, SEED)), config["model_type"])
    expected = {
        n: t if n.endswith("correction_bias") else t.to(getattr(torch, dtype))
        for n, t in plain.items()
    }
    arrived = [(name, tensor) for result in results for name, tensor in result["received"].items()]
    assert len(arrived) == num_copies * len(expected) and dict(arrived).keys() == expected.keys()
    for name, tensor in arrived:
        assert torch.equal(tensor.view(torch.int16), expected[name].view(torch.int16)), name
    digests: dict[str, int] = {}
    for result in results:
        for name, value in result["report"].digests.items():
            digests[name] = digests.get(name, 0) + int(value, 16)
    assert {name: format_digest(value) for name, value in digests.items()} == {
        name: format_digest(digest_tensor(tensor)) for name, tensor in expected.items()
    }
    sent = [result["report"].num_bytes for result in results]
    assert sum(sent) == sum(tensor.nbytes for tensor in expected.values())
    assert list(tmp_path.iterdir()) == []
    per_stage = len(results) // layout.get("pp", 1) // num_copies
    for stage in range(layout.get("pp", 1)):  # nobody sends much more than another
        of_stage = sent[stage * len(results) // layout.get("pp", 1) :][:per_stage]
        assert max(of_stage) < 1.4 * sum(of_stage) / per_stage, sent


@pytest.mark.parametrize(
    ("fail", "fail_on", "own", "other"),
    [
        ("send", "dp0 pp0 tp0", "MemoryError: no memory left", "SyncAbortedError: .* another rank"),
        ("deliver", "dp0 pp0 tp0", "OSError: engine0 said no", "SyncAbortedError: .* another rank"),
        ("export", "dp0 pp0 tp1", "MemoryError: no memory left", "SyncAbortedError"),
        ("fill", "dp0 pp0 tp1", "KeyError", "SyncAbortedError: .* of this copy"),
        (
            "plan",
            "dp0 pp0 tp1",
            "ValueError: .*planned different",
            "ValueError: .*planned different",
        ),
    ],
)
def test_failure_on_one_rank_ends_the_sync_on_all(
    dist_pool: DistPool, tmp_path: Path, fail: str, fail_on: str, own: str, other: str
) -> None:
    expect_failure_on_all(dist_pool, send, tmp_path, fail, fail_on, own, other)
