"""The rewards of a configuration, computed on other machines by `rlhf-megatron serve-rewards`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from rlhf_megatron.rewards.endpoint import Endpoint, EndpointError, Refused
from rlhf_megatron.rewards.replicas import ask_any, longest_s
from rlhf_megatron.rewards.scorers.base import OWN_PROCESS, REWARDS, RewardResult, RewardSample, masked

PROBE = RewardSample("", "", "", "", "abort", 0)  # which no reward sees


@dataclass(frozen=True)
class RemoteParams:
    """Whom to ask."""

    servers: tuple[Endpoint, ...]  # with the path, such as http://HOST:8900/score
    patience_s: float = 120.0  # in which some server must answer; later the sample is masked
    rest_s: float = 10.0  # that a server which failed is asked only where no other answers

    def __post_init__(self) -> None:
        if not self.servers:
            raise ValueError("servers must name one server at least, as {url: http://HOST:8900/score}.")
        if min(self.patience_s, self.rest_s) < 0:
            raise ValueError(f"patience_s ({self.patience_s}) and rest_s ({self.rest_s}) must be at least 0.")

    @property
    def waits_s(self) -> float:
        """Seconds that a sample may wait for a server, whose fault it is then."""
        return longest_s(self.servers, self.patience_s)

    def prepare(self) -> str | None:
        """Return which servers answer. Raises ValueError where none does."""
        silent = []
        for server in self.servers:
            try:
                _ask(server, PROBE)
            except EndpointError as error:
                silent.append(str(error))
        if len(silent) == len(self.servers):
            raise ValueError(f"no server scores. {' '.join(silent)}")
        return "; ".join([f"rewards: {len(self.servers) - len(silent)} of {len(self.servers)} servers answer", *silent])


@REWARDS.register("remote", RemoteParams, needs=(OWN_PROCESS,))
def remote(sample: RewardSample, params: RemoteParams) -> RewardResult:
    """Score and status are the server's; so are the parts, and what it masks is masked."""
    try:
        result, _ = ask_any(params.servers, params.patience_s, params.rest_s, lambda server: _ask(server, sample))
    except EndpointError as error:
        return masked(error.why, str(error))
    return result


def _ask(server: Endpoint, sample: RewardSample) -> RewardResult:
    """Raises EndpointError."""
    answer: Any = server.ask(asdict(sample), asdict(PROBE)).answer
    try:
        return msgspec.convert(answer, RewardResult)
    except msgspec.ValidationError as error:
        raise Refused(
            f"{server.url} answered {str(answer)[:200]}, which is no result of a reward ({error})."
        ) from error
