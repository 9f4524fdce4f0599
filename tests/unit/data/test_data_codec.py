"""Messages: exact round trips, and nothing but a ValueError for malformed ones."""

import contextlib
import importlib
import json
import math
import pkgutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from data_samples import scored
from hypothesis import given, settings
from hypothesis import strategies as st

import rlhf_megatron
from rlhf_megatron.data import codec
from rlhf_megatron.data.batch import ScoredBatch
from rlhf_megatron.data.replica_plan import plan_replicas


@codec.register("Leaf")
@dataclass(frozen=True)
class Leaf:
    values: torch.Tensor
    name: str = "leaf"


@codec.register("Tree")
@dataclass(frozen=True)
class Tree:
    leaves: tuple[Leaf, ...]
    where: Path | None = None


@codec.register("OldName", {"num_rows": "found"})
@dataclass(frozen=True)
class Renamed:
    num_rows: int
    limit: int = 9


@codec.register("Strict")
@dataclass(frozen=True)
class Strict:
    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("count must be at least 0")


def same(left: Any, right: Any) -> bool:
    """Equal in type, shape and bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        return (
            left.reshape(-1).view(torch.uint8).tolist()
            == right.reshape(-1).view(torch.uint8).tolist()
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    return left == right


def round_trip(obj: Any) -> Any:
    return codec.decode_message(codec.encode_message(obj))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.builds(lambda numbers: torch.tensor(numbers, dtype=torch.float32),
                st.lists(st.floats(width=32), max_size=5)),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(values)
def test_plain_values_round_trip(obj: Any) -> None:
    assert same(round_trip(obj), obj)


@pytest.mark.parametrize("name", sorted(codec.DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_tensors_round_trip(name: str, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape).remainder(2).to(codec.DTYPES[name])
    assert same(round_trip(tensor), tensor)


def test_awkward_tensors() -> None:
    assert same(round_trip(torch.arange(6).reshape(2, 3).T), torch.tensor([[0, 3], [1, 4], [2, 5]]))
    assert same(round_trip(torch.ones(2, requires_grad=True)), torch.ones(2))
    assert same(round_trip(torch.arange(10)[3:5]), torch.tensor([3, 4]))
    bits = torch.tensor([0x7FC1, 0xFF80 - 65536, 1], dtype=torch.int16)
    assert same(round_trip(bits.view(torch.bfloat16)), bits.view(torch.bfloat16))


def test_exact_floats() -> None:
    for value in (0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, 1e22, 3.0):
        assert same(round_trip(value), value)
    assert math.isnan(round_trip(math.nan))
    assert round_trip([1, 1.0, True]) == [1, 1.0, True] and type(round_trip([1, 1.0])[1]) is float


def test_dataclasses_and_paths() -> None:
    tree = Tree((Leaf(torch.tensor([1.5])), Leaf(torch.zeros(0), "empty")), Path("/a/b"))
    back = round_trip({"tree": tree})["tree"]
    assert type(back) is Tree and back.where == Path("/a/b")
    assert [leaf.name for leaf in back.leaves] == ["leaf", "empty"]
    assert back.leaves[0].values.tolist() == [1.5]


def test_batches_and_plans_travel() -> None:
    batch = scored()
    back = round_trip((batch, plan_replicas([3, 1, 2], 2, 8)))
    assert type(back[0]) is ScoredBatch and back[1] == plan_replicas([3, 1, 2], 2, 8)
    for name in ("offsets", "token_ids", "response_mask", "rewards", "labels", "reward_parts"):
        assert same(getattr(back[0], name), getattr(batch, name)), name


def test_decoded_tensors_can_be_written_to_and_share_a_writable_message() -> None:
    message = bytearray(codec.encode_message(torch.zeros(4)))
    tensor = codec.decode_message(message)
    tensor[0] = 1.0
    assert codec.decode_message(message).tolist() == [1.0, 0.0, 0.0, 0.0]
    readonly = codec.encode_message(torch.zeros(4))
    codec.decode_message(readonly).fill_(7.0)
    assert codec.decode_message(readonly).tolist() == [0.0] * 4


def test_buffers_are_aligned() -> None:
    message = bytearray(codec.encode_message([b"x", torch.arange(3)]))
    assert codec.decode_message(message)[1].tolist() == [0, 1, 2]
    assert message.index(struct.pack("<3q", 0, 1, 2)) % codec.ALIGNMENT == 0


@dataclass(frozen=True)
class Unregistered:
    value: int = 0


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        (numpy.float64(1.0), "cannot encode a numpy.float64"),
        ({1: 2}, "keys that are not str"),
        ({1, 2}, "cannot encode a builtins.set"),
        (Unregistered(), "register the class with data.codec.register"),
        (torch.zeros(2, dtype=torch.complex64), "cannot encode a tensor of torch.complex64"),
        (torch.zeros(2).to_sparse(), "torch.sparse_coo"),
    ],
)
def test_what_cannot_be_encoded(obj: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        codec.encode_message([obj])


def test_a_cycle_cannot_be_encoded() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="contains itself"):
        codec.encode_message(loop)


def test_register_refuses() -> None:
    with pytest.raises(ValueError, match="must be a frozen dataclass"):
        codec.register("Thawed")(dataclass(type("Thawed", (), {})))

    other = dataclass(frozen=True)(type("Leaf", (), {"__module__": "elsewhere"}))
    with pytest.raises(ValueError, match=r"'Leaf' of elsewhere\.Leaf is taken already by"):
        codec.register("Leaf")(other)
    with pytest.raises(ValueError, match=r"Strict has no field \['total'\] to be renamed"):
        codec.register("Strict", {"total": "count"})(Strict)


def test_a_renamed_field_keeps_its_wire_name() -> None:
    written = codec.encode_message(Renamed(3, 4))
    assert b'["OldName",{"found":3,"limit":4}]' in written
    assert codec.decode_message(written) == Renamed(3, 4)
    assert codec.decode_message(codec.encode_message([Renamed(3)])) == [Renamed(3, 9)]
    with pytest.raises(ValueError, match=r"OldName was written with other fields \(.*num_rows"):
        codec.decode_message(message({"data": ["OldName", {"num_rows": 3}]}))


def test_the_wire_names_of_the_package_never_change() -> None:
    """A file of wire_names.txt that an older version wrote must stay readable: add
    lines, change none.
    """
    for module in pkgutil.walk_packages(rlhf_megatron.__path__, "rlhf_megatron."):
        source = Path(module.module_finder.path) / (module.name.rpartition(".")[2] + ".py")  # type: ignore[union-attr]
        if source.is_file() and "codec.register(" in source.read_text():
            importlib.import_module(module.name)
    in_package = {
        wire_format.class_name: list(wire_format.wire_fields.values())
        for cls, wire_format in codec._WIRE_FORMATS.items()
        if cls.__module__.startswith("rlhf_megatron.")
    }
    frozen = {}
    for line in (Path(__file__).parent / "wire_names.txt").read_text().splitlines():
        name, _, wire_fields = line.partition(": ")
        frozen[name] = wire_fields.split()
    assert in_package == frozen


def message(tree: Any, sizes: Any = (), body: bytes = b"", **more: Any) -> bytes:
    header = json.dumps({"tree": tree, "sizes": sizes, **more}).encode()
    start = codec.MAGIC + len(header).to_bytes(4, "little") + header
    return start + (bytes(-len(start) % codec.ALIGNMENT) + body if sizes else b"")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "0 bytes that do not start"),
        (b"\x80\x04K\x01.....", "do not start"),
        (
            codec.MAGIC + b"\xff\xff\xff\x7f{}",
            "a header of 2147483647 bytes is announced, 2 bytes follow",
        ),
        (codec.MAGIC + b"\x02\0\0\0{{", "malformed message"),
        (codec.MAGIC + b"\x02\0\0\0[]", "Expected `object`, got `array`"),
        (message(1, extra=1), "unknown field `extra`"),
        (codec.MAGIC + b'\x0a\0\0\0{"tree":1}', "missing required field `sizes`"),
        (message({"data": ["os.system", {}]}), "'os.system' is not registered here"),
        (
            message({"data": ["Leaf", {"name": "x"}]}),
            "written with other fields .differing: values.",
        ),
        (message({"data": ["Leaf", {"y": 1}]}), "written with other fields .differing: values, y."),
        (message({"data": ["Leaf", {"values": 1, "name": "x", "y": 1}]}), "differing: y"),
        (message({"tuple": [], "dict": {}}), "one key"),
        (message({"object": 1}), "unknown node 'object'"),
        (message({"float": "1.0"}), "unknown node 'float'"),
        (message({"tensor": ["float32", [1]]}), "a buffer of 4 bytes is missing"),
        (message({"tensor": ["float32", [2]]}, [4], bytes(4)), "a buffer of 8 bytes is missing"),
        (message({"tensor": ["float32", [-1]]}, [4], bytes(4)), "not a shape"),
        (message({"tensor": ["float32", [True]]}, [4], bytes(4)), "not a shape"),
        (message({"tensor": ["float32", [0, 10**30]]}, [0]), "not a shape"),
        (message({"tensor": ["float32", [0, 2**62, 2**62]]}, [0]), "not a shape"),
        (message({"data": ["Strict", {"count": "x"}]}), "Strict refuses its fields"),
        (message({"tensor": ["float32", 1]}, [4], bytes(4)), "known dtype and a shape"),
        (message({"tensor": ["complex64", [1]]}, [8], bytes(8)), "known dtype and a shape"),
        (message({"tensor": [["x"], [1]]}, [8], bytes(8)), "known dtype and a shape"),
        (message({"tensor": ["bool", [2]]}, [2], b"\0\2"), "bytes other than 0 and 1"),
        (message(1, [4], bytes(4)), "more buffers than its tree uses"),
        (message({"bytes": 4}, [4], bytes(3)), "bytes are announced"),
        (message({"bytes": 4}, [4], bytes(5)), "bytes are announced"),
        (message({"bytes": 4}, [-4], bytes(4)), "Expected `int` >= 0"),
        (message({"bytes": 10**30}, [10**30], bytes(4)), "bytes are announced"),
        (message(1).replace(b'"tree": 1', b'"tree":NaN'), "malformed message"),
    ],
)
def test_malformed_messages(data: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        codec.decode_message(data)


def test_half_of_a_surrogate_pair_travels() -> None:
    assert round_trip({"label": "\ud83d", "\udc00": ["a"]}) == {"label": "\ud83d", "\udc00": ["a"]}


def test_deep_nesting_is_an_error() -> None:
    header = b'{"tree":' + b"[" * 100_000 + b"]" * 100_000 + b',"sizes":[]}'
    with pytest.raises(ValueError, match="malformed message"):
        codec.decode_message(codec.MAGIC + len(header).to_bytes(4, "little") + header)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_message_is_refused_or_decoded_but_never_crashes(data: st.DataObject) -> None:
    whole = codec.encode_message(
        {"a": torch.arange(3), "b": (b"xyz", Leaf(torch.ones(2, dtype=torch.bool)), 1.5)}
    )
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        codec.decode_message(damaged)
    with pytest.raises(ValueError, match="malformed"):
        codec.decode_message(whole[: data.draw(st.integers(0, len(whole) - 1))])


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "steps" / "1.bin"
    codec.write_message_file(path, {"x": torch.arange(3)})
    codec.write_message_file(path, {"x": torch.arange(4)})
    assert codec.read_message_file(path)["x"].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="cannot encode"):
        codec.write_message_file(path, {"x": object()})
    assert codec.read_message_file(path)["x"].tolist() == [0, 1, 2, 3]
    assert [p.name for p in path.parent.iterdir()] == ["1.bin"]

    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"1.bin: malformed message: \d+ bytes are announced"):
        codec.read_message_file(path)
    with pytest.raises(ValueError, match=r"2.bin does not exist"):
        codec.read_message_file(path.with_name("2.bin"))
