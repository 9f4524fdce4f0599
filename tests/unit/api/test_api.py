"""The Python API: what it reads of a run directory, how it starts a run, and that
importing it is light.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

import rlhf_megatron
from rlhf_megatron import api
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.show import render_config_yaml

QUICKSTART = ROOT / "configs" / "quickstart.yaml"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    rows = [
        {"kind": "evaluation", "step": 0, "val/mean@1": 0.25},
        {"kind": "step", "step": 1, "seconds": 2.0, "critic/rewards/mean": 0.5},
        {"kind": "step", "step": 2, "seconds": 2.0, "critic/rewards/mean": None},
        {"kind": "step", "step": 2, "seconds": 3.0, "critic/rewards/mean": 0.75},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(lines + '{"kind": "step", "st')
    (tmp_path / "samples.jsonl").write_text(
        '{"kind": "best", "step": 1, "prompt": "1+1=", "reward": 1.0}\n'
    )
    (tmp_path / "held_out_samples.jsonl").write_text(
        '{"step": 0, "item": 0, "prompt": "2+2=", "score": 0.0}\n'
    )
    for name in ("step_000002", "step_000010", ".step_000012.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").write_text("{}")
    config = rlhf_megatron.load_config(QUICKSTART, {"trainer.seed": 7}, with_files=False)
    (tmp_path / "config.yaml").write_text(render_config_yaml(config))
    return tmp_path


def test_a_run_is_read_from_its_directory(directory: Path) -> None:
    run = rlhf_megatron.Run(directory)
    assert [(row["step"], row["critic/rewards/mean"]) for row in run.metrics()] == [
        (1, 0.5),
        (2, 0.75),
    ]
    assert [row["val/mean@1"] for row in run.metrics("evaluation")] == [0.25] and run.metrics(
        "warmup"
    ) == []
    assert [sample["prompt"] for sample in run.samples()] == ["1+1="]
    assert [sample["prompt"] for sample in run.held_out_samples()] == ["2+2="]
    assert list(run.checkpoints()) == [2, 10] and run.checkpoints()[10].name == "step_000010"
    assert run.config.trainer.seed == 7 and run.summary() is None
    (directory / "summary.json").write_text('{"steps": 2}')
    assert run.summary() == {"steps": 2}
    assert run.report().name.endswith(".html") and run.report().exists()


def test_a_directory_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="runs/gone is not a directory; give that of a run"):
        rlhf_megatron.Run("runs/gone")


AS_MAPPING = {"trainer.seed": 7, "trainer.save_freq": 2}


@pytest.mark.parametrize("overrides", [AS_MAPPING, ["trainer.seed=7", "trainer.save_freq=2"]])
def test_overrides_are_a_mapping_or_words(overrides: api.Overrides) -> None:
    config = rlhf_megatron.load_config(QUICKSTART, overrides, with_files=False)
    assert (config.trainer.seed, config.trainer.save_freq) == (7, 2)
    with pytest.raises(ConfigError, match=r"unknown key trainer\.sed"):
        rlhf_megatron.load_config(QUICKSTART, {"trainer.sed": 7}, with_files=False)


def test_a_wrong_configuration_is_raised_before_a_process_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **kwargs: pytest.fail("a process was started")
    )
    with pytest.raises(ConfigError, match="lr"):
        rlhf_megatron.train(QUICKSTART, {"actor.optim.lr": 7})


def test_a_run_that_fails_tells_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        api.TrainJob, "build_arguments", lambda self: ["train", "gone.yaml", *self.overrides]
    )
    with pytest.raises(rlhf_megatron.RunFailed, match="ended with exit code 2") as raised:
        rlhf_megatron.train(QUICKSTART, {"model.path": str(ROOT / "examples/quickstart/model")})
    assert raised.value.exit_code == 2 and raised.value.directory == Path("runs/quickstart")
    assert "cannot read gone.yaml" in capsys.readouterr().out


def test_importing_the_package_and_its_api_imports_no_torch() -> None:
    code = (
        "import sys, rlhf_megatron; rlhf_megatron.train; sys.exit('torch' in sys.modules or 'numpy'"
        " in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_version_stands_in_one_place() -> None:
    assert re.match(r"\d+\.\d+\.\d+$", rlhf_megatron.__version__)
    assert f"## {rlhf_megatron.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    told = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True
    )
    assert told.stdout.split()[-1] == rlhf_megatron.__version__


def test_a_rank_of_another_machine_does_not_look_for_the_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(api.TrainJob, "start", lambda self: 0)
    settings = {"trainer.default_local_dir": str(tmp_path / "gone")}
    run = rlhf_megatron.train(QUICKSTART, settings, is_own_process=False)
    assert run.directory == tmp_path / "gone" / "quickstart" and not run.directory.exists()
