"""Runs inside each rank of a stock SGLang server, through its `--custom-weight-loader` hook.

The update call carries one small tensor: a JSON order. The answer is a receipt, a file in the transfer directory: the
error if there was one, the parts of tensors that stand in this rank, and their digests; `sglang.weights` puts those
of all ranks together. Orders, by the key that they begin with:

    manifest   read this bucket and load it: from its file, the device memory that `memory` names for each rank, or the
               link over which the `exchange` goes
    join       become a rank of a link with a copy of the trainer
    leave      end this rank's part of it
    holds      which parts of these tensors stand here?
    digest     this bucket was loaded already, it came another way: digest what stands of it
    compare    does what stands here equal the bytes of this bucket? Asked when digests differ, to tell which rank's do
    receipts   has everything come, of all the buckets whose receipts are named so?
    describe   which model is this, and which devices are seen?

What stands is digested while SGLang's session is open, after loading and casting. Closing it re-lays weights of layers
that are quantised, for which nothing is digested, and of expert layers for some kernels; else it changes nothing.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from rlhf_megatron.models.table import Span
from rlhf_megatron.parallel.device import device_ids, synchronize
from rlhf_megatron.parallel.links import Invitation
from rlhf_megatron.resharding.buffers import Segment, map_bucket, open_segments, views
from rlhf_megatron.resharding.digest import as_hex, digest_part
from rlhf_megatron.resharding.manifest import DTYPE_BYTES, BucketManifest, TensorEntry
from rlhf_megatron.resharding.messages import BUCKET_TIMEOUT_S, Exchange, OpenLinks, take, within
from rlhf_megatron.resharding.shards import overlap
from rlhf_megatron.rollout.sglang.server import facts
from rlhf_megatron.rollout.sglang.server.standing import (
    MisfitError,
    Place,
    UnlikeError,
    is_entry,
    is_quantised,
    missing,
    must_be_zero,
    places_of,
    tied_head,
)

logger = logging.getLogger(__name__)

TRANSFER_DIR = "RLHF_MEGATRON_TRANSFER_DIR"  # environment variable of the server
LOAD_FORMAT = "rlhf_megatron.rollout.sglang.server.loader.load"
DESCRIBED = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "num_experts",
    "moe_intermediate_size",
)
_NAMES_SHOWN = 3
_links = OpenLinks()


def load(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Called by SGLang with the model of this rank. What goes wrong stands in the receipt: an exception here would end
    the server, where the client can say what happened and leave the engine STALE."""
    tensors = dict(named_tensors)
    order = json.loads(bytes(tensors["order"].cpu().tolist()).decode())
    try:
        directory = transfer_dir(order.get("directory"))
    except (KeyError, ValueError) as error:
        logger.error("an order cannot be carried out: %s %s", TRANSFER_DIR, error)
        return
    rank, size = facts.tensor_parallel()
    head = {"rank": rank, "size": size}
    try:
        draw_apart()
        text = json.dumps({**head, **_carry_out(order, model, directory, rank)})
    except Exception as error:  # told by the client
        text = json.dumps({**head, "error": f"{type(error).__name__}: {error}"})
    path = directory / f"{order['receipt']}.{rank}"
    aside = path.with_suffix(f".{rank}.tmp")
    try:
        aside.write_text(text)
        aside.rename(path)
    except OSError as error:  # the client sees that there is no receipt
        logger.error("a receipt cannot be written: %s", error)


@cache
def draw_apart() -> None:
    """Give each group of ranks under DP attention random numbers of its own, once. SGLang gives all the same: without
    seeds, samples of one prompt that fall to different groups would be the same sample."""
    if group := facts.attention_group():
        torch.manual_seed(torch.initial_seed() + group)


def _carry_out(order: Mapping[str, Any], model: Any, directory: Path, rank: int) -> dict[str, Any]:
    if "describe" in order:
        return {"error": None, "model": describe(model), "devices": device_ids()}
    if "receipts" in order:
        return {"error": incomplete(model, _received(directory, order["receipts"], rank))}
    if "digest" in order:
        manifest = BucketManifest.from_json(order["digest"])
        with torch.no_grad():
            tie_head(model, dict(model.named_parameters()), [entry.name for entry in manifest.tensors])
        return standing(model, manifest, num_bytes_read=manifest.tensor_bytes)
    if "join" in order:
        invitation = msgspec.convert(order["join"], Invitation)
        _links.join(invitation, order["sender"], order["num_senders"], rank, _device(model))
        return {"error": None}
    if "holds" in order:
        return {"error": None, "holds": holds(model, order["holds"])}
    if "leave" in order:
        _links.leave(order["leave"])
        return {"error": None}
    if "exchange" in order:
        return _take(model, BucketManifest.from_json(order["manifest"]), order["exchange"], rank)
    manifest = BucketManifest.from_json(order["manifest" if "manifest" in order else "compare"])
    if "memory" in order:
        pieces = open_segments(msgspec.convert(order["memory"][rank], list[Segment]))
    else:
        pieces = [(0, map_bucket(directory / manifest.file, manifest))]
    given = views(manifest, *pieces)
    if "compare" in order:
        return {"error": None, "compared": compare(model, manifest, given)}
    load_bucket(model, manifest, given)
    for _, piece in pieces:
        synchronize(piece.device)  # its copies are under way
    return standing(model, manifest)


def _take(model: Any, manifest: BucketManifest, order: Mapping[str, Any], rank: int) -> dict[str, Any]:
    exchange = msgspec.convert(order, Exchange)
    device = _device(model)
    found = take(exchange, manifest, _links.find(exchange.link), rank, device, BUCKET_TIMEOUT_S)
    given = {key: values for key, (_, values) in found.items()}
    load_bucket(model, manifest, given, {key: span for key, (span, _) in found.items()})
    synchronize(device)
    return standing(model, manifest, sum(message.num_bytes for message in exchange.messages[rank]))


def _device(model: Any) -> torch.device:
    device: torch.device = next(model.parameters()).device
    return device


def load_bucket(
    model: Any, manifest: BucketManifest, given: Mapping[str, Tensor], held: Mapping[str, Span] | None = None
) -> None:
    """SGLang loads whole tensors, and GPT-OSS's experts a layer at a time. Of parts of tensors, and of one expert,
    those that stand in this rank are copied to where they belong.
    `held`: the parts that `given` has; None: all that was sent."""
    spans = {entry.key: entry.span for entry in manifest.tensors} if held is None else held
    came = [entry for entry in manifest.tensors if entry.key in given]
    is_part = {e.key: given[e.key].shape != e.shape or is_entry(e.name) for e in came}
    model.load_weights([(e.name, given[e.key]) for e in came if not is_part[e.key]])
    parts = [entry for entry in came if is_part[entry.key]]
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for entry in parts:
            span = spans[entry.key]
            for place in places_of(model, parameters, entry.name, entry.shape):
                common = overlap(span, place.span, entry.shape)
                if common is not None and not place.is_derived:
                    in_model(place, common).copy_(within(given[entry.key], span, common))
            for values in must_be_zero(model, parameters, entry.name):
                values.zero_()
        tie_head(model, parameters, [entry.name for entry in manifest.tensors])
        if derived_from := [entry.name for entry in parts if ".kv_b_proj." in entry.name]:
            model.post_load_weights(weight_names=derived_from)  # as `load_weights` does


def tie_head(model: Any, parameters: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """The embedding came: a head that the engine has of its own, where the two are one, becomes a copy of it."""
    for name in names:
        if (head := tied_head(model, parameters, name)) is not None:
            head.copy_(parameters[name])


def in_model(place: Place, span: Span) -> Tensor:
    """Return the values of a part of the tensor of which `place` holds a part."""
    return within(place.values, place.span, span)


def holds(model: Any, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[tuple[int, int, int]]]:
    """Return, by name, the parts of tensors that stand in this rank. Raises ValueError where the engine keeps a
    tensor in another form.
    """
    parameters = dict(model.named_parameters())
    found: dict[str, list[tuple[int, int, int]]] = {}
    for name, shape in shapes.items():
        spans = [place.span for place in places_of(model, parameters, name, tuple(shape)) if place.count]
        if spans:
            found[name] = [(span.axis, span.start, span.count) for span in dict.fromkeys(spans)]
    return found


def transfer_dir(name: str | None) -> Path:
    """The run's directory: the one that this server was started with, or one in it where the server is older than the
    run. Raises ValueError for what is no plain name."""
    base = Path(os.environ[TRANSFER_DIR])
    if name is None:
        return base
    if name in ("", ".", "..") or "/" in name:
        raise ValueError(f"{name!r} is not the plain name of a directory.")
    return base if base.name == name else base / name


def describe(model: Any) -> dict[str, Any]:
    """Describes the model by the names of config.json, and the type of its weights."""
    config = getattr(model, "config", None)
    found = {name: value for name in DESCRIBED if (value := getattr(config, name, None)) is not None}
    quantised = any(is_quantised(layer) for layer in model.modules())
    return {**found, "is_quantised": quantised, "dtype": str(next(model.parameters()).dtype).removeprefix("torch.")}


def standing(model: Any, manifest: BucketManifest, num_bytes_read: int | None = None) -> dict[str, Any]:
    """The receipt of what stands in this rank for the tensors of a bucket. `num_bytes_read`: that this rank took from
    the medium; None: the parts that it holds, each once."""
    parameters = dict(model.named_parameters())
    parts: dict[str, list[tuple[int, int, int, str]]] = {}
    unlike: dict[str, str] = {}
    misfits: dict[str, str] = {}
    stands_as: dict[str, str] = {}
    num_standing = 0
    for entry in manifest.tensors:
        try:
            places = places_of(model, parameters, entry.name, entry.shape)
        except UnlikeError as error:
            unlike[entry.key] = str(error)
            continue
        except MisfitError as error:
            misfits[entry.key] = str(error)
            continue
        if any(values.any() for values in must_be_zero(model, parameters, entry.name)):
            misfits[entry.key] = "a rank adds it beside the one that has it"
        for place in places:
            common = overlap(entry.span, place.span, entry.shape)
            if common is None:
                continue
            values = _as_sent(in_model(place, common), entry)
            found = as_hex(digest_part(values, entry.shape, common.axis, common.start))
            parts.setdefault(entry.key, []).append((*astuple(common), found))
            num_standing += 0 if place.is_derived else values.numel() * DTYPE_BYTES[entry.dtype]
            if (dtype := str(place.values.dtype).removeprefix("torch.")) != entry.dtype:
                stands_as[entry.key] = dtype
    return {
        "error": None,
        "bucket": manifest.place,
        "names": [entry.name for entry in manifest.tensors],
        "tensors": {entry.key: (entry.shape, astuple(entry.span), entry.dtype) for entry in manifest.tensors},
        "parts": parts,
        "unlike": unlike,
        "misfits": misfits,
        "stands_as": stands_as,
        "num_bytes_read": num_standing if num_bytes_read is None else num_bytes_read,
        "num_bytes_standing": num_standing,
    }


def compare(model: Any, manifest: BucketManifest, given: Mapping[str, Tensor]) -> dict[str, bool]:
    """Tells by key whether all that stands here of an entry equals the bytes of the bucket."""
    parameters = dict(model.named_parameters())
    equal: dict[str, bool] = {}
    for entry in manifest.tensors:
        try:
            places = places_of(model, parameters, entry.name, entry.shape)
        except (UnlikeError, MisfitError):
            continue
        for place in places:
            common = overlap(entry.span, place.span, entry.shape)
            if common is None:
                continue
            standing = in_model(place, common)
            sent = within(given[entry.key], entry.span, common).to(standing.device)
            is_equal = torch.equal(_bits(sent), _bits(_as_sent(standing, entry)))
            equal[entry.key] = is_equal and equal.get(entry.key, True)
    return equal


def _as_sent(values: Tensor, entry: TensorEntry) -> Tensor:
    """Returns values in the type that was sent, where that is the same numbers: engines keep some weights wider."""
    sent = values.detach().to(getattr(torch, entry.dtype))
    is_exact = sent.dtype == values.dtype or torch.equal(_bits(sent.to(values.dtype)), _bits(values))
    return sent if is_exact else torch.full_like(sent, torch.nan)


def _bits(values: Tensor) -> Tensor:
    return values.detach().contiguous().view(torch.uint8)


def incomplete(model: Any, received: set[str]) -> str | None:
    """Names what the model holds and did not get; None: it got everything. `received`: Hugging Face names."""
    parameters = dict(model.named_parameters())
    absent = missing(model, parameters, received)
    if not absent:
        return None
    names = ", ".join(absent[:_NAMES_SHOWN]) + (" and others" if len(absent) > _NAMES_SHOWN else "")
    return f"{len(absent)} of {len(parameters)} parameters never came whole: {names}."


def _received(directory: Path, prefix: str, rank: int) -> set[str]:
    names: set[str] = set()
    for path in directory.glob(f"{prefix}*.{rank}"):
        receipt = json.loads(path.read_text())
        if receipt["error"]:
            raise ValueError(receipt["error"])
        names.update(receipt.get("names", ()))
    return names
