"""Which machine an engine is on, which devices it has there, and who sends it weights."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from config_samples import VALID

from rlhf_megatron import device
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.engine_machines import (
    assign_part_machines,
    describe_engine_placement,
)
from rlhf_megatron.config.rules.validate import validate_config
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.yaml_nodes import LoadedConfig
from rlhf_megatron.rollout.engine_interface import EngineAddress, EngineError
from rlhf_megatron.rollout.local.local_launch import assign_local_devices
from rlhf_megatron.rollout.sglang.sglang_environment import count_engine_gpus_per_machine
from rlhf_megatron.rollout.transports.weight_delivery import assign_engines_to_copies
from rlhf_megatron.runtime.torchrun.machine_servers import (
    KeeperPoolSpec,
    ServerMachines,
    assign_engine_part_seat,
    assign_reward_server_seat,
)
from rlhf_megatron.weights.parallel_layout import ParallelLayout

TWO = ["trainer.nnodes=2", "actor.megatron.pipeline_model_parallel_size=1"]
FOUR_ENGINES = [*TWO, "rollout.num_engines=4"]
SERVED = ["reward_model.path=judge", "reward_model.served.num_servers=3"]
DISK = "rollout.weight_transport=disk"
RAY_SPLIT = ["trainer.n_gpus_per_node=1"]  # one tensor parallel group over both machines
SPANS = ["rollout.engine=sglang", "rollout.sglang.args={nnodes: 2, tp_size: 4}", DISK]
FOUR_MACHINES = ["trainer.nnodes=4", "actor.megatron.pipeline_model_parallel_size=1"]


@pytest.fixture
def load(tmp_path: Path) -> Callable[[list[str]], LoadedConfig]:
    path = tmp_path / "run.yaml"
    path.write_text(VALID)
    return lambda overrides: read_run_config(path, overrides)


@pytest.mark.parametrize(
    ("overrides", "machines"),
    [
        (["rollout.num_engines=3"], [0, 0, 0]),
        (FOUR_ENGINES, [0, 1, 0, 1]),
        ([*FOUR_ENGINES, "rollout.engine_machines=[1]"], [1, 1, 1, 1]),
        ([*FOUR_ENGINES, "rollout.engine_machines=[2,3]", DISK], [2, 3, 2, 3]),
        # One tensor parallel group over both machines of one rank each: no machine has
        # the actor whole.
        ([*TWO, "trainer.n_gpus_per_node=1", "rollout.num_engines=2"], [0, 0]),
        # Of two machines of 3 ranks at tp 2, each has a copy whole and half of another.
        ([*TWO, "trainer.n_gpus_per_node=3", "rollout.num_engines=2"], [0, 1]),
        (["trainer.runtime=ray", *FOUR_ENGINES], [0, 0, 0, 0]),
        (["trainer.runtime=ray", *FOUR_ENGINES, "rollout.colocated=true"], [0, 1, 0, 1]),
        ([*FOUR_MACHINES, *SPANS, "rollout.num_engines=2"], [0, 1, 2, 3]),
        (
            [*FOUR_MACHINES, *SPANS, "rollout.num_engines=3", "rollout.engine_machines=[4,5]"],
            [4, 5] * 3,
        ),
    ],
)
def test_engines_are_dealt_to_machines_that_weights_reach(
    load, overrides: list[str], machines: list[int]
) -> None:
    assert assign_part_machines(load(overrides).config) == machines


def test_the_rule_is_told(load) -> None:
    assert (
        describe_engine_placement(load(FOUR_ENGINES).config)
        == "machine 0: engine0, engine2; machine 1: engine1, engine3"
    )
    given = [*FOUR_ENGINES[:-1], *SERVED, "reward_model.served.machines=[1]"]
    assert (
        describe_engine_placement(load(given).config)
        == "machine 0: engine0; machine 1: reward0, reward1, reward2"
    )
    assert describe_engine_placement(load([]).config) == ""
    ray = ["trainer.runtime=ray", *FOUR_ENGINES]
    assert describe_engine_placement(load(ray).config) == "all on the driver's"
    assert (
        describe_engine_placement(load([*ray, "rollout.engine=sglang", DISK]).config)
        == "where Ray finds room"
    )
    spans = load([*FOUR_MACHINES, *SPANS, "rollout.num_engines=2"]).config
    assert describe_engine_placement(spans) == (
        "machine 0: engine0; machine 1: engine0-part1; machine 2: engine1; machine 3: engine1-part1"
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["rollout.engine_machines=[1,1]"],
            "rollout.engine_machines ([1, 1]) must name each machine once",
        ),
        (
            ["rollout.engine_machines=[2]"],
            "(tensor) does not reach engines on machines [2] of 2 with ranks",
        ),
        (
            ["rollout.colocated=true", "trainer.runtime=ray"],
            (
                "(true) needs an engine on each machine with ranks, 0 to 1, and no other, but"
                " rollout.num_engines (1) are"
            ),
        ),
        (
            [*RAY_SPLIT, "rollout.num_engines=2", "rollout.colocated=true", "trainer.runtime=ray"],
            (
                "(tensor) does not reach engines on machines [0, 1] of 2 with ranks"
                " (trainer.nnodes): no whole copy"
            ),
        ),
        (
            ["rollout.colocated=true"],
            "(true) needs an engine on each machine with ranks, 0 to 1, and no other, but",
        ),
        (
            [*SPANS, "rollout.weight_transport=tensor", "rollout.transfer_dir=/shared"],
            (
                "(tensor) goes through memory of one machine, which an engine on 2"
                " (rollout.sglang.args.nnodes) does not"
            ),
        ),
        (
            [*SPANS, "rollout.engine_machines=[1]"],
            "nnodes (2) needs so many machines for one engine, but engines can",
        ),
        (
            [*SPANS, "rollout.sglang.args.tp_size=3"],
            "nnodes (2) must divide the ranks of an engine (tp_size 3)",
        ),
        (
            [*SPANS, "rollout.sglang.args.nnodes=0"],
            "nnodes (0) must be a number of machines, 1 or more",
        ),
        (
            [*SPANS, "rollout.sglang.args.node_rank=1"],
            "node_rank is set by the run: nnodes says how many machines",
        ),
    ],
)
def test_what_cannot_be_is_refused(load, overrides: list[str], words: str) -> None:
    (problem,) = validate_config(load([*TWO, *overrides]))
    assert words in problem


def test_an_engine_on_each_machine_may_be_colocated(load) -> None:
    assert validate_config(load([*TWO, "rollout.colocated=true", "rollout.num_engines=2"])) == []


def test_keepers_are_where_the_controller_is_not(load) -> None:
    def keepers(*settings: str) -> KeeperPoolSpec | None:
        return ServerMachines.from_config(load([*settings]).config).keeper_pool

    pool = keepers(*FOUR_ENGINES, "rollout.engine_machines=[0,2,5]", DISK)
    assert (
        pool is not None
        and pool.machines == (2, 5)
        and pool.format_rank_label(1) == "[engines of machine 5]"
    )
    assert keepers() is None
    pool = keepers(*SERVED, "reward_model.served.machines=[0,4]")
    assert pool is not None and pool.machines == (4,)
    assert keepers(*SERVED) is None, "the controller's machine has them"


def test_devices_of_an_engine_follow_those_of_the_ranks(
    load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "count_devices", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def devices(machine: int, place: int, *overrides: str) -> str:
        config: RunConfig = load(
            [*TWO, "trainer.n_gpus_per_node=6", "trainer.device=auto", *overrides]
        ).config
        return assign_engine_part_seat(
            config.rollout, config.trainer, machine, place, "10.0.0.2"
        ).env["CUDA_VISIBLE_DEVICES"]

    assert devices(1, 0) == "6,0,1,2,3,4,5", "its own first; it opens the memory of the others"
    assert devices(1, 1) == "7,0,1,2,3,4,5"
    assert devices(2, 1) == "1", "no ranks are there"
    assert devices(1, 1, "rollout.colocated=true") == "1,0,2,3,4,5"
    assert count_engine_gpus_per_machine({"tp-size": 16, "nnodes": 2}) == 8
    with pytest.raises(
        EngineError, match="engine 2 of machine 1 needs devices 8 to 8, but 8 are visible there"
    ):
        devices(1, 2)


def test_devices_of_a_server_of_the_reward_model_follow_those_of_the_engines(
    load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "count_devices", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def devices(index: int, *overrides: str) -> str:
        settings = [
            *FOUR_ENGINES,
            *SERVED,
            "trainer.n_gpus_per_node=4",
            "trainer.device=auto",
            *overrides,
        ]
        return assign_reward_server_seat(
            ServerMachines.from_config(load(settings).config), index, "10.0.0.2"
        ).env["CUDA_VISIBLE_DEVICES"]

    assert [devices(index) for index in (0, 1)] == ["6", "7"], (
        "behind 4 ranks and 2 of the 4 engines"
    )
    assert [devices(index, "reward_model.served.machines=[1,2]") for index in (0, 1, 2)] == [
        "6",
        "0",
        "7",
    ]
    assert devices(1, "rollout.colocated=true") == "1", "it takes turns with the ranks"
    with pytest.raises(
        EngineError, match="reward2 needs devices 8 to 8 of machine 0, but 8 are visible there"
    ):
        devices(2)


def test_bundled_servers_of_one_machine_share_its_free_devices_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "count_devices", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,6,7")
    visible = device.list_visible_devices()

    def taken(num_engines: int, num_trainer: int, is_shared: bool = False) -> list[str]:
        return [
            env["CUDA_VISIBLE_DEVICES"]
            for env in assign_local_devices(num_engines, visible, num_trainer, is_shared)
        ]

    assert taken(2, 2) == ["6,4,5", "7,4,5"], "its own first; it opens the memory of the ranks"
    assert taken(3, 2) == ["6,4,5", "7,4,5", "6,4,5"]
    assert taken(2, 4) == ["4,5,6,7", "5,4,6,7"], "none is free"
    assert taken(2, 2, is_shared=True) == ["4,5", "5,4"], "they take turns"
    assert assign_local_devices(2, [], 2, False) == [{}, {}], "no device"


def addresses(*machines: int) -> list[EngineAddress]:
    return [
        EngineAddress(f"e{i}", "local", "", "", machine=machine)
        for i, machine in enumerate(machines)
    ]


@pytest.mark.parametrize(
    ("layout", "each", "machines", "served"),
    [
        (ParallelLayout(4), None, (0, 0), {0: ["e0"], 1: ["e1"], 2: [], 3: []}),
        (ParallelLayout(4), 2, (0, 1, 0, 1, 1), {0: ["e0"], 1: ["e2"], 2: ["e1", "e4"], 3: ["e3"]}),
        (ParallelLayout(8, tp=2), 4, (0, 1), {0: ["e0"], 1: [], 2: ["e1"], 3: []}),
        (
            ParallelLayout(4, tp=4),
            2,
            (0,),
            {},
        ),  # no machine has a copy: whole tensors from the first rank
        (ParallelLayout(4, pp=2), 2, (0,), {}),
    ],
)
def test_copies_serve_the_engines_of_their_machine(
    layout: ParallelLayout,
    each: int | None,
    machines: tuple[int, ...],
    served: dict[int, list[str]],
) -> None:
    place: Any = SimpleNamespace(
        layout=layout, rank=0, is_in_pieces=False, device=torch.device("cpu")
    )
    found = assign_engines_to_copies(place, "tensor", addresses(*machines), each)
    assert {copy: [engine.name for engine in mine] for copy, mine in found.items()} == served
