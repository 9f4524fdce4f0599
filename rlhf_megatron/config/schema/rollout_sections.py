"""The sections of what a step trains on: prompts, how the engines answer them, how the
answers are scored.
"""

# ruff: noqa: RUF009  (doc() makes a field)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rlhf_megatron.config.schema.setting_fields import (
    COUNT,
    FACTOR,
    FRACTION,
    MEBIBYTES,
    PROCESSES,
    RETRIES,
    SAMPLES,
    SECONDS,
    SEED,
    SHARE,
    TOKENS,
    WEIGHT,
    Interval,
    declare_setting,
    make_exact_interval,
)

SAMPLED = (
    "the loss needs log-probs of the distribution that was sampled (rollout.val_kwargs"
    " may be greedy)"
)
FULL = "the trainer's log-probs are those of the full distribution"

SIZES_OF_SGLANG = (
    ("tp-size", "tensor-parallel-size", "tp"),
    ("ep-size", "expert-parallel-size", "ep"),
    ("dp-size", "data-parallel-size", "dp"),
)
"""The arguments of SGLang that say how it cuts a model, each under all its names."""


@dataclass(frozen=True)
class FewShotConfig:
    num_shots: int = declare_setting(
        "solved training rows in front of each prompt; they are neither trained on nor held out",
        0,
        Interval(0, 1000, "solved rows lengthen every prompt"),
    )
    template: str = declare_setting(
        "text of a solved row; {prompt} and {label} stand in it", "{prompt}{label}\n"
    )
    seed: int = declare_setting("seed of the choice of rows", 0, SEED)


@dataclass(frozen=True)
class DataSourceConfig:
    """One of several data sources. What is null is as in the section `data`."""

    name: str = declare_setting("name of the source, in metrics and tables")
    weight: float = declare_setting(
        "share of the training prompts, relative to the other sources",
        1.0,
        Interval(1e-6, 1e6, WEIGHT.high_reason, "leave the source out instead"),
    )
    task: str | None = declare_setting("name of a registered generated task; null: files", None)
    task_params: dict[str, Any] = declare_setting(
        "parameters of the task, see its dataclass", factory=dict
    )
    train_files: tuple[str, ...] = declare_setting(
        "JSONL or parquet files, or saved datasets, with training prompts", ()
    )
    val_files: tuple[str, ...] = declare_setting(
        "JSONL or parquet files, or saved datasets, with held-out prompts", ()
    )
    prompt_template: str | None = declare_setting(
        "text around each prompt, which stands where {prompt} is", None
    )
    few_shot: FewShotConfig | None = declare_setting("solved rows in front of each prompt", None)


@dataclass(frozen=True)
class DataConfig:
    task: str | None = declare_setting(
        "name of a registered generated task (addition, few_shot_addition); null: files", None
    )
    task_params: dict[str, Any] = declare_setting(
        "parameters of the task, see its dataclass", factory=dict
    )
    train_files: tuple[str, ...] = declare_setting(
        "JSONL, JSON or parquet files, or saved datasets, with training prompts", ()
    )
    val_files: tuple[str, ...] = declare_setting(
        "JSONL, JSON or parquet files, or saved datasets, with held-out prompts", ()
    )
    sources: tuple[DataSourceConfig, ...] = declare_setting(
        "several weighted sources, in place of task or files", ()
    )
    prompt_key: str = declare_setting(
        "key of the prompt in a row: text, or a list of chat messages", "prompt"
    )
    label_key: str = declare_setting("key of the reference answer in a row", "answer")
    extra_columns: tuple[str, ...] | None = declare_setting(
        (
            "other columns that rewards read, also with points (extra_info.index); each must be"
            " carried. null: all that JSON can hold"
        ),
        None,
    )
    prompt_template: str = declare_setting(
        "text around each prompt, which stands where {prompt} is", "{prompt}"
    )
    few_shot: FewShotConfig = declare_setting(
        "solved rows in front of each prompt", factory=FewShotConfig
    )
    apply_chat_template: bool = declare_setting(
        "make a prompt a chat in the tokenizer's template, ready for the answer", False
    )
    system_prompt: str | None = declare_setting(
        "first message of each chat; null: what the template does", None
    )
    apply_chat_template_kwargs: dict[str, Any] = declare_setting(
        "further variables of the chat template", factory=dict
    )
    add_special_tokens: bool = declare_setting(
        (
            "write what the tokenizer writes before plain text, such as <s>, and around whole"
            " documents; a chat template writes its own"
        ),
        True,
    )
    max_prompt_length: int = declare_setting("longest prompt, tokens", 512, TOKENS)
    max_response_length: int = declare_setting("longest response, tokens", 512, TOKENS)
    filter_overlong_prompts: bool = declare_setting(
        "true: drop prompts over max_prompt_length; false: see truncation", False
    )
    truncation: Literal["error", "left", "right", "middle"] = declare_setting(
        "prompts over max_prompt_length: refuse, or cut tokens off that side", "error"
    )
    skip_bad_rows: bool = declare_setting(
        "true: count and skip malformed rows; false: they are an error", False
    )
    train_batch_size: int = declare_setting("prompts a step", 256, SAMPLES)
    shuffle: bool = declare_setting("shuffle the prompts anew in each epoch", True)
    seed: int | None = declare_setting(
        "seed of the order of prompts; null: trainer.seed", None, SEED
    )


@dataclass(frozen=True)
class SamplingConfig:
    temperature: float = declare_setting(
        "0: greedy", 1.0, Interval(0, 100, "above, all tokens are as likely")
    )
    n: int = declare_setting("samples a prompt", 1, SAMPLES)
    top_p: float = declare_setting(
        "draw among the likeliest tokens that hold this share of the probability; 1: off",
        1.0,
        SHARE,
    )
    top_k: int = declare_setting(
        "draw among so many of the likeliest tokens; -1: off", -1, Interval(-1)
    )
    min_p: float = declare_setting(
        "leave out tokens less likely than this share of the likeliest one; 0: off", 0.0, FRACTION
    )


@dataclass(frozen=True)
class SGLangConfig:
    python: str | None = declare_setting(
        "interpreter of the environment that has sglang; null: this one", None
    )
    args: dict[str, Any] = declare_setting(
        "SGLang server arguments, without the leading dashes", factory=dict
    )
    env: dict[str, str] = declare_setting("environment of the server processes", factory=dict)
    api_key_file: str | None = declare_setting(
        "file with the --api-key of running servers (rollout.endpoints)", None
    )
    admin_api_key_file: str | None = declare_setting(
        "the same for --admin-api-key; null: as api_key_file", None
    )


@dataclass(frozen=True)
class EnvironmentConfig:
    """Episodes of several turns. The column `environment` of a row, {name, params}, overrides name
    and params for that row.
    """

    name: str | None = declare_setting(
        "registered environment that a sample talks with; null: a sample is one answer", None
    )
    params: dict[str, Any] = declare_setting(
        "parameters of the environment, see its dataclass", factory=dict
    )
    max_turns: int = declare_setting("turns of the policy in an episode", 8, COUNT)
    max_tokens: int | None = declare_setting(
        (
            "tokens of an episode behind its first prompt, the environment's included; null:"
            " max_turns x data.max_response_length"
        ),
        None,
        TOKENS,
    )
    timeout_s: float = declare_setting(
        "deadline of an episode, seconds: its start, its turns and its judgement", 600.0, SECONDS
    )
    num_workers: int = declare_setting("processes that run environments", 4, PROCESSES)
    max_concurrent: int = declare_setting("episodes that go on at once", 256, COUNT)
    min_group: int | None = declare_setting(
        (
            "scored episodes with which the group of a prompt closes, the others are aborted; null:"
            " all"
        ),
        None,
    )
    history: Literal["keep"] = declare_setting(
        "keep: earlier turns stay as they were sampled, whatever the template does with them",
        "keep",
    )
    on_overflow: Literal["end"] = declare_setting(
        "end: an episode without room for another turn is over", "end"
    )
    reward_weight: float = declare_setting(
        "the environment's reward is multiplied by this", 1.0, WEIGHT
    )
    scorer_weight: float = declare_setting(
        (
            "weight of the section reward where the environment rewards too; an environment that"
            " gives no reward leaves it to the section reward alone"
        ),
        0.0,
        WEIGHT,
    )


@dataclass(frozen=True)
class RolloutConfig:
    engine: str = declare_setting(
        "name of a registered engine: local, the bundled server, or sglang, stock SGLang", "sglang"
    )
    num_engines: int = declare_setting("engine servers to start", 1, PROCESSES)
    engine_machines: tuple[int, ...] = declare_setting(
        (
            "numbers of the machines on which engines are started in turns; from trainer.nnodes on"
            " they have no ranks; (): all that weights reach"
        ),
        (),
    )
    endpoints: tuple[str, ...] = declare_setting(
        "URLs of running SGLang servers to use instead of starting some", ()
    )
    router: str = declare_setting(
        (
            "registered balancer, which spreads requests: balancer, the run itself, or"
            " sglang, sglang-router"
        ),
        "balancer",
    )
    num_drivers: int | None = declare_setting(
        (
            "processes on each machine with engines, which ask these and read their answers; 0: the"
            " controller does; null: one for 32 engines, at most one for 4 cores of the"
            " controller's machine, none in a run of fewer engines"
        ),
        None,
        Interval(0, 64, "a few keep up with thousands of engines"),
    )
    colocated: bool = declare_setting("engines and trainer take turns with the same devices", False)
    dtype: Literal["float32", "bfloat16"] | None = declare_setting(
        "type of the engine's weights; null: model.dtype", None
    )
    quantization: Literal["fp8"] | None = declare_setting(
        (
            "fp8: the engine holds matrices of attention, MLPs and experts in FP8, with a scale for"
            " each 128 x 128"
        ),
        None,
    )
    n: int = declare_setting("samples a prompt (the group size)", 8, SAMPLES)
    temperature: float = declare_setting(
        "sampling temperature; the trainer's log-probs use the same",
        1.0,
        Interval(0.01, 100, "above, all tokens are as likely", SAMPLED),
    )
    top_p: float = declare_setting("is off", 1.0, make_exact_interval(1.0, FULL))
    top_k: int = declare_setting("is off", -1, make_exact_interval(-1, FULL))
    min_p: float = declare_setting("is off", 0.0, make_exact_interval(0.0, FULL))
    stop: tuple[str, ...] = declare_setting(
        "strings of one token each that end a response, beside the end-of-sequence token", ()
    )
    max_num_seqs: int = declare_setting("sequences a local engine decodes at once", 256, COUNT)
    max_num_batched_tokens: int = declare_setting(
        "tokens of key-value cache that a local engine may hold", 131072, COUNT
    )
    val_kwargs: SamplingConfig = declare_setting(
        "sampling for evaluation", factory=lambda: SamplingConfig(temperature=0.0)
    )
    request_timeout_s: float = declare_setting(
        "deadline of one generate request, seconds", 600.0, SECONDS
    )
    request_retries: int = declare_setting(
        "times a failed request is sent again, to another engine where there is one", 2, RETRIES
    )
    startup_timeout_s: float = declare_setting(
        "deadline for a server to become healthy, seconds", 600.0, SECONDS
    )
    health_interval_s: float = declare_setting(
        "seconds between health checks of an engine while it generates", 10.0, SECONDS
    )
    health_timeout_s: float = declare_setting(
        (
            "an engine whose HTTP does not answer for so long is killed, seconds; its scheduler has"
            " twice the time, or ten times its longest step"
        ),
        30.0,
        SECONDS,
    )
    max_engine_restarts: int = declare_setting(
        (
            "engines started again, counted over all of them; the count begins anew after ten"
            " minutes without a failure"
        ),
        3,
        RETRIES,
    )
    update_weights_bucket_megabytes: int = declare_setting(
        "size of one of the two weight-sync buffers a sender has, MiB", 512, MEBIBYTES
    )
    weight_transport: Literal["tensor", "process_group", "disk"] = declare_setting(
        (
            "how weights get to the engines: memory of the same host, process groups over the"
            " network, or files"
        ),
        "tensor",
    )
    transfer_dir: str | None = declare_setting(
        (
            "directory of weight buckets; null: /dev/shm where it is large enough, under disk: the"
            " run directory"
        ),
        None,
    )
    routes_gb: float = declare_setting(
        (
            "GB of files of routes (actor.router_replay: r3) that may stand on a machine; 0: what"
            " its disk has room for"
        ),
        0.0,
        FACTOR,
    )
    sglang: SGLangConfig = declare_setting("used when engine is sglang", factory=SGLangConfig)
    environment: EnvironmentConfig = declare_setting(
        "what samples talk with, over several turns", factory=EnvironmentConfig
    )


@dataclass(frozen=True)
class RewardTermConfig:
    name: str = declare_setting("name of a registered reward")
    weight: float = declare_setting("its score is multiplied by this", 1.0, WEIGHT)
    params: dict[str, Any] = declare_setting(
        "parameters of the reward, see its dataclass", factory=dict
    )


@dataclass(frozen=True)
class RewardConfig:
    name: str = declare_setting("name of a registered reward", "exact_match")
    params: dict[str, Any] = declare_setting(
        "parameters of the reward, see its dataclass", factory=dict
    )
    by_source: dict[str, RewardTermConfig] = declare_setting(
        "data source -> the reward of its samples instead", factory=dict
    )
    terms: tuple[RewardTermConfig, ...] = declare_setting(
        "further rewards, added to that one for every sample", ()
    )
    num_workers: int = declare_setting(
        "processes for rewards that run in processes of their own, which can be killed",
        32,
        PROCESSES,
    )
    timeout_s: float = declare_setting(
        "limit of one sample in such a process, seconds; waiting for a CPU does not count",
        2.0,
        SECONDS,
    )
    max_error_rate: float = declare_setting(
        "stop when more than this share of a step's rewards failed, the policy not to blame",
        0.1,
        FRACTION,
    )
