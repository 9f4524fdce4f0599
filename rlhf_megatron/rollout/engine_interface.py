"""What the trainer asks of an inference engine. Shaped against the bundled server and
stock SGLang alike.

Token ids in, token ids and log-probs out. `generate_async` waits in the event loop of
`rollout.http_client`, so that thousands of groups may be under way; all other calls block, and the
fleet runs them in threads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from rlhf_megatron.data import codec
from rlhf_megatron.weights.bucket_manifest import BucketManifest

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "retract", "in_place"]
MemoryPart = Literal["weights", "kv_cache"]
MEMORY_PARTS: tuple[MemoryPart, ...] = ("weights", "kv_cache")
WeightTransport = Literal["tensor", "process_group", "disk"]
SCORING_RULE = (
    "max_new_tokens 0 scores tokens that are given: it needs num_given >= 1, temperature 1 and"
    " no routes_dir."
)
UNSYNCED = -1  # policy_version of samples from the weights that an engine loaded itself


class EngineError(RuntimeError):
    """An engine failed or answered with an error. The message names the engine and what it said."""


class EngineTimeoutError(EngineError):
    """The engine did not answer before the deadline."""


class EngineKilledError(EngineError):
    """The server's process was killed by a signal before it was ready, and told no error of its
    own: another start may succeed.
    """


class EngineUnreachableError(EngineError):
    """There is no connection, or it broke."""


class DriverLostError(EngineError):
    """The process that had asked the engine is gone; the engine is not to blame."""


class EngineStaleError(EngineError):
    """The engine refused a request because it has not got its weights: a sync is under way,
    or has failed.
    """


class EngineRequestError(EngineError):
    """The engine refused the request itself (HTTP 4xx): sending it elsewhere would not help."""


@codec.register("SamplingParams")
@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. A token may be drawn that is among the top_k likeliest, with at
    most top_p before it, and at least min_p times as likely as the likeliest: each looks at
    softmax(logits / temperature) as a whole. Log-probs are those of this whole, whatever is left
    out of the draw; only before min_new_tokens they are without stop tokens.
    """

    max_new_tokens: int  # 0: nothing is drawn, see `GenerateRequest`
    temperature: float = 1.0  # 0: greedy; log-probs are then those of temperature 1
    stop_token_ids: tuple[int, ...] = ()  # the stop token is part of the response
    top_p: float = 1.0  # 1: off
    top_k: int = -1  # -1: off
    min_p: float = 0.0  # 0: off
    min_new_tokens: int = 0  # no stop token is drawn before so many tokens


@codec.register("GenerateRequest")
@dataclass(frozen=True)
class GenerateRequest:
    """One group: `seeds` has one entry a sample. With max_new_tokens 0 a sample is the last
    `num_given` tokens of the prompt, at least one, with the log-probs that they have
    at temperature 1.
    """

    prompt_ids: tuple[int, ...]
    # a group's samples need a seed each; in [0, 2^31), which every engine takes
    seeds: tuple[int, ...]
    params: SamplingParams
    # the last tokens of `prompt_ids` are the response so far: seeds draw what would follow them
    num_given: int = 0
    # where the engine writes which experts the samples' tokens met
    # (data.expert_route_files); "": nowhere
    routes_dir: str = ""
    routes_bytes: int = 0  # that all files there may have; 0: what its disk has room for


@dataclass(frozen=True)
class VersionSpan:
    """Tokens start .. end - 1 of a response were sampled from the weights of one version."""

    version: int
    start: int
    end: int


class TokenColumn(Sequence[Any]):
    """Numbers of a response, one a token: an array that stands where a tuple of them could, in a
    tenth of its memory.

    ids = Column(np.array([4, 13, 7], np.int32))
    ids == (4, 13, 7), ids[1] == 13, np.asarray(ids)  # the array itself
    """

    __slots__ = ("_values",)

    def __init__(self, values: np.ndarray) -> None:
        values.flags.writeable = False
        self._values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return (
            np.array(self._values, dtype=dtype) if copy else np.asarray(self._values, dtype=dtype)
        )

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values.tolist())

    def __getitem__(self, index: Any) -> Any:
        found = self._values[index]
        return TokenColumn(found) if isinstance(index, slice) else found.item()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True)
class GeneratedSample:
    """Engines that answer a run give `TokenColumn`s."""

    token_ids: Sequence[int]  # the response, stop token included; below 2^31
    log_probs: Sequence[float]  # one a token
    finish_reason: FinishReason
    # of the weights that its first token was sampled from; UNSYNCED before the first sync
    policy_version: int
    # in order, without gaps; (): all tokens are of `policy_version`
    version_spans: tuple[VersionSpan, ...] = ()
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    num_retractions: int = 0  # times that its key-value cache was dropped and computed again
    # the file with the experts that its tokens met; "": none was asked for, or no token was read
    routes: str = ""


@codec.register("EngineAddress")
@dataclass(frozen=True)
class EngineAddress:
    """How a host reaches an engine to send it weights."""

    name: str  # "engine0", used in messages
    kind: str  # a name in `engine_kinds.ENGINES`
    url: str
    token: str = field(repr=False)  # bearer token of the admin verbs; never logged
    tp_size: int = 1
    has_loader: bool = True  # the run's loader runs in it: it takes buckets and tells digests
    api_key: str = field(default="", repr=False)  # of `generate` where it is not `token`
    is_attached: bool = False  # the run did not start it
    takes_parts: bool = True  # of tensors, where it has the loader: it keeps weights as they come
    quantization: str | None = None  # in which it holds what is sent; None: as it comes
    machine: int = 0  # its number among those of the run, where torchrun's agents start engines
    # HOST:PORT where its machine starts drivers (runtime.driver_gate); "": nowhere
    drivers: str = ""


SampleGroups = list[list[GeneratedSample]]  # of each request its samples, in order


# a scheduler is dead when requests wait and no step has ended for so many health timeouts, or for
# so many times its longest step, whichever is longer
_STALL_TIMEOUTS = 2.0
_STALL_STEPS = 10.0


def compute_stall_limit_s(health_timeout_s: float, longest_step_s: float) -> float:
    """Return after how many seconds without a step an engine with waiting requests counts as dead.
    A step may be long: a long prompt on a slow machine takes a minute.
    """
    return max(_STALL_TIMEOUTS * health_timeout_s, _STALL_STEPS * longest_step_s)


class InferenceEngine(Protocol):
    address: EngineAddress

    def generate(
        self, requests: Sequence[GenerateRequest], timeout_s: float, name: str = ""
    ) -> SampleGroups:
        """Generate the samples of each request and return them in the order of the requests. Raise
        EngineError; never return fewer samples than the seeds of a request.

        `name` is the name of this call for `abort_calls`, made by
        `fleet.engine_calls.make_call_name`.
        """

    async def generate_async(
        self, requests: Sequence[GenerateRequest], timeout_s: float, name: str = ""
    ) -> SampleGroups:
        """Generate as `generate` does, in the event loop of `rollout.http_client`; it must not
        block.
        """

    def abort_calls(self, call_names: Collection[str] = ()) -> None:
        """End the running requests of the calls with these names, or all running requests where
        `call_names` is empty; ignore names that the engine does not know. The requests finish with
        reason "abort" and the tokens that they have so far.
        """

    def get_max_running_samples(self) -> int | None:
        """Ask the server how many samples it decodes at once at most; None where it does not
        say.
        """

    def pause_decoding(self, mode: PauseMode = "retract") -> None:
        """Stop decoding until `resume_decoding`, also through a weight sync. The mode decides on
        running samples. "abort": they end with reason "abort" and the tokens they have. "retract":
        they wait without their key-value cache, which is computed again with the weights of that
        time. "in_place": they wait with their cache, and new weights then continue over keys and
        values of old weights. New requests wait in every mode. A second pause may change the mode
        for the samples that wait.
        """

    def resume_decoding(self) -> None:
        """Undo `pause_decoding`."""

    def begin_weight_update(self, version: int, is_full_resync: bool = False) -> None:
        """Open the weight-sync transaction. The engine is STALE and serves nothing until
        `commit_weight_update`.

        `version` must be above the served version; with `is_full_resync` it may be the same (all
        weights are sent again). Running requests wait and go on with the new weights, which compute
        their key-value cache anew unless the requests are paused "in_place". A second call before
        the commit starts the transaction anew.
        """

    def update_weights(self, manifest: BucketManifest) -> None:
        """Load one bucket from its file in the transfer directory. Return when the file may be
        overwritten.
        """

    def commit_weight_update(self, version: int) -> None:
        """Close the transaction: flush the prefix cache and serve `version`."""

    def get_weight_digests(self) -> dict[str, str] | None:
        """Return the digest of each tensor that the engine holds, by Hugging Face tensor name; None
        where the engine cannot compute them.
        """

    def release_memory(self, memory_parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        """Free the weights, the key-value cache or both (a colocated trainer needs the space). The
        engine serves nothing meanwhile. Parts that are already free stay free.
        """

    def resume_memory(self, memory_parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        """Take the memory of these parts back after `release_memory`. The weights are undefined
        until the next sync, which needs no key-value cache; serving needs both parts.
        """

    def get_held_bytes(self) -> int | None:
        """Ask the server how many bytes of weights and key-value cache it holds; None where it does
        not say.
        """

    def check_health(self, timeout_s: float) -> None:
        """Raise EngineError unless the engine answers well within `timeout_s`, and its scheduler
        gets on. A scheduler that is busy with a long step is well for as long as
        `compute_stall_limit_s` says.
        """

    def get_served_version(self) -> int | None:
        """Return the policy_version that the engine serves; None where it has never been synced or
        is STALE.
        """

    def close(self) -> None:
        """Drop the connections. The server keeps running; its starter stops it."""
