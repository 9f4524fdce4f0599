"""A run under Ray with stock SGLang: the actor starts it as the controller does elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from end_to_end_tools import train, write_config
from ray_leftovers import left_over, short_directory
from sglang_tools import CPU_ARGUMENTS, CPU_ENV, TWO_RANKS, needs_sglang, sglang_python

pytest.importorskip("ray")
pytestmark = [pytest.mark.dist, pytest.mark.long, pytest.mark.sglang, needs_sglang]


@pytest.mark.parametrize(
    ("transport", "arguments"),
    [("tensor", {}), ("process_group", {}), ("process_group", {"nnodes": 2, "tp_size": 2})],
    ids=["tensor", "process_group", "two_parts"],
)
def test_weights_reach_it_and_it_ends_with_the_run(
    transport: str, arguments: dict[str, int], tmp_path: Path
) -> None:
    settings = {
        "trainer.runtime": "ray",
        "trainer.n_gpus_per_node": 1,
        "tp": 1,
        "pp": 1,
        "rollout.engine": "sglang",
        "rollout.weight_transport": transport,
        "rollout.sglang.python": str(sglang_python()),
        "rollout.sglang.args": {**CPU_ARGUMENTS, "context_length": 64, **arguments},
        "rollout.sglang.env": CPU_ENV | TWO_RANKS,
    }
    with short_directory() as temporary:
        run = train(write_config(tmp_path), settings, env={"TMPDIR": str(temporary)})
        assert run.exit_code == 0, run.console
        assert left_over(run.marker, temporary, 30) == []
    steps = run.rows("step")
    assert [row["step"] for row in steps] == [1, 2]
    # The trainer's log-probs of what SGLang sampled with those weights.
    assert all(row["training/rollout_log_probs_diff_max"] < 1e-4 for row in steps), steps
    assert (run.run_dir / "engines" / "engine0.yaml").stat().st_mode & 0o777 == 0o600
