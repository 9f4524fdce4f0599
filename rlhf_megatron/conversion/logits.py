"""What two directories compute, layer by layer, with one layer's weights in memory and one expert's at a time.

transformers' own forward runs over a model without memory; each module gets its weights before it runs and loses them
after. The candidate's layers get the inputs of the reference, so that every wrong layer is named and no right one.
Prompts do not reach every expert: each is probed besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_megatron.conversion.model import Model
from rlhf_megatron.models.causal_lm import PackedModel, build_causal_lm, causal_lm_table
from rlhf_megatron.models.table import HFTensor, Rule

_PROMPTS, _LENGTH, _PROBES, _SEED = 2, 24, 4, 20
_SHOWN = 8
_STANDS_OUT = 5.0
"""Times the median of all layers: a cast changes every layer a little, a mistake one of them a lot."""
_SAME_KIND = {"kimi_k2": "deepseek_v3"}  # model_type -> the one that transformers has for such a model
Places = dict[str, tuple[Tensor, Tensor]]
"""Module -> its input and output for the prompts; an expert -> the probe and its output."""


def verify_logits(reference: Model, candidate: Model, is_cast: bool = False) -> list[str]:
    """One line a module with its relative difference. Raises ValueError that names the wrong ones.

    `is_cast`: the types of the two differ, so that every layer differs a little; else any difference is a mistake.
    """
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(0, int(reference.hf_config["vocab_size"]), (_PROMPTS, _LENGTH), generator=generator)
    wanted: Places = {}
    _run(reference, ids, wanted, {})
    found: Places = {}
    _run(candidate, ids, found, {place: inputs for place, (inputs, _) in wanted.items()})
    differences = {place: _difference(wanted[place], found[place][1], is_cast) for place in wanted}
    middle = median(value for place, value in differences.items() if ".experts." not in place)
    limit = _STANDS_OUT * middle if is_cast else 0.0
    wrong = {place: value for place, value in differences.items() if value > limit or value != value}
    lines = [f"{value:9.1e}  {place}" for place, value in differences.items() if ".experts." not in place]
    num_experts = len(differences) - len(lines)
    if num_experts:
        worst = max(value for place, value in differences.items() if ".experts." in place)
        lines.append(f"{worst:9.1e}  the largest of {num_experts} experts")
    if wrong:
        named = [f"{place} ({value:.1e})" for place, value in wrong.items()]
        more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
        raise ValueError(
            f"{candidate.directory} computes other outputs than {reference.directory} for the same inputs in"
            f" {', '.join(named[:_SHOWN])}{more}: relative differences, of which at most {limit:.1e} is right."
        )
    return lines


def _difference(wanted: tuple[Tensor, Tensor], found: Tensor, is_cast: bool) -> float:
    """Return a layer's error relative to what it adds to its input. After a cast it is the error of the median token:
    there routers send a few tokens to other experts, while a mistake changes all tokens.
    """
    inputs, output = wanted
    update = output - inputs if inputs.shape == output.shape and inputs.is_floating_point() else output
    if is_cast:
        by_token = (found - output).flatten(0, -2).norm(dim=1) / update.flatten(0, -2).norm(dim=1).clamp(min=1e-30)
        return float(by_token.median())
    return float((found - output).norm() / update.norm().clamp(min=1e-30))


def _run(model: Model, ids: Tensor, places: Places, inputs: Mapping[str, Tensor]) -> None:
    """Fill `places`. `inputs`: what modules get in place of their own."""
    kind = str(model.hf_config["model_type"])
    hf_config = {**model.hf_config, "model_type": _SAME_KIND.get(kind, kind)}
    packed = build_causal_lm(hf_config, "eager", "vocabulary", torch.float32)
    rules = {rule.megatron_name: rule for rule in causal_lm_table(packed, hf_config, "vocabulary")}
    weights = _Weights(model)
    causal: Any = packed.decoder
    names = {module: name for name, module in causal.named_modules()}
    experts = list(_stream_experts(packed, names, rules, weights))
    body = causal.base_model
    embedding, head = causal.get_input_embeddings(), causal.get_output_embeddings()
    rules.setdefault(f"{names[head]}.weight", rules[f"{names[embedding]}.weight"])  # the head of a tied model
    modules = [embedding, *packed.layers, body.norm, head]
    for module in modules:
        _stream(module, names[module], rules, weights, places, inputs)
    with torch.no_grad():
        causal(input_ids=ids, use_cache=False)
        for name, streamed in experts:
            for number, output in enumerate(streamed.probed()):
                places[f"{name}.{number}"] = (streamed.probe, output)


class _Weights:
    """Hugging Face tensors by name, in float32. The last rule that was read is kept: its tensors are asked for by
    turns."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._rules = {hf.name: rule for rule in model.table for hf in rule.hf}
        self._last: tuple[Rule, tuple[Tensor, ...]] | None = None

    def __call__(self, hf: HFTensor) -> Tensor:
        rule = self._rules[hf.name]
        if self._last is None or self._last[0] is not rule:
            self._last = (rule, self._model.source.hf_tensors(rule))
        tensor = self._last[1][[other.name for other in rule.hf].index(hf.name)]
        return tensor.float()


def _stream(
    module: nn.Module,
    name: str,
    rules: Mapping[str, Rule],
    weights: _Weights,
    places: Places,
    inputs: Mapping[str, Tensor],
) -> None:
    """Give a module its weights while it runs, and note what goes in and out."""
    given: dict[str, Tensor] = {}

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        for owner_name, owner in module.named_modules():
            prefix = f"{name}.{owner_name}" if owner_name else name
            for store in (owner._parameters, owner._buffers):
                for key in [key for key, value in store.items() if value is not None and f"{prefix}.{key}" in rules]:
                    rule = rules[f"{prefix}.{key}"]
                    full = rule.to_megatron(*map(weights, rule.hf)).view(rule.megatron_shape)
                    store[key] = nn.Parameter(full, False) if store is owner._parameters else full
        given["input"] = inputs.get(name, args[0])
        return (given["input"], *args[1:])

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        places[name] = (given.pop("input").clone(), first.clone())
        for owner_name, owner in module.named_modules():
            prefix = f"{name}.{owner_name}" if owner_name else name
            for key, value in owner._parameters.items():
                if value is not None and f"{prefix}.{key}" in rules:
                    owner._parameters[key] = nn.Parameter(value.to("meta"), False)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


class _StreamedExperts(nn.Module):
    """The experts of a layer, one in memory at a time, of those that a token goes to."""

    def __init__(self, activation: Callable[[Tensor], Tensor], weights: _Weights, gate_up: Rule, down: Rule) -> None:
        super().__init__()
        self._activation, self._weights = activation, weights
        self._gate_up, self._down = gate_up.hf, down.hf
        generator = torch.Generator().manual_seed(_SEED)
        hidden_size = self._gate_up[0].shape[0 if self._gate_up[0].entry else 1]
        self.probe = torch.randn(_PROBES, hidden_size, generator=generator)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[tokens, H]; the other two [tokens, k]."""
        output = torch.zeros_like(hidden)
        for number in torch.unique(top_k_index).tolist():
            token, slot = torch.where(top_k_index == number)
            update = self._expert(number, hidden[token]) * top_k_weights[token, slot, None]
            output.index_add_(0, token, update.to(output.dtype))
        return output

    def probed(self) -> Iterator[Tensor]:
        """Yield each expert's output for the same rows."""
        for number in range(len(self._down)):
            yield self._expert(number, self.probe)

    def _expert(self, number: int, hidden: Tensor) -> Tensor:
        gate, up = (self._weights(self._gate_up[2 * number + half]) for half in range(2))
        inner = self._activation(hidden @ gate.T) * (hidden @ up.T)
        return inner @ self._weights(self._down[number]).T


class _StreamedEntries(_StreamedExperts):
    """The experts of GPT-OSS: entries of fused tensors with biases, input axis first. The activation takes gate and
    up.
    """

    def __init__(
        self, activation: Callable[[Tensor], Tensor], weights: _Weights, gate_up: Rule, down: Rule, *biases: Rule
    ) -> None:
        super().__init__(activation, weights, gate_up, down)
        self._gate_up_bias, self._down_bias = (rule.hf for rule in biases)

    def _expert(self, number: int, hidden: Tensor) -> Tensor:
        gate_up = hidden @ self._weights(self._gate_up[number]) + self._weights(self._gate_up_bias[number])
        inner = self._activation(gate_up)
        return inner @ self._weights(self._down[number]) + self._weights(self._down_bias[number])


def _stream_experts(
    packed: PackedModel, names: dict[nn.Module, str], rules: dict[str, Rule], weights: _Weights
) -> Iterator[tuple[str, _StreamedExperts]]:
    for module, name in list(names.items()):
        gate_up, down = rules.get(f"{name}.gate_up_proj"), rules.get(f"{name}.down_proj")
        if gate_up is None or down is None or len(gate_up.megatron_shape) != 3:
            continue
        own: Any = module
        biases = [rules[bias] for kind in ("gate_up", "down") if (bias := f"{name}.{kind}_proj_bias") in rules]
        if biases:
            streamed: _StreamedExperts = _StreamedEntries(own._apply_gate, weights, gate_up, down, *biases)
        else:
            streamed = _StreamedExperts(own.act_fn, weights, gate_up, down)
        parent, _, last = name.rpartition(".")
        setattr(packed.decoder.get_submodule(parent), last, streamed)
        yield name, streamed
