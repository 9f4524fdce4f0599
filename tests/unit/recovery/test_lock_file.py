"""A run's lock file: what it holds, that it loads, and what is said where something is
not as it was.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from places import ROOT

from rlhf_megatron.cli.main import main
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.show import render_config_yaml
from rlhf_megatron.controller.recovery.config_lock_file import check_config_lock, make_lock_yaml

PLUGIN = "from rlhf_megatron.extend import REWARDS\nREWARDS.register('{name}')(len)\n"


@pytest.fixture
def locked(tmp_path: Path) -> Path:
    """The lock file of the quickstart's settings on a copy of its model, its data and a
    reward of one's own.
    """
    shutil.copytree(ROOT / "examples" / "quickstart" / "model", tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 40)
    (tmp_path / "reward.py").write_text(
        "def score(prompt, response, label, source, extra):\n    return 1.0\n"
    )
    (tmp_path / "run.yaml").write_text(
        f"extends: {ROOT}/configs/quickstart.yaml\n"
        "model: {path: model}\n"
        "data: {task: null, train_files: [train.jsonl], val_files: [train.jsonl]}\n"
        "reward: {name: function, params: {path: 'reward.py:score'}}\n"
    )
    (tmp_path / "config.lock.yaml").write_text(
        make_lock_yaml(render_config_yaml(read_run_config(tmp_path / "run.yaml").config))
    )
    return tmp_path / "config.lock.yaml"


def test_it_is_the_run_and_what_it_was_made_of(locked: Path) -> None:
    lock = yaml.safe_load(locked.read_text())["lock"]
    assert set(lock["digests"]) == {
        *(
            f"model.path {name}"
            for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
        ),
        *("data.train_files[0]", "data.val_files[0]", "reward.params.path"),
    }
    assert lock["packages"]["torch"] and lock["packages"]["python"]
    again = read_run_config(locked)
    assert render_config_yaml(again.config) == render_config_yaml(
        read_run_config(locked.parent / "run.yaml").config
    )
    said: list[str] = []
    check_config_lock(again, False, said.append)
    assert said == []


def test_what_is_not_as_it_was_is_refused_or_told(locked: Path) -> None:
    (locked.parent / "reward.py").write_text(
        "def score(prompt, response, label, source, extra):\n    return 0.0\n"
    )
    (locked.parent / "model" / "tokenizer.json").unlink()
    (locked.parent / "model" / "chat_template.jinja").write_text("{{ messages }}")
    lock = yaml.safe_load(locked.read_text())
    before = lock["lock"]["digests"]["reward.params.path"]
    lock["lock"]["packages"]["torch"] = "1.0"
    locked.write_text(yaml.safe_dump(lock))
    said: list[str] = []
    with pytest.raises(ConfigError) as caught:
        check_config_lock(read_run_config(locked), False, said.append)
    new, gone, changed = caught.value.problems
    assert (
        new.startswith("model.path chat_template.jinja has digest ")
        and "none: the run did not read it when" in new
    )
    assert gone.startswith("model.path tokenizer.json has digest none: it is not there, and ")
    assert (
        changed.startswith("reward.params.path has digest ")
        and f", and {before} when the run was locked" in changed
    )
    assert changed.endswith("restore it, or go on with what is there: --allow-changes.")
    assert (
        len(said) == 1
        and said[0].startswith("note: torch is ")
        and said[0].endswith("was 1.0 when the run was locked")
    )
    check_config_lock(read_run_config(locked), True, said.append)
    assert (
        said[-1] == "note: reward.params.path is not what it was when the run was locked"
        and len(said) == 5
    )


def test_commands_look_at_the_lock_and_the_settings_after_the_file_count(
    locked: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main(["config", "check", str(locked)])
    assert "when the run was locked" not in capsys.readouterr().err
    with (locked.parent / "train.jsonl").open("a") as file:
        file.write('{"prompt": "1+2=", "answer": "3"}\n')
    assert main(["config", "check", str(locked)]) == 2
    assert "data.train_files[0] has digest" in capsys.readouterr().err
    other = [f"data.{split}_files=[{ROOT}/examples/nothing.jsonl]" for split in ("train", "val")]
    with pytest.raises(ConfigError, match="none: it is not there"):
        check_config_lock(read_run_config(locked, other), False, lambda text: None)


def test_a_model_of_a_hub_is_locked_by_its_name(tmp_path: Path) -> None:
    copy = tmp_path / "models--owner--tiny" / "snapshots" / "0123abcd"
    shutil.copytree(ROOT / "examples" / "quickstart" / "model", copy)
    (tmp_path / "run.yaml").write_text(
        f"extends: {ROOT}/configs/quickstart.yaml\nmodel: {{path: {copy}}}\n"
    )
    tree = yaml.safe_load(
        make_lock_yaml(render_config_yaml(read_run_config(tmp_path / "run.yaml").config))
    )
    assert (
        tree["model"]["path"] == "owner/tiny@0123abcd"
        and "model.path config.json" in tree["lock"]["digests"]
    )


def test_a_lock_that_no_run_has_written_is_refused(tmp_path: Path) -> None:
    for text, said in (
        ("lock: 3", r"lock \(3\) must be as a run writes it"),
        ("lock: {}", "must have packages"),
    ):
        (tmp_path / "run.yaml").write_text(text + "\n")
        with pytest.raises(ConfigError, match=said):
            check_config_lock(read_run_config(tmp_path / "run.yaml"), False, lambda text: None)


def test_large_files_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 2 bytes, one in 8 of a file over 8 bytes, the last one, and the size."""
    from rlhf_megatron.controller.recovery import config_lock_file

    monkeypatch.setattr(config_lock_file, "_WHOLE", 8)
    monkeypatch.setattr(config_lock_file, "_PIECE", 2)
    path = tmp_path / "file"
    digests = []
    for data in (
        b"0123456789abcdefgh",
        b"0x23456789abcdefgh",
        b"01x3456789abcdefgh",
        b"0123456789abcdefgx",
        b"01234567",
    ):
        path.write_bytes(data)
        digests.append(config_lock_file._digest_sampled_file(path))
    assert digests[0] == digests[2] and len(set(digests)) == 4
