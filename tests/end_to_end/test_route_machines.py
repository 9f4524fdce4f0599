"""Router replay where the machines of engines and ranks see no files of each other: routes come
over the network.
"""

import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from end_to_end_tools import Finished, train, write_config
from launch_tools import MARKER, processes_with
from namespaces import Machines, has_namespaces
from places import MODEL
from test_launch_nodes import numbers

from rlhf_megatron.runtime.route_store import MODULE

pytestmark = [
    pytest.mark.dist,
    pytest.mark.long,
    pytest.mark.skipif(not has_namespaces(), reason="needs unprivileged network namespaces"),
]
LAYERS = 12
TOP_K = 32
BYTES_A_TOKEN = LAYERS * TOP_K
SHAPE = {
    "num_hidden_layers": LAYERS,
    "num_experts": 64,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 8,
}
SETTINGS = {
    "actor.megatron.tensor_model_parallel_size": 1,
    "actor.megatron.pipeline_model_parallel_size": 2,
    "actor.router_replay": "r3",
    "rollout.num_engines": 2,
    "rollout.weight_transport": "disk",
    "trainer.deterministic": True,
    "trainer.save_last": "none",
    "trainer.val_before_train": False,
    "warmup.max_steps": 0,
}


def settings(directory: Path, **more: Any) -> dict[str, Any]:
    model = directory / "model"
    shutil.copytree(MODEL.parent / "moe_model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | SHAPE))
    return SETTINGS | {"model.path": str(model)} | more


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    two = {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 2}
    runs = tmp_path / "runs"
    runs.mkdir()
    machines = Machines(
        write_config(tmp_path),
        settings(tmp_path, **two),
        2,
        NPROC_PER_NODE="2",
        OWN_FILES=str(runs),
    )
    yield machines
    machines.end()


def learned(run: Finished) -> list[dict[str, Any]]:
    left_out = ("actor/router_fetched_mb", "checkpoint/", "rollout/routes_")
    return [
        {key: value for key, value in row.items() if not key.startswith(left_out)}
        for row in numbers(run)
    ]


def test_ranks_fetch_their_tokens_and_layers_from_the_machines_of_the_engines(
    machines: Machines, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """384 bytes a token: four ranks, pp2 dp2, on two machines with an engine each; the second sees
    no file of the first, nor the first one of the second's engine.
    """
    assert machines.wait() == [0, 0], machines.consoles()
    run = Finished(
        machines.directory, machines.directory / "runs" / "tiny", 0, machines.console(0), ""
    )
    assert "routes stay on the machines of their engines" in run.console
    near = tmp_path_factory.mktemp("near")
    alone = train(
        write_config(near), settings(near, **{"trainer.nnodes": 1, "trainer.n_gpus_per_node": 4})
    )
    assert alone.exit_code == 0, alone.console
    assert learned(run) == learned(alone), "bit for bit"
    for row, same in zip(run.rows("step"), alone.rows("step"), strict=True):
        assert same["actor/router_fetched_mb"] == 0.0
        assert row["actor/router_unrouted_share"] == same["actor/router_unrouted_share"]
        fetched = row["actor/router_fetched_mb"] * row["actor/num_optimizer_steps"] * 1e6
        # the last token of a sample is not read
        num_read = 16 * (6 + row["response_length/mean"] - 1)
        stood = [
            sum(each[f"rollout/routes_{kind}_gb"] for kind in ("memory", "spilled"))
            for each in (row, same)
        ]
        assert stood[0] == pytest.approx(stood[1]) and stood[0] >= num_read * BYTES_A_TOKEN / 1e9, (
            "of both machines"
        )
        # Log-probs and updates read each token once, all stages together all of its layers; half of
        # the samples or so train where they were generated.
        passes = fetched / (num_read * BYTES_A_TOKEN)
        assert 0.1 < passes < 2.0, passes
    assert not list((machines.directory / "runs" / "tiny" / "routes").glob("*")), (
        "what was trained on is gone"
    )


def test_groups_of_a_store_that_is_lost_in_mid_run_are_generated_again_once(tmp_path: Path) -> None:
    """Two machines with an engine each and no rank. The second one's store dies in mid-run, with
    all that it has: the run ends, and goes on from its journal, where the groups of the first
    machine still are.
    """
    runs = tmp_path / "runs"
    weights = tmp_path / "weights"
    runs.mkdir()
    weights.mkdir()
    steps = {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 2, "trainer.total_training_steps": 4}
    apart = steps | {
        "trainer.save_freq": 1,
        "rollout.engine_machines": [1, 2],
        "rollout.transfer_dir": str(weights),
    }
    machines = Machines(
        write_config(tmp_path),
        settings(tmp_path, **apart),
        3,
        OWN_FILES=str(runs),
        MAX_RESTARTS="1",
    )
    try:
        machines.wait_for((runs / "tiny" / "checkpoints" / "step_000001").exists)
        store, keeper = store_of(machines, "10.77.0.3")
        files = os.open(f"/proc/{keeper}/root{runs}/tiny/routes", os.O_RDONLY)
        os.kill(store, signal.SIGKILL)

        def is_begun_again() -> bool:
            for name in os.listdir(files):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=files)
            return "the run is started again" in machines.console(0)

        machines.wait_for(is_begun_again)
        os.close(files)
        assert machines.wait() == [0, 0, 0], machines.consoles()
    finally:
        machines.end()
    run = Finished(tmp_path, runs / "tiny", 0, machines.console(0), "")
    told = re.search(
        r"(\d) of (\d) groups are generated again: their files of routes, at 10\.77\.0\.3",
        run.console,
    )
    assert told and 0 < int(told[1]) < int(told[2]), run.console
    assert [row["step"] for row in run.rows("step")] == [1, 2, 3, 4]
    near = tmp_path / "near"
    near.mkdir()
    alone = train(write_config(near), settings(near, **steps))
    assert alone.exit_code == 0, alone.console
    assert learned(run) == learned(alone), "bit for bit"


def test_a_run_that_reaches_the_limit_of_its_files_goes_on_from_its_journal_with_a_higher_one(
    tmp_path: Path,
) -> None:
    """It has a checkpoint of its warm-up, and no other."""
    steps = {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 4, "trainer.save_freq": 4}
    steps |= {"warmup.max_steps": 1, "warmup.test_freq": 1}
    config = write_config(tmp_path)
    given = settings(tmp_path, **steps)
    full = train(config, given | {"rollout.routes_gb": 6.2e-5})
    assert full.exit_code == 1 and [row["step"] for row in full.rows("step")] == [1], full.console
    assert "may (rollout.routes_gb); raise it, or save more often" in full.console
    assert full.console.count("beyond these the run ends: save more often (trainer.save_freq)") == 1
    files = {path.name for path in (full.run_dir / "routes").iterdir()}
    assert (
        sum((full.run_dir / "routes" / name).stat().st_size for name in files)
        <= 6.2e-5 * 1e9 + 2 * 4096
    )
    again = train(config, given | {"rollout.routes_gb": 1.0})
    assert again.exit_code == 0, again.console
    left = {path.name for path in (again.run_dir / "routes").iterdir()}
    assert len(files & left) >= 16 and len(left) == 32, "step 1 trained on what the journal had"
    near = tmp_path / "near"
    near.mkdir()
    alone = train(write_config(near), settings(near, **steps))
    assert learned(again) == learned(alone), "bit for bit"


def store_of(machines: Machines, address: str) -> tuple[int, int]:
    """Process ids of the store with that address and of its parent."""
    for pid in processes_with(f"{MARKER}={machines.marker}"):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if MODULE in words and address in words:
                return pid, int(words[words.index(address) + 1])
    raise AssertionError(f"no store at {address}")
