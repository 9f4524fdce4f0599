"""Runs inside each rank of a stock SGLang server, through its `--custom-weight-loader` hook.

The update call carries one small tensor: a JSON order. The answer is a receipt, a file in the
transfer directory: the error if there was one, the parts of tensors that stand in this rank, and
their digests; `sglang_weight_verbs` joins those of all ranks. Orders, by the key that
they begin with:

    manifest   read this bucket and load it: from its file, the device memory that `memory` names
               for each rank, or the
               link over which the `exchange` goes
    join       become a rank of a link with a copy of the trainer
    leave      end this rank's part of it
    holds      which parts of these tensors stand here?
    digest     this bucket was loaded already, it came another way: digest what stands of it
    compare    does what stands here equal the bytes of this bucket? Asked when digests differ, to
               tell which rank's do
    receipts   has everything come, of all the buckets whose receipts are named so?
    describe   which model is this, and which devices are seen?

What stands is digested while SGLang's session is open, after loading and casting. Closing it
re-lays weights of layers that are quantised, for which nothing is digested, and of expert layers
for some kernels; else it changes nothing.
"""

from __future__ import annotations

import contextlib
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

from rlhf_megatron.device import list_device_ids, synchronize_device
from rlhf_megatron.rollout.sglang.server import sglang_runtime
from rlhf_megatron.rollout.sglang.server.tensor_placement import (
    HeldTensorPart,
    IncomparableFormError,
    SizeMismatchError,
    find_held_parts,
    find_tied_head,
    is_expert_entry,
    is_quantised_layer,
    list_missing_parameters,
    list_values_to_zero,
)
from rlhf_megatron.weights.bucket_buffers import (
    LentSegment,
    map_bucket_file,
    open_lent_segments,
    view_bucket_tensors,
)
from rlhf_megatron.weights.bucket_manifest import DTYPE_BYTES, BucketManifest, TensorEntry
from rlhf_megatron.weights.bucket_messages import (
    BUCKET_TIMEOUT_S,
    BucketExchange,
    EngineRankLinks,
    narrow_to_span,
    receive_bucket,
)
from rlhf_megatron.weights.engine_links import LinkInvitation
from rlhf_megatron.weights.shard_plan import intersect_spans
from rlhf_megatron.weights.tensor_digest import digest_tensor_part, format_digest
from rlhf_megatron.weights.weight_table import TensorSpan
from rlhf_megatron.write_errors import explain_write_errors

logger = logging.getLogger(__name__)

TRANSFER_DIR_VARIABLE = "RLHF_MEGATRON_TRANSFER_DIR"  # environment variable of the server
LOAD_FORMAT = "rlhf_megatron.rollout.sglang.server.loader.load"
DESCRIBED_CONFIG_KEYS = (
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
_links = EngineRankLinks()


def load(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Carry out the order in `named_tensors`, and write this rank's receipt into the transfer
    directory. SGLang calls this function with the model of the rank. Errors are written into the
    receipt: an exception would end the server, whereas the client can report the error and leave
    the engine STALE.
    """
    tensors = dict(named_tensors)
    order = json.loads(bytes(tensors["order"].cpu().tolist()).decode())
    try:
        directory = resolve_transfer_dir(order.get("directory"))
    except (KeyError, ValueError) as error:
        logger.error("an order cannot be carried out: %s %s", TRANSFER_DIR_VARIABLE, error)
        return
    rank, size = sglang_runtime.get_tp_rank_and_size()
    head = {"rank": rank, "size": size}
    try:
        offset_random_seed()
        text = json.dumps({**head, **_carry_out_order(order, model, directory, rank)})
    except Exception as error:  # the client reads the error in the receipt
        text = json.dumps({**head, "error": f"{type(error).__name__}: {error}"})
    _write_receipt(directory / f"{order['receipt']}.{rank}", text)


def _write_receipt(path: Path, text: str) -> None:
    """Write the receipt under another name and rename it, so that the client never reads a part of
    it. An error goes to the server's log: the client reports that this rank wrote no receipt.
    """
    aside = path.with_name(f"{path.name}.tmp")
    try:
        with explain_write_errors(path):
            aside.write_text(text)
            aside.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        logger.error("a receipt is missing: %s", error)


@cache
def offset_random_seed() -> None:
    """Give each rank group under DP attention random numbers of its own, once for each process.
    SGLang gives all groups the same: without seeds, samples of one prompt in different groups would
    be the same sample.
    """
    if group := sglang_runtime.get_attention_dp_rank():
        torch.manual_seed(torch.initial_seed() + group)


def _carry_out_order(
    order: Mapping[str, Any], model: Any, directory: Path, rank: int
) -> dict[str, Any]:
    """Carry out an order of the kinds in the module's docstring, and return the fields of its
    receipt. Raise any error.
    """
    if "describe" in order:
        return {"error": None, "model": describe_model(model), "devices": list_device_ids()}
    if "receipts" in order:
        return {
            "error": describe_missing_parameters(
                model, _read_received_names(directory, order["receipts"], rank)
            )
        }
    if "digest" in order:
        manifest = BucketManifest.parse_json(order["digest"])
        with torch.no_grad():
            copy_tied_head(
                model, dict(model.named_parameters()), [entry.name for entry in manifest.tensors]
            )
        return make_bucket_receipt(model, manifest, num_bytes_read=manifest.tensor_bytes)
    if "join" in order:
        invitation = msgspec.convert(order["join"], LinkInvitation)
        _links.join_link(
            invitation, order["sender"], order["num_senders"], rank, _get_model_device(model)
        )
        return {"error": None}
    if "holds" in order:
        return {"error": None, "holds": list_held_spans(model, order["holds"])}
    if "leave" in order:
        _links.close_link(order["leave"])
        return {"error": None}
    if "exchange" in order:
        return _receive_exchanged_bucket(
            model, BucketManifest.parse_json(order["manifest"]), order["exchange"], rank
        )
    manifest = BucketManifest.parse_json(order["manifest" if "manifest" in order else "compare"])
    if "memory" in order:
        pieces = open_lent_segments(msgspec.convert(order["memory"][rank], list[LentSegment]))
    else:
        pieces = [(0, map_bucket_file(directory / manifest.file, manifest))]
    given = view_bucket_tensors(manifest, pieces)
    if "compare" in order:
        return {"error": None, "compared": compare_with_bucket(model, manifest, given)}
    load_bucket_into_model(model, manifest, given)
    for _, piece in pieces:
        synchronize_device(piece.device)  # its copies are under way
    return make_bucket_receipt(model, manifest)


def _receive_exchanged_bucket(
    model: Any, manifest: BucketManifest, order: Mapping[str, Any], rank: int
) -> dict[str, Any]:
    """Receive this rank's messages of the exchange over the link, load them, and return the
    receipt.
    """
    exchange = msgspec.convert(order, BucketExchange)
    device = _get_model_device(model)
    found = receive_bucket(
        exchange, manifest, _links.find_link(exchange.link), rank, device, BUCKET_TIMEOUT_S
    )
    given = {key: values for key, (_, values) in found.items()}
    load_bucket_into_model(model, manifest, given, {key: span for key, (span, _) in found.items()})
    synchronize_device(device)
    return make_bucket_receipt(
        model, manifest, sum(message.num_bytes for message in exchange.messages[rank])
    )


def _get_model_device(model: Any) -> torch.device:
    """Return the device of the model's parameters."""
    device: torch.device = next(model.parameters()).device
    return device


def load_bucket_into_model(
    model: Any,
    manifest: BucketManifest,
    tensor_by_key: Mapping[str, Tensor],
    held_spans: Mapping[str, TensorSpan] | None = None,
) -> None:
    """Load a bucket into the model. SGLang loads whole tensors, and GPT-OSS's experts a layer at a
    time; of parts of tensors and of single experts, the part that this rank holds is copied to its
    place. `held_spans`: the spans that `tensor_by_key` has; None: the spans of the manifest.
    """
    spans = (
        {entry.key: entry.span for entry in manifest.tensors} if held_spans is None else held_spans
    )
    came = [entry for entry in manifest.tensors if entry.key in tensor_by_key]
    is_part = {
        e.key: tensor_by_key[e.key].shape != e.shape or is_expert_entry(e.name) for e in came
    }
    model.load_weights([(e.name, tensor_by_key[e.key]) for e in came if not is_part[e.key]])
    parts = [entry for entry in came if is_part[entry.key]]
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for entry in parts:
            span = spans[entry.key]
            for place in find_held_parts(model, parameters, entry.name, entry.shape):
                common = intersect_spans(span, place.span, entry.shape)
                if common is not None and not place.is_derived:
                    narrow_held_part(place, common).copy_(
                        narrow_to_span(tensor_by_key[entry.key], span, common)
                    )
            for values in list_values_to_zero(model, parameters, entry.name):
                values.zero_()
        copy_tied_head(model, parameters, [entry.name for entry in manifest.tensors])
        if derived_from := [entry.name for entry in parts if ".kv_b_proj." in entry.name]:
            model.post_load_weights(weight_names=derived_from)  # as `load_weights` does


def copy_tied_head(
    model: Any, parameters: Mapping[str, Tensor], tensor_names: Iterable[str]
) -> None:
    """Where the embedding is among the names, and the engine keeps a separate copy of a tied head,
    copy the embedding to the head.
    """
    for name in tensor_names:
        if (head := find_tied_head(model, parameters, name)) is not None:
            head.copy_(parameters[name])


def narrow_held_part(held_part: HeldTensorPart, span: TensorSpan) -> Tensor:
    """Return a view of the values of `span` of the whole tensor, which must lie inside the held
    part.
    """
    return narrow_to_span(held_part.values, held_part.span, span)


def list_held_spans(
    model: Any, shapes: Mapping[str, Sequence[int]]
) -> dict[str, list[tuple[int, int, int]]]:
    """Return for each tensor, by name, the (dim, start, number of entries) of its parts that this
    rank holds; tensors that it does not hold are left out. Raise ValueError where the engine keeps
    a tensor in another form.
    """
    parameters = dict(model.named_parameters())
    found: dict[str, list[tuple[int, int, int]]] = {}
    for name, shape in shapes.items():
        spans = [
            place.span
            for place in find_held_parts(model, parameters, name, tuple(shape))
            if place.num_entries
        ]
        if spans:
            found[name] = [
                (span.dim, span.start, span.num_entries) for span in dict.fromkeys(spans)
            ]
    return found


def resolve_transfer_dir(directory_name: str | None) -> Path:
    """Return the run's transfer directory: the directory that this server was started with, or
    `directory_name` inside it where the server is older than the run. Raise ValueError where that
    is no plain name, KeyError where the server has no such directory.
    """
    base = Path(os.environ[TRANSFER_DIR_VARIABLE])
    if directory_name is None:
        return base
    if directory_name in ("", ".", "..") or "/" in directory_name:
        raise ValueError(f"{directory_name!r} is not the plain name of a directory.")
    return base if base.name == directory_name else base / directory_name


def describe_model(model: Any) -> dict[str, Any]:
    """Return the model's main settings by the names of config.json, the type of its weights, and
    whether any layer is quantised.
    """
    config = getattr(model, "config", None)
    found = {
        name: value
        for name in DESCRIBED_CONFIG_KEYS
        if (value := getattr(config, name, None)) is not None
    }
    quantised = any(is_quantised_layer(layer) for layer in model.modules())
    return {
        **found,
        "is_quantised": quantised,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }


def make_bucket_receipt(
    model: Any, manifest: BucketManifest, num_bytes_read: int | None = None
) -> dict[str, Any]:
    """Digest the parts that this rank holds of the bucket's tensors, and return the receipt.
    `num_bytes_read` is the number of bytes that this rank took from the medium; None counts the
    parts that it holds, each once.
    """
    parameters = dict(model.named_parameters())
    parts: dict[str, list[tuple[int, int, int, str]]] = {}
    unlike: dict[str, str] = {}
    misfits: dict[str, str] = {}
    stands_as: dict[str, str] = {}
    num_standing = 0
    for entry in manifest.tensors:
        try:
            places = find_held_parts(model, parameters, entry.name, entry.shape)
        except IncomparableFormError as error:
            unlike[entry.key] = str(error)
            continue
        except SizeMismatchError as error:
            misfits[entry.key] = str(error)
            continue
        if any(values.any() for values in list_values_to_zero(model, parameters, entry.name)):
            misfits[entry.key] = "a rank adds it beside the one that has it"
        for place in places:
            common = intersect_spans(entry.span, place.span, entry.shape)
            if common is None:
                continue
            values = _cast_as_sent(narrow_held_part(place, common), entry)
            found = format_digest(digest_tensor_part(values, entry.shape, common.dim, common.start))
            parts.setdefault(entry.key, []).append((*astuple(common), found))
            num_standing += 0 if place.is_derived else values.numel() * DTYPE_BYTES[entry.dtype]
            if (dtype := str(place.values.dtype).removeprefix("torch.")) != entry.dtype:
                stands_as[entry.key] = dtype
    return {
        "error": None,
        "bucket": manifest.label,
        "names": [entry.name for entry in manifest.tensors],
        "tensors": {
            entry.key: (entry.shape, astuple(entry.span), entry.dtype) for entry in manifest.tensors
        },
        "parts": parts,
        "unlike": unlike,
        "misfits": misfits,
        "stands_as": stands_as,
        "num_bytes_read": num_standing if num_bytes_read is None else num_bytes_read,
        "num_bytes_standing": num_standing,
    }


def compare_with_bucket(
    model: Any, manifest: BucketManifest, tensor_by_key: Mapping[str, Tensor]
) -> dict[str, bool]:
    """Return by entry key whether everything that this rank holds of the entry equals the bytes of
    the bucket. Entries that it does not hold, or cannot compare, are left out.
    """
    parameters = dict(model.named_parameters())
    equal: dict[str, bool] = {}
    for entry in manifest.tensors:
        try:
            places = find_held_parts(model, parameters, entry.name, entry.shape)
        except (IncomparableFormError, SizeMismatchError):
            continue
        for place in places:
            common = intersect_spans(entry.span, place.span, entry.shape)
            if common is None:
                continue
            standing = narrow_held_part(place, common)
            sent = narrow_to_span(tensor_by_key[entry.key], entry.span, common).to(standing.device)
            is_equal = torch.equal(
                _view_as_bytes(sent), _view_as_bytes(_cast_as_sent(standing, entry))
            )
            equal[entry.key] = is_equal and equal.get(entry.key, True)
    return equal


def _cast_as_sent(values: Tensor, entry: TensorEntry) -> Tensor:
    """Return the values in the type that was sent; engines keep some weights wider. Return NaNs
    where the cast would change the numbers.
    """
    sent = values.detach().to(getattr(torch, entry.dtype))
    is_exact = sent.dtype == values.dtype or torch.equal(
        _view_as_bytes(sent.to(values.dtype)), _view_as_bytes(values)
    )
    return sent if is_exact else torch.full_like(sent, torch.nan)


def _view_as_bytes(values: Tensor) -> Tensor:
    """Return the bytes of the values as uint8, so that NaNs compare equal."""
    return values.detach().contiguous().view(torch.uint8)


def describe_missing_parameters(model: Any, received_names: set[str]) -> str | None:
    """Return a message that names parameters of the model that never came whole; None: everything
    came. `received_names` are Hugging Face names.
    """
    parameters = dict(model.named_parameters())
    absent = list_missing_parameters(model, parameters, received_names)
    if not absent:
        return None
    names = ", ".join(absent[:_NAMES_SHOWN]) + (" and others" if len(absent) > _NAMES_SHOWN else "")
    return f"{len(absent)} of {len(parameters)} parameters never came whole: {names}."


def _read_received_names(directory: Path, receipt_prefix: str, rank: int) -> set[str]:
    """Return the tensor names in this rank's receipts with this prefix. Raise ValueError with the
    error of a receipt that has one.
    """
    names: set[str] = set()
    for path in directory.glob(f"{receipt_prefix}*.{rank}"):
        receipt = json.loads(path.read_text())
        if receipt["error"]:
            raise ValueError(receipt["error"])
        names.update(receipt.get("names", ()))
    return names
