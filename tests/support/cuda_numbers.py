"""Right numbers on device cuda under the rehearsal: prints what is compared.

cuda_numbers.py model | send | receive"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf_megatron.device import get_shareable_device_id, list_device_ids
from rlhf_megatron.rollout.local import local_bodies
from rlhf_megatron.weights.bucket_manifest import BucketManifest, TensorEntry
from rlhf_megatron.weights.tensor_digest import digest_tensor, format_digest


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(32), nn.LayerNorm(32)])
        self.qkv, self.out, self.up, self.down = (
            nn.Linear(*shape) for shape in ((32, 96), (32, 32), (32, 64), (64, 32))
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.silu(self.up(self.norms[1](x))))


def gradients(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """After three steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def train() -> dict[str, Any]:
    torch.manual_seed(1)
    here = nn.Sequential(nn.Embedding(50, 32), Layer(), Layer(), nn.Linear(32, 50))
    there = copy.deepcopy(here).cuda()
    ids = torch.randint(0, 50, (3, 9))
    pairs = zip(gradients(here, ids), gradients(there, ids.cuda()), strict=True)
    worst = max(float((a - b).norm() / a.norm()) for a, b in pairs)
    sinks = max(attention_with_sinks(None), attention_with_sinks(3))
    figures = {
        "worst gradient": worst,
        "attention": packed_attention(),
        "attention with sinks": sinks,
    }
    return {"device": str(next(there.parameters()).device), **figures}


def packed_attention() -> float:
    """Relative error of torch's varlen flash attention, forward and backward, against each
    document in float32.
    """
    q, k, v = (torch.randn(7, 4, 8).requires_grad_() for _ in range(3))
    on_device = [t.detach().to("cuda", torch.bfloat16).requires_grad_() for t in (q, k, v)]
    starts = torch.tensor([0, 2, 7], dtype=torch.int32, device="cuda")
    found = torch.ops.aten._flash_attention_forward(
        *on_device, starts, starts, 5, 5, 0.0, True, False
    )[0]
    parts = [[t[a:b].transpose(0, 1) for t in (q, k, v)] for a, b in ((0, 2), (2, 7))]
    expected = torch.cat(
        [F.scaled_dot_product_attention(*part, is_causal=True).transpose(0, 1) for part in parts]
    )
    found.float().pow(2).sum().backward()
    expected.pow(2).sum().backward()
    pairs = [
        (expected, found),
        *((a.grad, b.grad) for a, b in zip((q, k, v), on_device, strict=True)),
    ]
    return max(
        float((a - b.cpu().float()).detach().norm() / a.detach().norm())
        for a, b in pairs
        if a is not None and b is not None
    )


def attention_with_sinks(window: int | None) -> float:
    """Relative error of sinks around that kernel, of outputs and all gradients, against their
    formula in float32.
    """
    from rlhf_megatron.ranks.models.flash_attention import (
        SequenceBorders,
        TorchAttentionPasses,
        make_sink_attention,
    )

    here = [
        torch.randn(shape).requires_grad_() for shape in ((7, 4, 8), (7, 2, 8), (7, 2, 8), (4,))
    ]
    there = [t.detach().to("cuda", torch.bfloat16).requires_grad_() for t in here]
    starts = torch.tensor([0, 2, 7], dtype=torch.int32, device="cuda")
    found = make_sink_attention(TorchAttentionPasses())(
        *there[:3], SequenceBorders(starts, starts, 5, 5), 0.4, window, there[3]
    )
    before = torch.arange(7)[:, None] - torch.arange(7)
    document = torch.arange(7) >= 2
    is_seen = (before >= 0) & (before < (window or 7)) & (document[:, None] == document)
    key, value = (t.repeat_interleave(2, 1) for t in here[1:3])
    scores = (0.4 * torch.einsum("tnd,snd->nts", here[0], key)).masked_fill(~is_seen, -torch.inf)
    shares = torch.cat([scores, here[3][:, None, None].expand(-1, 7, 1)], -1).softmax(-1)[..., :-1]
    expected = torch.einsum("nts,snd->tnd", shares, value)
    grads = [
        torch.autograd.grad(out.float().pow(2).sum(), t)
        for out, t in ((expected, here), (found, there))
    ]
    pairs = [(expected, found), *zip(*grads, strict=True)]
    return max(float((a - b.cpu().float()).detach().norm() / a.detach().norm()) for a, b in pairs)


def send() -> dict[str, Any]:
    """A weight in a bucket of this process's device memory, to a receiver in another process."""
    from rlhf_megatron.rollout.engine_interface import EngineAddress
    from rlhf_megatron.rollout.local.local_client import LocalEngine
    from rlhf_megatron.rollout.transports.tensor_transport import LocalTensorTransport

    weight = torch.randn(8, 16, device="cuda:1")
    bucket = torch.zeros(4096, dtype=torch.uint8, device="cuda:1")
    bucket[:512].copy_(weight.view(torch.uint8).flatten())
    entry = TensorEntry("weight", "float32", (8, 16), 0, format_digest(digest_tensor(weight)))
    engine = LocalEngine(EngineAddress("engine0", "local", "http://127.0.0.1:1", "key"))
    bodies = []
    answers = SimpleNamespace(
        get=lambda *_: {"devices": list_device_ids()}, post=lambda _, body, __: bodies.append(body)
    )
    engine._http = answers  # type: ignore[assignment]
    transport = LocalTensorTransport(engine)
    transport.prepare_sync([get_shareable_device_id(bucket.device)])
    transport.deliver_bucket(BucketManifest(1, "sender", 0, "none", 512, (entry,)), bucket)
    command = [sys.executable, __file__, "receive"]
    receiver = subprocess.run(
        command, input=bodies[0] + "\n", capture_output=True, text=True, check=True
    )
    return {
        "memory": transport.bucket_memory,
        "sent": {"weight": entry.digest},
        **json.loads(receiver.stdout),
    }


def receive() -> dict[str, Any]:
    from rlhf_megatron.rollout.local.weight_receiver import WeightReceiver

    body = local_bodies.parse_verb_body(sys.stdin.readline().encode(), local_bodies.LentBucketBody)
    receiver = WeightReceiver(nn.Linear(16, 8, bias=False, device="cuda:0"), None, is_loaded=True)
    receiver.begin_sync(1, is_full_resync=False)
    receiver.load_bucket(body.parse_manifest(), body.memory)
    receiver.commit_sync(1)
    return {
        "standing": receiver.compute_digests(),
        "lay on": body.memory[0].memory.device_id,
        "stale": receiver.stale_reason,
    }


if __name__ == "__main__":
    print(json.dumps({"model": train, "send": send, "receive": receive}[sys.argv[1]]()), flush=True)
