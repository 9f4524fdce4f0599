"""send_weights on real sharded models: what arrives is what transformers would load, at every
layout; and aborts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_pool import DistPool

from rlhf_megatron.ranks.checkpoint.model_weights import iterate_local_shards, load_weights_on_rank
from rlhf_megatron.weights.bucket_manifest import BucketManifest
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.tensor_digest import digest_tensor, format_digest
from rlhf_megatron.weights.weight_source import generate_random_hf_tensors, make_random_source

CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 21,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {
    **CONFIG,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
}
LLAMA = {**CONFIG, "model_type": "llama", "tie_word_embeddings": True}
SEED = 5


def send(
    world: Any,
    config: dict,
    transfer_dir: Path,
    dtype: str,
    bucket_bytes: int,
    fail: str = "",
    fail_on: str = "",
    memory: Any = "shared_memory",
) -> dict[str, Any]:
    """On every rank: build the real model, load it, send it; the deliver callback reads the bucket
    as an engine does:
    from its file, or the sender's memory where it lies there.

    `fail`: "deliver" | "export" | "plan" | "gather", on the rank with coordinates `fail_on`.
    """
    from rlhf_megatron.ranks.models.megatron_model_builder import build_megatron_model
    from rlhf_megatron.ranks.resharding.weight_sender import SendRequest, send_whole_tensors
    from rlhf_megatron.rollout.transports.disk_transport import SafetensorsFileBuffers
    from rlhf_megatron.rollout.transports.tensor_transport import SharedMemoryBuffers
    from rlhf_megatron.weights.bucket_buffers import (
        BucketBuffers,
        make_memory_buffers,
        map_bucket_file,
    )

    table = make_weight_table(config, world.layout.tp)
    model = build_megatron_model(config, world, torch.float32)
    load_weights_on_rank(model.chunks, table, make_random_source(config, SEED), world)
    received: dict[str, torch.Tensor] = {}
    manifests: list[BucketManifest] = []
    is_bad = str(world.coordinates) == fail_on

    def in_file(manifest: BucketManifest) -> torch.Tensor:
        if memory == "shared_memory":
            return map_bucket_file(transfer_dir / manifest.file, manifest)
        data = (transfer_dir / manifest.file).read_bytes()
        assert len(data) == manifest.file_offset + manifest.num_bytes
        return torch.frombuffer(bytearray(data[manifest.file_offset :]), dtype=torch.uint8)

    def deliver(manifest: BucketManifest, raw: torch.Tensor) -> None:
        manifest = BucketManifest.parse_json(manifest.encode_json())
        if is_bad and fail == "deliver" and manifest.bucket == 1:
            raise OSError("engine0 said no")
        assert raw.numel() == manifest.num_bytes
        bucket = raw if memory == "device_memory" else in_file(manifest)
        manifests.append(manifest)
        for entry in manifest.tensors:
            part = bucket[entry.offset : entry.offset + entry.num_bytes].clone()
            received[entry.name] = part.view(getattr(torch, entry.dtype)).view(entry.shape)
            assert format_digest(digest_tensor(received[entry.name])) == entry.digest

    def open_buffers(capacity: int, num_buckets: int) -> BucketBuffers:
        if memory == "device_memory":
            return make_memory_buffers(world.device, capacity, num_buckets, deliver)
        in_files = SafetensorsFileBuffers if memory == "files" else SharedMemoryBuffers
        return in_files(transfer_dir, str(world.coordinates), capacity, num_buckets, deliver)

    shards = list(iterate_local_shards(model.chunks, table))
    if is_bad and fail == "export":
        shards = (_raise() for _ in range(1))
    if is_bad and fail == "gather":  # a tensor that cannot be packed, in the middle of the stage
        middle = next(
            i
            for i, (rule, _) in enumerate(shards)
            if rule.layer == 2 and rule.split == "gated_rows"
        )
        shards[middle] = (shards[middle][0], None)
    error = ""
    report = None
    try:
        report = send_whole_tensors(
            shards,
            world,
            SendRequest(
                3,
                getattr(torch, dtype),
                bucket_bytes * 8 if is_bad and fail == "plan" else bucket_bytes,
            ),
            open_buffers,
            alignment=64 if memory == "shared_memory" else 1,
        )
    except Exception as exception:
        error = f"{type(exception).__name__}: {exception}"
    return {
        "received": received,
        "manifests": manifests,
        "report": report,
        "error": error,
        "place": str(world.coordinates),
    }


def _raise() -> Any:
    raise MemoryError("no memory left")


def check(results: list[dict[str, Any]], config: dict, dtype: str, num_senders: int) -> None:
    expected = {n: t.to(getattr(torch, dtype)) for n, t in generate_random_hf_tensors(config, SEED)}
    assert [r["error"] for r in results] == [""] * len(results)
    received: dict[str, torch.Tensor] = {}
    for result in results:
        assert not received.keys() & result["received"].keys()
        received |= result["received"]
        assert result["report"].digests == {
            n: format_digest(digest_tensor(t)) for n, t in result["received"].items()
        }
        assert result["report"].num_bytes == sum(
            t.numel() * t.element_size() for t in result["received"].values()
        )
        assert [m.bucket for m in result["manifests"]] == list(range(len(result["manifests"])))
        assert {(m.version, m.sender) for m in result["manifests"]} <= {(3, result["place"])}
    assert received.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(received[name].view(torch.int16), tensor.view(torch.int16)), name
    assert sum(bool(r["received"]) for r in results) == num_senders


@pytest.mark.dist
@pytest.mark.parametrize(
    ("tp", "pp", "dp", "config", "dtype", "bucket_bytes"),
    [
        (1, 1, 1, CONFIG, "float32", 1 << 20),
        (2, 1, 1, LLAMA, "bfloat16", 4096),
        (1, 2, 1, LLAMA, "bfloat16", 1 << 20),
        (1, 1, 2, CONFIG, "bfloat16", 4096),
        (2, 2, 1, CONFIG, "bfloat16", 4096),
        (2, 2, 1, LLAMA, "float32", 10_000),
    ],
)
def test_what_arrives_is_what_was_loaded(
    dist_pool: DistPool,
    tmp_path: Path,
    tp: int,
    pp: int,
    dp: int,
    config: dict,
    dtype: str,
    bucket_bytes: int,
) -> None:
    results = dist_pool.run(
        send,
        tp=tp,
        pp=pp,
        dp=dp,
        config=config,
        transfer_dir=tmp_path,
        dtype=dtype,
        bucket_bytes=bucket_bytes,
    )
    check(results, config, dtype, num_senders=pp)
    assert list(tmp_path.iterdir()) == []
    num_buckets = max(len(r["manifests"]) for r in results)
    assert num_buckets == 1 if bucket_bytes == 1 << 20 else num_buckets > 3


@pytest.mark.dist
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "ep": 2},
        {"dp": 2, "etp": 2},
        {"tp": 2, "sequence_parallel": True, "ep": 2, "etp": 1},
        {"tp": 2, "sequence_parallel": True, "etp": 1},
        {"pp": 2, "dp": 2, "ep": 2, "first_layers": 1},
    ],
)
def test_experts_arrive_from_the_ranks_that_share_them(
    dist_pool: DistPool, tmp_path: Path, layout: dict
) -> None:
    results = dist_pool.run(
        send, **layout, config=EXPERTS, transfer_dir=tmp_path, dtype="bfloat16", bucket_bytes=10_000
    )
    check(results, EXPERTS, "bfloat16", num_senders=layout.get("pp", 1))


@pytest.mark.dist
@pytest.mark.parametrize("memory", ["shared_memory", "device_memory", "files"])
def test_buckets_smaller_than_a_tensor(dist_pool: DistPool, tmp_path: Path, memory: str) -> None:
    """One byte: each fusion group is whole in a bucket of its own, and what is in flight is two
    of the largest.
    """
    results = dist_pool.run(
        send,
        tp=2,
        config=LLAMA,
        transfer_dir=tmp_path,
        dtype="bfloat16",
        bucket_bytes=1,
        memory=memory,
    )
    check(results, LLAMA, "bfloat16", num_senders=1)
    groups = [
        sorted(entry.name for entry in manifest.tensors) for manifest in results[0]["manifests"]
    ]
    assert sorted(map(len, groups)) == [1] * 18 + [2] * 4 + [3] * 4 and len(groups) == 26
    assert any(names[0].endswith("q_proj.weight") or "k_proj" in names[0] for names in groups)
    assert len(list(tmp_path.iterdir())) == (26 if memory == "files" else 0)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("axes", "config"),
    [
        ({"tp": 2, "sequence_parallel": True}, CONFIG),
        ({"pp": 2, "vpp": 2}, LLAMA),  # the first stage has layers 0 and 2, the last 1 and 3
        ({"pp": 2, "vpp": 2, "cp": 2}, CONFIG),
    ],
    ids=str,
)
def test_what_arrives_under_other_axes(
    dist_pool: DistPool, tmp_path: Path, axes: dict, config: dict
) -> None:
    results = dist_pool.run(
        send,
        config=config,
        transfer_dir=tmp_path,
        dtype="bfloat16",
        bucket_bytes=4096,
        timeout_s=300,
        **axes,
    )
    check(results, config, "bfloat16", num_senders=axes.get("pp", 1))
    senders = [r["place"] for r in results if r["received"]]
    assert senders == [f"dp0 pp{pp} tp0" for pp in range(axes.get("pp", 1))]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("fail", "fail_on", "own", "other"),
    [
        ("deliver", "dp0 pp0 tp0", "OSError: engine0 said no", "SyncAbortedError: .* another rank"),
        ("export", "dp0 pp0 tp1", "MemoryError: no memory left", "SyncAbortedError"),
        ("gather", "dp0 pp0 tp1", "KeyError", "SyncAbortedError"),
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


def expect_failure_on_all(
    dist_pool: DistPool,
    send: Any,
    transfer_dir: Path,
    fail: str,
    fail_on: str,
    own: str,
    other: str,
) -> None:
    """At tp2 the rank `fail_on` ends with words like `own`, the other with words like `other`;
    no file stays.
    """
    how = {
        "config": CONFIG,
        "transfer_dir": transfer_dir,
        "dtype": "bfloat16",
        "bucket_bytes": 4096,
    }
    for result in dist_pool.run(send, tp=2, fail=fail, fail_on=fail_on, **how):
        assert re.match(own if result["place"] == fail_on else other, result["error"]), result[
            "error"
        ]
    assert list(transfer_dir.iterdir()) == []


@pytest.mark.dist
def test_failure_of_one_stage_leaves_the_other_stage_to_end(
    dist_pool: DistPool, tmp_path: Path
) -> None:
    arguments = {
        "config": CONFIG,
        "transfer_dir": tmp_path,
        "dtype": "bfloat16",
        "bucket_bytes": 4096,
    }
    results = dist_pool.run(send, tp=2, pp=2, fail="deliver", fail_on="dp0 pp1 tp0", **arguments)
    errors = [r["error"].partition(":")[0] for r in results]
    assert errors == ["", "", "OSError", "SyncAbortedError"]
