"""KL between engine and trainer on the sampled tokens of a bfloat16 model with experts: own
routing, R2, R3.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_router_replay [--samples 96]

The bundled engine samples from a random Qwen3-MoE of 6 layers, 32 experts, 4 of them a token; one
rank of the trainer computes log-probs of the same tokens. R2: recorded in one pass, replayed in
another that is packed otherwise, as an update is. KL of a token: exp(d) - 1 - d, d = trainer -
engine (never below 0, and its mean over samples is the KL). Each interval is that of the mean over
samples of the difference to own routing, paired by sample (Student's t).

Writes benchmarks/results/router_replay.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import significant, write_result
from benchmarks.parity.cases import FAMILIES, VOCAB, _policy_state
from benchmarks.parity.reference import make_model
from benchmarks.parity.subjects import StateSource
from rlhf_megatron.config.schema import ActorConfig, MegatronConfig
from rlhf_megatron.controller.evaluation.confidence_intervals import compute_t95_quantile
from rlhf_megatron.data.batch import TokenBatch, compute_offsets
from rlhf_megatron.data.replica_plan import ReplicaPlan, plan_replicas, take_replica_shard
from rlhf_megatron.ranks.parallel.world import World, create_world
from rlhf_megatron.ranks.workers.actor import ActorModel, TrainingPhase
from rlhf_megatron.ranks.workers.expert_routes import ReplayMode
from rlhf_megatron.ranks.workers.forward_passes import RowLogProbs
from rlhf_megatron.ranks.workers.megatron_backend import MegatronBackend
from rlhf_megatron.ranks.workers.sequence_packing import MicroBatch, pack_batch
from rlhf_megatron.rollout.engine_interface import GenerateRequest, SamplingParams
from rlhf_megatron.rollout.local.batch_generator import BatchGenerator
from rlhf_megatron.rollout.local.local_model import LocalModel
from rlhf_megatron.weights.parallel_layout import ParallelLayout

HF_CONFIG: dict[str, Any] = {
    **FAMILIES["qwen3_moe_plain"],
    "num_hidden_layers": 6,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
PROMPT_TOKENS = 12
RESPONSE_TOKENS = 48
GROUP = 4
# tokens of a micro-batch: of the pass that records, of the one that is compared
BUDGETS = 600, 1000


def sampled(
    state: dict[str, Tensor], num_samples: int, directory: str
) -> tuple[TokenBatch, Tensor]:
    """The engine's samples, and its log-probs of their tokens [T]."""
    engine = BatchGenerator(LocalModel(make_model(HF_CONFIG, state, torch.bfloat16)), 32, 32 * 64)
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(
        0, VOCAB, (num_samples // GROUP, PROMPT_TOKENS), generator=generator
    ).tolist()
    groups = engine.generate(
        [
            GenerateRequest(
                tuple(prompt),
                tuple(range(GROUP * i, GROUP * i + GROUP)),
                SamplingParams(RESPONSE_TOKENS),
                0,
                directory,
            )
            for i, prompt in enumerate(prompts)
        ]
    )
    pairs = [
        (prompt, sample) for prompt, group in zip(prompts, groups, strict=True) for sample in group
    ]
    lengths = torch.tensor([len(prompt) + len(sample.token_ids) for prompt, sample in pairs])
    mask = torch.arange(PROMPT_TOKENS + RESPONSE_TOKENS) >= PROMPT_TOKENS
    log_probs = [
        value for _, sample in pairs for value in [0.0] * PROMPT_TOKENS + list(sample.log_probs)
    ]
    batch = TokenBatch(
        offsets=compute_offsets(lengths),
        token_ids=torch.tensor(
            [token for prompt, sample in pairs for token in [*prompt, *sample.token_ids]]
        ),
        response_mask=mask.repeat(len(pairs)),
        sample_ids=torch.arange(len(pairs)),
        routes=tuple(sample.routes for _, sample in pairs),
    )
    return batch, torch.tensor(log_probs)


def trained(state: dict[str, Tensor], batch: TokenBatch, mode: ReplayMode, world: World) -> Tensor:
    """[T]: the trainer's log-probs."""
    config = ActorConfig(router_replay=mode)
    backend = MegatronBackend(
        HF_CONFIG, StateSource(state), world, torch.bfloat16, MegatronConfig(), router_replay=mode
    )
    actor = ActorModel(backend, config, {"rl": TrainingPhase(config.optim, 1)})
    plans = [plan_replicas((batch.lengths - 1).tolist(), 1, budget)[0] for budget in BUDGETS]
    if mode == "r2":
        actor.log_probs(take_replica_shard(batch, plans[0]), plans[0], temperature=1.0)
    return _forward(actor, batch, plans[1])


def _forward(actor: ActorModel, batch: TokenBatch, plan: ReplicaPlan) -> Tensor:
    """Log-probs with the routing that an update would have."""
    shard = take_replica_shard(batch, plan)
    backend = actor.backend
    world = actor.world
    packed = pack_batch(shard, plan, world.layout, with_source_tokens=True)
    if backend.routes is not None:
        packed = backend.routes.prepare_update_pass(shard, packed)
    rows = RowLogProbs(actor.head, 1.0)

    def on_rows(micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, int, Tensor]:
        log_probs, _ = rows(hidden[0], micro)
        return log_probs[0], 0, log_probs

    with torch.no_grad():
        found = packed.unpack_rows(backend.run_passes(packed, on_rows, True))
    values = torch.zeros(batch.num_tokens)
    for place, sample in enumerate(plan.samples):
        start, stop = (int(batch.offsets[sample + i]) for i in (0, 1))
        values[start:stop] = found[int(shard.offsets[place]) : int(shard.offsets[place + 1])]
    return values


def kl_of_samples(trainer: Tensor, engine: Tensor, batch: TokenBatch) -> list[float]:
    difference = (trainer - engine).double()
    kl = (difference.expm1() - difference) * batch.response_mask
    return [float(part.sum()) / RESPONSE_TOKENS for part in kl.split(batch.lengths.tolist())]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=96, help="a multiple of 4")
    num_samples = parser.parse_args().samples
    torch.manual_seed(0)
    state = _policy_state(HF_CONFIG)
    with tempfile.TemporaryDirectory() as directory:
        batch, engine = sampled(state, num_samples, directory)
        world = create_world(ParallelLayout(1), torch.device("cpu"))
        modes: tuple[ReplayMode, ...] = ("none", "r2", "r3")
        found = {
            mode: kl_of_samples(trained(state, replace(batch), mode, world), engine, batch)
            for mode in modes
        }
    results: dict[str, Any] = {}
    for mode, kls in found.items():
        gaps = [kl - own for kl, own in zip(kls, found["none"], strict=True)]
        half = compute_t95_quantile(len(gaps) - 1) * statistics.stdev(gaps) / len(gaps) ** 0.5
        mean = statistics.mean(gaps)
        results[mode] = {
            "kl": significant(statistics.mean(kls)),
            "minus_own_routing": [significant(value) for value in (mean, mean - half, mean + half)],
        }
        interval = f"[{mean - half:+.2e}, {mean + half:+.2e}]"
        print(f"{mode:5} KL {results[mode]['kl']:.3e}  minus own routing {mean:+.2e} {interval}")
    command = f"python -m benchmarks.bench_router_replay --samples {num_samples}"
    counts = {"samples": num_samples, "tokens": num_samples * RESPONSE_TOKENS}
    write_result("router_replay", command, counts | {"modes": results})


if __name__ == "__main__":
    main()
