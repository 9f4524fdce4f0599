"""Folding a large run to a tiny one: which layouts, which model, which settings; nothing that matters is lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from table_samples import BIASED_LLAMA, LLAMA3_ROPE, SMALL_LLAMA, SMALL_QWEN2

from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.rules import world_size
from rlhf_megatron.config.schema import ActorConfig, DataConfig, MegatronConfig, RunConfig
from rlhf_megatron.config.validate import validate_model
from rlhf_megatron.models.families.base import family_for, table_for
from rlhf_megatron.models.table import check_tensor_parallel
from rlhf_megatron.parallel.layout import layout_of
from rlhf_megatron.scheduler.check import tiny_files
from rlhf_megatron.scheduler.check.fold_config import fold_config
from rlhf_megatron.scheduler.check.fold_layout import UNSHARDED, Folded, fold_layouts, replica_size
from rlhf_megatron.scheduler.check.fold_model import fold_model, fold_recompute, layers_per_chunk

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
LARGE = MegatronConfig(
    tensor_model_parallel_size=4,
    sequence_parallel=True,
    pipeline_model_parallel_size=4,
    virtual_pipeline_model_parallel_size=2,
    use_distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
)
WITH_CP = replace(LARGE, pipeline_model_parallel_size=2, context_parallel_size=4)
QWEN3_32B = json.loads((ROOT / "examples" / "qwen3_32b" / "config.json").read_text())


def names(layouts: tuple[Folded, ...]) -> list[str]:
    return [f"{layout.name}: {layout_of(layout.megatron, layout.num_ranks)}" for layout in layouts]


@pytest.mark.parametrize(
    ("megatron", "ranks", "processes", "expected"),
    [
        (LARGE, 64, 64, ["shape: tp4 sequence pp4 vpp2 dp2"]),
        (LARGE, 64, 32, ["shape: tp4 sequence pp4 vpp2 dp2"]),
        (LARGE, 64, 16, ["shape: tp4 sequence pp4 vpp2 dp1", "replicas: tp2 sequence pp4 vpp2 dp2"]),
        (LARGE, 64, 8, ["shape: tp2 sequence pp4 vpp2 dp1", "replicas: tp2 sequence pp2 vpp2 dp2"]),
        (LARGE, 64, 4, ["shape: tp2 sequence pp2 vpp2 dp1", "replicas: tp1 pp2 vpp2 dp2"]),
        (LARGE, 64, 2, ["shape: tp1 pp2 vpp2 dp1", "replicas: tp1 pp1 dp2"]),
        (LARGE, 64, 1, ["shape: tp1 pp1 dp1"]),
        (LARGE, 16, 16, ["shape: tp4 sequence pp4 vpp2 dp1"]),
        (WITH_CP, 64, 16, ["shape: tp4 sequence pp2 vpp2 cp2 dp1", "replicas: tp2 sequence pp2 vpp2 cp2 dp2"]),
        (WITH_CP, 64, 8, ["shape: tp2 sequence pp2 vpp2 cp2 dp1", "replicas: tp2 sequence pp2 vpp2 dp2"]),
        (MegatronConfig(tensor_model_parallel_size=6), 6, 4, ["shape: tp3 pp1 dp1"]),
        (MegatronConfig(tensor_model_parallel_size=3), 12, 16, ["shape: tp3 pp1 dp2"]),
        (MegatronConfig(), 8, 16, ["shape: tp1 pp1 dp2"]),
    ],
)
def test_layouts(megatron: MegatronConfig, ranks: int, processes: int, expected: list[str]) -> None:
    """cp is made smaller first, then tp, then pp; to 1 only when 2 is not small enough."""
    assert names(fold_layouts(megatron, ranks, processes)) == expected


def test_differences_say_everything_that_was_folded() -> None:
    shape, replicas = fold_layouts(LARGE, 64, 8)
    assert shape.differences == (
        "tp is 2 instead of 4",
        "dp is 1 instead of 4",
        "use_distributed_optimizer and overlap_grad_reduce and overlap_param_gather off, for want of two ranks with the"
        " same shard",
    )
    assert replicas.differences == ("tp is 2 instead of 4", "pp is 2 instead of 4", "dp is 2 instead of 4")
    assert replicas.megatron.overlap_param_gather and not shape.megatron.use_distributed_optimizer
    (same,) = fold_layouts(LARGE, 32, 32)
    assert same.differences == () and same.megatron == LARGE
    with pytest.raises(ValueError, match="--max-processes is 0; it must be at least 1"):
        fold_layouts(LARGE, 64, 0)


def test_every_folded_layout_fits_and_can_be() -> None:
    for tp, pp, cp, dp, processes in itertools.product(
        (1, 2, 3, 8), (1, 2, 6), (1, 2, 4), (1, 5), (1, 2, 3, 7, 16, 40)
    ):
        true = MegatronConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            virtual_pipeline_model_parallel_size=3 if pp > 1 else None,
            sequence_parallel=tp > 1,
        )
        for folded in fold_layouts(true, tp * pp * cp * dp, processes):
            layout_of(folded.megatron, folded.num_ranks)  # raises for what cannot be
            assert folded.num_ranks <= processes
            m = folded.megatron
            for size, small in ((tp, m.tensor_model_parallel_size), (pp, m.pipeline_model_parallel_size)):
                assert size % small == 0 or (small == 2 < size), "a divisor, or 2 of an odd number"
            is_smaller = replica_size(m) < replica_size(true)
            assert is_smaller == any(f"{axis} is" in d for d in folded.differences for axis in ("tp", "pp", "cp"))


MODELS: dict[str, Mapping[str, Any]] = {
    "qwen3": QWEN3_32B,
    "tied qwen2": {**SMALL_QWEN2, "tie_word_embeddings": True, "num_hidden_layers": 16},
    "odd vocabulary": {**QWEN3_32B, "vocab_size": 151_643},
    "llama 3": {**SMALL_LLAMA, "rope_parameters": LLAMA3_ROPE, "num_hidden_layers": 8},
    "biases": {**BIASED_LLAMA, "num_hidden_layers": 8},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("processes", [1, 4, 8, 16, 32])
def test_the_tiny_model_is_of_the_same_kind_and_fits(name: str, processes: int) -> None:
    model = MODELS[name]
    layouts = fold_layouts(LARGE, 64, processes)
    tiny = fold_model(model, LARGE, layouts)
    true, small = (family_for(m).transformer_arguments(m) for m in (model, tiny))
    sizes = {"num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"}
    assert {k: v for k, v in small.items() if k not in sizes} == {k: v for k, v in true.items() if k not in sizes}
    gpt, tiny_gpt = (family_for(m).gpt_arguments(m) for m in (model, tiny))
    assert tiny_gpt == gpt, "rotary embeddings, their scaling, and whether embeddings are tied"
    assert (small["num_attention_heads"] > small["num_query_groups"]) == (
        true["num_attention_heads"] > true["num_query_groups"]
    )
    for layout in layouts:
        tp = layout.megatron.tensor_model_parallel_size
        check_tensor_parallel(table_for(tiny, tp), tp)
        run = RunConfig(
            actor=ActorConfig(megatron=layout.megatron), data=DataConfig(max_prompt_length=8, max_response_length=8)
        )
        assert not validate_model(run, tiny)
        assert tp == 1 or (tiny["vocab_size"] % tp == 0) == (int(model["vocab_size"]) % 4 == 0)
    assert sum(hf.shape[0] * hf.shape[-1] for rule in table_for(tiny) for hf in rule.hf) < 3e6, "not tiny"


def test_sizes_of_the_tiny_model() -> None:
    """64 heads in 8 groups over tp 4: two groups a rank, of 2 queries each. 16 layers a stage: one a chunk of 8."""
    tiny = fold_model(QWEN3_32B, LARGE, fold_layouts(LARGE, 64, 16))
    assert (tiny["num_hidden_layers"], tiny["num_attention_heads"], tiny["num_key_value_heads"]) == (8, 16, 8)
    assert (tiny["head_dim"], tiny["hidden_size"]) == (8, 16 * 8 + 16), "5120 is not 64 x 128 either"
    assert tiny["vocab_size"] == 32 and tiny["rope_theta"] == 1_000_000


@pytest.mark.parametrize(
    ("method", "count", "expected"),
    [("uniform", 1, (1, 1)), ("uniform", 4, (2, 2)), ("block", 3, (2, 1)), ("block", 8, (2, 2))],
)
def test_recompute_fits_the_tiny_model(method: Any, count: int, expected: tuple[int, int]) -> None:
    """(layers a chunk, recompute_num_layers). 64 layers in 8 chunks: block of 8 is all of a chunk, of 3 only a part."""
    true = replace(LARGE, recompute_granularity="full", recompute_method=method, recompute_num_layers=count)
    (folded,) = fold_layouts(true, 32, 32)
    assert layers_per_chunk(true, 64, 8) == expected[0]
    assert fold_recompute(folded.megatron, true, 64).recompute_num_layers == expected[1]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_configuration_folds_to_one_that_breaks_no_rule(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_run_config(path, with_files=False).config
    if not (Path(config.model.path) / "config.json").is_file():
        pytest.skip(f"{config.model.path} is not there")
    hf_config = json.loads((Path(config.model.path) / "config.json").read_text())
    true = config.actor.megatron
    tiny_files.write_prompts(tmp_path, 1)
    for processes in (1, 4, 16, 64):
        layouts = fold_layouts(true, world_size(config), processes)
        tiny_files.write_model(tmp_path / "model", fold_model(hf_config, true, layouts))
        for folded in layouts:
            small = fold_config(config, folded.megatron, folded.num_ranks, folded.name, tmp_path)
            loaded = load_run_config(tiny_files.write_config(tmp_path, small)).config
            assert loaded == small, "the file says the same"
            alone = fold_config(config, UNSHARDED, 1, folded.name, tmp_path)
            assert replace(loaded, actor=alone.actor, trainer=alone.trainer) == alone, "only the layout differs"
            for name in ("policy_loss", "loss_agg_mode", "entropy_coeff", "use_kl_loss", "kl_loss_type", "shuffle"):
                assert getattr(loaded.actor, name) == getattr(config.actor, name)
            assert loaded.algorithm == config.algorithm and loaded.rollout.temperature == config.rollout.temperature
