"""Layers of pipeline stages, where a configuration tells them one by one."""

from __future__ import annotations

import re

from rlhf_megatron.config.schema import MegatronConfig

MOST_LAYERS = 10_000  # of a model that some machine can hold


def count_model_chunks(megatron: MegatronConfig) -> int:
    """Return the number of model chunks over all pipeline stages: stages x virtual stages."""
    return megatron.pipeline_model_parallel_size * (
        megatron.virtual_pipeline_model_parallel_size or 1
    )


def parse_pipeline_layout(text: str) -> tuple[int, ...]:
    """Return the number of layers of each model chunk, from a `pipeline_model_parallel_layout` in
    megatron-core's language.

    "Et*3|(tt|)*2t*3L": `|` ends a chunk, E is the embedding, t a layer, L the loss, x*n and (x)*n
    repeat. Raise ValueError for another text, and for forms that are not supported here: layers for
    further tokens (m), and chunks without a layer.
    """
    plain = re.sub(r"[, ]", "", text)
    for pattern in (r"\(([^()]*)\)\*(\d{1,5})", r"([Et|L])\*(\d{1,5})"):
        plain = re.sub(pattern, _expand_repetition, plain[: 3 * MOST_LAYERS])
    if not re.fullmatch(r"Et+(\|t+)*L", plain) or plain.count("t") > MOST_LAYERS:
        raise ValueError(
            f"pipeline_model_parallel_layout ({text[:80]!r}) must be E, then layers t with |"
            " between the chunks and at least one t in each, and L at the end, such as"
            f" Et*3|t*4|t*3L (x*n repeats x); at most {MOST_LAYERS} t."
        )
    return tuple(chunk.count("t") for chunk in plain.split("|"))


def _expand_repetition(match: re.Match[str]) -> str:
    """Return the matched letters repeated as often as the match says. A result longer than any
    layout becomes "?", which no layout contains.
    """
    is_long = len(match[1]) * int(match[2]) > 3 * MOST_LAYERS
    return "?" if is_long else match[1] * int(match[2])
