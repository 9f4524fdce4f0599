"""A suggestion for an unknown key is really near: a misspelling, the same words, the same name
elsewhere, or what another trainer calls it; else there is none.
"""

from __future__ import annotations

import pytest

from rlhf_megatron.config.key_paths import list_leaf_keys, list_section_keys
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.verl_names import suggest_setting

MISSPELT = {
    "actor.ppo_epoch": "actor.ppo_epochs",
    "actor.optim.weight_deacy": "actor.optim.weight_decay",
    "data.train_file": "data.train_files",
    "data.train_flies": "data.train_files",
    "data.shufle": "data.shuffle",
    "data.max_prompt_len": "data.max_prompt_length",
    "model.pth": "model.path",
    "rolout.n": "rollout.n",
    "rollout.temperatur": "rollout.temperature",
    "rollout.num_engine": "rollout.num_engines",
    "rollout.engines": "rollout.engine",
    "rollout.dtyp": "rollout.dtype",
    "trainer.nodes": "trainer.nnodes",
    "trainer.loggers": "trainer.logger",
    "trianer.seed": "trainer.seed",
    "acotr.optim.lr": "actor.optim.lr",
    "rewrd.name": "reward.name",
    "algorithm.adv_estimater": "algorithm.adv_estimator",
}
SAME_WORDS = {
    "actor.batch_size": "actor.mini_batch_size",
    "actor.megatron.tensor_model_parallel": "actor.megatron.tensor_model_parallel_size",
    "algorithm.estimator": "algorithm.adv_estimator",
    "data.batch_size": "data.train_batch_size",
    "data.label": "data.label_key",
    "data.max_length": "data.max_prompt_length or data.max_response_length",
    "trainer.resume": "trainer.resume_mode",
}
OTHER_TRAINERS = {
    "per_device_train_batch_size": "actor.mini_batch_size",
    "num_generations": "rollout.n",
    "n_samples_per_prompt": "rollout.n",
    "max_completion_length": "data.max_response_length",
    "generate_max_len": "data.max_response_length",
    "prompt_max_len": "data.max_prompt_length",
    "rollout_batch_size": "data.train_batch_size",
    "micro_train_batch_size": "actor.ppo_max_token_len_per_gpu",
    "eps_clip": "actor.policy_loss.params",
    "init_kl_coef": "actor.kl_loss_coef",
    "advantage_estimator": "algorithm.adv_estimator",
    "max_epochs": "trainer.total_training_steps",
    "save_path": "trainer.default_local_dir",
    "run_name": "trainer.experiment_name",
    "report_to": "trainer.logger",
    "trainer.num_nodes": "trainer.nnodes",
    "colocate_all_models": "rollout.colocated",
    "vllm_num_engines": "rollout.num_engines",
    "pretrain": "model.path",
    "actor.micro_batch_size": "actor.ppo_max_token_len_per_gpu",
    "actor.optim.warmup_ratio": "actor.optim.lr_warmup_steps",
    "critic.value_clip": "critic.cliprange_value",
    "reward.funcs": "reward.name",
}
SAME_NAME = {
    "actor.lr": "actor.optim.lr",
    "actor.path": "actor.lora.path",
    "rollout.seed": "trainer.seed",
    "label_key": "data.label_key",
    "temperature": "rollout.temperature",
    "model.attn_implementation": "actor.fsdp.attn_implementation",
}
NOTHING_NEAR = (
    "rollout.tools",
    "rollout.tool",
    "rollout.tp_size",
    "rollout.presence_penalty",
    "rollout.stop_token_ids",
    "rollout.model",
    "actor.model",
    "actor.megatron.cp_size",
    "data.tools",
    "data.packing",
    "trainer.deepspeed",
    "trainer.log_freq",
    "trainer.push_to_hub",
    "trainer.zzz",
    "model.name",
    "reward.type",
    "zero_stage",
    "mask_truncated_completions",
    "sync_ref_model",
    "ref_model_mixup_alpha",
    "agent",
)


@pytest.mark.parametrize("key", [*MISSPELT, *SAME_WORDS])
def test_misspellings_and_names_of_the_same_words(key: str) -> None:
    expected = {**MISSPELT, **SAME_WORDS}[key]
    assert suggest_setting(key).text == f"Did you mean {expected}?"


@pytest.mark.parametrize("key", OTHER_TRAINERS)
def test_names_of_other_trainers(key: str) -> None:
    suggestion = suggest_setting(key)
    assert suggestion.text.startswith(f"Here it is {OTHER_TRAINERS[key]}")
    assert suggestion.keys == (OTHER_TRAINERS[key],)


@pytest.mark.parametrize("key", SAME_NAME)
def test_names_of_other_sections(key: str) -> None:
    suggestion = suggest_setting(key)
    assert suggestion.text.startswith("A key of that name exists as ")
    assert SAME_NAME[key] in suggestion.keys


@pytest.mark.parametrize("key", NOTHING_NEAR)
def test_nothing_is_suggested_where_nothing_is_near(key: str) -> None:
    assert suggest_setting(key).text == ""
    assert suggest_setting(key).keys == ()


def test_a_letter_too_few_or_two_swapped_lead_back_to_every_setting() -> None:
    """Where another setting is as near, that one may be named."""
    known = list_leaf_keys(RunConfig)
    sections = list_section_keys(RunConfig)
    for key in known:
        section, _, name = key.rpartition(".")
        middle = len(name) // 2
        swapped = name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
        for wrong in (name[:-1], swapped):
            if len(name) < 6 or wrong == name or f"{section}.{wrong}" in (*known, *sections):
                continue
            suggestion = suggest_setting(f"{section}.{wrong}")
            assert suggestion.text, (section, wrong)
