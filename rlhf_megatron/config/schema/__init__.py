"""The typed sections of a run. Field defaults stand here and nowhere else; call sites never
supply a fallback.

Names are those that the field uses, where it has one (docs/config.md). The range of a number stands
beside its default. Parameters of registered parts (estimators, losses, rewards, tasks) are free
mappings here; they are checked against the part's own dataclass before anything starts.
"""

# ruff: noqa: RUF009  (doc() makes a field)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rlhf_megatron.config.schema.rollout_sections import (
    DataConfig,
    DataSourceConfig,
    EnvironmentConfig,
    FewShotConfig,
    RewardConfig,
    RewardTermConfig,
    RolloutConfig,
    SamplingConfig,
    SGLangConfig,
)
from rlhf_megatron.config.schema.setting_fields import (
    COUNT,
    FACTOR,
    FRACTION,
    NATS,
    POSITIVE,
    PROCESSES,
    RANKS,
    SECONDS,
    SEED,
    Interval,
    declare_setting,
)
from rlhf_megatron.config.schema.training_sections import (
    ActorConfig,
    CriticConfig,
    FSDPConfig,
    KernelsConfig,
    LoRAConfig,
    MegatronConfig,
    ModelConfig,
    OptimConfig,
    PolicyLossConfig,
    ReferenceConfig,
    RewardModelConfig,
    ServedRewardModelConfig,
    SFTConfig,
    TeacherTermConfig,
    WarmupConfig,
)


@dataclass(frozen=True)
class KLControlConfig:
    type: Literal["fixed", "adaptive"] = declare_setting(
        "adaptive: the coefficient follows target_kl", "fixed"
    )
    kl_coef: float = declare_setting("weight of the KL term, at first", 0.001, FACTOR)
    target_kl: float = declare_setting("with adaptive: nats a response", 0.1, POSITIVE)
    horizon: int = declare_setting(
        "with adaptive: samples over which the coefficient moves", 10000, COUNT
    )


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Importance weights and rejection for tokens that another policy sampled: r = trainer /
    engine probability.

    What is null is as in the preset.
    """

    preset: str = declare_setting(
        "name of a combination of the settings below; disabled: metrics only", "disabled"
    )
    mode: Literal["decoupled", "bypass"] | None = declare_setting(
        (
            "decoupled: the trainer's own log-probs are the old policy; bypass: the engine's are,"
            " and r follows the policy"
        ),
        None,
    )
    loss_type: Literal["ppo_clip", "reinforce"] | None = declare_setting(
        "with bypass: the value that actor.policy_loss.loss_mode must have", None
    )
    rollout_is: Literal["token", "sequence"] | None = declare_setting(
        "importance weights of tokens or of whole sequences", None
    )
    rollout_is_threshold: str | None = declare_setting(
        "one number: weights are cut there; LOW_HIGH: weights outside are 0 (IcePop)", None
    )
    rollout_is_batch_normalize: bool | None = declare_setting(
        "divide the weights by their mean over the step", None
    )
    rollout_rs: tuple[str, ...] | None = declare_setting(
        (
            "rejection filters, all must pass: token_k1, token_k2, token_k3, seq_sum_k1 .. k3,"
            " seq_mean_k1 .. k3, seq_max_k2, seq_max_k3"
        ),
        None,
    )
    rollout_rs_threshold: tuple[str, ...] | None = declare_setting(
        (
            "one a filter: of k1 bounds of the ratio itself, LOW_HIGH (one number x: 1/x_x); of k2,"
            " k3 an upper bound"
        ),
        None,
    )
    rollout_token_veto_threshold: float | None = declare_setting(
        "a token with r below it drops its sequence", None, FRACTION
    )


@dataclass(frozen=True)
class FilterGroupsConfig:
    enable: bool = declare_setting(
        "leave out groups whose samples all have the same metric, and generate others (DAPO)", False
    )
    metric: str = declare_setting(
        (
            "main_reward, the reward of the sample's source without terms (where that is zero: all"
            " of the reward); reward, all of it; or one of its parts, and where a sample lacks that"
            " its reward"
        ),
        "main_reward",
    )
    max_num_gen_batches: int = declare_setting(
        "batches of data.train_batch_size prompts that a step may generate", 10, COUNT
    )


@dataclass(frozen=True)
class PFPPOConfig:
    enable: bool = declare_setting(
        "draw the samples that train with replacement, by their reward (PF-PPO)", False
    )
    reweight_method: Literal["pow", "max_min", "max_random"] = declare_setting(
        "how rewards become chances", "pow"
    )
    weight_pow: float = declare_setting("with pow: exponent of |reward|", 2.0, FACTOR)


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: str = declare_setting("name of a registered advantage estimator", "grpo")
    params: dict[str, Any] = declare_setting(
        "parameters of the estimator, see its dataclass", factory=dict
    )
    use_kl_in_reward: bool = declare_setting(
        "subtract a KL term against the reference from each token's reward", False
    )
    kl_penalty: Literal["k1", "abs", "k2", "k3"] = declare_setting("estimator of that term", "k1")
    kl_ctrl: KLControlConfig = declare_setting("weight of that term", factory=KLControlConfig)
    rollout_correction: RolloutCorrectionConfig = declare_setting(
        "off-policy tokens", factory=RolloutCorrectionConfig
    )
    filter_groups: FilterGroupsConfig = declare_setting(
        "groups without signal", factory=FilterGroupsConfig
    )
    pf_ppo: PFPPOConfig = declare_setting("resampling by reward", factory=PFPPOConfig)


@dataclass(frozen=True)
class CheckConfig:
    """Engine against trainer on the sampled tokens at step 0. A run stops past a threshold."""

    log_prob_max_abs_diff: float = declare_setting(
        "float32: bound on the largest |difference|, nats", 1e-4, NATS
    )
    log_prob_p50_abs_diff: float = declare_setting(
        "bfloat16: bound on the median |difference|, nats", 2e-2, NATS
    )
    log_prob_p99_abs_diff: float = declare_setting(
        "bfloat16: bound on the 99th percentile of |difference|, nats", 0.3, NATS
    )
    log_prob_mean_kl: float = declare_setting(
        "bfloat16: bound on the mean k3 estimate of KL(engine || trainer), nats", 1e-2, NATS
    )
    probe_prompts: int = declare_setting(
        "prompts that engine and trainer score after a sync, for an engine without digests",
        4,
        COUNT,
    )


@dataclass(frozen=True)
class TrainerConfig:
    experiment_name: str = declare_setting(
        "name of the run; its directory is default_local_dir/experiment_name", "run"
    )
    project_name: str = declare_setting("project of the run in Weights & Biases", "rlhf_megatron")
    default_local_dir: str = declare_setting("parent of the run directory", "runs")
    runtime: Literal["inline", "torchrun", "ray"] = declare_setting(
        "one process; one process a rank; or the same as actors of a Ray cluster", "torchrun"
    )
    nnodes: int = declare_setting("machines", 1, RANKS)
    n_gpus_per_node: int = declare_setting(
        "ranks (GPUs, or processes on a machine without) a machine", 8, RANKS
    )
    device: Literal["auto", "cpu", "cuda"] = declare_setting("auto: cuda where available", "auto")
    device_peak_tflops: float | None = declare_setting(
        (
            "dense bfloat16 peak of a device, TFLOP/s, that perf/mfu is a share of; null: of known"
            " devices by their name, and no perf/mfu on others"
        ),
        None,
        POSITIVE,
    )
    seed: int = declare_setting(
        "seed of everything that is random, in the controller and each rank", 1, SEED
    )
    total_training_steps: int = declare_setting("steps of the loop", 100)
    critic_warmup: int = declare_setting(
        "first steps of the loop in which only the critic is updated", 0
    )
    val_before_train: bool = declare_setting("evaluate before the first step", True)
    test_freq: int = declare_setting("steps between evaluations; 0: only before and after", 10)
    test_samples: int | None = declare_setting(
        "held-out items of an evaluation between steps; null: all", None, COUNT
    )
    save_hf: bool = declare_setting(
        "write the trained weights in Hugging Face layout at the end", False
    )
    save_freq: int = declare_setting("steps between checkpoints; 0: none before the end", 0)
    save_last: Literal["state", "weights", "none"] = declare_setting(
        (
            "kept after the last step and when the run is told to stop: state: a checkpoint to go"
            " on from, or to export; weights: those in Hugging Face layout"
        ),
        "state",
    )
    keep_best: str | None = declare_setting(
        (
            "metric, such as val/accuracy, whose best value among the checkpoints (the smallest of"
            " a loss) keeps that one beside max_ckpt_to_keep; null: none is"
        ),
        None,
    )
    async_save: bool = declare_setting("write a checkpoint's files while the run goes on", True)
    max_ckpt_to_keep: int = declare_setting("newest checkpoints that are kept; 0: all", 3)
    save_failure: Literal["continue", "stop"] = declare_setting(
        "what to do after a checkpoint that could not be written", "continue"
    )
    resume_mode: Literal["auto", "disable", "resume_path"] = declare_setting(
        (
            "auto: go on from the newest good checkpoint of the run directory, where there is one;"
            " disable: start anew; resume_path: start a new run directory from resume_from_path"
        ),
        "auto",
    )
    resume_from_path: str | None = declare_setting(
        "checkpoint directory of resume_mode resume_path", None
    )
    stop_grace_s: float = declare_setting(
        "time for the step at hand and a checkpoint after SIGTERM or SIGUSR1, seconds",
        60.0,
        SECONDS,
    )
    deterministic: bool = declare_setting(
        (
            "repeat bit for bit, also over a resume on one layout: closed decoding batches,"
            " deterministic torch algorithms"
        ),
        False,
    )
    max_consecutive_skips: int = declare_setting(
        "stop after this many optimizer steps in a row with non-finite gradients", 3, COUNT
    )
    capsules_kept: int = declare_setting(
        "steps with non-finite numbers whose weights and batch are kept for --replay", 1
    )
    desync_freq: int = declare_setting(
        "steps between comparisons of parameters that several ranks hold; 0: never", 10
    )
    logger: tuple[str, ...] = declare_setting(
        "names of registered loggers: where metrics go", ("console", "jsonl", "tensorboard")
    )
    samples_kept: int = declare_setting(
        "samples of a step in samples.jsonl (best, worst and random ones), and of an evaluation"
        " in held_out_samples.jsonl",
        6,
    )
    record: bool = declare_setting(
        "write every step's batches under the run directory, for --replay", False
    )
    stage_timeout_s: float = declare_setting(
        "deadline of one call to the hosts, and of a stage of a step, seconds", 1800.0, SECONDS
    )
    stage_timeouts_s: dict[str, float] = declare_setting(
        "stage of a step -> its own deadline, seconds", bounds=SECONDS, factory=dict
    )


@dataclass(frozen=True)
class ScheduleConfig:
    name: str = declare_setting(
        "who works when: synchronous, streaming, one_step_off or asynchronous", "synchronous"
    )
    params: dict[str, Any] = declare_setting(
        "parameters of the schedule, see its dataclass", factory=dict
    )


@dataclass(frozen=True)
class RayConfig:
    """Settings of trainer.runtime ray."""

    address: str | None = declare_setting(
        (
            "address of a running cluster (HOST:PORT, or auto); null: that of this job, else"
            " one made here"
        ),
        None,
    )
    num_cpus_per_rank: float = declare_setting("CPUs that Ray reserves for a rank", 1.0, FACTOR)
    num_cpus_per_engine: float = declare_setting(
        "CPUs that Ray reserves for an engine", 1.0, FACTOR
    )
    reward_actors: int = declare_setting(
        (
            "actors that share the reward.num_workers processes of rewards, on any machine; 0: the"
            " driver's has all"
        ),
        0,
        Interval(0, PROCESSES.high, PROCESSES.high_reason),
    )
    num_cpus_per_reward_actor: float = declare_setting(
        "CPUs that Ray reserves for one of these", 1.0, FACTOR
    )
    placement: Literal["pack", "spread"] = declare_setting(
        "ranks of a pool on as few machines as there may be, or on as many", "pack"
    )
    start_timeout_s: float = declare_setting(
        "deadline for the cluster to have a place for every pool, seconds", 600.0, SECONDS
    )
    dashboard: bool = declare_setting(
        "start Ray's dashboard, on the loopback address, of a cluster made here", False
    )


@dataclass(frozen=True)
class RunConfig:
    """Everything that one run is made of."""

    @property
    def is_float32_throughout(self) -> bool:
        """Return whether trainers and engines compute with the same float32 weights, without
        quantization.
        """
        is_float32 = self.model.dtype == "float32" and self.rollout.dtype in (None, "float32")
        return is_float32 and self.rollout.quantization is None

    job: Literal["train", "sft", "reward-model"] = declare_setting(
        (
            "train: reinforcement learning; sft: supervised and preference training; reward-model:"
            " a model that scores answers, from pairs. The command of that name runs it"
        ),
        "train",
    )
    plugins: tuple[str, ...] = declare_setting(
        (
            "modules, or files (x.py, counted from the file that names them), of your own that"
            " register parts"
        ),
        (),
    )
    model: ModelConfig = declare_setting("the policy", factory=ModelConfig)
    data: DataConfig = declare_setting("prompts", factory=DataConfig)
    actor: ActorConfig = declare_setting("policy training", factory=ActorConfig)
    critic: CriticConfig = declare_setting(
        "value model, where the advantage estimator needs values", factory=CriticConfig
    )
    reference: ReferenceConfig = declare_setting("frozen reference model", factory=ReferenceConfig)
    rollout: RolloutConfig = declare_setting("generation", factory=RolloutConfig)
    reward: RewardConfig = declare_setting("scoring", factory=RewardConfig)
    reward_model: RewardModelConfig = declare_setting(
        "a frozen model that scores samples too", factory=RewardModelConfig
    )
    algorithm: AlgorithmConfig = declare_setting("advantages", factory=AlgorithmConfig)
    warmup: WarmupConfig = declare_setting("supervised steps before RL", factory=WarmupConfig)
    sft: SFTConfig = declare_setting("the job sft", factory=SFTConfig)
    checks: CheckConfig = declare_setting("stop thresholds", factory=CheckConfig)
    schedule: ScheduleConfig = declare_setting("who works when", factory=ScheduleConfig)
    trainer: TrainerConfig = declare_setting("the run", factory=TrainerConfig)
    ray: RayConfig = declare_setting("the cluster, where trainer.runtime is ray", factory=RayConfig)
