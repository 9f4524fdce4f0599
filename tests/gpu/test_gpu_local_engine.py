"""The bundled engine on a GPU: memory that is released is the device's again; cuts and pauses are
those of the CPU.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from rollout_tools import digests_of, request, tiny_qwen3, weights_of, write_buckets
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlhf_megatron.device import measure_device_memory
from rlhf_megatron.rollout.engine_interface import SamplingParams
from rlhf_megatron.rollout.local.batch_generator import BatchGenerator
from rlhf_megatron.rollout.local.decode_service import DecodeService
from rlhf_megatron.rollout.local.local_model import LocalModel
from rlhf_megatron.rollout.local.token_sampling import ProbabilityCuts
from rlhf_megatron.rollout.local.weight_receiver import WeightReceiver

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = [
    {"top_p": 0.8},
    {"top_k": 9, "min_p": 0.02},
    {},
    {"top_k": 3000, "top_p": 0.999},
    {"min_p": 0.1},
]


def larger_model() -> Qwen3ForCausalLM:
    """24 MiB, many times what a device rounds up to."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=64, num_hidden_layers=8, head_dim=64, **shape)
    ).eval()


@pytest.mark.parametrize("device", DEVICES)
def test_parts_are_released_and_come_back(device: str, tmp_path: Path) -> None:
    sent = weights_of(larger_model())
    model = LocalModel(larger_model().to(device))
    service = DecodeService(
        BatchGenerator(model, 64, 1 << 16), WeightReceiver(model.module, tmp_path, True)
    )

    num_samples, num_tokens = (32, 200) if device == "cuda" else (2, 8)

    def tokens() -> list[tuple[int, ...]]:
        job, admitted = service.submit_generate(
            [request((1, 2, 3), tuple(range(num_samples)), num_tokens)]
        )
        admitted.result(60)
        return [sample.token_ids for sample in job.future.result(120)[0]]

    try:
        expected = tokens()
        held = service.weights.num_bytes + service.generator.cache_bytes
        before = measure_device_memory(model.device).reserved_bytes
        service.run_in_decode_loop(service.release_memory).result(60)
        if device == "cuda":
            assert held > 50 << 20
            assert before - measure_device_memory(model.device).reserved_bytes >= 0.8 * held
        assert service.weights.num_bytes == service.generator.cache_bytes == 0
        service.run_in_decode_loop(lambda: service.resume_memory(["weights"])).result(60)
        service.run_in_decode_loop(lambda: service.begin_weight_update(1, False)).result(60)
        for manifest in write_buckets(sent, tmp_path, 1):
            service.run_in_decode_loop(lambda one=manifest: service.update_weights(one)).result(60)
        service.run_in_decode_loop(lambda: service.commit_weight_update(1)).result(60)
        assert service.weights.compute_digests() == digests_of(sent)
        service.run_in_decode_loop(lambda: service.resume_memory(["kv_cache"])).result(60)
        assert tokens() == expected
    finally:
        service.close()


@pytest.mark.parametrize("device", DEVICES)
def test_kept_sets_are_those_of_the_cpu(device: str) -> None:
    torch.manual_seed(1)
    probs = (torch.randn(len(KINDS), 20_000) * 2).softmax(-1)
    probs = (probs * 2**20).round() / 2**20  # many equal ones, and sums that are exact in any order
    params = [SamplingParams(1, **kind) for kind in KINDS]
    here = ProbabilityCuts.from_params(params, torch.device("cpu"))
    there = ProbabilityCuts.from_params(params, torch.device(device))
    expected = here.zero_cut_probs(probs)
    assert torch.equal(there.zero_cut_probs(probs.to(device)).cpu(), expected)
    assert 0 < expected[0].count_nonzero() < probs[0].count_nonzero() and torch.equal(
        expected[2], probs[2]
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_retracted", [True, False], ids=["retract", "in_place"])
def test_a_sync_in_the_middle_of_a_response(device: str, is_retracted: bool) -> None:
    """Greedy, in float32: the tokens are those of the CPU."""

    def tokens(where: str) -> list[tuple[int, ...]]:
        engine = BatchGenerator(LocalModel(copy.deepcopy(tiny_qwen3(1)).to(where)), 8, 4096)
        members = engine.add_request(
            request((5, 6, 7), (1, 2), 24, 0.0, top_k=5, stop_token_ids=(0,), min_new_tokens=24)
        )
        for _ in range(6):
            engine.decode_step()
        if is_retracted:
            engine.retract_samples()
        with torch.no_grad():
            for mine, other in zip(
                engine.model.module.parameters(), tiny_qwen3(2).parameters(), strict=True
            ):
                mine.copy_(other)
        engine.set_policy_version(1)
        while engine.has_work:
            engine.decode_step()
        assert [(s.start, s.end) for s in members[0].make_generated_sample().version_spans] == [
            (0, 7),
            (7, 24),
        ]
        return [member.make_generated_sample().token_ids for member in members]

    assert tokens(device) == tokens("cpu")
