"""Finds the family of a config.json, and with it the weight table of a model."""

from __future__ import annotations

from rlhf_megatron.weights.families.model_family import (
    FAMILIES,
    HFConfig,
    ModelFamily,
    make_family_table,
)
from rlhf_megatron.weights.weight_table import HeadKind, LayerImpl, WeightRule


def find_model_family(hf_config: HFConfig) -> ModelFamily:
    """Return the family of a config.json: one of ours or, for the trainer backend fsdp, one that
    only transformers has.

    Raise ValueError when model_type is missing or unknown.
    """
    if not hf_config.get("model_type"):
        raise ValueError("config.json has no model_type; is this a model in Hugging Face layout?")
    name = str(hf_config["model_type"])
    if FAMILIES.find(name) is None:
        from rlhf_megatron.weights.transformers_causal_lm import find_transformers_family

        if (other := find_transformers_family(name)) is not None:
            return other
    return FAMILIES.get(name).build


def make_weight_table(
    hf_config: HFConfig, tp_size: int = 1, impl: LayerImpl = "local", head: HeadKind = "vocabulary"
) -> tuple[WeightRule, ...]:
    """Return the weight table of a model whose vocabulary is padded for `tp_size` ranks, with the
    module names of `impl`.

    `head` "value": the table of a critic, which has a value head in place of the output layer, tied
    or not; "unbiased_value": the same without the bias of the head.
    """
    return make_family_table(find_model_family(hf_config), hf_config, tp_size, impl, head)


def refuse_unsupported_settings(hf_config: HFConfig) -> None:
    """Raise one ValueError that lists every setting of config.json that its family does not
    implement.
    """
    problems = list(find_model_family(hf_config).find_unsupported_settings(hf_config))
    if problems:
        raise ValueError(f"config.json ({hf_config.get('model_type')}): {' '.join(problems)}")
