"""The module that runs inside the ranks of the server, on stand-ins for SGLang's layers, and
receipts put together.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from full_disk import files_end_at
from rollout_tools import digests_of, write_buckets
from sglang_standins import (
    FusedMoE,
    Layer,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    tree,
)
from torch import Tensor, nn

from rlhf_megatron.device import SharedDeviceMemory
from rlhf_megatron.rollout.engine_interface import EngineError
from rlhf_megatron.rollout.sglang import sglang_weight_verbs as receipts
from rlhf_megatron.rollout.sglang.server import loader, sglang_runtime
from rlhf_megatron.weights import bucket_buffers
from rlhf_megatron.weights.bucket_buffers import LentSegment, map_bucket_file, view_bucket_tensors
from rlhf_megatron.weights.bucket_manifest import BucketManifest, TensorEntry
from rlhf_megatron.weights.bucket_messages import narrow_to_span
from rlhf_megatron.weights.shard_plan import intersect_spans
from rlhf_megatron.weights.tensor_digest import digest_tensor_part, format_digest
from rlhf_megatron.weights.weight_table import TensorSpan


@pytest.fixture(autouse=True)
def no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody moves experts about."""
    monkeypatch.setattr(sglang_runtime, "list_expert_slots", lambda layer, expert: [expert])
    monkeypatch.setattr(sglang_runtime, "count_layer_experts", lambda of_layer: of_layer)


def weights_of(num_kv_heads: int = 2, seed: int = 1) -> dict[str, Tensor]:
    """Four heads of two rows, a vocabulary of 13, two experts."""
    torch.manual_seed(seed)
    shapes = {
        "embed.weight": (13, 6),
        "attn.q_proj.weight": (8, 6),
        "attn.k_proj.weight": (2 * num_kv_heads, 6),
        "attn.v_proj.weight": (2 * num_kv_heads, 6),
        "attn.q_proj.bias": (8,),
        "attn.k_proj.bias": (2 * num_kv_heads,),
        "attn.v_proj.bias": (2 * num_kv_heads,),
        "attn.o_proj.weight": (6, 8),
        "attn.o_proj.bias": (6,),
        "mlp.gate_proj.weight": (12, 6),
        "mlp.up_proj.weight": (12, 6),
        "mlp.down_proj.weight": (6, 12),
        "norm.weight": (6,),
        "gate.weight": (2, 6),
        **{
            f"mlp.experts.{e}.{part}_proj.weight": (8, 6)
            for e in range(2)
            for part in ("gate", "up")
        },
        **{f"mlp.experts.{e}.down_proj.weight": (6, 8) for e in range(2)},
        "lm_head.weight": (13, 6),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def rank_of(
    weights: dict[str, Tensor], rank: int, size: int, ep_size: int = 1, **changes: bool
) -> nn.Module:
    """The model of one tp rank, loaded."""

    def get(prefix: str, *names: str, kind: str = "weight") -> list[Tensor]:
        return [weights[f"{prefix}.{name}_proj.{kind}"] for name in names]

    experts = [tuple(get(f"mlp.experts.{e}", "gate", "up", "down")) for e in range(2)]
    return tree(
        embed=VocabParallelEmbedding(rank, size, weights["embed.weight"]),
        attn__qkv_proj=QKVParallelLinear(
            rank, size, *get("attn", "q", "k", "v"), *get("attn", "q", "k", "v", kind="bias")
        ),
        attn__o_proj=RowParallelLinear(
            rank, size, weights["attn.o_proj.weight"], weights["attn.o_proj.bias"]
        ),
        mlp__gate_up_proj=MergedColumnParallelLinear(rank, size, *get("mlp", "gate", "up")),
        mlp__down_proj=RowParallelLinear(rank, size, weights["mlp.down_proj.weight"]),
        mlp__experts=FusedMoE(rank, size, experts, ep_size, **changes),  # type: ignore[arg-type]
        norm=ReplicatedLinear(weights["norm.weight"]),
        gate=ReplicatedLinear(weights["gate.weight"]),
        lm_head=VocabParallelEmbedding(rank, size, weights["lm_head.weight"]),
    )


def receipts_of(models: Sequence[nn.Module], manifest: BucketManifest) -> list[receipts.Receipt]:
    """As they are read: through JSON."""
    return [
        json.loads(
            json.dumps(
                {"rank": rank, "size": len(models), **loader.make_bucket_receipt(model, manifest)}
            )
        )
        for rank, model in enumerate(models)
    ]


@pytest.fixture
def manifest(tmp_path: Path) -> BucketManifest:
    (found,) = write_buckets(weights_of(), tmp_path, 1, num_buckets=1)
    return found


def engine(weights: dict[str, Tensor], size: int = 2) -> list[nn.Module]:
    return [rank_of(weights, rank, size) for rank in range(size)]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("size", "ep_size", "changes"),
    [
        (1, 1, {}),
        (2, 1, {}),
        (4, 1, {}),
        (2, 2, {}),
        (4, 2, {}),
        (2, 1, {"use_triton_kernels": True}),
        (2, 1, {"use_flashinfer_trtllm_moe": True, "use_padded_loading": True}),
    ],
)
def test_parts_of_all_ranks_make_the_digests_that_were_sent(
    size: int, ep_size: int, changes: dict[str, bool], num_kv_heads: int, tmp_path: Path
) -> None:
    """Key-value heads are replicated where there are more ranks; buckets are cut
    inside fused parts.
    """
    weights = weights_of(num_kv_heads)
    models = [rank_of(weights, rank, size, ep_size, **changes) for rank in range(size)]
    found = receipts.LoadedWeights()
    for manifest in write_buckets(weights, tmp_path, 1, num_buckets=5):
        found |= receipts.check_loaded_bucket("engine0", manifest, receipts_of(models, manifest))
    assert found == receipts.LoadedWeights(digest_by_key=digests_of(weights))


def test_bytes_are_those_of_the_parts(manifest: BucketManifest) -> None:
    """Of 4 ranks with 2 key-value heads: what is sharded counts once, replicated heads twice, the
    rest in each rank.
    """
    models = engine(weights_of(), 4)
    found = receipts_of(models, manifest)
    sizes = {entry.name: entry.num_bytes for entry in manifest.tensors}
    replicated = {"attn.o_proj.bias", "norm.weight", "gate.weight"}
    copies = {
        name: 2 if ".k_proj" in name or ".v_proj" in name else 4 if name in replicated else 1
        for name in sizes
    }
    expected = sum(size * copies[name] for name, size in sizes.items())
    assert sum(receipt["num_bytes_standing"] for receipt in found) == expected
    assert sum(receipt["num_bytes_read"] for receipt in found) == expected
    assert (
        loader.make_bucket_receipt(models[0], manifest, num_bytes_read=77)["num_bytes_read"] == 77
    )


def plant(model: nn.Module, name: str, change: Callable[[Tensor], object]) -> None:
    with torch.no_grad():
        change(model.get_parameter(name))


def swap_rows(first: int, second: int) -> Callable[[Tensor], object]:
    def act(values: Tensor) -> None:
        values[[first, second]] = values[[second, first]]

    return act


def flip_a_bit(values: Tensor) -> None:
    values.view(torch.uint8).view(-1)[-1] ^= 1


PLANTED: dict[str, tuple[int, str, Callable[[Tensor], object], list[str]]] = {
    "a flipped bit in one rank's rows": (
        1,
        "mlp.gate_up_proj.weight",
        flip_a_bit,
        ["mlp.up_proj.weight"],
    ),
    "a flipped bit in one rank's columns": (
        1,
        "mlp.down_proj.weight",
        flip_a_bit,
        ["mlp.down_proj.weight"],
    ),
    "q and k swapped": (
        0,
        "attn.qkv_proj.weight",
        swap_rows(1, 4),
        ["attn.q_proj.weight", "attn.k_proj.weight"],
    ),
    "gate and up swapped": (
        1,
        "mlp.gate_up_proj.weight",
        lambda values: values.copy_(values.roll(6, 0)),
        ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    ),
    "an expert left out": (
        0,
        "mlp.experts.w13_weight",
        lambda values: values[1].zero_(),
        ["mlp.experts.1.gate_proj.weight", "mlp.experts.1.up_proj.weight"],
    ),
    "a bias left out": (
        1,
        "attn.qkv_proj.bias",
        lambda values: values[:4].zero_(),
        ["attn.q_proj.bias"],
    ),
    "another vocabulary row": (1, "embed.weight", swap_rows(0, 1), ["embed.weight"]),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_stands_wrong_is_named_with_its_rank_and_bucket(
    name: str, manifest: BucketManifest, tmp_path: Path
) -> None:
    rank, parameter, change, wrong = PLANTED[name]
    models = engine(weights_of())
    plant(models[rank], parameter, change)

    def compare() -> list[dict[str, Any]]:
        views = views_of_file(tmp_path / manifest.file, manifest)
        return [
            {"rank": r, "compared": loader.compare_with_bucket(model, manifest, views)}
            for r, model in enumerate(models)
        ]

    with pytest.raises(EngineError) as error:
        receipts.check_loaded_bucket("engine0", manifest, receipts_of(models, manifest), compare)
    words = str(error.value)
    assert words.startswith(
        f"engine0, bucket 0 of actor dp0 pp0 tp0: {len(wrong)} of {len(manifest.tensors)} tensors"
    )
    for tensor in wrong:
        assert f"tensor '{tensor}': digest " in words
    assert words.count(f"tp rank {rank} holds other values than the bucket") == len(wrong)


def test_a_stale_rank_is_named(manifest: BucketManifest) -> None:
    """Its parts of all that is sharded are old; of what both hold, the two do not agree."""
    models = [rank_of(weights_of(), 0, 2), rank_of(weights_of(seed=2), 1, 2)]
    with pytest.raises(
        EngineError, match=f"{len(manifest.tensors)} of {len(manifest.tensors)} tensors"
    ):
        receipts.check_loaded_bucket("engine0", manifest, receipts_of(models, manifest))
    found = receipts.combine_bucket_receipts(receipts_of(models, manifest))
    assert found.fault_by_key["norm.weight"] == (
        "tp ranks 0 and 1 hold different values for all of it (bucket 0 of actor dp0 pp0 tp0)"
    )
    assert (
        found.digest_by_key.keys().isdisjoint({"norm.weight"})
        and len(found.digest_by_key) == len(manifest.tensors) - 3
    )


def test_replicas_that_disagree_are_told_from_the_rest(manifest: BucketManifest) -> None:
    models = engine(weights_of(num_kv_heads=1), 4)
    norm = next(entry for entry in manifest.tensors if entry.name == "norm.weight")
    plant(models[2], norm.name, flip_a_bit)
    assert receipts.combine_bucket_receipts(
        receipts_of(models, replace(manifest, tensors=(norm,)))
    ).fault_by_key == {
        "norm.weight": (
            "tp rank 2 holds other values for all of it than the ranks that hold it as well (bucket"
            " 0 of actor dp0 pp0 tp0)"
        )
    }


def test_parts_must_cover_a_tensor_once(manifest: BucketManifest) -> None:
    """Ranks that do not know their place: twice the same, or a hole."""
    models = engine(weights_of())
    models[1].get_submodule("mlp.down_proj").tp_rank = 0
    models[1].get_submodule("attn.o_proj").tp_rank = 3
    models[1].get_submodule("lm_head").shard_indices.org_vocab_start_index = 6
    faults = receipts.combine_bucket_receipts(receipts_of(models, manifest)).fault_by_key
    bucket = "(bucket 0 of actor dp0 pp0 tp0)"
    assert faults == {
        "mlp.down_proj.weight": (
            f"tp ranks 0 and 1 hold different values for the part from column 0 to 5 {bucket}"
        ),
        "attn.o_proj.weight": f"the part from column 4 to 7 stands in none of its ranks {bucket}",
        "lm_head.weight": (
            f"the part from row 6 to 7 stands in it twice, in different parts {bucket}"
        ),
    }


def test_a_head_that_the_engine_ties_is_not_found(manifest: BucketManifest) -> None:
    """So a trainer that sends one of its own is told, where the server would drop it
    without a word.
    """
    models = engine(weights_of())
    for model in models:
        model.add_module("lm_head", model.get_submodule("embed"))
    with pytest.raises(
        EngineError, match=r"1 of \d+ tensors .* 'lm_head.weight': not found in the engine"
    ):
        receipts.check_loaded_bucket("engine0", manifest, receipts_of(models, manifest))


def test_an_engine_of_other_sizes(manifest: BucketManifest) -> None:
    """Where SGLang does not mind, as on a CPU, which pads."""
    models = engine(weights_of())
    for model in models:
        model.get_submodule("norm").hold(weight=torch.ones(7))
        model.get_submodule("attn.qkv_proj").hold(weight=torch.ones(9, 6))
    with pytest.raises(EngineError) as error:
        receipts.check_loaded_bucket("engine0", manifest, receipts_of(models, manifest))
    words = str(error.value)
    assert "4 of 21 tensors" in words  # three are shown
    assert (
        "'attn.k_proj.weight': the engine's attn.qkv_proj.weight is [9, 6], its parts have 8 rows"
        in words
    )
    (norm,) = (entry for entry in manifest.tensors if entry.name == "norm.weight")
    with pytest.raises(
        EngineError, match=r"'norm.weight': the engine's is \[7\], which is not \[6\]"
    ):
        receipts.check_loaded_bucket(
            "engine0", replace(manifest, tensors=(norm,)), receipts_of(models, manifest)
        )


def test_an_engine_of_another_type(tmp_path: Path) -> None:
    """Wider: the same numbers count. Narrower: they are not the same any more, and the
    message says why.
    """
    weights = {name: tensor.bfloat16() for name, tensor in weights_of().items()}
    (manifest,) = write_buckets(weights, tmp_path, 1, num_buckets=1)
    wide = engine({name: tensor.float() for name, tensor in weights.items()})
    assert receipts.check_loaded_bucket(
        "engine0", manifest, receipts_of(wide, manifest)
    ).digest_by_key == digests_of(weights)
    plant(wide[0], "norm.weight", flip_low_bit)  # below what bfloat16 can tell
    with pytest.raises(
        EngineError, match=r"1 of \d+ .* stands as float32 and was sent as bfloat16"
    ):
        receipts.check_loaded_bucket("engine0", manifest, receipts_of(wide, manifest))
    (manifest,) = write_buckets(weights_of(), tmp_path, 1, num_buckets=1)
    narrow = [model.bfloat16() for model in engine(weights_of())]
    with pytest.raises(
        EngineError, match=r"stands as bfloat16 and was sent as float32: rollout.dtype must be"
    ):
        receipts.check_loaded_bucket("engine0", manifest, receipts_of(narrow, manifest))


def flip_low_bit(values: Tensor) -> None:
    values.view(torch.uint8).view(-1)[0] ^= 1


class Fp8LinearMethod:
    pass


def test_a_quantised_engine_says_so(manifest: BucketManifest) -> None:
    models = engine(weights_of())
    for model in models:
        down = model.get_submodule("mlp.down_proj")
        assert isinstance(down, Layer)
        down.quant_method = Fp8LinearMethod()
        down.hold(weight_scale=torch.ones(1))
        head = model.get_submodule("lm_head")
        del head._parameters["weight"]
        head.register_parameter(
            "weight", nn.Parameter(torch.ones(8, 6, dtype=torch.int8), requires_grad=False)
        )
    found = receipts.check_loaded_bucket("engine0", manifest, receipts_of(models, manifest))
    assert found.incomparable_by_key == {
        "mlp.down_proj.weight": "the engine quantises it (Fp8LinearMethod)",
        "lm_head.weight": "it stands as int8",
    }
    assert len(found.digest_by_key) == len(manifest.tensors) - 2
    # scales are the engine's own
    assert loader.describe_missing_parameters(models[0], set(weights_of())) is None


AXES = {"o_proj.weight": 1, "down_proj.weight": 1}  # the others are cut by rows


def in_parts(weights: dict[str, Tensor], ways: int, directory: Path) -> BucketManifest:
    """As `ways` trainer ranks send them: each tensor that tp cuts in parts, norms, biases behind
    columns and router whole; in one file, without gaps.
    """
    entries = []
    raw = b""
    for name, tensor in weights.items():
        axis = next((axis for end, axis in AXES.items() if name.endswith(end)), 0)
        each = -(-tensor.shape[axis] // ways)
        starts = (
            [0]
            if name in ("norm.weight", "gate.weight", "attn.o_proj.bias")
            else range(0, tensor.shape[axis], each)
        )
        for start in starts:
            count = min(each, tensor.shape[axis] - start) if len(starts) > 1 else tensor.shape[axis]
            part = tensor.narrow(axis, start, count).contiguous()
            shape = tuple(tensor.shape)
            place = None if part.shape == tensor.shape else (axis, start, count)
            found = format_digest(digest_tensor_part(part, shape, axis, start))
            entries.append(TensorEntry(name, "float32", shape, len(raw), found, place))
            raw += part.view(-1).view(torch.uint8).numpy().tobytes()
    (directory / "parts").write_bytes(raw)
    return BucketManifest(1, "actor dp0 pp0 tp0", 0, "parts", len(raw), tuple(entries))


@pytest.mark.parametrize(("size", "ep_size"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("ways", [2, 3])
@pytest.mark.parametrize("is_sent", [False, True], ids=["read", "sent"])
def test_parts_of_tensors_come_to_the_ranks_that_have_them(
    is_sent: bool,
    ways: int,
    size: int,
    ep_size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From trainers that cut otherwise. Each rank reads, or is sent, what stands in it, and a wrong
    part is named with its rank.
    """
    weights = weights_of()
    before = {name: tensor + 1 for name, tensor in weights_of().items()}
    models = [rank_of(before, rank, size, ep_size) for rank in range(size)]
    manifest = in_parts(weights, ways, tmp_path)
    whole = [entry.name for entry in manifest.tensors if entry.part is None]
    views = views_of_file(tmp_path / "parts", manifest)
    for rank, model in enumerate(models):
        loaded = rank_of(
            {name: weights[name] if name in whole else before[name] for name in weights},
            rank,
            size,
            ep_size,
        )

        def load(
            pairs: list[tuple[str, Tensor]], model: Any = model, loaded: nn.Module = loaded
        ) -> None:
            assert [name for name, _ in pairs] == whole
            with torch.no_grad():
                for mine, other in zip(model.parameters(), loaded.parameters(), strict=True):
                    mine.copy_(other)

        monkeypatch.setattr(model, "load_weights", load, raising=False)
        if not is_sent:
            loader.load_bucket_into_model(model, manifest, views)
            continue
        held = loader.list_held_spans(
            model, {entry.name: entry.shape for entry in manifest.tensors}
        )
        given: dict[str, Tensor] = {}
        spans: dict[str, TensorSpan] = {}
        for entry in manifest.tensors:
            for span in (TensorSpan(*one) for one in held.get(entry.name, ())):
                if common := intersect_spans(entry.span, span, entry.shape):
                    given[entry.key] = narrow_to_span(views[entry.key], entry.span, common)
                    spans[entry.key] = common
        loader.load_bucket_into_model(model, manifest, given, spans)
    found = receipts.check_loaded_bucket("engine0", manifest, receipts_of(models, manifest))
    assert found.merge_by_tensor_name() == digests_of(weights)
    moved = sum(receipt["num_bytes_read"] for receipt in receipts_of(models, manifest))
    expected = [rank_of(weights, rank, size, ep_size) for rank in range(size)]
    pad = sum(
        p.numel()
        for m in expected
        for n, p in m.named_parameters()
        if n in ("embed.weight", "lm_head.weight")
    )
    stands = sum(p.numel() for model in expected for p in model.parameters()) - pad + 2 * 13 * 6
    assert moved == 4 * stands
    plant(models[-1], "mlp.down_proj.weight", flip_low_bit)
    with pytest.raises(EngineError, match=r"1 of \d+ tensors .*'mlp.down_proj.weight\[1:"):
        receipts.check_loaded_bucket("engine0", manifest, receipts_of(models, manifest))


def test_what_never_came_is_named() -> None:
    model = rank_of(weights_of(), 1, 2, ep_size=2)
    names = set(weights_of())
    assert loader.describe_missing_parameters(model, names) is None
    assert (
        loader.describe_missing_parameters(model, names - {"mlp.experts.0.up_proj.weight"}) is None
    )  # rank 0 holds that expert
    assert loader.describe_missing_parameters(model, names - {"mlp.experts.1.up_proj.weight"}) == (
        "1 of 12 parameters never came whole: mlp.experts.w13_weight."
    )
    assert loader.describe_missing_parameters(
        model, names - {"attn.k_proj.bias", "norm.weight", "mlp.up_proj.weight", "gate.weight"}
    ) == (
        "4 of 12 parameters never came whole: attn.qkv_proj.bias, gate.weight,"
        " mlp.gate_up_proj.weight and others."
    )
    model.add_module("lm_head", model.get_submodule("embed"))
    assert loader.describe_missing_parameters(model, names - {"lm_head.weight"}) is None


def views_of_file(path: Path, manifest: BucketManifest) -> dict[str, torch.Tensor]:
    return view_bucket_tensors(manifest, [(0, map_bucket_file(path, manifest))])


def test_a_bucket_is_read_where_it_lies(tmp_path: Path) -> None:
    weights = weights_of()
    first, second = write_buckets(weights, tmp_path, 1)
    raw = (tmp_path / second.file).read_bytes()
    (tmp_path / "model.safetensors").write_bytes(b"x" * 24 + raw + b"tail")
    behind = replace(second, file="model.safetensors", file_offset=24)
    for manifest in (first, second, behind):
        found = views_of_file(tmp_path / manifest.file, manifest)
        assert all(
            torch.equal(found[entry.name], weights[entry.name]) for entry in manifest.tensors
        )
        starts = {
            entry.name: found[entry.name].data_ptr() - entry.offset for entry in manifest.tensors
        }
        assert len(set(starts.values())) == 1  # one mapping, no copies
    odd = replace(second, file="odd", file_offset=3)
    (tmp_path / "odd").write_bytes(b"xyz" + raw)
    for name, view in views_of_file(tmp_path / "odd", odd).items():
        assert torch.equal(view, weights[name])
    memory = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    pieces = in_pieces(second, memory)
    for name, view in view_bucket_tensors(second, pieces).items():
        assert torch.equal(view, weights[name])
        assert memory.data_ptr() <= view.data_ptr() < memory.data_ptr() + len(raw)
    end = len(raw)
    with pytest.raises(
        ValueError,
        match=rf"lies at bytes \d+ to {end}, but the memory given has bytes 0 to {end - 1}",
    ):
        view_bucket_tensors(second, [(0, memory[:-1])])
    with pytest.raises(ValueError, match=rf"the memory given has bytes \d+ to {end}\."):
        view_bucket_tensors(second, [pieces[1]])
    with pytest.raises(ValueError, match=r"the memory given has bytes none\."):
        view_bucket_tensors(second, [])


def in_pieces(manifest: BucketManifest, memory: Tensor) -> list[tuple[int, Tensor]]:
    """A bucket cut in two in its middle, between two tensors: as two ranks lend it."""
    middle = manifest.tensors[len(manifest.tensors) // 2].offset
    return [(0, memory[:middle]), (middle, memory[middle:])]


def test_files_that_are_not_the_run_s_are_refused(tmp_path: Path, manifest: BucketManifest) -> None:
    path = tmp_path / manifest.file
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(
        ValueError, match=rf"bucket 0 of actor dp0 pp0 tp0: v1-0 has {size - 1} bytes, the manifest"
    ):
        views_of_file(path, manifest)
    os.truncate(path, size)
    with pytest.raises(
        ValueError, match=rf"has {size} bytes, the manifest says {size} after the first 8"
    ):
        views_of_file(path, replace(manifest, file_offset=8))
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(
        ValueError, match=r"link is a link; only plain files of the transfer directory are read"
    ):
        views_of_file(tmp_path / "link", manifest)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "elsewhere").mkdir()
    os.link(path, tmp_path / "elsewhere" / "name")
    for name in ("pipe", "elsewhere", path.name):  # the last has another name elsewhere
        with pytest.raises(ValueError, match="is a link, of another user or no plain file"):
            views_of_file(tmp_path / name, manifest)


class Server:
    """One rank after the other carries out an order, as in a server."""

    def __init__(
        self, models: Sequence[nn.Module], directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.models = models
        self.directory = directory
        self.patch = monkeypatch
        monkeypatch.setenv(loader.TRANSFER_DIR_VARIABLE, str(directory))

    def order(
        self, receipt: str, pieces: Sequence[tuple[int, Tensor]] = (), **what: str
    ) -> list[dict[str, Any]]:
        """`pieces`: of the bucket, with where they begin. No process opens its own memory: they
        stand for what others lend.
        """
        by_device = {str(start): piece for start, piece in pieces}
        self.patch.setattr(
            bucket_buffers, "open_shared_memory", lambda memory: by_device[memory.device_id]
        )
        nothing = (b"", 0, 0, b"", 0, b"", False)
        lent = [
            LentSegment(start, SharedDeviceMemory(str(start), 0, piece.numel(), *nothing))
            for start, piece in pieces
        ]
        own = {"receipt": receipt} | ({"memory": [lent] * len(self.models)} if lent else {})
        tensors = [
            (
                "order",
                torch.frombuffer(
                    bytearray(msgspec.json.encode({**what, **own})), dtype=torch.uint8
                ),
            )
        ]
        for rank, model in enumerate(self.models):
            self.patch.setattr(
                sglang_runtime, "get_tp_rank_and_size", lambda rank=rank: (rank, len(self.models))
            )
            self.patch.setattr(sglang_runtime, "get_attention_dp_rank", lambda: 0)
            loader.load(model, tensors)
        return [
            json.loads((self.directory / f"{receipt}.{rank}").read_text())
            for rank in range(len(self.models))
        ]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Whose ranks hold old weights and load by dealing out whole new ones."""
    models = engine(weights_of(seed=9))

    def load_weights(self: nn.Module, pairs: list[tuple[str, Tensor]]) -> None:
        held = {**self.weights, **{name: tensor.clone() for name, tensor in pairs}}  # type: ignore[dict-item]
        self.weights = held
        new = rank_of(held, models.index(self), len(models))
        self.load_state_dict(new.state_dict())

    for model in models:
        model.weights = weights_of(seed=9)
        model.load_weights = MethodType(load_weights, model)
    return Server(models, tmp_path, monkeypatch)


def test_orders_of_a_sync(server: Server, tmp_path: Path) -> None:
    """Buckets by file, by device memory and by broadcast; a commit that is incomplete; a bucket
    that fails; and the commit after that.
    """
    weights = weights_of()
    first, second, third = write_buckets(weights, tmp_path, 1, num_buckets=3)
    of_first = server.order("r-1", manifest=first.encode_json())
    assert [receipt["rank"] for receipt in of_first] == [0, 1]
    receipts.check_loaded_bucket("engine0", first, of_first)
    memory = torch.frombuffer(bytearray((tmp_path / second.file).read_bytes()), dtype=torch.uint8)
    (tmp_path / second.file).unlink()
    receipts.check_loaded_bucket(
        "engine0",
        second,
        server.order("r-2", in_pieces(second, memory), manifest=second.encode_json()),
    )
    assert "never came whole" in server.order("r-c1", receipts="r-")[0]["error"]
    for path in tmp_path.glob("r-c1*"):
        path.unlink()
    for model in server.models:
        model.load_weights([(entry.name, weights[entry.name]) for entry in third.tensors])
    by_broadcast = server.order("r-3", digest=third.encode_json())
    receipts.check_loaded_bucket("engine0", third, by_broadcast)
    assert [receipt["num_bytes_read"] for receipt in by_broadcast] == [third.num_bytes] * 2
    assert [receipt["error"] for receipt in server.order("r-c2", receipts="r-")] == [None, None]
    buckets = receipts.read_all_receipts(tmp_path, "r-")
    assert receipts.combine_all_receipts(buckets) == receipts.LoadedWeights(
        digest_by_key=digests_of(weights)
    )
    (tmp_path / "r-2.1").unlink()
    with pytest.raises(
        EngineError, match="bucket 1 of actor dp0 pp0 tp0: tp rank 1 wrote no receipt"
    ):
        receipts.read_all_receipts(tmp_path, "r-")
    assert "FileNotFoundError" in server.order("r-4", manifest=second.encode_json())[0]["error"]
    assert "FileNotFoundError" in server.order("r-c3", receipts="r-")[1]["error"]


@pytest.mark.gpu
def test_ranks_on_a_device_take_device_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Receipts are the same as on a CPU, and comparing names the rank that was changed."""
    weights = weights_of()
    (manifest,) = write_buckets(weights, tmp_path, 1, num_buckets=1)
    memory = torch.frombuffer(
        bytearray((tmp_path / manifest.file).read_bytes()), dtype=torch.uint8
    ).cuda()
    models = [model.cuda() for model in engine(weights)]
    for model in models:
        model.load_weights = lambda pairs: None
    server = Server(models, tmp_path, monkeypatch)
    found = server.order("r-1", in_pieces(manifest, memory), manifest=manifest.encode_json())
    assert receipts.check_loaded_bucket("engine0", manifest, found).digest_by_key == digests_of(
        weights
    )
    for mine, expected in zip(found, receipts_of(engine(weights), manifest), strict=True):
        assert mine["parts"] == expected["parts"]
    plant(models[1], "mlp.down_proj.weight", flip_a_bit)
    pieces = [(0, memory)]
    found = server.order("r-2", pieces, manifest=manifest.encode_json())
    with pytest.raises(
        EngineError,
        match=r"'mlp.down_proj.weight': .*; tp rank 1 holds other values than the bucket",
    ):
        compare = manifest.encode_json()
        receipts.check_loaded_bucket(
            "engine0", manifest, found, lambda: server.order("r-3", pieces, compare=compare)
        )


def test_mistakes_in_memory_that_several_ranks_lend_are_named(
    server: Server, tmp_path: Path
) -> None:
    """A rank that is missing, one whose part begins elsewhere, one that has not filled it again."""
    (manifest,) = write_buckets(weights_of(), tmp_path, 1, num_buckets=1)
    (before,) = write_buckets(weights_of(seed=5), tmp_path, 2, num_buckets=1)
    new, old = (
        torch.frombuffer(bytearray((tmp_path / m.file).read_bytes()), dtype=torch.uint8)
        for m in (manifest, before)
    )
    (_, first), (middle, second) = in_pieces(manifest, new)
    order = partial(server.order, manifest=manifest.encode_json())
    told = (
        "ValueError: bucket 0 of actor dp0 pp0 tp0: tensor '.*' lies at bytes .* but the memory"
        " given has bytes"
    )
    for name, pieces in (("r-1", [(0, first)]), ("r-2", [(0, first), (middle + 64, second)])):
        assert all(re.match(told, receipt["error"]) for receipt in order(name, pieces))
    for name, pieces in (
        ("r-3", [(0, first), (middle - 64, torch.cat([second, second[:64]]))]),
        ("r-4", [(0, first), (middle, in_pieces(before, old)[1][1])]),
    ):
        with pytest.raises(
            EngineError, match=r"tensors do not stand in it as they were sent: tensor '.*': digest"
        ):
            receipts.check_loaded_bucket("engine0", manifest, order(name, pieces))
    receipts.check_loaded_bucket("engine0", manifest, order("r-5", in_pieces(manifest, new)))


def test_corrupt_bytes_of_a_bucket_are_named(server: Server, tmp_path: Path) -> None:
    """No rank differs from them, so none is named."""
    (manifest,) = write_buckets(weights_of(), tmp_path, 1, num_buckets=1)
    raw = bytearray((tmp_path / manifest.file).read_bytes())
    raw[manifest.tensors[1].offset] ^= 1
    (tmp_path / manifest.file).write_bytes(raw)
    found = server.order("r-1", manifest=manifest.encode_json())
    with pytest.raises(EngineError) as error:
        receipts.check_loaded_bucket(
            "engine0", manifest, found, lambda: server.order("r-2", compare=manifest.encode_json())
        )
    assert (
        "1 of 21 tensors do not stand in it as they were sent: tensor 'attn.q_proj.weight': digest"
        in str(error.value)
    )
    assert "tp rank" not in str(error.value)


def test_a_part_of_a_bucket_that_never_came_is_named(server: Server, tmp_path: Path) -> None:
    """The receipts are of another bucket than was sent: half of it, or one without tensors."""
    (manifest,) = write_buckets(weights_of(), tmp_path, 1, num_buckets=1)
    half = replace(manifest, tensors=manifest.tensors[:10])
    with pytest.raises(
        EngineError, match=r"11 of 21 tensors .* 'mlp.up_proj.weight': nothing of it came"
    ):
        receipts.check_loaded_bucket(
            "engine0", manifest, server.order("r-1", manifest=half.encode_json())
        )
    with pytest.raises(EngineError, match=r"21 of 21 tensors .*; and 18 more"):
        receipts.check_loaded_bucket(
            "engine0",
            manifest,
            server.order("r-2", manifest=replace(manifest, tensors=()).encode_json()),
        )


def test_a_server_that_is_older_than_the_run_finds_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(loader.TRANSFER_DIR_VARIABLE, str(tmp_path))
    assert loader.resolve_transfer_dir("run-1") == tmp_path / "run-1"
    assert loader.resolve_transfer_dir(tmp_path.name) == tmp_path
    assert loader.resolve_transfer_dir(None) == tmp_path
    for name in ("", "..", "a/b", "/"):
        with pytest.raises(ValueError, match="is not the plain name of a directory"):
            loader.resolve_transfer_dir(name)


def test_a_model_is_described_by_the_names_of_its_configuration() -> None:
    model = rank_of(weights_of(), 0, 1)
    model.config = SimpleNamespace(vocab_size=5, hidden_size=2, num_hidden_layers=1, other=3)
    told = {
        "vocab_size": 5,
        "hidden_size": 2,
        "num_hidden_layers": 1,
        "is_quantised": False,
        "dtype": "float32",
    }
    assert loader.describe_model(model) == told


def test_groups_of_ranks_under_dp_attention_draw_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang gives all one seed. Where there is one group its numbers stay as they are; a second
    call changes none.
    """
    drawn = []
    for group in (0, 1, 2):
        monkeypatch.setattr(sglang_runtime, "get_attention_dp_rank", lambda group=group: group)
        loader.offset_random_seed.cache_clear()
        torch.manual_seed(5)
        for _ in range(2):
            loader.offset_random_seed()
            drawn.append(tuple(torch.rand(3).tolist()))
    torch.manual_seed(5)
    assert drawn[:2] == [tuple(torch.rand(3).tolist()) for _ in range(2)]
    assert len(set(drawn)) == 6
    loader.offset_random_seed.cache_clear()


def test_an_order_that_cannot_be_answered_does_not_end_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sglang_runtime, "get_tp_rank_and_size", lambda: (0, 1))
    monkeypatch.setattr(sglang_runtime, "get_attention_dp_rank", lambda: 0)
    model = rank_of(weights_of(), 0, 1)
    order = torch.frombuffer(
        bytearray(b'{"describe": true, "receipt": "r", "directory": "gone"}'), dtype=torch.uint8
    )
    monkeypatch.delenv(loader.TRANSFER_DIR_VARIABLE, raising=False)
    loader.load(model, [("order", order)])
    assert "an order cannot be carried out: RLHF_MEGATRON_TRANSFER_DIR" in caplog.text
    monkeypatch.setenv(loader.TRANSFER_DIR_VARIABLE, str(tmp_path))
    loader.load(model, [("order", order)])
    assert f"a receipt is missing: [Errno 2] {tmp_path}/gone/r.0 cannot be" in caplog.text
    (tmp_path / "gone").mkdir()
    loader.load(model, [("order", order)])
    found = json.loads((tmp_path / "gone" / "r.0").read_text())
    assert found == {
        "rank": 0,
        "size": 1,
        "error": None,
        "model": {"is_quantised": False, "dtype": "float32"},
        "devices": found["devices"],
    }


def test_an_answer_that_is_no_json_reaches_the_client_as_an_error(server: Server) -> None:
    server.models[0].config = SimpleNamespace(vocab_size={1, 2})
    first, second = server.order("r-1", describe="yes")
    assert (
        first["rank"] == 0
        and first["error"] == "TypeError: Object of type set is not JSON serializable"
    )
    assert second["error"] is None


def test_a_head_that_only_the_engine_has_becomes_the_embedding(tmp_path: Path) -> None:
    """SGLang's Qwen3-MoE has one where config.json says that the two are one."""
    weights = {"model.embed_tokens.weight": torch.randn(13, 6)}
    (manifest,) = write_buckets(weights, tmp_path, 1, num_buckets=1)
    models: list[Any] = []
    for rank in range(2):
        own = VocabParallelEmbedding(rank, 2, torch.randn(13, 6))
        models.append(
            tree(
                model__embed_tokens=VocabParallelEmbedding(rank, 2, *weights.values()), lm_head=own
            )
        )
        models[-1].config = SimpleNamespace(tie_word_embeddings=True)
        models[-1].load_weights = lambda pairs: None
    with pytest.raises(
        EngineError, match=r"'model.embed_tokens.weight': tp rank \d .* different values"
    ):
        receipts.check_loaded_bucket("engine0", manifest, receipts_of(models, manifest))
    for model in models:
        loader.load_bucket_into_model(
            model, manifest, views_of_file(tmp_path / manifest.file, manifest)
        )
        assert loader.describe_missing_parameters(model, set(weights)) is None
    assert receipts.check_loaded_bucket(
        "engine0", manifest, receipts_of(models, manifest)
    ).digest_by_key == digests_of(weights)
    models[0].config = SimpleNamespace(tie_word_embeddings=False)
    assert "lm_head.weight" in str(loader.describe_missing_parameters(models[0], set(weights)))


def test_a_receipt_for_which_the_disk_has_no_room_is_named_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No part of a receipt is left behind."""
    monkeypatch.setattr(sglang_runtime, "get_tp_rank_and_size", lambda: (0, 1))
    monkeypatch.setattr(sglang_runtime, "get_attention_dp_rank", lambda: 0)
    monkeypatch.setenv(loader.TRANSFER_DIR_VARIABLE, str(tmp_path))
    order = torch.frombuffer(bytearray(b'{"describe": true, "receipt": "r"}'), dtype=torch.uint8)
    model = rank_of(weights_of(), 0, 1)
    with files_end_at(10):
        loader.load(model, [("order", order)])
    assert f"{tmp_path}/r.0 cannot be written: File too large." in caplog.text
    assert not list(tmp_path.iterdir())
    loader.load(model, [("order", order)])
    assert json.loads((tmp_path / "r.0").read_text())["error"] is None
