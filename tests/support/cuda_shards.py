"""Weights shard to shard on device cuda under the rehearsal: two trainer ranks and the two ranks of
an engine, each a process on one of two devices. Prints what each sync ended with.

cuda_shards.py all DIRECTORY | trainer RANK DIRECTORY URL | engine RANK DIRECTORY
"""

from __future__ import annotations

import base64
import gc
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from sglang_standins import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    tree,
)
from torch import Tensor, nn

from rlhf_megatron.device import release_unopened_memory
from rlhf_megatron.ranks.resharding import shard_sender
from rlhf_megatron.rollout.engine_interface import EngineAddress
from rlhf_megatron.rollout.sglang import sglang_weight_verbs as receipts
from rlhf_megatron.rollout.sglang.server import loader, sglang_runtime
from rlhf_megatron.rollout.sglang.server.tensor_placement import find_held_parts
from rlhf_megatron.rollout.transports.process_group_transport import EngineProcessGroups
from rlhf_megatron.rollout.transports.weight_delivery import deliver_weights
from rlhf_megatron.weights.bucket_buffers import LentSegment
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.weight_source import generate_random_hf_tensors, make_random_source
from rlhf_megatron.weights.weight_table import split_tensor

SIZE = 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
SYNCS = ("right", "stale", "missing", "offset", "dead", "right", "links")  # the last one over NCCL


def engine(rank: int, directory: Path) -> None:
    """Carries out orders, base64 of what SGLang would unpickle, with a model of old weights."""
    os.environ[loader.TRANSFER_DIR_VARIABLE] = str(directory / "transfer")
    weights = dict(generate_random_hf_tensors(CONFIG, 0))

    def layers(prefix: str) -> dict[str, nn.Module]:
        def get(*names: str) -> list[Tensor]:
            return [weights[f"{prefix}.{name}.weight"] for name in names]

        found = {
            "self_attn.qkv_proj": QKVParallelLinear(
                rank, SIZE, *get(*(f"self_attn.{x}_proj" for x in "qkv"))
            ),
            "self_attn.o_proj": RowParallelLinear(rank, SIZE, *get("self_attn.o_proj")),
            "mlp.gate_up_proj": MergedColumnParallelLinear(
                rank, SIZE, *get("mlp.gate_proj", "mlp.up_proj")
            ),
            "mlp.down_proj": RowParallelLinear(rank, SIZE, *get("mlp.down_proj")),
            **{
                name: ReplicatedLinear(*get(name))
                for name in ("input_layernorm", "post_attention_layernorm")
            },
        }
        return {f"{prefix}.{name}".replace(".", "__"): layer for name, layer in found.items()}

    ends = {
        name: VocabParallelEmbedding(rank, SIZE, weights[f"{name}.weight"])
        for name in ("model.embed_tokens", "lm_head")
    }
    model = tree(
        **{name.replace(".", "__"): layer for name, layer in ends.items()},
        **layers("model.layers.0"),
        **layers("model.layers.1"),
        model__norm=ReplicatedLinear(weights["model.norm.weight"]),
    ).to(torch.bfloat16).cuda(rank)  # fmt: skip

    @torch.no_grad()
    def load_weights(self: nn.Module, pairs: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in pairs:
            for place in find_held_parts(
                self, dict(self.named_parameters()), name, tuple(tensor.shape)
            ):
                place.values.copy_(tensor.narrow(place.axis, place.start, place.num_entries))

    model.load_weights = MethodType(load_weights, model)
    sglang_runtime.get_tp_rank_and_size = lambda: (rank, SIZE)  # type: ignore[assignment]
    sglang_runtime.get_attention_dp_rank = lambda: 0  # type: ignore[assignment]
    for line in sys.stdin:
        loader.load(model, pickle.loads(base64.b64decode(line)))
        print("done", flush=True)


def trainer(rank: int, directory: Path, url: str) -> None:
    """Sends other weights each time; all but the first and the last with a mistake on rank 1 or in
    what it lends.
    """
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", store=dist.FileStore(str(directory / "store"), SIZE), rank=rank, world_size=SIZE
    )
    layout = ParallelLayout(SIZE, tp=SIZE)
    transfer = directory / "transfer"
    place = SimpleNamespace(
        layout=layout,
        rank=rank,
        coordinates=layout.locate_rank(rank),
        is_in_pieces=False,
        is_first_copy=True,
        copy_group=dist.group.WORLD,
        device=device,
    )
    address = EngineAddress("engine0", "sglang", url, "key", tp_size=SIZE)
    for version, kind in enumerate(SYNCS, 1):
        source = make_random_source(CONFIG, version)
        export = []
        for rule in make_weight_table(CONFIG, SIZE):
            whole = rule.to_megatron(*source.read_hf_tensors(rule))
            export.append((rule, split_tensor(rule.split, whole, SIZE)[rank].to(device)))
        before = torch.cuda.memory_allocated(device)
        with planted(kind, rank, directory):
            how = {
                "version": version,
                "engines": [address],
                "transfer_dir": transfer,
                "bucket_bytes": 2048,
            }
            groups = EngineProcessGroups()
            transport = "process_group" if kind == "links" else "tensor"
            report = deliver_weights(
                export, place, groups, engine_dtype="bfloat16", transport_kind=transport, **how
            )
            groups.close()
        gc.collect()  # an error that a request raised holds on to its bucket in a cycle
        torch.cuda.ipc_collect()
        said = {"kind": kind, "kept": torch.cuda.memory_allocated(device) - before, **vars(report)}
        if rank == 0:
            if not report.failures:
                said["standing"] = receipts.combine_all_receipts(
                    receipts.read_all_receipts(transfer, "receipt-")
                ).merge_by_tensor_name()
            for path in transfer.iterdir():
                path.unlink()
        print(json.dumps(said), flush=True)
        dist.barrier()


class planted:
    """A mistake, for the length of a block."""

    def __init__(self, kind: str, rank: int, directory: Path) -> None:
        self.kind = kind
        self.rank = rank
        self.is_dead = directory / "is_dead"
        self.real = (
            shard_sender.share_device_memory,
            shard_sender._ShardSender._arrange_lent_segments,
        )

    def __enter__(self) -> None:
        share, lent = self.real
        if self.kind == "stale" and self.rank:
            kept: list[Tensor] = []  # a rank lends other memory than it has filled

            def share_other(buffer: Tensor) -> Any:
                kept.append(torch.zeros_like(buffer))
                return share(kept[-1])

            shard_sender.share_device_memory = share_other
        if self.kind == "dead":
            self.is_dead.touch()
        if self.kind in ("missing", "offset"):

            def lent_wrongly(sending: Any, found: Any) -> list[list[list[LentSegment]]]:
                ((*readers,),) = lent(sending, found)
                if self.kind == "missing":
                    for one in (one for of_reader in readers for one in of_reader):
                        release_unopened_memory(one.memory)
                    return [[[] for _ in readers]]
                return [
                    [
                        [replace(one, start=one.start + 64) for one in of_reader]
                        for of_reader in readers
                    ]
                ]

            shard_sender._ShardSender._arrange_lent_segments = lent_wrongly  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        self.is_dead.unlink(missing_ok=True)
        shard_sender.share_device_memory, shard_sender._ShardSender._arrange_lent_segments = (
            self.real
        )  # type: ignore[method-assign]


def everything(directory: Path) -> None:
    (directory / "transfer").mkdir()
    command = [sys.executable, __file__]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen([*command, "engine", str(rank), str(directory)], **pipes)
        for rank in range(SIZE)
    ]
    devices: set[str] = set()
    lock = threading.Lock()

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            payloads = body["serialized_named_tensors"]
            order = json.loads(
                bytes(dict(pickle.loads(base64.b64decode(payloads[0])))["order"].tolist())
            )
            if "memory" in order and (directory / "is_dead").exists():
                self.connection.close()  # it has died before it opens the memory
                return
            with lock:
                devices.update(
                    one["memory"]["device"]
                    for of_rank in order.get("memory", ())
                    for one in of_rank
                )
                for process, payload in zip(ranks, payloads, strict=True):
                    process.stdin.write(payload + "\n")
                    process.stdin.flush()
                for process in ranks:
                    assert process.stdout.readline() == "done\n"
            answer = b'{"success": true}'
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    words = [[*command, "trainer", str(rank), str(directory), url] for rank in range(SIZE)]
    trainers = [subprocess.Popen(one, stdout=subprocess.PIPE, text=True) for one in words]
    try:
        said = [
            [json.loads(line) for line in process.communicate(timeout=300)[0].splitlines()]
            for process in trainers
        ]
    finally:
        for process in (*trainers, *ranks):
            process.kill()
            process.wait()
    print(json.dumps({"devices": len(devices), "syncs": list(zip(*said, strict=True))}))


if __name__ == "__main__":
    mode, *rest = sys.argv[1:]
    if mode == "engine":
        engine(int(rest[0]), Path(rest[1]))
    elif mode == "trainer":
        trainer(int(rest[0]), Path(rest[1]), rest[2])
    else:
        everything(Path(rest[0]))
