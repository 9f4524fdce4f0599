"""What a run says of itself before anything starts."""

from __future__ import annotations

import pytest

from rlhf_megatron.config.schema import RunConfig, TrainerConfig
from rlhf_megatron.controller.scheduler import training_run


@pytest.mark.parametrize(
    ("num_cores", "nnodes", "is_said"), [(2, 1, True), (4, 1, False), (2, 2, False)]
)
def test_ranks_that_share_cores_are_told(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, nnodes: int, is_said: bool
) -> None:
    """Of several machines this one's cores say nothing."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(num_cores)))
    monkeypatch.setattr(training_run, "has_accelerator", lambda: False)
    config = RunConfig(trainer=TrainerConfig(n_gpus_per_node=4 // nnodes, nnodes=nnodes))
    assert (
        "(more than the 2 cores here: they take turns)" in training_run._describe_pools(config)
    ) == is_said
