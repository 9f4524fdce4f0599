"""`config check` and `train` make the same checks: each mistake is refused by both, with
value, rule and fix.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import MODEL

from rlhf_megatron.cli.main import main
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.jobs.train_job import TrainJob

Tree = Mapping[str, Any]


def run_file(
    directory: Path, sections: Tree, rows: str = '{"prompt": "1+2=", "answer": "3"}\n'
) -> Path:
    """A run that is right but for `sections`, which stand over its own."""
    (directory / "train.jsonl").write_text(rows)
    files = [str(directory / "train.jsonl")]
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": str(MODEL), "dtype": "float32", "init_seed": 1},
        "data": {
            "train_files": files,
            "val_files": files,
            "max_prompt_length": 6,
            "max_response_length": 4,
        },
        "rollout": {"engine": "local", "n": 2},
        "actor": {"mini_batch_size": 512},
        "trainer": {
            "device": "cpu",
            "n_gpus_per_node": 1,
            "default_local_dir": str(directory / "runs"),
        },
    }
    for section, settings in sections.items():
        tree[section] = {**tree.get(section, {}), **settings}
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def check_and_train(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `config check` says, which is what `train` says before it starts anything."""
    code = main(["config", "check", str(path)])
    told = capsys.readouterr().err.splitlines()[1:]
    if code == 0:
        assert TrainJob(path).config.model.path
        return ""
    with pytest.raises(ConfigError) as error:
        TrainJob(path).start()
    assert [line.strip() for line in told] == [
        line.strip() for line in str(error.value).splitlines()
    ]
    return "\n".join(told)


MISTAKES: dict[str, tuple[Tree, str]] = {
    "estimator": (
        {"algorithm": {"adv_estimator": "grop"}},
        "unknown advantage estimator 'grop'. Did you mean 'grpo'?",
    ),
    "its parameter": (
        {"algorithm": {"params": {"epsilom": 1}}},
        "Did you mean algorithm.params.epsilon?",
    ),
    "loss": (
        {"actor": {"policy_loss": {"loss_mode": "ppo"}}},
        "unknown policy loss 'ppo'. Did you mean",
    ),
    "reward": (
        {"reward": {"name": "exact_mach"}},
        "unknown reward 'exact_mach'. Did you mean 'exact_match'?",
    ),
    "a function": ({"reward": {"name": "function", "params": {"path": "gone:f"}}}, "gone"),
    "task": (
        {"data": {"task": "addtion", "train_files": [], "val_files": []}},
        "unknown task 'addtion'. Did you mean",
    ),
    "schedule": (
        {"schedule": {"name": "nonsense"}},
        "Known: asynchronous, one_step_off, streaming, synchronous.",
    ),
    "logger": ({"trainer": {"logger": ["jsnl"]}}, "unknown logger 'jsnl'. Did you mean 'jsonl'?"),
    "file": (
        {"data": {"train_files": ["gone.jsonl"]}},
        "/gone.jsonl) does not exist; correct the path.",
    ),
    "prompts": (
        {"data": {"max_prompt_length": 3}},
        "the prompt has 4 tokens, over data.max_prompt_length (3)",
    ),
    "stop": ({"rollout": {"stop": ["12"]}}, "'12' is 2 tokens"),
    "engine's argument": (
        {"rollout": {"engine": "sglang", "sglang": {"args": {"dp_size": 2}}}},
        (
            "rollout.sglang.args.dp_size (2) cannot be: copies of the model in one server are not"
            " all reached"
        ),
    ),
    "engine's own": (
        {"rollout": {"engine": "sglang", "sglang": {"args": {"port": 30000}}}},
        "rollout.sglang.args.port is set by the run: a free port is taken; remove it.",
    ),
    "device": (
        {"trainer": {"device": "cuda"}},
        "trainer.device (cuda) needs a GPU, and torch finds none here; use",
    ),
    "directory": (
        {"trainer": {"default_local_dir": "/dev/null/runs"}},
        "must be a directory that can be written",
    ),
    "sampling": (
        {"rollout": {"temperature": 1e-320}},
        "rollout.temperature (1e-320) must be at least 0.01",
    ),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_told_by_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    sections, expected = MISTAKES[kind]
    told = check_and_train(run_file(tmp_path, sections), capsys)
    assert expected in told and len(told.splitlines()) == 1, told
    assert not (tmp_path / "runs").exists(), "a check makes nothing"


ROWS = {
    "not JSON": ('{"prompt": 1\n', "train.jsonl:1: not JSON"),
    "no answer": ('{"prompt": "1+2="}\n', "train.jsonl:1: no key 'answer'"),
    "half a pair": (
        '{"prompt": "1+2=", "answer": "3"}\n{"prompt": "1+1=", "answer": "\\ud800"}\n',
        "train.jsonl:2: its label has half of a surrogate pair (\\ud800 at character 0)",
    ),
    "no token for it": (
        '{"prompt": "one", "answer": "3"}\n',
        "train.jsonl:1: a text cannot be spelled with this vocab",
    ),
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_bad_row_is_told_by_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    rows, expected = ROWS[kind]
    assert expected in check_and_train(run_file(tmp_path, {}, rows), capsys)


def test_bad_rows_are_skipped_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(rows for rows, _ in ROWS.values())
    assert (
        check_and_train(run_file(tmp_path, {"data": {"skip_bad_rows": True}}, rows), capsys) == ""
    )
    warm = {"data": {"skip_bad_rows": False}, "warmup": {"max_steps": 1}}
    told = check_and_train(
        run_file(tmp_path, warm, '{"prompt": "1+2=", "answer": "three"}\n'), capsys
    )
    assert "train.jsonl:1: a text cannot be spelled" in told, "warm-up trains on labels"


MODELS: dict[str, tuple[Tree | str, str]] = {
    "null": (
        {"rms_norm_eps": None},
        "rms_norm_eps (None) must be a number above 0 and below 1; mend the file.",
    ),
    "NaN": ({"rms_norm_eps": float("nan")}, "rms_norm_eps (nan) must be a finite number; mend"),
    "negative": ({"rms_norm_eps": -1e-6}, "rms_norm_eps (-1e-06) must be a number above 0"),
    "list": ({"rms_norm_eps": [1e-6]}, "rms_norm_eps ([1e-06]) must be a finite number"),
    "layers": (
        {"num_hidden_layers": 10**12},
        "num_hidden_layers (1000000000000) must be a positive integer that some",
    ),
    "rope": (
        {"rope_parameters": {"rope_type": ["yarn"]}},
        "rotary embeddings of type \"['yarn']\" are not supported",
    ),
    "theta": (
        {"rope_theta": 10**400, "rope_parameters": None},
        "must be a finite number; mend the file.",
    ),
    "kinds": ({"layer_types": [["full_attention"]]}, "are not supported; only full_attention is"),
    "deep": ("[" * 100_000, "config.json cannot be read as JSON"),
    "no object": ("[]", "config.json must hold a JSON object"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_wrong_model_is_told_by_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    changed, expected = MODELS[kind]
    shutil.copytree(MODEL, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    changed = (
        changed
        if isinstance(changed, str)
        else json.dumps({**json.loads(file.read_text()), **changed})
    )
    file.write_text(changed)
    assert expected in check_and_train(
        run_file(tmp_path, {"model": {"path": str(tmp_path / "model")}}), capsys
    )


def test_everything_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sections = {
        "model": {"path": str(tmp_path / "gone"), "pth": 1},
        "algorithm": {"adv_estimator": "grop"},
        "rollout": {"temperature": 0},
        "reward": {"name": "function", "params": {"path": "gone:f"}},
        "trainer": {"device": "cuda", "logger": ["jsnl"]},
    }
    told = check_and_train(run_file(tmp_path, sections, '{"prompt": 1'), capsys)
    for expected in (
        "unknown key model.pth",
        "'grop'",
        "temperature (0.0)",
        "gone",
        "(cuda)",
        "'jsnl'",
        "train.jsonl:1",
    ):
        assert expected in told
    assert len(told.splitlines()) >= 8
    assert main(["config", "check", str(tmp_path / "run.yaml"), "--no-files"]) == 2
    told = capsys.readouterr().err
    assert "'grop'" in told and "train.jsonl:1" not in told and "(cuda)" not in told, (
        "another machine has those"
    )


def test_pipes_are_refused_and_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["config", "check", str(pipe)]) == 2
    assert "it is a pipe, which may never end" in capsys.readouterr().err
    assert "does not exist" in check_and_train(
        run_file(tmp_path, {"data": {"train_files": [str(pipe)]}}), capsys
    )
    path = run_file(tmp_path, {})
    path.write_text(f"plugins: [{pipe}.py]\n" + path.read_text())
    os.mkfifo(f"{pipe}.py")
    assert "is not a file" in check_and_train(path, capsys)
