"""What a critic starts from, keeps and hands out:
Hugging Face directories, checkpoints, exports.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import workers_reference as reference
from dist_pool import DistPool, JobError
from safetensors.torch import load_file, save_file
from torch import Tensor
from workers_critic_jobs import CONFIG, SEED, make_critic, train_critic
from workers_jobs import OVERLAPPED, SHARDED, StateSource, shards, share, summed, train, whole

from benchmarks.parity.rounding import relative_error
from rlhf_megatron.data.batch import TokenBatch, ValueMiniBatch
from rlhf_megatron.data.replica_plan import take_replica_shard
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.hf_reader import HFReader, read_hf_config
from rlhf_megatron.weights.value_model import (
    add_value_head,
    make_value_model_config,
    open_value_model,
)
from rlhf_megatron.weights.weight_source import RandomWeightSource
from rlhf_megatron.weights.weight_table import HFTensor

NAME = "qwen3_tied"
FILE = "model.safetensors"
MOVES: list[
    tuple[torch.dtype, dict[str, Any], list[dict[str, Any]]]
] = [  # saved under one, loaded under others
    (
        torch.float32,
        {"tp": 2, "sequence_parallel": True, "megatron": SHARDED},
        [
            {"tp": 2, "sequence_parallel": True, "megatron": SHARDED},
            {"pp": 2, "vpp": 2},
            {"cp": 2, "megatron": OVERLAPPED},
        ],
    ),
    (
        torch.bfloat16,
        {"dp": 2, "megatron": OVERLAPPED, "bucket_size": 20_000},
        [{"dp": 2, "megatron": OVERLAPPED, "bucket_size": 20_000}, {"tp": 2}],
    ),
]


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return {
        key: value.clone() for key, value in reference.make_value_model(NAME).state_dict().items()
    }


@pytest.fixture(scope="module")
def batch() -> ValueMiniBatch:
    return reference.make_value_batch(torch.zeros(reference.make_batch().num_tokens))


def weights_of(results: list[Any], layout: dict[str, Any], name: str = NAME) -> dict[str, Tensor]:
    copies = layout.get("dp", 1) * layout.get("cp", 1)
    return whole(results, name, layout.get("tp", 1), copies, "weights", "value")


@pytest.mark.dist
@pytest.mark.parametrize("dtype, saved, loaded", MOVES, ids=["float32", "bfloat16"])
def test_a_checkpoint_goes_on_under_another_layout(
    dist_pool: DistPool,
    state: dict[str, Tensor],
    batch: ValueMiniBatch,
    tmp_path: Path,
    dtype: torch.dtype,
    saved: dict[str, Any],
    loaded: list[dict[str, Any]],
) -> None:
    """Weights right after a load prove little: moments and step counts show in
    the step after it.
    """
    directory = tmp_path / "checkpoint"
    common: dict[str, Any] = {
        "name": NAME,
        "state": state,
        "batch": batch,
        "dtype": dtype,
        "timeout_s": 300,
    }
    through = dist_pool.run(
        train_critic, num_steps=3, directory=directory, save_after=2, **saved, **common
    )
    expected = weights_of(through, saved)
    assert not torch.equal(expected["score.weight"], state["score.weight"].to(dtype))
    for number, layout in enumerate(loaded):
        resumed = dist_pool.run(
            train_critic, num_steps=1, directory=directory, is_loading=True, **layout, **common
        )
        weights = weights_of(resumed, layout)
        if number == 0:  # as it was saved
            assert all(torch.equal(weights[key], expected[key]) for key in expected)
        elif dtype == torch.float32:
            for key in expected:
                moved = weights[key] - state[key]
                wanted = expected[key] - state[key]
                assert relative_error(moved, wanted) <= 1e-3, key
        else:
            # a step is about one unit in the last place: another layout rounds some
            # weights the other way
            assert max(relative_error(weights[key], expected[key]) for key in expected) <= 1e-3
        assert summed(resumed, 0).lr == summed(through, 2).lr


@pytest.mark.dist
def test_an_actors_checkpoint_is_no_critics(
    dist_pool: DistPool, batch: ValueMiniBatch, tmp_path: Path
) -> None:
    """The output layer is named otherwise than the value head, and its many rows do
    not load as one.
    """
    policy = reference.make_model("llama").state_dict()
    dist_pool.run(
        train,
        name="llama",
        state=policy,
        batch=reference.make_batch(),
        loss="sft",
        num_steps=0,
        directory=tmp_path,
    )
    value = reference.make_value_model("llama").state_dict()
    with pytest.raises(JobError, match=r"value_head.weight is missing"):
        dist_pool.run(
            train_critic,
            name="llama",
            state=value,
            batch=batch,
            num_steps=0,
            directory=tmp_path,
            is_loading=True,
        )


def write_directory(
    directory: Path, name: str, kind: str, num_labels: int = 1
) -> dict[str, Tensor]:
    """A random model as transformers writes it; its tensors. `kind`: "CausalLM" or what
    stands behind "For".
    """
    import transformers

    raw = dict(reference.HF_CONFIGS[name])
    model_type = raw.pop("model_type")
    labels = {} if kind == "CausalLM" else {"num_labels": num_labels}
    config = transformers.AutoConfig.for_model(model_type, **raw, **labels)
    torch.manual_seed(2)
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return {key: tensor.clone() for key, tensor in load_file(directory / FILE).items()}


def started(
    world: World, directory: Path, batch: TokenBatch, exported: Path | None = None
) -> tuple[Any, ...]:
    """A critic from a directory, in its type: (values, plan, weights). `exported`: it is
    written there.
    """
    from rlhf_megatron.ranks.resharding.export_hf import export_sharded_model_to_hf

    hf_config = read_hf_config(directory)
    dtype = next(iter(load_file(directory / FILE).values())).dtype
    name = NAME if hf_config["tie_word_embeddings"] else "llama"
    critic = make_critic(
        world,
        name,
        open_value_model(directory, make_weight_table(hf_config, head="value")),
        dtype,
        hf_config=hf_config,
    )
    shard, plan = share(world, batch, 40)
    values = critic.values(shard, plan)
    if exported is not None:
        export_sharded_model_to_hf(
            critic.export_shards(),
            world,
            directory=exported,
            hf_config=critic.exported_config,
            dtype=dtype,
        )
    return values, plan, shards(critic, "value")[1]


@pytest.mark.dist
@pytest.mark.parametrize(
    "name, kind, layout",
    [
        ("qwen3_tied", "CausalLM", {"tp": 2}),
        ("qwen3_tied", "TokenClassification", {"pp": 2}),
        ("qwen3_tied", "SequenceClassification", {"tp": 2}),
        ("llama", "CausalLM", {"pp": 2}),
        ("llama", "TokenClassification", {"tp": 2}),
        ("llama", "SequenceClassification", {"pp": 2}),
    ],
)
def test_a_critic_starts_from_a_directory(
    dist_pool: DistPool,
    batch: ValueMiniBatch,
    tmp_path: Path,
    name: str,
    kind: str,
    layout: dict[str, Any],
) -> None:
    """The body is the directory's, to the bit; so is the head, or it is the same first one
    under every layout.
    """
    stored = write_directory(tmp_path, name, kind)
    first = 0.1 * RandomWeightSource(SEED, 1.0).make_random_tensor(
        HFTensor("score.weight", (1, 64))
    )
    assert CONFIG.value_head_init_std == 0.1
    assert 0.07 < float(first.std()) < 0.13
    expected = {"score.weight": first, "score.bias": torch.zeros(1), **stored}
    expected.pop("lm_head.weight", None)
    results = dist_pool.run(started, directory=tmp_path, batch=batch, timeout_s=300, **layout)
    found = weights_of([_Holder(weights) for _, _, weights in results], layout, name)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


class _Holder:
    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights


@pytest.mark.dist
@pytest.mark.parametrize(
    "name, layout, dtype",
    [
        ("qwen3_tied", {"tp": 2}, torch.float32),
        ("llama", {"pp": 2}, torch.float32),
        ("llama", {"tp": 2, "sequence_parallel": True}, torch.bfloat16),
    ],
    ids=["tied tp2", "untied pp2", "untied bf16"],
)
def test_an_export_is_a_token_classifier_of_transformers(
    dist_pool: DistPool,
    batch: ValueMiniBatch,
    tmp_path: Path,
    name: str,
    layout: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    import transformers

    stored = write_directory(tmp_path / "from", name, "TokenClassification")
    stored = {key: tensor.to(dtype) for key, tensor in stored.items()}
    save_file(stored, tmp_path / "from" / FILE)
    results = dist_pool.run(
        started,
        directory=tmp_path / "from",
        batch=batch,
        exported=tmp_path / "to",
        timeout_s=300,
        **layout,
    )
    written = HFReader(tmp_path / "to")
    written.check_against_table(
        make_weight_table(read_hf_config(tmp_path / "to"), head="value"), is_strict=True
    )
    model = transformers.AutoModelForTokenClassification.from_pretrained(
        tmp_path / "to", dtype=dtype
    ).eval()
    assert type(model).__name__ == ("Qwen3" if name == NAME else "Llama") + "ForTokenClassification"
    assert model.config.num_labels == 1
    loaded = model.state_dict()
    assert loaded.keys() == stored.keys() and all(
        torch.equal(loaded[key], stored[key]) for key in stored
    )
    values = next(values for values, _, _ in results if values is not None)
    plan = next(plan for values, plan, _ in results if values is not None)
    order = torch.cat([torch.tensor(group) for group in plan.micro_batches])
    assert sorted(order.tolist()) == list(range(len(batch)))
    shard = take_replica_shard(batch, plan)
    with torch.no_grad():
        for i, sample in enumerate(plan.samples):
            place = slice(shard.offsets[i], shard.offsets[i + 1])
            ids = shard.token_ids[place]
            mask = shard.response_mask[place]
            found = values.values[place]
            logits = model(ids[None]).logits[0, :-1, 0].float()
            expected = torch.cat([torch.zeros(1), logits]) * mask
            bound = 1e-5 if dtype == torch.float32 else 0.1
            assert (found - expected).abs().max() <= bound * max(
                1.0, float(expected.abs().max())
            ), sample
    assert json.loads((tmp_path / "to" / "config.json").read_text())["id2label"] == {"0": "VALUE"}


def begun_again(
    world: World,
    state: dict[str, Tensor],
    batch: ValueMiniBatch,
    directory: Path,
    megatron: dict[str, Any],
) -> tuple[Any, ...]:
    """Weights after a step from a directory: of a critic that has trained before, and
    of a fresh one.
    """
    weights = []
    for is_fresh in (False, True):
        critic = make_critic(
            world, NAME, StateSource(state), torch.bfloat16, megatron=megatron, bucket_size=20_000
        )
        shard, plan = share(world, batch, 40)
        if not is_fresh:
            for _ in range(2):
                critic.update(shard, plan)
        critic.load_hf(directory)
        after_load = shards(critic, "value")[1]
        update = critic.update(shard, plan)
        weights.append((after_load, shards(critic, "value")[1], update))
    return tuple(weights)


@pytest.mark.dist
@pytest.mark.parametrize(
    "layout",
    [{"tp": 2, "megatron": {}}, {"dp": 2, "megatron": OVERLAPPED}],
    ids=["tp2", "dp2 overlapped"],
)
def test_loading_a_directory_leaves_nothing_of_before(
    dist_pool: DistPool,
    state: dict[str, Tensor],
    batch: ValueMiniBatch,
    tmp_path: Path,
    layout: dict[str, Any],
) -> None:
    """In bfloat16: main parameters of before would come back with the next step, moments
    would change it.
    """
    stored = write_directory(tmp_path, NAME, "CausalLM")
    results = dist_pool.run(
        begun_again, state=state, batch=batch, directory=tmp_path, timeout_s=300, **layout
    )
    after_load = weights_of([_Holder(trained[0]) for trained, _ in results], layout)
    assert all(torch.equal(after_load[key], stored[key].bfloat16()) for key in stored)
    for trained, fresh in results:
        assert trained[2] == fresh[2]
        assert all(torch.equal(trained[1][key], fresh[1][key]) for key in fresh[1])
        assert any(not torch.equal(trained[1][key], trained[0][key]) for key in fresh[1])


class TestRefusals:
    def test_a_head_of_several_labels(self, tmp_path: Path) -> None:
        write_directory(tmp_path, "llama", "TokenClassification", num_labels=3)
        with pytest.raises(
            ValueError, match=r"has a head of 3 labels \(score.weight\); a critic needs one value"
        ):
            open_value_model(tmp_path, make_weight_table(read_hf_config(tmp_path), head="value"))

    def test_a_body_with_a_tensor_missing_or_of_another_shape(self, tmp_path: Path) -> None:
        stored = write_directory(tmp_path, "llama", "TokenClassification")
        wide = {**reference.HF_CONFIGS["llama"], "intermediate_size": 128}
        with pytest.raises(
            ValueError, match=r"mlp.gate_proj.weight in model.safetensors has shape \(96, 64\)"
        ):
            open_value_model(tmp_path, make_weight_table(wide, head="value"))
        stored.pop("model.norm.weight")
        save_file(stored, tmp_path / FILE)
        with pytest.raises(ValueError, match=r"tensor model.norm.weight \(64,\) is missing"):
            open_value_model(tmp_path, make_weight_table(read_hf_config(tmp_path), head="value"))

    def test_a_policy_is_read_without_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Its output layer is expected, and left out; what nobody knows is refused."""
        stored = write_directory(tmp_path, "llama", "CausalLM")
        open_value_model(tmp_path, make_weight_table(read_hf_config(tmp_path), head="value"))
        assert not caplog.records
        save_file({**stored, "v_head.weight": torch.zeros(1)}, tmp_path / FILE)
        with pytest.raises(ValueError, match=r"nothing reads v_head.weight.* call the head score"):
            open_value_model(tmp_path, make_weight_table(read_hf_config(tmp_path), head="value"))


def test_the_type_of_each_tensor_is_known(tmp_path: Path) -> None:
    stored = write_directory(tmp_path, "llama", "SequenceClassification")
    save_file({key: tensor.bfloat16() for key, tensor in stored.items()}, tmp_path / FILE)
    config = read_hf_config(tmp_path)
    source = add_value_head(
        open_value_model(tmp_path, make_weight_table(config, head="value")), 0.0, 1
    )
    types = {
        rule.megatron_name: source.get_dtype_name(rule)
        for rule in make_weight_table(config, head="value")
    }
    assert types.pop("output_layer.bias") == "float32"
    assert set(types.values()) == {"bfloat16"}


def test_config_of_an_export() -> None:
    policy = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 8}
    assert make_value_model_config(policy) == {
        "architectures": ["Qwen3ForTokenClassification"],
        "model_type": "qwen3",
        "hidden_size": 8,
        "id2label": {"0": "VALUE"},
        "label2id": {"VALUE": 0},
        "classifier_dropout": 0.0,
    }
    assert "architectures" not in make_value_model_config({"model_type": "qwen3"})
