"""Data sets named as on a hub: which files are a split's, and against a small server of the
hub's protocol.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from hub_server import COMMIT, Hub
from huggingface_hub import constants
from places import MODEL

from rlhf_megatron.cli.main import main
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.hub_data import (
    DatasetSplit,
    fetch_data_splits,
    fetch_split,
    find_local_split_files,
    select_split_files,
)
from rlhf_megatron.config.load import LOCK_FILE, load_run_config, read_run_config
from rlhf_megatron.config.show import render_config_yaml
from rlhf_megatron.controller.recovery.config_lock_file import check_config_lock, make_lock_yaml
from rlhf_megatron.data.data_rows import read_prompt_rows
from rlhf_megatron.jobs.train_job import TrainJob

GSM8K = [
    "README.md",
    "main/test-00000-of-00001.parquet",
    "main/train-00000-of-00001.parquet",
    "socratic/test-0.parquet",
]
CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test-*]
- config_name: socratic
  data_files:
  - {split: test, path: "socratic/*"}
---
# A card
"""


def split(text: str) -> DatasetSplit:
    found = DatasetSplit.from_name(text)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "text",
    [
        "a/b:train",
        "a/b@refs/convert/parquet:main:test",
        "openai/gsm8k:main:train",
        "a/b@0f:x/y=1/z-0.parquet",
    ],
)
def test_names_are_read_and_written_alike(text: str) -> None:
    assert str(split(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "a/b",
        "train.jsonl",
        "/data/a:train",
        "../a/b:train",
        "a/b:",
        "a/b:c:d:e",
        "a/b:x y",
        "a/b:x/y.txt",
    ],
)
def test_paths_are_no_names(text: str) -> None:
    assert DatasetSplit.from_name(text) is None


@pytest.mark.parametrize(
    ("name", "there", "card", "expected"),
    [
        ("o/n:main:train", GSM8K, CARD, GSM8K[2:3]),
        ("o/n:main:test", GSM8K, CARD, GSM8K[1:2]),
        ("o/n:socratic:test", GSM8K, CARD, GSM8K[3:]),
        ("o/n:socratic/test-0.parquet", GSM8K, CARD, GSM8K[3:]),
        (
            "o/n:train",
            ["data/train-0.parquet", "data/test-0.parquet"],
            "",
            ["data/train-0.parquet"],
        ),
        ("o/n:validation", ["dev.jsonl", "train.jsonl"], "# no metadata", ["dev.jsonl"]),
        ("o/n:train", ["a.jsonl", "b.jsonl", "note.txt"], "", ["a.jsonl", "b.jsonl"]),
        (
            "o/n:main:test",
            ["main/test/0000.parquet", "other/test/0000.parquet"],
            "",
            ["main/test/0000.parquet"],
        ),
        (
            "o/n:train",
            ["x/train.jsonl"],
            "---\nconfigs:\n- {config_name: c, data_files: x/*}\n---\n",
            ["x/train.jsonl"],
        ),
        (
            "o/n:train",
            ["x/y.jsonl", "z/y.jsonl"],
            "---\nconfigs:\n- {config_name: c, data_dir: z}\n---\n",
            ["z/y.jsonl"],
        ),
        ("o/n:train", ["train.json", "dataset_infos.json"], "", ["train.json"]),
        ("o/n:train", ["train.json", "train.jsonl"], "", ["train.jsonl"]),
        ("o/n:train", ["a.jsonl", "test.json", "dataset_infos.json"], "", ["a.jsonl"]),
        ("o/n:rows.json", ["rows.json", "train.jsonl"], "", ["rows.json"]),
        (
            "o/n:train",
            ["x/rows.json", "x/infos.json"],
            "---\nconfigs:\n- {config_name: c, data_files: x/rows.json}\n---\n",
            ["x/rows.json"],
        ),
    ],
)
def test_files_of_a_split(name: str, there: list[str], card: str, expected: list[str]) -> None:
    assert select_split_files(split(name), there, card) == expected


@pytest.mark.parametrize(
    ("name", "there", "card", "message"),
    [
        (
            "o/n:train",
            GSM8K,
            CARD,
            r"o/n:train must name one of its subsets \(main, socratic\): o/n:SUBSET:train",
        ),
        (
            "o/n:main:dev",
            GSM8K,
            CARD,
            r"no parquet, JSONL or JSON files .*o/n@refs/convert/parquet:SUBSET:dev",
        ),
        ("o/n:train", ["train.csv"], "", r"such files there: none"),
        ("o/n:train", ["alpaca.json"], "", r"such files there: alpaca.json"),
        (
            "o/n:test",
            ["main/test/0.parquet", "other/test/0.parquet"],
            "",
            r"several folders \(main, other\).*o/n:FOLDER:test",
        ),
    ],
)
def test_what_is_no_split_is_told(name: str, there: list[str], card: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_split_files(split(name), there, card)


def jsonl(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = tmp_path / "on_hub"
    folder.mkdir()
    for number, name in enumerate(("a_train.jsonl", "b_train.jsonl", "test.jsonl")):
        (folder / name).write_text(jsonl({"prompt": f"{number} + 1 =", "answer": number + 1}))
    server = Hub(folder, "datasets/owner/tiny")
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


def run_file(tmp_path: Path, train: str = "owner/tiny:train", val: str = "owner/tiny:test") -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{path: {MODEL}, init_seed: 1}}\n"
        f"data: {{train_files: [{train}], val_files: [{val}]}}\n"
    )
    return path


def test_a_job_downloads_the_files_and_every_later_look_finds_them(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_file(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_run_config(path)
    told = (
        "data.train_files (owner/tiny:train) does not exist; `rlhf-megatron fetch"
        " owner/tiny:train` brings it"
    )
    assert told in str(caught.value) and not hub.asked  # a check leaves the network alone
    with pytest.raises(ConfigError, match="max_prompt_length"):  # the model is too small
        _ = TrainJob(path).config
    assert capsys.readouterr().out.startswith("owner/tiny:train is fetched from the hub\n")
    data = read_run_config(path).config.data
    asked = len(hub.asked)
    assert [Path(file).name for file in data.train_files] == ["a_train.jsonl", "b_train.jsonl"]
    assert all(Path(file).parent.name == COMMIT for file in (*data.train_files, *data.val_files))
    rows, _ = read_prompt_rows(data.train_files, "prompt", "answer", False)
    assert [(row.prompt, row.source) for row in rows] == [
        ("0 + 1 =", "owner/tiny"),
        ("1 + 1 =", "owner/tiny"),
    ]
    assert len(hub.asked) == asked


def test_a_lock_file_names_files_of_the_hub_and_another_machine_fetches_them(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train", "test"):
        fetch_split(split(f"owner/tiny:{name}"))
    text = make_lock_yaml(render_config_yaml(read_run_config(run_file(tmp_path)).config))
    data = yaml.safe_load(text)["data"]
    lock = tmp_path / LOCK_FILE
    assert data["train_files"] == [f"owner/tiny@{COMMIT}:{name}_train.jsonl" for name in "ab"]
    assert (
        data["val_files"] == [f"owner/tiny@{COMMIT}:test.jsonl"]
        and str(tmp_path / "cache") not in text
    )
    lock.write_text(text)
    for cache in ("cache", "of_another_machine"):
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / cache))
        fetch_data_splits(read_run_config(lock).config.data, lambda line: None)
        found = read_run_config(lock)
        assert [Path(file).parents[3].name for file in found.config.data.train_files] == [cache] * 2
        check_config_lock(found, False, lambda line: None)
    Path(found.config.data.train_files[1]).write_text("other rows\n")
    with pytest.raises(
        ConfigError, match=r"data.train_files\[1\] has digest .* when the run was locked"
    ):
        check_config_lock(read_run_config(lock), False, lambda line: None)


def test_a_download_that_was_cut_off_is_no_copy(hub: Hub, tmp_path: Path) -> None:
    """Files without numbers do not tell how many there are: the list that is written last does."""
    train = split("owner/tiny:train")
    assert main(["fetch", "owner/tiny:train"]) == 0
    found = [Path(file) for file in find_local_split_files(train)]
    assert len(found) == 2
    found[1].unlink()
    assert find_local_split_files(train) == []
    for file in found[0].parents[2].glob("rlhf_megatron/*"):
        file.unlink()
    assert find_local_split_files(train) == [str(found[0])], "one file is a whole split"
    found[1].write_text("")
    assert find_local_split_files(train) == [], "two may be two of three"
    for number in range(3):
        (found[0].parent / f"many-train-{number:05}-of-00003.jsonl").write_text("")
    for file in found:
        file.unlink(missing_ok=True)
    assert len(find_local_split_files(train)) == 3
    (found[0].parent / "many-train-00001-of-00003.jsonl").unlink()
    assert find_local_split_files(train) == []


def test_without_a_network_the_cause_is_told(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError) as caught:
        _ = TrainJob(run_file(tmp_path)).config
    assert [problem.partition(" (")[0] for problem in caught.value.problems] == [
        "owner/tiny:train cannot be fetched from the hub",
        "owner/tiny:test cannot be fetched from the hub",
    ]
    assert "HF_HUB_OFFLINE is set: unset it" in str(caught.value) and not hub.asked


def test_an_id_without_a_split_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(run_file(tmp_path, "owner/tiny"))
    assert "or name the split of a data set of the hub (owner/tiny:train)" in str(caught.value)
