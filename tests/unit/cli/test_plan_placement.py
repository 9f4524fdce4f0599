"""`rlhf-megatron plan placement`: what the pages print, and runs that do not fit."""

from __future__ import annotations

import re
import shlex

import pytest
from docs_tools import BLOCK
from places import ROOT

from rlhf_megatron.cli.main import main

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
        == "launcher    torchrun: NNODES=8 NPROC_PER_NODE=8 launch/torchrun.sh on each machine"
    )
    assert "engine0 on GPUs 8-15" in lines[2]
    assert lines[-1].startswith(
        "does not fit: machine 0 needs 16 GPUs and has 8. Name machines with free GPUs"
        " in rollout.engine_machines"
    )
    assert (
        placed(capsys, "trainer.runtime=torchrun", "rollout.num_engines=1", "--gpus", "16")[0] == 0
    )
    apart = ("trainer.runtime=torchrun", "rollout.num_engines=2", "rollout.engine_machines=[8,9]")
    code, lines = placed(capsys, *apart)
    assert (
        "torchrun: NNODES=8 ENGINE_NODES=2 NPROC_PER_NODE=8 launch/torchrun.sh on each machine"
        in lines[0]
    )
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
    assert code == 1 and lines[-1].endswith("use rollout.weight_transport: process_group or disk.")
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
