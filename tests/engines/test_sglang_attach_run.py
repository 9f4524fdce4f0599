"""Runs that attach to stock SGLang, from the command line: used, given back, taken after a run
that was killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml
from places import ROOT
from rollout_tools import tiny_qwen3
from sglang_tools import STARTUP_S, needs_sglang, sglang_python

from rlhf_megatron.rollout.engine_interface import EngineError
from rlhf_megatron.rollout.http_client import HttpClient
from rlhf_megatron.rollout.sglang.attached_engines import (
    AttachedEngines,
    ServerRequirements,
    inspect_all_servers,
    make_endpoint_addresses,
)
from rlhf_megatron.stop import STOPPED_EXIT_CODE

pytestmark = [pytest.mark.sglang, pytest.mark.long, needs_sglang]

MODEL = ROOT / "examples" / "quickstart" / "warm_model"
SMALL = (
    "trainer.runtime=inline",
    "trainer.n_gpus_per_node=1",
    "actor.megatron.tensor_model_parallel_size=1",
    "actor.megatron.pipeline_model_parallel_size=1",
    "data.train_batch_size=4",
    "rollout.n=4",
    "actor.mini_batch_size=16",
    "trainer.val_before_train=false",
    "trainer.test_samples=50",
)
KILLED_DURING_SYNC_S = 240.0


@dataclass(frozen=True)
class Served:
    """What `rlhf-megatron engine` says, and its server."""

    folder: Path
    endpoints: Path
    url: str
    key: str

    @property
    def log(self) -> str:
        return (self.folder / "engines" / "engine0.log").read_text()

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 60.0) -> Any:
        headers = {"Authorization": f"Bearer {self.key}"}
        answer = urllib3.request(
            "POST", self.url + path, json=body, headers=headers, timeout=timeout_s, retries=False
        )
        return answer.status, answer.data

    def command(self, folder: Path, name: str, *overrides: str) -> list[str]:
        path = folder / f"{name}.yaml"
        path.write_text(f"extends: [{ROOT}/configs/quickstart_sglang.yaml, {self.endpoints}]\n")
        to = (f"trainer.default_local_dir={folder}", f"trainer.experiment_name={name}")
        return [sys.executable, "-m", "rlhf_megatron", "train", str(path), *SMALL, *to, *overrides]

    def is_free(self) -> bool:
        """It decodes, and no weight update is open."""
        status, data = self.post(
            "/generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}
        )
        is_open = self.post("/end_weight_update", {})[0] == 200
        return status == 200 and len(json.loads(data)["output_ids"]) == 2 and not is_open


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Of a copy of the model that is gone once the server is up: what it serves must be
    asked of itself.
    """
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(MODEL, folder / "model")
    command = [
        sys.executable,
        "-m",
        "rlhf_megatron",
        "engine",
        "configs/quickstart_sglang.yaml",
        "--out",
        str(folder),
    ]
    command += [f"model.path={folder}/model", f"rollout.sglang.python={sglang_python()}"]
    command += ["rollout.sglang.args.sleep_on_idle=true", f"rollout.startup_timeout_s={STARTUP_S}"]
    with (folder / "out").open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + STARTUP_S + 60
        while not (folder / "endpoints.yaml").exists():
            assert process.poll() is None and time.monotonic() < deadline, (
                folder / "out"
            ).read_text()[-3000:]
            time.sleep(0.5)
        shutil.rmtree(folder / "model")
        settings = yaml.safe_load((folder / "endpoints.yaml").read_text())["rollout"]
        key = Path(settings["sglang"]["api_key_file"]).read_text()
        yield Served(folder, folder / "endpoints.yaml", settings["endpoints"][0], key)
        assert (
            key
            not in (folder / "out").read_text() + (folder / "engines" / "engine0.log").read_text()
        )
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    with pytest.raises(urllib3.exceptions.HTTPError):
        urllib3.request("GET", settings["endpoints"][0] + "/health", timeout=5, retries=False)


def finish(command: list[str], log: Path) -> tuple[int, str]:
    with log.open("w") as out:
        code = subprocess.run(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, timeout=900
        ).returncode
    return code, log.read_text()


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [
        row for row in map(json.loads, (run_dir / "metrics.jsonl").open()) if row["kind"] == "step"
    ]


def test_a_run_attaches_and_gives_back(served: Served, tmp_path: Path) -> None:
    code, said = finish(
        served.command(tmp_path, "first", "trainer.total_training_steps=3"), tmp_path / "log"
    )
    assert code == 0, said[-3000:]
    assert [row["policy/version"] for row in steps_of(tmp_path / "first")] == [2, 3, 4]
    assert all(
        0 < row["training/rollout_log_probs_diff_max"] <= 1e-4
        for row in steps_of(tmp_path / "first")
    )
    assert not (tmp_path / "first" / "engines").exists()
    assert served.key not in (tmp_path / "first" / "config.yaml").read_text() + said
    assert served.is_free()


def test_a_run_that_is_told_to_stop_gives_back(served: Served, tmp_path: Path) -> None:
    process = begin(served, tmp_path, "stopped")
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == STOPPED_EXIT_CODE
    assert served.is_free()


def test_a_run_takes_a_server_after_one_that_was_killed(served: Served, tmp_path: Path) -> None:
    """Killed with a weight update open and decoding paused."""
    process = begin(served, tmp_path, "killed")
    deadline = time.monotonic() + KILLED_DURING_SYNC_S
    while "begin_weight_update" not in "\n".join(served.log.splitlines()[-3:]):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert served.post("/begin_weight_update", {})[0] == 400, "the update of the killed run is open"
    code, said = finish(
        served.command(tmp_path, "heir", "trainer.total_training_steps=2"), tmp_path / "log"
    )
    assert code == 0, said[-3000:]
    assert "a weight update is open in it; waiting 90 s for its end" in said
    assert [row["policy/version"] for row in steps_of(tmp_path / "heir")] == [2, 3]
    assert served.is_free()


def test_a_run_without_a_common_transfer_directory(served: Served, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    overrides = ["trainer.total_training_steps=2", f"rollout.transfer_dir={tmp_path / 'own'}"]
    code, said = finish(served.command(tmp_path, "apart", *overrides), tmp_path / "log")
    assert code == 0, said[-3000:]
    assert "its weight loader does not answer, since it cannot reach the transfer directory" in said
    assert all(
        row["training/rollout_log_probs_diff_max"] <= 1e-4 for row in steps_of(tmp_path / "apart")
    )


def test_a_server_with_another_model_or_weight_type(served: Served, tmp_path: Path) -> None:
    """Its model directory cannot be read any more: the loader inside of it tells, and its
    refusal of a token.
    """
    tiny_qwen3(1).save_pretrained(tmp_path / "other")
    transfer = Path("/dev/shm") / f"rlhf-megatron-test-{os.getpid()}"
    transfer.mkdir(mode=0o700)
    addresses = make_endpoint_addresses([served.url], served.key, "")
    try:
        with pytest.raises(
            EngineError,
            match=r"serves another model than model.path \(.*other\): .*hidden_size \d+ inst",
        ):
            AttachedEngines(
                addresses, ServerRequirements(tmp_path / "other", MODEL, "float32"), transfer
            )
        (tmp_path / "other" / "config.json").write_text(json.dumps({"vocab_size": 77}))
        with pytest.raises(
            EngineError, match=r"serves another model .*: vocab_size \d+ instead of 77"
        ):
            AttachedEngines(
                addresses, ServerRequirements(tmp_path / "other", MODEL, "float32"), tmp_path
            )
        with pytest.raises(
            EngineError,
            match=r"its weights are float32, but .* is bfloat16; start it with --dtype bfl",
        ):
            inspect_all_servers(addresses, ServerRequirements(MODEL, MODEL, "bfloat16"))
    finally:
        shutil.rmtree(transfer)
    assert served.is_free()


def test_wrong_keys(served: Served, tmp_path: Path) -> None:
    expected = ServerRequirements(MODEL, MODEL, "float32")
    with pytest.raises(
        EngineError,
        match=r"refuses the key; put its --api-key into the file rollout.sglang.api_key_file",
    ):
        inspect_all_servers(make_endpoint_addresses([served.url], "wrong", "other"), expected)
    with pytest.raises(
        EngineError, match=r"refuses the admin key; .*rollout.sglang.admin_api_key_file"
    ):
        AttachedEngines(
            make_endpoint_addresses([served.url], served.key, "wrong"), expected, tmp_path
        )
    assert served.is_free()


def test_the_printed_command_starts_a_server_to_attach_to(tmp_path: Path) -> None:
    """With another key for the admin verbs, as its owner may want it."""
    port = 27911
    words = [
        "engine",
        "configs/quickstart_sglang.yaml",
        f"rollout.sglang.python={sglang_python()}",
        "--print",
        str(port),
    ]
    printed = subprocess.run(
        [sys.executable, "-m", "rlhf_megatron", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    of_both = '"$(cat engine.key)" "$(cat engine.key)"'
    assert printed.count(of_both) == 1
    printed = printed.replace(of_both, '"$(cat engine.key)" other-key')
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            ["bash", "-c", printed],
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + STARTUP_S
        while not is_healthy(url):
            assert process.poll() is None and time.monotonic() < deadline, (
                tmp_path / "log"
            ).read_text()[-3000:]
            time.sleep(0.5)
        assert (tmp_path / "engine.key").stat().st_mode & 0o777 == 0o600
        key = (tmp_path / "engine.key").read_text().strip()
        (found,) = inspect_all_servers(
            make_endpoint_addresses([url], key, "other-key"),
            ServerRequirements(MODEL, MODEL, "float32"),
        )
        assert found.lists_loader and found.tp_size == 1
        transfer = Path("/dev/shm") / f"rlhf-megatron-test-{os.getpid()}"
        transfer.mkdir(mode=0o700)
        try:
            with AttachedEngines(
                make_endpoint_addresses([url], key, "other-key"),
                ServerRequirements(MODEL, MODEL, "float32"),
                transfer,
            ) as attached:
                assert attached.addresses[0].has_loader
        finally:
            shutil.rmtree(transfer)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_healthy(url: str) -> bool:
    try:
        HttpClient(make_endpoint_addresses([url], "", "")[0]).get("/health", 5.0)
    except EngineError:
        return False
    return True


def begin(served: Served, folder: Path, name: str) -> subprocess.Popen[bytes]:
    """A long run, past its second step."""
    command = served.command(folder, name, "trainer.total_training_steps=5000")
    with (folder / f"{name}.log").open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 600
    while not (folder / name / "metrics.jsonl").exists() or len(steps_of(folder / name)) < 2:
        assert process.poll() is None and time.monotonic() < deadline, (
            folder / f"{name}.log"
        ).read_text()[-3000:]
        time.sleep(0.2)
    return process
