"""The checks of `train` and `config check` that need nothing but settings, and more of the package
than the rules may import. None of them imports torch, reads a file or looks at this machine.
"""

from __future__ import annotations

from rlhf_megatron.config.rules import PreflightCheck
from rlhf_megatron.controller.observe.metrics.former_metric_names import find_current_name
from rlhf_megatron.controller.observe.metrics.metric_catalogue import find_metric


def list_settings_checks() -> list[PreflightCheck]:
    """Return the checks that `config check --no-files` makes beside the rules."""
    return [
        PreflightCheck(("trainer.keep_best",), lambda c: _check_metric_name(c.trainer.keep_best))
    ]


def _check_metric_name(metric_name: str | None) -> None:
    """Raise ValueError where `trainer.keep_best` names no metric of a run."""
    if metric_name is not None and find_metric(find_current_name(metric_name)) is None:
        raise ValueError(
            f"trainer.keep_best ({metric_name}) is no metric of a run; docs/metrics.md lists them,"
            " such as val/accuracy or critic/rewards/mean."
        )
