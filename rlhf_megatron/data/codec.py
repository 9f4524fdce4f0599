"""Turns objects into bytes for the control channel, recorded steps and the broadcast inside a
replica. Never a pickle.

A message is a small JSON header and raw buffers:

    b"RLM1" | header length, u32 little endian | header | padding | buffer 0 | padding |
        buffer 1 | ...

The header holds the object's tree and the sizes of the buffers. Tensors and bytes take the buffers
in the order of the tree; buffers start at multiples of 64 bytes. Only classes that registered
themselves are decoded; nothing is imported by a name that arrived in a message. A field with a
default may be absent: files outlive the versions of this package, and such a field is one that a
later version added.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from torch import Tensor

from rlhf_megatron.data.direct_file_io import write_large_file_atomically

MAGIC = b"RLM1"
ALIGNMENT = 64  # bytes
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        ),
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
    )
}
# what JSON keeps as it is; floats too, when they are finite
_PLAIN_TYPES = {type(None), bool, int, str}
_PLAIN_NODE_TYPES = _PLAIN_TYPES | {float}
_CLASSES_BY_WIRE_NAME: dict[str, type] = {}
_WIRE_FORMATS: dict[type, WireFormat] = {}

# of runs of a column; shorter ones are joined, since each piece costs the socket a call
SHORT_RUN_BYTES = 1 << 14


class _MessageHeader(msgspec.Struct, forbid_unknown_fields=True):
    tree: Any
    sizes: list[Annotated[int, msgspec.Meta(ge=0)]]  # of the buffers, bytes


_HEADER_DECODER = msgspec.json.Decoder(_MessageHeader)
Class = TypeVar("Class", bound=type)
Buffer = bytes | bytearray | memoryview


class MessagePieces(list[Buffer]):
    """The pieces of a message, to write one after the other. Inside another message it stands
    for its bytes.
    """


@dataclass(frozen=True)
class WireFormat:
    """The names under which a registered class is written: they outlive the names in the code."""

    class_name: str
    wire_fields: dict[str, str]  # attribute -> wire name, in the order of the fields
    attributes: dict[str, str]  # wire name -> attribute
    required_fields: set[str]  # wire names of the fields without a default


@dataclass(frozen=True)
class ColumnRuns:
    """Encoded as the tensor of some rows of `column`, which are not copied."""

    column: Tensor
    runs: Sequence[slice]


def register(
    wire_name: str, renamed_fields: Mapping[str, str] | None = None
) -> Callable[[Class], Class]:
    """Return a class decorator that lets a frozen dataclass be encoded and decoded under
    `wire_name`.

    Files and running processes know the wire names, so a wire name never changes: a class may get
    another name in the code, and a field too, with `renamed_fields` (attribute -> wire name). A
    test holds a list of all of them. Raise ValueError for a name that is taken, a class that is not
    a frozen dataclass, and a renamed field that the class lacks.
    """

    def add_wire_format(cls: Class) -> Class:
        """Register the class under the wire name and return it."""
        name = cls.__qualname__
        if (
            not is_dataclass(
                cls,
            )
            or not cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
        ):
            raise ValueError(f"{name} cannot be registered: it must be a frozen dataclass.")
        other = _CLASSES_BY_WIRE_NAME.setdefault(wire_name, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, name):
            raise ValueError(
                f"the wire name {wire_name!r} of {cls.__module__}.{name} is taken already by"
                f" {other.__module__}.{other.__qualname__}; choose another wire name."
            )
        attributes = [field.name for field in fields(cls)]
        wire_fields = {**dict(zip(attributes, attributes, strict=True)), **(renamed_fields or {})}
        if len(wire_fields) > len(attributes):
            raise ValueError(
                f"{name} has no field {sorted(wire_fields.keys() - set(attributes))} to be renamed;"
                f" it has {attributes}."
            )
        _CLASSES_BY_WIRE_NAME[wire_name] = cls
        _WIRE_FORMATS[cls] = WireFormat(
            wire_name,
            wire_fields,
            {wire_field: attribute for attribute, wire_field in wire_fields.items()},
            {
                wire_fields[field.name]
                for field in fields(cls)
                if field.default is MISSING and field.default_factory is MISSING
            },
        )
        return cls

    return add_wire_format


def list_wire_formats() -> dict[str, list[str]]:
    """Return the wire names of the fields of each class that this process registered, by the
    class's wire name.
    """
    return {
        wire_format.class_name: list(wire_format.wire_fields.values())
        for wire_format in _WIRE_FORMATS.values()
    }


def encode_message(obj: Any) -> bytes:
    """Return an object as the bytes of one message. Tensors are copied once, from whatever device
    they are on; gradients are dropped.

    The object may be None, bool, int, float, str, bytes, list, tuple, dict with str keys, Path,
    dense real tensors and registered dataclasses, nested. Raise ValueError for anything else
    (subclasses such as numpy.float64 included).
    """
    return b"".join(encode_message_pieces(obj))


def encode_message_pieces(obj: Any) -> MessagePieces:
    """Return the pieces of the message that `encode_message` joins; pieces may be views of the
    object's tensors.
    """
    buffers: list[Sequence[Buffer]] = []
    try:
        tree = _pack_object(obj, buffers)
    except RecursionError:
        raise ValueError(
            "cannot encode an object that is nested too deeply or contains itself."
        ) from None
    sizes = [sum(map(len, pieces)) for pieces in buffers]
    header = _encode_header(_MessageHeader(tree, sizes))
    parts = MessagePieces([MAGIC + len(header).to_bytes(4, "little") + header])
    position = len(parts[0])
    for pieces, size in zip(buffers, sizes, strict=True):
        padding = -position % ALIGNMENT
        parts += [bytes(padding), *pieces]
        position += padding + size
    return parts


def decode_message(data: Buffer) -> Any:
    """Return the object that `encode_message` encoded. Raise ValueError when `data` is malformed,
    cut, too long or names an unregistered class.

    Tensors are views into `data` when it is writable (a bytearray), else into one copy of `data`;
    the tensors keep the memory alive.
    """
    view = memoryview(data).cast("B")
    if view.readonly:
        view = memoryview(bytearray(view))
    if len(view) < 8 or view[:4] != MAGIC:
        raise ValueError(
            f"malformed message: {len(view)} bytes that do not start with {MAGIC!r} and a length."
        )
    end = 8 + int.from_bytes(view[4:8], "little")
    if end > len(view):
        raise ValueError(
            f"malformed message: a header of {end - 8} bytes is announced, {len(view) - 8}"
            " bytes follow."
        )
    try:
        header = _decode_header(view[8:end])
        buffers = _slice_buffers(view, end, header.sizes)
        obj = _unpack_node(header.tree, buffers)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"malformed message: {error}.") from error
    if next(buffers, None) is not None:
        raise ValueError("malformed message: it has more buffers than its tree uses.")
    return obj


def write_message_file(path: Path, obj: Any) -> None:
    """Write an object to `path` as one message. At any moment `path` is the old file or the whole
    new one. Make parent directories.
    """
    write_large_file_atomically(path, encode_message_pieces(obj))


def read_message_file(path: Path) -> Any:
    """Return the object that `write_message_file` wrote. Raise ValueError that names the file when
    it is missing or malformed.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist or is not a file.")
    with open(path, "rb") as file:
        data = bytearray(os.fstat(file.fileno()).st_size)
        count = file.readinto(data)
    try:
        return decode_message(memoryview(data)[:count])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _encode_header(header: _MessageHeader) -> bytes:
    """Return the header as JSON bytes; halves of surrogate pairs in a text are escaped."""
    try:
        return msgspec.json.encode(header)
    except UnicodeEncodeError:  # text with half of a surrogate pair: JSON can have it, UTF-8 cannot
        return json.dumps(msgspec.structs.asdict(header)).encode("ascii")


def _decode_header(header: memoryview) -> _MessageHeader:
    """Return the header that JSON bytes hold. Raise msgspec's error, or ValueError, for malformed
    bytes.
    """
    try:
        return _HEADER_DECODER.decode(header)
    except msgspec.DecodeError:
        if b"\\ud" not in bytes(header).lower():
            raise
        return msgspec.convert(json.loads(bytes(header)), _MessageHeader)


def _pack_object(obj: Any, buffers: list[Sequence[Buffer]]) -> Any:
    """Return the tree node of `obj`, and append the bytes of its tensors and bytes objects to
    `buffers`. Plain values and lists are their own nodes; anything else is an object of one key,
    its kind. Raise ValueError for an object that cannot be encoded.
    """
    kind = type(obj)
    if kind in _PLAIN_TYPES:
        return obj
    if kind is float:
        return obj if math.isfinite(obj) else {"float": repr(obj)}
    if kind in (list, tuple):
        nodes = (
            list(obj)
            if set(map(type, obj)) <= _PLAIN_TYPES
            else [_pack_object(item, buffers) for item in obj]
        )
        return nodes if kind is list else {"tuple": nodes}
    if kind is dict:
        if any(type(key) is not str for key in obj):
            raise ValueError(f"cannot encode a dict with keys that are not str: {list(obj)[:3]!r}.")
        return {"dict": {key: _pack_object(value, buffers) for key, value in obj.items()}}
    if kind in (bytes, bytearray, MessagePieces):
        buffers.append(obj if kind is MessagePieces else [obj])
        return {"bytes": sum(map(len, buffers[-1]))}
    if kind is ColumnRuns:
        return {"tensor": _pack_column_runs(obj, buffers)}
    if isinstance(obj, Tensor):
        return {"tensor": _pack_tensor(obj, buffers)}
    if isinstance(obj, Path):
        return {"path": str(obj)}
    wire_format = _WIRE_FORMATS.get(kind)
    if wire_format is not None:
        columns = {
            wire_field: _pack_object(getattr(obj, attribute), buffers)
            for attribute, wire_field in wire_format.wire_fields.items()
        }
        return {"data": [wire_format.class_name, columns]}
    fix = (
        "register the class with data.codec.register"
        if is_dataclass(obj)
        else "convert it to a plain type"
    )
    raise ValueError(f"cannot encode a {kind.__module__}.{kind.__qualname__}; {fix}.")


def _pack_tensor(tensor: Tensor, buffers: list[Sequence[Buffer]]) -> list[Any]:
    """Return [type, shape] of a tensor, and append its bytes to `buffers`. Raise ValueError for a
    type or layout that cannot be encoded.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES or tensor.layout != torch.strided:
        raise ValueError(
            f"cannot encode a tensor of {tensor.dtype} and {tensor.layout};"
            f" known: {', '.join(DTYPES)}."
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # An array without entries can have no stride by which it would be seen as bytes.
    buffers.append([flat.view(torch.uint8).numpy().data if flat.numel() else b""])
    return [dtype, list(tensor.shape)]


def _pack_column_runs(column_runs: ColumnRuns, buffers: list[Sequence[Buffer]]) -> list[Any]:
    """Return [type, shape] of the selected rows of a column, and append their bytes to `buffers`,
    not copied unless the runs are short.
    """
    whole: list[Sequence[Buffer]] = []
    dtype, shape = _pack_tensor(column_runs.column, whole)
    ((view,),) = whole
    row_bytes = len(view) // max(1, shape[0])
    pieces: Sequence[Buffer] = [
        view[run.start * row_bytes : run.stop * row_bytes] for run in column_runs.runs
    ]
    if sum(map(len, pieces)) < SHORT_RUN_BYTES * len(pieces):
        pieces = [b"".join(pieces)]
    buffers.append(pieces)
    return [dtype, [sum(run.stop - run.start for run in column_runs.runs), *shape[1:]]]


def _unpack_node(node: Any, buffers: Iterator[memoryview]) -> Any:
    """Return the object of a tree node; take the bytes of its tensors from `buffers`. Raise
    ValueError for an unknown node.
    """
    kind = type(node)
    if kind in _PLAIN_NODE_TYPES:
        return node
    if kind is list:
        return (
            node
            if set(map(type, node)) <= _PLAIN_NODE_TYPES
            else [_unpack_node(item, buffers) for item in node]
        )
    if len(node) != 1:
        raise ValueError(f"a node must have one key, not {sorted(node)}")
    ((tag, value),) = node.items()
    if tag == "tuple" and type(value) is list:
        return tuple(_unpack_node(value, buffers))
    if tag == "dict" and type(value) is dict:
        return {key: _unpack_node(item, buffers) for key, item in value.items()}
    if tag == "float" and value in ("nan", "inf", "-inf"):
        return float(value)
    if tag == "path" and type(value) is str:
        return Path(value)
    if tag == "bytes" and type(value) is int:
        return bytes(_take_next_buffer(buffers, value))
    if tag == "tensor":
        return _unpack_tensor(value, buffers)
    if tag == "data":
        return _unpack_dataclass(value, buffers)
    raise ValueError(f"unknown node {tag!r}")


def _unpack_tensor(value: Any, buffers: Iterator[memoryview]) -> Tensor:
    """Return the tensor of [type, shape], a view of the next buffer. Raise ValueError for a
    malformed node or buffer.
    """
    if (
        type(value) is not list
        or len(value) != 2
        or value[0] not in list(DTYPES)
        or type(value[1]) is not list
    ):
        raise ValueError("a tensor needs a known dtype and a shape")
    dtype = DTYPES[value[0]]
    shape = value[1]
    if (
        any(type(size) is not int or size < 0 for size in shape)
        or math.prod(size or 1 for size in shape) >= 2**60
    ):
        raise ValueError(f"{shape} is not a shape")
    count = math.prod(shape)
    buffer = _take_next_buffer(buffers, count * dtype.itemsize)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    if dtype is torch.bool and int(torch.frombuffer(buffer, dtype=torch.uint8).max()) > 1:
        raise ValueError("a bool tensor holds bytes other than 0 and 1")
    return torch.frombuffer(buffer, dtype=dtype).reshape(shape)


def _unpack_dataclass(value: Any, buffers: Iterator[memoryview]) -> Any:
    """Return the registered dataclass of [wire name, fields]. Raise ValueError for an unknown
    class, other fields than the class has, or values that it refuses.
    """
    if (
        type(value) is not list
        or len(value) != 2
        or type(value[0]) is not str
        or type(value[1]) is not dict
    ):
        raise ValueError("a dataclass needs a name and its fields")
    name, columns = value
    if name not in _CLASSES_BY_WIRE_NAME:
        raise ValueError(
            f"class {name!r} is not registered here; import the module that registers it"
        )
    cls = _CLASSES_BY_WIRE_NAME[name]
    wire_format = _WIRE_FORMATS[cls]
    missing_fields = wire_format.required_fields - columns.keys()
    unknown_fields = columns.keys() - wire_format.attributes.keys()
    if differing_fields := missing_fields | unknown_fields:
        raise ValueError(
            f"{name} was written with other fields"
            f" (differing: {', '.join(sorted(differing_fields))})"
        )
    values = {
        wire_format.attributes[wire_field]: _unpack_node(node, buffers)
        for wire_field, node in columns.items()
    }
    try:
        return cls(**values)
    except Exception as error:  # whatever the class's own checks raise on values of a wrong type
        raise ValueError(f"{name} refuses its fields ({error})") from error


def _slice_buffers(view: memoryview, position: int, sizes: list[int]) -> Iterator[memoryview]:
    """Return an iterator over the buffers. Raise ValueError unless they fill `view` from `position`
    to its end exactly.
    """
    starts = []
    for size in sizes:
        position += -position % ALIGNMENT
        starts.append(position)
        position += size
    if position != len(view):
        raise ValueError(f"{position} bytes are announced, {len(view)} bytes are there")
    return iter([view[start : start + size] for start, size in zip(starts, sizes, strict=True)])


def _take_next_buffer(buffers: Iterator[memoryview], size: int) -> memoryview:
    """Return the next buffer. Raise ValueError where there is none or it has another size."""
    buffer = next(buffers, None)
    if buffer is None or len(buffer) != size:
        raise ValueError(f"a buffer of {size} bytes is missing")
    return buffer
