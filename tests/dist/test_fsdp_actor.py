"""The actor on the backend fsdp: against plain transformers, against Megatron, and through its
own checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import workers_reference as reference
from dist_pool import DistPool
from torch import Tensor
from workers_jobs import CONFIG, RankResult, share, summed, train

from benchmarks.parity.rounding import orders, renumbered, scale
from rlhf_megatron.config.schema import FSDPConfig
from rlhf_megatron.data.batch import MiniBatch
from rlhf_megatron.data.replica_plan import restore_sample_order
from rlhf_megatron.ranks.parallel.world import World

pytestmark = pytest.mark.dist
BAR = 3.0  # times the error that float32 has of its own, as in test_workers_actor.py
FSDP = replace(CONFIG, backend="fsdp")
RECOMPUTED = replace(
    FSDP, fsdp=FSDPConfig(activation_checkpointing=True, reshard_after_forward=False)
)
OFFLOADED = replace(FSDP, fsdp=FSDPConfig(cpu_offload=True, attn_implementation="eager"))


def whole(results: list[RankResult], kind: str) -> dict[str, Tensor]:
    """Full tensors of the pieces that the ranks have. A tensor's name is that of Hugging Face."""
    pieces = [getattr(result, kind) for result in results]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def columns(results: list[RankResult], offsets: Tensor) -> Any:
    return restore_sample_order([r.log_probs for r in results], [r.plan for r in results], offsets)


@pytest.mark.parametrize(
    ("name", "loss", "dp", "config", "in_rows"),
    [
        ("qwen3_tied", "policy", 2, FSDP, False),
        ("llama", "policy", 3, RECOMPUTED, False),
        ("llama", "sft", 2, OFFLOADED, False),
        ("qwen3_tied", "policy", 1, FSDP, False),
        ("qwen3_tied", "policy", 3, FSDP, True),
    ],
    ids=["tied-dp2", "untied-dp3-recomputed", "sft-offloaded", "one rank", "a document a row"],
)
def test_three_steps_equal_transformers(
    dist_pool: DistPool, name: str, loss: str, dp: int, config: Any, in_rows: bool
) -> None:
    """131 rows of the vocabulary divide by neither 2 nor 3."""
    model = reference.make_model(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    batch = reference.make_batch()
    with torch.no_grad():
        batch = reference.with_past(batch, reference.token_log_probs(model, batch)[0])
    exact = reference.run_steps(reference.make_model(name).double(), batch, loss)
    draws = reference.in_float32(
        lambda: reference.make_model(name), lambda m: reference.run_steps(m, batch, loss)
    )
    results = dist_pool.run(
        train, name=name, state=state, batch=batch, loss=loss, dp=dp, config=config, in_rows=in_rows
    )

    bound = BAR * reference.unit_of_tokens(exact[0], draws)
    assert (
        columns(results, batch.offsets).log_probs - exact[0].predicted
    ).abs().max().item() <= bound
    grads = whole(results, "grads")
    weights = whole(results, "weights")
    found = reference.in_units(grads, weights, state, exact[-1], draws)
    print(found)
    assert max(found.values()) <= BAR, found
    for step in range(reference.STEPS):
        result = summed(results, step)
        assert result.grad_norm == pytest.approx(exact[step].grad_norm, rel=1e-4)
        assert result.sums["actor/loss"] == pytest.approx(exact[step].loss, abs=1e-5, rel=1e-5)
        assert (result.lr, result.is_skipped) == (reference.LR, False)


def test_megatron_gives_the_same_log_probs(dist_pool: DistPool) -> None:
    state = {
        key: value.clone() for key, value in reference.make_model("qwen3_tied").state_dict().items()
    }
    job: dict[str, Any] = {
        "name": "qwen3_tied",
        "state": state,
        "batch": reference.make_batch(),
        "loss": "sft",
    }
    ours = columns(
        dist_pool.run(train, **job, num_steps=0, dp=2, config=FSDP), job["batch"].offsets
    )
    theirs = columns(dist_pool.run(train, **job, num_steps=0, dp=2), job["batch"].offsets)
    for name in ("log_probs", "entropies", "sum_squares"):
        assert (getattr(ours, name) - getattr(theirs, name)).abs().max().item() <= 1e-5, name


def test_a_run_goes_on_bit_for_bit_and_with_other_ranks(
    dist_pool: DistPool, tmp_path: Path
) -> None:
    """Two steps, a checkpoint, one step more; against three steps, and at dp 3."""
    state = {
        key: value.clone() for key, value in reference.make_model("llama").state_dict().items()
    }
    job: dict[str, Any] = {
        "name": "llama",
        "state": state,
        "batch": reference.make_batch(),
        "loss": "sft",
    }
    job["config"] = FSDP
    undisturbed = whole(dist_pool.run(train, **job, num_steps=3, dp=2), "weights")
    dist_pool.run(train, **job, num_steps=2, directory=tmp_path / "actor", dp=2)
    resumed = dist_pool.run(
        train, **job, num_steps=1, directory=tmp_path / "actor", is_loading=True, dp=2
    )
    assert all(
        torch.equal(undisturbed[name], tensor) for name, tensor in whole(resumed, "weights").items()
    )
    others = dist_pool.run(
        train, **job, num_steps=1, directory=tmp_path / "actor", is_loading=True, dp=3
    )
    for name, tensor in whole(others, "weights").items():
        torch.testing.assert_close(tensor, undisturbed[name], rtol=0, atol=1e-6)


COMMON = {key: value for key, value in reference.COMMON.items() if key != "head_dim"}
OF_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_per_token": 2}
GPT_OSS = {
    **reference.COMMON,
    **OF_EXPERTS,
    "tie_word_embeddings": False,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {  # families that Megatron's models lack here
    "olmo2": ({**COMMON, "tie_word_embeddings": False}, "sdpa"),
    "gemma2": (
        {
            **reference.COMMON,
            "sliding_window": 6,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 2.5,
        },
        "eager",
    ),
    "phi": ({**COMMON, "tie_word_embeddings": False}, "sdpa"),
    "gpt_oss": (GPT_OSS, "eager"),  # packed documents would see each other
}
HEADS = {"gemma2": "logits capped at 2.5", "phi": "the model's own head"}  # phi's has a bias


def train_another(world: World, kind: str, batch: MiniBatch, out: Path) -> tuple[Any, ...]:
    """Log-probs before and after an update, and the weights after it in Hugging Face layout."""
    from rlhf_megatron.ranks.resharding.export_hf import export_sharded_model_to_hf
    from rlhf_megatron.ranks.workers.actor import ActorModel
    from rlhf_megatron.ranks.workers.fsdp_backend import FSDPBackend
    from rlhf_megatron.ranks.workers.trained_model import TrainingPhase
    from rlhf_megatron.weights.weight_source import make_random_source

    sizes, attention = OTHERS[kind]
    hf_config = {**sizes, "model_type": kind, "initializer_range": 0.2}
    settings = FSDPConfig(attn_implementation=attention)
    backend = FSDPBackend(
        hf_config, make_random_source(hf_config, 1), world, torch.float32, settings
    )
    actor = ActorModel(backend, FSDP, {"rl": TrainingPhase(CONFIG.optim, 10)})
    shard, plan = share(world, batch, 40)
    found = []
    for name in ("before", "after"):
        place = backend.export_world
        export_sharded_model_to_hf(
            actor.export_shards(),
            place,
            directory=out / name,
            hf_config=hf_config,
            dtype=torch.float32,
        )
        found.append(actor.log_probs(shard, plan, reference.TEMPERATURE))
        if name == "before":
            actor.update(shard, plan, reference.TEMPERATURE, "sft")
    return (plan, *found, str(actor.head_report()))


@torch.no_grad()
def exact_log_probs(model: torch.nn.Module, batch: MiniBatch) -> tuple[Tensor, float]:
    """Those of transformers in float64, and the largest error of a token in float32, over
    orders of summation.
    """
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    exact, _ = reference.token_log_probs(model.double(), batch)
    draws = []
    for order in orders(reference.COMMON["hidden_size"]):
        model.float().load_state_dict(renumbered(state, order))
        draws.append(reference.token_log_probs(model, batch)[0])
    return exact, scale(float((draw - exact).abs().max()) for draw in draws)


@pytest.mark.parametrize("kind", OTHERS)
def test_families_of_transformers_train_and_are_exported(
    dist_pool: DistPool, tmp_path: Path, kind: str
) -> None:
    from transformers import AutoModelForCausalLM

    batch = reference.make_batch()
    results = dist_pool.run(train_another, kind=kind, batch=batch, out=tmp_path, dp=2)
    for number, name in enumerate(("before", "after"), 1):
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / name, attn_implementation="eager", experts_implementation="eager"
        )
        exact, unit = exact_log_probs(model, batch)
        found = restore_sample_order(
            [r[number] for r in results], [r[0] for r in results], batch.offsets
        ).log_probs
        error = (found - exact).abs().max().item()
        assert error <= 3 * unit, f"{name}: {error:.1e} is over 3 x {unit:.1e}, float32's own error"
    assert HEADS.get(kind, "'chunked'") in results[0][3]
    assert (results[0][1].log_probs - results[0][2].log_probs).abs().max().item() > 1e-3, (
        "it has learnt nothing"
    )
