"""The interval in which each number of a configuration must lie. What is not listed must not be negative."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.keys import leaf_keys, value_of
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.source import Loaded


@dataclass(frozen=True)
class Interval:
    """[low, high], or open at an end. Both ends None: any number."""

    low: float | None = 0
    high: float | None = None
    is_low_open: bool = False
    is_high_open: bool = False

    def __contains__(self, value: float) -> bool:
        if self.low is not None and (value <= self.low if self.is_low_open else value < self.low):
            return False
        return self.high is None or (value < self.high if self.is_high_open else value <= self.high)

    def __str__(self) -> str:
        low = f"{'above' if self.is_low_open else 'at least'} {self.low}" if self.low is not None else ""
        high = f"{'below' if self.is_high_open else 'at most'} {self.high}" if self.high is not None else ""
        return " and ".join(part for part in (low, high) if part)


ANY = Interval(None)
COUNT = Interval(1)
POSITIVE = Interval(0, is_low_open=True)
SECONDS = Interval(0, math.inf, is_low_open=True, is_high_open=True)
FRACTION = Interval(0, 1)
BELOW_ONE = Interval(0, 1, is_high_open=True)
AMOUNT = Interval(0, math.inf, is_high_open=True)

OPTIM = {
    "lr": BELOW_ONE,
    "min_lr": BELOW_ONE,
    "lr_decay_steps": COUNT,
    "weight_decay": FRACTION,
    "weight_decay_end": FRACTION,
    "betas": BELOW_ONE,
    "eps": Interval(0, 1, is_low_open=True),
    "clip_grad": Interval(0, math.inf, is_high_open=True),
}
MEGATRON = {
    "tensor_model_parallel_size": COUNT,
    "pipeline_model_parallel_size": COUNT,
    "virtual_pipeline_model_parallel_size": Interval(2),
    "context_parallel_size": COUNT,
    "recompute_num_layers": COUNT,
}
INTERVALS = {
    "data.max_prompt_length": COUNT,
    "data.max_response_length": COUNT,
    "data.train_batch_size": COUNT,
    "actor.mini_batch_size": COUNT,
    "actor.ppo_epochs": COUNT,
    "actor.ppo_max_token_len_per_gpu": COUNT,
    "actor.entropy_coeff": BELOW_ONE,
    "actor.loss_scale_factor": POSITIVE,
    "actor.kl_loss_coef": Interval(0, math.inf, is_high_open=True),
    "actor.log_prob_chunk_size": COUNT,
    "critic.value_head_init_std": BELOW_ONE,
    "critic.mini_batch_size": COUNT,
    "critic.ppo_epochs": COUNT,
    "critic.ppo_max_token_len_per_gpu": COUNT,
    "critic.cliprange_value": Interval(0, math.inf, is_high_open=True),
    "reference.max_token_len_per_gpu": COUNT,
    "rollout.num_engines": COUNT,
    "rollout.n": COUNT,
    "rollout.temperature": ANY,  # these four have rules of their own
    "rollout.top_p": ANY,
    "rollout.top_k": ANY,
    "rollout.min_p": ANY,
    "rollout.max_num_seqs": COUNT,
    "rollout.max_num_batched_tokens": COUNT,
    "rollout.val_kwargs.temperature": Interval(0, math.inf, is_high_open=True),
    "rollout.val_kwargs.n": COUNT,
    "rollout.val_kwargs.top_p": Interval(0, 1, is_low_open=True),
    "rollout.val_kwargs.top_k": Interval(-1),
    "rollout.val_kwargs.min_p": FRACTION,
    "rollout.request_timeout_s": SECONDS,
    "rollout.startup_timeout_s": SECONDS,
    "rollout.update_weights_bucket_megabytes": COUNT,
    "reward.num_workers": COUNT,
    "reward.timeout_s": SECONDS,
    "reward.max_error_rate": FRACTION,
    "algorithm.kl_ctrl.kl_coef": Interval(0, math.inf, is_high_open=True),
    "algorithm.kl_ctrl.target_kl": POSITIVE,
    "algorithm.kl_ctrl.horizon": COUNT,
    "algorithm.filter_groups.max_num_gen_batches": COUNT,
    "algorithm.pf_ppo.weight_pow": Interval(0, math.inf, is_high_open=True),
    "warmup.batch_size": COUNT,
    "warmup.stop_accuracy": Interval(0, 1, is_low_open=True),
    "warmup.test_freq": COUNT,
    "warmup.test_samples": COUNT,
    "checks.log_prob_max_abs_diff": POSITIVE,
    "checks.log_prob_p50_abs_diff": POSITIVE,
    "checks.log_prob_p99_abs_diff": POSITIVE,
    "checks.log_prob_mean_kl": POSITIVE,
    "trainer.nnodes": COUNT,
    "trainer.n_gpus_per_node": COUNT,
    "trainer.device_peak_tflops": POSITIVE,
    "trainer.test_samples": COUNT,
    "rollout.health_interval_s": SECONDS,
    "rollout.health_timeout_s": SECONDS,
    "checks.probe_prompts": COUNT,
    "trainer.stage_timeout_s": SECONDS,
    "trainer.stop_grace_s": SECONDS,
    "trainer.max_consecutive_skips": COUNT,
    "ray.num_cpus_per_rank": AMOUNT,
    "ray.num_cpus_per_engine": AMOUNT,
    "ray.start_timeout_s": SECONDS,
    **{f"{section}.optim.{name}": i for section in ("actor", "critic", "warmup") for name, i in OPTIM.items()},
    **{f"{section}.megatron.{name}": i for section in ("actor", "critic") for name, i in MEGATRON.items()},
}


def ranges(loaded: Loaded) -> Iterator[Problem]:
    """Every number, and every number in a list, against its interval."""
    for key in leaf_keys(RunConfig):
        interval = INTERVALS.get(key, Interval())
        value = value_of(loaded.config, key)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not isinstance(number, bool) and number not in interval:
                default = value_of(RunConfig(), key)
                yield Problem(f"{key} ({number}) must be {interval}; the default is {_plain(default)}.", (key,))


def _plain(value: object) -> str:
    return "null" if value is None else str(list(value) if isinstance(value, tuple) else value)
