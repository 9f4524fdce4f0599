"""Models with a value head in Hugging Face layout: critics and reward models.

A critic is transformers' ...ForTokenClassification with one label, whose head is `score`, with
weight and bias. A reward model is a ...ForSequenceClassification, whose head has no bias in
transformers; where a run has trained a bias, it is a token classifier too, and the score is the
number of the last token.

A critic starts from either of them, or from any causal language model, whose output layer is left
out and which gets a fresh head.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.weights.families.model_family import (
    FAMILIES,
    OUTPUT_LAYER,
    VALUE_HEAD,
    HFConfig,
)
from rlhf_megatron.weights.hf_reader import HFReader, read_json_object
from rlhf_megatron.weights.weight_source import RandomWeightSource, WeightSource
from rlhf_megatron.weights.weight_table import HFTensor, WeightRule, make_plain_rule

logger = logging.getLogger(__name__)
WEIGHT = f"{VALUE_HEAD}.weight"
BIAS = f"{VALUE_HEAD}.bias"
BIAS_RULE = make_plain_rule(f"{OUTPUT_LAYER}.bias", HFTensor(BIAS, (1,)), "replicated", None)
SEQUENCE_CLASSIFIER = "ForSequenceClassification"
TOKEN_CLASSIFIER = "ForTokenClassification"
SGLANG_HEADS_WITH_BIAS = frozenset(f"{name}{SEQUENCE_CLASSIFIER}" for name in ("Qwen2", "Qwen3"))
"""Classes that SGLang gives a head with a bias, which stays random where the files have none."""
SGLANG_HEADS_WITHOUT_BIAS = frozenset(
    f"{name}{SEQUENCE_CLASSIFIER}" for name in ("Llama", "Gemma2")
)
"""Classes of SGLang that drop a head's bias which the files have, without a word."""
FAMILIES_WITHOUT_CLASSIFIERS = frozenset({"glm4_moe", "kimi_k2"})
"""Those of our families for which transformers has no classifiers."""
_NOT_OF_ONE_LABEL = ("num_nextn_predict_layers", "num_labels", "problem_type")
"""Entries of config.json that do not hold for a classifier of one label: a policy's layers, and
labels of a classifier that the body was before.
"""


@dataclass(frozen=True)
class ValueModelSource:
    """A source that reads a body's tensors from `body_source`, and the value head's tensors that
    the body lacks from `initial_head_source`.
    """

    body_source: WeightSource
    stored_head_names: frozenset[str]  # tensors of the head that the body has
    initial_head_source: RandomWeightSource

    def read_hf_tensors(self, rule: WeightRule) -> tuple[Tensor, ...]:
        """Return the tensors of a rule: from the initial head where the body lacks them, else from
        the body.
        """
        return self._choose_source(rule).read_hf_tensors(rule)

    def get_dtype_name(self, rule: WeightRule) -> str:
        """Return the type of the rule's tensors in the source that has them."""
        return self._choose_source(rule).get_dtype_name(rule)

    def _choose_source(self, rule: WeightRule) -> WeightSource:
        """Return the initial head for a head tensor that the body lacks, else the body."""
        is_lacking = rule.hf_tensors[0].name in {WEIGHT, BIAS} - self.stored_head_names
        return self.initial_head_source if is_lacking else self.body_source


def add_value_head(body_source: WeightSource, std: float, seed: int) -> ValueModelSource:
    """Return `body_source` with its own value head or, for head tensors that it lacks, a new one:
    weights normal with standard deviation `std`, bias 0.

    The new weights depend on `seed` only, not on the layout.
    """
    # of a source that knows which tensors it has
    names: tuple[str, ...] = getattr(body_source, "names", ())
    return ValueModelSource(
        body_source, frozenset(names) & {WEIGHT, BIAS}, RandomWeightSource(seed, std)
    )


def open_value_model(directory: Path, table: Sequence[WeightRule]) -> HFReader:
    """Open the weights of a directory, with or without a value head, and check them against
    `table`, the weight table of a model with a value head.

    The output layer of a language model is left out. Raise ValueError for missing, mis-shaped and
    other unread tensors, for a head of more than one label, and for a bias other than 0 where the
    head of `table` has none.
    """
    reader = HFReader(directory)
    head_names = set(reader.names) & {WEIGHT, BIAS}
    if WEIGHT in head_names and (num_labels := reader.read_shape(WEIGHT)[0]) != 1:
        raise ValueError(
            f"{directory} has a head of {num_labels} labels ({WEIGHT}); a critic needs one value a"
            " token: give a model with num_labels 1, or one without a head."
        )
    has_place_for_bias = any(rule.hf_tensors[0].name == BIAS for rule in table)
    if not has_place_for_bias and (bias := read_head_bias(reader)):
        raise ValueError(
            f"{directory} has a {BIAS} of {bias:g}, and the head that would be trained from it has"
            " no bias; set sft.use_head_bias: true to go on with the bias."
        )
    lacking = {WEIGHT, BIAS} - head_names
    checked_rules = [rule for rule in table if rule.hf_tensors[0].name not in lacking]
    if BIAS in head_names and not has_place_for_bias:
        checked_rules.append(BIAS_RULE)  # it was read just now: it is 0
    reader.check_against_table(
        checked_rules,
        head="value",
    )
    return reader


def read_head_bias(reader: HFReader) -> float:
    """Return the bias of a value head of one label, 0.0 where the files have none."""
    if BIAS not in reader.names:
        return 0.0
    [bias] = reader.read_hf_tensors(BIAS_RULE)
    return float(bias[0])


def warn_of_dropped_bias(directory: Path) -> None:
    """Log a warning for a sequence classifier whose head has a bias other than 0: transformers
    drops it. Do nothing for any other directory.
    """
    names = read_json_object(directory / "config.json").get("architectures") or ()
    bias = read_head_bias(HFReader(directory))
    if bias and any(str(name).endswith(SEQUENCE_CLASSIFIER) for name in names):
        logger.warning(
            "%s has a %s of %g, which is added to each score here and which transformers' %s"
            " drops; export its run again, which writes a ...%s, whose head has a bias.",
            directory,
            BIAS,
            bias,
            ", ".join(map(str, names)),
            TOKEN_CLASSIFIER,
        )


def open_scoring_model(directory: Path, table: Sequence[WeightRule]) -> ValueModelSource:
    """Open the weights of a model that scores, which must have a value head in its files. A missing
    bias of the head becomes 0.

    Raise ValueError as `open_value_model` does, and for a directory without a head.
    """
    body = open_value_model(directory, table)
    if WEIGHT not in body.names:
        raise ValueError(
            f"{directory} has no {WEIGHT}, so it scores nothing; name a model with a head of one"
            " label, such as the job reward-model writes (a ...ForSequenceClassification), not a"
            " language model."
        )
    return add_value_head(body, std=0.0, seed=0)


def make_value_model_config(hf_config: HFConfig) -> dict[str, Any]:
    """Return the config.json of an exported critic: its body's, changed to a token classifier of
    one label.
    """
    return _make_one_label_config(hf_config, TOKEN_CLASSIFIER, "VALUE")


def make_reward_model_config(
    hf_config: HFConfig, has_head_bias: bool, pad_token_id: int | None
) -> dict[str, Any]:
    """Return the config.json of a trained reward model: its body's, changed to a sequence
    classifier of one label, which scores the last token; or for a head with a bias to a token
    classifier, since a sequence classifier's head has none in transformers.

    `pad_token_id` is what `choose_pad_token_id` returns: transformers' sequence classifiers take
    the last token that is not this one for the last token of a row.
    """
    suffix = TOKEN_CLASSIFIER if has_head_bias else SEQUENCE_CLASSIFIER
    return _make_one_label_config(hf_config, suffix, "REWARD") | {"pad_token_id": pad_token_id}


def choose_pad_token_id(tokenizer: Tokenizer, vocab_size: int) -> int | None:
    """Return the tokenizer's padding token as the `pad_token_id` of an exported reward model; None
    where that token may end an answer, or where the model has no such token.

    transformers scores the last token that is not padding. With a padding token that ends answers
    it would score the token before the end; without any it scores the last token of a single row,
    and raises an error for several rows.
    """
    pad = tokenizer.pad_token_id
    if pad == tokenizer.eos_token_id or pad >= vocab_size:
        return None
    is_of_turns = tokenizer.decode_with_special_tokens([pad]) in (tokenizer.chat_template or "")
    return None if is_of_turns else pad


def needs_zero_bias(exported_config: HFConfig) -> bool:
    """Return whether the files of a reward model without a bias need a bias of 0: SGLang's class of
    that name has a bias, and transformers' class loses nothing when it drops a 0.
    """
    return not SGLANG_HEADS_WITH_BIAS.isdisjoint(exported_config.get("architectures") or ())


def describe_classifier_export(exported_config: HFConfig) -> tuple[str, ...]:
    """Return what a reader of an exported critic or reward model must know, a sentence each: a
    class that transformers lacks, a head's bias that another class would drop, padding that
    transformers cannot tell from an answer. `exported_config` is the config.json of the export.
    """
    notes = []
    model_type = str(exported_config.get("model_type"))
    names = [str(name) for name in exported_config.get("architectures") or ()]
    is_token_classifier = any(name.endswith(TOKEN_CLASSIFIER) for name in names)
    suffix = TOKEN_CLASSIFIER if is_token_classifier else SEQUENCE_CLASSIFIER
    if not _has_transformers_classifier(model_type, suffix):
        notes.append(
            f"transformers has no {', '.join(names) or suffix} and cannot read it; critic.path and"
            " reward_model.path (on ranks) of this package can."
        )
    is_reward_model = "REWARD" in (exported_config.get("label2id") or {})
    if is_reward_model and is_token_classifier:
        notes.append(
            "its head has a bias (sft.use_head_bias), so read it with transformers'"
            " AutoModelForTokenClassification, whose number of the last token is the score;"
            " AutoModelForSequenceClassification drops the bias, and SGLang does not know the class"
            " unless a run starts its servers (reward_model.served)."
        )
    if is_reward_model and not is_token_classifier and exported_config.get("pad_token_id") is None:
        notes.append(
            "its config.json has pad_token_id null, because the tokenizer's padding token ends"
            " answers or is missing: transformers scores one row at a time; for batches give the"
            " tokenizer a pad_token that ends no answer and set config.json's pad_token_id to it."
        )
    return tuple(notes)


def _has_transformers_classifier(model_type: str, suffix: str) -> bool:
    """Return whether transformers has a class of the kind `suffix` for models of a type."""
    if FAMILIES.find(model_type) is not None:
        # without importing transformers, which takes seconds
        return model_type not in FAMILIES_WITHOUT_CLASSIFIERS
    from rlhf_megatron.weights.transformers_causal_lm import find_transformers_classifier

    return find_transformers_classifier(model_type, suffix) is not None


def make_zero_bias(dtype: torch.dtype, device: torch.device) -> tuple[WeightRule, Tensor]:
    """Return the bias of 0 that `needs_zero_bias` asks for, and its rule, as exports take them."""
    return BIAS_RULE, torch.zeros(1, dtype=dtype, device=device)


@dataclass(frozen=True)
class ZeroBiasSource:
    """A source that reads the tensors of a reward model whose head has no bias from `body_source`,
    and 0 for the bias, in the type of the head's weight.
    """

    body_source: WeightSource
    weight_rule: WeightRule  # of the head's weight

    def read_hf_tensors(self, rule: WeightRule) -> tuple[Tensor, ...]:
        """Return the tensors of a rule: 0 for the head's bias, else those of the body."""
        if rule.hf_tensors[0].name != BIAS:
            return self.body_source.read_hf_tensors(rule)
        return (torch.zeros(1, dtype=getattr(torch, self.get_dtype_name(rule))),)

    def get_dtype_name(self, rule: WeightRule) -> str:
        """Return the type of the rule's tensors; for the bias that of the head's weight."""
        is_bias = rule.hf_tensors[0].name == BIAS
        return self.body_source.get_dtype_name(self.weight_rule if is_bias else rule)


def _make_one_label_config(
    hf_config: HFConfig, architecture_suffix: str, label: str
) -> dict[str, Any]:
    """Return `hf_config` with one label and with its architectures renamed to end in
    `architecture_suffix`, without multi-token prediction layers.
    """
    architectures = [
        f"{name.split('For')[0]}{architecture_suffix}"
        for name in hf_config.get("architectures") or ()
    ]
    head = {"id2label": {"0": label}, "label2id": {label: 0}, "classifier_dropout": 0.0}
    body = {key: value for key, value in hf_config.items() if key not in _NOT_OF_ONE_LABEL}
    return {**body, **({"architectures": architectures} if architectures else {}), **head}
