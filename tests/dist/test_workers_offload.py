"""Storages without bytes: parts of a model leave the device and come back bit for bit, with
all their views.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import workers_reference as reference
from dist_pool import DistPool
from torch import Tensor
from workers_critic_jobs import make_critic
from workers_jobs import OVERLAPPED, SHARDED, StateSource, make_actor, share

from rlhf_megatron.data.batch import MiniBatch, ValueMiniBatch
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers import offload
from rlhf_megatron.ranks.workers.offload import OffloadableMemory

NAME = "qwen3_tied"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return {key: value.clone() for key, value in reference.make_model(NAME).state_dict().items()}


def storages_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address of each storage object -> its bytes."""
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().size() for tensor in tensors}


def live_storages() -> dict[int, int]:
    """Of every tensor that Python knows in this process."""
    gc.collect()
    return storages_of(found for found in gc.get_objects() if isinstance(found, Tensor))


# --- Offload on plain tensors ---------------------------------------------------------------------


def test_views_stay_views_and_pieces_are_cut_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 128 bytes: the storages of 400, 36 and 4 bytes lie over five of them."""
    monkeypatch.setattr(offload, "PIECE_BYTES", 128)
    flat = torch.arange(100, dtype=torch.float32)
    view = flat[10:20]
    odd = torch.arange(36, dtype=torch.uint8)
    count = torch.tensor(7.0)
    part = OffloadableMemory("model", CPU, {"parameters": lambda: [view, flat, odd, count]})
    assert part.device_bytes == 440 and part.host_bytes == 0
    part.drop_parts()
    assert [t.untyped_storage().size() for t in (flat, view, odd, count)] == [0, 0, 0, 0]
    assert part.device_bytes == 0 and part.host_bytes == 448 + 64 + 64
    part.drop_parts()
    part.restore_parts()
    assert torch.equal(flat, torch.arange(100.0)) and torch.equal(
        odd, torch.arange(36, dtype=torch.uint8)
    )
    assert count.item() == 7.0 and part.device_bytes == 440
    flat[10] = -1.0
    assert view[0] == -1.0, "the view has lost its buffer"
    part.drop_parts()
    part.restore_parts()
    assert view[0] == -1.0 and flat[99] == 99


def test_parts_are_apart_and_what_they_share_belongs_to_the_first() -> None:
    """As with a distributed optimizer in float32,
    whose main parameters are views of the model's.
    """
    parameters = torch.arange(8.0)
    gradients = torch.ones(8)
    moments = torch.full((4,), 2.0)
    parts = {
        "parameters": lambda: [parameters],
        "gradients": lambda: [gradients],
        "optimizer": lambda: [parameters[2:6], gradients[:4], moments],
    }
    whole = OffloadableMemory("actor", CPU, parts)
    assert whole.device_bytes == 32 + 32 + 16
    whole.drop_parts(["gradients", "optimizer"])
    assert [t.untyped_storage().size() for t in (parameters, gradients, moments)] == [32, 0, 0]
    assert whole.device_bytes == 32 and whole.host_bytes == 64, "gradients are not kept"
    with pytest.raises(
        RuntimeError, match="optimizer of the actor are in host memory; restore them"
    ):
        whole.require_parts(["parameters", "optimizer"])
    whole.require_parts(["parameters"])
    whole.drop_parts(["parameters"])
    whole.restore_parts(["optimizer", "parameters", "gradients"])
    assert parameters.tolist() == list(range(8)) and moments.tolist() == [2.0] * 4
    assert gradients.tolist() == [0.0] * 8


def test_what_was_only_read_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = offload._HostCopy.copy_from_device
    monkeypatch.setattr(
        offload._HostCopy,
        "copy_from_device",
        lambda self, storages: (taken.append(len(storages)), take(self, storages))[1],
    )
    weights = torch.arange(5.0)
    part = OffloadableMemory("reference", CPU, {"parameters": lambda: [weights]})
    part.drop_parts()
    part.restore_parts(is_read_only=True)
    part.drop_parts()
    assert taken == [1]
    part.restore_parts(is_read_only=True)
    assert weights.tolist() == [0, 1, 2, 3, 4]
    part.require_parts(["parameters"], will_change=True)
    weights.mul_(2)
    part.drop_parts()
    assert taken == [1, 1], "what changed was not copied"
    part.restore_parts()
    part.drop_parts()
    assert taken == [1, 1, 1], "whoever restores without a promise may change what there is"
    part.restore_parts()
    assert weights.tolist() == [0, 2, 4, 6, 8]


def test_a_part_that_grows_gets_more_room() -> None:
    tensors = [torch.arange(4.0)]
    part = OffloadableMemory("actor", CPU, {"optimizer": lambda: tensors})
    part.drop_parts()
    part.restore_parts()
    tensors.append(torch.arange(100.0))
    part.drop_parts()
    assert part.host_bytes == 64 + 448
    part.restore_parts()
    assert tensors[0].tolist() == [0, 1, 2, 3] and torch.equal(tensors[1], torch.arange(100.0))


# --- workers on every rank ------------------------------------------------------------------------


def parts_of(worker: Any) -> dict[str, list[Tensor]]:
    """By walking through Megatron's objects, without what the worker says of itself."""
    chunks = worker.backend.chunks
    parameters = [parameter for chunk in chunks for parameter in chunk.module.parameters()]
    adams = [
        part.optimizer for part in worker.backend.optimizer.megatron_optimizer.chained_optimizers
    ]
    mains = [main for adam in adams for group in adam.param_groups for main in group["params"]]
    held = storages_of(parameters)
    states = [value for adam in adams for state in adam.state.values() for value in state.values()]
    own_mains = [main for main in mains if main.untyped_storage()._cdata not in held]
    return {
        "parameters": parameters,
        "gradients": [parameter.main_grad for parameter in parameters],
        "optimizer": [*states, *own_mains],
    }


def sizes(tensors: dict[str, list[Tensor]]) -> dict[str, int]:
    return {part: sum(storages_of(of_part).values()) for part, of_part in tensors.items()}


def away_and_back(
    world: World,
    state: dict[str, Tensor],
    batch: Any,
    dtype: torch.dtype,
    megatron: dict[str, Any],
    role: str,
) -> dict[str, Any]:
    """Two equal workers make two steps; one of them leaves the device between its steps."""
    is_critic = role == "critic"
    shard, plan = share(world, batch, 40)
    before = live_storages()

    def make() -> Any:
        if is_critic:
            return make_critic(
                world, NAME, StateSource(state), dtype, megatron=megatron, bucket_size=20_000
            )
        return make_actor(world, NAME, state, dtype=dtype, megatron=megatron, bucket_size=20_000)

    def look(worker: Any) -> Any:
        if is_critic:
            return worker.values(shard, plan)
        return worker.log_probs(shard, plan, reference.TEMPERATURE)

    def update(worker: Any) -> Any:
        return (
            worker.update(shard, plan)
            if is_critic
            else worker.update(shard, plan, reference.TEMPERATURE, "sft")
        )

    worker = make()
    first = update(worker)
    held = parts_of(worker)
    full = sizes(held)
    found: dict[str, Any] = {
        "full": full,
        "reported": worker.memory_report().held_bytes,
        "steps": [],
    }
    kept = {
        part: [tensor.detach().clone() for tensor in held[part]]
        for part in ("parameters", "optimizer")
    }
    # With overlap_param_gather the others' shards arrive with the next pass, or when the
    # parameters are dropped.
    worker.backend.gather_parameters()
    kept["parameters"] = [tensor.detach().clone() for tensor in held["parameters"]]
    offsets = {part: [tensor.storage_offset() for tensor in held[part]] for part in held}
    for part in ("gradients", "optimizer", "parameters"):
        worker.offload((part,))
        found["steps"].append(sizes(held))
    found["empty"] = (worker.memory_report().held_bytes, worker.memory_report().copied_bytes)
    mine = {
        id(piece)
        for copy in worker.offloadable_memory._host_copies.values()
        for piece in copy._pieces
    }
    host_copies = storages_of(
        t for t in gc.get_objects() if isinstance(t, Tensor) and id(t) in mine
    )
    clones = storages_of([tensor for tensors in kept.values() for tensor in tensors])
    others = live_storages().items()
    found["left"] = sum(
        n for key, n in others if key not in before and key not in host_copies and key not in clones
    )
    found["refused"] = [
        refusal(lambda: look(worker)),
        refusal(lambda: update(worker)),
        refusal(worker.export_shards),
        refusal(worker.check_replicas),
        refusal(lambda: worker.begin_save(None)),
        refusal(lambda: worker.save_weights(None)),
        refusal(lambda: worker.reset_optimizer("rl")),
    ]
    worker.onload(("parameters",))
    found["steps"].append(sizes(held))
    seen = look(worker)
    worker.onload()
    found["back"] = sizes(held)
    found["equal"] = all(
        torch.equal(now, then)
        for part in ("parameters", "optimizer")
        for now, then in zip(held[part], kept[part], strict=True)
    )
    found["views"] = offsets == {
        part: [tensor.storage_offset() for tensor in held[part]] for part in held
    } and all(
        now.untyped_storage()._cdata == then.untyped_storage()._cdata
        for part, tensors in parts_of(worker).items()
        for now, then in zip(tensors, held[part], strict=True)
    )
    found["gradients"] = sum(float(tensor.abs().sum()) for tensor in held["gradients"])
    second = update(worker)

    other = make()
    expected = [update(other)]
    expected_look = look(other)
    expected.append(update(other))
    found["updates"] = [first, second] == expected
    found["looks"] = (seen is None) == (expected_look is None) and (
        seen is None
        or torch.equal(*((x.values if is_critic else x.log_probs) for x in (seen, expected_look)))
    )
    pairs = [(parts_of(w)["parameters"], parts_of(w)["optimizer"]) for w in (worker, other)]
    found["next"] = all(
        torch.equal(a, b)
        for mine, its in zip(*pairs, strict=True)
        for a, b in zip(mine, its, strict=True)
    )
    found["has_learnt"] = any(
        not torch.equal(a, b) for a, b in zip(held["parameters"], kept["parameters"], strict=True)
    )
    return found


def refusal(action: Any) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return "nothing was refused"


def check(ranks: list[dict[str, Any]], dtype: torch.dtype) -> None:
    for found in ranks:
        full = found["full"]
        assert all(full.values())
        # Two float32 moments and, of bfloat16, a float32 copy; of the distributed optimizer this
        # rank's part of them.
        assert found["reported"] == sum(full.values())
        away = [{}, {"gradients": 0}, {"gradients": 0, "optimizer": 0}, dict.fromkeys(full, 0)]
        assert found["steps"] == [
            *({**full, **part} for part in away[1:]),
            {**dict.fromkeys(full, 0), "parameters": full["parameters"]},
        ]
        assert (
            found["empty"][0] == 0 and found["empty"][1] >= full["parameters"] + full["optimizer"]
        )
        # Random states and counters; neither activations nor buffers of a pass.
        assert found["left"] < 6_000 < min(full.values()) / 4, (
            f"{found['left']} bytes stayed of {full}"
        )
        assert [("in host memory; restore them before" in words) for words in found["refused"]] == [
            True
        ] * 7
        assert (
            found["back"] == full and found["equal"] and found["views"] and found["gradients"] == 0
        )
        assert found["updates"] and found["looks"] and found["next"] and found["has_learnt"]


LAYOUTS = [
    pytest.param(
        "actor", torch.float32, {"tp": 2, "sequence_parallel": True, "megatron": {}}, id="tp2 sp"
    ),
    pytest.param(
        "actor", torch.bfloat16, {"dp": 2, "megatron": OVERLAPPED}, id="dp2 overlapped bf16"
    ),
    pytest.param(
        "critic", torch.bfloat16, {"pp": 2, "vpp": 2, "megatron": {}}, id="critic pp2 vpp2 bf16"
    ),
    pytest.param(
        "actor",
        torch.float32,
        {"pp": 2, "megatron": SHARDED},
        id="pp2 sharded",
        marks=pytest.mark.long,
    ),
    pytest.param(
        "critic",
        torch.float32,
        {"cp": 2, "megatron": SHARDED},
        id="critic cp2",
        marks=pytest.mark.long,
    ),
    pytest.param(
        "actor",
        torch.bfloat16,
        {"tp": 2, "pp": 2, "vpp": 2, "dp": 2, "sequence_parallel": True, "megatron": OVERLAPPED},
        id="tp2 sp pp2 vpp2 dp2 bf16",
        marks=pytest.mark.long,
    ),
    pytest.param(
        "actor",
        torch.float32,
        {"tp": 2, "pp": 2, "dp": 2, "megatron": SHARDED},
        id="8 ranks",
        marks=pytest.mark.long,
    ),
]


@pytest.mark.dist
@pytest.mark.parametrize(("role", "dtype", "layout"), LAYOUTS)
def test_the_next_step_is_that_of_a_worker_that_never_left(
    dist_pool: DistPool,
    state: dict[str, Tensor],
    role: str,
    dtype: torch.dtype,
    layout: dict[str, Any],
) -> None:
    batch: MiniBatch | ValueMiniBatch = reference.make_batch()
    if role == "critic":
        batch = reference.make_value_batch(torch.zeros(batch.token_ids.numel()))
    ranks = dist_pool.run(
        away_and_back, state=state, batch=batch, dtype=dtype, role=role, timeout_s=300, **layout
    )
    check(ranks, dtype)
