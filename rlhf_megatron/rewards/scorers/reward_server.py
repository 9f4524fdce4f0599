"""The score of a discriminative reward model behind HTTP, such as stock SGLang's; replicas stand in
for each other.

Text is sent to `/classify` of an SGLang server, or to `/v1/embeddings`, which its router passes on.
SGLang answers for an architecture that it does not know as a classifier with a hidden state, and
gives a head whose bias the checkpoint lacks a random one: an answer of several numbers is refused,
and so are replicas that score one text differently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer
from rlhf_megatron.rewards.endpoint_replicas import ask_any_replica, compute_max_wait_s
from rlhf_megatron.rewards.reward_endpoint import (
    RewardEndpoint,
    RewardEndpointAnswer,
    RewardEndpointError,
    RewardEndpointRefusedError,
)
from rlhf_megatron.rewards.scorers.reward_types import (
    OWN_PROCESS,
    REWARDS,
    RewardResult,
    RewardSample,
    drop_stop_token,
    make_masked_result,
    read_response,
)

PROBE = "2+2=4"  # which every tokenizer spells
# between replicas, of scores of about 1: half-precision kernels differ by less, random
# biases by more
TOLERANCE = 1e-2


@dataclass(frozen=True)
class RewardServerParams:
    """The servers of the reward model, the text that they score, and the scale of the score."""

    # replicas of one model, with the path, such as http://HOST:30000/classify
    servers: tuple[RewardEndpoint, ...]
    # text behind the response, such as <|im_end|>, that the model was trained to score at
    ending: str = ""
    model: str = "default"  # name of the model, for /v1/embeddings
    # directory; its ids are sent. null: text, to which servers may add tokens
    tokenizer: str | None = None
    # with tokenizer: put what it writes before text, such as <s>, in front of a prompt that does
    # not begin with that already, as a rendered chat does
    add_special_tokens: bool = True
    mean: float = 0.0  # subtracted from a score
    std: float = 1.0  # by which it is divided then
    # sigmoid: a score s becomes 1 / (1 + exp(-s)) in the end
    activation: Literal["none", "sigmoid"] = "none"
    patience_s: float = 120.0  # in which some server must answer; later the sample is masked
    rest_s: float = 10.0  # that a server which failed is asked only where no other answers
    # false: the text has the special tokens of a response, but for the one that ended it
    skip_special_tokens: bool = True
    response_pattern: ClassVar[str | None] = None
    reads_response_prefix: ClassVar[bool] = False  # the prompt before the response ends with it

    def __post_init__(self) -> None:
        """Raise ValueError for an empty list of servers, a /v1/classify url, or values out of
        range.
        """
        if not self.servers:
            raise ValueError(
                "servers must name one server at least, as {url: http://HOST:30000/classify}."
            )
        for server in self.servers:
            if server.url.rstrip("/").endswith("/v1/classify"):
                raise ValueError(
                    f"url ({server.url}) gives 1.0 for every text: SGLang's /v1/classify makes one"
                    " label a probability; use /classify, or /v1/embeddings of a router."
                )
        if not self.std > 0:
            raise ValueError(f"std ({self.std}) must be above 0.")
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
        """Let every server score a probe, and return a note on which servers answer. Raise
        ValueError where none gives a score, or where their scores differ.
        """
        scores = {}
        silent = []
        for server in self.servers:
            try:
                scores[server.url], _ = _request_score(server, self, PROBE)
            except RewardEndpointError as error:
                silent.append(str(error))
        if not scores:
            raise ValueError(f"no server of the reward model gives a score. {' '.join(silent)}")
        check_same_scores(scores)
        return "; ".join(
            [f"reward model: {len(scores)} of {len(self.servers)} servers answer", *silent]
        )

    def scale_score(self, score: float) -> float:
        """Return the reward of a model's score: mean and std are applied, then the activation."""
        score = (score - self.mean) / self.std
        return 0.5 + 0.5 * math.tanh(0.5 * score) if self.activation == "sigmoid" else score


def check_same_scores(scores_by_server: Mapping[str, float], tolerance: float = TOLERANCE) -> None:
    """Raise ValueError where servers score one text differently. `scores_by_server` has the scores
    by the server's name; `tolerance` is relative to scores above 1 in size.
    """
    low = min(scores_by_server.values())
    high = max(scores_by_server.values())
    if high - low > tolerance * max(1.0, abs(low), abs(high)):
        raise ValueError(
            f"servers score one text differently ({dict(scores_by_server)}): they serve different"
            " models, or SGLang has made up a bias of the head that the checkpoint lacks; write"
            " score.bias (0) into the checkpoint."
        )


@REWARDS.register("reward_server", RewardServerParams, needs=(OWN_PROCESS,))
def score_by_reward_server(sample: RewardSample, params: RewardServerParams) -> RewardResult:
    """Return the model's score of prompt, response and ending, scaled. A sample that no server
    scores is masked. The part `failovers` counts the servers that failed before one answered;
    `retries` counts the repeated requests to the server that answered.
    """
    response = read_response(drop_stop_token(sample), params)
    text = f"{sample.prompt}{response}{params.ending}"
    try:
        found, num_failed = ask_any_replica(
            params.servers,
            params.patience_s,
            params.rest_s,
            lambda server: _request_score(server, params, text),
        )
    except RewardEndpointError as error:
        return make_masked_result(error.mask_reason, str(error))
    score, asked = found
    parts = {"failovers": num_failed, "retries": asked.num_retries, "latency_s": asked.latency_s}
    return RewardResult(params.scale_score(score), parts=parts)


@cache
def _load_tokenizer_once(directory: str) -> Tokenizer:
    """Return the tokenizer of a directory, loaded once in this process."""
    return load_tokenizer(directory)


def _encode_scored_text(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Return the token ids of a text that a reward model scores. `add_special_tokens`: the ids that
    the tokenizer writes before text stand in front, once: a rendered chat may bring them itself.
    """
    ids = tokenizer.encode(text)
    opening_ids = tokenizer.opening_ids if add_special_tokens else ()
    if not ids or ids[: len(opening_ids)] == opening_ids:
        return list(ids)
    return [*opening_ids, *ids]


def _request_score(
    server: RewardEndpoint, params: RewardServerParams, text: str
) -> tuple[float, RewardEndpointAnswer]:
    """Return the server's score of the text and its whole answer. Raise RewardEndpointError."""
    is_openai = server.url.rstrip("/").endswith("/embeddings")

    def make_body(text: str) -> dict[str, Any]:
        """Return the request's body for the text, as text or as token ids, in the form of the
        server's API.
        """
        what: str | list[int] = text
        if params.tokenizer is not None:
            what = _encode_scored_text(
                _load_tokenizer_once(params.tokenizer), text, params.add_special_tokens
            )
        if not what:
            # an SGLang server takes harm from an empty list
            raise RewardEndpointRefusedError("the sample has no text.")
        if is_openai:
            return {"model": params.model, "input": what}
        return {"text" if params.tokenizer is None else "input_ids": what}

    asked = server.post_with_retries(make_body(text), make_body(PROBE))
    return read_single_score(asked.answer, server.url, is_openai), asked


def read_single_score(answer: Any, url: str, is_openai: bool = False) -> float:
    """Return the score in a server's answer. Raise RewardEndpointRefusedError where the answer does
    not hold exactly one finite number.
    """
    try:
        if is_openai:
            [answer] = answer["data"]
        numbers = (answer[0] if isinstance(answer, list) else answer)["embedding"]
        count = len(numbers)
        score = float(numbers[0])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RewardEndpointRefusedError(
            f"{url} answered {str(answer)[:200]}, which has no embedding."
        ) from error
    if count != 1 or not math.isfinite(score):
        raise RewardEndpointRefusedError(
            f"{url} answered {count} numbers, the first {score:g}, in place of one score: serve a"
            " model of one label, with an architecture that the server knows as a reward model."
        )
    return score
