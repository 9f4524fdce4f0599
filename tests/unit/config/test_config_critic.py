"""Rules on the critic's settings, each with a value on both sides of its border; and who
has which ranks.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from config_samples import VALID

from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.run_rules import count_actor_ranks, list_pool_layouts
from rlhf_megatron.config.rules.validate import (
    list_file_problems,
    validate_config,
    validate_model_config,
)

OWN_POOL = (
    VALID
    + """
algorithm: {adv_estimator: gae}
critic: {num_ranks: 4, megatron: {tensor_model_parallel_size: 2}}
"""
)
"""Of 8 ranks: one actor in tp2 pp2, two critics in tp2. 32 x 16 samples a step, of at
most 10 tokens.
"""

SHARED = VALID + "\nalgorithm: {adv_estimator: gae}\n"
Problems = Callable[..., list[str]]


@pytest.fixture
def problems(tmp_path: Path) -> Problems:
    def of(text: str, *overrides: str) -> list[str]:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return validate_config(read_run_config(path, overrides))

    return of


def test_valid_runs_have_no_problem(problems: Problems) -> None:
    assert problems(OWN_POOL) == problems(SHARED) == []


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (["reward_model.num_ranks=3"],
         (
             "reward_model.num_ranks (3) must be a multiple"
             " of reward_model.megatron.tensor_model_parallel_size"
         )),
        (["reward_model.num_ranks=2", "critic.num_ranks=4"],
         (
             "critic.num_ranks + reward_model.num_ranks (4 + 2) leaves 2 of trainer.nnodes x"
             " n_gpus_per_node (8) ranks for the actor"
         )),
        (["reward_model.max_token_len_per_gpu=10"],
         (
             "reward_model.max_token_len_per_gpu (10) must hold the longest sample,"
             " data.max_prompt_length + max_response_length (6 + 4 = 10, and 1 place behind"
             " it); use 11"
         )),
        (["reward_model.granularity=step", "reward_model.step_separator=''"],
         "reward_model.step_separator ('') must be the text that ends a step"),
        (["reward_model.step_separator=x"],
         (
             "reward_model.step_separator (x) would be ignored because reward_model.granularity"
             " is response"
         )),
        (["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=reward"],
         (
             "algorithm.filter_groups.metric (reward) is read before the model of reward_model.path"
             " scores; name the reward of `reward` that decides, such as main_reward"
         )),
        (["algorithm.filter_groups.enable=true", "reward.name=zero", "reward.params={}"],
         (
             "algorithm.filter_groups.metric (main_reward) is read before the model of"
             " reward_model.path scores; name the reward of `reward` that decides, such as"
             " exact_match"
         )),
        (["algorithm.adv_estimator=remax"],
         (
             "algorithm.adv_estimator (remax) compares with greedy samples, which the model of"
             " reward_model.path does not score"
         )),
        (["rollout.colocated=true"],
         "reward_model.param_offload (false) must be true with rollout.colocated"),
        (["reward_model.path=null", "reward_model.weight=0.25"],
         (
             "reward_model.weight (0.25) would be ignored because reward_model.path is null;"
             " remove reward_model.weight, or name a model in reward_model.path."
         )),
    ],
)  # fmt: skip
def test_rules_of_a_reward_model(wrong: list[str], expected: str, problems: Problems) -> None:
    text = VALID + "\nreward_model: {path: judge, weight: 0.5}\n"
    own = ["reward_model.num_ranks=4", "reward_model.megatron.tensor_model_parallel_size=2"]
    assert problems(text) == problems(text, *own) == []
    changes = [*own, *wrong] if "num_ranks" in wrong[0] else wrong
    found = problems(
        text, *changes, *(["algorithm.adv_estimator=gae"] if "critic.num_ranks=4" in wrong else [])
    )
    assert len([problem for problem in found if expected in problem]) == 1, found


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (["reference.num_ranks=3"],
         (
             "reference.num_ranks (3) must be a multiple"
             " of reference.megatron.tensor_model_parallel_size"
         )),
        (["reference.num_ranks=6"],
         (
             "reference.num_ranks (6) leaves 2 of trainer.nnodes x n_gpus_per_node (8) ranks"
             " for the actor"
         )),
        (["reference.path=null"], "reference.num_ranks (4) is for a model of reference.path"),
        (["reference.max_token_len_per_gpu=9"],
         "reference.max_token_len_per_gpu (9) must hold the longest sample"),
        (["reference.param_offload=true"],
         "reference.param_offload (true) would be ignored because reference.num_ranks is 4"),
        (["reference.num_ranks=0", "reference.megatron.tensor_model_parallel_size=4"],
         (
             "reference.megatron.tensor_model_parallel_size (4) would be ignored because"
             " reference.num_ranks is 0"
         )),
    ],
)  # fmt: skip
def test_rules_of_a_reference_with_a_pool(
    wrong: list[str], expected: str, problems: Problems
) -> None:
    own = "{path: teacher, num_ranks: 4, megatron: {tensor_model_parallel_size: 2}}"
    text = VALID + f"\nreference: {own}\n"
    kl = "actor.use_kl_loss=true"
    assert problems(text, kl) == []
    found = problems(text, kl, *wrong)
    assert len([problem for problem in found if expected in problem]) == 1, found


@pytest.mark.parametrize(
    ("wrong", "expected", "right"),
    [
        (["critic.num_ranks=3"],
         (
             "critic.num_ranks (3) must be a multiple of critic.megatron.tensor_model_parallel_size"
             " x pipeline_model_parallel_size x context_parallel_size (2 x 1 x 1 = 2); use 2 or 4"
             " ranks or another layout."
         ), ["critic.num_ranks=4"]),
        (["critic.num_ranks=6"],
         (
             "critic.num_ranks (6) leaves 2 of trainer.nnodes x n_gpus_per_node (8) ranks for the"
             " actor, which must be a multiple of actor.megatron.tensor_model_parallel_size x"
             " pipeline_model_parallel_size x context_parallel_size (4), at least one; use 10"
             " ranks in all."
         ), ["critic.num_ranks=6", "trainer.n_gpus_per_node=10"]),
        (["critic.num_ranks=8"], "critic.num_ranks (8) leaves 0 of",
         ["critic.num_ranks=8", "trainer.nnodes=2",
          "actor.megatron.pipeline_model_parallel_size=1"]),
        (["trainer.runtime=inline", "trainer.n_gpus_per_node=1"],
         (
             "critic.num_ranks (4) needs several processes, but trainer.runtime (inline) has"
             " one; set critic.num_ranks to 0 or use runtime: torchrun."
         ), []),
        (["critic.mini_batch_size=96"],
         (
             "critic.mini_batch_size (96 samples) must divide data.train_batch_size x rollout.n (32"
             " x 16 = 512 samples a step); use 64 or 128."
         ), ["critic.mini_batch_size=64"]),
        (["critic.mini_batch_size=1"],
         (
             "critic.mini_batch_size (1 samples) must be at least the data-parallel size (2), or"
             " replicas have no work in any optimizer step; use 2 or more, or fewer ranks."
         ), ["critic.mini_batch_size=1", "critic.num_ranks=2", "trainer.n_gpus_per_node=6"]),
        (["actor.mini_batch_size=1"],
         "critic.mini_batch_size (1 samples) must be at least the data-parallel size (2)",
         ["actor.mini_batch_size=1", "critic.mini_batch_size=2"]),
        (["critic.ppo_max_token_len_per_gpu=9"],
         (
             "critic.ppo_max_token_len_per_gpu (9) must hold the longest sample,"
             " data.max_prompt_length + max_response_length (6 + 4 = 10); use 10 or more."
         ), ["critic.ppo_max_token_len_per_gpu=10"]),
        (["actor.ppo_max_token_len_per_gpu=11", "critic.megatron.context_parallel_size=2",
          "critic.megatron.sequence_parallel=true",
          "data.max_response_length=17"],
          (
              "critic.ppo_max_token_len_per_gpu (11 x context_parallel_size 2 = 22) must hold the"
              " longest sample, data.max_prompt_length + max_response_length (6 + 17 = 23, padded"
              " to a multiple of 8: 24); use 12 or more."
          ), ["actor.ppo_max_token_len_per_gpu=23", "critic.ppo_max_token_len_per_gpu=12",
              "critic.megatron.context_parallel_size=2", "critic.megatron.sequence_parallel=true",
              "data.max_response_length=17"]),
        (["trainer.critic_warmup=20"],
         (
             "trainer.critic_warmup (20) must be below trainer.total_training_steps (20), or the"
             " policy is never trained; use 19 or less."
         ), ["trainer.critic_warmup=19"]),
        (["critic.optim.min_lr=0.5", "critic.optim.lr_decay_style=linear"],
         "critic.optim.min_lr (0.5) must not be above critic.optim.lr (1e-05); lower"
         " critic.optim.min_lr.",
         ["critic.optim.min_lr=1e-6", "critic.optim.lr_decay_style=linear"]),
        (["critic.optim.lr_decay_style=cosine", "critic.optim.lr_warmup_steps=160",
          "critic.mini_batch_size=64"],
          "critic.optim.lr_warmup_steps (160) must be below the run's optimizer steps (160)",
          ["critic.optim.lr_decay_style=cosine", "critic.optim.lr_warmup_steps=159",
           "critic.mini_batch_size=64"]),
        (["critic.optim.lr_decay_style=cosine", "critic.optim.lr_warmup_steps=240",
          "critic.ppo_epochs=3"], "must be below the run's optimizer steps (240)",
          ["critic.optim.lr_decay_style=cosine", "critic.optim.lr_warmup_steps=239",
           "critic.ppo_epochs=3"]),
        (["actor.optim.lr_decay_style=cosine", "actor.optim.lr_warmup_steps=60",
          "trainer.critic_warmup=5"],
          "actor.optim.lr_warmup_steps (60) must be below the run's optimizer steps (60)",
          ["actor.optim.lr_decay_style=cosine", "actor.optim.lr_warmup_steps=60",
           "trainer.critic_warmup=4"]),
        (["critic.megatron.tensor_model_parallel_size=1", "critic.megatron.sequence_parallel=true"],
         "critic.megatron.sequence_parallel (true) splits tokens over tensor-parallel ranks",
         ["critic.megatron.sequence_parallel=true"]),
        (["critic.megatron.virtual_pipeline_model_parallel_size=2"],
         (
             "critic.megatron.virtual_pipeline_model_parallel_size (2) cuts pipeline stages into"
             " chunks, but pipeline_model_parallel_size is 1"
         ), ["critic.megatron.virtual_pipeline_model_parallel_size=2",
             "critic.megatron.pipeline_model_parallel_size=2"]),
        (["critic.num_ranks=2", "trainer.n_gpus_per_node=6",
          "critic.megatron.use_distributed_optimizer=true"],
          (
              "critic.megatron.use_distributed_optimizer (true) would be ignored because data- and"
              " context-parallel size are both 1 (2 ranks"
          ), ["critic.megatron.use_distributed_optimizer=true"]),
        (["actor.megatron.use_distributed_optimizer=true"],
         (
             "actor.megatron.use_distributed_optimizer (true) would be ignored because data- and"
             " context-parallel size are both 1 (4 ranks"
         ), ["actor.megatron.use_distributed_optimizer=true", "trainer.n_gpus_per_node=12"]),
    ],
)  # fmt: skip
def test_rules_of_a_critic_with_its_own_pool(
    wrong: list[str], expected: str, right: list[str], problems: Problems
) -> None:
    found = problems(OWN_POOL, *wrong)
    assert len([problem for problem in found if expected in problem]) == 1, found
    assert problems(OWN_POOL, *right) == []


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (["critic.mini_batch_size=1"],
         "critic.mini_batch_size (1 samples) must be at least the data-parallel size (2)"),
        (["critic.megatron.tensor_model_parallel_size=2"],
         (
             "critic.megatron.tensor_model_parallel_size (2) would be ignored because"
             " critic.num_ranks is 0; remove critic.megatron.tensor_model_parallel_size, or"
             " give the critic ranks of its own."
         )),
        (["actor.ppo_max_token_len_per_gpu=16", "actor.megatron.sequence_parallel=true",
          "data.max_response_length=9",
          "critic.ppo_max_token_len_per_gpu=15"],
          (
              "critic.ppo_max_token_len_per_gpu (15) must hold the longest sample,"
              " data.max_prompt_length + max_response_length (6 + 9 = 15, padded to a"
              " multiple of 2: 16)"
          )),
    ],
)  # fmt: skip
def test_rules_of_a_critic_in_the_actors_pool(
    wrong: list[str], expected: str, problems: Problems
) -> None:
    (found,) = problems(SHARED, *wrong)
    assert expected in found


@pytest.mark.parametrize(
    "setting", ["critic.num_ranks=4", "critic.optim.lr=0.001", "trainer.critic_warmup=2"]
)
def test_without_a_critic_its_settings_would_be_ignored(setting: str, problems: Problems) -> None:
    (found,) = problems(VALID, setting)
    assert (
        "would be ignored because algorithm.adv_estimator is grpo; remove"
        f" {setting.partition('=')[0]}, or set algorithm.adv_estimator to one that needs values"
    ) in found
    assert problems(SHARED, setting) == []


def test_a_later_estimator_without_values_takes_the_critic_away(tmp_path: Path) -> None:
    """A file may configure the critic and the command line switch it off:
    the actor has all ranks.
    """
    path = tmp_path / "run.yaml"
    path.write_text(OWN_POOL)
    loaded = read_run_config(path, ["algorithm.adv_estimator=grpo"])
    assert validate_config(loaded) == []
    assert [section for section, _, _ in list_pool_layouts(loaded.config)] == ["actor.megatron"]
    assert (count_actor_ranks(loaded.config), count_actor_ranks(read_run_config(path).config)) == (
        8,
        4,
    )


def test_a_later_critic_may_take_the_ranks_that_shared_optimizer_state(tmp_path: Path) -> None:
    """The file's two replicas share it; the command line gives the ranks of one to the critic."""
    path = tmp_path / "run.yaml"
    path.write_text(SHARED.replace("pipeline_model_parallel_size: 2",
                                   (
                                       "pipeline_model_parallel_size: 2, use_distributed_optimizer:"
                                       " true"
                                   )))  # fmt: skip
    assert (
        validate_config(read_run_config(path))
        == validate_config(read_run_config(path, ["critic.num_ranks=4"]))
        == []
    )


MODEL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}


def test_the_model_must_fit_the_critics_layout_too(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(OWN_POOL)
    wrong = ["critic.megatron.tensor_model_parallel_size=4"]
    (found,) = validate_model_config(read_run_config(path, wrong), MODEL)
    assert (
        "/model/config.json: num_key_value_heads (2) must be a multiple of"
        " critic.megatron.tensor_model_parallel_size (4)"
    ) in found  # fmt: skip
    assert validate_model_config(read_run_config(path), MODEL) == []


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, []),
        ({"num_key_value_heads": 1},
         [
             "num_key_value_heads (1) must be a multiple of"
             " critic.megatron.tensor_model_parallel_size (2)"
         ]),
        ({"num_hidden_layers": 3}, []),  # its pool has one stage
        ({"vocab_size": 33}, ["critic.path: vocab_size (33) must be that of model.path (32)"]),
        (None, ["is not a directory; correct it"]),
    ],
)  # fmt: skip
def test_a_critic_from_another_model(
    model: dict[str, int] | None, expected: list[str], tmp_path: Path
) -> None:
    for name, changes in (("model", {}), ("critic", model)):
        if changes is not None:
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(json.dumps(MODEL | changes))
            (tmp_path / name / "model.safetensors").touch()
            (tmp_path / name / "tokenizer.json").touch()
    path = tmp_path / "run.yaml"
    path.write_text(OWN_POOL)
    places = [f"model.path={tmp_path / 'model'}", f"critic.path={tmp_path / 'critic'}"]
    loaded = read_run_config(path, places)
    found = [str(problem) for problem in list_file_problems(loaded)]
    assert len(found) == len(expected) and all(
        text in problem for text, problem in zip(expected, found, strict=True)
    ), found
    assert validate_model_config(loaded, MODEL | {"num_key_value_heads": 2}) == []


SERVED = (
    VALID
    + "\nreward_model: {path: judge, weight: 0.5, mean: 1.0, served: {num_servers: 2, ending: x}}\n"
)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (
            ["reward_model.num_ranks=4"],
            (
                "reward_model.num_ranks (4) would be ignored because"
                " reward_model.served.num_servers is 2; remove reward_model.num_ranks, or set"
                " reward_model.served.num_servers to 0."
            ),
        ),
        (
            ["reward_model.granularity=step"],
            (
                "reward_model.granularity (step) would be ignored because"
                " reward_model.served.num_servers is 2"
            ),
        ),
        (["reward_model.param_offload=true"], "reward_model.param_offload (true) would be ignored"),
        (
            ["trainer.deterministic=true"],
            "a run with trainer.deterministic would not repeat; set"
            " reward_model.served.num_servers to 0",
        ),
        (
            ["reward_model.served.machines=[1,1]"],
            "reward_model.served.machines ([1, 1]) must name each machine once",
        ),
        (
            ["trainer.runtime=ray", "reward_model.served.machines=[0]"],
            "because trainer.runtime is ray; remove reward_model.served.machines",
        ),
        (
            ["reward.terms=[{name: reward_model, weight: 1.0, params: {}}]"],
            "a reward named reward_model would share its metrics",
        ),
    ],
)
def test_rules_of_a_served_reward_model(
    wrong: list[str], expected: str, problems: Problems
) -> None:
    assert problems(SERVED) == []
    assert any(expected in problem for problem in problems(SERVED, *wrong)), problems(
        SERVED, *wrong
    )


JUDGED = VALID + (
    "\nreward_model: {path: judge, served: {num_servers: 2, judge: {num_votes: 3,"
    " temperature: 0.7}}}\n"
)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (
            ["reward_model.mean=1.0"],
            "reward_model.mean (1.0) would be ignored because reward_model.served.judge is",
        ),
        (["reward_model.served.ending=x"], "reward_model.served.ending (x) would be ignored"),
        (
            ["reward_model.served.skip_special_tokens=false"],
            "reward_model.served.skip_special_tokens (false) would be ignored",
        ),
        (
            ["reward_model.served.judge.temperature=0"],
            "num_votes (3) at temperature 0 gives one vote many times",
        ),
        (["reward_model.served.judge={votes: 3}"], "reward_model.served.judge.votes"),
        (
            ["reward_model.served.judge={model: x}"],
            "reward_model.served.judge must not have model: the run starts",
        ),
    ],
)
def test_rules_of_a_judge(wrong: list[str], expected: str, problems: Problems) -> None:
    assert problems(JUDGED) == []
    assert any(expected in problem for problem in problems(JUDGED, *wrong)), problems(
        JUDGED, *wrong
    )


@pytest.mark.parametrize(
    ("architecture", "settings", "has_template", "expected"),
    [
        (
            "Qwen2ForCausalLM",
            "",
            True,
            "is a model that writes (Qwen2ForCausalLM), and has no score",
        ),
        ("Qwen2ForSequenceClassification", "", False, None),
        (
            "Qwen2ForSequenceClassification",
            "judge: {}",
            True,
            "gives numbers (Qwen2ForSequenceClassification), and writes",
        ),
        ("Qwen2ForCausalLM", "judge: {}", False, "has no chat template, by which a judge is asked"),
        ("Qwen2ForCausalLM", "judge: {}, args: {chat_template: chatml}", False, None),
        ("Qwen2ForCausalLM", "judge: {}", True, None),
    ],
)
def test_the_model_is_of_the_kind_that_is_asked(
    tmp_path: Path, architecture: str, settings: str, has_template: bool, expected: str | None
) -> None:
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (tmp_path / "judge" / "model.safetensors").touch()
    if has_template:
        (tmp_path / "judge" / "chat_template.jinja").touch()
    served = f"{{num_servers: 1, {settings}}}"
    (tmp_path / "run.yaml").write_text(
        VALID + f"\nreward_model: {{path: {tmp_path}/judge, served: {served}}}\n"
    )
    found = [
        str(one)
        for one in list_file_problems(read_run_config(tmp_path / "run.yaml"))
        if "/judge)" in str(one)
    ]
    assert len(found) == (expected is not None) and (expected or "") in "".join(found)


def test_settings_of_servers_that_are_not_there(problems: Problems) -> None:
    [problem] = problems(VALID + "\nreward_model: {path: judge, served: {judge: {num_votes: 1}}}\n")
    assert "reward_model.served.judge.num_votes (1) would be ignored" in problem
    [problem] = problems(VALID + "\nreward_model: {path: judge, served: {ending: x}}\n")
    assert (
        "reward_model.served.ending (x) would be ignored because"
        " reward_model.served.num_servers is 0"
    ) in problem


def test_what_reads_rewards_early_has_those_of_a_served_model(problems: Problems) -> None:
    """They are terms of the reward; what the model on ranks must not be read by, may read them."""
    for setting in (
        "algorithm.filter_groups.enable=true",
        "algorithm.adv_estimator=remax",
        "rollout.colocated=true",
    ):
        assert problems(SERVED, setting) == []
