"""Stages of a replay, as tests make them."""

from places import MODEL

from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.controller.recovery.rollout_recorder import RolloutRecorder
from rlhf_megatron.controller.scheduler.algorithm_setup import AlgorithmSetup, RunData
from rlhf_megatron.controller.scheduler.run_replay import ReplayStages, refuse_to_score
from rlhf_megatron.controller.sync.weight_sync import PolicySync
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.runtime.role_proxies import RoleProxies


def replay_stages(
    config: RunConfig,
    workers: RoleProxies,
    parts: AlgorithmSetup,
    recorder: RolloutRecorder | None,
    sync: PolicySync,
) -> ReplayStages:
    data = RunData(None, (), load_tokenizer(MODEL), ())
    return ReplayStages(
        config, workers, None, data, parts, sync, refuse_to_score, recorded_rollouts=recorder
    )
