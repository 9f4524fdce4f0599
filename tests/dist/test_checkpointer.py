"""Checkpoints of a run with real roles: committed late, restored whole, found broken, refused."""

from __future__ import annotations

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointer_jobs import failures, refusals, round_trip
from dist_pool import DistPool
from places import MODEL

from rlhf_megatron.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    ModelConfig,
    RunConfig,
    TrainerConfig,
    WarmupConfig,
)
from rlhf_megatron.controller.recovery.checkpoint_store import CheckpointStore
from rlhf_megatron.weights.checkpoint_manifest import (
    MANIFEST,
    make_file_record,
    parse_checkpoint_manifest,
)

pytestmark = pytest.mark.dist
CONFIG = RunConfig(
    model=ModelConfig(path=str(MODEL), init_seed=3),
    actor=ActorConfig(use_kl_loss=True),
    critic=CriticConfig(),
    algorithm=AlgorithmConfig(adv_estimator="gae"),
    warmup=WarmupConfig(max_steps=5),
    trainer=TrainerConfig(
        runtime="inline", n_gpus_per_node=1, device="cpu", save_freq=1, max_ckpt_to_keep=2
    ),
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpointer") / "run"


@pytest.fixture(scope="module")
def trip(dist_pool: DistPool, run_dir: Path) -> dict[str, Any]:
    (found,) = dist_pool.run(round_trip, config=CONFIG, run_dir=run_dir, timeout_s=300)
    return found


@pytest.fixture
def store(trip: dict[str, Any], run_dir: Path) -> CheckpointStore:
    return CheckpointStore(run_dir / "checkpoints")


def test_a_checkpoint_is_committed_when_its_files_are_complete(
    trip: dict[str, Any], store: CheckpointStore
) -> None:
    metrics, commits, steps = trip["early"]
    assert (commits, steps) == ([1], [1]), "step 2 had its name while it was being written"
    assert metrics["checkpoint/step"] == 1.0
    assert trip["has_moved"], "the test trained nothing meanwhile"
    assert trip["commits"] == [1, 2] and trip["steps"] == [2, 1]
    assert [line.partition(":")[0] for line in trip["lines"]] == [
        "committed step 1",
        "committed step 2",
    ]
    found = store.find_newest()
    assert found is not None
    assert trip["metrics"].pop("checkpoint/seconds") >= 1.0  # of the slow writer
    assert trip["metrics"] == {
        "checkpoint/step": 2.0,
        "checkpoint/num_bytes": float(sum(record.num_bytes for record in found.manifest.files)),
        "checkpoint/num_failed": 0.0,
    }
    assert trip["later"] == {}
    assert found.manifest.layouts == {"actor": "tp1 pp1 dp1"} and found.manifest.policy_version == 3
    assert set(found.manifest.versions) == {"python", "torch", "megatron-core", "rlhf-megatron"}


def test_everything_is_as_it_was_at_the_request(trip: dict[str, Any]) -> None:
    state = trip["state"]
    assert (state.step, state.policy_version, state.num_warmup_steps, state.kl) == (
        2,
        3,
        1,
        {"coef": 0.1 + 0.2},
    )
    assert state.cursor.num_drawn == 16
    assert trip["restored"] == {"actor": True, "critic": True, "reference": True}
    assert trip["same_moments"] and trip["draws"] and trip["goes_on"] and trip["phase"] == "rl"
    assert trip["notes_of_resume"] == []


def test_the_reference_is_linked_and_not_written_again(
    store: CheckpointStore, trip: dict[str, Any]
) -> None:
    first, second = (
        store.get_checkpoint_path(step) / "reference" / "model.safetensors" for step in (1, 2)
    )
    assert os.path.samefile(first, second)


def test_each_file_of_a_checkpoint_is_guarded(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A byte flipped in each in turn: the one before is taken,
    with a warning that names the file.
    """
    found = store.find_newest()
    assert found is not None and found.manifest.step == 2
    names = [*(record.path for record in found.manifest.files), MANIFEST]
    assert {name.split("/")[0] for name in names} == {
        *("actor", "critic", "reference", "rng", "run_state.batch", "config.yaml", MANIFEST)
    }
    for name in names:
        path = found.path / name
        data = path.read_bytes()
        path.unlink()  # a link to the file of the other checkpoint would be changed there too
        path.write_bytes(
            data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
        )
        caplog.clear()
        older = store.find_newest()
        assert older is not None and older.manifest.step == 1, name
        assert (
            name in caplog.records[0].getMessage()
            and "step_000002 is not good" in caplog.records[0].getMessage()
        )
        path.write_bytes(data)
    again = store.find_newest()
    assert again is not None and again.manifest.step == 2


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


class Replace:
    """Replaces one file, and the manifest by one that fits. Pickles into a worker."""

    def __init__(self, name: str, data: bytes) -> None:
        self.name = name
        self.data = data

    def __call__(self, directory: Path) -> None:
        (directory / self.name).write_bytes(self.data)
        fit_manifest(directory)


class Lack:
    """Removes a part, and its lines in the manifest."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, directory: Path) -> None:
        shutil.rmtree(directory / self.name)
        fit_manifest(directory)


def fit_manifest(directory: Path) -> None:
    manifest = parse_checkpoint_manifest((directory / MANIFEST).read_text())
    kept = [record.path for record in manifest.files if (directory / record.path).exists()]
    files = tuple(make_file_record(directory, directory / path) for path in kept)
    (directory / MANIFEST).write_text(replace(manifest, files=files).serialise())


@pytest.mark.parametrize(
    "name", ["actor/.metadata", "actor/common.pt", "critic/.metadata", "critic/common.pt"]
)
def test_a_stranger_s_pickle_is_not_run_though_its_digest_fits(
    dist_pool: DistPool, store: CheckpointStore, run_dir: Path, tmp_path: Path, name: str
) -> None:
    marker = tmp_path / "marker"
    if name.endswith(".pt"):
        torch.save({"scheduler": Evil(marker), "phase": "rl"}, tmp_path / "evil")
    else:
        (tmp_path / "evil").write_bytes(pickle.dumps(Evil(marker)))
    evil = (tmp_path / "evil").read_bytes()
    before = {path: (store.get_checkpoint_path(2) / path).read_bytes() for path in (name, MANIFEST)}
    try:
        ((message,),) = dist_pool.run(
            refusals, config=CONFIG, run_dir=run_dir, spoil=Replace(name, evil), timeout_s=300
        )
    finally:
        for path, data in before.items():
            (store.get_checkpoint_path(2) / path).write_bytes(data)
    assert name in message and "may run code" in message, message
    assert not marker.exists()
    torch.load(tmp_path / "evil", weights_only=False) if name.endswith(".pt") else pickle.loads(
        evil
    )
    assert marker.exists(), "the pickle is harmless; this test shows nothing"


@pytest.mark.parametrize(
    "name, message",
    [
        ("reference", "has no reference policy"),
        ("critic", "has no critic"),
        ("rng", "rank0.safetensors"),
    ],
)
def test_a_checkpoint_that_lacks_what_the_run_needs_is_refused(
    dist_pool: DistPool,
    store: CheckpointStore,
    run_dir: Path,
    tmp_path: Path,
    name: str,
    message: str,
) -> None:
    """As when the run that wrote it had other settings."""
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    ((said,),) = dist_pool.run(
        refusals, config=CONFIG, run_dir=copy, spoil=Lack(name), timeout_s=300
    )
    assert message in said


NO_CRITIC = replace(CONFIG, algorithm=AlgorithmConfig())


def test_a_save_that_fails_costs_nothing_but_itself(dist_pool: DistPool, tmp_path: Path) -> None:
    (found,) = dist_pool.run(failures, config=NO_CRITIC, run_dir=tmp_path / "run", timeout_s=300)
    causes = {
        "data": "No space left on device",
        "commit": "No space left on device",
        "bug": "RuntimeError: injected at ckpt.before_data",
        "space": "0.00 MB are free",
        "no directory": "exists",
        "vanished": "No such file or directory",
    }
    for number, (name, cause) in enumerate(causes.items(), 1):
        metrics, line, names = found[name]
        assert metrics == {"checkpoint/num_failed": float(number)}, name
        assert f"the checkpoint of step {number + 1} was not written" in line and cause in line, (
            line
        )
        assert "the newest one is of step 1" in line and line.startswith("WARNING")
        assert names == ([] if name == "no directory" else ["latest", "step_000001"]), name
    metrics, steps, commits = found["good"]
    assert metrics["checkpoint/num_failed"] == 6.0 and steps == [8, 1] and commits == [1, 8]
    assert "No space left" in found["stop"] and "trainer.save_failure is stop" in found["stop"]
