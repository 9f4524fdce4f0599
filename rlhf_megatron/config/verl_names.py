"""What users of verl look for, and how it is called here. Used for hints at unknown keys and for
the reference.

The table is verl_names.txt, a line an entry: VERL_KEY | OURS, or - | NOTE | learns;
feature=NAME; switch=KEY; off=[VALUES]. A row without a note has the reason of its feature.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib.resources import files

from rlhf_megatron.config.key_paths import (
    KeySuggestion,
    list_leaf_keys,
    list_section_keys,
    suggest_nearest_key,
)
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.unsupported_features import FEATURES_BY_NAME
from rlhf_megatron.config.untranslated_settings import OVERRIDE_HINT, UNTRANSLATED

RENAMED_SECTIONS = (
    ("actor_rollout_ref.actor", "actor"),
    ("actor_rollout_ref.rollout", "rollout"),
    ("actor_rollout_ref.ref", "reference"),
    ("actor_rollout_ref.model", "model"),
    ("ref", "reference"),
)

_ALIKE = (
    *(
        (f"critic.{section}", f"actor.{section}")
        for section in ("megatron.", "optim.", "fsdp_config.", "profiler.")
    ),
    ("critic.ulysses_", "actor.ulysses_"),
    ("critic.model.fsdp_config.", "actor.fsdp_config."),
    ("critic.model.", "model."),
    ("reference.entropy_", "actor.entropy_"),
)

EPOCHS = "in steps of the loop: rows of data.train_files // data.train_batch_size x epochs"
ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "actor_learning_rate"), "actor.optim.lr"),
    "critic_learning_rate": "critic.optim.lr",
    **dict.fromkeys(("num_generations", "group_size", "n_samples_per_prompt"), "rollout.n"),
    **dict.fromkeys(("beta", "kl_coef", "init_kl_coef"), "actor.kl_loss_coef"),
    **dict.fromkeys(
        ("epochs", "num_epochs", "max_epochs", "num_train_epochs", "num_episodes"),
        f"trainer.total_training_steps ({EPOCHS})",
    ),
    "max_steps": "trainer.total_training_steps",
    **dict.fromkeys(("save_steps", "save_interval"), "trainer.save_freq"),
    **dict.fromkeys(("eval_steps", "eval_interval"), "trainer.test_freq"),
    "save_total_limit": "trainer.max_ckpt_to_keep",
    **dict.fromkeys(("output_dir", "save_path", "ckpt_path"), "trainer.default_local_dir"),
    "run_name": "trainer.experiment_name",
    "wandb_project": "trainer.project_name",
    **dict.fromkeys(("report_to", "use_wandb"), "trainer.logger"),
    **dict.fromkeys(("num_nodes", "actor_num_nodes"), "trainer.nnodes"),
    **dict.fromkeys(
        ("gpus", "num_gpus_per_node", "actor_num_gpus_per_node"), "trainer.n_gpus_per_node"
    ),
    **dict.fromkeys(("model_name", "model_name_or_path", "name_or_path", "pretrain"), "model.path"),
    **dict.fromkeys(("tokenizer_name", "tokenizer_name_or_path"), "model.tokenizer_path"),
    **dict.fromkeys(("bf16", "precision"), "model.dtype (bfloat16)"),
    **dict.fromkeys(("train_data", "prompt_data", "dataset_name"), "data.train_files"),
    **dict.fromkeys(("val_data", "eval_dataset"), "data.val_files"),
    "input_key": "data.prompt_key",
    **dict.fromkeys(
        ("rollout_batch_size", "global_batch_size"), "data.train_batch_size (in prompts)"
    ),
    **dict.fromkeys(
        ("micro_batch_size", "micro_train_batch_size", "micro_rollout_batch_size"),
        "actor.ppo_max_token_len_per_gpu (micro-batches are always cut by token budget)",
    ),
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps"),
        "actor.mini_batch_size (samples of an optimizer step, over all ranks)",
    ),
    **dict.fromkeys(
        ("max_completion_length", "generate_max_len", "max_new_tokens"),
        "data.max_response_length",
    ),
    "prompt_max_len": "data.max_prompt_length",
    **dict.fromkeys(
        ("eps_clip", "epsilon", "clip_range", "cliprange"),
        "actor.policy_loss.params (as clip_ratio_low and clip_ratio_high)",
    ),
    "epsilon_high": "actor.policy_loss.params (as clip_ratio_high)",
    "value_clip": "critic.cliprange_value",
    **dict.fromkeys(("entropy_coef", "entropy_loss_coef"), "actor.entropy_coeff"),
    **dict.fromkeys(("max_norm", "max_grad_norm", "gradient_clipping"), "actor.optim.clip_grad"),
    "num_iterations": "actor.ppo_epochs",
    **dict.fromkeys(("advantage", "advantage_estimator"), "algorithm.adv_estimator"),
    "scale_rewards": "algorithm.params (as norm_adv_by_std_in_grpo of grpo)",
    **dict.fromkeys(("reward_funcs", "funcs", "function"), "reward.name"),
    **dict.fromkeys(("reward_weights", "weights"), "reward.terms (each has a weight)"),
    "reward_pretrain": "reward_model.path",
    "remote_rm_url": "reward.name (remote or reward_server, with reward.params)",
    **dict.fromkeys(
        ("warmup", "warmup_ratio", "warmup_steps", "lr_warmup_ratio"),
        "actor.optim.lr_warmup_steps (in optimizer steps)",
    ),
    **dict.fromkeys(("lr_scheduler", "scheduler"), "actor.optim.lr_decay_style"),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing"),
        "actor.megatron.recompute_granularity (as full)",
    ),
    **dict.fromkeys(("tp", "tensor_parallel"), "actor.megatron.tensor_model_parallel_size"),
    **dict.fromkeys(("pp", "pipeline_parallel"), "actor.megatron.pipeline_model_parallel_size"),
    "vllm_num_engines": "rollout.num_engines",
    **dict.fromkeys(("use_vllm", "vllm_mode"), "rollout.engine (local or sglang)"),
    "vllm_gpu_memory_utilization": "rollout.sglang.args (as mem_fraction_static)",
    **dict.fromkeys(("colocate_all_models", "colocate"), "rollout.colocated"),
    "max_samples": "data.train_files (name a file with so many rows)",
    "lora_r": "actor.lora.rank",
}
"""Last parts of names that other trainers have -> what it is here."""


@dataclass(frozen=True)
class VerlKey:
    """A row of verl's table. `name` is verl's key after RENAMED_SECTIONS; a name that ends in ".*"
    covers all keys below. `target` is our key, or None without a counterpart.
    """

    name: str
    target: str | None
    note: str = ""
    # of UNSUPPORTED_FEATURES; "": left out, it changes nothing of what is learnt
    feature: str = ""
    switch_key: str = ""  # verl's key without which it asks for nothing
    # values that ask for nothing, beside null, false, 0, -1, "", [] and {}
    off_values: tuple[object, ...] = ()


def _parse_table_line(line: str) -> VerlKey:
    """Return the entry that a line of verl_names.txt describes."""
    name, target, note, more = (*line.split(" | "), "", "")[:4]
    given = dict(word.partition("=")[::2] for word in more.split("; ") if word)
    off = tuple(json.loads(given.get("off", "[]")))
    feature = given.get("feature", "set_by_hand") if "learns" in given else ""
    if feature and not note and target == "-":
        note = f"{FEATURES_BY_NAME[feature].reason}; remove it"
    return VerlKey(
        name, None if target == "-" else target, note, feature, given.get("switch", ""), off
    )


_TABLE = files("rlhf_megatron.config").joinpath("verl_names.txt").read_text(encoding="utf-8")
VERL_NAMES = tuple(
    _parse_table_line(line) for line in _TABLE.splitlines() if not line.startswith("#")
)
"""The first entry that fits a key counts."""


def rename_to_current_key(key: str) -> str:
    """Return the key with verl's section names replaced by ours: "actor_rollout_ref.actor.x"
    becomes "actor.x". Return other keys unchanged.
    """
    for old, new in RENAMED_SECTIONS:
        if key == old or key.startswith(old + "."):
            return new + key[len(old) :]
    return key


def find_verl_key(key: str) -> VerlKey | None:
    """Return the table entry for a key of verl, whose sections already have our names, or None. A
    key without an entry, such as one of verl's critic, gets the entry of the corresponding key in a
    section of the same form.
    """
    for entry in VERL_NAMES:
        stem = entry.name.removesuffix(".*")
        if key == stem or (entry.name.endswith(".*") and key.startswith(stem + ".")):
            return entry
    for section, alike in _ALIKE:
        if (
            key.startswith(section)
            and (other := find_verl_key(alike + key.removeprefix(section))) is not None
        ):
            target = other.target or ""
            is_own = section.startswith("critic.") and target.startswith(
                ("actor.megatron", "actor.optim")
            )
            return replace(other, target="critic" + target[5:] if is_own else other.target)
    return None


def suggest_setting(key: str) -> KeySuggestion:
    """Return a guess at the setting that an unknown key of a run meant, by verl's names, other
    trainers' names, and similar spellings.
    """
    if key.partition(".")[0] == UNTRANSLATED:  # of the command line: files have it taken out
        return KeySuggestion(f"{OVERRIDE_HINT}.")
    path = rename_to_current_key(key)
    known = (*list_leaf_keys(RunConfig), *list_section_keys(RunConfig))
    if path != key and path in known:
        return KeySuggestion(f"Here it is {path}.", (path,))
    entry = find_verl_key(path)
    if entry is None and (name := path.rpartition(".")[2]) in ELSEWHERE:
        return KeySuggestion(f"Here it is {ELSEWHERE[name]}.", (ELSEWHERE[name].partition(" ")[0],))
    name = path.rpartition(".")[2]
    # verl's, without its section
    if entry is None and not any(other.rpartition(".")[2] == name for other in known):
        top = "" if path == name else path.partition(".")[0]
        named = [
            each
            for each in VERL_NAMES
            if each.name.rpartition(".")[2] == name
            and (top == each.name.partition(".")[0] or each.name.partition(".")[0] != "reward")
        ]
        entry = min(named, key=lambda each: not each.name.startswith("trainer."), default=None)
    if entry is None:
        return suggest_nearest_key(
            path, [name for name in known if not path.startswith(name + ".")]
        )
    if entry.target is None:
        return KeySuggestion(f"{entry.note[0].upper()}{entry.note[1:]}.")
    text = f"Here it is {entry.target}"
    return KeySuggestion(f"{text} ({entry.note})." if entry.note else f"{text}.", (entry.target,))


def has_known_subkeys(key: str) -> bool:
    """Return whether an unknown section is one of verl's whose keys deserve a hint each, rather
    than one hint for the section.
    """
    path = rename_to_current_key(key)
    below = any(
        entry.name.startswith(path + ".") and entry.name != f"{path}.*" for entry in VERL_NAMES
    )
    entry = find_verl_key(path)
    # what stands for a section says enough, but where it only says that the rest has no place
    if entry is not None:
        return below and entry.target is None and entry.name == f"{path}.*"
    return (
        below
        or path in list_section_keys(RunConfig)
        or any(old.startswith(key + ".") for old, _ in RENAMED_SECTIONS)
    )
