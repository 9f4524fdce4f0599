"""Mistral dense (model_type "mistral"; 7B from v0.2 on and Nemo are such): Llama without biases, no
sliding window.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.weights.families import decoder_family
from rlhf_megatron.weights.families.model_family import FAMILIES, HFConfig


def _read_mistral_dimensions(hf_config: HFConfig) -> decoder_family.DecoderDimensions:
    """Return the dimensions of a Mistral config.json. Raise ValueError for unsupported settings."""
    return decoder_family.read_decoder_dimensions(hf_config, head_dim=None, max_positions=131072)


def _find_unsupported_settings(hf_config: HFConfig) -> Iterator[str]:
    """Yield a sentence if the model has a sliding window, which it also has where the key is
    absent.
    """
    window = hf_config.get("sliding_window", "left out, which means 4096")
    if window is not None:
        yield f"sliding_window ({window}) is not supported; it must be null: choose another model."


FAMILIES.register("mistral")(
    decoder_family.make_decoder_family(
        "mistral",
        _read_mistral_dimensions,
        _find_unsupported_settings,
        attention_bias=False,
        mlp_bias=False,
    )
)
