"""LoRA on the backend fsdp: against plain transformers, its base left alone, merged and alone in
files, resumed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import workers_reference as reference
from dist_pool import DistPool, JobError
from torch import Tensor, nn
from workers_jobs import CONFIG, RankResult, make_actor, share, summed

from rlhf_megatron.config.schema import LoRAConfig
from rlhf_megatron.data.batch import MiniBatch
from rlhf_megatron.data.replica_plan import restore_sample_order
from rlhf_megatron.ranks.parallel.world import World

pytestmark = pytest.mark.dist
LORA = LoRAConfig(rank=4, alpha=12.0)
SCALE = 3.0
CHECKPOINT = "actor"


def config_of(lora: LoRAConfig) -> Any:
    return replace(CONFIG, backend="fsdp", lora=lora)


def train_adapters(
    world: World,
    state: dict[str, Tensor],
    batch: MiniBatch,
    out: Path,
    lora: LoRAConfig = LORA,
    num_steps: int = reference.STEPS,
    is_loading: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[RankResult, dict[str, Tensor], Any]:
    """Log-probs, steps, a checkpoint and merged weights; what the rank held before and after, and
    log-probs at the end.
    """
    from rlhf_megatron.ranks.resharding.export_hf import export_sharded_model_to_hf

    actor = make_actor(world, "llama", state, config_of(lora), dtype)
    if is_loading:
        actor.load(out / CHECKPOINT)
    first = {name: piece.clone() for name, piece in actor.backend.named_weights().items()}
    shard, plan = share(world, batch, 40)
    log_probs = actor.log_probs(shard, plan, reference.TEMPERATURE)
    updates = [actor.update(shard, plan, reference.TEMPERATURE, "policy") for _ in range(num_steps)]
    grads = {name: piece.clone() for name, piece in actor.backend.named_gradients().items()}
    last = {name: piece.clone() for name, piece in actor.backend.named_weights().items()}
    if not is_loading:
        actor.save(out / CHECKPOINT)
        place = actor.backend.export_world
        hf_config = reference.HF_CONFIGS["llama"]
        export_sharded_model_to_hf(
            actor.export_shards(), place, directory=out / "merged", hf_config=hf_config, dtype=dtype
        )
    end = actor.log_probs(shard, plan, reference.TEMPERATURE)
    return RankResult(log_probs, updates, grads, last, plan), first, end


def whole(pieces: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


class Adapted(nn.Module):
    """A frozen model of transformers, each matrix W as W + scale B A. Its parameters
    are the matrices.
    """

    def __init__(self, model: nn.Module, matrices: dict[str, Tensor]) -> None:
        super().__init__()
        self.frozen = [model.requires_grad_(False)]  # no submodule
        for name, matrix in matrices.items():
            self.register_parameter(name.replace(".", "/"), nn.Parameter(matrix))

    def forward(self, ids: Tensor) -> Any:
        held = {name.replace("/", "."): matrix for name, matrix in self.named_parameters()}
        weights = dict(self.frozen[0].named_parameters())
        for name in [name for name in held if "lora_A" in name]:
            up = held[name.replace("lora_A", "lora_B")]
            own = name.replace("lora_A.", "")
            weights[own] = weights[own] + SCALE * up @ held[name]
        return torch.func.functional_call(self.frozen[0], weights, (ids,))


def is_matrix(name: str) -> bool:
    return "lora_" in name


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return {key: value.clone() for key, value in reference.make_model("llama").state_dict().items()}


@pytest.fixture(scope="module")
def batch() -> MiniBatch:
    model = reference.make_model("llama")
    with torch.no_grad():
        return reference.with_past(
            reference.make_batch(), reference.token_log_probs(model, reference.make_batch())[0]
        )


@pytest.fixture(scope="module")
def trained(
    dist_pool: DistPool,
    state: dict[str, Tensor],
    batch: MiniBatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Any, Path]:
    out = tmp_path_factory.mktemp("lora")
    return dist_pool.run(train_adapters, state=state, batch=batch, out=out, dp=2), out


def test_three_steps_equal_transformers_and_leave_the_base_alone(
    trained: Any, state: dict[str, Tensor], batch: MiniBatch
) -> None:
    results, _ = trained
    first = whole([first for _, first, _ in results])
    last = whole([result.weights for result, _, _ in results])
    matrices = {name: tensor for name, tensor in first.items() if is_matrix(name)}
    assert len(matrices) == 2 * 7 * 4, "both matrices of seven linear layers in four decoder layers"
    for name, tensor in state.items():
        assert torch.equal(first[name], tensor) and torch.equal(last[name], tensor), name
    assert all(not torch.equal(last[name], tensor) for name, tensor in matrices.items())
    assert all((tensor == 0).all() == ("lora_B" in name) for name, tensor in matrices.items())

    model = Adapted(
        reference.make_model("llama").double(),
        {name: tensor.double() for name, tensor in matrices.items()},
    )
    exact = reference.run_steps(model, batch, "policy")
    grads = whole([result.grads for result, _, _ in results])
    assert grads.keys() == matrices.keys(), "only the matrices have gradients"
    for name, gradient in grads.items():
        own = name.replace(".", "/")
        wanted = exact[-1].grads[own]
        moved = exact[-1].weights[own] - matrices[name]
        assert (gradient - wanted).norm() <= 2e-5 * wanted.norm(), name
        assert (last[name] - matrices[name] - moved).norm() <= 1e-4 * moved.norm(), name
    for step in range(reference.STEPS):
        found = summed([result for result, _, _ in results], step)
        assert found.grad_norm == pytest.approx(exact[step].grad_norm, rel=1e-4)
        assert found.sums["actor/loss"] == pytest.approx(exact[step].loss, abs=1e-5, rel=1e-5)


def test_merged_weights_are_the_model_that_trains(trained: Any, batch: MiniBatch) -> None:
    """The export of the ranks, and that of the checkpoint, bit for bit alike."""
    from transformers import AutoModelForCausalLM

    from rlhf_megatron.weights.lora_adapter import MergedLoraSource
    from rlhf_megatron.weights.torch_dist_source import TorchDistSource
    from rlhf_megatron.weights.transformers_causal_lm import make_transformers_weight_table

    results, out = trained
    model = AutoModelForCausalLM.from_pretrained(out / "merged")
    with torch.no_grad():
        wanted, _ = reference.token_log_probs(model, batch)
    found = restore_sample_order(
        [end for _, _, end in results], [result.plan for result, _, _ in results], batch.offsets
    ).log_probs
    assert (found - wanted).abs().max().item() <= 2e-6
    begin = restore_sample_order(
        [result.log_probs for result, _, _ in results],
        [r.plan for r, _, _ in results],
        batch.offsets,
    )
    assert (found - begin.log_probs).abs().max().item() > 1e-3, "it has learnt nothing"
    source = MergedLoraSource(TorchDistSource(out / CHECKPOINT), SCALE)
    for rule in make_transformers_weight_table(reference.HF_CONFIGS["llama"], "vocabulary"):
        (tensor,) = source.read_hf_tensors(rule)
        assert torch.equal(tensor, model.state_dict()[rule.hf_tensors[0].name]), rule.megatron_name


def write_files(directory: Path, out: Path) -> int:
    from rlhf_megatron.weights.lora_adapter import MergedLoraSource, write_peft_adapter
    from rlhf_megatron.weights.torch_dist_source import TorchDistSource

    return write_peft_adapter(
        out,
        LORA,
        MergedLoraSource(TorchDistSource(directory), SCALE).read_adapter_matrices(),
        "base",
    )


def test_peft_reads_the_adapter(trained: Any, state: dict[str, Tensor], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    out = trained[1]
    assert write_files(out / CHECKPOINT, tmp_path / "adapter") == 56
    merged = AutoModelForCausalLM.from_pretrained(out / "merged")
    base = reference.make_model("llama")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = torch.arange(40)[None] * 3
    with torch.no_grad():
        wanted = merged(ids).logits
        assert (adapted(ids).logits - wanted).norm() <= 1e-6 * wanted.norm()
    folded = adapted.merge_and_unload().state_dict()
    assert all(torch.equal(folded[name], tensor) for name, tensor in merged.state_dict().items())


def test_it_goes_on_from_a_checkpoint_and_from_an_adapter(
    dist_pool: DistPool, trained: Any, state: dict[str, Tensor], batch: MiniBatch, tmp_path: Path
) -> None:
    """At another number of ranks bit for bit; the adapter alone brings the same matrices."""
    results, out = trained
    wanted = whole([result.weights for result, _, _ in results])
    loaded = dist_pool.run(
        train_adapters, state=state, batch=batch, out=out, num_steps=0, is_loading=True, dp=3
    )
    found = whole([first for _, first, _ in loaded])
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())

    write_files(out / CHECKPOINT, tmp_path / "adapter")
    from_adapter = replace(LORA, path=str(tmp_path / "adapter"))
    job: dict[str, Any] = {
        "state": state,
        "batch": batch,
        "out": tmp_path,
        "lora": from_adapter,
        "num_steps": 0,
    }
    begun = whole([first for _, first, _ in dist_pool.run(train_adapters, **job, dp=2)])
    assert all(torch.equal(begun[name], tensor) for name, tensor in wanted.items())
    with pytest.raises(JobError, match=r"has r 4, but 8 is needed; set actor.lora as it says"):
        dist_pool.run(train_adapters, **(job | {"lora": replace(from_adapter, rank=8)}))


def test_a_base_in_bfloat16_stays_as_it_is(
    dist_pool: DistPool, state: dict[str, Tensor], batch: MiniBatch, tmp_path: Path
) -> None:
    """The matrices are float32 and move; named modules only."""
    lora = replace(LORA, target_modules=("q_proj", "down_proj"))
    job: dict[str, Any] = {
        "state": state,
        "batch": batch,
        "out": tmp_path,
        "lora": lora,
        "dtype": torch.bfloat16,
    }
    results = dist_pool.run(train_adapters, **job, num_steps=1, dp=2)
    last = whole([result.weights for result, _, _ in results])
    assert sum(map(is_matrix, last)) == 2 * 2 * 4
    for name, tensor in last.items():
        if is_matrix(name):
            assert tensor.dtype == torch.float32 and (
                "lora_A" in name or bool((tensor != 0).any())
            ), name
        else:
            assert torch.equal(tensor, state[name].bfloat16()), name
