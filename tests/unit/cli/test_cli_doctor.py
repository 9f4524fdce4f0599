"""`rlhf-megatron doctor`: on this machine, beside broken packages, for runs that ask for
what is not there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT

from rlhf_megatron.cli.doctor.doctor_command import (
    find_unmet_settings,
    fold_gpu_rows,
    limit_to_this_machine,
    read_path_settings,
)
from rlhf_megatron.cli.doctor.machine_facts import (
    MachineFacts,
    MegatronFacts,
    ProbeProcess,
    gather_machine_facts,
    parse_gpu_links,
)
from rlhf_megatron.cli.doctor.machine_rows import (
    has_code_for_capability,
    make_device_rows,
    make_host_rows,
)
from rlhf_megatron.cli.doctor.node_probe import leave_marker_file
from rlhf_megatron.cli.doctor.trainer_rows import (
    DoctorRow,
    TrainerPathSettings,
    make_package_rows,
    make_trainer_rows,
)
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.schema import KernelsConfig, RunConfig
from rlhf_megatron.ranks.parallel.optional_packages import NOT_NVIDIAS, OptionalPackage

RUN = "model: {path: gone}\ndata: {task: addition}\nrollout: {engine: local}\n"
ASKS_FOR_MUCH = (
    "trainer.device=cuda",
    "actor.megatron.transformer_impl=transformer_engine",
    "actor.kernels.backend=triton",
    "rollout.engine=sglang",
    "rollout.sglang.python=no/such/python",
)
needs_no_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="what is said of a machine without CUDA"
)


@pytest.fixture(scope="module")
def facts() -> MachineFacts:
    """Of this machine, found as the command does."""
    return gather_machine_facts()


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def run_doctor(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which may not import torch or megatron-core itself."""
    code = (
        "import sys\nfrom rlhf_megatron.cli.main import main\ncode = main(sys.argv[1:])\n"
        "assert not {'torch', 'megatron'} & set(sys.modules), 'heavy imports'\nsys.exit(code)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(path)} if path else dict(os.environ)
    command = [sys.executable, "-c", code, "doctor", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT
    )


def row(rows: list[DoctorRow], path: str) -> DoctorRow:
    (found,) = [row for row in rows if row.path == path]
    return found


@needs_no_cuda
def test_this_machine_and_a_run_that_asks_for_more(run_file: Path) -> None:
    done = run_doctor(str(run_file), *ASKS_FOR_MUCH, "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    rows = {entry["path"]: entry for entry in found["rows"]}
    # with its CPU build, or for CUDA
    assert rows["torch"]["taken"].startswith(f"{torch.__version__}, built ")
    assert rows["accelerator"]["state"] == "not live"
    assert rows["megatron-core"]["state"] == "live"
    assert (
        "cpu_platform" in rows["patches"]["taken"]
        and "CheckpointWithoutOutput" in rows["patches"]["taken"]
    )
    assert rows["attention"]["state"] == "not live" and "CUDA only" in rows["attention"]["why"]
    assert rows["layers"]["taken"] == "plain torch under Transformer Engine's names"
    assert rows["log-prob head"]["state"] == "broken"
    problems = {problem["setting"]: problem for problem in found["problems"]}
    assert list(problems) == [
        "actor.megatron.transformer_impl",
        "actor.kernels.backend",
        "rollout.engine",
        "trainer.device",
    ]
    assert "not installed" in problems["actor.megatron.transformer_impl"]["why"]
    assert "pip install --no-build-isolation 'transformer-engine[pytorch]'" in str(problems)
    assert "no/such/python" in problems["rollout.engine"]["why"]


@needs_no_cuda
def test_broken_packages_are_reported_and_end_nothing(tmp_path: Path) -> None:
    files = {
        "flash_attn/__init__.py": (
            "raise OSError('flash_attn_2_cuda.so: undefined symbol: _ZN3c105Error\\nmore')"
        ),
        "flash_attn_interface.py": "import os\nos._exit(3)",
        # PyPI's: no optimizers, no multi_tensor_apply
        "apex/__init__.py": "raise SyntaxError('of Python 2')",
        "apex/models.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = run_doctor(path=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "broken flash-attn 2 of an unknown version" in lines
    assert (
        "why: cannot be imported: OSError: flash_attn_2_cuda.so: undefined symbol: _ZN3c105Error"
        in lines
    )
    assert "broken flash attention 3 of an unknown version" in lines
    assert "why: cannot be imported: ended its process with exit code 3" in lines
    assert "broken NVIDIA's Apex of an unknown version" in lines and f"why: {NOT_NVIDIAS}" in lines
    assert any(
        line.startswith("fix: pip uninstall apex; git clone https://github.com/NVIDIA/apex")
        for line in lines
    )


@pytest.mark.long
@needs_no_cuda
def test_a_package_that_breaks_megatron_core_is_named(tmp_path: Path) -> None:
    """megatron-core expects ImportError of Transformer Engine and nothing else; a version mismatch
    is another error.
    """
    engine = tmp_path / "transformer_engine"
    (engine / "pytorch").mkdir(parents=True)
    (engine / "__init__.py").write_text(
        "raise AssertionError('package version mismatch. Found 2.1 and 2.2')"
    )
    (engine / "pytorch" / "__init__.py").write_text("")
    done = run_doctor("--json", path=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {entry["path"]: entry for entry in json.loads(done.stdout)["rows"]}
    for path in ("Transformer Engine", "megatron-core"):
        assert rows[path]["state"] == "broken", rows[path]
        assert "version mismatch. Found 2.1 and 2.2" in rows[path]["why"], rows[path]


def test_a_probe_answers_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ProbeProcess("import", "json:loads").wait_for_result() == ({}, "")
    assert (
        ProbeProcess("import", "json:no_such_name")
        .wait_for_result()[1]
        .startswith("AttributeError: module 'json'")
    )
    assert ProbeProcess("import", "no_such_module:name").wait_for_result() == (
        {},
        "ModuleNotFoundError: No module named 'no_such_module'",
    )
    monkeypatch.setattr("rlhf_megatron.cli.doctor.machine_facts.PROBE_TIMEOUT_S", 0.2)
    assert ProbeProcess("torch").wait_for_result() == ({}, "did not finish in 0 s")


def on_gpu(
    facts: MachineFacts, capability: tuple[int, int] = (9, 0), **torch_facts: Any
) -> MachineFacts:
    """The same machine with two GPUs, and none of the packages."""
    assert facts.torch is not None
    found = {
        "cuda_version": "12.8",
        "why_no_cuda": "",
        "device_names": ("NVIDIA H200, 139 GiB",) * 2,
        "capability": capability,
        "architectures": ("sm_80", "sm_90"),
        "nccl_version": "2.27.5",
        "has_bfloat16": True,
        "flash_why_not": "",
        "triton_why_not": "",
        "triton_version": "3.6.0",
        **torch_facts,
    }
    packages = {
        name: OptionalPackage(name, False, "", f"{name} is not installed")
        for name in facts.packages
    }
    megatron = MegatronFacts("0.19.2", "torch", False)
    return replace(
        facts,
        torch=replace(facts.torch, **found),
        packages=packages,
        megatron=megatron,
        compiler_why_not="",
    )


def with_package(facts: MachineFacts, module: str, why_not: str = "") -> MachineFacts:
    return replace(
        facts, packages={**facts.packages, module: OptionalPackage(module, True, "2.0", why_not)}
    )


def test_a_gpu_without_packages(facts: MachineFacts) -> None:
    rows = make_trainer_rows(on_gpu(facts), TrainerPathSettings("cuda"))
    assert row(rows, "attention").taken == "torch's varlen flash attention"
    assert row(rows, "attention").why == "flash attention 3: flash_attn_interface is not installed"
    assert "hopper" in row(rows, "attention").fix
    assert row(rows, "norm").taken == "torch's kernel"
    assert (
        row(rows, "layers").fix == "pip install --no-build-isolation 'transformer-engine[pytorch]'"
    )
    assert row(rows, "gradient accumulation fusion").taken == "by torch's addmm into float32"
    assert row(rows, "log-prob head").taken == "Triton kernels (3.6.0)"
    assert row(rows, "fused loss").taken.endswith("in one Triton kernel")
    assert {row.state for row in rows if row.path != "deterministic mode"} == {"live", "not live"}
    old = on_gpu(
        facts, has_float32_product=False, has_norm_kernel=False, flash_why_not="no such module"
    )
    rows = make_trainer_rows(old, TrainerPathSettings("cuda"))
    assert row(rows, "attention").state == row(rows, "norm").state == "not live"
    assert row(rows, "gradient accumulation fusion").why.startswith(
        "in bfloat16 it needs a matrix product"
    )
    asked = make_trainer_rows(old, TrainerPathSettings("cuda", gradient_fusion=True))
    assert row(asked, "gradient accumulation fusion").state == "broken"


def test_a_gpu_with_everything(facts: MachineFacts) -> None:
    full = on_gpu(facts)
    for module in ("transformer_engine", "apex", "flash_attn", "flash_attn_interface"):
        full = with_package(full, module)
    full = replace(full, megatron=MegatronFacts("0.19.2", "transformer_engine", True))
    rows = make_trainer_rows(full, TrainerPathSettings("cuda"))
    assert row(rows, "layers").taken == "Transformer Engine 2.0"
    assert row(rows, "attention").taken.startswith("flash attention 3")
    assert row(rows, "norm").taken.startswith("Transformer Engine's")
    assert row(rows, "gradient accumulation fusion").taken == "by Transformer Engine"
    assert row(rows, "Adam").taken == "Transformer Engine's FusedAdam"
    local = make_trainer_rows(
        full,
        TrainerPathSettings(
            "cuda", transformer_impl="local", kernels_config=KernelsConfig(fused_loss=False)
        ),
    )
    assert row(local, "layers").why == "transformer_impl is local"
    assert row(local, "norm").taken == "torch's kernel"
    assert row(local, "fused loss").state == "not live"
    broken = with_package(full, "transformer_engine", "cannot be imported: OSError: libcudnn.so.9")
    assert row(make_package_rows(broken, "cuda"), "Transformer Engine").state == "broken"
    assert row(make_trainer_rows(broken, TrainerPathSettings("cuda")), "layers").state == "broken"


def test_paths_of_experts(facts: MachineFacts, tmp_path: Path, run_file: Path) -> None:
    """What multiplies, sends and sorts is told, and a run that asks for what is not there."""
    model = {"hidden_size": 96, "num_attention_heads": 2, "num_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(model))
    gpu = on_gpu(facts)
    asks = (
        "actor.megatron.moe_token_dispatcher_type=flex",
        "actor.megatron.expert_model_parallel_size=2",
        "actor.megatron.moe_permute_fusion=true",
    )
    config = run_config(
        run_file, f"model.path={tmp_path}", "trainer.logger=[console]", "trainer.device=cuda",
        "trainer.n_gpus_per_node=2", "actor.megatron.moe_grouped_gemm=true", *asks,
    )  # fmt: skip
    wanted = read_path_settings(config, gpu)
    assert wanted.transformer_impl == "local", "what auto is for experts"
    rows = make_trainer_rows(gpu, wanted)
    assert row(rows, "grouped GEMM of experts").taken == "torch's grouped_mm"
    assert (row(rows, "tokens to experts").state, row(rows, "sorting of tokens").state) == (
        "broken",
        "broken",
    )
    found = {problem.setting: str(problem) for problem in find_unmet_settings(config, gpu)}
    assert (
        "(flex): deep_ep is not installed; git clone"
        in found["actor.megatron.moe_token_dispatcher_type"]
    )
    assert (
        "(true): transformer_engine is not installed" in found["actor.megatron.moe_permute_fusion"]
    )
    old = with_package(with_package(gpu, "deep_ep"), "transformer_engine")  # 2.0
    assert [problem.setting for problem in find_unmet_settings(config, old)] == [
        "actor.megatron.moe_permute_fusion"
    ]
    by_te = make_trainer_rows(old, replace(wanted, transformer_impl="transformer_engine"))
    assert row(by_te, "grouped GEMM of experts").taken == "Transformer Engine's grouped layers"
    assert row(by_te, "tokens to experts").taken == "DeepEP"
    plain = make_trainer_rows(old, TrainerPathSettings("cuda"))
    assert row(plain, "tokens to experts").fix == "actor.megatron.moe_token_dispatcher_type: flex"
    assert (
        row(make_trainer_rows(gpu, TrainerPathSettings("cuda", expert_config=None)), "experts").why
        == "the model has none"
    )


def run_config(path: Path, *overrides: str) -> RunConfig:
    return load_run_config(path, overrides, with_files=False).config


def test_a_run_on_a_gpu_that_asks_for_what_is_not_there(
    facts: MachineFacts, run_file: Path
) -> None:
    gpu = on_gpu(facts, has_float32_product=False)
    config = run_config(
        run_file,
        "trainer.n_gpus_per_node=8",
        "actor.megatron.gradient_accumulation_fusion=true",
        "model.dtype=bfloat16",
        "trainer.logger=[wandb]",
        "reward.name=math_verify",
    )
    found = {problem.setting: str(problem) for problem in find_unmet_settings(config, gpu)}
    assert "(true): in bfloat16 it needs" in found["actor.megatron.gradient_accumulation_fusion"]
    assert "torch sees 2 devices" in found["trainer.n_gpus_per_node"]
    assert "wandb is not installed; pip install -e '.[wandb]'" in found["trainer.logger"]
    fits = run_config(
        run_file, "trainer.n_gpus_per_node=2", "model.dtype=bfloat16", "trainer.logger=[console]"
    )
    assert find_unmet_settings(fits, gpu) == []
    te = run_config(
        run_file, "actor.megatron.transformer_impl=transformer_engine", "trainer.n_gpus_per_node=2"
    )
    assert [problem.setting for problem in find_unmet_settings(te, gpu)] == [
        "actor.megatron.transformer_impl",
        "trainer.logger",
    ]
    assert (
        find_unmet_settings(
            te, with_package(with_package(gpu, "transformer_engine"), "tensorboard")
        )
        == []
    )


def test_what_a_run_wants(facts: MachineFacts, tmp_path: Path, run_file: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 96, "num_attention_heads": 2}')
    config = run_config(run_file, f"model.path={tmp_path}", "trainer.device=cuda")
    wanted = read_path_settings(config, facts)
    assert (wanted.device, wanted.head_dim, wanted.dtype) == ("cuda", 48, config.model.dtype)
    # a model that is fetched later
    assert read_path_settings(run_config(run_file), facts).head_dim == 128
    assert limit_to_this_machine(wanted, on_gpu(facts)).device == "cuda"
    if not facts.has_cuda:
        assert limit_to_this_machine(wanted, facts).device == "cpu"


def test_a_torch_for_another_gpu_is_broken(facts: MachineFacts) -> None:
    assert row(make_device_rows(on_gpu(facts)), "torch").state == "live"
    other = row(make_device_rows(on_gpu(facts, capability=(12, 0))), "torch")
    assert other.state == "broken" and "sm_120" in other.fix
    assert row(make_device_rows(on_gpu(facts, nccl_version="")), "collectives").state == "broken"
    broken = replace(facts, torch=None, torch_error="ImportError: libcudart.so.12")
    assert make_device_rows(broken)[0].why == "ImportError: libcudart.so.12"
    assert (
        row(make_trainer_rows(broken, TrainerPathSettings("cpu")), "megatron-core").state == "live"
    )  # the rest goes on


@pytest.mark.parametrize(
    ("architectures", "capability", "fits"),
    [
        (("sm_80", "sm_90"), (8, 9), True),
        (("sm_80", "sm_90"), (10, 0), False),
        (("sm_90a",), (9, 0), True),
        (("sm_90a",), (9, 1), False),
        (("sm_86",), (8, 0), False),
        (("sm_75", "compute_80"), (12, 0), True),
        (("sm_120",), (12, 1), True),
        ((), (8, 0), False),
    ],
)
def test_code_for_a_gpu(
    architectures: tuple[str, ...], capability: tuple[int, int], fits: bool
) -> None:
    assert has_code_for_capability(architectures, capability) is fits


NVLINK = """\
        GPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV18    PIX     0-47            0               N/A
GPU1    NV18     X      SYS     0-47            0               N/A
NIC0    PIX     SYS      X
"""


def test_links_between_gpus() -> None:
    assert parse_gpu_links(NVLINK) == "NV18"
    assert parse_gpu_links(NVLINK.replace("NV18", "SYS")) == "SYS"
    assert parse_gpu_links("GPU0     X      0-47") == parse_gpu_links("") == ""


def test_limits_of_the_machine(facts: MachineFacts) -> None:
    small = replace(
        facts.host,
        shm_free_bytes=64 << 20,
        shm_total_bytes=64 << 20,
        open_file_limits=(1024, 1 << 20),
        omp_num_threads="",
    )
    rows = make_host_rows(small)
    assert [row.state for row in rows] == ["live", "not live", "not live"]
    assert (
        "--shm-size" in row(rows, "/dev/shm").fix
        and row(rows, "open files").fix == "ulimit -n 65536"
    )
    rows = make_host_rows(
        replace(
            small,
            shm_free_bytes=8 << 30,
            shm_total_bytes=8 << 30,
            open_file_limits=(1 << 20, 1 << 20),
        )
    )
    assert [row.state for row in rows] == ["live"] * 3


def test_a_folder_that_takes_no_file_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "a file"
    folder.write_text("")
    with leave_marker_file(folder, "marker") as why_not:
        assert f"{folder / 'marker'} cannot be written: Not a directory" in why_not
    with leave_marker_file(tmp_path, "marker") as why_not:
        assert why_not == "" and (tmp_path / "marker").exists()
    assert not (tmp_path / "marker").exists()


def on_cpus(facts: MachineFacts) -> MachineFacts:
    assert facts.torch is not None
    return replace(facts, torch=replace(facts.torch, why_no_cuda="torch has no CUDA"))


def test_paths_for_gpus_are_one_row_on_a_machine_without_a_gpu(facts: MachineFacts) -> None:
    machine = on_cpus(facts)
    settings = TrainerPathSettings("cpu")
    rows = [*make_package_rows(machine, "cpu"), *make_trainer_rows(machine, settings)]
    shown = fold_gpu_rows(rows)
    [packages] = [row for row in shown if row.area == "packages"]
    assert packages.path == "for GPUs only" and packages.state == "not live"
    assert packages.taken == ", ".join(row.path for row in rows if row.area == "packages")
    [trainer] = [row for row in shown if row.area == "trainer" and row.path == "for GPUs only"]
    assert trainer.taken == "attention, norm, activation fusion"
    # the rest is as it was, and nothing is lost
    assert [row for row in shown if row.path != "for GPUs only"] == [
        row for row in rows if not row.is_for_gpus
    ]


def test_a_machine_with_a_gpu_folds_nothing(facts: MachineFacts) -> None:
    machine = on_gpu(facts)
    for device in ("cpu", "cuda"):
        settings = TrainerPathSettings(device)
        rows = [*make_package_rows(machine, device), *make_trainer_rows(machine, settings)]
        assert fold_gpu_rows(rows) == rows
