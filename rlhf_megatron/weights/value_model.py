"""A critic in Hugging Face layout is transformers' ...ForTokenClassification with one label, whose
head is `score`.

One starts from such a directory, from a ...ForSequenceClassification (a reward model; its head has
no bias), or from any causal language model, whose output layer is left out and which
gets a fresh head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_megatron.weights.families.model_family import VALUE_HEAD, HFConfig
from rlhf_megatron.weights.hf_reader import HFReader
from rlhf_megatron.weights.weight_source import RandomWeightSource, WeightSource
from rlhf_megatron.weights.weight_table import WeightRule

WEIGHT = f"{VALUE_HEAD}.weight"
BIAS = f"{VALUE_HEAD}.bias"
_NOT_OF_A_CRITIC = ("lm_head.weight",)


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
    `table`, a critic's weight table.

    Raise ValueError for missing and mis-shaped tensors, and for a head of more than one label.
    """
    reader = HFReader(directory)
    own = set(reader.names) & {WEIGHT, BIAS}
    if WEIGHT in own and (num_labels := reader.read_shape(WEIGHT)[0]) != 1:
        raise ValueError(
            f"{directory} has a head of {num_labels} labels ({WEIGHT}); a critic needs one value a"
            " token: give a model with num_labels 1, or one without a head."
        )
    lacking = {WEIGHT, BIAS} - own
    reader.check_against_table(
        [rule for rule in table if rule.hf_tensors[0].name not in lacking],
        ignored_names=_NOT_OF_A_CRITIC,
    )
    return reader


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
    return _make_one_label_config(hf_config, "ForTokenClassification", "VALUE")


def make_reward_model_config(hf_config: HFConfig) -> dict[str, Any]:
    """Return the config.json of a trained reward model: its body's, changed to a sequence
    classifier of one label, which scores the last token.

    transformers' classifiers have no bias in the head and leave it out; SGLang's have one, and read
    it.
    """
    return _make_one_label_config(hf_config, "ForSequenceClassification", "REWARD")


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
    # no policy's layers
    body = {key: value for key, value in hf_config.items() if key != "num_nextn_predict_layers"}
    return {**body, **({"architectures": architectures} if architectures else {}), **head}
