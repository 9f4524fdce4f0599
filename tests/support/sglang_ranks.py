"""Whole models of stock SGLang, one tp rank after the other in one process: what their
`load_weights` leaves in them.

  .venv-sglang/bin/python tests/support/sglang_ranks.py DIRECTORY < cases.json
      # with the environment of sglang_tools

Ranks are told their place without process groups, which a model needs to compute but not to hold
weights. So layouts can be had that two processes on a CPU do not show: many ranks, replicated
heads, expert parallelism.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor, nn

from rlhf_megatron.config.schema import RolloutConfig, SGLangConfig
from rlhf_megatron.ranks.resharding.weight_sender import fill_bucket_buffer
from rlhf_megatron.rollout.sglang import sglang_weight_verbs as receipts
from rlhf_megatron.rollout.sglang.server import loader
from rlhf_megatron.weights.bucket_buffers import view_bucket_tensors
from rlhf_megatron.weights.bucket_manifest import BucketManifest, TensorEntry
from rlhf_megatron.weights.bucket_plan import plan_buckets
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.fp8_engine_weights import make_engine_table
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.quantised_weights import (
    FP8_BLOCK,
    SCALE,
    is_stored_in_fp8,
    quantise_to_fp8,
)
from rlhf_megatron.weights.shard_plan import EngineLayout, iterate_transfers, plan_send_shares
from rlhf_megatron.weights.tensor_digest import digest_tensor, format_digest
from rlhf_megatron.weights.weight_table import WeightRule, split_tensor

HEADS = 8
HEAD_DIM = 16
HIDDEN = 128
LAYERS = 2
EXPERTS = 8


def weights_of(case: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """By the names and shapes of a Hugging Face checkpoint."""
    config = case["config"]
    torch.manual_seed(seed)
    if case["family"] not in ("llama", "qwen2", "qwen3", "qwen3_moe") or "quantization" in case:
        return of_table(config, case["dtype"])
    kv = config["num_key_value_heads"] * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], HIDDEN)
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        rows = {"q": HEADS * HEAD_DIM, "k": kv, "v": kv}
        shapes |= {
            f"{prefix}.self_attn.{name}_proj.weight": (size, HIDDEN) for name, size in rows.items()
        }
        if case["family"] == "qwen2":
            shapes |= {
                f"{prefix}.self_attn.{name}_proj.bias": (size,) for name, size in rows.items()
            }
        elif case["family"] != "llama":
            shapes |= {f"{prefix}.self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes |= {
            f"{prefix}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")
        }
        mlps = [f"{prefix}.mlp"]
        if case["family"] == "qwen3_moe":
            shapes[f"{prefix}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
            mlps = [f"{prefix}.mlp.experts.{expert}" for expert in range(EXPERTS)]
        size = config.get("moe_intermediate_size", config["intermediate_size"])
        for mlp in mlps:
            shapes |= {f"{mlp}.{name}_proj.weight": (size, HIDDEN) for name in ("gate", "up")}
            shapes[f"{mlp}.down_proj.weight"] = (HIDDEN, size)
    shapes["model.norm.weight"] = (HIDDEN,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], HIDDEN)
    return {
        name: torch.randn(shape).to(getattr(torch, case["dtype"])) for name, shape in shapes.items()
    }


def of_table(config: dict[str, Any], dtype: str) -> dict[str, Tensor]:
    """A bias by which routers pick has a type of its own."""
    return {
        hf.name: torch.randn(hf.shape).to(getattr(torch, rule.dtype or dtype))
        for rule in make_weight_table(config)
        for hf in rule.hf_tensors
    }


def as_stored(case: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """What files have, and SGLang loads by itself:
    the experts of a layer of GPT-OSS as one tensor.
    """
    if case["family"] != "gpt_oss":
        return weights
    found: dict[str, Tensor] = {}
    entries: dict[str, list[Tensor]] = {}
    for hf in (hf for rule in make_weight_table(case["config"]) for hf in rule.hf_tensors):
        if hf.entry is None:
            found[hf.name] = weights[hf.name]
        else:
            entries.setdefault(hf.stored_name, []).append(weights[hf.name])
    return found | {name: torch.stack(parts) for name, parts in entries.items()}


@contextmanager
def place(case: dict[str, Any], directory: Path, rank: int) -> Iterator[None]:
    """This process is that rank of a server."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.server_args import ServerArgs

    runtime_context.reset_context()
    arguments = {
        "device": "cpu",
        "dtype": case["dtype"],
        "attention_backend": "triton" if case["family"] == "gpt_oss" else "torch_native",
        "sampling_backend": "pytorch",
        "tp_size": case["tp"],
        "ep_size": case.get("ep", 1),
        "moe_runner_backend": case.get("runner", "auto"),
        **(
            {"dp_size": case["dp"], "enable_dp_attention": True, **case["others"]}
            if "dp" in case
            else {}
        ),
    }
    server = ServerArgs(model_path=str(directory), **arguments)
    runtime_context.publish(
        server, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=rank)
    )
    initialize_moe_config()
    initialize_dp_attention_flags(server)
    stage = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1, rank_in_group=0)
    ranks = SimpleNamespace(
        world_size=case["tp"], rank_in_group=rank, device_group=None, cpu_group=None
    )
    size = case["tp"] // case.get("dp", 1)
    attention = SimpleNamespace(
        world_size=size, rank_in_group=rank % size, device_group=None, cpu_group=None
    )
    with runtime_context.get_parallel().override(
        pp_group=stage, tp_group=ranks, attn_tp_group=attention
    ):
        yield


def model_of(case: dict[str, Any], directory: Path, rank: int) -> nn.Module:
    from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM
    from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM
    from sglang.srt.models.gpt_oss import GptOssForCausalLM
    from sglang.srt.models.llama import LlamaForCausalLM
    from sglang.srt.models.qwen2 import Qwen2ForCausalLM
    from sglang.srt.models.qwen3 import Qwen3ForCausalLM
    from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
    from transformers import AutoConfig

    classes = {
        "deepseek_v3": DeepseekV3ForCausalLM,
        "glm4_moe": Glm4MoeForCausalLM,
        "gpt_oss": GptOssForCausalLM,
        "llama": LlamaForCausalLM,
        "qwen2": Qwen2ForCausalLM,
        "qwen3": Qwen3ForCausalLM,
        "qwen3_moe": Qwen3MoeForCausalLM,
    }
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, case["dtype"]))
    try:
        return classes[case["family"]](
            AutoConfig.from_pretrained(directory), quant_config=in_blocks(case)
        )
    finally:
        torch.set_default_dtype(before)


def in_blocks(case: dict[str, Any]) -> Any:
    """SGLang's quantisation of such a server; None: there is none."""
    if "quantization" not in case:
        return None
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    return Fp8Config(True, "dynamic", weight_block_size=list(FP8_BLOCK))


def as_on_a_gpu() -> None:
    """On a CPU SGLang pads heads and rows that it cannot deal out; on others it
    replicates and refuses.
    """
    import sglang.srt.layers.linear
    import sglang.srt.layers.moe.fused_moe_triton.layer
    import sglang.srt.layers.vocab_parallel_embedding

    for module in (
        sglang.srt.layers.linear,
        sglang.srt.layers.moe.fused_moe_triton.layer,
        sglang.srt.layers.vocab_parallel_embedding,
    ):
        module._is_cpu = False


def buckets_of(weights: dict[str, Tensor], count: int) -> list[BucketManifest]:
    names = list(weights)
    manifests = []
    size = -(-len(names) // count)
    for number in range(count):
        entries = []
        offset = 0
        for name in names[number * size : (number + 1) * size]:
            tensor = weights[name]
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append(
                TensorEntry(
                    name, dtype, tuple(tensor.shape), offset, format_digest(digest_tensor(tensor))
                )
            )
            offset += tensor.nbytes
        manifests.append(BucketManifest(1, "s", number, "none", offset, tuple(entries)))
    return manifests


def table_of(case: dict[str, Any]) -> tuple[WeightRule, ...]:
    return make_weight_table(case["config"], case["trainer"].get("tp", 1))


def as_sent(case: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """What these weights are in an engine of the case, each quantised at once."""
    found = dict(weights)
    for name in weights if "quantization" in case else ():
        if is_stored_in_fp8(name):
            found[name], found[name + SCALE] = quantise_to_fp8(weights[name])
    return found


def sent_by_shards(
    case: dict[str, Any], weights: dict[str, Tensor]
) -> tuple[list[tuple[BucketManifest, Tensor]], Any]:
    """What a trainer of the case's layout sends shard to shard: buckets with their memory, all
    ranks' one after the other; and who sends what.
    """
    table = make_engine_table(table_of(case), case["dtype"], case.get("quantization"))
    layout = ParallelLayout(**case["trainer"])
    shares = plan_send_shares(table, layout)
    found = []
    for place, share in enumerate(shares):
        shards = {}
        for rule in share.rules:
            is_expert = rule.expert is not None
            ways, number = (
                (layout.etp, layout.compute_etp_rank(place))
                if is_expert
                else (layout.tp, place % layout.tp)
            )
            full = rule.to_megatron(
                *(weights[hf.name] for hf in rule.hf_tensors if not hf.name.endswith(SCALE))
            )
            shards[rule.megatron_name] = [split_tensor(rule.split, full, ways)[number]]
        for bucket in plan_buckets(
            share.rules, case["dtype"], 60_000, spans_by_name=share.spans_by_name
        ):
            memory = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            entries = tuple(fill_bucket_buffer(bucket, shards, case["dtype"], memory))
            found.append(
                (
                    BucketManifest(
                        1, f"rank {place}", bucket.index, "none", bucket.num_bytes, entries
                    ),
                    memory,
                )
            )
    return found, shares


def run_shards(case: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Load every rank with parts of tensors, and with whole ones, which gives the
    seconds to compare.
    """
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(case["config"]))
    weights = weights_of(case, 1)
    sent, shares = sent_by_shards(case, weights)
    weights = as_sent(case, weights)
    found: list[list[dict[str, Any]]] = [[] for _ in sent]
    seconds = {"shards": 0.0, "whole": 0.0}
    is_as_stock = []
    added_twice = []
    stored = as_stored(case, weights)
    # SGLang itself cannot share these experts out
    can_load = case["family"] != "gpt_oss" or case.get("ep", 1) == 1
    for rank in range(case["tp"]):
        with place(case, directory, rank):
            model = model_of(case, directory, rank)
            start = time.process_time()
            if can_load:
                model.load_weights(list(stored.items()))
            seconds["whole"] += time.process_time() - start
            by_stock = {name: parameter.clone() for name, parameter in model.named_parameters()}
            for parameter in model.parameters():
                parameter.data.fill_(1)
            if case["family"] != "gpt_oss":
                model.load_weights(
                    [(name, torch.zeros_like(tensor)) for name, tensor in weights.items()]
                )
            for number, (manifest, memory) in enumerate(sent):
                start = time.process_time()
                loader.load_bucket_into_model(
                    model, manifest, view_bucket_tensors(manifest, [(0, memory)])
                )
                seconds["shards"] += time.process_time() - start
                found[number].append(
                    {
                        "rank": rank,
                        "size": case["tp"],
                        **loader.make_bucket_receipt(model, manifest),
                    }
                )
            scales_of_cache = (".k_scale", ".v_scale")  # which nobody sends
            of_layers = [
                name
                for name in by_stock
                if ".layers." in name and not name.endswith(scales_of_cache)
            ]
            same = [torch.equal(by_stock[name], model.get_parameter(name)) for name in of_layers]
            is_as_stock.append(all(same) or not can_load)
            if case["family"] == "gpt_oss":
                model.get_parameter("model.layers.1.mlp.experts.w2_weight_bias").data[0] += 1
                added_twice.append(
                    [
                        name
                        for manifest, _ in sent
                        for name in loader.make_bucket_receipt(model, manifest)["misfits"]
                    ]
                )
    total = receipts.LoadedWeights()
    for (manifest, _), of_bucket in zip(sent, found, strict=True):
        total |= receipts.check_loaded_bucket(
            "engine0", manifest, json.loads(json.dumps(of_bucket))
        )
    planned = [0] * case["tp"]
    sizes = {
        "tp-size": case["tp"],
        "ep-size": case.get("ep", 1),
        "dp-size": case.get("dp", 1),
        **case.get("others", {}),
    }
    engine = EngineLayout.from_rollout_config(
        RolloutConfig(engine="sglang", sglang=SGLangConfig(args=sizes))
    )
    for one in iterate_transfers(shares, engine, case["dtype"]):
        planned[one.engine_rank] += one.num_bytes
    return {
        "equal": total.merge_by_tensor_name()
        == {name: format_digest(digest_tensor(tensor)) for name, tensor in weights.items()},
        "as_stock": is_as_stock,
        "added_twice": added_twice,
        "planned": planned,
        "moved": [
            sum(of_bucket[rank]["num_bytes_read"] for of_bucket in found)
            for rank in range(case["tp"])
        ],
        "needed": [
            sum(of_bucket[rank]["num_bytes_standing"] for of_bucket in found)
            for rank in range(case["tp"])
        ],
        "num_parts": sum(
            entry.part is not None for manifest, _ in sent for entry in manifest.tensors
        ),
        "num_senders": len({manifest.sender for manifest, _ in sent}),
        "seconds": seconds,
    }


def run(case: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Load every rank, with the fault of the case planted in one of them,
    and check its receipts.
    """
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(case["config"]))
    weights = weights_of(case, 1)
    fault = case.get("fault", {})
    manifests = buckets_of(weights, 5)
    found: list[list[dict[str, Any]]] = [[] for _ in manifests]
    compared: list[list[dict[str, Any]]] = [[] for _ in manifests]
    incomplete: list[str | None] = []
    for rank in range(case["tp"]):
        with place(case, directory, rank):
            model = model_of(case, directory, rank)
            model.load_weights(list(weights_of(case, 2).items()))
            for number, manifest in enumerate(manifests):
                pairs = [(entry.name, weights[entry.name]) for entry in manifest.tensors]
                planted = fault if fault.get("rank") == rank else {}
                model.load_weights(list(damaged(pairs, planted)))
                flip(model, planted)
                head = {"rank": rank, "size": case["tp"]}
                found[number].append({**head, **loader.make_bucket_receipt(model, manifest)})
                compared[number].append(
                    {**head, "compared": loader.compare_with_bucket(model, manifest, weights)}
                )
            incomplete.append(loader.describe_missing_parameters(model, set(weights)))
    errors = []
    total = receipts.LoadedWeights()
    for number, manifest in enumerate(manifests):
        try:
            total |= receipts.check_loaded_bucket(
                "engine0", manifest, found[number], lambda n=number: compared[n]
            )
        except receipts.EngineError as error:
            errors.append(str(error))
    needed = sum(receipt["num_bytes_standing"] for of_bucket in found for receipt in of_bucket)
    expected = {name: format_digest(digest_tensor(tensor)) for name, tensor in weights.items()}
    return {
        "equal": total.digest_by_key == expected
        and not total.fault_by_key
        and not total.incomparable_by_key,
        "errors": errors,
        "incomplete": incomplete,
        "num_bytes": sum(tensor.nbytes for tensor in weights.values()),
        "num_bytes_standing": needed,
    }


def damaged(pairs: list[tuple[str, Tensor]], fault: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """What a rank loads in place of `pairs`: without some, or two exchanged."""
    tensors = dict(pairs)
    for name in tensors:
        if fault.get("kind") == "stale" or (
            fault.get("kind") == "leave_out" and name in fault["names"]
        ):
            continue
        other = (
            fault["names"][1 - fault["names"].index(name)]
            if name in fault.get("swap", ())
            else name
        )
        yield name, tensors[other]


def flip(model: nn.Module, fault: dict[str, Any]) -> None:
    if fault.get("kind") == "flip":
        with torch.no_grad():
            owner, _, name = fault["parameter"].rpartition(".")
            values = getattr(model.get_submodule(owner), name)
            # made by the engine: of which one entry is as good as another
            if not values.is_contiguous():
                values[-1, -1, -1] += 1
            else:
                values.view(torch.uint8).view(-1)[fault["byte"]] ^= 4


def main() -> None:
    if "--as-on-a-gpu" in sys.argv:
        as_on_a_gpu()
    cases = json.load(sys.stdin)
    results = []
    for number, one in enumerate(cases):
        of_kind = run_shards if "trainer" in one else run
        results.append(of_kind(one, Path(sys.argv[1]) / str(number)))
    print("RESULTS " + json.dumps(results))


if __name__ == "__main__":
    main()
