"""TensorBoard event files: scalars, histograms, text samples, and the settings of the run as hyper-parameters."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_megatron.observe.loggers import LOGGERS, BatchView, Logger, is_view_step

if TYPE_CHECKING:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    from rlhf_megatron.observe.report.files import Sample
    from rlhf_megatron.observe.run_facts import RunFacts

MAX_TEXT = 2000  # characters of a prompt or a response
FLUSH_S = 5


def _quiet(error: threading.ExceptHookArgs, usual: Callable[[Any], object] = threading.excepthook) -> None:
    """Keep tracebacks of TensorBoard's thread off the terminal: its next call raises the same error."""
    if type(error.thread).__name__ != "_AsyncWriterThread":
        usual(error)


@LOGGERS.register("tensorboard")
class TensorboardLogger(Logger):
    """Files under `tensorboard/<run>/`, so that viewers name the run. TensorBoard's own thread writes them."""

    def __init__(self, run_dir: Path, total_steps: int, facts: RunFacts) -> None:
        from torch.utils.tensorboard import SummaryWriter

        resumed = facts.resumed_from_step
        purged = None if resumed is None else resumed + 1  # the viewer drops what a former process wrote from there on
        threading.excepthook = _quiet
        self._writer = SummaryWriter(str(run_dir / "tensorboard" / facts.name), flush_secs=FLUSH_S, purge_step=purged)
        self._total_steps = total_steps
        self._has_settings = bool(facts.settings)
        if facts.settings:
            self._write_settings(facts)
        self._writer.flush()  # raises where the disk is full

    def row(self, kind: str, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def batch(self, step: int, view: BatchView) -> None:
        if not is_view_step(step, self._total_steps):
            return
        for name, values in view.distributions():
            self._writer.add_histogram(f"histogram/{name}", values, step)
        if view.samples:
            self._writer.add_text("samples", "\n\n---\n\n".join(map(as_markdown, view.samples)), step)

    def close(self, is_failed: bool) -> None:
        if self._has_settings:
            self._end_session(is_failed)
        self._writer.close()

    def _write_settings(self, facts: RunFacts) -> None:
        """Write the settings for the HPARAMS tab, which takes the last value of each scalar as the metrics of this run.

        Only the start of the session is written and no list of hyper-parameters for all runs: the viewer takes such a
        list from the first run that it finds, and would not show what other runs set.
        """
        from tensorboard.plugins.hparams import metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

        start = SessionStartInfo(start_time_secs=time.time())
        for key, value in facts.settings.items():
            field = {bool: "bool_value", str: "string_value"}.get(type(value), "number_value")
            setattr(start.hparams[key], field, value)
        self._write_session(metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=start))
        lines = "".join(f"| `{key}` | `{value}` |\n" for key, value in facts.settings.items())
        self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{lines}", 0)

    def _end_session(self, is_failed: bool) -> None:
        from tensorboard.plugins.hparams import metadata
        from tensorboard.plugins.hparams.api_pb2 import Status
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

        status = Status.Value("STATUS_FAILURE" if is_failed else "STATUS_SUCCESS")
        end = SessionEndInfo(status=status, end_time_secs=time.time())
        self._write_session(metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=end))

    def _write_session(self, tag: str, data: HParamsPluginData) -> None:
        """Write a session as tensorboard.plugins.hparams.summary does, which cannot be imported without tensorflow."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import metadata

        summary_metadata = metadata.create_summary_metadata(data)
        value = Summary.Value(tag=tag, metadata=summary_metadata, tensor=metadata.NULL_TENSOR)
        assert self._writer.file_writer is not None
        self._writer.file_writer.add_summary(Summary(value=[value]))


def as_markdown(sample: Sample) -> str:
    """Texts as code blocks, so that nothing in them is taken for markup."""
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:g}"
    heading = f"**{sample.kind}**: {reward} ({sample.status}), {sample.num_tokens} tokens, {sample.finish_reason}"
    texts = (("prompt", sample.prompt), ("response", sample.response), ("label", sample.label))
    return "\n\n".join([heading, *(f"{name}\n\n{_block(text)}" for name, text in texts)])


def _block(text: str) -> str:
    shown = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} … ({len(text)} characters)"
    return "\n".join(f"    {line}" for line in shown.splitlines()) or "    "
