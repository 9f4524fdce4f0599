"""One optimizer step of the actor on one rank against a plain transformers + torch loop on \
the same data.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_actor_update [--repetitions 9]

Float32, one thread, one process. The baseline is what a careful person writes without a framework:
AutoModelForCausalLM with SDPA, one padded batch (the whole mini-batch at once where that is
fastest, sorted chunks with as many gradient accumulations where padding would cost more), logits at
the response's positions only, log_softmax and gather, the same PPO-clip loss with the same global
denominator, clip_grad_norm_, torch's fused AdamW. Both start from the same weights; the first
losses and gradient norms must agree. Shapes:

    quickstart   the quickstart's model; 128 samples of 6 + 4 tokens
    lognormal    hidden 256, 4 layers, vocabulary 8192; 32 samples, lognormal lengths
                 (median 90) up to 256

Writes benchmarks/results/actor_update.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.common import ROOT, ratios, significant, take_turns, write_result
from rlhf_megatron.config.schema import ActorConfig, OptimConfig
from rlhf_megatron.data.batch import MiniBatch, compute_offsets
from rlhf_megatron.data.replica_plan import ReplicaPlan, plan_replicas, take_replica_shard
from rlhf_megatron.ranks.parallel.world import World, create_world
from rlhf_megatron.ranks.workers.actor import ActorModel, TrainingPhase
from rlhf_megatron.ranks.workers.megatron_backend import MegatronBackend
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.weight_source import generate_random_hf_tensors, make_random_source

LR = 2e-4
WEIGHT_DECAY = 0.01
BETAS = (0.9, 0.95)
EPS = 1e-8
CLIP_GRAD = 1.0
CLIP = 0.2
DUAL_CLIP = 3.0
AGREEMENT = 1e-4  # bound on the relative difference of the first losses and gradient norms


@dataclass(frozen=True)
class Shape:
    hf_config: dict[str, Any]
    prompt_lengths: list[int]
    response_lengths: list[int]
    token_budget: int  # of our micro-batches
    chunk_rows: tuple[int, ...]  # rows of the baseline's padded batches to try


def shapes() -> dict[str, Shape]:
    quickstart = json.loads((ROOT / "examples/quickstart/model/config.json").read_text())
    larger = {
        **quickstart,
        "hidden_size": 256,
        "intermediate_size": 768,
        "head_dim": 64,
        "vocab_size": 8192,
        "max_position_embeddings": 512,
        "initializer_range": 0.03,
    }
    generator = torch.Generator().manual_seed(0)
    lengths = (
        (torch.randn(32, generator=generator) * 0.6 + 4.5).exp().long().clamp(16, 256).tolist()
    )
    return {
        "quickstart": Shape(quickstart, [6] * 128, [4] * 128, 1280, (128, 64)),
        "lognormal": Shape(
            larger, [8] * 32, [length - 8 for length in lengths], 4096, (32, 16, 8, 4)
        ),
    }


def make_batch(shape: Shape, seed: int = 1) -> MiniBatch:
    """Random tokens and advantages; old log-probs near those of a uniform policy, so that some
    ratios are clipped.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs = list(zip(shape.prompt_lengths, shape.response_lengths, strict=True))
    mask = torch.cat([torch.arange(prompt + response) >= prompt for prompt, response in pairs])
    vocab = int(shape.hf_config["vocab_size"])
    weights = mask / mask.sum()
    uniform = -torch.log(torch.tensor(float(vocab)))
    return MiniBatch(
        offsets=compute_offsets(torch.tensor([prompt + response for prompt, response in pairs])),
        token_ids=torch.randint(2, vocab, (mask.numel(),), generator=generator),
        response_mask=mask,
        loss_weights=weights,
        metric_weights=weights,
        advantages=torch.randn(mask.numel(), generator=generator) * mask,
        old_log_probs=(uniform + 0.1 * torch.randn(mask.numel(), generator=generator)) * mask,
    )


class Ours:
    """`ActorModel.update` as the loop calls it: packing included."""

    def __init__(self, shape: Shape, batch: MiniBatch, world: World) -> None:
        optim = OptimConfig(
            lr=LR, weight_decay=WEIGHT_DECAY, betas=BETAS, eps=EPS, clip_grad=CLIP_GRAD
        )
        config = ActorConfig(optim=optim)
        weights = make_random_source(shape.hf_config, seed=1)
        phases = {"rl": TrainingPhase(optim, 1000)}
        backend = MegatronBackend(shape.hf_config, weights, world, torch.float32, config.megatron)
        self.actor = ActorModel(backend, config, phases)
        self.plan: ReplicaPlan = plan_replicas(batch.lengths.tolist(), 1, shape.token_budget)[0]
        self.shard = take_replica_shard(batch, self.plan)

    def __call__(self) -> tuple[float, float]:
        """(loss, gradient norm)"""
        result = self.actor.update(self.shard, self.plan, temperature=1.0)
        assert result is not None
        return result.sums["actor/loss"], result.grad_norm


class PlainLoop:
    """transformers and torch alone. `chunk_rows`: rows of a padded batch; samples are
    sorted by length.
    """

    def __init__(self, shape: Shape, batch: MiniBatch, chunk_rows: int) -> None:
        self.model = transformers_model(shape.hf_config)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        exempt = [p for p in self.model.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": WEIGHT_DECAY},
                {"params": exempt, "weight_decay": 0.0},
            ],
            lr=LR,
            betas=BETAS,
            eps=EPS,
            fused=True,
        )
        order = sorted(range(len(batch)), key=lambda i: -int(batch.lengths[i]))
        self.chunks = [
            padded(batch, order[i : i + chunk_rows]) for i in range(0, len(order), chunk_rows)
        ]

    def __call__(self) -> tuple[float, float]:
        """(loss, gradient norm)"""
        self.optimizer.zero_grad()
        total = 0.0
        for chunk in self.chunks:
            loss = self._loss(chunk)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_GRAD)
        self.optimizer.step()
        return total, norm.item()

    def _loss(self, chunk: PaddedChunk) -> Tensor:
        kept = torch.arange(chunk.first_row, chunk.token_ids.shape[1] - 1)
        out = self.model(
            chunk.token_ids,
            attention_mask=chunk.attention_mask,
            logits_to_keep=kept,
            use_cache=False,
        )
        targets = chunk.token_ids[:, chunk.first_row + 1 :]
        log_probs = out.logits.log_softmax(-1).gather(2, targets[..., None])[..., 0]
        ratio = (log_probs - chunk.old_log_probs).exp()
        clipped = torch.maximum(
            -chunk.advantages * ratio, -chunk.advantages * ratio.clamp(1 - CLIP, 1 + CLIP)
        )
        bounded = torch.where(
            chunk.advantages < 0, torch.minimum(clipped, -chunk.advantages * DUAL_CLIP), clipped
        )
        return (bounded * chunk.loss_weights).sum()


@dataclass(frozen=True)
class PaddedChunk:
    """Right-padded rows. The columns stand at the tokens after `first_row`, the first position
    that predicts.
    """

    token_ids: Tensor  # [B, L]
    attention_mask: Tensor | None  # None where nothing is padded: SDPA is faster without a mask
    first_row: int
    advantages: Tensor  # [B, L - 1 - first_row]
    old_log_probs: Tensor
    loss_weights: Tensor


def padded(batch: MiniBatch, samples: list[int]) -> PaddedChunk:
    def pad(column: Tensor) -> Tensor:
        spans = [column[int(batch.offsets[i]) : int(batch.offsets[i + 1])] for i in samples]
        return pad_sequence(spans, batch_first=True)

    mask = pad(batch.response_mask)
    first_row = int(mask.any(0).nonzero()[0]) - 1
    attention = pad(torch.ones_like(batch.token_ids))
    assert batch.advantages is not None and batch.old_log_probs is not None
    return PaddedChunk(
        token_ids=pad(batch.token_ids),
        attention_mask=None if bool(attention.all()) else attention,
        first_row=first_row,
        advantages=pad(batch.advantages)[:, first_row + 1 :],
        old_log_probs=pad(batch.old_log_probs)[:, first_row + 1 :],
        loss_weights=pad(batch.loss_weights)[:, first_row + 1 :],
    )


def transformers_model(hf_config: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**hf_config)
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    )
    missing, unexpected = model.load_state_dict(
        dict(generate_random_hf_tensors(hf_config, seed=1)), strict=False
    )
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.train()


def check_agreement(ours: tuple[float, float], plain: tuple[float, float]) -> dict[str, float]:
    """Relative differences of loss and gradient norm. Raises RuntimeError when the two do not do
    the same work.
    """
    loss, norm = (abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, plain, strict=True))
    if max(loss, norm) > AGREEMENT:
        raise RuntimeError(
            f"loss and gradient norm {ours} differ from the baseline's {plain}: not the same work."
        )
    return {"loss": loss, "grad_norm": norm}


def measure(shape: Shape, world: World, repetitions: int) -> dict[str, Any]:
    batch = make_batch(shape)
    ours = Ours(shape, batch, world)
    loops = {f"transformers_{rows}": PlainLoop(shape, batch, rows) for rows in shape.chunk_rows}
    first = ours()
    differences = [check_agreement(first, loop()) for loop in loops.values()]
    runs: dict[str, Callable[[], object]] = {"actor": ours, **loops}
    timings = take_turns(runs, repetitions)
    best = min(loops, key=lambda name: min(timings[name].cpu_s))
    tokens = batch.num_tokens
    return {
        "tokens": tokens,
        "num_micro_batches": len(ours.plan.micro_batches),
        "agreement": {key: significant(max(d[key] for d in differences)) for key in differences[0]},
        "seconds": {name: timing.summary() for name, timing in timings.items()},
        "tokens_per_cpu_s": {
            name: round(tokens / min(timing.cpu_s)) for name, timing in timings.items()
        },
        "baseline": best,
        "ratio": ratios(timings["actor"], timings[best]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--shape", choices=tuple(shapes()), action="append")
    parser.add_argument("--output", type=Path, default=None, help="directory of the result file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    world = create_world(ParallelLayout(1), torch.device("cpu"))
    chosen = {
        name: shape for name, shape in shapes().items() if not args.shape or name in args.shape
    }
    rows = {}
    for name, shape in chosen.items():
        rows[name] = measure(shape, world, args.repetitions)
        rate = rows[name]["tokens_per_cpu_s"]
        ratio = rows[name]["ratio"]
        print(
            f"actor update, {name}: {rate['actor']} tokens/s, plain loop"
            f" {rate[rows[name]['baseline']]}: {ratio['cpu_min']:.3f}x of its CPU time (wall,"
            f" median: {ratio['wall_median']:.3f}x)"
        )
    command = f"python -m benchmarks.bench_actor_update --repetitions {args.repetitions}"
    result = {
        "dtype": "float32",
        "shapes": rows,
        "ratio": {name: row["ratio"]["cpu_min"] for name, row in rows.items()},
    }
    print(
        write_result(
            "actor_update", command, result, **({"directory": args.output} if args.output else {})
        )
    )


if __name__ == "__main__":
    main()
