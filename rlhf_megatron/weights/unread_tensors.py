"""Tensors of a model's files that nothing reads: which of them may be left out since no number of
the model changes, and what the others mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.weights.weight_table import VALUE_HEADS, HeadKind, HFTensor, WeightRule

Shape = tuple[int, ...]
MAX_LISTED = 8  # names in one message
_COMPARED_ELEMENTS = 1 << 22  # of two matrices at a time


@dataclass(frozen=True)
class DroppableTensors:
    """A kind of tensors that may be left out, and why no number changes."""

    names: re.Pattern[str]
    reason: str
    has_right_shape: Callable[[Shape], bool] = lambda shape: True
    is_reported: bool = False  # exports lack them, so that a user must know
    heads: frozenset[HeadKind] | None = None  # of the models that may lack them; None: all models


def _is_mask_shape(shape: Shape) -> bool:
    """Return whether a tensor of this shape can be a causal mask [1, 1, n, n] or a single number,
    rather than the bias of a layer.
    """
    is_mask = len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]
    return is_mask or shape in ((), (1,))


DROPPABLE = (
    DroppableTensors(
        re.compile(r"(.*\.)?rotary_(pos_)?emb\.((original_)?inv_freq|(cos|sin)_cached)"),
        "config.json gives the rotary frequencies",
    ),
    DroppableTensors(re.compile(r"(.*\.)?position_ids"), "they are 0, 1, 2 and so on"),
    DroppableTensors(
        re.compile(r"(.*\.)?(attn|self_attn|attention)\.((masked_)?bias|causal_mask)"),
        "they are the causal mask of older files",
        _is_mask_shape,
    ),
    DroppableTensors(
        re.compile(r"(.*\.)?router\.local_tokens_per_expert"), "they count tokens of a past step"
    ),
    DroppableTensors(
        re.compile(r"(.*\.)?mtp(_\w+)?\..*"),
        "they are of multi-token prediction, which no log-prob of the model needs",
        is_reported=True,
    ),
    DroppableTensors(
        re.compile(
            r"(model\.)?(visual|vision_tower|vision_model|audio_tower|multi_modal_projector"
            r"|embed_vision|embed_audio)\..*"
        ),
        "they are of images or sound, which no text meets",
        is_reported=True,
    ),
    DroppableTensors(
        re.compile(r"lm_head\.(weight|bias)"),
        "a model with a value head has no logits",
        heads=VALUE_HEADS,
    ),
)
"""The kinds of tensors that may be left out. Any other tensor that nothing reads is an error."""

_OUTPUT_HEAD = re.compile(r"(.*\.)?(lm_head|embed_out|output_layer)\.weight")
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")
_REMEDIES = (
    (re.compile(r".*(self_attn|attention)\..*\.bias"), "set attention_bias in config.json"),
    (re.compile(r".*mlp\..*\.bias"), "set mlp_bias in config.json"),
    (re.compile(r".*lora_.*"), "merge the adapter into the model first"),
)
_SCORING_HEAD = re.compile(r"(score|v_head|value_head|reward_head|classifier)\..*")


def find_droppable_kind(
    name: str, shape: Shape | None, head: HeadKind = "vocabulary"
) -> DroppableTensors | None:
    """Return the kind of tensors that may be left out to which a tensor belongs, in a model with
    this head; None where the tensor may not be left out. `shape` None: the shape is not known, and
    the name decides.
    """
    for kind in DROPPABLE:
        if (
            (kind.heads is None or head in kind.heads)
            and kind.names.fullmatch(name)
            and (shape is None or kind.has_right_shape(shape))
        ):
            return kind
    return None


def is_tied_head(name: str, table: Sequence[WeightRule]) -> bool:
    """Return whether a tensor's name is that of an output layer, and the model of `table` has no
    output layer of its own: its embedding serves as one.
    """
    has_head = any(
        _OUTPUT_HEAD.fullmatch(hf.stored_name) for rule in table for hf in rule.hf_tensors
    )
    return not has_head and _OUTPUT_HEAD.fullmatch(name) is not None


def list_possible_embeddings(table: Sequence[WeightRule]) -> list[HFTensor]:
    """Return the matrices of `table` that belong to no layer, the largest first: among them is the
    embedding to which an output layer can be tied.
    """
    matrices = [
        hf
        for rule in table
        for hf in rule.hf_tensors
        if rule.layer is None and hf.entry is None and len(hf.shape) == 2
    ]
    return sorted(matrices, key=lambda hf: -hf.shape[0])


def find_different_row(first: Any, second: Any, shape: Shape) -> int | None:
    """Return the number of the first row in which two matrices of the same shape have other values;
    None where all are equal. The matrices are tensors or slices of safetensors files, and are read
    some rows at a time.
    """
    num_rows, num_columns = shape
    step = max(1, _COMPARED_ELEMENTS // max(1, num_columns))
    for begin in range(0, num_rows, step):
        rows = slice(begin, min(begin + step, num_rows))
        is_different = (first[rows].float() != second[rows].float()).any(1)
        if is_different.any():
            return begin + int(is_different.nonzero()[0])
    return None


def format_other_head(head_name: str, embedding_name: str, difference: str) -> str:
    """Return the problem of a file whose output layer is not the embedding, though the model of its
    config.json has the two tied. `difference` says in what they differ.
    """
    return (
        f"{head_name} differs from {embedding_name} ({difference}), but config.json ties the two"
        " tensors (tie_word_embeddings), so that the head of the file would be lost: set"
        " tie_word_embeddings to false in config.json to keep the head, or remove"
        f" {head_name} from the files to use the embedding in its place"
    )


def format_unread_tensors(
    names: Sequence[str], table: Sequence[WeightRule], head: HeadKind = "vocabulary"
) -> str:
    """Return the problem of tensors that nothing reads and that may not be left out, with the
    remedies that their names suggest. `table` may be empty where the model's table is not known.
    """
    remedies = dict.fromkeys(
        remedy for name in names for remedy in _suggest_remedies(name, table, head)
    )
    last_remedy = "remove them from the files if the model is whole without them"
    return (
        f"nothing reads {join_first_names(names)}, and leaving tensors out may change the model:"
        f" {', or '.join([*remedies, last_remedy])}"
    )


def _suggest_remedies(name: str, table: Sequence[WeightRule], head: HeadKind) -> Iterator[str]:
    """Yield what a user can do about a tensor that nothing reads, as far as its name tells."""
    layers = [rule.layer for rule in table if rule.layer is not None]
    layer = _LAYER.fullmatch(name)
    if layers and layer is not None and int(layer[1]) > max(layers):
        yield f"correct num_hidden_layers ({1 + max(layers)}) in config.json"
        return
    for pattern, remedy in _REMEDIES:
        if pattern.fullmatch(name):
            yield remedy
            return
    if _SCORING_HEAD.fullmatch(name) and head == "vocabulary":
        yield "give a model that scores as critic.path or reward_model.path"
    elif _SCORING_HEAD.fullmatch(name):
        yield "call the head score.weight, with one row, as transformers' classifiers do"


def format_dropped_tensors(kind: DroppableTensors, names: Sequence[str]) -> str:
    """Return the line about tensors that are left out, with the reason why they may be."""
    return (
        f"{join_first_names(names)} ({kind.reason}) are not read or trained, and exports and"
        " conversions leave them out"
    )


def join_first_names(names: Sequence[str], separator: str = ", ") -> str:
    """Return the first few distinct names joined by `separator`, and the number of the rest."""
    unique = list(dict.fromkeys(names))
    more = f"{separator}and {len(unique) - MAX_LISTED} more" if len(unique) > MAX_LISTED else ""
    return separator.join(unique[:MAX_LISTED]) + more
