"""AdamW whose state stands in host memory, against torch's on the same parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_megatron.workers import streamed_adam
from rlhf_megatron.workers.memory_plan import StageMemory
from rlhf_megatron.workers.optimizer_state import MAIN, MOMENTS
from rlhf_megatron.workers.streamed_adam import StreamedAdam

SETTINGS = {"betas": (0.8, 0.95), "eps": 1e-6}
SIZES = ((10, 20), (64,), (3,))  # in pieces of 64 elements: four, one and one


def groups_of(parameters: list[Tensor]) -> list[dict[str, Any]]:
    return [
        {"params": parameters[:2], "lr": 0.02, "weight_decay": 0.1, **SETTINGS},
        {"params": parameters[2:], "lr": 0.01, "weight_decay": 0.0, **SETTINGS},
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def test_pieces_of_parameters_make_the_steps_of_whole_ones(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: the schedule moves a learning rate, and one parameter has no gradient in the second step."""
    monkeypatch.setattr(streamed_adam, "PIECE", 64)
    torch.manual_seed(1)
    models = [torch.randn(size).to(dtype) for size in SIZES]
    plain, mains = ([nn.Parameter(model.float().clone()) for model in models] for _ in range(2))
    if dtype == torch.float32:
        mains = [nn.Parameter(model.clone()) for model in models]
        models = [main.data for main in mains]
    adamw = torch.optim.AdamW(groups_of(plain), fused=True)
    copies = dict(zip(mains, models, strict=True)) if dtype == torch.bfloat16 else {}
    streamed = StreamedAdam(groups_of(mains), copies, torch.device("cpu"))
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
            assert torch.equal(state[MAIN], one.detach())
            assert main.untyped_storage().nbytes() == 0, "its bytes on the device are given back"


def test_state_in_host_memory_is_not_counted_on_the_device() -> None:
    planned: dict[str, Any] = {"stage": 0, "num_ranks": 2, "num_parameters": 10, "parameters": 20, "gradients": 40}
    planned |= {"main_parameters": (40, 36), "moments": (80, 72), "reference": 20}
    assert StageMemory(**planned).totals == (180, 168)
    assert StageMemory(**planned, is_optimizer_on_host=True).totals == (60, 60)
