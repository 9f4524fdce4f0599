"""The sections of what a step trains on: prompts, how the engines answer them, how the answers are scored."""

# ruff: noqa: RUF009  (doc() makes a field)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rlhf_megatron.config.schema.fields import (
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
    doc,
    exactly,
)

SAMPLED = "the loss needs log-probs of the distribution that was sampled (rollout.val_kwargs may be greedy)"
FULL = "the trainer's log-probs are those of the full distribution"


@dataclass(frozen=True)
class FewShotConfig:
    num_shots: int = doc(
        "solved training rows in front of each prompt; they are neither trained on nor held out",
        0,
        Interval(0, 1000, "solved rows lengthen every prompt"),
    )
    template: str = doc("text of a solved row; {prompt} and {label} stand in it", "{prompt}{label}\n")
    seed: int = doc("seed of the choice of rows", 0, SEED)


@dataclass(frozen=True)
class SourceConfig:
    """One of several data sources. What is null is as in the section `data`."""

    name: str = doc("name of the source, in metrics and tables")
    weight: float = doc(
        "share of the training prompts, relative to the other sources",
        1.0,
        Interval(1e-6, 1e6, WEIGHT.why, "leave the source out instead"),
    )
    task: str | None = doc("name of a registered generated task; null: files", None)
    task_params: dict[str, Any] = doc("parameters of the task, see its dataclass", factory=dict)
    train_files: tuple[str, ...] = doc("JSONL or parquet files, or saved datasets, with training prompts", ())
    val_files: tuple[str, ...] = doc("JSONL or parquet files, or saved datasets, with held-out prompts", ())
    prompt_template: str | None = doc("text around each prompt, which stands where {prompt} is", None)
    few_shot: FewShotConfig | None = doc("solved rows in front of each prompt", None)


@dataclass(frozen=True)
class DataConfig:
    task: str | None = doc("name of a registered generated task (addition, few_shot_addition); null: files", None)
    task_params: dict[str, Any] = doc("parameters of the task, see its dataclass", factory=dict)
    train_files: tuple[str, ...] = doc("JSONL or parquet files, or saved datasets, with training prompts", ())
    val_files: tuple[str, ...] = doc("JSONL or parquet files, or saved datasets, with held-out prompts", ())
    sources: tuple[SourceConfig, ...] = doc("several weighted sources, in place of task or files", ())
    prompt_key: str = doc("key of the prompt in a row: text, or a list of chat messages", "prompt")
    label_key: str = doc("key of the reference answer in a row", "answer")
    prompt_template: str = doc("text around each prompt, which stands where {prompt} is", "{prompt}")
    few_shot: FewShotConfig = doc("solved rows in front of each prompt", factory=FewShotConfig)
    apply_chat_template: bool = doc("make a prompt a chat in the tokenizer's template, ready for the answer", False)
    system_prompt: str | None = doc("first message of each chat; null: what the template does", None)
    apply_chat_template_kwargs: dict[str, Any] = doc("further variables of the chat template", factory=dict)
    max_prompt_length: int = doc("longest prompt, tokens", 512, TOKENS)
    max_response_length: int = doc("longest response, tokens", 512, TOKENS)
    filter_overlong_prompts: bool = doc("true: drop prompts over max_prompt_length; false: see truncation", False)
    truncation: Literal["error", "left", "right", "middle"] = doc(
        "prompts over max_prompt_length: refuse, or cut tokens off that side", "error"
    )
    skip_bad_rows: bool = doc("true: count and skip malformed rows; false: they are an error", False)
    train_batch_size: int = doc("prompts a step", 256, SAMPLES)
    shuffle: bool = doc("shuffle the prompts anew in each epoch", True)
    seed: int | None = doc("seed of the order of prompts; null: trainer.seed", None, SEED)


@dataclass(frozen=True)
class SamplingConfig:
    temperature: float = doc("0: greedy", 1.0, Interval(0, 100, "above, all tokens are as likely"))
    n: int = doc("samples a prompt", 1, SAMPLES)
    top_p: float = doc("draw among the likeliest tokens that hold this share of the probability; 1: off", 1.0, SHARE)
    top_k: int = doc("draw among so many of the likeliest tokens; -1: off", -1, Interval(-1))
    min_p: float = doc("leave out tokens less likely than this share of the likeliest one; 0: off", 0.0, FRACTION)


SIZES_OF_SGLANG = (
    ("tp-size", "tensor-parallel-size", "tp"),
    ("ep-size", "expert-parallel-size", "ep"),
    ("dp-size", "data-parallel-size", "dp"),
)
"""The arguments of SGLang that say how it cuts a model, each under all its names."""


@dataclass(frozen=True)
class SGLangConfig:
    python: str | None = doc("interpreter of the environment that has sglang; null: this one", None)
    args: dict[str, Any] = doc("SGLang server arguments, without the leading dashes", factory=dict)
    env: dict[str, str] = doc("environment of the server processes", factory=dict)
    api_key_file: str | None = doc("file with the --api-key of running servers (rollout.endpoints)", None)
    admin_api_key_file: str | None = doc("the same for --admin-api-key; null: as api_key_file", None)


@dataclass(frozen=True)
class RolloutConfig:
    engine: str = doc("name of a registered engine: local, the bundled server, or sglang, stock SGLang", "sglang")
    num_engines: int = doc("engine servers to start", 1, PROCESSES)
    engine_machines: tuple[int, ...] = doc(
        "numbers of the machines on which engines are started in turns; from trainer.nnodes on they have no ranks; ():"
        " all that weights reach",
        (),
    )
    endpoints: tuple[str, ...] = doc("URLs of running SGLang servers to use instead of starting some", ())
    router: str = doc(
        "registered balancer, which spreads requests: balancer, the run itself, or sglang, sglang-router", "balancer"
    )
    num_drivers: int | None = doc(
        "processes on each machine with engines, which ask these and read their answers; 0: the controller does; null:"
        " one for 32 engines, at most one for 4 cores of the controller's machine, none in a run of fewer engines",
        None,
        Interval(0, 64, "a few keep up with thousands of engines"),
    )
    colocated: bool = doc("engines and trainer take turns with the same devices", False)
    dtype: Literal["float32", "bfloat16"] | None = doc("type of the engine's weights; null: model.dtype", None)
    quantization: Literal["fp8"] | None = doc(
        "fp8: the engine holds matrices of attention, MLPs and experts in FP8, with a scale for each 128 x 128", None
    )
    n: int = doc("samples a prompt (the group size)", 8, SAMPLES)
    temperature: float = doc(
        "sampling temperature; the trainer's log-probs use the same",
        1.0,
        Interval(0.01, 100, "above, all tokens are as likely", SAMPLED),
    )
    top_p: float = doc("is off", 1.0, exactly(1.0, FULL))
    top_k: int = doc("is off", -1, exactly(-1, FULL))
    min_p: float = doc("is off", 0.0, exactly(0.0, FULL))
    stop: tuple[str, ...] = doc("strings of one token each that end a response, beside the end-of-sequence token", ())
    max_num_seqs: int = doc("sequences a local engine decodes at once", 256, COUNT)
    max_num_batched_tokens: int = doc("tokens of key-value cache that a local engine may hold", 131072, COUNT)
    val_kwargs: SamplingConfig = doc("sampling for evaluation", factory=lambda: SamplingConfig(temperature=0.0))
    request_timeout_s: float = doc("deadline of one generate request, seconds", 600.0, SECONDS)
    request_retries: int = doc("times a failed request is sent again, to another engine where there is one", 2, RETRIES)
    startup_timeout_s: float = doc("deadline for a server to become healthy, seconds", 600.0, SECONDS)
    health_interval_s: float = doc("seconds between health checks of an engine while it generates", 10.0, SECONDS)
    health_timeout_s: float = doc(
        "an engine that does not answer a health check for so long is killed, seconds", 30.0, SECONDS
    )
    max_engine_restarts: int = doc(
        "engines started again between a start of the run, or of `serve`, and its end, counted over all of them;"
        " raise it for what serves for weeks",
        3,
        RETRIES,
    )
    update_weights_bucket_megabytes: int = doc(
        "size of one of the two weight-sync buffers a sender has, MiB", 512, MEBIBYTES
    )
    weight_transport: Literal["tensor", "process_group", "disk"] = doc(
        "how weights get to the engines: memory of the same host, process groups over the network, or files", "tensor"
    )
    transfer_dir: str | None = doc(
        "directory of weight buckets; null: /dev/shm where it is large enough, under disk: the run directory", None
    )
    routes_gb: float = doc(
        "GB of files of routes (actor.router_replay: r3) that may stand on a machine; 0: what its disk has room for",
        0.0,
        FACTOR,
    )
    sglang: SGLangConfig = doc("used when engine is sglang", factory=SGLangConfig)


@dataclass(frozen=True)
class RewardTermConfig:
    name: str = doc("name of a registered reward")
    weight: float = doc("its score is multiplied by this", 1.0, WEIGHT)
    params: dict[str, Any] = doc("parameters of the reward, see its dataclass", factory=dict)


@dataclass(frozen=True)
class RewardConfig:
    name: str = doc("name of a registered reward", "exact_match")
    params: dict[str, Any] = doc("parameters of the reward, see its dataclass", factory=dict)
    by_source: dict[str, RewardTermConfig] = doc("data source -> the reward of its samples instead", factory=dict)
    terms: tuple[RewardTermConfig, ...] = doc("further rewards, added to that one for every sample", ())
    num_workers: int = doc(
        "processes for rewards that run in processes of their own, which can be killed", 32, PROCESSES
    )
    timeout_s: float = doc(
        "limit of one sample in such a process, seconds; waiting for a CPU does not count", 2.0, SECONDS
    )
    max_error_rate: float = doc(
        "stop when more than this share of a step's rewards failed, the policy not to blame", 0.1, FRACTION
    )
