"""Where an engine under Ray listens and what devices it sees: on given machines, without Ray."""

from dataclasses import dataclass, replace

import pytest
from end_to_end_tools import QUICKSTART

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.rollout.engine_interface import EngineError
from rlhf_megatron.runtime.ray.ray_placement import (
    EngineSeating,
    assign_engine_seat,
    count_gpus_per_part,
    find_part_bundle,
    must_share_driver_machine,
)


@dataclass(frozen=True)
class At:
    address: str
    machine: str
    devices: tuple[str, ...] = ()


def ranks(*devices: str, machine: str = "a") -> tuple[At, ...]:
    """One rank a device of that machine."""
    return tuple(At(f"10.0.0.{ord(machine) - 96}", machine, (device,)) for device in devices)


def seating(
    ranks: tuple[At, ...], must_share: bool = False, num_shared: int = 0, first_shared: int = 0
) -> EngineSeating:
    return EngineSeating("engine1", "a", ranks, must_share, num_shared, first_shared)


@pytest.mark.parametrize(
    ("own", "of_run", "must_share", "address"),
    [
        (At("10.0.0.1", "a"), ranks("0", "1"), False, "127.0.0.1"),  # all on the driver's machine
        (At("10.0.0.1", "a"), ranks("0", "1"), True, "127.0.0.1"),
        (At("10.0.0.2", "b"), ranks("0", "1"), False, "10.0.0.2"),  # the engine is not
        (
            At("10.0.0.1", "a"),
            ranks("0") + ranks("0", machine="b"),
            False,
            "10.0.0.1",
        ),  # a rank is not, and sends to it
        (
            At("10.0.0.1", "a"),
            ranks("0") + ranks("0", machine="b"),
            True,
            "127.0.0.1",
        ),  # which it cannot by memory
        (At("10.0.0.2", "b"), ranks("0", machine="b"), False, "10.0.0.2"),  # the driver is not
    ],
)
def test_a_server_listens_to_its_machine_only_where_nobody_else_is_to_reach_it(
    own, of_run, must_share, address
) -> None:
    assert assign_engine_seat(own, seating(of_run, must_share)).address == address


def test_a_server_that_spans_machines_listens_to_them() -> None:
    spans = replace(seating(ranks("0", "1")), spans_machines=True)
    assert assign_engine_seat(At("10.0.0.1", "a"), spans).address == "10.0.0.1", (
        "all else is on the driver's machine"
    )


def test_weights_through_memory_need_the_drivers_machine() -> None:
    with pytest.raises(EngineError) as caught:
        assign_engine_seat(At("10.0.0.2", "b"), seating(ranks("0", "1"), must_share=True))
    assert str(caught.value) == (
        "engine1 was placed on 10.0.0.2, another machine than the driver's, which weights do not"
        " reach: rollout.engine local and rollout.weight_transport tensor go through the driver's"
        " memory; use sglang with process_group or disk, or make room on the driver's machine."
    )


@pytest.mark.parametrize(
    ("own", "of_run", "num_shared", "first_shared", "visible"),
    [
        ((), (), 0, 0, None),  # a CPU: nothing is said
        (
            ("2", "3"),
            ranks("0", "1"),
            0,
            0,
            "2,3,0,1",
        ),  # its own come first, and it opens memory of the others
        (("2", "3"), ranks("0", "1", machine="b"), 0, 0, "2,3"),  # of its machine only
        ((), ranks("0", "1", "2", "3"), 2, 0, "0,1,2,3"),  # takes turns: the first two ...
        ((), ranks("0", "1", "2", "3"), 2, 2, "2,3,0,1"),  # ... the next two
        ((), ranks("0", "0", "1", "1"), 0, 0, "0,1"),  # ranks that share: each once
    ],
)
def test_what_a_server_sees(own, of_run, num_shared, first_shared, visible) -> None:
    seat = assign_engine_seat(
        At("10.0.0.1", "a", own), seating(of_run, False, num_shared, first_shared)
    )
    assert seat.env.get("CUDA_VISIBLE_DEVICES") == visible


def test_turns_with_more_devices_than_there_are() -> None:
    with pytest.raises(EngineError) as caught:
        assign_engine_seat(
            At("10.0.0.1", "a"), seating(ranks("4", "5", "6"), num_shared=2, first_shared=2)
        )
    assert str(caught.value) == (
        "engine1 takes turns with devices 2 to 3 of the ranks on its machine, which have 3"
        " (rollout.colocated); lower rollout.num_engines or its tp-size."
    )


@pytest.mark.parametrize(
    "key", ["rollout.sglang.args.base_gpu_id", "rollout.sglang.args.base-gpu-id"]
)
def test_devices_are_for_ray_to_give(key: str) -> None:
    settings = [
        "rollout.engine=sglang",
        f"{key}=2",
        "rollout.sglang.env.CUDA_VISIBLE_DEVICES='2,3'",
    ]
    load_run_config(QUICKSTART, settings)
    with pytest.raises(ConfigError) as caught:
        load_run_config(QUICKSTART, ["trainer.runtime=ray", *settings])
    said = "names devices, but with trainer.runtime ray each server sees those that Ray gives it"
    for setting in (key, "rollout.sglang.env.CUDA_VISIBLE_DEVICES"):
        assert f"{setting} {said}; remove {setting}." in str(caught.value)


def test_bundles_of_engines_follow_those_of_the_machines() -> None:
    apart = load_run_config(QUICKSTART, ["trainer.runtime=ray", "rollout.num_engines=3"]).config
    assert [
        find_part_bundle(apart.trainer.nnodes, apart.rollout.colocated, index) for index in range(3)
    ] == [1, 2, 3]
    together = load_run_config(
        QUICKSTART, ["trainer.runtime=ray", "rollout.num_engines=3", "rollout.colocated=true"]
    ).config
    assert [find_part_bundle(1, together.rollout.colocated, index) for index in range(3)] == [
        0,
        0,
        0,
    ]


def test_gpus_and_machine_of_an_engine() -> None:
    local = load_run_config(QUICKSTART, ["trainer.runtime=ray"]).config
    assert count_gpus_per_part(local.rollout) == 1 and must_share_driver_machine(local.rollout)
    turns = load_run_config(QUICKSTART, ["trainer.runtime=ray", "rollout.colocated=true"]).config
    assert not must_share_driver_machine(turns.rollout), "memory of its own machine"
    stock = ["trainer.runtime=ray", "rollout.engine=sglang"]
    for transport, expected in (("tensor", True), ("process_group", False), ("disk", False)):
        config = load_run_config(
            QUICKSTART, [*stock, f"rollout.weight_transport={transport}"]
        ).config
        assert must_share_driver_machine(config.rollout) is expected
        assert count_gpus_per_part(config.rollout) == 1, (
            "without arguments nobody asks which there are"
        )
