"""Every weight transport from every trainer layout to stock SGLang at tp-size 1 and 2, experts also
at ep-size 2: what stands is what was sent.

Real ranks of Megatron and FSDP2, real servers, the verbs and the transaction of a run. `python -m
benchmarks.sync_matrix` runs it and keeps the bytes that moved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_pool import DistPool
from rollout_tools import reference_log_probs, request
from safetensors.torch import save_file
from sglang_tools import CPU_ARGUMENTS, CPU_ENV, STARTUP_S, needs_sglang, sglang_python
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_megatron.controller.sync.weight_sync import WeightSync
from rlhf_megatron.rollout.engine_interface import GeneratedSample, WeightTransport
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.sglang.sglang_client import SGLangEngine
from rlhf_megatron.rollout.sglang.sglang_launch import start_sglang_engines
from rlhf_megatron.runtime.role_proxies import RoleProxies
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.tensor_digest import digest_tensor, format_digest
from rlhf_megatron.weights.weight_source import generate_random_hf_tensors

pytestmark = [pytest.mark.sglang, pytest.mark.long, pytest.mark.dist, needs_sglang]
RESULTS = "RLHF_MEGATRON_SYNC_MATRIX"  # environment variable: file that gets a line for each sync
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 250,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": None,
    "bos_token_id": None,
}
OF_EXPERTS = {
    **CONFIG,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": CONFIG,
    "qwen3_moe": {
        **OF_EXPERTS,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek_v3": {
        **{key: value for key, value in OF_EXPERTS.items() if key != "head_dim"},
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "tp2 pp2 dp2": {"tp": 2, "pp": 2, "dp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "tp2 ep2": {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
    "pp2 ep2": {"pp": 2, "dp": 2, "ep": 2},
    "etp2": {"tp": 2, "etp": 2, "sequence_parallel": True},
    "fsdp dp2": {"dp": 2},
}
SIZES = {  # tp, ep, dp of its attention: of an engine
    (1, 1, 1): ("ep2",),
    (2, 1, 1): ("tp2 ep2", "etp2"),
    (2, 2, 1): ("tp2 ep2", "pp2 ep2"),
    (2, 1, 2): ("tp2 ep2",),
    (2, 2, 2): ("tp2 ep2",),
}
CELLS = [
    *(
        (("qwen3", tp, 1, 1), layout)
        for tp in (1, 2)
        for layout in (*list(LAYOUTS)[:4], "fsdp dp2")
    ),
    *(
        ((model, *sizes), layout)
        for model in ("qwen3_moe", "deepseek_v3")
        for sizes, layouts in SIZES.items()
        for layout in layouts
    ),
]
TRANSPORTS: tuple[WeightTransport, ...] = ("tensor", "process_group", "disk")
BUCKET_BYTES = 60_000  # several a stage; the embedding alone is larger
REQUESTS = [request((1 + i, 2, 3 + i), (7 * i, 7 * i + 1), 12) for i in range(4)]
TIMEOUT_S = 900.0  # ranks that are started on a busy machine


def send(world: Any, name: str, seed: int, arguments: dict[str, Any], is_fsdp: bool) -> Any:
    """On every rank: the verb of a run, for a model of these weights."""
    from types import SimpleNamespace

    from rlhf_megatron.ranks.checkpoint.model_weights import (
        iterate_local_shards,
        load_weights_on_rank,
    )
    from rlhf_megatron.ranks.models.megatron_model_builder import build_megatron_model
    from rlhf_megatron.ranks.workers.lost_update import EngineExport
    from rlhf_megatron.runtime.rank_roles import HostRole
    from rlhf_megatron.weights.weight_source import make_random_source

    config = MODELS[name]
    if is_fsdp:
        from rlhf_megatron.config.schema import FSDPConfig
        from rlhf_megatron.ranks.workers.fsdp_backend import FSDPBackend

        backend = FSDPBackend(
            config, make_random_source(config, seed), world, torch.float32, FSDPConfig()
        )
        export_shards = backend.export_shards
        actor = SimpleNamespace(backend=backend)
    else:
        table = make_weight_table(config, world.layout.tp)
        model = build_megatron_model(config, world, torch.float32)
        load_weights_on_rank(model.chunks, table, make_random_source(config, seed), world)
        place = SimpleNamespace(export_world=world, hf_config=config)
        export_shards = partial(iterate_local_shards, model.chunks, table)
        actor = SimpleNamespace(backend=place)
    actor.export_for_engines = lambda *_: EngineExport(export_shards(), lambda: None)
    role = HostRole(world, actor, None, Path())  # type: ignore[arg-type]
    try:
        return role.send_weights(**arguments)
    finally:
        role.close()


@dataclass
class Ranks:
    """A WorkerGroup of warm processes that hold the weights of `seed`."""

    pool: DistPool
    axes: dict[str, Any]
    model: str
    seed: int = 0
    is_fsdp: bool = False

    def broadcast_call(self, method: str, **arguments: Any) -> Future[list[Any]]:
        assert method == "host.send_weights"
        future: Future[list[Any]] = Future()
        of_model = {"name": self.model, "seed": self.seed, "is_fsdp": self.is_fsdp}
        found = self.pool.run(
            send, timeout_s=TIMEOUT_S, arguments=arguments, **of_model, **self.axes
        )
        future.set_result(found)
        return future


@dataclass
class Server:
    engine: SGLangEngine
    transfer: Path
    model: Path
    name: str
    size: str
    is_dp: bool  # its attention is of dp-size 2
    version: int = 0


@contextmanager
def started(
    folder: Path,
    transfer: Path,
    name: str,
    tp_size: int,
    ep_size: int,
    dp_size: int,
    engine_name: str = "engine0",
) -> Iterator[Server]:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODELS[name]))
    arguments = {**CPU_ARGUMENTS, "context_length": 256}
    if tp_size == 2:
        arguments |= {"tp_size": 2}
    if ep_size == 2:
        arguments |= {"ep_size": 2}
    if dp_size == 2:
        arguments |= {"dp_size": 2, "enable_dp_attention": True}
    with start_sglang_engines(
        model,
        1,
        folder,
        python=str(sglang_python()),
        transfer_dir=transfer,
        dtype="float32",
        arguments=arguments,
        env={**CPU_ENV, **({"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if tp_size == 2 else {})},
        startup_timeout_s=STARTUP_S,
    ) as servers:
        engine = SGLangEngine(replace(servers.addresses[0], name=engine_name), transfer)
        assert engine.address.tp_size == tp_size
        sizes = zip(("tp", "ep", "dp"), (tp_size, ep_size, dp_size), strict=True)
        size = " ".join(f"{axis}{n}" for axis, n in sizes if n > 1)
        yield Server(engine, transfer, model, name, size or "tp1", dp_size > 1)
        engine.close()


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Started once for all its syncs."""
    folder = tmp_path_factory.mktemp("matrix")
    (folder / "transfer").mkdir()
    with started(folder, folder / "transfer", *request.param) as found:
        yield found


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("server", "layout"),
    CELLS,
    indirect=["server"],
    ids=lambda value: "-".join(map(str, value)) if type(value) is tuple else value,
)
def test_what_stands_in_sglang_is_what_was_exported(
    server: Server, dist_pool: DistPool, layout: str, transport: WeightTransport, tmp_path: Path
) -> None:
    config = MODELS[server.name]
    seed = 100 * server.engine.address.tp_size + server.version
    ranks = Ranks(dist_pool, LAYOUTS[layout], server.name, seed, layout.startswith("fsdp"))
    fleet = EngineFleet([server.engine], 300.0, 1)
    sync = WeightSync(
        RoleProxies(ranks).host,  # type: ignore[arg-type]
        fleet,
        server.transfer,
        BUCKET_BYTES,
        "float32",
        server.version,
        transport=transport,
        model_path=server.model,
    )
    metrics = sync()
    server.version = sync.policy_version
    assert [engine.address.name for engine in fleet.live_engines] == ["engine0"]

    # what the ranks were given, made here anew
    exported = dict(generate_random_hf_tensors(config, seed))
    assert server.engine.get_weight_digests() == {
        name: format_digest(digest_tensor(tensor)) for name, tensor in exported.items()
    }
    samples = fleet.generate(REQUESTS)
    sent = server.transfer / f"version-{server.version}" if transport == "disk" else None
    if sent is not None:
        assert list(server.transfer.glob("version-*")) == [sent]
    difference = largest_difference(
        samples, reference(sent or saved(config, exported, tmp_path / "sent"))
    )
    others = reference(
        saved(config, dict(generate_random_hf_tensors(config, seed + 1)), tmp_path / "others")
    )
    # it would show other weights
    assert 0 < difference <= 1e-4 and largest_difference(samples, others) > 0.1

    axes = LAYOUTS[layout]
    tp_size = server.engine.address.tp_size
    table = make_weight_table(config, axes.get("tp", 1))
    whole = sum(4 * prod(hf.shape) for rule in table for hf in rule.hf_tensors)
    same = sum(
        4 * prod(hf.shape) for rule in table if rule.split == "replicated" for hf in rule.hf_tensors
    )
    if server.is_dp:  # attention and the embedding stand in every rank
        of_dp = (
            hf
            for rule in table
            for hf in rule.hf_tensors
            if rule.split != "replicated" and is_of_dp(hf.name)
        )
        same += sum(4 * prod(hf.shape) for hf in of_dp)
    needed = whole + (tp_size - 1) * same  # what is split stands once, the rest in every rank
    assert metrics["sync/num_bytes"] == sum(tensor.nbytes for tensor in exported.values())
    assert metrics["sync/bytes_needed"] == needed <= metrics["sync/bytes_moved"] <= 1.001 * needed
    row = {
        "transport": transport,
        "trainer": layout,
        "model": server.name,
        "engine": server.size,
        "num_bytes": int(metrics["sync/num_bytes"]),
        "bytes_moved": int(metrics["sync/bytes_moved"]),
        "bytes_needed": int(metrics["sync/bytes_needed"]),
        "moved_over_needed": round(metrics["sync/bytes_moved"] / metrics["sync/bytes_needed"], 4),
        "tensors_compared": len(exported),
        "log_prob_max_abs_diff": difference,
    }
    if RESULTS in os.environ:
        with open(os.environ[RESULTS], "a") as file:
            file.write(json.dumps(row) + "\n")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_sync_serves_engines_with_and_without_dp_attention(
    dist_pool: DistPool, transport: WeightTransport, tmp_path: Path
) -> None:
    """One engine is a single rank. In the other, of two ranks, attention stands in both and each
    expert in one.
    """
    name = "qwen3_moe"
    folders = [tmp_path / folder for folder in ("plain", "dp", "transfer")]
    for folder in folders:
        folder.mkdir()
    *homes, transfer = folders
    with (
        started(homes[0], transfer, name, 1, 1, 1) as plain,
        started(homes[1], transfer, name, 2, 2, 2, "engine1") as dp,
    ):
        fleet = EngineFleet([plain.engine, dp.engine], 300.0, 1)
        ranks = Ranks(dist_pool, LAYOUTS["tp2 ep2"], name, seed=7)
        sync = WeightSync(
            RoleProxies(ranks).host,  # type: ignore[arg-type]
            fleet,
            transfer,
            BUCKET_BYTES,
            "float32",
            transport=transport,
            model_path=plain.model,
        )
        sync()
        assert [engine.address.name for engine in fleet.live_engines] == ["engine0", "engine1"]
        exported = dict(generate_random_hf_tensors(MODELS[name], 7))
        expected = {key: format_digest(digest_tensor(tensor)) for key, tensor in exported.items()}
        assert plain.engine.get_weight_digests() == dp.engine.get_weight_digests() == expected
        model = reference(saved(MODELS[name], exported, tmp_path / "sent"))
        for engine in fleet.engines:
            assert 0 < largest_difference(engine.generate(REQUESTS, 120.0), model) <= 1e-4
        fleet.close()


def is_of_dp(name: str) -> bool:
    return ".self_attn." in name or "embed_tokens" in name


def saved(config: dict[str, Any], tensors: dict[str, torch.Tensor], directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def reference(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def largest_difference(samples: list[list[GeneratedSample]], model: PreTrainedModel) -> float:
    """Between the engine's log-probs of what it sampled and those of transformers."""
    found = 0.0
    for asked, group in zip(REQUESTS, samples, strict=True):
        for sample in group:
            expected = reference_log_probs(model, asked.prompt_ids, sample.token_ids)
            found = max(found, float((torch.tensor(sample.log_probs) - expected).abs().max()))
    return found
