"""The rewards of a configuration, computed on other machines by `rlhf-megatron serve-rewards`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from rlhf_megatron.rewards.endpoint_replicas import ask_any_replica, compute_max_wait_s
from rlhf_megatron.rewards.reward_endpoint import (
    RewardEndpoint,
    RewardEndpointError,
    RewardEndpointRefusedError,
)
from rlhf_megatron.rewards.scorers.reward_types import (
    OWN_PROCESS,
    REWARDS,
    RewardResult,
    RewardSample,
    make_masked_result,
)

PROBE = RewardSample("", "", "", "", "abort", 0)  # which no reward sees


@dataclass(frozen=True)
class RemoteRewardParams:
    """The servers that score, and the time that they get."""

    servers: tuple[RewardEndpoint, ...]  # with the path, such as http://HOST:8900/score
    patience_s: float = 120.0  # in which some server must answer; later the sample is masked
    rest_s: float = 10.0  # that a server which failed is asked only where no other answers

    def __post_init__(self) -> None:
        """Raise ValueError for an empty list of servers, or a negative time."""
        if not self.servers:
            raise ValueError(
                "servers must name one server at least, as {url: http://HOST:8900/score}."
            )
        if min(self.patience_s, self.rest_s) < 0:
            raise ValueError(
                f"patience_s ({self.patience_s}) and rest_s ({self.rest_s}) must be at least 0."
            )

    @property
    def waits_s(self) -> float:
        """Return the seconds that a sample may wait for the servers; a longer wait masks the
        sample.
        """
        return compute_max_wait_s(self.servers, self.patience_s)

    def prepare(self) -> str | None:
        """Ask every server once, and return a note on which servers answer. Raise ValueError where
        none does.
        """
        silent = []
        for server in self.servers:
            try:
                _request_result(server, PROBE)
            except RewardEndpointError as error:
                silent.append(str(error))
        if len(silent) == len(self.servers):
            raise ValueError(f"no server scores. {' '.join(silent)}")
        return "; ".join(
            [
                f"rewards: {len(self.servers) - len(silent)} of {len(self.servers)} servers answer",
                *silent,
            ]
        )


@REWARDS.register("remote", RemoteRewardParams, needs=(OWN_PROCESS,))
def score_remotely(sample: RewardSample, params: RemoteRewardParams) -> RewardResult:
    """Return the score, status and parts that a server gives. A sample that no server scores is
    masked.
    """
    try:
        result, _ = ask_any_replica(
            params.servers,
            params.patience_s,
            params.rest_s,
            lambda server: _request_result(server, sample),
        )
    except RewardEndpointError as error:
        return make_masked_result(error.mask_reason, str(error))
    return result


def _request_result(server: RewardEndpoint, sample: RewardSample) -> RewardResult:
    """Return the server's result of the sample. Raise RewardEndpointError where the server fails,
    or answers something else than a result.
    """
    answer: Any = server.post_with_retries(asdict(sample), asdict(PROBE)).answer
    try:
        return msgspec.convert(answer, RewardResult)
    except msgspec.ValidationError as error:
        raise RewardEndpointRefusedError(
            f"{server.url} answered {str(answer)[:200]}, which is no result of a reward ({error})."
        ) from error
