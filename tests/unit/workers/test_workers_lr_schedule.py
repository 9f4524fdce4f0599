"""The learning rate of each optimizer step: where the decay ends, and that no step is for
nothing.
"""

from __future__ import annotations

import pytest
import torch

from rlhf_megatron.config.schema import OptimConfig
from rlhf_megatron.ranks.workers.megatron_optimizer import make_lr_and_decay_schedules

# lr 1.0: the figures are the shares of the peak.
CASES = [
    # two steps of warm-up, then 1 - 1/3 and 1 - 2/3
    ({"lr_decay_style": "linear", "lr_warmup_steps": 2}, 4, [0.5, 1.0, 2 / 3, 1 / 3]),
    # (1 + cos(pi i / 5)) / 2
    ({"lr_decay_style": "cosine"}, 4, [0.9045085, 0.6545085, 0.3454915, 0.0954915]),
    # two steps of warm-up, then the same
    (
        {"lr_decay_style": "cosine", "lr_warmup_steps": 2},
        6,
        [0.5, 1.0, 0.9045085, 0.6545085, 0.3454915, 0.0954915],
    ),
    # a run of one step
    ({"lr_decay_style": "linear"}, 1, [0.5]),
    ({"lr_decay_style": "cosine"}, 1, [0.5]),
    ({"lr_decay_style": "linear", "min_lr": 0.2}, 3, [0.8, 0.6, 0.4]),
    # a decay that is shorter than the run: 1 - 1/3, 1 - 2/3, then min_lr
    ({"lr_decay_style": "linear", "lr_decay_steps": 2}, 4, [2 / 3, 1 / 3, 0.0, 0.0]),
    # a decay that is longer than the run: 1 - i/10
    ({"lr_decay_style": "linear", "lr_decay_steps": 9}, 2, [0.9, 0.8]),
    # styles that do not fall to min_lr
    ({"lr_decay_style": "constant", "lr_warmup_steps": 2}, 4, [0.5, 1.0, 1.0, 1.0]),
    (
        {"lr_decay_style": "inverse-square-root", "lr_warmup_steps": 1},
        4,
        [1.0, 2**-0.5, 3**-0.5, 0.5],
    ),
    (
        {"lr_decay_style": "inverse-square-root", "lr_decay_steps": 2, "min_lr": 0.1},
        4,
        [1.0, 2**-0.5, 0.1, 0.1],
    ),
    # as runs of earlier versions have it
    (
        {"lr_decay_style": "linear", "lr_warmup_steps": 2, "lr_decay_ends": "at_last_step"},
        4,
        [0.5, 1.0, 0.5, 0.0],
    ),
    ({"lr_decay_style": "cosine", "lr_decay_ends": "at_last_step"}, 2, [0.5, 0.0]),
    ({"lr_decay_style": "linear", "lr_decay_ends": "at_last_step"}, 1, [0.0]),
]


def list_rates(optim: OptimConfig, num_steps: int) -> list[float]:
    """The rates of all steps of a run of so many."""
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=optim.lr)
    schedule = make_lr_and_decay_schedules(adam, optim, num_steps)
    rates = []
    for _ in range(num_steps):
        schedule.step(1)
        rates.append(float(adam.param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize(("settings", "num_steps", "rates"), CASES, ids=str)
def test_the_rate_of_each_step(
    settings: dict[str, object], num_steps: int, rates: list[float]
) -> None:
    optim = OptimConfig(lr=1.0, **settings)
    assert list_rates(optim, num_steps) == pytest.approx(rates, abs=1e-7)


@pytest.mark.parametrize("style", ["linear", "cosine", "inverse-square-root", "constant"])
@pytest.mark.parametrize("num_warmup_steps", [0, 1, 7])
def test_every_step_trains(style: str, num_warmup_steps: int) -> None:
    optim = OptimConfig(lr=1.0, lr_decay_style=style, lr_warmup_steps=num_warmup_steps)
    for num_steps in (num_warmup_steps + 1, num_warmup_steps + 2, 50):
        assert min(list_rates(optim, num_steps)) > 0.0


def test_more_steps_at_a_resumption_stretch_the_decay() -> None:
    """A state of two of four steps, then a run of nine: step 3 is at 3/10."""
    optim = OptimConfig(lr=1.0, lr_decay_style="linear")
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    first = make_lr_and_decay_schedules(adam, optim, 4)
    first.step(2)
    resumed = make_lr_and_decay_schedules(adam, optim, 9)
    resumed.override_opt_param_scheduler = True
    resumed.load_state_dict(first.state_dict())
    resumed.step(1)
    assert adam.param_groups[0]["lr"] == pytest.approx(0.7)
