"""A small batch with a value in every column, and files of rows, for the tests of data/."""

import json
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.data.batch import ScoredBatch


def scored() -> ScoredBatch:
    """Three samples of 3, 1 and 2 tokens; token t has id 10 + t and log-prob -t."""
    return ScoredBatch(
        offsets=torch.tensor([0, 3, 4, 6]),
        token_ids=torch.arange(10, 16),
        response_mask=torch.tensor([False, True, True, False, False, True]),
        rollout_log_probs=-torch.arange(6.0),
        group_ids=torch.tensor([7, 7, 8]),
        sample_ids=torch.tensor([70, 71, 80]),
        policy_versions=torch.tensor([1, 1, 2]),
        finish_reasons=("stop", "abort", "length"),
        prompts=("p", "p", "q"),
        responses=("r0", "r1", "r2"),
        labels=("l0", "l1", "l2"),
        sources=("s", "s", "s"),
        extras=("", "", ""),
        version_spans=(((1, 0, 1), (2, 1, 2)), (), ((2, 0, 1),)),
        num_cached_tokens=torch.tensor([1, 0, 0]),
        num_retractions=torch.tensor([0, 0, 2]),
        rewards=torch.tensor([1.0, 0.0, 0.5]),
        reward_statuses=("ok", "masked:aborted", "ok"),
        reward_parts={"exact": torch.tensor([1.0, 0.0, 0.0])},
    )


def written(path: Path, *rows: Any) -> Path:
    """A file of the rows: bytes as they are, anything else as JSON."""
    path.write_bytes(
        b"".join(
            (row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows
        )
    )
    return path
