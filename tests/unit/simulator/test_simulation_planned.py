"""`rlhf-megatron simulate --gpu`: durations by hand from the plan of a dense model, and what
follows from them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from places import ROOT

from rlhf_megatron.cli.main import main
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.planning.simulator.durations import RunDurations, read_durations
from rlhf_megatron.planning.simulator.planned_durations import plan_durations
from rlhf_megatron.planning.simulator.simulation_plan import SimulationSetup

RUN = ROOT / "configs" / "recipes" / "qwen3_8b_dapo.yaml"
LAYER = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12288  # weights in matrices
HEAD = 151936 * 4096
NORMS = 36 * (2 * 4096 + 2 * 128) + 4096


def durations(*overrides: str, median: int | None = 2048) -> RunDurations:
    return plan_durations(
        load_run_config(RUN, list(overrides), with_files=False).config, "h100-80g", median
    )


def test_durations_by_hand() -> None:
    """Qwen3-8B, tp2 on eight GPUs that engines of tp1 share: by the formulas of the module,
    from its numbers.
    """
    config = load_run_config(RUN, [], with_files=False).config
    prompt = config.data.max_prompt_length // 2
    tokens = prompt + 2048
    found = durations()
    flops = 2 * (36 * LAYER + HEAD) + 36 * 2 * 32 * 2 * 128 * tokens / 2
    speed = 0.4 * 989.4e12
    tp = int(config.rollout.sglang.args["tp_size"])
    assert found.engine.prefill_tokens_per_s == pytest.approx(tp * speed / flops)
    weights = 2 * (36 * LAYER + 2 * HEAD) / tp + 2 * NORMS
    cache = 36 * 2 * (8 // tp) * 128 * 2  # of a token
    one, *_ = found.engine.decode.points
    context = prompt + 1024
    assert one == (1, pytest.approx((weights + context * cache) / (0.7 * 3.2e12), rel=1e-6))
    most, seconds = found.engine.decode.points[-1]
    assert seconds == pytest.approx((weights + most * context * cache) / (0.7 * 3.2e12), rel=1e-6)
    assert found.trainer.annotate_tokens_per_s == pytest.approx(8 * speed / flops)
    again = config.actor.megatron.recompute_granularity == "full"
    assert found.trainer.update_tokens_per_s == pytest.approx(8 * speed / flops / (3 + again))
    assert 0.001 < found.sync.seconds < 0.1 and found.sync.turns_s is not None


def test_what_follows_from_a_setting() -> None:
    """FP8 halves what a decoding GPU reads of weights; a pipeline has a bubble; experts are read
    as they are met.
    """
    plain, fp8 = (
        durations(*given).engine.decode.points[0][1]
        for given in ((), ("rollout.quantization=fp8",))
    )
    assert 0.5 < fp8 / plain < 0.62  # the embedding and the head stay
    half = "actor.megatron.pipeline_model_parallel_size=2"
    assert durations(half).trainer.update_tokens_per_s < durations().trainer.update_tokens_per_s
    of_experts = load_run_config(
        ROOT / "configs/recipes/qwen3_30b_a3b_gspo.yaml", [], with_files=False
    ).config
    points = dict(plan_durations(of_experts, "h100-80g", 1000).engine.decode.points)
    assert points[64] / points[1] > 5 and points[64] < 64 * points[1] / 5


def test_a_pass_that_the_update_makes_itself_takes_no_time() -> None:
    """A reference's pass stays where the actor's log-probs are told by the one optimizer
    step of a step.
    """
    one = ["data.train_batch_size=8", "actor.mini_batch_size=128"]
    beside = ["actor.use_kl_loss=true", "reference.param_offload=true"]
    for given, actor, reference in (([], 1, 0), (one, 0, 0), ([*one, *beside], 0, 1)):
        config = load_run_config(
            RUN, ["algorithm.rollout_correction.preset=disabled", *given], with_files=False
        ).config
        setting = SimulationSetup(config, durations())
        plan = setting.make_plan(setting.split, 1)
        trainer = setting.durations.trainer
        seconds = actor / trainer.annotate_tokens_per_s + reference / trainer.reference_tokens_per_s
        assert plan.compute_annotate_seconds(1000) == pytest.approx(1000 * seconds), given


def test_written_durations_give_the_same_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "planned.yaml"
    short = ["--only", "--steps", "3", "--warmup", "1"]
    words = ["simulate", str(RUN), "data.train_batch_size=8", "actor.mini_batch_size=64"]
    assert main([*words, "--gpu", "h100-80g", "--median", "500", "--write", str(path)]) == 0
    written = read_durations(path)
    assert written.lengths.median == 500 and "planned for h100-80g" in written.source
    steps = []
    for source in (["--gpu", "h100-80g", "--median", "500"], ["--durations", str(path)]):
        assert main([*words, *source, *short, "--json", str(tmp_path / "out.json")]) == 0
        steps.append(json.loads((tmp_path / "out.json").read_text())["run"])
    assert steps[0] == steps[1] and "planned for h100-80g, not measured" in capsys.readouterr().out


def test_what_cannot_be_planned(tmp_path: Path) -> None:
    config = load_run_config(RUN, [], with_files=False).config
    with pytest.raises(
        ConfigError, match=r"--gpu \(h100-80g\) plans engines of sglang; rollout.engine is local"
    ):
        plan_durations(
            replace(config, rollout=replace(config.rollout, engine="local")), "h100-80g", None
        )
    with pytest.raises(SystemExit):
        main(["simulate", str(RUN), "--gpu", "h100-80g", "--durations", str(tmp_path)])
