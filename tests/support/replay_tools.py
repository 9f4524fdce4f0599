"""Stages of a replay, as tests make them."""

from places import MODEL

from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.proof.replay import ReplayStages, no_scorer
from rlhf_megatron.recovery.recorder import Recorder
from rlhf_megatron.runtime.proxies import Workers
from rlhf_megatron.scheduler.parts import Parts, RunData
from rlhf_megatron.sync.weight_sync import Sync


def replay_stages(
    config: RunConfig, workers: Workers, parts: Parts, recorder: Recorder | None, sync: Sync
) -> ReplayStages:
    data = RunData(None, (), load_tokenizer(MODEL), ())
    return ReplayStages(config, workers, None, data, parts, sync, no_scorer, source=recorder)
