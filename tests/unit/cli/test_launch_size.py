"""launch/torchrun.sh and launch/slurm.sbatch start as many machines and ranks as the settings say,
however many devices a machine has. Nothing trains: the interpreter of the scripts runs the module
that reads the settings, and writes down the words of all else.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from end_to_end_tools import write_config
from places import ROOT, SUPPORT

from rlhf_megatron.cli.launch_size import LaunchSize
from rlhf_megatron.config.load import read_run_config

TORCHRUN = ROOT / "launch" / "torchrun.sh"
DEVICES = (0, 1, 2, 8)
FIRST_HOUR = re.search(
    r"^    (sbatch .*configs/quickstart_warm.yaml(?:.*\\\n)*.*)$",
    (ROOT / "docs" / "first_hour.md").read_text(),
    re.MULTILINE,
)
INTERPRETER = """#!/bin/sh
case "$2" in
    rlhf_megatron.cli.launch_size) exec {python} "$@" ;;
    "import torch"*) echo {num_devices} ;;
    *) echo "$*" >>"{directory}/words$NODE_RANK" ;;
esac
"""


def make_interpreter(directory: Path, num_devices: int) -> Path:
    """A Python that sees so many devices, as far as the scripts ask it."""
    interpreter = directory / "python"
    interpreter.write_text(
        INTERPRETER.format(python=sys.executable, num_devices=num_devices or 1, directory=directory)
    )
    interpreter.chmod(0o700)
    return interpreter


def start(
    directory: Path, *words: str, num_devices: int = 8, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The script, or sbatch with its options, to its end, from the root of the repository."""
    own = {
        "PATH": f"{SUPPORT / 'fake_slurm'}:{os.environ['PATH']}",
        "HOME": str(directory),
        "PYTHON": str(make_interpreter(directory, num_devices)),
        "PYTHONPATH": str(ROOT),
        "FAKE_SLURM_LOG": str(directory / "slurm.log"),
    }
    if words[0] == "sbatch":
        script = next(i for i, word in enumerate(words) if word.endswith(".sbatch"))
        options = words[1:script]
        num_nodes = int(next(o for o in options if o.startswith("--nodes=")).partition("=")[2])
        own |= {
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": ",".join(f"127.0.0.{2 + node}" for node in range(num_nodes)),
            "SLURM_JOB_NUM_NODES": str(num_nodes),
            "SLURM_SUBMIT_DIR": str(ROOT),
        }
        words = ("bash", *words[script:])
    return subprocess.run(
        words, cwd=ROOT, env=own | variables, capture_output=True, text=True, timeout=120
    )


def read_numbers(directory: Path, node: int | str = "") -> dict[str, str]:
    """The options with which a machine started its ranks; "" stands for a machine without
    NODE_RANK in its environment.
    """
    words = (directory / f"words{node}").read_text().split()
    return {
        name: words[words.index(name) + 1]
        for name in ("--nnodes", "--node-rank", "--nproc-per-node")
        if name in words
    }


@pytest.mark.parametrize("num_devices", DEVICES)
def test_ranks_are_those_of_the_settings(num_devices: int, tmp_path: Path) -> None:
    config = str(write_config(tmp_path))
    words = (config, "trainer.n_gpus_per_node=4", "--fresh")
    ended = start(tmp_path, str(TORCHRUN), *words, num_devices=num_devices)
    assert ended.returncode == 0, ended.stderr
    assert read_numbers(tmp_path) == {"--nproc-per-node": "4"}
    explicit = start(tmp_path, str(TORCHRUN), *words, NPROC_PER_NODE="3", num_devices=num_devices)
    assert explicit.returncode == 0
    assert "--nproc-per-node 3" in (tmp_path / "words").read_text()


@pytest.mark.parametrize("num_devices", DEVICES)
def test_the_first_hour_starts_two_ranks_on_each_of_two_nodes(
    num_devices: int, tmp_path: Path
) -> None:
    assert FIRST_HOUR is not None
    words = shlex.split(FIRST_HOUR[1].replace("\\\n", " "))
    ended = start(tmp_path, *words, num_devices=num_devices)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for node in range(2):
        assert read_numbers(tmp_path, node) == {
            "--nnodes": "2",
            "--node-rank": str(node),
            "--nproc-per-node": "2",
        }


def test_doctor_looks_at_all_nodes_with_all_their_devices(tmp_path: Path) -> None:
    """Whatever the settings of the run say that it also looks at."""
    config = str(write_config(tmp_path))
    words = ("sbatch", "--nodes=3", "launch/slurm.sbatch", "--cluster", config)
    ended = start(tmp_path, *words, num_devices=8, JOB="doctor")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [read_numbers(tmp_path, node)["--nnodes"] for node in range(3)] == ["3"] * 3
    assert read_numbers(tmp_path, 2)["--nproc-per-node"] == "8"


ENGINES_ALONE = ("trainer.nnodes=1", "trainer.n_gpus_per_node=2", "rollout.engine_machines=[1,2]")


def test_machines_with_engines_alone_are_those_of_the_settings(tmp_path: Path) -> None:
    config = str(write_config(tmp_path))
    settings = (*ENGINES_ALONE, "rollout.num_engines=2", "rollout.weight_transport=disk")
    ended = start(tmp_path, "sbatch", "--nodes=3", "launch/slurm.sbatch", config, *settings)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # Machine 0 listens to the others, although it has all ranks.
    assert read_numbers(tmp_path, 0) == {
        "--nnodes": "1",
        "--node-rank": "0",
        "--nproc-per-node": "2",
    }
    for node in (1, 2):
        words = (tmp_path / f"words{node}").read_text()
        assert words.startswith("-m rlhf_megatron train "), "no ranks, and no agent"


def test_a_job_of_another_size_is_refused(tmp_path: Path) -> None:
    config = str(write_config(tmp_path))
    words = ("sbatch", "--nodes=3", "launch/slurm.sbatch", config, "trainer.nnodes=2")
    ended = start(tmp_path, *words)
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        "This script was started on 3 machine(s), but the run needs 2: 2 with ranks"
        " (trainer.nnodes) and 0 with engines alone (rollout.engine_machines); start it on 2"
        " (sbatch --nodes=2), or change the settings."
    ]
    assert not list(tmp_path.glob("words*"))


@pytest.mark.parametrize(
    "setting", ["trainer.nodes=2", "trainer.nnodes=0", "rollout.num_engines=1000000000000"]
)
def test_a_wrong_configuration_is_left_to_the_run_to_explain(setting: str, tmp_path: Path) -> None:
    """Which says what is wrong with it; the script starts one rank for that."""
    config = str(write_config(tmp_path))
    ended = start(tmp_path, str(TORCHRUN), config, setting)
    assert ended.returncode == 0 and ended.stderr == ""
    assert read_numbers(tmp_path) == {"--nproc-per-node": "1"}


@pytest.mark.parametrize("script", ["slurm.sbatch", "slurm_ray.sbatch"])
def test_further_arguments_reach_srun(script: str, tmp_path: Path) -> None:
    config = str(write_config(tmp_path))
    words = ("sbatch", "--nodes=1", f"launch/{script}", config, "trainer.n_gpus_per_node=2")
    container = ["--container-image=/shared/rlhf.sqsh", "--container-mounts=/shared"]
    # Servers of Ray are not what this is about.
    ended = start(tmp_path, *words, SRUN_ARGS=" ".join(container), CLUSTER="/bin/true")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    calls = [json.loads(line) for line in (tmp_path / "slurm.log").read_text().splitlines()]
    assert [call["srun"]["options"][-2:] for call in calls] == [container]


@pytest.mark.parametrize("script", ["slurm.sbatch", "slurm_ray.sbatch"])
def test_a_job_asks_for_all_memory_and_has_lines_for_what_clusters_want(script: str) -> None:
    lines = (ROOT / "launch" / script).read_text().splitlines()
    last = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    assert "#SBATCH --mem=0" in lines[:last]
    for option in ("--partition=", "--account=", "--propagate=NONE"):
        assert any(line.startswith(f"##SBATCH {option}") for line in lines[:last]), option


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, (1, 8, 0)),
        ({"trainer": {"nnodes": 2, "n_gpus_per_node": 4}}, (2, 4, 0)),
        # Numbers count: machine 4 makes five of them, whether or not 2 and 3 have engines.
        ({"rollout": {"engine_machines": [4]}, "trainer": {"nnodes": 2}}, (2, 8, 3)),
        ({"rollout": {"engine_machines": [4]}, "job": "sft"}, (1, 8, 0)),
        ({"rollout": {"endpoints": ["http://10.0.0.9:1"], "engine_machines": [4]}}, (1, 8, 0)),
        # Servers of a reward model stand on machines of their own, too.
        (
            {"reward_model": {"path": "judge", "served": {"num_servers": 2, "machines": [1, 2]}}},
            (1, 8, 2),
        ),
        # Ray looks for places by itself.
        (
            {
                "rollout": {"num_engines": 4, "weight_transport": "process_group"},
                "trainer": {"runtime": "ray", "nnodes": 2},
            },
            (2, 8, 0),
        ),
    ],
)
def test_the_size_of_a_run(
    settings: dict[str, object], size: tuple[int, int, int], tmp_path: Path
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps(settings))
    found = LaunchSize.from_config(read_run_config(run, []).config)
    assert size == (
        found.num_rank_machines,
        found.num_ranks_per_machine,
        found.num_engine_machines,
    )
