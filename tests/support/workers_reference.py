"""Three optimizer steps in plain transformers and torch, unsharded:
what the workers are held to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.parity.rounding import orders, renumbered, scale, share_of_bar, tensor_figures
from benchmarks.parity.value_reference import ValueModel, padded, token_values, value_losses
from rlhf_megatron.data.batch import MiniBatch, TokenBatch, ValueMiniBatch

VOCAB = 131  # odd: tensor parallelism must pad it
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
}
HF_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_tied": {**COMMON, "model_type": "qwen3", "tie_word_embeddings": True},
    "llama": {**COMMON, "model_type": "llama", "tie_word_embeddings": False},
}
TEMPERATURE = 0.8
# A larger epsilon than usual: at 1e-8 the first step is the sign of the gradient, which rounding
# decides near zero.
LR = 2e-4
EPS = 1e-5
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
CLIP = 1.0
CLIP_LOW = 0.2
CLIP_HIGH = 0.28
CLIP_C = 3.0
KL_COEF = 0.05
ENTROPY_COEFF = 0.01
VALUE_CLIP = 0.5
STEPS = 3


def make_model(name: str) -> torch.nn.Module:
    """A random transformers model with weights large enough that no two tokens
    look alike. float32.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    raw = {key: value for key, value in HF_CONFIGS[name].items() if key != "model_type"}
    kind, config = (
        (Qwen3ForCausalLM, Qwen3Config)
        if name.startswith("qwen3")
        else (LlamaForCausalLM, LlamaConfig)
    )
    torch.manual_seed(0)
    model = kind(config(**raw)).float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            else:
                parameter.copy_((0.2 if "embed" in key else 0.08) * torch.randn_like(parameter))
    return model


def make_batch(num_samples: int = 12, seed: int = 7) -> MiniBatch:
    """Ragged samples of 3 to 14 tokens with prompts of 1 to 5, random advantages,
    token-mean weights.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 15, (num_samples,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    num_tokens = int(offsets[-1])
    mask = torch.zeros(num_tokens, dtype=torch.bool)
    for i in range(num_samples):
        prompt = 1 + i % min(5, int(lengths[i]) - 1)
        mask[int(offsets[i]) + prompt : int(offsets[i + 1])] = True
    weights = mask / mask.sum()
    return MiniBatch(
        offsets=offsets,
        token_ids=torch.randint(0, VOCAB, (num_tokens,), generator=generator),
        response_mask=mask,
        loss_weights=weights,
        metric_weights=weights,
        advantages=torch.randn(num_tokens, generator=generator) * mask,
    )


def with_equal_prompts(batch: MiniBatch) -> MiniBatch:
    """`batch` with one prompt for all samples whose prompts have one length."""
    token_ids = batch.token_ids.clone()
    for start, stop in pairwise(batch.offsets.tolist()):
        length = int((~batch.response_mask[start:stop]).sum())
        token_ids[start : start + length] = torch.arange(length) * length % VOCAB
    return replace(batch, token_ids=token_ids)


def columns_of(batch: TokenBatch) -> dict[str, Tensor]:
    return {name: getattr(batch, name) for name in ("offsets", "token_ids", "response_mask")}


def token_columns(
    model: torch.nn.Module, batch: TokenBatch, make: Callable[[Tensor, Tensor], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Columns [T], zero outside of the response mask. `make`: log-probs [B, L, V] of what follows,
    and that [B, L].
    """
    ids_BL, is_token_BL = padded(columns_of(batch), range(len(batch)))
    log_p = (model(ids_BL).logits[:, :-1] / TEMPERATURE).log_softmax(-1)
    found = make(log_p, ids_BL[:, 1:])
    pad = torch.nn.functional.pad
    return {
        name: pad(column, (1, 0))[is_token_BL] * batch.response_mask
        for name, column in found.items()
    }


def token_log_probs(model: torch.nn.Module, batch: MiniBatch) -> tuple[Tensor, Tensor]:
    """(log-probs [T], entropies [T]) at response tokens, zero elsewhere."""
    found = token_columns(
        model,
        batch,
        lambda log_p, ids: {
            "p": log_p.gather(2, ids[..., None])[..., 0],
            "entropy": -(log_p.exp() * log_p).sum(-1),
        },
    )
    return found["p"], found["entropy"]


def token_sum_squares(model: torch.nn.Module, batch: MiniBatch) -> Tensor:
    """[T]: sum over the vocabulary of the squared probabilities at response
    tokens, zero elsewhere.
    """
    return token_columns(
        model, batch, lambda log_p, ids: {"squares": log_p.exp().square().sum(-1)}
    )["squares"]


def with_past(batch: MiniBatch, log_probs: Tensor) -> MiniBatch:
    """`batch` with an old policy and a reference that are `log_probs` and noise, so that some
    ratios are clipped.
    """
    generator = torch.Generator().manual_seed(3)
    noise = 0.3 * torch.randn(2, log_probs.numel(), generator=generator)
    old, ref = (log_probs.float()[None] + noise) * batch.response_mask
    return replace(batch, old_log_probs=old, ref_log_probs=ref, rollout_log_probs=old)


def policy_token_loss(log_probs: Tensor, entropies: Tensor, batch: MiniBatch) -> Tensor:
    """[T]: PPO with clip-higher and dual clip, k3 KL against the reference, entropy bonus,
    from the papers.

    The bound on k3 is the field's.
    """
    old, ref, advantages = (
        column.to(log_probs.dtype)
        for column in (batch.old_log_probs, batch.ref_log_probs, batch.advantages)
    )
    ratio = (log_probs - old).exp()
    clipped = torch.maximum(
        -advantages * ratio, -advantages * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    )
    dual = torch.where(advantages < 0, torch.minimum(clipped, -advantages * CLIP_C), clipped)
    k3 = ((ref - log_probs).exp() - (ref - log_probs) - 1).clamp(max=10.0)
    return dual + KL_COEF * k3 - ENTROPY_COEFF * entropies


def make_value_model(name: str) -> ValueModel:
    """The decoder of `make_model` with a random value head. float32."""
    causal = make_model(name)
    generator = torch.Generator().manual_seed(5)
    weight = 0.2 * torch.randn(1, COMMON["hidden_size"], generator=generator)
    return ValueModel(causal, weight, torch.tensor([0.3]))


def make_value_batch(values: Tensor) -> ValueMiniBatch:
    """The samples of `make_batch` with random returns, and old values that are `values` and noise:
    some are clipped.
    """
    batch = make_batch()
    generator = torch.Generator().manual_seed(4)
    noise, returns = torch.randn(2, values.numel(), generator=generator) * batch.response_mask
    columns = {"old_values": values.float() + 0.6 * noise, "returns": returns}
    return ValueMiniBatch(
        batch.offsets,
        batch.token_ids,
        batch.response_mask,
        batch.loss_weights,
        batch.metric_weights,
        **columns,
    )


def all_values(model: torch.nn.Module, batch: TokenBatch) -> Tensor:
    """[T], of all samples."""
    return token_values(model, columns_of(batch), range(len(batch)))


@dataclass
class Step:
    """What stood after one optimizer step."""

    loss: float
    predicted: Tensor  # [T], log-probs or values before the step
    grads: dict[str, Tensor]  # by HF name, after clipping
    grad_norm: float
    weights: dict[str, Tensor]  # by HF name, after the step


def run_steps(model: torch.nn.Module, batch: MiniBatch, loss: str) -> list[Step]:
    """STEPS steps of AdamW on one mini-batch. `loss`: "policy" or "sft"."""

    def forward() -> tuple[Tensor, Tensor]:
        log_probs, entropies = token_log_probs(model, batch)
        return log_probs, policy_token_loss(
            log_probs, entropies, batch
        ) if loss == "policy" else -log_probs

    return _steps(model, forward, batch.loss_weights)


def run_value_steps(model: torch.nn.Module, batch: ValueMiniBatch) -> list[Step]:
    """STEPS steps of AdamW on one mini-batch with the value loss."""

    def forward() -> tuple[Tensor, Tensor]:
        values = all_values(model, batch)
        return values, value_losses(values, batch.old_values, batch.returns, VALUE_CLIP)

    return _steps(model, forward, batch.loss_weights)


def _steps(
    model: torch.nn.Module, forward: Callable[[], tuple[Tensor, Tensor]], loss_weights: Tensor
) -> list[Step]:
    """`forward`: -> (what the model predicts [T], loss [T])."""
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    steps = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        predicted, per_token = forward()
        value = (per_token * loss_weights.to(per_token.dtype)).sum()
        value.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        grads = {key: p.grad.clone() for key, p in parameters.items()}
        optimizer.step()
        weights = {key: p.detach().clone() for key, p in parameters.items()}
        steps.append(
            Step(float(value.detach()), predicted.detach(), grads, float(grad_norm), weights)
        )
    return steps


def in_float32(
    make: Callable[[], torch.nn.Module], run: Callable[[torch.nn.Module], list[Step]]
) -> list[list[Step]]:
    """`run` of the float32 model that `make` makes, in each order of its hidden units: draws of
    float32's own error.
    """
    draws = []
    for order in orders(COMMON["hidden_size"]):
        model = make()
        back = order.argsort()
        model.load_state_dict(renumbered(model.state_dict(), order))
        draws.append(
            [
                replace(
                    step, grads=renumbered(step.grads, back), weights=renumbered(step.weights, back)
                )
                for step in run(model)
            ]
        )
    return draws


def moved(weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The update: weights after minus weights before."""
    return {key: weights[key].double() - state[key].double() for key in weights}


def in_units(
    grads: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    exact: Step,
    draws: Sequence[list[Step]],
) -> dict[str, float]:
    """Errors of gradients and updates against float64, in units of float32's own; the worst
    tensor of each.

    By tensor: where weights are near 1, the rounding of their type hides all else.
    """
    last = [draw[-1] for draw in draws]
    found = {
        "grads": tensor_figures(grads, exact.grads, [step.grads for step in last]),
        "updates": tensor_figures(
            moved(weights, state),
            moved(exact.weights, state),
            [moved(step.weights, state) for step in last],
        ),
    }
    return {
        name: max(share_of_bar(figure, 1.0) for figure in figures)
        for name, figures in found.items()
    }


def unit_of_tokens(exact: Step, draws: Sequence[list[Step]]) -> float:
    """Float32's own error of what the model predicts, before the first step: the largest
    of all tokens.
    """
    return max(
        1e-6, scale(float((draw[0].predicted - exact.predicted).abs().max()) for draw in draws)
    )
