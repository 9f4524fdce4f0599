"""Rules on checkpoints, resumption and deadlines, each with a value on both sides of its border."""

from pathlib import Path

import pytest
from config_samples import VALID

from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.validate import validate_config

NONE = "trainer.save_last=none"
PATH = "trainer.resume_from_path=runs/x/checkpoints/step_000002"


def problems(directory: Path, *overrides: str) -> list[str]:
    path = directory / "run.yaml"
    path.write_text(VALID)
    return validate_config(read_run_config(path, overrides))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("trainer.resume_mode=resume_path",), "needs trainer.resume_from_path"),
        ((PATH,), "runs/x/checkpoints/step_000002) would be ignored"),
        (
            (NONE, "trainer.async_save=false"),
            "trainer.async_save (false) would be ignored because trainer.save_freq is 0",
        ),
        ((NONE, "trainer.max_ckpt_to_keep=1"), "trainer.max_ckpt_to_keep (1) would be ignored"),
        ((NONE, "trainer.save_failure=stop"), "trainer.save_failure (stop) would be ignored"),
        (("trainer.keep_best=val/accuracy",), "trainer.keep_best (val/accuracy) would be ignored"),
        (
            ("trainer.stage_timeouts_s={genrate: 5}",),
            "there is no stage 'genrate'; the stages are next, generate",
        ),
        (("trainer.stage_timeouts_s={generate: 0}",), "trainer.stage_timeouts_s.generate (0"),
        (("trainer.stop_grace_s=0",), "trainer.stop_grace_s (0"),
        (("rollout.health_timeout_s=-1",), "rollout.health_timeout_s (-1"),
        (
            ("trainer.max_consecutive_skips=0",),
            "trainer.max_consecutive_skips (0) must be at least 1",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_refused(
    tmp_path: Path, overrides: tuple[str, ...], words: str
) -> None:
    found = problems(tmp_path, *overrides)
    assert len(found) == 1 and words in found[0], found


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("trainer.resume_mode=resume_path", PATH),
        (
            "trainer.save_freq=5",
            "trainer.async_save=false",
            "trainer.max_ckpt_to_keep=1",
            "trainer.save_failure=stop",
        ),
        (
            "trainer.async_save=false",
            "trainer.save_failure=stop",
        ),  # of the checkpoint after the last step
        ("trainer.save_freq=5", "trainer.save_last=weights", "trainer.keep_best=val/accuracy"),
        ("trainer.stage_timeouts_s={generate: 5, sync: 0.5}",),
    ],
)
def test_a_setting_that_works_is_taken(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert problems(tmp_path, *overrides) == []
