"""AdamW whose state stands in host memory, against torch's on the same parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.ranks.workers import streamed_adam
from rlhf_megatron.ranks.workers.memory_plan import StageMemory
from rlhf_megatron.ranks.workers.optimizer_state_format import (
    MAIN,
    MOMENTS,
    OptimizerStateFormat,
    decode_float32_state,
    encode_float32_state,
)
from rlhf_megatron.ranks.workers.streamed_adam import StreamedAdam

SETTINGS = {"betas": (0.8, 0.95), "eps": 1e-6}
SIZES = ((10, 20), (64,), (5,), (3,))  # in pieces of 64 elements: four, one, one and one


def groups_of(parameters: list[Tensor]) -> list[dict[str, Any]]:
    return [
        {"params": parameters[:3], "lr": 0.02, "weight_decay": 0.1, **SETTINGS},
        {"params": parameters[3:], "lr": 0.01, "weight_decay": 0.0, **SETTINGS},
    ]


@pytest.mark.parametrize("most", [1, 64, 1 << 16])
@pytest.mark.parametrize(
    "dtype, kept",
    [
        (torch.float32, OptimizerStateFormat(is_on_host=True)),
        (torch.bfloat16, OptimizerStateFormat(is_on_host=True)),
        (torch.bfloat16, OptimizerStateFormat(main_param=torch.int16)),
    ],
    ids=["float32", "bf16", "remainders of 16 bits"],
)
def test_pieces_of_parameters_make_the_steps_of_whole_ones(
    dtype: torch.dtype, kept: OptimizerStateFormat, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, joined up to `most` elements: the schedule moves a learning rate, and one
    parameter has no gradient in the second step.
    """
    monkeypatch.setattr(streamed_adam, "MAX_PIECE_ELEMENTS", 64)
    monkeypatch.setattr(streamed_adam, "CPU_PIECE_ELEMENTS", most)
    torch.manual_seed(1)
    models = [torch.randn(size).to(dtype) for size in SIZES]
    plain, mains = ([nn.Parameter(model.float().clone()) for model in models] for _ in range(2))
    if dtype == torch.float32:
        mains = [nn.Parameter(model.clone()) for model in models]
        models = [main.data for main in mains]
    adamw = torch.optim.AdamW(groups_of(plain), fused=True)
    copies = dict(zip(mains, models, strict=True)) if dtype == torch.bfloat16 else {}
    streamed = StreamedAdam(groups_of(mains), copies, torch.device("cpu"), kept)
    for step in range(3):
        for group, other in zip(adamw.param_groups, streamed.param_groups, strict=True):
            group["lr"] = other["lr"] = 0.02 / (step + 1)
        for number, (one, other) in enumerate(zip(plain, mains, strict=True)):
            one.grad = None if (step, number) == (1, 1) else torch.randn(one.shape)
            other.grad = None if one.grad is None else one.grad.clone()
        adamw.step()
        streamed.step()
    for one, main, model in zip(plain, mains, models, strict=True):
        assert torch.equal(model, one.detach().to(dtype))
        state = streamed.state[main]
        assert all(torch.equal(state[kind], adamw.state[one][kind]) for kind in MOMENTS)
        assert state["step"] == adamw.state[one]["step"]
        if dtype == torch.bfloat16:
            assert state[MAIN].dtype == kept.main_param and torch.equal(
                decode_float32_state(state[MAIN], model), one.detach()
            )
            assert main.untyped_storage().nbytes() == 0, "its bytes on the device are given back"


def test_sixteen_bits_are_what_a_bfloat16_number_lacks() -> None:
    """1 + 3/256 and 1 + 1/256 stand in the middle of two bfloat16 numbers, of which the even one is
    above and below.
    """
    ends = [0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 1 + 3 / 256, -1 - 3 / 256]
    main = torch.cat(
        [torch.tensor(ends), torch.randn(999, generator=torch.Generator().manual_seed(1))]
    )
    kept = torch.empty(len(main), dtype=torch.int16)
    encode_float32_state(kept, main, main.bfloat16())
    assert torch.equal(
        decode_float32_state(kept, main.bfloat16()).view(torch.int32), main.view(torch.int32)
    )
    tie = torch.tensor([1 + 1 / 256, -1 - 1 / 256])
    encode_float32_state(kept[:2], tie, tie.bfloat16())
    assert torch.equal(
        decode_float32_state(kept[:2], tie.bfloat16()), torch.nextafter(tie, torch.zeros(2))
    )


def test_moments_of_sixteen_bits_are_rounded_between_steps() -> None:
    """The second step starts from the rounded moments of the first, and is otherwise torch's."""
    model = torch.ones(64).bfloat16()
    kept = OptimizerStateFormat(
        exp_avg=torch.bfloat16, exp_avg_sq=torch.bfloat16, main_param=torch.int16
    )
    plain = nn.Parameter(torch.ones(64))
    main = nn.Parameter(torch.ones(64))
    adamw = torch.optim.AdamW(
        [{"params": [plain], "lr": 0.02, "weight_decay": 0.1, **SETTINGS}], fused=True
    )
    group = {"params": [main], "lr": 0.02, "weight_decay": 0.1, **SETTINGS}
    streamed = StreamedAdam([group], {main: model}, torch.device("cpu"), kept)
    for seed in range(2):
        plain.grad = torch.randn(64, generator=torch.Generator().manual_seed(seed))
        main.grad = plain.grad.clone()
        adamw.step()
        streamed.step()
        state = streamed.state[main]
        for name in MOMENTS:
            adamw.state[plain][name].copy_(adamw.state[plain][name].bfloat16())
            assert state[name].dtype == torch.bfloat16 and torch.equal(
                state[name].float(), adamw.state[plain][name]
            )
        assert torch.equal(decode_float32_state(state[MAIN], model), plain.detach())
        assert torch.equal(model, plain.detach().bfloat16())


def test_bytes_of_a_parameter() -> None:
    """Main parameter and moments: 12 by default, 6 at the least; a float32 model is its own
    main parameter.
    """
    short = MegatronConfig(
        use_precision_aware_optimizer=True, exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16"
    )
    assert (
        OptimizerStateFormat.from_megatron_config(MegatronConfig()).count_bytes_per_parameter(
            torch.bfloat16
        )
        == (4, 8)
        and OptimizerStateFormat.from_megatron_config(MegatronConfig()).is_default
    )
    assert OptimizerStateFormat.from_megatron_config(short).count_bytes_per_parameter(
        torch.bfloat16
    ) == (2, 4)
    assert OptimizerStateFormat.from_megatron_config(short).count_bytes_per_parameter(
        torch.float32
    ) == (0, 4)


def test_state_in_host_memory_is_not_counted_on_the_device() -> None:
    planned: dict[str, Any] = {
        "stage": 0,
        "num_ranks": 2,
        "num_parameters": 10,
        "parameters": 20,
        "gradients": 40,
    }
    planned |= {"main_parameters": (40, 36), "moments": (80, 72), "reference": 20}
    assert StageMemory(**planned).totals == (180, 168)
    assert StageMemory(**planned, is_optimizer_on_host=True).totals == (60, 60)
