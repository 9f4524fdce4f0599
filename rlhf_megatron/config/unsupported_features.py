"""What a configuration of verl can train and this package cannot, as one list.

`config from-verl` keeps a setting of such a feature in the file that it writes, and every command
refuses the file until the user removes the setting. A feature that becomes supported is taken out
of this list, out of verl_names.txt (`feature=NAME`) and out of the translation.
"""

from __future__ import annotations

from dataclasses import dataclass

REMOVE_LINE = "remove this line to train without it"


@dataclass(frozen=True)
class UnsupportedFeature:
    """A group of settings of verl without counterpart. `reason` says why there is none, and is the
    note of the rows of verl_names.txt that have no note of their own.
    """

    name: str
    reason: str
    advice: str = REMOVE_LINE  # how the user goes on, as an imperative


UNSUPPORTED_FEATURES = (
    UnsupportedFeature(
        "multi_turn",
        "verl's rollouts of several turns and its tools are not supported yet: each prompt gets one"
        " response",
        "write an environment by hand (rollout.environment) and remove this line, or only remove"
        " this line to train on single responses",
    ),
    UnsupportedFeature(
        "images",
        "images, video and sound are not supported yet: prompts are text",
        "name a model and rows of text, and remove this line",
    ),
    UnsupportedFeature(
        "lora_megatron",
        "LoRA under Megatron is not supported yet: all weights would train",
        "set actor.backend: fsdp and actor.lora.rank for LoRA and remove this line, or only remove"
        " this line to train all weights",
    ),
    UnsupportedFeature("lora_options", "this option of LoRA is not supported yet"),
    UnsupportedFeature(
        "mtp", "layers that predict further tokens (MTP) are not trained or used for speculation"
    ),
    UnsupportedFeature(
        "distillation",
        "verl's section distillation is not translated",
        "set a teacher by hand (docs/sft.md) and remove this line, or only remove this"
        " line to train without a teacher",
    ),
    UnsupportedFeature(
        "model_family",
        "the weights of this model family cannot be read",
        "name another model in model.path, or register the family (plugins:), and remove this line",
    ),
    UnsupportedFeature(
        "model_config",
        "the model is as in its config.json",
        "change config.json in the model's directory and remove this line, or only remove this"
        " line to train the model as the file describes it",
    ),
    UnsupportedFeature(
        "model_code",
        "no code of a model is run",
        "import the module in plugins: if it is needed, and remove this line",
    ),
    UnsupportedFeature(
        "estimator",
        "no advantage estimator of this name is registered",
        "choose algorithm.adv_estimator, or register your own (plugins:), and remove this line",
    ),
    UnsupportedFeature(
        "policy_loss",
        "no policy loss of this name is registered",
        "choose actor.policy_loss.loss_mode, or register your own (plugins:), and remove this line",
    ),
    UnsupportedFeature(
        "loss_terms",
        "no aggregation or KL estimator of this name is there",
        "choose one that is there, and remove this line",
    ),
    UnsupportedFeature("optimizer", "the optimizer is AdamW, without further options"),
    UnsupportedFeature("lr_schedule", "this schedule of the learning rate is not there"),
    UnsupportedFeature("sampling", "training samples from the policy's full distribution"),
    UnsupportedFeature("quantized_rollout", "engines do not read verl's quantization files"),
    UnsupportedFeature(
        "reward",
        "a reward is a function of one sample, a model, or a server",
        "choose or write the reward (docs/rewards.md), and remove this line",
    ),
    UnsupportedFeature(
        "schedule",
        "the order of generating and training is not there",
        "choose schedule.name (docs/schedules.md), and remove this line",
    ),
    UnsupportedFeature(
        "data",
        "rows are read in another way",
        "prepare the rows or register a task (docs/data.md), and remove this line",
    ),
    UnsupportedFeature(
        "evaluation_only",
        "a command of its own evaluates",
        "run `rlhf-megatron evaluate RUN.yaml`, or remove this line to train",
    ),
    UnsupportedFeature(
        "set_by_hand",
        "the counterpart has another form",
        "set the counterpart by hand and remove this line, or only remove this line to train"
        " without it",
    ),
    UnsupportedFeature(
        "missing",
        "verl's file does not say it",
        "translate again with this fact, or write the setting into this file, and remove this line",
    ),
    UnsupportedFeature(
        "unreadable_value",
        "the value cannot be known or used",
        "translate again with another value, or write the counterpart into this file, and remove"
        " this line",
    ),
    UnsupportedFeature(
        "unknown",
        "no setting of this name is known",
        "correct the name and translate again, or remove this line to train without it",
    ),
)
"""In the order in which documents and counts list them."""

FEATURES_BY_NAME = {feature.name: feature for feature in UNSUPPORTED_FEATURES}
