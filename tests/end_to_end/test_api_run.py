"""The example of docs/api.md on a tiny run."""

from pathlib import Path

import pytest
from docs_tools import BLOCK
from end_to_end_tools import write_config
from places import ROOT

import rlhf_megatron

pytestmark = pytest.mark.dist


LAYOUT = "{tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1}"
SMALL = f"actor: {{megatron: {LAYOUT}}}\ntrainer: {{runtime: inline, n_gpus_per_node: 1}}\n"


def test_the_example_of_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [
        text
        for kind, text in BLOCK.findall((ROOT / "docs" / "api.md").read_text())
        if kind == "python"
    ]
    small = tmp_path / "small.yaml"
    small.write_text(f"extends: {write_config(tmp_path).name}\n{SMALL}")
    for shown, short in (
        ("configs/quickstart.yaml", str(small)),
        ('steps": 20', 'steps": 2'),
        ('freq": 10', 'freq": 1'),
        ('"my_model"', f'"{tmp_path / "my_model"}"'),
    ):
        assert shown in code
        code = code.replace(shown, short)
    names: dict[str, object] = {}
    exec(code, names)
    run = names["run"]
    assert isinstance(run, rlhf_megatron.Run) and [row["step"] for row in run.metrics()] == [1, 2]
    assert list(run.checkpoints()) == [0, 1, 2] and run.config.trainer.total_training_steps == 2
    assert (tmp_path / "my_model" / "model.safetensors").is_file()
    printed = capsys.readouterr().out
    assert f"open {run.directory / 'report'}" in printed and "step 2" in printed
