"""A disk that is full at the last write: the error names the file. No file of the process grows
beyond a limit here, which a buffered file meets when it is flushed or closed.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from full_disk import files_end_at
from report_samples import sample, step_row, write_run_dir

from rlhf_megatron.cli.main import main
from rlhf_megatron.data.atomic_directory import write_directory_atomically
from rlhf_megatron.data.direct_file_io import write_large_file_atomically
from rlhf_megatron.jobs.generation.answer_file import AnswerFile
from rlhf_megatron.rollout.fleet.server_process import write_private_file
from rlhf_megatron.weights.hf_writer import (
    SafetensorsWriter,
    TensorSpec,
    write_config_and_tokenizer,
    write_weight_index,
)
from rlhf_megatron.weights.tensor_file import write_tensor_file
from rlhf_megatron.write_errors import explain_write_error, explain_write_errors, write_text_file

SPEC = TensorSpec("w", "float32", (4,))


def write_safetensors(path: Path) -> None:
    """The header and the tensor stay in the buffer until the file is closed."""
    writer = SafetensorsWriter(path, [SPEC])
    writer.write_tensor("w", torch.ones(4))
    writer.close()


def save_with_safetensors(path: Path) -> None:
    write_tensor_file(path, {"w": torch.ones(4)}, {})


def save_with_torch(path: Path) -> None:
    with explain_write_errors(path):
        torch.save({"w": torch.ones(4)}, path)


def write_in_directory(path: Path) -> None:
    with write_directory_atomically(path.parent / "out") as aside:
        write_weight_index(aside, {"model.safetensors": [SPEC]})


@pytest.mark.parametrize(
    ("file_name", "write"),
    [
        ("a.txt", lambda path: write_text_file(path, "x" * 100)),
        ("a.bin", lambda path: write_large_file_atomically(path, [b"x" * 100])),
        ("a.safetensors", write_safetensors),
        ("b.safetensors", save_with_safetensors),
        ("a.pt", save_with_torch),
        ("model.safetensors.index.json", write_in_directory),
        ("token", lambda path: write_private_file(path, "x" * 100)),
        (
            "config.json",
            lambda path: write_config_and_tokenizer(path.parent, {"a": 1}, {"float32"}, None),
        ),
    ],
)
def test_the_error_names_the_file(
    tmp_path: Path, file_name: str, write: Callable[[Path], object]
) -> None:
    with files_end_at(10), pytest.raises(OSError) as caught:
        write(tmp_path / file_name)
    text = str(caught.value)
    assert file_name in text and "cannot be written: " in text
    if file_name != "a.pt":  # torch does not say why
        assert caught.value.errno == errno.EFBIG and "MB are free there" in text
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


def test_an_error_is_explained_once(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    once = explain_write_error(tmp_path / "a", error)
    assert str(once).startswith(f"[Errno 28] {tmp_path}/a cannot be written: No space left on")
    assert explain_write_error(tmp_path / "b", once) is once
    with pytest.raises(ZeroDivisionError), explain_write_errors(tmp_path):
        _ = 1 // 0


def test_commands_name_the_file_that_they_could_not_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    run_dir = write_run_dir(tmp_path / "run", [step_row(1, 0.5)], samples=[sample(1)])
    row = {"index": 0, "source": "s", "prompt": "1", "answer": "2", "responses": ["2"]}
    (tmp_path / "answers.jsonl").write_text(json.dumps(row) + "\n")
    answers = str(tmp_path / "answers.jsonl")
    for file_name, words in (
        ("run/report/reward.png", ["report", str(run_dir), "--open", "no"]),
        ("figures.json", ["evaluate", answers, "--json", str(tmp_path / "figures.json")]),
        ("page.html", ["evaluate", answers, "--report", str(tmp_path / "page.html")]),
    ):
        with files_end_at(20):
            assert main(words) == 1
        text = capsys.readouterr().err
        assert f"{file_name} cannot be written: File too large." in text, text


def test_answers_for_which_the_disk_had_no_room_are_not_taken_for_complete(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    row = {"index": 0, "responses": ["2" * 300]}
    with AnswerFile(path, {"seed": 1}, 1) as answers:
        with files_end_at(100):
            answers.append(row)
            assert answers.is_complete and path.read_bytes() == b""
            with pytest.raises(OSError, match=r"answers\.jsonl cannot be written: File too large"):
                answers.write_ordered_rows()
        answers.write_ordered_rows()
    assert json.loads(path.read_text()) == row
