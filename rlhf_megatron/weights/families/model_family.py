"""What a model family is, how one is found, and how families read config.json.

A family is one file in this package that registers itself under the `model_type` of config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.part_signatures import find_call_problem
from rlhf_megatron.registry import Registry
from rlhf_megatron.weights.weight_table import (
    VALUE_HEADS,
    HeadKind,
    HFTensor,
    LayerImpl,
    WeightRule,
    make_plain_rule,
    rename_rules_for_impl,
)

HFConfig = Mapping[str, Any]
"""The parsed config.json of a model in Hugging Face layout."""

OUTPUT_LAYER = "output_layer"
"""Megatron's name of the module behind the final norm, whichever head it is."""

VALUE_HEAD = "score"
"""The value head's name in Hugging Face layout, as in transformers' ...ForTokenClassification
with one label.
"""


# what the package passes to the functions of a family
FUNCTION_ARGUMENTS = {
    "find_unsupported_settings": ("hf_config",),
    "make_transformer_arguments": ("hf_config",),
    "make_gpt_arguments": ("hf_config",),
    "make_table": ("hf_config", "padded_vocab_size"),
}


@dataclass(frozen=True)
class ModelFamily:
    """Everything that is particular to one architecture. All functions raise ValueError for what is
    not supported.
    """

    name: str  # model_type in config.json
    find_unsupported_settings: Callable[[HFConfig], Iterator[str]]
    """What a config.json asks for and the family does not implement, one sentence each; read before
    torch is there.
    """
    make_transformer_arguments: Callable[[HFConfig], dict[str, Any]]
    """Keyword arguments of megatron-core's TransformerConfig, plain values; `activation_func` is a
    name ("silu").
    """
    make_gpt_arguments: Callable[[HFConfig], dict[str, Any]]
    """Keyword arguments of megatron-core's GPTModel, apart from config, spec, vocab_size and the
    stage flags; and what ranks.models.megatron_model_builder reads itself: `rotary`, a
    ranks.models.rotary_embedding.Rotary, for our attention; `unbiased`, the part of a layer that
    has no biases though `add_bias_linear` is on, which megatron-core takes for both parts, or None.
    """
    make_table: Callable[[HFConfig, int], tuple[WeightRule, ...]]
    """(hf_config, padded_vocab_size) -> the weight table, in the order in which a forward pass
    meets the tensors.
    """

    def __post_init__(self) -> None:
        """Raise ValueError for a function that cannot be called as the package calls it."""
        for field_name, argument_names in FUNCTION_ARGUMENTS.items():
            problem = find_call_problem(
                getattr(self, field_name),
                argument_names,
                may_yield=field_name == "find_unsupported_settings",
            )
            if problem:
                raise ValueError(f"model family {self.name!r}, {field_name}: {problem}")


FAMILIES: Registry[ModelFamily] = Registry("model family")


def make_family_table(
    family: ModelFamily, hf_config: HFConfig, tp_size: int, impl: LayerImpl, head: HeadKind
) -> tuple[WeightRule, ...]:
    """Return the weight table of a model of `family`; the other arguments are those of
    `make_weight_table`.
    """
    vocab_size = read_positive_int(hf_config, "vocab_size")
    table = family.make_table(hf_config, pad_vocab_size(vocab_size, tp_size))
    if head in VALUE_HEADS:
        body = [rule for rule in table if not rule.megatron_name.startswith(f"{OUTPUT_LAYER}.")]
        head_rules = _make_value_head_rules(read_positive_int(hf_config, "hidden_size"))
        table = (*body, *(head_rules if head == "value" else head_rules[:1]))
    return rename_rules_for_impl(impl, table)


def _make_value_head_rules(hidden_size: int) -> tuple[WeightRule, ...]:
    """Return the rules of a value head: its weight [1, hidden], then its bias [1]."""
    shapes = {"weight": (1, hidden_size), "bias": (1,)}
    return tuple(
        make_plain_rule(
            f"{OUTPUT_LAYER}.{kind}", HFTensor(f"{VALUE_HEAD}.{kind}", shape), "replicated", None
        )
        for kind, shape in shapes.items()
    )


def pad_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Return the smallest multiple of `tp_size` that holds the vocabulary, so that each rank gets
    as many rows.
    """
    return -(-vocab_size // tp_size) * tp_size


def find_mtp_prefixes(hf_config: HFConfig) -> tuple[str, ...]:
    """Return the name prefixes of the multi-token prediction layers' tensors; () where the model
    has none. No model here has these layers; the tensors are kept as they are.
    """
    first = hf_config.get("num_hidden_layers")
    num = hf_config.get("num_nextn_predict_layers")
    if type(first) is not int or type(num) is not int:
        return ()
    return tuple(f"model.layers.{layer}." for layer in range(first, first + num))


def read_positive_int(hf_config: HFConfig, key: str, default: int | None = None) -> int:
    """Return a positive integer of config.json, or `default` for a missing or null key. Raise
    ValueError for any other value, and for a missing key without a default.
    """
    value = hf_config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"config.json: {key} is {value!r}; it must be a positive integer.")
    return value
