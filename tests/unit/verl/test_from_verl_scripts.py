"""`config from-verl` on what verl's own scripts do: former names, other jobs, branches, what only
a shell knows.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from test_from_verl import BASE, ENVIRONMENT, learning, translated, values

from benchmarks.verl_scripts.__main__ import (
    CLASSES,
    OUTCOMES,
    count_outcomes,
    count_refused_features,
    read_table,
)
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.unsupported_features import FEATURES_BY_NAME
from rlhf_megatron.jobs.from_verl.config_draft import UserFacts
from rlhf_megatron.jobs.from_verl.settings_reader import read_verl_settings
from rlhf_megatron.jobs.from_verl.shell_script import UNKNOWN, ShellScript
from rlhf_megatron.jobs.from_verl.verl_engines import OFF

ROOT = Path(__file__).parents[3]
CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    "section",
    [
        "reward_model.overlong_buffer",
        "custom_reward_function.overlong_buffer",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward.reward_kwargs.overlong_buffer_cfg",
    ],
)
def test_the_penalty_for_length_under_all_its_names(section: str) -> None:
    written = (f"{section}.enable=True", f"{section}.len=128", f"{section}.penalty_factor=0.5")
    result = translated(BASE, *written, "data.max_response_length=1024")
    term = {"name": "overlong", "weight": 0.5, "params": {"max_len": 1024, "buffer": 128}}
    assert values(result)["reward.terms"] == [term] and result.is_complete
    assert "reward.terms" not in values(translated(BASE, *written, f"{section}.enable=False"))


def test_a_setting_of_a_reward_model_that_nobody_knows_is_told() -> None:
    assert learning(translated(BASE, "reward_model.length_penalty=0.3")) == [
        "reward_model.length_penalty: unknown"
    ]
    assert translated(BASE, "reward_model.enable=False", "reward_model.model.path=/rm").is_complete
    given = translated(
        BASE,
        "reward_model.enable=True",
        "reward_model.model.path=/rm",
        ours=["reward.name=math_verify"],
    )
    assert [one.name for one in given.untranslated] == [
        "reward_model.enable",
        "custom_reward_function.path",
    ]
    assert (
        given.is_complete
        and "reward.name math_verify, given with --set, is in its place"
        in given.untranslated[0].reason
    )


def test_limits_of_requests_belong_to_servers() -> None:
    limits = (
        "reward.reward_manager.name=rate_limited",
        "reward.max_rpm=60",
        "reward.max_concurrent=4",
    )
    given = translated(BASE, *limits, "reward.max_tpm=60000", "reward.timeout=30")
    found = {
        key[21:]: value
        for key, value in values(given).items()
        if key.startswith("reward.params.server.")
    }
    assert found == {
        "url": "http://reward",
        "requests_per_s": 0.5,
        "concurrency": 4,
        "patience_s": 30.0,
    }
    assert given.is_complete and not given.untranslated
    given = translated(BASE, *limits, ours=["reward.name=math_verify"])
    assert [one.name for one in given.untranslated] == [
        "custom_reward_function.path",
        "reward.max_rpm",
        "reward.max_concurrent",
    ]
    assert all("requests_per_s and concurrency" in one.reason for one in given.untranslated[1:])


def test_a_reward_model_that_scores_alone() -> None:
    text = "\n".join(line for line in BASE.splitlines() if "custom_reward_function" not in line)
    given = translated(
        text,
        "reward_model.enable=True",
        "reward_model.model.path=/rm",
        "reward_model.max_length=99",
    )
    assert values(given)["reward_model.path"] == "/rm" and values(given)["reward.name"] == "zero"
    assert given.is_complete, given.untranslated
    unnamed = translated(text, "reward_model.enable=True")
    assert "reward_model.enable: name the model: reward_model.path" in learning(unnamed)


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (
            ["rollout.name=sglang", "rollout.tensor_model_parallel_size=2"],
            {"served.num_servers": 4, "served.args.tp_size": 2},
        ),
        (["rollout.name=vllm", "use_reward_loop=False"], {"param_offload": True}),
        (
            [
                "rollout.name=vllm",
                "enable_resource_pool=True",
                "n_gpus_per_node=3",
                "nnodes=2",
                "rollout.dtype=bfloat16",
            ],
            {"served.num_servers": 6, "served.dtype": "bfloat16"},
        ),
        (
            [
                "enable_resource_pool=True",
                "n_gpus_per_node=4",
                "megatron.tensor_model_parallel_size=2",
            ],
            {"num_ranks": 4, "megatron.tensor_model_parallel_size": 2, "param_offload": True},
        ),
        (
            [
                "use_dynamic_bsz=True",
                "forward_max_token_len_per_gpu=9000",
                "megatron.param_offload=True",
            ],
            {"max_token_len_per_gpu": 9000, "param_offload": True},
        ),
    ],
)
def test_where_a_reward_model_stands(written: list[str], wanted: dict[str, Any]) -> None:
    text = "\n".join(line for line in BASE.splitlines() if "custom_reward_function" not in line)
    overrides = [
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=8",
        "reward_model.model.path=/rm",
        "reward_model.enable=True",
    ]
    found = values(translated(text, *overrides, *(f"reward_model.{one}" for one in written)))
    assert {key[13:]: value for key, value in found.items() if key.startswith("reward_model.")} == {
        "path": "/rm"
    } | wanted


def test_parts_of_a_functions_reward_have_its_name() -> None:
    given = translated(
        BASE, "custom_reward_function.path=pkg://my.rewards", "custom_reward_function.name=f"
    )
    assert values(given)["reward.params.path"] == "my.rewards:f"
    given = translated(
        BASE, "algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[score,acc]"
    )
    assert values(given)["algorithm.params.gdpo_reward_keys"] == ["function", "function/acc"]


GENERATION = """python3 -m verl.trainer.%s trainer.nnodes=1 trainer.n_gpus_per_node=8 \
data.prompt_key=question %s"""


def test_generation_jobs() -> None:
    """With verl's own defaults of the two programs, and the command that runs the result."""
    plain = "data.path=~/x.parquet data.output_path=~/out.parquet model.path=/m +rollout.made_up=1"
    found = translated(
        GENERATION % ("main_generation", plain),
        source="run.sh",
        told=UserFacts(home_directory="/home/user"),
    )
    made = values(found)
    assert (
        made["data.val_files"] == ["/home/user/x.parquet"] and made["data.prompt_key"] == "question"
    )
    assert (made["data.max_prompt_length"], made["data.max_response_length"]) == (1536, 512)
    sampling = [
        made[f"rollout.val_kwargs.{name}"] for name in ("n", "temperature", "top_p", "top_k")
    ]
    assert sampling == [5, 1.0, 0.7, 50] and made["rollout.num_engines"] == 8
    assert any(
        "rlhf-megatron generate THIS_FILE --out /home/user/out.parquet" in note
        for note in found.notes
    )
    assert [one.name for one in found.untranslated if one.affects_learning] == [
        "rollout.made_up"
    ] and not found.problems
    server = """data.train_files=[a.parquet,b.parquet] actor_rollout_ref.model.path=/m \
actor_rollout_ref.rollout.n=4
        actor_rollout_ref.rollout.top_k=50 \
actor_rollout_ref.rollout.tensor_model_parallel_size=16""".replace("\n", " ")
    found = translated(GENERATION % ("main_generation_server", server), source="run.sh")
    made = values(found)
    assert (
        made["data.val_files"] == ["a.parquet", "b.parquet"] and made["rollout.val_kwargs.n"] == 4
    )
    assert made["rollout.sglang.args.tp_size"] == 8 and made["rollout.num_engines"] == 1, (
        "one machine's devices"
    )
    assert "rollout.val_kwargs.top_k" not in made and any(
        "top_k is left out" in note for note in found.notes
    )
    greedy = translated(
        GENERATION
        % ("main_generation", plain.replace("+rollout.made_up=1", "rollout.temperature=0"))
    )
    assert values(greedy)["rollout.val_kwargs.temperature"] == 0
    assert not {f"rollout.val_kwargs.{name}" for name in OFF} & values(greedy).keys(), (
        "they would be ignored"
    )


def test_evaluation_jobs() -> None:
    text = (
        "python3 -m verl.trainer.main_eval data.path=/out.parquet"
        " custom_reward_function.path=/r.py %s"
    )
    found = translated(text % "data.response_key=texts", source="run.sh")
    assert values(found)["reward.params.path"] == "/r.py:compute_score"
    assert values(found)["data.label_key"] == "reward_model.ground_truth"
    assert any(
        "rlhf-megatron evaluate /out.parquet --config THIS_FILE" in note for note in found.notes
    )
    assert [one.name for one in found.untranslated if one.affects_learning] == ["data.response_key"]
    with pytest.raises(ConfigError, match="it is a job of conversion"):
        read_verl_settings("python3 -m verl.model_merger.main_merger data.x=1", "run.sh", {})


SFT = """torchrun -m verl.trainer.%s data.train_files=~/a.parquet data.val_files=~/b.parquet \\
    trainer.n_gpus_per_node=2 \\
    model.partial_pretrain=/m optim.lr=1e-4 data.max_length=2048 trainer.total_epochs=2 \
trainer.test_freq=10 %s"""


def test_supervised_jobs() -> None:
    """Epochs become steps of 256 samples; keys inside of a struct get points; verl's
    schedule is a cosine.
    """
    of_rows = (
        "data.prompt_key=extra_info data.response_key=extra_info data.prompt_dict_keys=['question']"
    )
    text = SFT % (
        "fsdp_sft_trainer",
        of_rows + " +data.response_dict_keys=['answer'] ulysses_sequence_parallel_size=2",
    )
    found = translated(text, source="run.sh", told=UserFacts(num_train_rows=7473))
    assert not found.problems and found.is_complete, (found.problems, found.untranslated)
    made = values(found)
    assert made["job"] == "sft" and made["trainer.total_training_steps"] == 7473 // 256 * 2 == 58
    assert (made["data.prompt_key"], made["data.label_key"]) == (
        "extra_info.question",
        "extra_info.answer",
    )
    assert (
        made["actor.optim.lr_warmup_steps"] == 5 and made["actor.optim.lr_decay_style"] == "cosine"
    )
    assert made["actor.megatron.context_parallel_size"] == 2 and made["sft.max_length"] == 2048
    of_chats = "data.messages_key=m engine.tensor_model_parallel_size=2"
    chats = translated(SFT % ("sft_trainer_ray", of_chats), source="x.sh")
    assert values(chats)["sft.messages_key"] == "m"
    assert values(chats)["actor.megatron.tensor_model_parallel_size"] == 2
    assert [one.name for one in chats.untranslated] == [
        "trainer.total_training_steps"
    ] and "--train-rows" in chats.untranslated[0].reason
    adapters = "model.lora_rank=8 model.target_modules=[q_proj,v_proj] engine.strategy=fsdp"
    found = translated(
        SFT % ("sft_trainer", adapters), source="x.sh", told=UserFacts(num_train_rows=512)
    )
    assert found.is_complete and not found.problems and values(found)["actor.backend"] == "fsdp"
    assert values(found)["actor.lora.target_modules"] == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct", "it is a job with images"),
        ("actor_rollout_ref.model.path=zai-org/GLM-4.1V-9B-Thinking", "it is a job with images"),
        (
            "actor_rollout_ref.model.path=google/gemma-2-2b-it",
            "by its name a model of gemma, which is not supported",
        ),
        ("actor_rollout_ref.model.lora_adapter_path=/adapter", "give r of its adapter_config.json"),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml", "not supported yet"),
    ],
)
def test_what_no_run_could_do_is_not_harmless(override: str, reason: str) -> None:
    (line,) = learning(translated(BASE, override))
    assert reason in line


@pytest.mark.parametrize(
    "path",
    [
        "Qwen/Qwen3-8B",
        "deepseek-ai/deepseek-llm-7b-chat",
        "meta-llama/Llama-3.1-8B",
        "zai-org/GLM-4.5-Air",
        "deepseek-ai/DeepSeek-V3-Base",
        "/m",
    ],
)
def test_models_of_families_that_are_there(path: str) -> None:
    assert translated(BASE, f"actor_rollout_ref.model.path={path}").is_complete


def test_layouts_of_experts() -> None:
    path = "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B"
    section = "actor_rollout_ref.actor.megatron"
    found = translated(
        BASE, path, f"{section}.expert_model_parallel_size=8",
        f"{section}.expert_tensor_parallel_size=1",
        f"+{section}.override_transformer_config.moe_token_dispatcher_type=flex",
        f"+{section}.override_transformer_config.moe_enable_deepep=True",
        f"+{section}.override_transformer_config.moe_permute_fusion=True",
        (
            "+actor_rollout_ref.actor.optim.override_optimizer_config."
            "use_precision_aware_optimizer=True"
        ),
        f"+{section}.override_transformer_config.num_layers_in_last_pipeline_stage=11",
        "actor_rollout_ref.actor.use_prefix_grouper=True",
    )  # fmt: skip
    assert values(found)["actor.megatron.share_prompts"] is True
    assert values(found)["actor.megatron.expert_model_parallel_size"] == 8
    assert values(found)["actor.megatron.expert_tensor_parallel_size"] == 1
    assert values(found)["actor.megatron.moe_token_dispatcher_type"] == "flex" and found.is_complete
    assert values(found)["actor.megatron.moe_permute_fusion"] is True
    assert values(found)["actor.megatron.use_precision_aware_optimizer"] is True


def test_batches_that_are_generated_and_prompts_that_are_too_long() -> None:
    alone = translated(BASE, "data.gen_batch_size=96")
    assert values(alone)["data.train_batch_size"] == 96, (
        "without a filter all of them are trained on"
    )
    section = "algorithm.filter_groups"
    dapo = translated(
        BASE, "data.gen_batch_size=192", f"{section}.enable=True",
        f"{section}.max_num_gen_batches=10",
        f"{section}.metric=acc", "data.truncation=left", "critic.model.use_remove_padding=True",
        "critic.model.fsdp_config.param_offload=True", ours=["reward.name=math_verify"],
    )  # fmt: skip
    found = values(dapo)
    assert found["data.train_batch_size"] == 64 and found[f"{section}.max_num_gen_batches"] == 30
    assert found["data.truncation"] == "left" and "data.filter_overlong_prompts" not in found
    assert dapo.is_complete and not dapo.problems
    right = values(translated(BASE, "data.truncation=right", ours=["reward.name=math_verify"]))
    assert right["data.filter_overlong_prompts"] is True and "data.truncation" not in right


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            ["actor_rollout_ref.actor.tis_imp_ratio_cap=2.5"],
            {"rollout_is": "token", "rollout_is_threshold": "2.5"},
        ),
        (["actor_rollout_ref.actor.tis_imp_ratio_cap=-1"], {}),
        (
            [
                "algorithm.rollout_is=True",
                "algorithm.rollout_is_threshold=4",
                "algorithm.rollout_is_level=sequence",
            ],
            {
                "rollout_is": "sequence",
                "rollout_is_threshold": "4",
                "rollout_token_veto_threshold": 1e-4,
            },
        ),
        (
            [
                *(
                    "algorithm.rollout_is=True",
                    "algorithm.rollout_is_threshold=2",
                    "algorithm.rollout_is_mode=mask",
                ),
                "algorithm.rollout_is_veto_threshold=1e-3",
            ],
            {
                "rollout_is": "token",
                "rollout_is_threshold": "0.5_2",
                "rollout_token_veto_threshold": 1e-3,
            },
        ),
        (
            [
                *("algorithm.rollout_is=True", "algorithm.rollout_is_threshold=1.002"),
                *("algorithm.rollout_is_mode=mask", "algorithm.rollout_is_level=geometric"),
                "algorithm.rollout_is_threshold_lower=0.998",
            ],
            {
                "rollout_rs": ["seq_mean_k1"],
                "rollout_rs_threshold": ["0.998_1.002"],
                "rollout_token_veto_threshold": 1e-4,
            },
        ),
        (["algorithm.rollout_is=False", "algorithm.rollout_is_threshold=2"], {}),
        (
            [f"{CORRECTION}.rollout_rs=geometric", f"{CORRECTION}.rollout_rs_threshold=1.001"],
            {"rollout_rs": ["seq_mean_k1"], "rollout_rs_threshold": ["0.999001_1.001"]},
        ),
        (
            [f"{CORRECTION}.rollout_rs=token", f"{CORRECTION}.rollout_rs_threshold_lower=0.4"],
            {"rollout_rs": ["token_k1"], "rollout_rs_threshold": ["0.4_2"]},
        ),
    ],
)
def test_corrections_of_former_versions(written: list[str], expected: dict[str, object]) -> None:
    result = translated(BASE, *written)
    found = {
        key.rpartition(".")[2]: value
        for key, value in values(result).items()
        if key.startswith(CORRECTION)
    }
    assert found == ({"mode": "decoupled", **expected} if expected else {})
    assert result.is_complete and not result.problems


def test_former_switches_of_the_bypass() -> None:
    gradient = translated(
        BASE, f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.use_policy_gradient=True"
    )
    assert values(gradient)["actor.policy_loss.loss_mode"] == "reinforce"
    clip = translated(BASE, f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.rollout_is=token")
    assert f"{CORRECTION}.rollout_is" not in values(clip) and not clip.problems, (
        "it weighs nothing there"
    )


SCRIPT = """
MODE=${MODE:-fsdp}
if [ "$MODE" = "fsdp" ]; then
    SIZE=4
    if [[ $SIZE != 4 ]]; then N=1; else N=2; fi
elif [ "$MODE" == megatron ]; then
    SIZE=8
else
    SIZE=16
fi
if [ "$GIVEN" = 1 ]; then PERHAPS=1; fi
if [ -n "$MODE" ] && [ "$GIVEN" = 1 ]; then BOTH=1; fi
SETTINGS="
    a.b=$SIZE
    c.d=[$N]"
run $SETTINGS "$SETTINGS" e=$(pwd)/x f=$PERHAPS g=$BOTH h=$(date)
"""


def test_branches_whose_condition_is_known() -> None:
    for mode, size in (("", "4"), ("megatron", "8"), ("x", "16")):
        script = ShellScript({"PWD": "/here", **({"MODE": mode} if mode else {})})
        script.read(SCRIPT)
        _, first, second, whole, *rest = [word.text for word in script.commands[-1]]
        assert (first, second.rstrip(UNKNOWN + "]")) == (
            f"a.b={size}",
            "c.d=[" + ("2" if size == "4" else ""),
        )
        assert whole.split() == [first, second]
        assert rest == ["e=/here/x", *(f"{name}={UNKNOWN}" for name in "fgh")]


def test_what_only_the_shell_knows_matters_where_it_is_read() -> None:
    run = f"python3 -m verl.trainer.main_ppo {BASE} ".replace("\n", " ")
    named = translated(run + "trainer.experiment_name=run_$(date)", source="run.sh")
    assert (
        named.is_complete
        and not named.problems
        and any("it is left out" in note for note in named.notes)
    )
    (problem,) = translated(run + "trainer.nnodes=$1", source="run.sh").problems
    assert "give trainer.nnodes=value on the command line" in problem


def test_a_command_that_ends_before_its_settings_do() -> None:
    text = (
        "python3 -m verl.trainer.main_ppo \\\n data.train_batch_size=4 \\ # a"
        " comment\n data.seed=1\n"
    )
    with pytest.raises(
        ConfigError,
        match=r"ends before data\.seed=1 \(line 3\): a backslash continues a line only as",
    ):
        read_verl_settings(text, "run.sh", ENVIRONMENT)


def test_the_table_of_verls_scripts() -> None:
    rows = read_table()
    assert len({row.path for row in rows}) == len(rows) == 160
    assert {row.outcome for row in rows} == set(OUTCOMES)
    for row in rows:
        if row.outcome == "accepted":
            assert not row.reason, row
        elif row.outcome == "refused":
            assert row.reason and set(row.reason.split()) <= set(FEATURES_BY_NAME), row
        else:
            assert row.reason in CLASSES, row
    counts = count_outcomes(rows)
    assert counts["accepted"] >= 110


def test_the_document_has_the_counts_of_the_table() -> None:
    rows = read_table()
    counts = count_outcomes(rows)
    text = (ROOT / "docs" / "from_verl.md").read_text()
    for outcome in OUTCOMES:
        assert f"| {counts[outcome]} | {outcome}: " in text
    (line,) = [line for line in text.splitlines() if "until a line is removed" in line]
    named = dict(re.findall(r"`(\w+)` (\d+)", line))
    assert {name: int(count) for name, count in named.items()} == count_refused_features(rows)
