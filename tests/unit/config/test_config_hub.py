"""Models named as on a hub, against a small server of the hub's protocol."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from hub_server import COMMIT, Hub
from huggingface_hub import constants
from places import MODEL

from rlhf_megatron.cli.main import main
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.hub import is_hub_name
from rlhf_megatron.config.load import load_run_config, read_run_config
from rlhf_megatron.jobs.generation.model_source import load_job_config
from rlhf_megatron.jobs.train_job import TrainJob


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = tmp_path / "on_hub"
    shutil.copytree(MODEL, folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "pytorch_model.bin").write_bytes(b"other format")
    server = Hub(folder)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


def _run(tmp_path: Path, name: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(f"model:\n  path: {name}\n")
    return path


@pytest.mark.parametrize("text", ["Qwen/Qwen3-8B", "owner/tiny@main", "a/b@refs/pr/1"])
def test_names_of_a_hub(text: str) -> None:
    assert is_hub_name(text)


NO_NAMES = ("/data/model", "./a/b", "../a/b", "~/a/b", "model", "a/b/c", "a/", "a b/c")
# by huggingface_hub, as an error of its own
REFUSED = "runs/my--model", "a/b..c", "a/b.", "a/b.git", "a/" + "b" * 97


@pytest.mark.parametrize("text", (*NO_NAMES, *REFUSED))
def test_paths_are_no_names(text: str) -> None:
    assert not is_hub_name(text)


def test_a_job_downloads_the_model_and_every_later_look_finds_it(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _run(tmp_path, "owner/tiny")
    with pytest.raises(ConfigError) as caught:
        load_run_config(path)
    assert "`rlhf-megatron fetch owner/tiny` brings the model of a hub, as `train` does" in str(
        caught.value
    )
    assert not hub.asked  # a check leaves the network alone
    with pytest.raises(ConfigError):  # the file names no data
        _ = TrainJob(path).config
    assert capsys.readouterr().out == "owner/tiny is fetched from the hub\n"
    model = Path(read_run_config(path).config.model.path)
    assert model.is_absolute() and model.name == COMMIT
    assert (model / "config.json").read_bytes() == (MODEL / "config.json").read_bytes()
    assert not (model / "pytorch_model.bin").exists()
    asked = len(hub.asked)
    with pytest.raises(ConfigError):
        _ = TrainJob(path).config
    assert len(hub.asked) == asked
    # `generate owner/tiny`: these are no weights
    with pytest.raises(ValueError, match=f"{COMMIT}.*safetensors"):
        load_job_config(Path("owner/tiny"), [], [])


def test_a_copy_of_a_tokenizer_is_no_copy_of_the_model(hub: Hub, tmp_path: Path) -> None:
    path = _run(tmp_path, "owner/tiny")
    words = [f"model.path={MODEL}", "model.tokenizer_path=owner/tiny"]
    with pytest.raises(ConfigError):  # the file names no data
        _ = TrainJob(path, tuple(words)).config
    tokenizer = Path(read_run_config(path, words).config.model.tokenizer_path or "")
    assert tokenizer.name == COMMIT and not (tokenizer / "model.safetensors").exists()
    assert read_run_config(path).config.model.path == "owner/tiny"
    with pytest.raises(ConfigError):
        _ = TrainJob(path).config
    assert (
        Path(read_run_config(path).config.model.path) == tokenizer
        and (tokenizer / "model.safetensors").exists()
    )


def test_a_model_without_weights_in_our_format_is_told(hub: Hub, tmp_path: Path) -> None:
    (hub.folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        _ = TrainJob(_run(tmp_path, "owner/tiny")).config
    assert caught.value.problems == [
        "model.path (owner/tiny): it has no *.safetensors on the hub, which is needed;"
        " name another."
    ]


def test_a_download_that_was_cut_off_goes_on(hub: Hub, tmp_path: Path) -> None:
    (hub.folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (hub.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for number in (1, 2):
        (hub.folder / f"model-{number}.safetensors").write_bytes(b"%d" % number)
    path = _run(tmp_path, "owner/tiny@main")
    main(["fetch", "owner/tiny@main"])
    model = Path(read_run_config(path).config.model.path)
    (model / "model-2.safetensors").unlink()
    assert read_run_config(path).config.model.path == "owner/tiny@main"
    main(["fetch", "owner/tiny@main"])
    assert Path(read_run_config(path).config.model.path) == model


def test_a_folder_of_that_name_is_meant(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "owner" / "tiny").mkdir(parents=True)
    assert read_run_config(_run(tmp_path, "owner/tiny")).config.model.path == str(
        tmp_path / "owner" / "tiny"
    )


@pytest.mark.parametrize("is_offline", [False, True])
def test_what_cannot_be_fetched_is_told_with_the_cause(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_offline: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    monkeypatch.setenv("HF_HUB_OFFLINE", str(int(is_offline)))
    with pytest.raises(ConfigError) as caught:
        _ = TrainJob(_run(tmp_path, "owner/gone")).config
    (problem,) = caught.value.problems
    assert problem.startswith("owner/gone cannot be fetched from the hub (")
    assert ("HF_HUB_OFFLINE is set: unset it" in problem) == is_offline
    assert "copy its directory here from elsewhere" in problem
