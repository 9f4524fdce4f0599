"""Requests and samples as JSON, on both ends of the local engine's HTTP interface. The docstring of
a body is its form in words, for messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import msgspec
import numpy as np

from rlhf_megatron.rollout.engine_interface import (
    MEMORY_PARTS,
    GeneratedSample,
    GenerateRequest,
    MemoryPart,
    PauseMode,
    SamplingParams,
    TokenColumn,
)
from rlhf_megatron.weights.bucket_buffers import LentSegment
from rlhf_megatron.weights.bucket_manifest import BucketManifest
from rlhf_megatron.weights.bucket_messages import BucketExchange
from rlhf_megatron.weights.engine_links import LinkInvitation

# part of what a client says where the server refuses for its weights
STALE_ANSWER = " answered 503: STALE"
T = TypeVar("T")


def _make_strict_struct(dataclass_type: type, **field_types: Any) -> Any:
    """Return a msgspec struct with the fields of the dataclass that refuses unknown fields.
    `field_types` replaces the types of fields that are such structs themselves.
    """
    hints = get_type_hints(dataclass_type) | field_types
    members = [
        (f.name, hints[f.name], *(() if f.default is MISSING else (f.default,)))
        for f in fields(dataclass_type)
    ]
    return msgspec.defstruct(dataclass_type.__name__, members, forbid_unknown_fields=True)


_RequestBody = _make_strict_struct(GenerateRequest, params=_make_strict_struct(SamplingParams))


class VerbBody(msgspec.Struct, forbid_unknown_fields=True):
    """{}"""


class GenerateBody(VerbBody):
    """{"requests": [{"prompt_ids": [...], "seeds": [...], "params": {"max_new_tokens": N, ...}}],
    "name": "..."}
    """

    requests: list[_RequestBody]  # type: ignore[valid-type]
    name: str = ""

    def to_requests(self) -> list[GenerateRequest]:
        """Return the requests of the body as GenerateRequest objects."""
        as_dict = msgspec.structs.asdict
        given = cast("list[Any]", self.requests)
        return [
            GenerateRequest(**as_dict(r) | {"params": SamplingParams(**as_dict(r.params))})
            for r in given
        ]


class AbortBody(VerbBody):
    """{"names": ["..."]}, without names of all calls"""

    names: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()


class CommitUpdateBody(VerbBody):
    """{"version": N}"""

    version: int


class BeginUpdateBody(CommitUpdateBody):
    """{"version": N, "full_resync": true or false}"""

    full_resync: bool = False


class LentBucketBody(VerbBody):
    """{"manifest": {...}, "memory": [{"start": N, "memory": {"device": "...", "handle":
    "...", ...}}]}
    """

    manifest: msgspec.Raw
    memory: tuple[LentSegment, ...]

    def parse_manifest(self) -> BucketManifest:
        """Return the manifest. Raise ValueError as `BucketManifest.parse_json` does."""
        return BucketManifest.parse_json(bytes(self.manifest).decode())


class ExchangedBucketBody(VerbBody):
    """{"manifest": {...}, "exchange": {"link": "...", "num_senders": N, "messages":
    [[{"source": N, ...}]]}}
    """

    manifest: msgspec.Raw
    exchange: BucketExchange

    def parse_manifest(self) -> BucketManifest:
        """Return the manifest. Raise ValueError as `BucketManifest.parse_json` does."""
        return BucketManifest.parse_json(bytes(self.manifest).decode())


class JoinLinkBody(VerbBody):
    """{"invitation": {"name": "...", "address": "...", ...}, "sender": "...", "num_senders": N}"""

    invitation: LinkInvitation
    sender: str
    num_senders: int


class LeaveLinkBody(VerbBody):
    """{"name": "..."}"""

    name: str


class PauseBody(VerbBody):
    """{"mode": "abort", "retract" or "in_place"}"""

    mode: PauseMode = "retract"


class MemoryPartsBody(VerbBody):
    """{"parts": ["weights", "kv_cache"]}, one or more of these"""

    parts: Annotated[tuple[MemoryPart, ...], msgspec.Meta(min_length=1)] = MEMORY_PARTS


def parse_verb_body(data: bytes, body_class: type[T]) -> T:
    """Decode the JSON of a verb's body; an empty body counts as {}. Raise ValueError that names the
    wrong field, its value and the form of the body.
    """
    try:
        return msgspec.json.decode(data or b"{}", type=body_class)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the body must be {body_class.__doc__}: {error}.") from None
    except RecursionError:
        raise ValueError("the body is nested too deep.") from None


def encode_requests(requests: Sequence[GenerateRequest], call_name: str = "") -> bytes:
    """Return the JSON body of a generate call. `call_name` is the name by which the call can be
    aborted.
    """
    return msgspec.json.encode({"requests": requests} | ({"name": call_name} if call_name else {}))


def encode_samples(groups: Sequence[Sequence[GeneratedSample]]) -> bytes:
    """Return the JSON answer to a generate call."""
    return msgspec.json.encode({"groups": groups}, enc_hook=list)


def decode_samples(data: bytes) -> list[list[GeneratedSample]]:
    """Return the samples of a JSON answer, with their tokens as columns. Raise ValueError or
    KeyError when `encode_samples` could not have made it.
    """
    groups = msgspec.json.decode(data, type=dict[str, list[list[GeneratedSample]]])["groups"]
    return [[_convert_to_columns(sample) for sample in group] for group in groups]


def _convert_to_columns(sample: GeneratedSample) -> GeneratedSample:
    """Return the sample with its token ids and log-probs as compact columns."""
    ids = np.array(sample.token_ids, np.int32)
    log_probs = np.array(sample.log_probs, np.float64)
    return replace(sample, token_ids=TokenColumn(ids), log_probs=TokenColumn(log_probs))
