"""The environment of CUDA and NCCL that each process of a job gets, under each launcher.
Nothing is started.
"""

import os
from pathlib import Path

import pytest

from rlhf_megatron.config import cuda_environment
from rlhf_megatron.config.schema import MegatronConfig, RolloutConfig, SGLangConfig, TrainerConfig
from rlhf_megatron.jobs import train_job
from rlhf_megatron.runtime.ray import ray_environment
from rlhf_megatron.runtime.torchrun import torchrun_launcher

ALIKE = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
TP2 = [MegatronConfig(tensor_model_parallel_size=2)]
QUICKSTART = Path(__file__).resolve().parents[3] / "configs/quickstart.yaml"


def found(given: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in given.items()
        if name in {**ALIKE, **ONE_QUEUE, **cuda_environment.DETERMINISM}
    }


@pytest.mark.parametrize(
    ("runtime", "given", "becomes", "expected"),
    [
        ("inline", {}, "_run_inline", ALIKE),
        ("torchrun", {}, "launch_single_node", ALIKE | ONE_QUEUE),
        (
            "torchrun",
            {"TORCHELASTIC_RUN_ID": "1", "RANK": "1"},
            "_run_host",
            ALIKE | ONE_QUEUE,
        ),  # of Slurm's jobs too
        (
            "torchrun",
            {train_job.CONTROLLER_ENV: "run"},
            "_run_torchrun_controller",
            ALIKE | ONE_QUEUE,
        ),  # engines inherit it
        ("ray", {}, "_run_on_ray", ALIKE),  # the driver
        (
            "torchrun",
            {"NCCL_CUMEM_ENABLE": "1"},
            "launch_single_node",
            ALIKE | ONE_QUEUE | {"NCCL_CUMEM_ENABLE": "1"},
        ),
    ],
)
def test_every_process_sets_it_before_anything_else(
    runtime: str,
    given: dict[str, str],
    becomes: str,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    seen: list[dict[str, str]] = []

    def note(*_: object, **__: object) -> None:
        seen.append(found(dict(os.environ)))
        raise SystemExit

    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(train_job.TrainJob, "_open_run_dir", lambda self: None)
    monkeypatch.setattr(
        *(
            (torchrun_launcher, becomes)
            if becomes == "launch_single_node"
            else (train_job.TrainJob, becomes)
        ),
        note,
    )
    ranks = 1 if runtime == "inline" else 2
    sizes = [
        f"trainer.n_gpus_per_node={ranks}",
        f"actor.megatron.tensor_model_parallel_size={ranks}",
    ]
    sizes += [
        "actor.megatron.pipeline_model_parallel_size=1",
        f"trainer.default_local_dir={tmp_path}",
    ]
    with pytest.raises(SystemExit):
        train_job.TrainJob(QUICKSTART, (f"trainer.runtime={runtime}", *sizes)).start()
    assert seen == [expected]


def test_rays_processes_get_what_the_driver_has_and_ranks_their_queues() -> None:
    driver: dict[str, str] = {"PATH": "/bin"}
    trainer = TrainerConfig(runtime="ray", deterministic=True)
    cuda_environment.set_missing_variables(driver, trainer, RolloutConfig(), TP2)
    config = train_job.RunConfig()
    ranks = ray_environment.make_rank_environment(
        driver,
        trainer,
        config.ray,
        TP2,
        is_one_machine=False,
        uses_gpus=True,
        accelerator_types=["H100"],
    )
    assert found(ranks) == ALIKE | ONE_QUEUE | cuda_environment.DETERMINISM
    assert (
        found(ray_environment.make_engine_environment(driver))
        == ALIKE | cuda_environment.DETERMINISM
    )
    ranks = ray_environment.make_rank_environment(
        driver,
        trainer,
        config.ray,
        TP2,
        is_one_machine=True,
        uses_gpus=False,
        accelerator_types=["H100"],
    )
    assert cuda_environment.NO_GPUS.items() <= ranks.items()


def test_a_run_on_cpus_sees_no_gpu_whatever_the_shell_says() -> None:
    for trainer, expected in (
        (TrainerConfig(device="cpu"), ""),
        (TrainerConfig(), "0"),
        (TrainerConfig("ray"), "0"),
    ):
        process = {"CUDA_VISIBLE_DEVICES": "0"}
        cuda_environment.set_missing_variables(process, trainer, RolloutConfig(), TP2)
        assert process["CUDA_VISIBLE_DEVICES"] == expected


def test_one_queue_only_where_communication_overlaps_and_before_blackwell() -> None:
    assert (
        cuda_environment.choose_queue_variables(TP2, ["H100 80GB HBM3"])
        == ONE_QUEUE
        == cuda_environment.choose_queue_variables(TP2, [])
    )
    assert (
        cuda_environment.choose_queue_variables(
            [MegatronConfig(context_parallel_size=2)], ["A100-SXM4-80GB"]
        )
        == ONE_QUEUE
    )
    assert cuda_environment.choose_queue_variables([MegatronConfig()], ["H100"]) == {}
    assert (
        cuda_environment.choose_queue_variables(TP2, ["B200"])
        == cuda_environment.choose_queue_variables(TP2, ["GB200"])
        == {}
    )


def test_the_drivers_files_name_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_environment, "_DRIVER", tmp_path)
    assert cuda_environment.read_local_gpu_names() == []
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "information").write_text(
        "Model: \t\t NVIDIA B200\nIRQ:   \t\t 0\n"
    )
    assert cuda_environment.read_local_gpu_names() == ["B200"]
    set_up: dict[str, str] = {}
    cuda_environment.set_missing_variables(set_up, TrainerConfig(), RolloutConfig(), TP2)
    assert set_up == ALIKE


@pytest.mark.parametrize(
    ("sglang", "given", "expected"),
    [
        (
            SGLangConfig(args={"enable-symm-mem": True}),
            {},
            {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"},
        ),
        (
            SGLangConfig(args={"enable_nccl_nvls": True}),
            {},
            {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"},
        ),
        (
            SGLangConfig(env={"NCCL_CUMEM_ENABLE": "1"}),
            {},
            {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"},
        ),
        (
            SGLangConfig(env={"NCCL_CUMEM_ENABLE": "1"}),
            {"NCCL_CUMEM_ENABLE": "1"},
            ALIKE | {"NCCL_CUMEM_ENABLE": "1"},
        ),
    ],
)
def test_ranks_follow_what_the_engines_are_told(
    sglang: SGLangConfig, given: dict[str, str], expected: dict[str, str]
) -> None:
    assert (
        cuda_environment.choose_communicator_variables(RolloutConfig(sglang=sglang), given)
        == expected
    )
    assert (
        cuda_environment.choose_communicator_variables(
            RolloutConfig(engine="local", sglang=sglang), {}
        )
        == ALIKE
    )


@pytest.mark.parametrize(
    ("sglang", "place"),
    [
        (SGLangConfig(env={"NCCL_NVLS_ENABLE": "1"}), "1 from rollout.sglang.env.NCCL_NVLS_ENABLE"),
        (
            SGLangConfig(args={"enable-nccl-nvls": True}),
            "1 from rollout.sglang.args.enable-nccl-nvls",
        ),
    ],
)
def test_values_that_contradict_are_refused(sglang: SGLangConfig, place: str) -> None:
    with pytest.raises(
        ValueError,
        match=f"NCCL_NVLS_ENABLE must be the same .* 0 from the environment, but {place}",
    ):
        cuda_environment.choose_communicator_variables(
            RolloutConfig(sglang=sglang), {"NCCL_NVLS_ENABLE": "0"}
        )
