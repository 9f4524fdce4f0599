"""PPO on the backend fsdp (warm-up, reference, critic, verified syncs): killed and run on bit for bit, and exported."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from end_to_end_tools import write_config
from forked_runs import ForkServer

from rlhf_megatron.recovery.export import find_weights

pytestmark = [pytest.mark.dist, pytest.mark.long]  # tests/dist/test_fsdp_actor.py resumes bit for bit, too
SETTINGS: dict[str, Any] = {
    "actor.backend": "fsdp",
    "actor.use_kl_loss": True,
    "algorithm.adv_estimator": "gae",
    "trainer.total_training_steps": 3,
    "trainer.test_freq": 0,
}


def test_a_run_that_was_killed_goes_on_and_is_exported(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "killed").mkdir()
    with ForkServer(tmp_path) as server:
        alone = server.train(write_config(tmp_path / "alone"), SETTINGS)
        assert alone.code == 0, alone.console
        faults = "kill@actor.after_optimizer_step:step=3"
        first, last = server.until_it_ends(write_config(tmp_path / "killed"), SETTINGS, faults=faults)
    assert (first.code, last.code) == (-signal.SIGKILL, 0), last.console
    assert last.rows() == alone.rows()
    assert last.weights() == alone.weights()
    steps = [row for row in alone.rows() if row["kind"] == "step"]
    assert len({row["actor/grad_norm"] for row in steps}) == len({row["critic/grad_norm"] for row in steps}) == 3

    find_weights(alone.run_dir).write(tmp_path / "exported", "float32")
    assert (tmp_path / "exported" / "model.safetensors").stat().st_size > 0
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "exported" / "model.safetensors")
    written = load_file(alone.run_dir / "hf" / "model.safetensors")
    assert exported.keys() == written.keys()
    assert all(bool((exported[name] == tensor.float()).all()) for name, tensor in written.items())
    assert len(find_weights(alone.run_dir, role="critic").model.table) == len(exported) + 2
