"""Parameters of registered parts are checked as strictly as the configuration itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.type_conversion import build_params


@dataclass(frozen=True)
class ClipParams:
    clip_ratio_low: float
    clip_ratio_high: float = 0.2
    mode: Literal["token", "sequence"] = "token"
    sizes: tuple[int, ...] = ()
    tau: float | None = None

    def __post_init__(self) -> None:
        if self.clip_ratio_low >= 1:
            raise ValueError(f"clip_ratio_low ({self.clip_ratio_low}) must be below 1; use 0.2.")


def test_values_are_converted() -> None:
    params = build_params(
        ClipParams, {"clip_ratio_low": 0, "mode": "sequence", "sizes": [1, 2]}, "loss.params"
    )
    assert params == ClipParams(0.0, 0.2, "sequence", (1, 2), None)
    assert type(params.clip_ratio_low) is float


def test_all_problems_at_once_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "actor:\n  policy_loss:\n    params:\n      clip_ratio_hi: 0.3\n      mode: tokn\n"
    )
    loaded = read_run_config(path, ["actor.policy_loss.params.tau=high"])
    with pytest.raises(ConfigError) as caught:
        build_params(
            ClipParams, loaded.config.actor.policy_loss.params, "actor.policy_loss.params", loaded
        )
    prefix = "actor.policy_loss.params"
    assert caught.value.problems == [
        (
            f"unknown key {prefix}.clip_ratio_hi (0.3). Did you mean"
            f" {prefix}.clip_ratio_high? [{path}:4]"
        ),
        f"{prefix}.mode ('tokn') must be one of token, sequence; did you mean token? [{path}:5]",
        f"{prefix}.tau ('high') must be a number; write one such as 1e-6. [command line]",
        f"{prefix}.clip_ratio_low is missing; it has no default: give a number. [{path}:3]",
    ]


def test_what_the_class_itself_refuses_is_a_problem() -> None:
    with pytest.raises(
        ConfigError, match=r"^loss\.params: clip_ratio_low \(2\.0\) must be below 1; use 0\.2\.$"
    ):
        build_params(ClipParams, {"clip_ratio_low": 2}, "loss.params")


def test_text_and_truth_are_not_cast() -> None:
    with pytest.raises(ConfigError) as caught:
        build_params(ClipParams, {"clip_ratio_low": True, "sizes": [1.0], "mode": 1}, "p")
    assert [problem.split(" ")[0] for problem in caught.value.problems] == [
        "p.clip_ratio_low",
        "p.sizes[0]",
        "p.mode",
    ]
