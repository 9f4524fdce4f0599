"""Causal language models of transformers for the trainer backend `fsdp`: built without memory,
their tensors by name, and a head that hands out hidden states. The one file of the trainer that
imports transformers.
"""
# S packed tokens, R rows, H hidden, V vocabulary

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_megatron.registry import Registry, load_registry
from rlhf_megatron.weights.families.model_family import (
    OUTPUT_LAYER,
    HFConfig,
    ModelFamily,
    make_family_table,
)
from rlhf_megatron.weights.weight_table import (
    VALUE_HEADS,
    HeadKind,
    HFTensor,
    StackedEntry,
    WeightRule,
)

_FUSED_EXPERTS = re.compile(r"(.*\.)mlp\.experts\.((?:gate_up|down)_proj(?:_bias)?)")
SOFTCAP = "final_logit_softcapping"
_MATRICES = ("mlp", "gate_proj", "up_proj", "down_proj")
_ON_DISK = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}
"""Families whose files call a layer's experts otherwise than transformers' modules: block,
gate, up, down.
"""


class PackedCausalLM(nn.Module):
    """A causal language model over packed documents, or with a head of VALUE_HEADS its decoder and
    a value head.

    Hidden states are processed inside of `forward`: only there are sharded weights whole.
    """

    def __init__(self, causal_lm: Any, head: HeadKind) -> None:
        """Take over the model; with a head of VALUE_HEADS keep its decoder only and add a linear
        layer `score` in float32, which has a bias for "value".
        """
        super().__init__()
        self.hf_config = causal_lm.config
        self.decoder: Any = causal_lm
        self._body_name = ""
        self.returns_logits = False  # `forward` hands out logits of rows, by the model's own head
        self.find_max_over_ranks: Callable[[int], int] | None = None
        """Given where packed documents would see each other. Returns the largest of all ranks'
        numbers of batches.
        """
        if head in VALUE_HEADS:
            self.decoder = nn.Module()
            setattr(self.decoder, causal_lm.base_model_prefix, causal_lm.base_model)
            self._body_name = str(causal_lm.base_model_prefix)
            hidden_size = causal_lm.config.get_text_config().hidden_size
            self.score = nn.Linear(hidden_size, 1, bias=head == "value", dtype=torch.float32)

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        process_hidden: Callable[[Tensor], Any],
        row_indices: Tensor,
        **attention_lengths: Any,
    ) -> Any:
        """Return `process_hidden` applied to the hidden states [1, S, H] or, where
        `returns_logits`, to the logits [1, R, V] of the rows `row_indices`. The caller multiplies
        hidden states by the output layer's weight, and then caps the logits where there is a
        `softcap`.

        `token_ids` and `position_ids` are [1, S]; positions restart with each document.
        `attention_lengths`: the documents' borders, for attention kernels that need them.
        """
        if self.find_max_over_ranks is not None:
            hidden = self._run_padded_batches(
                token_ids[0], position_ids[0], self.find_max_over_ranks
            )
            return process_hidden(hidden[:, row_indices] if self.returns_logits else hidden)
        if self.returns_logits:
            attention_lengths["logits_to_keep"] = row_indices
        return process_hidden(self._run_decoder(token_ids, position_ids, **attention_lengths))

    def _run_decoder(
        self, token_ids: Tensor, position_ids: Tensor, **attention_lengths: Any
    ) -> Tensor:
        """Run the decoder and return the hidden states, or the logits where `returns_logits`."""
        # No mask and no cache: only then does transformers tell documents apart by their positions.
        inputs = {
            "input_ids": token_ids,
            "position_ids": position_ids,
            "attention_mask": None,
            "use_cache": False,
        }
        found: Tensor
        if self._body_name:
            found = getattr(self.decoder, self._body_name)(
                **inputs, **attention_lengths
            ).last_hidden_state
        elif self.returns_logits:
            found = self.decoder(**inputs, **attention_lengths).logits
        else:
            with self._bypass_output_layer():
                found = self.decoder(**inputs, **attention_lengths).logits
        return found

    def _run_padded_batches(
        self, token_ids: Tensor, position_ids: Tensor, find_max_over_ranks: Callable[[int], int]
    ) -> Tensor:
        """Return the same as `_run_decoder` for all tokens, [1, S, ...], but run the documents in
        padded batches, one document a row, each batch of at most as many places as there are
        tokens. Used where packed documents would see each other.

        Padding comes behind a document and cannot change its result. All ranks gather a layer's
        weights at once, so every rank runs as many batches as the rank with the most.
        """
        num_tokens = len(token_ids)
        device = token_ids.device
        begins = [*(position_ids == 0).nonzero()[:, 0].tolist(), num_tokens]
        documents = sorted((range(a, b) for a, b in pairwise(begins)), key=len, reverse=True)
        batches: list[list[range]] = []
        for document in documents:
            if not batches or (len(batches[-1]) + 1) * len(batches[-1][0]) > num_tokens:
                batches.append([])
            batches[-1].append(document)
        found = []
        places = []
        for number in range(find_max_over_ranks(len(batches))):
            # of other ranks: one token, not counted
            batch = batches[number] if number < len(batches) else [range(1)]
            positions = torch.arange(len(batch[0]), device=device).expand(len(batch), -1)
            starts, ends = (
                torch.tensor([of[k] for of in batch], device=device)[:, None] for k in (0, -1)
            )
            is_real = positions <= ends - starts
            sources = torch.minimum(starts + positions, ends)
            decoded = self._run_decoder(token_ids[sources], positions)[is_real]
            is_counted = number < len(batches)
            found.append(decoded if is_counted else decoded[:0] + 0 * decoded.sum())
            places.append(sources[is_real] if is_counted else sources[is_real][:0])
        return torch.cat(found)[torch.cat(places).argsort()][None]

    @property
    def decoder_layers(self) -> list[nn.Module]:
        """Return the decoder layers: the modules whose weights are gathered, and whose activations
        are recomputed, together.
        """
        causal = self.decoder
        num_layers = self.hf_config.get_text_config().num_hidden_layers
        lists = [module for module in causal.modules() if isinstance(module, nn.ModuleList)]
        return [layer for found in lists if len(found) == num_layers for layer in found]

    @property
    def output_layer(self) -> Any:
        """Return the output layer of a policy, which maps hidden states to logits."""
        return self.decoder.get_output_embeddings()

    @property
    def softcap(self) -> float | None:
        """Return the cap on the logits (`final_logit_softcapping`), which the caller of `forward`
        must apply; None: there is no cap.
        """
        cap: float | None = getattr(self.hf_config.get_text_config(), SOFTCAP, None)
        return cap or None

    def compute_values(self, hidden_SH: Tensor, rows_R: Tensor) -> Tensor:
        """Return the values [R], float32, of the rows `rows_R`. Call this only inside `forward`,
        where sharded weights are whole.
        """
        weight = self.score.weight.float()
        # nn.Linear is typed as if its bias were always there
        bias = None if self.score.bias is None else self.score.bias.float()
        return nn.functional.linear(hidden_SH.index_select(0, rows_R).float(), weight, bias)[:, 0]

    def collect_tensors(self) -> dict[str, Tensor]:
        """Return the parameters, and the buffers that files hold, by transformers' names."""
        named = {
            _strip_wrapper_names(name): parameter for name, parameter in self.named_parameters()
        }
        stored = self.state_dict(keep_vars=True)
        buffers = {
            _strip_wrapper_names(name): buffer
            for name, buffer in self.named_buffers()
            if name in stored
        }
        return {**named, **buffers}

    @contextmanager
    def _bypass_output_layer(self) -> Iterator[None]:
        """Within the block, make the output layer return its input and switch the cap on logits
        off, so that the model returns hidden states. The model's other scales still apply.
        """
        head = self.output_layer
        config = self.hf_config.get_text_config()
        softcap = self.softcap
        head.forward = lambda hidden: hidden
        if softcap is not None:
            setattr(config, SOFTCAP, None)
        try:
            yield
        finally:
            del head.forward
            if softcap is not None:
                setattr(config, SOFTCAP, softcap)


def _strip_wrapper_names(module_path: str) -> str:
    """Return a parameter's name as transformers has it, without our wrapper's prefix and without
    LoRA.
    """
    return module_path.removeprefix("decoder.").replace(".base_layer.", ".")  # as without LoRA


def build_causal_lm(
    hf_config: HFConfig, attn_implementation: str, head: HeadKind, dtype: torch.dtype
) -> PackedCausalLM:
    """Build transformers' model with its parameters on the meta device; buffers that modules
    compute when they are made are real.

    Raise ValueError for a config.json for which transformers cannot build a causal language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = str(hf_config.get("model_type"))
    settings = {
        key: value
        for key, value in hf_config.items()
        if key not in ("model_type", "dtype", "torch_dtype")
    }
    try:
        config = AutoConfig.for_model(kind, **settings)
        with _create_parameters_on_meta():
            causal = AutoModelForCausalLM.from_config(
                config, attn_implementation=attn_implementation, dtype=dtype
            )
    except (ValueError, ImportError, KeyError, TypeError) as error:
        fix = (
            "" if "attention" not in str(error) else " Set actor.fsdp.attn_implementation to eager."
        )
        raise ValueError(
            f"transformers cannot build a causal language model of type {kind!r} with"
            f" attn_implementation {attn_implementation!r}: {error}{fix}"
        ) from error
    causal.eval()
    for module in causal.modules():
        if getattr(module, "padding_idx", None) is not None:
            module.padding_idx = None  # the row of that token would never get a gradient
    model = PackedCausalLM(causal, head)
    if head in VALUE_HEADS:
        model.score.to("meta")
    return model


@contextmanager
def _create_parameters_on_meta() -> Iterator[None]:
    """Within the block, create all module parameters on the meta device, without memory. Buffers
    stay real.
    """
    register = nn.Module.register_parameter

    def register_parameter_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        """Register the parameter after moving it to the meta device; a parameter that is there
        already is kept, since it may be tied.
        """
        # one that is there already stays itself: it may be tied
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_parameter_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def make_causal_lm_table(
    model: PackedCausalLM, hf_config: HFConfig, head: HeadKind
) -> tuple[WeightRule, ...]:
    """Return the weight table of a model of transformers: its own names, cut along dimension 0 over
    all ranks. Where the family is one of ours, Hugging Face tensors have our table's names and
    fusion groups. Raise ValueError where the two tables have different tensors.
    """
    kind = str(hf_config.get("model_type"))
    groups = {}
    families: Registry[ModelFamily] = load_registry("model family")
    if kind in families:
        groups = {
            hf.name: rule.fusion_group
            for rule in make_family_table(families.get(kind).build, hf_config, 1, "local", head)
            for hf in rule.hf_tensors
        }
    parameters = {_strip_wrapper_names(name) for name, _ in model.named_parameters()}
    rules = []
    for name, tensor in model.collect_tensors().items():
        hf, to_megatron, to_hf = _make_tensor_conversion(name, tuple(tensor.shape), kind)
        layer = re.search(r"\.(\d+)\.", name)
        is_parameter = name in parameters
        rules.append(
            WeightRule(
                megatron_name=name,
                megatron_shape=tuple(tensor.shape),
                hf_tensors=hf,
                to_megatron=to_megatron,
                to_hf=to_hf,
                split="pieces" if is_parameter else "replicated",
                owner="head" if layer is None else "layer",
                layer=None if layer is None else int(layer[1]),
                fusion_group=groups.get(hf[0].name, name.rpartition(".")[0].rpartition(".")[0]),
                dtype=None if is_parameter else str(tensor.dtype).removeprefix("torch."),
            )
        )
    own = {hf.name for rule in rules for hf in rule.hf_tensors}
    if groups and own != set(groups):
        raise ValueError(
            f"transformers' model of type {kind!r} and our weight table have other tensors:"
            f" {', '.join(sorted(own ^ set(groups))[:8])}; use actor.backend megatron."
        )
    return tuple(rules)


def _make_tensor_conversion(
    name: str, shape: tuple[int, ...], model_type: str
) -> tuple[tuple[HFTensor, ...], Callable[..., Tensor], Callable[[Tensor], tuple[Tensor, ...]]]:
    """Return the Hugging Face tensors that files have for a module's tensor, the function that
    builds it from these, and the function that takes it apart. A layer's experts are one tensor in
    transformers; files have one or two matrices for each expert.
    """
    block, gate, up, down = _ON_DISK.get(model_type, _MATRICES)
    found = _FUSED_EXPERTS.fullmatch(name)
    if model_type == "gpt_oss" and found is not None:  # in one tensor in files as well
        entries = (StackedEntry(name, number, shape[0]) for number in range(shape[0]))
        hf = tuple(
            HFTensor(f"{found[1]}mlp.experts.{e.index}.{found[2]}", shape[1:], e) for e in entries
        )
        return hf, lambda *tensors: torch.stack(tensors), lambda tensor: tensor.unbind(0)
    if found is None or len(shape) != 3:
        disk = name.replace(".mlp.gate.", f".{block}.gate.")
        return (HFTensor(disk, shape),), lambda tensor: tensor, lambda tensor: (tensor,)
    matrices = (gate, up) if found[2] == "gate_up_proj" else (down,)
    num_experts, rows, columns = shape
    hf = tuple(
        HFTensor(
            f"{found[1]}{block}.experts.{expert}.{matrix}.weight", (rows // len(matrices), columns)
        )
        for expert in range(num_experts)
        for matrix in matrices
    )
    return (
        hf,
        lambda *tensors: torch.cat(tensors).view(num_experts, rows, columns),
        lambda tensor: tensor.reshape(num_experts * rows, columns).chunk(len(hf)),
    )


def find_transformers_family(model_type: str) -> ModelFamily | None:
    """Return a family for a model_type that only transformers has: it has a weight table, but
    Megatron cannot build it. Return None where transformers has no causal language model of this
    type.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None

    def refuse_megatron_backend(hf_config: HFConfig) -> dict[str, Any]:
        """Raise ValueError: the Megatron backend does not have this family."""
        raise ValueError(
            f"Megatron's models have no family {model_type!r} here; use actor.backend fsdp."
        )

    def make_table(hf_config: HFConfig, padded_vocab_size: int) -> tuple[WeightRule, ...]:
        """Return the weight table under transformers' names, but with Megatron's name for the
        output layer.
        """
        rules = make_transformers_weight_table(hf_config, "vocabulary")
        return tuple(
            replace(rule, megatron_name=rule.megatron_name.replace("lm_head", OUTPUT_LAYER))
            for rule in rules
        )

    return ModelFamily(
        model_type,
        lambda hf_config: iter(()),
        refuse_megatron_backend,
        refuse_megatron_backend,
        make_table,
    )


def find_transformers_classifier(model_type: str, suffix: str) -> str | None:
    """Return the name of transformers' class for a model type whose name ends in `suffix`,
    "ForSequenceClassification" or "ForTokenClassification"; None where there is none.
    """
    from transformers.models.auto import modeling_auto

    names_by_suffix = {
        "ForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "ForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    }
    name: str | None = names_by_suffix[suffix].get(model_type)
    return name


def make_transformers_weight_table(hf_config: HFConfig, head: HeadKind) -> tuple[WeightRule, ...]:
    """Return the weight table of a config.json under transformers' names, without allocating the
    model. Raise ValueError as `build_causal_lm` does.
    """
    return make_causal_lm_table(
        build_causal_lm(hf_config, "eager", head, torch.float32), hf_config, head
    )
