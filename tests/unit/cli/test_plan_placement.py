"""`rlhf-megatron plan placement`: what the pages print, and runs that do not fit."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from docs_tools import BLOCK
from places import ROOT

from rlhf_megatron.cli.main import main
from rlhf_megatron.rollout.local.local_launch import assign_local_devices

PRINTED = [
    block.partition("\n")
    for page in (ROOT / "docs" / "launching.md",)
    for _, block in BLOCK.findall(page.read_text())
    if block.startswith("$ rlhf-megatron plan placement")
]
QWEN = "configs/qwen3_64_ranks.yaml"


@pytest.mark.parametrize(("line", "_", "printed"), PRINTED)
def test_the_pages_print_what_the_command_prints(
    line: str,
    _: str,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(line.removeprefix("$ rlhf-megatron "))) == 0
    assert capsys.readouterr().out == printed


def test_the_page_prints_an_example() -> None:
    assert len(PRINTED) == 1


def placed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    code = main(["plan", "placement", str(ROOT / QWEN), *words])
    return code, capsys.readouterr().out.splitlines()


def test_64_ranks_are_8_machines_and_engines_stand_on_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ranks as Layout.coordinates counts them: tp4 fastest, then dp4, then pp4."""
    code, lines = placed(capsys)
    machines = [line for line in lines if re.match(r"machine \d", line)]
    assert (
        code == 0
        and len(machines) == 12
        and machines[8:] == [f"machine {8 + i:<3} engine{i} on GPUs 0-7" for i in range(4)]
    )
    assert machines[3] == "machine 3   ranks 24-31 on GPUs 0-7: actor pp1 dp2-3 tp0-3"
    assert lines[-1] == "senders     0 (machine 0), 16 (machine 2), 32 (machine 4), 48 (machine 6)"


def test_torchrun_deals_engines_to_machines_which_must_have_room(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, lines = placed(capsys, "trainer.runtime=torchrun", "rollout.num_engines=1")
    assert (
        code == 1
        and lines[0]
        == "launcher    torchrun: launch/torchrun.sh on each of 8 machines, or sbatch --nodes=8"
        " launch/slurm.sbatch"
    )
    assert "engine0 on GPUs 8-15" in lines[2]
    assert lines[-1].startswith(
        "does not fit: machine 0 needs 16 GPUs and has 8. The engines need 1 machine(s) of"
        " their own: set rollout.engine_machines=[8]; sbatch --nodes=9 then starts them."
    )
    assert (
        placed(capsys, "trainer.runtime=torchrun", "rollout.num_engines=1", "--gpus", "16")[0] == 0
    )
    apart = ("trainer.runtime=torchrun", "rollout.num_engines=2", "rollout.engine_machines=[8,9]")
    code, lines = placed(capsys, *apart)
    assert "torchrun: launch/torchrun.sh on each of 10 machines, or sbatch --nodes=10" in lines[0]
    assert code == 0 and lines[10:12] == [
        "machine 8   engine0 on GPUs 0-7",
        "machine 9   engine1 on GPUs 0-7",
    ]


def test_engines_over_two_machines_of_twelve(capsys: pytest.CaptureFixture[str]) -> None:
    """As the head of the file says for torchrun, with engines twice as large."""
    apart = (
        "trainer.runtime=torchrun",
        "rollout.num_engines=2",
        "rollout.engine_machines=[8,9,10,11]",
    )
    code, lines = placed(capsys, *apart, "rollout.sglang.args={tp_size: 16, nnodes: 2}")
    parts = ["engine0", "engine0-part1", "engine1", "engine1-part1"]
    assert code == 0 and lines[10:14] == [
        f"machine {8 + i:<3} {part} on GPUs 0-7" for i, part in enumerate(parts)
    ]


def test_ray_keeps_engines_that_read_memory_with_the_driver(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tensor = (
        "rollout.weight_transport=tensor",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=16",
        "rollout.num_engines=1",
    )
    code, lines = placed(capsys, *tensor, "--gpus", "24")
    assert code == 0 and "engine0 on GPUs 16-23" in lines[2] and "actor pp0-3 dp0 tp0-3" in lines[2]
    code, lines = placed(capsys, *tensor)
    assert code == 1 and lines[-1].endswith(
        "Lower trainer.n_gpus_per_node (16) to 8 and raise trainer.nnodes, or say how many GPUs a"
        " machine has (--gpus)."
    )
    disk = ("rollout.weight_transport=disk", *tensor[1:3], "rollout.num_engines=3", "--gpus", "24")
    code, lines = placed(capsys, *disk)
    assert code == 0 and "engine0 on GPUs 16-23" in lines[2]  # room beside the ranks is used first
    assert lines[3] == "machine 1   engine1 on GPUs 0-7; engine2 on GPUs 8-15"


def test_attached_engines_are_somebody_elses(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = placed(
        capsys,
        "rollout.endpoints=[https://10.0.0.9:30000]",
        "rollout.num_engines=1",
        "trainer.runtime=torchrun",
    )
    assert (
        code == 0
        and "attached    https://10.0.0.9:30000" in lines
        and not [x for x in lines if "engine0" in x]
    )


TORCHRUN_OF_8 = ("trainer.runtime=torchrun", "rollout.num_engines=8")
TOO_LARGE = {
    "engines beside ranks": (TORCHRUN_OF_8, 16),
    "an engine larger than a machine": (
        (*TORCHRUN_OF_8, "rollout.sglang.args={tp_size: 16, ep_size: 16}"),
        24,
    ),
    "an engine larger than four machines, of 6 GPUs": (
        (
            *("trainer.runtime=torchrun", "rollout.num_engines=3"),
            *("trainer.nnodes=16", "trainer.n_gpus_per_node=4", "--gpus=6"),
            "rollout.sglang.args={tp_size: 32}",
        ),
        16 + 3 * 8,
    ),
    "engines that take weights from memory": (
        (
            *("trainer.runtime=torchrun", "trainer.nnodes=1", "rollout.num_engines=3"),
            *("actor.megatron.pipeline_model_parallel_size=1", "rollout.weight_transport=tensor"),
            "actor.megatron.virtual_pipeline_model_parallel_size=null",
            "rollout.sglang.args={tp_size: 4}",
        ),
        3,
    ),
    "an engine larger than a machine, under Ray": (
        ("rollout.sglang.args={tp_size: 16}",),
        16,
    ),
    "engines that take weights from memory, under Ray": (
        (
            *("trainer.nnodes=1", "rollout.num_engines=2", "rollout.weight_transport=tensor"),
            "actor.megatron.pipeline_model_parallel_size=1",
            "actor.megatron.virtual_pipeline_model_parallel_size=null",
        ),
        3,
    ),
}


@pytest.mark.parametrize(("words", "num_machines"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_run_that_does_not_fit_does_with_the_settings_that_are_advised(
    words: tuple[str, ...], num_machines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = placed(capsys, *words)
    assert code == 1 and lines[-1].startswith("does not fit: "), lines
    advised = re.search(r"[Ss]et (rollout.*?)[;:] ", lines[-1])
    assert advised is not None, lines[-1]
    code, lines = placed(capsys, *words, *advised[1].split())
    assert code == 0, lines
    assert len([line for line in lines if re.match(r"machine \d", line)]) == num_machines


def test_what_is_advised_under_ray_fits_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over a file that names machines for torchrun."""
    run = tmp_path / "run.yaml"
    run.write_text(
        f"extends: {ROOT / QWEN}\n"
        "rollout: {engine_machines: [8], sglang: {args: {tensor_parallel_size: 16}}}\n"
        "trainer: {runtime: torchrun}\n"
    )
    assert main(["plan", "placement", str(run)]) == 1
    advised = re.search(r"let Ray place them \((.*?)\)", capsys.readouterr().out)
    assert advised is not None
    assert main(["plan", "placement", str(run), *advised[1].split()]) == 0
    assert capsys.readouterr().out.startswith("launcher    ray: ")


def test_machines_that_lack_as_many_gpus_are_one_series(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines = placed(capsys, *TORCHRUN_OF_8, "rollout.num_engines=9")
    assert lines[-1].startswith(
        "does not fit: machine 0 needs 24 GPUs and has 8; machines 1-7 need 16 GPUs and have 8. "
    )


def test_a_colocated_engine_is_not_larger_than_a_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    colocated = ("trainer.nnodes=1", "rollout.num_engines=1", "rollout.colocated=true")
    settings = (
        *("rollout.weight_transport=tensor", "actor.megatron.pipeline_model_parallel_size=1"),
        "actor.megatron.virtual_pipeline_model_parallel_size=null",
        *(
            "trainer.runtime=torchrun",
            "rollout.sglang.args={tp_size: 16, mem_fraction_static: 0.5}",
        ),
    )
    code, lines = placed(capsys, *colocated, *settings)
    assert code == 1
    assert lines[-1].endswith("lower its tp_size (16, rollout.sglang.args).")


WARM = "configs/quickstart_warm.yaml"


@pytest.mark.parametrize(
    ("num_gpus", "num_engines"), [(4, 1), (4, 5), (5, 1), (6, 1), (6, 3), (8, 2)]
)
def test_bundled_engines_of_one_machine_share_gpus_as_the_run_deals_them(
    num_gpus: int, num_engines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four ranks; where no GPU is free, the engines are on those of the ranks."""
    words = (str(ROOT / WARM), f"rollout.num_engines={num_engines}", "--gpus", str(num_gpus))
    assert main(["plan", "placement", *words]) == 0
    planned = re.findall(r"engine\d+ on GPU (\d+)", capsys.readouterr().out)
    visible = [str(device) for device in range(num_gpus)]
    environments = assign_local_devices(num_engines, visible, 4, is_shared=False)
    assert planned == [one["CUDA_VISIBLE_DEVICES"].split(",")[0] for one in environments]


def test_the_first_hour_needs_one_gpu_in_step_3(capsys: pytest.CaptureFixture[str]) -> None:
    one_rank = (
        "trainer.n_gpus_per_node=1",
        "actor.megatron.tensor_model_parallel_size=1",
        "actor.megatron.pipeline_model_parallel_size=1",
    )
    assert main(["plan", "placement", str(ROOT / WARM), *one_rank, "--gpus", "1"]) == 0
    assert "rank 0 on GPU 0: actor pp0 dp0 tp0; engine0 on GPU 0" in capsys.readouterr().out


TWO_OF_FOUR = (
    "trainer.nnodes=2",
    "actor.megatron.pipeline_model_parallel_size=1",
    "rollout.num_engines=2",
)


def test_the_advice_names_colocated_engines_where_the_run_can_have_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (str(ROOT / WARM), *TWO_OF_FOUR, "--gpus", "4")
    assert main(["plan", "placement", *words]) == 1
    hint = "Or let engines and ranks take turns with the GPUs (rollout.colocated=true)."
    assert capsys.readouterr().out.endswith(f"{hint}\n")
    assert main(["plan", "placement", *words, "rollout.colocated=true"]) == 0
    capsys.readouterr()
    one_engine = (*words, "rollout.num_engines=1")  # a colocated run needs one on each machine
    assert main(["plan", "placement", *one_engine]) == 1
    assert hint not in capsys.readouterr().out


def test_gpus_that_wait_while_engines_generate_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("plan", "placement", str(ROOT / WARM), "rollout.colocated=true")
    assert main([*words]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "idle        3 of 4 GPUs while engines generate; rollout.num_engines=4 uses all"
    )
    assert main([*words, "rollout.num_engines=4"]) == 0
    assert "idle" not in capsys.readouterr().out
