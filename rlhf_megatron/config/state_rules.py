"""Rules on checkpoints, resumption, deadlines and what happens when something fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.provenance import Loaded
from rlhf_megatron.config.schema import RunConfig

STAGES = ("next", "generate", "score", "take", "annotate", "advantages", "update", "sync", "evaluate")
SAVE_FREQ, RESUME_MODE, RESUME_FROM = "trainer.save_freq", "trainer.resume_mode", "trainer.resume_from_path"
STAGE_TIMEOUTS = "trainer.stage_timeouts_s"


def idle_settings(config: RunConfig) -> Iterator[tuple[bool, tuple[str, ...], str, str]]:
    """See `config.ignored`."""
    of_saving = ("trainer.async_save", "trainer.max_ckpt_to_keep", "trainer.save_failure")
    yield not config.trainer.save_freq, of_saving, SAVE_FREQ, "give that a number of steps"
    fix = "set it to resume_path"
    yield config.trainer.resume_mode != "resume_path", (RESUME_FROM,), RESUME_MODE, fix


def resumption(loaded: Loaded) -> Iterator[Problem]:
    trainer = loaded.config.trainer
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        yield Problem(
            f"{RESUME_MODE} (resume_path) needs {RESUME_FROM}; name a directory like"
            " runs/x/checkpoints/step_000010, or use auto.",
            (RESUME_MODE, RESUME_FROM),
        )


def stage_deadlines(loaded: Loaded) -> Iterator[Problem]:
    for stage, seconds in loaded.config.trainer.stage_timeouts_s.items():
        if stage not in STAGES:
            yield Problem(f"{STAGE_TIMEOUTS}: there is no stage {stage!r}; the stages are {', '.join(STAGES)}.", ())
        elif isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            yield Problem(f"{STAGE_TIMEOUTS}.{stage} ({seconds!r}) must be a number of seconds above 0.", ())


RULES: tuple[Callable[[Loaded], Iterator[Problem]], ...] = (resumption, stage_deadlines)
