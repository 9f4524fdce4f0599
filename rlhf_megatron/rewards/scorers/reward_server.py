"""The score of a discriminative reward model behind HTTP, such as stock SGLang's; replicas stand in for each other.

Text is sent to `/classify` of an SGLang server, or to `/v1/embeddings`, which its router passes on. SGLang answers for
an architecture that it does not know as a classifier with a hidden state, and gives a head whose bias the checkpoint
lacks a random one: an answer of several numbers is refused, and so are replicas that score one text differently.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, replace
from typing import Any

from rlhf_megatron.rewards.endpoint import Endpoint, EndpointError, Refused
from rlhf_megatron.rewards.scorers.base import OWN_PROCESS, REWARDS, RewardResult, RewardSample, masked

PROBE = "What is two and two?\nIt is four."
TOLERANCE = 1e-2  # between replicas, of scores of about 1: half-precision kernels differ by less, random biases by more
FAILOVER_S = 0.5  # in which a failed request is sent to the same server again, where there are others
PAUSE_S = 0.5  # when no server answers


@dataclass(frozen=True)
class RewardServerParams:
    """Whom to ask, and what about."""

    servers: tuple[Endpoint, ...]  # replicas of one model, with the path, such as http://HOST:30000/classify
    ending: str = ""  # text behind the response, such as <|im_end|>, that the model was trained to score at
    model: str = "default"  # name of the model, for /v1/embeddings
    patience_s: float = 120.0  # in which some server must answer; later the sample is masked
    rest_s: float = 10.0  # that a server which failed is asked only where no other answers

    def __post_init__(self) -> None:
        if not self.servers:
            raise ValueError("servers must name one server at least, as {url: http://HOST:30000/classify}.")
        for server in self.servers:
            if server.url.rstrip("/").endswith("/v1/classify"):
                raise ValueError(
                    f"url ({server.url}) gives 1.0 for every text: SGLang's /v1/classify makes one label a probability;"
                    " use /classify, or /v1/embeddings of a router."
                )
        if min(self.patience_s, self.rest_s) < 0:
            raise ValueError(f"patience_s ({self.patience_s}) and rest_s ({self.rest_s}) must be at least 0.")

    @property
    def waits_s(self) -> float:
        """Seconds that a sample may wait for a server, whose fault it is then."""
        return self.patience_s + sum(server.longest_s for server in self.servers)

    def prepare(self) -> str | None:
        """Return which servers answer. Raises ValueError where none does, or what they answer is no score."""
        scores, silent = {}, []
        for server in self.servers:
            try:
                scores[server.url] = _ask(server, self.model, PROBE)
            except EndpointError as error:
                silent.append(str(error))
        if not scores:
            raise ValueError(f"no server of the reward model gives a score. {' '.join(silent)}")
        low, high = min(scores.values()), max(scores.values())
        if high - low > TOLERANCE * max(1.0, abs(low), abs(high)):
            raise ValueError(
                f"servers score one text differently ({scores}): they serve different models, or SGLang has made up a"
                " bias of the head that the checkpoint lacks; write score.bias (0) into the checkpoint."
            )
        return "; ".join([f"reward model: {len(scores)} of {len(self.servers)} servers answer", *silent])


_resting: dict[str, float] = {}  # of this worker process: url of a server that failed -> until when it rests


@REWARDS.register("reward_server", RewardServerParams, needs=(OWN_PROCESS,))
def reward_server(sample: RewardSample, params: RewardServerParams) -> RewardResult:
    """The part `failovers` counts the servers that failed before one answered."""
    text = f"{sample.prompt}{sample.response}{params.ending}"
    deadline, num_failed = time.monotonic() + params.patience_s, 0
    while True:
        now = time.monotonic()
        for server in sorted(params.servers, key=lambda one: (_resting.get(one.url, 0.0) > now, random.random())):
            try:
                score = _ask(server, params.model, text, FAILOVER_S if len(params.servers) > 1 else None)
            except Refused as error:
                return masked("endpoint", str(error))  # no other server would take the text
            except EndpointError as error:
                _resting[server.url], why = time.monotonic() + params.rest_s, str(error)
                num_failed += 1
            else:
                _resting.pop(server.url, None)
                return RewardResult(score, parts={"failovers": float(num_failed)})
        if time.monotonic() >= deadline:
            return masked("endpoint", why)
        time.sleep(PAUSE_S)


def _ask(server: Endpoint, model: str, text: str, patience_s: float | None = None) -> float:
    """Raises EndpointError."""
    if patience_s is not None:
        server = replace(server, patience_s=patience_s)
    is_openai = server.url.rstrip("/").endswith("/embeddings")
    answer: Any = server.ask({"model": model, "input": text} if is_openai else {"text": text}).answer
    try:
        if is_openai:
            [answer] = answer["data"]
        numbers = (answer[0] if isinstance(answer, list) else answer)["embedding"]
        count, score = len(numbers), float(numbers[0])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Refused(f"{server.url} answered {str(answer)[:200]}, which has no embedding.") from error
    if count != 1 or not math.isfinite(score):
        raise Refused(
            f"{server.url} answered {count} numbers, the first {score:g}, in place of one score: serve a model of one"
            " label, with an architecture that the server knows as a reward model."
        )
    return score
