"""A run stops when too many of its rewards fail: what is left out trains nothing, and silently so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rlhf_megatron.rewards.base import MASKED, RewardResult, RewardSample, is_masked

ABORTED = MASKED + "aborted"
RESPONSE_CHARS = 200  # of the sample that the message shows


class RewardError(ValueError):
    """Rewards failed that the policy is not to blame for."""


def check_error_rate(
    samples: Sequence[RewardSample], results: Sequence[RewardResult], max_error_rate: float, log: str
) -> None:
    """Raises RewardError when more than `max_error_rate` of the results are masked. Aborted samples do not count.

    `log`: the file of what rewards print.
    """
    scored = [(s, r) for s, r in zip(samples, results, strict=True) if r.status != ABORTED]
    failed = [(s, r) for s, r in scored if is_masked(r.status)]
    if not failed or len(failed) / len(scored) <= max_error_rate:
        return
    [(status, count)] = Counter(result.status for _, result in failed).most_common(1)
    sample, result = next((s, r) for s, r in failed if r.status == status)
    raise RewardError(
        f"{len(failed)} of {len(scored)} rewards failed ({len(failed) / len(scored):.1%}), more than"
        f" reward.max_error_rate ({max_error_rate:g}), and the policy is not to blame. Most of them: {status}"
        f" ({count}). One sample, of the source {sample.source!r}: label {_short(sample.label)}, response"
        f" {_short(sample.response)}.\n{result.error or '(it left no traceback)'}\n"
        f"Correct the reward; {log} has what it printed. To train on with such samples left out, raise"
        " reward.max_error_rate."
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= RESPONSE_CHARS else f"{text[:RESPONSE_CHARS]}…")
