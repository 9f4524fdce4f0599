"""The reference: the same optimizer steps in plain transformers and torch, unsharded.

Nothing of the package is used: loss, aggregation, clipping and AdamW are written out here from
their papers. transformers' norms compute in float32 whatever the type of the model; for float64
their forward is replaced by the same formula in float64. The table of rotary angles stays the
float32 one, which belongs to the model's definition.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.parity.cases import Cut, Recipe, Role, orders_of
from benchmarks.parity.forced_routes import force, select
from benchmarks.parity.fused_experts import fused, unfused
from benchmarks.parity.rounding import renumbered
from benchmarks.parity.router_reference import Routers
from benchmarks.parity.value_reference import (
    ValueModel,
    padded,
    token_values,
    tokens_of,
    value_losses,
)


class NearKinkError(ValueError):
    """A case lies where rounding decides on which side of a kink of the loss a token is."""


# of a ratio or value from a kink of the loss; nearer, rounding decides on which side it is
MIN_KINK_DISTANCE = 2e-5
MAX_KL = 10.0  # the package bounds the KL estimate of a token there, the reference has no bound
Columns = dict[str, Tensor]


def make_model(
    hf_config: dict[str, Any], state: dict[str, Tensor], dtype: torch.dtype, role: Role = "actor"
) -> nn.Module:
    """A transformers model that holds `state`; of a critic its body, with a linear head."""
    import transformers

    config_kind, model_kind = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
        "glm4_moe": (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM),
        "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
        "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
    }[hf_config["model_type"]]
    # A copy: transformers completes the mappings that it is given.
    arguments = {
        key: value for key, value in copy.deepcopy(hf_config).items() if key != "model_type"
    }
    # sdpa computes in the model's type; the other implementations take the softmax in float32, but
    # that of GPT-OSS.
    attention = "eager" if hf_config["model_type"] == "gpt_oss" else "sdpa"
    config = config_kind(**arguments, attn_implementation=attention)
    config._experts_implementation = "eager"
    model = model_kind(config)
    if role == "critic":
        model = ValueModel(model, state["score.weight"], state["score.bias"])
    missing, unexpected = model.load_state_dict(fused(state), strict=False)
    tied = ["lm_head.weight"] if role == "actor" and hf_config["tie_word_embeddings"] else []
    assert missing == tied and not unexpected, f"missing {missing}, unexpected {unexpected}"
    model = model.to(dtype)
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = MethodType(_exact_norm, module)
            elif type(module).__name__.endswith("TopKRouter") and not hasattr(module, "bias"):
                module.forward = MethodType(_exact_router, module)
            elif type(module).__name__.endswith("TopkRouter"):
                module.forward = MethodType(_exact_scores, module)
    return model


def _exact_norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * (
        x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)
    )


def _exact_router(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = nn.functional.linear(x.reshape(-1, module.hidden_dim), module.weight)
    scores, picked = logits.softmax(-1).topk(module.top_k, -1)
    if getattr(module, "norm_topk_prob", True):
        scores = scores / scores.sum(-1, keepdim=True)
    return logits, scores, picked


def _exact_scores(module: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x.reshape(-1, x.shape[-1]), module.weight)


def policy_columns(model: nn.Module, batch: Columns, samples: range, recipe: Recipe) -> Columns:
    """Log-probs [T] and entropies [T] of `samples`, 0 outside of the response mask."""
    select(model, samples)
    ids_BL, is_token_BL = padded(batch, samples)
    log_p = (model(ids_BL).logits[:, :-1] / recipe.temperature).log_softmax(-1)
    mask = batch["response_mask"][tokens_of(batch, samples)]

    def ragged(columns: Tensor) -> Tensor:
        return nn.functional.pad(columns, (1, 0))[is_token_BL] * mask

    log_probs = log_p.gather(2, ids_BL[:, 1:, None])[:, :, 0]
    return {"log_probs": ragged(log_probs), "entropies": ragged(-(log_p.exp() * log_p).sum(-1))}


def value_columns(model: nn.Module, batch: Columns, samples: range, recipe: Recipe) -> Columns:
    """Values [T] of `samples`, 0 outside of the response mask: entry t is that of the
    tokens before t.
    """
    return {"values": token_values(model, batch, samples)}


def policy_losses(columns: Columns, batch: Columns, recipe: Recipe) -> Tensor:
    """[T]: PPO clip (1707.06347) with its own upper range (2503.14476) and dual clip
    (1912.09729), + KL, - entropy.

    KL: exp(-d) + d - 1 with d = log_probs - ref_log_probs (http://joschu.net/blog/kl-approx.html).
    """
    log_probs = columns["log_probs"]
    entropies = columns["entropies"]
    old, ref, advantages = (
        batch[name].to(log_probs) for name in ("old_log_probs", "ref_log_probs", "advantages")
    )
    ratio = torch.exp(log_probs - old)
    surrogate = torch.minimum(
        ratio * advantages, ratio.clamp(1 - recipe.clip_low, 1 + recipe.clip_high) * advantages
    )
    surrogate = torch.where(
        advantages < 0, torch.maximum(surrogate, recipe.dual_clip * advantages), surrogate
    )
    d = log_probs - ref
    kl = torch.expm1(-d) + d
    _check_case(ratio.detach()[batch["response_mask"]], kl.detach()[batch["response_mask"]], recipe)
    return -surrogate + recipe.kl_coef * kl - recipe.entropy_coef * entropies


def _check_case(ratio: Tensor, kl: Tensor, recipe: Recipe) -> None:
    """Raises ValueError when the case itself cannot be compared to rounding, NearKinkError where
    other noise could.
    """
    borders = ratio.new_tensor([1 - recipe.clip_low, 1 + recipe.clip_high, recipe.dual_clip])
    nearest = float((ratio[:, None] - borders).abs().min())
    if nearest < MIN_KINK_DISTANCE:
        raise NearKinkError(
            f"a ratio is {nearest:.1e} from a border of the clip range; use another draw"
            " of the noise."
        )
    if float(kl.max()) > MAX_KL:
        raise ValueError(
            f"the KL estimate of a token is {float(kl.max()):.1f}, over {MAX_KL}; use a smaller lr."
        )


def critic_losses(columns: Columns, batch: Columns, recipe: Recipe) -> Tensor:
    """[T]: the clipped value loss."""
    values = columns["values"]
    clip = recipe.cliprange_value
    old, returns = (batch[name].to(values) for name in ("values", "returns"))
    value, old_value, target = (x.detach()[batch["response_mask"]] for x in (values, old, returns))
    _check_values(value, old_value, target, clip)
    return value_losses(values, old, returns, clip)


def _check_values(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> None:
    """Raises NearKinkError where a value is at the border of its range, or as far from its return
    as the held one.
    """
    moved = values - old
    border = float((moved.abs() - clip).abs().min())
    ties = (values + old + moved.clamp(-clip, clip) - 2 * returns).abs()[moved.abs() > clip]
    nearest = min([border, *ties.tolist()])
    if nearest < MIN_KINK_DISTANCE:
        raise NearKinkError(
            f"a value is {nearest:.1e} from a kink of the value loss; use another draw"
            " of the noise."
        )


def loss_of(token_loss: Tensor, batch: Columns, samples: range, mode: str) -> Tensor:
    """The mean over response tokens, or the mean over samples of each one's mean."""
    start = int(batch["offsets"][samples.start])
    mask = batch["response_mask"][start : start + token_loss.numel()]
    if mode == "token-mean":
        return token_loss[mask].sum() / mask.sum()
    assert mode == "seq-mean-token-mean", mode
    means = []
    for i in samples:
        span = slice(int(batch["offsets"][i]) - start, int(batch["offsets"][i + 1]) - start)
        means.append(token_loss[span][mask[span]].mean())
    return torch.stack(means).sum() / len(samples)


COLUMNS: dict[Role, Callable[[nn.Module, Columns, range, Recipe], Columns]] = {
    "actor": policy_columns,
    "critic": value_columns,
}
LOSSES: dict[Role, Callable[[Columns, Columns, Recipe], Tensor]] = {
    "actor": policy_losses,
    "critic": critic_losses,
}


def run_reference(
    hf_config: dict[str, Any],
    state: dict[str, Tensor],
    batch: Columns,
    cut: Cut,
    recipe: Recipe,
    dtype: torch.dtype,
    role: Role = "actor",
) -> dict[str, Tensor]:
    """The tensors that `measure` reads, as `dumps` lists them."""
    model = make_model(hf_config, state, dtype, role)
    routers = Routers(model, hf_config)
    lengths = batch["offsets"].diff().tolist()
    if "routes" in batch:
        force(model, batch["routes"], batch["offsets"])
    parameters = dict(model.named_parameters())
    every_sample = range(batch["offsets"].numel() - 1)
    with torch.no_grad():
        result = COLUMNS[role](model, batch, every_sample, recipe)
    if routers.gates:
        live = routers.routes(lengths)
        given = batch.get("routes", torch.full_like(live, -1))
        result["routes"] = torch.where(given < 0, live, given).sort(-1).values
    step_optimizer = adamw(parameters, recipe)
    norms = []
    for step, mini_batch in enumerate(cut.mini_batches):
        samples = range(*mini_batch)
        part = {
            name: column[tokens_of(batch, samples)]
            for name, column in batch.items()
            if name != "offsets"
        }
        model.zero_grad()
        token_loss = LOSSES[role](COLUMNS[role](model, batch, samples, recipe), part, recipe)
        loss = loss_of(token_loss, batch, samples, cut.loss_agg_mode)
        (loss + routers.loss(lengths[slice(*mini_batch)], recipe)).backward()
        result |= {f"gradient/{step}/{name}": p.grad.clone() for name, p in parameters.items()}
        norms.append(clip_gradients(parameters, recipe.max_grad_norm))
        step_optimizer()
        routers.move_biases(lengths[slice(*mini_batch)], recipe.bias_rate)
    result["grad_norms"] = torch.stack(norms)
    result |= {f"weights/{name}": p.detach().clone() for name, p in parameters.items()}
    biases = {
        name: buffer
        for name, buffer in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    }
    result |= {f"weights/{name}": buffer.clone() for name, buffer in biases.items()}
    routes = {"routes": result.pop("routes")} if routers.gates else {}
    result = routes | unfused(result, hf_config["model_type"])
    with torch.no_grad():
        name, column = next(iter(COLUMNS[role](model, batch, every_sample, recipe).items()))
    result[f"{name}_after"] = column
    return result


def run_in_float32(
    hf_config: dict[str, Any],
    state: dict[str, Tensor],
    batch: Columns,
    cut: Cut,
    recipe: Recipe,
    role: Role = "actor",
) -> list[dict[str, Tensor]]:
    """`run_reference` in float32, once in each order of the hidden units: draws of
    float32's own error.
    """
    draws = []
    for order in orders_of(hf_config):
        found = run_reference(
            hf_config, renumbered(state, order), batch, cut, recipe, torch.float32, role
        )
        draws.append(renumbered(found, order.argsort()))
    return draws


def clip_gradients(parameters: dict[str, nn.Parameter], max_norm: float) -> Tensor:
    """The norm of all gradients before they are scaled by max_norm / (norm + 1e-6), where
    that is below 1.
    """
    norm = torch.sqrt(sum(p.grad.square().sum() for p in parameters.values()))
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in parameters.values():
        p.grad.mul_(scale)
    return norm


def adamw(parameters: dict[str, nn.Parameter], recipe: Recipe) -> Callable[[], None]:
    """AdamW (1711.05101) with bias correction; norms and biases are not decayed. Returns the
    function that steps.
    """
    first = {name: torch.zeros_like(p) for name, p in parameters.items()}
    second = {name: torch.zeros_like(p) for name, p in parameters.items()}
    beta1, beta2 = recipe.betas
    count = 0

    @torch.no_grad()
    def step() -> None:
        nonlocal count
        count += 1
        for name, p in parameters.items():
            first[name] = beta1 * first[name] + (1 - beta1) * p.grad
            second[name] = beta2 * second[name] + (1 - beta2) * p.grad.square()
            mean = first[name] / (1 - beta1**count)
            square = second[name] / (1 - beta2**count)
            decay = recipe.weight_decay if p.dim() > 1 and not name.endswith("_bias") else 0.0
            p.mul_(1 - recipe.lr * decay).sub_(recipe.lr * mean / (square.sqrt() + recipe.adam_eps))

    return step
