"""What two directories compute, layer by layer, with one layer's weights in memory and one
expert's at a time.

transformers' own forward runs over a model without memory; each module gets its weights before it
runs and loses them after. The candidate's layers get the inputs of the reference, so that every
wrong layer is named and no right one. Prompts do not reach every expert: each is probed besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_megatron.weights.conversion.stored_model import StoredModel
from rlhf_megatron.weights.transformers_causal_lm import (
    PackedCausalLM,
    build_causal_lm,
    make_causal_lm_table,
)
from rlhf_megatron.weights.weight_table import HFTensor, WeightRule

_PROMPTS = 2
_LENGTH = 24
_PROBES = 4
_SEED = 20
_SHOWN = 8
_STANDS_OUT = 5.0
"""Times the median of all layers: a cast changes every layer a little,
a mistake one of them a lot.
"""
# model_type -> the one that transformers has for such a model
_SAME_KIND = {"kimi_k2": "deepseek_v3"}
InputsAndOutputs = dict[str, tuple[Tensor, Tensor]]
"""Module -> its input and output for the prompts; an expert -> the probe and its output."""


def verify_layer_outputs(
    reference: StoredModel, candidate: StoredModel, is_cast: bool = False
) -> list[str]:
    """Run random prompts through both models and compare the outputs layer by layer, given the same
    inputs. Return one line for each module with its relative difference, and one for the worst
    expert. Raise ValueError that names the modules whose difference is over the limit.

    `is_cast`: the two models have different types, so that every layer differs a little and only an
    outlier is an error; else any difference is an error.
    """
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(
        0, int(reference.hf_config["vocab_size"]), (_PROMPTS, _LENGTH), generator=generator
    )
    wanted: InputsAndOutputs = {}
    _run_streamed_forward(reference, ids, wanted, {})
    found: InputsAndOutputs = {}
    _run_streamed_forward(
        candidate, ids, found, {place: inputs for place, (inputs, _) in wanted.items()}
    )
    differences = {
        place: _compute_relative_difference(wanted[place], found[place][1], is_cast)
        for place in wanted
    }
    middle = median(value for place, value in differences.items() if ".experts." not in place)
    limit = _STANDS_OUT * middle if is_cast else 0.0
    wrong = {
        place: value for place, value in differences.items() if value > limit or value != value
    }
    lines = [
        f"{value:9.1e}  {place}" for place, value in differences.items() if ".experts." not in place
    ]
    num_experts = len(differences) - len(lines)
    if num_experts:
        worst = max(value for place, value in differences.items() if ".experts." in place)
        lines.append(f"{worst:9.1e}  the largest of {num_experts} experts")
    if wrong:
        named = [f"{place} ({value:.1e})" for place, value in wrong.items()]
        more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
        raise ValueError(
            f"{candidate.directory} computes other outputs than {reference.directory} for the same"
            f" inputs in {', '.join(named[:_SHOWN])}{more}: relative differences, of which at most"
            f" {limit:.1e} is right."
        )
    return lines


def _compute_relative_difference(
    reference_input_and_output: tuple[Tensor, Tensor], candidate_output: Tensor, is_cast: bool
) -> float:
    """Return a layer's error relative to the update that the layer adds to its input. After a cast
    return the error of the median token: there routers send a few tokens to other experts, while a
    mistake changes all tokens.
    """
    inputs, output = reference_input_and_output
    update = (
        output - inputs if inputs.shape == output.shape and inputs.is_floating_point() else output
    )
    if is_cast:
        by_token = (candidate_output - output).flatten(0, -2).norm(dim=1) / update.flatten(
            0, -2
        ).norm(dim=1).clamp(min=1e-30)
        return float(by_token.median())
    return float((candidate_output - output).norm() / update.norm().clamp(min=1e-30))


def _run_streamed_forward(
    model: StoredModel,
    token_ids: Tensor,
    inputs_and_outputs: InputsAndOutputs,
    input_by_module: Mapping[str, Tensor],
) -> None:
    """Run the model on `token_ids`, with the weights of one module in memory at a time, and then
    every expert on its probe. Add the input and output of each module and expert to
    `inputs_and_outputs`. A module named in `input_by_module` gets that input in place of its own.
    """
    kind = str(model.hf_config["model_type"])
    hf_config = {**model.hf_config, "model_type": _SAME_KIND.get(kind, kind)}
    packed = build_causal_lm(hf_config, "eager", "vocabulary", torch.float32)
    rules = {
        rule.megatron_name: rule for rule in make_causal_lm_table(packed, hf_config, "vocabulary")
    }
    weights = _FloatTensorLoader(model)
    causal: Any = packed.decoder
    names = {module: name for name, module in causal.named_modules()}
    experts = list(_replace_experts_by_streamed(packed, names, rules, weights))
    body = causal.base_model
    embedding = causal.get_input_embeddings()
    head = causal.get_output_embeddings()
    # the head of a tied model
    rules.setdefault(f"{names[head]}.weight", rules[f"{names[embedding]}.weight"])
    modules = [embedding, *packed.decoder_layers, body.norm, head]
    for module in modules:
        _stream_module_weights(
            module, names[module], rules, weights, inputs_and_outputs, input_by_module
        )
    with torch.no_grad():
        causal(input_ids=token_ids, use_cache=False)
        for name, streamed in experts:
            for number, output in enumerate(streamed.run_all_experts()):
                inputs_and_outputs[f"{name}.{number}"] = (streamed.probe_inputs, output)


class _FloatTensorLoader:
    """Hugging Face tensors by name, in float32. The last rule that was read is kept: its tensors
    are asked for by turns.
    """

    def __init__(self, model: StoredModel) -> None:
        """Load from the source of `model`."""
        self._model = model
        self._rule_by_hf_name = {
            hf.name: rule for rule in model.weight_table for hf in rule.hf_tensors
        }
        self._last_rule_and_tensors: tuple[WeightRule, tuple[Tensor, ...]] | None = None

    def __call__(self, hf_tensor: HFTensor) -> Tensor:
        """Return a Hugging Face tensor of the model in float32. Keep all tensors of its rule for
        the next call.
        """
        rule = self._rule_by_hf_name[hf_tensor.name]
        if self._last_rule_and_tensors is None or self._last_rule_and_tensors[0] is not rule:
            self._last_rule_and_tensors = (rule, self._model.source.read_hf_tensors(rule))
        tensor = self._last_rule_and_tensors[1][
            [other.name for other in rule.hf_tensors].index(hf_tensor.name)
        ]
        return tensor.float()


def _stream_module_weights(
    module: nn.Module,
    module_name: str,
    rule_by_name: Mapping[str, WeightRule],
    load_tensor: _FloatTensorLoader,
    inputs_and_outputs: InputsAndOutputs,
    input_by_module: Mapping[str, Tensor],
) -> None:
    """Register hooks that load a module's weights before its forward pass and drop them after, and
    that record the module's input and output in `inputs_and_outputs`. `input_by_module` may replace
    the input.
    """
    given: dict[str, Tensor] = {}

    def load_weights_and_replace_input(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Load the module's weights before its forward pass, and return the arguments with the
        recorded input, where there is one, in place of the first.
        """
        for owner_name, owner in module.named_modules():
            prefix = f"{module_name}.{owner_name}" if owner_name else module_name
            for store in (owner._parameters, owner._buffers):
                for key in [
                    key
                    for key, value in store.items()
                    if value is not None and f"{prefix}.{key}" in rule_by_name
                ]:
                    rule = rule_by_name[f"{prefix}.{key}"]
                    full = rule.to_megatron(*map(load_tensor, rule.hf_tensors)).view(
                        rule.megatron_shape
                    )
                    store[key] = nn.Parameter(full, False) if store is owner._parameters else full
        given["input"] = input_by_module.get(module_name, args[0])
        return (given["input"], *args[1:])

    def drop_weights_after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Record copies of the module's input and output after its forward pass, and put its
        parameters back on the meta device.
        """
        first = output[0] if isinstance(output, tuple) else output
        inputs_and_outputs[module_name] = (given.pop("input").clone(), first.clone())
        for owner_name, owner in module.named_modules():
            prefix = f"{module_name}.{owner_name}" if owner_name else module_name
            for key, value in owner._parameters.items():
                if value is not None and f"{prefix}.{key}" in rule_by_name:
                    owner._parameters[key] = nn.Parameter(value.to("meta"), False)

    module.register_forward_pre_hook(load_weights_and_replace_input)
    module.register_forward_hook(drop_weights_after)


class _StreamedExperts(nn.Module):
    """The experts of a layer, one in memory at a time, of those that a token goes to."""

    def __init__(
        self,
        activation: Callable[[Tensor], Tensor],
        load_tensor: _FloatTensorLoader,
        gate_up_rule: WeightRule,
        down_rule: WeightRule,
    ) -> None:
        """Keep the tensor names of the experts, and draw the random probe inputs [_PROBES, H] that
        every expert gets.
        """
        super().__init__()
        self._activation = activation
        self._load_tensor = load_tensor
        self._gate_up_tensors = gate_up_rule.hf_tensors
        self._down_tensors = down_rule.hf_tensors
        generator = torch.Generator().manual_seed(_SEED)
        hidden_size = self._gate_up_tensors[0].shape[0 if self._gate_up_tensors[0].entry else 1]
        self.probe_inputs = torch.randn(_PROBES, hidden_size, generator=generator)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs for each token, [tokens, H].
        `hidden` is [tokens, H]; `top_k_index` and `top_k_weights` are [tokens, k].
        """
        output = torch.zeros_like(hidden)
        for number in torch.unique(top_k_index).tolist():
            token, slot = torch.where(top_k_index == number)
            update = self._run_expert(number, hidden[token]) * top_k_weights[token, slot, None]
            output.index_add_(0, token, update.to(output.dtype))
        return output

    def run_all_experts(self) -> Iterator[Tensor]:
        """Yield each expert's output for `probe_inputs`, in the order of the experts."""
        for number in range(len(self._down_tensors)):
            yield self._run_expert(number, self.probe_inputs)

    def _run_expert(self, expert: int, hidden: Tensor) -> Tensor:
        """Load one expert's matrices and return the expert's output for the rows `hidden`."""
        gate, up = (
            self._load_tensor(self._gate_up_tensors[2 * expert + half]) for half in range(2)
        )
        inner = self._activation(hidden @ gate.T) * (hidden @ up.T)
        return inner @ self._load_tensor(self._down_tensors[expert]).T


class _StreamedFusedExperts(_StreamedExperts):
    """The experts of GPT-OSS: entries of fused tensors with biases, input axis first. The
    activation takes gate and up.
    """

    def __init__(
        self,
        activation: Callable[[Tensor], Tensor],
        load_tensor: _FloatTensorLoader,
        gate_up_rule: WeightRule,
        down_rule: WeightRule,
        gate_up_bias_rule: WeightRule,
        down_bias_rule: WeightRule,
    ) -> None:
        """Keep the names of the bias tensors too."""
        super().__init__(activation, load_tensor, gate_up_rule, down_rule)
        self._gate_up_bias = gate_up_bias_rule.hf_tensors
        self._down_bias = down_bias_rule.hf_tensors

    def _run_expert(self, expert: int, hidden: Tensor) -> Tensor:
        """Load one expert's matrices and biases and return the expert's output for the rows
        `hidden`.
        """
        gate_up = hidden @ self._load_tensor(self._gate_up_tensors[expert]) + self._load_tensor(
            self._gate_up_bias[expert]
        )
        inner = self._activation(gate_up)
        return inner @ self._load_tensor(self._down_tensors[expert]) + self._load_tensor(
            self._down_bias[expert]
        )


def _replace_experts_by_streamed(
    packed_model: PackedCausalLM,
    name_by_module: dict[nn.Module, str],
    rule_by_name: dict[str, WeightRule],
    load_tensor: _FloatTensorLoader,
) -> Iterator[tuple[str, _StreamedExperts]]:
    """Replace each experts module of the model by a streamed one, and yield (module name, streamed
    module). A module counts as one where `rule_by_name` has its three-dimensional gate_up_proj and
    its down_proj.
    """
    for module, name in list(name_by_module.items()):
        gate_up = rule_by_name.get(f"{name}.gate_up_proj")
        down = rule_by_name.get(f"{name}.down_proj")
        if gate_up is None or down is None or len(gate_up.megatron_shape) != 3:
            continue
        experts: Any = module
        gate_up_bias = rule_by_name.get(f"{name}.gate_up_proj_bias")
        down_bias = rule_by_name.get(f"{name}.down_proj_bias")
        if gate_up_bias is not None:
            assert down_bias is not None, "both projections of an expert have biases, or none has"
            streamed: _StreamedExperts = _StreamedFusedExperts(
                experts._apply_gate, load_tensor, gate_up, down, gate_up_bias, down_bias
            )
        else:
            streamed = _StreamedExperts(experts.act_fn, load_tensor, gate_up, down)
        parent, _, last = name.rpartition(".")
        setattr(packed_model.decoder.get_submodule(parent), last, streamed)
        yield name, streamed
