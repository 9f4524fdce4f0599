"""Every launch line in the header of a configuration and of a launch script works as it stands: its
settings pass all checks, its machines have room for what they get, and its GPUs hold the run.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from places import ROOT

from rlhf_megatron.cli.launch_size import LaunchSize
from rlhf_megatron.cli.main import main, parse_arguments
from rlhf_megatron.config.load import load_run_config

CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
SCRIPTS = sorted((ROOT / "launch").glob("*.s*"))
STARTS = re.compile(
    r"((?:[A-Z_]+=\S+ )*"
    r"(?:sbatch (?:--\S+ )*launch/\w+\.sbatch|launch/torchrun\.sh|rlhf-megatron (?:train|sft))"
    r" (?:--cluster|\S+\.yaml\b)(?: [a-z_.]+=\S+)*)"
)
MEMORY = re.compile(r"^#     rlhf-megatron (plan memory .*)$", re.MULTILINE)


@dataclass(frozen=True)
class LaunchLine:
    """A command in a header that starts a run."""

    source: Path
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)

    @property
    def num_nodes(self) -> int:
        """Of the job; one where it is not Slurm's."""
        counts = [word for word in self.words if word.startswith("--nodes=")]
        return int(counts[0].partition("=")[2]) if counts else 1

    @property
    def config_and_settings(self) -> list[str]:
        """The configuration and the words after it."""
        at = next(i for i, word in enumerate(self.words) if word.endswith(".yaml"))
        return self.words[at:]


def read_header(path: Path) -> str:
    """The comment at the top, without what Slurm reads and without the first line of a script."""
    lines = path.read_text().splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line for line in lines[:end] if not line.startswith(("#!", "#SB", "##")))


def list_launch_lines(path: Path) -> list[LaunchLine]:
    return [LaunchLine(path, match[1]) for match in STARTS.finditer(read_header(path))]


LINES = [line for path in CONFIGS for line in list_launch_lines(path)]
IDS = [f"{line.source.stem}-{number}" for number, line in enumerate(LINES)]


def run_command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(words)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_every_recipe_says_how_it_is_launched() -> None:
    assert {line.source for line in LINES} >= set(RECIPES)
    assert len(LINES) > len(RECIPES) + 5


@pytest.mark.parametrize("line", LINES, ids=IDS)
def test_the_line_passes_all_checks(
    line: LaunchLine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    config, *settings = line.config_and_settings
    code, text = run_command(capsys, "config", "check", config, *settings, "--no-files")
    assert code == 0, text


@pytest.mark.parametrize("line", LINES, ids=IDS)
def test_the_line_starts_the_machines_that_the_plan_has(
    line: LaunchLine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And none of them needs more GPUs than it has."""
    monkeypatch.chdir(ROOT)
    config, *settings = line.config_and_settings
    code, text = run_command(capsys, "plan", "placement", config, *settings)
    assert code == 0, text
    machines = re.findall(r"^machine \d+ +\S.*$", text, re.MULTILINE)
    assert len(machines) == line.num_nodes, text
    # A job of several nodes with a script, and one of a single machine without.
    assert ("sbatch" in line.words) == (line.num_nodes > 1), line.text


@pytest.mark.dist
@pytest.mark.long
def test_the_memory_of_each_recipe_holds_the_run() -> None:
    """With the settings of its launch line, on the GPU that its header names; nine plans take 50 s.
    One process makes all: megatron-core is changed in it.
    """
    plans = []
    for line in LINES:
        if line.source not in RECIPES:
            continue
        gpu = MEMORY.search(read_header(line.source))
        assert gpu is not None, line.source
        args = parse_arguments(shlex.split(gpu[1]))
        config, *settings = line.config_and_settings
        assert args.config == Path(config)
        plans.append(["plan", "memory", config, *settings, "--gpu", args.gpu])
    program = "import json, sys\nfrom rlhf_megatron.cli.main import main\n"
    program += f"sys.exit(sum(main(words) for words in {plans!r}))"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert len(plans) == len(RECIPES)
    assert ended.returncode == 0, ended.stdout + ended.stderr


SCRIPT_LINES = [line for path in SCRIPTS for line in list_launch_lines(path)]
RUN_OF_THE_READER = """
extends: {quickstart}
data: {{train_batch_size: 12}}
actor:
  megatron: {{tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1}}
  mini_batch_size: 24
rollout: {{num_engines: 4, weight_transport: disk, transfer_dir: {folder}}}
trainer: {{n_gpus_per_node: 1}}
"""


@pytest.mark.parametrize(
    "line", SCRIPT_LINES, ids=[f"{line.source.name}-{i}" for i, line in enumerate(SCRIPT_LINES)]
)
def test_a_line_in_a_script_fits_a_run(
    line: LaunchLine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """x.yaml is a run with a rank on each machine; under Slurm the script starts it on as many
    nodes as the job has.
    """
    monkeypatch.chdir(ROOT)
    script = next((word for word in line.words if word.startswith("launch/")), None)
    assert script is None or (ROOT / script).is_file()
    if "--cluster" in line.words:
        return  # of doctor, which needs no configuration
    config, *settings = line.config_and_settings
    if config.endswith("x.yaml"):
        config = str(tmp_path / "x.yaml")
        quickstart = ROOT / "configs" / "quickstart.yaml"
        Path(config).write_text(RUN_OF_THE_READER.format(quickstart=quickstart, folder=tmp_path))
    settings = [word for word in settings if word != "key=value"]
    if script == "launch/slurm_ray.sbatch":
        settings.append("trainer.runtime=ray")
    code, text = run_command(capsys, "config", "check", config, *settings, "--no-files")
    assert code == 0, text
    if script == "launch/slurm.sbatch":
        loaded = load_run_config(config, settings, with_files=False)
        assert LaunchSize.from_config(loaded.config).num_machines == line.num_nodes


def test_the_scripts_show_how_they_are_started() -> None:
    assert {line.source for line in SCRIPT_LINES} == set(SCRIPTS)
    assert len(SCRIPT_LINES) > 7
