"""What a run asks a Ray cluster for, what it says where there is no room, and the environment of
its processes.
"""

import importlib.metadata
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from config_samples import VALID

from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.validate import validate_config
from rlhf_megatron.config.schema import (
    CriticConfig,
    MegatronConfig,
    RayConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from rlhf_megatron.runtime.ray import ray_environment
from rlhf_megatron.runtime.ray.ray_placement import (
    ResourceBundle,
    count_own_cluster_cpus,
    describe_shortage,
    make_engine_bundles,
    make_rank_bundles,
)

TWO_OF_FOUR = RunConfig(
    trainer=TrainerConfig(runtime="ray", nnodes=2, n_gpus_per_node=4),
    rollout=RolloutConfig(num_engines=3),
    ray=RayConfig(num_cpus_per_rank=2.0, num_cpus_per_engine=3.0),
)


def of_ranks(config: RunConfig, uses_gpus: bool) -> tuple[ResourceBundle, ...]:
    return make_rank_bundles(config.trainer, config.ray, config.rollout, uses_gpus)


def of_engines(config: RunConfig, uses_gpus: bool, **options: int) -> tuple[ResourceBundle, ...]:
    return make_engine_bundles(config.rollout, config.ray, uses_gpus, **options)


def test_a_machine_has_its_ranks_in_one_bundle_and_each_engine_one_of_its_own() -> None:
    assert of_ranks(TWO_OF_FOUR, True) == (
        ResourceBundle("ranks 0-3", 8.0, 4),
        ResourceBundle("ranks 4-7", 8.0, 4),
    )
    assert of_ranks(TWO_OF_FOUR, False)[1].resources == {"CPU": 8.0}
    assert of_engines(TWO_OF_FOUR, True, gpus_per_part=2) == tuple(
        ResourceBundle(f"engine{index}", 3.0, 2) for index in range(3)
    )
    assert (
        count_own_cluster_cpus(
            [
                *of_ranks(TWO_OF_FOUR, False),
                *of_engines(TWO_OF_FOUR, False),
            ],
            4,
        )
        == 25
    )
    assert count_own_cluster_cpus([ResourceBundle("rank 0", 0.5)], 4) == 4


def test_colocated_engines_share_the_bundles_of_the_ranks() -> None:
    """Three engines in turns on two machines: two on the first."""
    config = replace(TWO_OF_FOUR, rollout=replace(TWO_OF_FOUR.rollout, colocated=True))
    assert [bundle.num_cpus for bundle in of_ranks(config, True)] == [
        8 + 2 * 3,
        8 + 3,
    ]
    assert [bundle.num_gpus for bundle in of_ranks(config, True)] == [
        4,
        4,
    ]
    assert of_engines(config, True) == ()


def test_a_pool_of_the_critic_is_part_of_the_machines_shares() -> None:
    config = RunConfig(
        trainer=TrainerConfig(nnodes=3, n_gpus_per_node=2), critic=CriticConfig(num_ranks=2)
    )
    assert of_ranks(config, True) == tuple(
        ResourceBundle(f"ranks {r}-{r + 1}", 2.0, 2) for r in (0, 2, 4)
    )
    one = RunConfig(trainer=TrainerConfig(nnodes=1, n_gpus_per_node=1))
    assert of_ranks(one, False) == (ResourceBundle("rank 0", 1.0, 0),)


def test_a_bundle_may_name_its_machine() -> None:
    bundle = ResourceBundle("engine0", 1.0, 0, machine_address="10.0.0.7")
    assert bundle.resources == {"CPU": 1.0, "node:10.0.0.7": 0.001}
    assert str(bundle) == "engine0: 1 CPU on 10.0.0.7"


@pytest.mark.parametrize(
    ("bundles", "machines", "words"),
    [
        (
            [ResourceBundle("ranks 0-3", 4, 4)],
            [{"CPU": 8, "GPU": 2}],
            "4 CPU, 4 GPU are asked for, and there are 8 CPU, 2 GPU.",
        ),
        (
            [ResourceBundle("ranks 0-3", 4, 4)],
            [{"CPU": 8, "GPU": 2}] * 2,
            "No machine is large enough for each of these shares.",
        ),
        ([ResourceBundle("ranks 0-3", 4)], [{"CPU": 8}], "There would be room, but others use it."),
        ([ResourceBundle("rank 0", 1)], [], "1 CPU are asked for, and there are none."),
    ],
)
def test_no_room_says_what_is_missing(
    bundles: list[ResourceBundle], machines: list[dict[str, float]], words: str
) -> None:
    said = describe_shortage(bundles, machines, 2.0, is_own_cluster=False)
    assert words in said and str(bundles[0]) in said
    assert all(f"machine {n}: 8 CPU" in said for n in range(len(machines)))
    assert "add machines to the cluster" in said and "ray.num_cpus_per_rank" in said
    assert "after 2 s (ray.start_timeout_s)" in said
    of_own = describe_shortage(bundles, machines, 2.0, is_own_cluster=True)
    assert "set ray.address to a larger cluster" in of_own and "start_timeout_s" not in of_own, (
        "it does not grow"
    )


def ranks_environment(config: RunConfig, given: dict[str, str], **more: object) -> dict[str, str]:
    options = {"is_one_machine": True, "uses_gpus": True, "accelerator_types": ["H200"], **more}
    megatrons = [m for m in (config.actor.megatron, config.critic.megatron) if m is not None]
    return ray_environment.make_rank_environment(
        given, config.trainer, config.ray, megatrons, **options
    )  # type: ignore[arg-type]


def test_ranks_get_what_they_need_and_the_shell_wins() -> None:
    tp2 = replace(
        TWO_OF_FOUR,
        actor=replace(TWO_OF_FOUR.actor, megatron=MegatronConfig(tensor_model_parallel_size=2)),
    )
    found = ranks_environment(
        tp2, {"PATH": "/bin", "HF_TOKEN": "x", "RAY_AUTH_TOKEN": "y", "NCCL_DEBUG": "INFO"}
    )
    threads = str(max(1, (os.cpu_count() or 1) // 4))
    assert found == {
        "OMP_NUM_THREADS": threads,
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_DEBUG": "INFO",
    }
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in ranks_environment(TWO_OF_FOUR, {}), (
        "nothing is split"
    )
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in ranks_environment(
        tp2, {}, accelerator_types=["B200"]
    )
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in ranks_environment(tp2, {}, uses_gpus=False)
    apart = ranks_environment(tp2, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, is_one_machine=False)
    assert apart == {"OMP_NUM_THREADS": "2", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}, (
        "the interface is found on the rank"
    )
    assert ranks_environment(tp2, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    assert ray_environment.make_engine_environment(
        {"OMP_NUM_THREADS": "7", "NCCL_DEBUG": "INFO"}
    ) == {"NCCL_DEBUG": "INFO"}


def test_a_cluster_of_this_machine_is_closed_to_others_and_a_running_one_is_left_as_it_is() -> None:
    own: dict[str, str] = {"RAY_USAGE_STATS_ENABLED": "1"}
    ray_environment.set_ray_defaults(None, own)
    assert own["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0" and own["RAY_AUTH_MODE"] == "token"
    assert len(own["RAY_AUTH_TOKEN"]) == 64 and own["RAY_USAGE_STATS_ENABLED"] == "1", (
        "the shell wins"
    )
    again: dict[str, str] = {}
    ray_environment.set_ray_defaults(None, again)
    assert again["RAY_AUTH_TOKEN"] != own["RAY_AUTH_TOKEN"]
    chosen = {"RAY_AUTH_MODE": "disabled"}
    ray_environment.set_ray_defaults(None, chosen)
    assert "RAY_AUTH_TOKEN" not in chosen
    joined: dict[str, str] = {}
    ray_environment.set_ray_defaults("10.0.0.1:6379", joined)
    assert joined == {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@pytest.mark.parametrize(
    ("device", "visible", "number"),
    [("3", "1,3", 1), ("3", "3", 0), ("3", "", 3), ("GPU-a", "", 0)],
)
def test_a_rank_finds_its_device_among_those_that_it_sees(
    device: str, visible: str, number: int
) -> None:
    assert ray_environment.find_visible_device_index(device, visible) == number


def test_the_cluster_is_that_of_the_file_then_of_the_job_then_a_new_one() -> None:
    named = RunConfig(ray=RayConfig(address="10.0.0.1:6379"))
    assert (
        ray_environment.find_cluster_address(named.ray, {"RAY_ADDRESS": "10.0.0.2:6379"})
        == "10.0.0.1:6379"
    )
    assert (
        ray_environment.find_cluster_address(RunConfig().ray, {"RAY_ADDRESS": "10.0.0.2:6379"})
        == "10.0.0.2:6379"
    )
    assert ray_environment.find_cluster_address(RunConfig().ray, {"RAY_ADDRESS": ""}) is None
    for value, why in (
        ("ray://10.0.0.2:10001", "names a service of Ray"),
        ("10.0.0.2", "must be HOST:PORT, or auto"),
    ):
        with pytest.raises(ValueError, match=rf"RAY_ADDRESS \({re.escape(value)}\) {why}"):
            ray_environment.find_cluster_address(RunConfig().ray, {"RAY_ADDRESS": value})
    with pytest.raises(
        ValueError, match=r"ray.dashboard \(true\) is of a cluster that the run makes"
    ):
        ray_environment.find_cluster_address(
            RunConfig(ray=RayConfig(dashboard=True)).ray, {"RAY_ADDRESS": "10.0.0.2:6379"}
        )
    assert (
        ray_environment.find_cluster_address(RunConfig(ray=RayConfig(dashboard=True)).ray, {})
        is None
    )


def test_ray_that_is_missing_or_too_old_is_refused_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ValueError, match=r'not installed; run pip install "ray>=2\.54"'):
        ray_environment.check_ray_version()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.53.1")
    with pytest.raises(ValueError, match=r'2\.53\.1 is installed; run pip install "ray>=2\.54"'):
        ray_environment.check_ray_version()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.54.0")
    ray_environment.check_ray_version()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("ray.num_cpus_per_rank=2",),
            "ray.num_cpus_per_rank (2.0) would be ignored because trainer.runtime is",
        ),
        (
            ("trainer.runtime=ray", "ray.address=ray://head:10001"),
            "names a service of Ray, but the driver must run on",
        ),
        (
            ("trainer.runtime=ray", "ray.address=head"),
            "ray.address (head) must be HOST:PORT, or auto",
        ),
        (
            ("trainer.runtime=ray", "ray.address=h:1", "ray.dashboard=true"),
            "ray.dashboard (true) would be ignored",
        ),
        (
            ("trainer.runtime=ray", "ray.start_timeout_s=0"),
            "ray.start_timeout_s (0.0) must be at least 0.001",
        ),
        (
            ("trainer.runtime=ray", "ray.num_cpus_per_engine=-1"),
            "ray.num_cpus_per_engine (-1.0) must be at least 0",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_refused(
    tmp_path: Path, overrides: tuple[str, ...], words: str
) -> None:
    (tmp_path / "run.yaml").write_text(VALID)
    found = validate_config(read_run_config(tmp_path / "run.yaml", overrides))
    assert len(found) == 1 and words in found[0], found


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379"])
def test_a_setting_that_works_is_taken(tmp_path: Path, address: str) -> None:
    (tmp_path / "run.yaml").write_text(VALID)
    overrides = (
        "trainer.runtime=ray",
        f"ray.address={address}",
        "ray.placement=spread",
        "ray.num_cpus_per_rank=0.5",
    )
    assert validate_config(read_run_config(tmp_path / "run.yaml", overrides)) == []
