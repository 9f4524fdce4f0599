"""What the benchmarks compute from their measurements, and that both sides of a comparison do
the same work.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import (
    bench_controller,
    bench_engines,
    bench_grpo_step,
    common,
    quickstart_seeds,
    run_all,
)


def test_runs_take_turns_and_warm_ups_do_not_count() -> None:
    calls: list[str] = []
    timings = common.take_turns(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3, num_warmups=2
    )
    assert calls == ["a", "b"] * 5
    assert len(timings["a"].wall_s) == len(timings["b"].cpu_s) == 3


def test_ratios_are_of_minima_and_medians() -> None:
    ours = common.Timings([1.0, 4.0, 3.0], [1.0, 1.0, 2.0])
    baseline = common.Timings([2.0, 2.0, 6.0], [4.0, 5.0, 6.0])
    found = common.ratios(ours, baseline)
    assert found == {"wall_min": 0.5, "wall_median": 1.5, "cpu_min": 0.25, "cpu_median": 0.2}


def test_a_result_says_where_it_was_made(tmp_path: Path) -> None:
    path = common.write_result("x", "python -m x", {"ratio": 0.5}, tmp_path)
    written = json.loads(path.read_text())
    assert list(tmp_path.iterdir()) == [path] and written["ratio"] == 0.5
    assert (
        torch.__version__.startswith(written["versions"]["torch"])
        and written["machine"]["cores"] >= 1
    )


def test_a_step_lasts_until_the_next_one() -> None:
    names = ("generate", "annotate", "update", "sync")
    row = {
        "seconds": 12.0,
        "response_length/mean": 3.5,
        **{f"timing_s/{name}": 0.5 * (i + 1) for i, name in enumerate(names)},
    }
    step = bench_grpo_step.our_step({"seconds": 5.0}, row)
    assert step == {
        "step": 7.0,
        "generate": 0.5,
        "log_probs": 1.0,
        "update": 1.5,
        "sync": 2.0,
        "other": 2.0,
        "response_tokens": 3.5,
    }


def test_the_step_ratio_is_the_better_of_ours_over_the_better_of_theirs() -> None:
    def steps(*seconds: float) -> list[dict[str, float]]:
        return [
            {"step": value, "update": value / 2, "response_tokens": value + 1} for value in seconds
        ]

    result = bench_grpo_step.summarize(
        {
            "ours_1": steps(3, 4, 5),
            "ours_dp2": steps(1, 2, 9),
            "trl_1": steps(6, 8, 9),
            "trl_2": steps(4, 5, 50),
        }
    )
    assert result["baseline"] == "trl_2" and result["ratio"] == 0.4
    assert result["ratio_by_run"]["ours_1"] == {"median": 0.8, "min": 0.75}
    assert result["seconds"]["trl_1"]["update"] == {"min": 3.0, "median": 4.0}
    assert result["response_tokens"] == {
        "ours_1": 5.0,
        "ours_dp2": 5.0,
        "trl_1": 8.6667,
        "trl_2": 20.667,
    }


def test_cpu_time_of_a_step_leaves_out_what_starting_costs() -> None:
    found = bench_grpo_step.cpu_summary(
        {"ours_1": [10, 14, 18], "trl_1": [20, 28, 32], "trl_2": [5, 17, 17]}, 4
    )
    assert found["cpu_s_per_step"] == {"ours_1": 1.5, "trl_1": 2.5, "trl_2": 3.0}
    assert found["cpu_ratio"] == {"ours_1": 0.6}
    alone = bench_grpo_step.cpu_summary(
        {"ours_dp2": [1, 9], "trl_1": [1, 2], "trl_dp2": [1, 17]}, 8
    )
    assert alone["cpu_ratio"] == {"ours_dp2": 0.5}, "TRL's one process is no like of two"


def test_engines_are_compared_by_the_median_of_tokens_per_second() -> None:
    def repetitions(*seconds: float) -> list[bench_engines.Repetition]:
        return [bench_engines.Repetition(value, 120, 400, 100) for value in seconds]

    rows = {
        "local": bench_engines.row_of(repetitions(2, 4, 3)),
        "sglang": bench_engines.row_of(repetitions(1, 100, 2)),
    }
    assert rows["local"]["tokens_per_s"] == 40 and rows["local"]["cached_share"] == 0.25
    assert bench_engines.ratios(rows) == {"sglang": 1.5}
    assert bench_engines.ratios({"sglang": rows["sglang"]}) == {}


def summary(seed: int, before: float, after: float) -> dict[str, object]:
    return {"seed": seed, "accuracy_before": before, "accuracy_after": after, "seconds": 60.0}


def test_seeds_above_the_bars() -> None:
    result = quickstart_seeds.evaluate(
        [summary(1, 0.3, 0.9), summary(2, 0.5, 0.9), summary(3, 0.4, 0.9)],
        quickstart_seeds.Bars(0.25, 0.85),
    )
    # Gains 0.6, 0.4, 0.5: mean 0.5, deviation 0.1, half width 4.303 x 0.1 / sqrt(3).
    assert result["problems"] == [] and result["mean_gain"] == 0.5
    assert result["mean_gain_interval_95"] == pytest.approx(
        [0.5 - 0.24843, 0.5 + 0.24843], abs=1e-4
    )


def test_seeds_below_the_bars_are_named() -> None:
    """Gains 0.16 and 0.24: half width 12.706 x 0.0566 / sqrt(2)."""
    names = {
        "quickstart": "quickstart_seeds",
        "quickstart_ppo": "quickstart_seeds_ppo",
        "smollm2_ppo": "seeds_smollm2_ppo",
    }
    assert {config: quickstart_seeds.result_name(config) for config in names} == names
    result = quickstart_seeds.evaluate(
        [summary(1, 0.7, 0.86), summary(2, 0.6, 0.84)], quickstart_seeds.Bars(0.25, 0.85)
    )
    assert result["problems"] == [
        "mean gain 0.200 is below 0.25",
        "the interval of the mean gain [-0.308, 0.708] has 0",
        "seed 2: final accuracy 0.840 is below 0.85",
    ]


def test_the_table_names_what_is_over_its_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "actor_update.json").write_text(
        json.dumps({"ratio": {"quickstart": 0.9, "lognormal": 1.2}})
    )
    assert not run_all.print_table(["actor_update"], tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [("OVER THE BAR" in line) for line in lines if line.startswith("actor_update")] == [
        False,
        True,
    ]
    assert not run_all.print_table(["kernels"], tmp_path)
    assert "no result" in capsys.readouterr().out


def test_the_plain_loop_does_the_actors_work() -> None:
    from benchmarks import bench_actor_update as bench
    from rlhf_megatron.ranks.parallel.world import create_world, destroy_world
    from rlhf_megatron.weights.parallel_layout import ParallelLayout

    config = {
        **bench.shapes()["quickstart"].hf_config,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "vocab_size": 50,
    }
    shape = bench.Shape({**config, "head_dim": 8}, [3, 1, 5, 2, 2], [4, 9, 1, 6, 2], 16, (2,))
    batch = bench.make_batch(shape)
    world = create_world(ParallelLayout(1), torch.device("cpu"))
    try:
        ours = bench.Ours(shape, batch, world)
        plain = bench.PlainLoop(shape, batch, 2)
        for _ in range(3):  # the second and third follow the first one's optimizer step
            differences = bench.check_agreement(ours(), plain())
    finally:
        destroy_world()
    assert max(differences.values()) < 1e-4
    with pytest.raises(RuntimeError, match="not the same work"):
        bench.check_agreement((1.0, 2.0), (1.0, 2.001))


def test_a_step_of_the_controller_is_told_by_part(tmp_path: Path) -> None:
    meter = bench_controller.measure(bench_controller.Shape(4, 2, 3, 20, 2), tmp_path)
    calls = {"call actor.log_probs", "call reference.log_probs", "call actor.update"}
    parts = {"samples to a batch", "mismatch record", "journal of groups"}
    assert meter.seconds.keys() >= parts | calls and meter.beside.keys() == {
        "journal of batches",
        "fleet",
    }
    assert (
        all(seconds > 0 for seconds in meter.seconds.values())
        and meter.bytes.keys() == meter.seconds.keys()
    )
    left = {path.name for path in (tmp_path / "journal").iterdir()}
    assert left == {f"step_000001.{kind}" for kind in ("scored", "train")}
    assert 0 < meter.waited_s < sum(meter.seconds.values())


def test_a_large_step_is_told_by_two_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (bench_controller.Shape(count, 2, 3, 20, 2) for count in (4, 8))
    monkeypatch.setattr(bench_controller, "LARGE", (small, large))
    found = bench_controller.of_large()
    first, last = found["sizes"]
    assert (first["num_samples"], last["num_samples"]) == (8, 16)
    per_token = last["controller_us_a_token"] / 1e6
    assert found["whole_step"]["controller_cpu_s"] == pytest.approx(
        per_token * 16384 * 8256, rel=1e-3
    )
