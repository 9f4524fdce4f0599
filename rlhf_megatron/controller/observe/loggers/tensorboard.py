"""TensorBoard event files: scalars, histograms, text samples, and the settings of the run
as hyper-parameters.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_megatron.controller.observe.loggers import (
    LOGGERS,
    BatchView,
    RunLogger,
    is_batch_view_step,
    shorten_error_text,
)

if TYPE_CHECKING:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    from rlhf_megatron.controller.observe.report.run_files import HeldOutSample, LoggedSample
    from rlhf_megatron.controller.observe.run_facts import RunFacts

MAX_TEXT_CHARACTERS = 2000  # characters of a prompt or a response
FLUSH_S = 5


def _silence_writer_thread_error(
    hook_args: threading.ExceptHookArgs,
    default_hook: Callable[[Any], object] = threading.excepthook,
) -> None:
    """Drop the tracebacks of TensorBoard's writer thread, whose next call raises the same error;
    pass other errors on to `default_hook`.
    """
    if type(hook_args.thread).__name__ != "_AsyncWriterThread":
        default_hook(hook_args)


@LOGGERS.register("tensorboard")
class TensorboardLogger(RunLogger):
    """Files under `tensorboard/<run>/`, so that viewers name the run. TensorBoard's own
    thread writes them.
    """

    def __init__(self, run_dir: Path, total_steps: int, facts: RunFacts) -> None:
        """Open the event file, and write the run's settings. In a resumed run the viewer drops the
        rows after the resumed step.
        """
        from torch.utils.tensorboard import SummaryWriter

        resumed = facts.resumed_from_step
        # the viewer drops what a former process wrote from there on
        purged = None if resumed is None else resumed + 1
        threading.excepthook = _silence_writer_thread_error
        self._writer = SummaryWriter(
            str(run_dir / "tensorboard" / facts.run_name), flush_secs=FLUSH_S, purge_step=purged
        )
        self._total_steps = total_steps
        self._has_settings = bool(facts.settings)
        if facts.settings:
            self._write_session_start(facts)
        self._writer.flush()  # raises where the disk is full

    @classmethod
    def check_setup(cls) -> None:
        """Raise ValueError where tensorboard cannot be loaded, or cannot write a file."""
        try:
            from torch.utils.tensorboard import SummaryWriter

            with tempfile.TemporaryDirectory() as directory, SummaryWriter(directory) as writer:
                writer.add_scalar("check", 1.0, 0)
                writer.flush()
        except Exception as error:
            raise ValueError(
                f"tensorboard cannot be used: {shorten_error_text(error)}. Install it again, or"
                " take tensorboard out of trainer.logger."
            ) from error

    def log_metrics(
        self, row_kind: str, step: int, run_seconds: float, metrics: Mapping[str, float]
    ) -> None:
        """Write a scalar for each metric."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def log_batch(self, step: int, batch_view: BatchView) -> None:
        """Write histograms and texts of samples, at the steps of `is_batch_view_step`."""
        if not is_batch_view_step(step, self._total_steps):
            return
        for name, values in batch_view.iter_distributions():
            self._writer.add_histogram(f"histogram/{name}", values, step)
        if batch_view.samples:
            self._writer.add_text(
                "samples",
                "\n\n---\n\n".join(map(format_sample_as_markdown, batch_view.samples)),
                step,
            )

    def log_held_out_samples(self, step: int, samples: Sequence[HeldOutSample]) -> None:
        """Write the texts of the samples."""
        self._writer.add_text(
            "held_out_samples", "\n\n---\n\n".join(map(format_held_out_as_markdown, samples)), step
        )

    def close(self, is_failed: bool) -> None:
        """Write whether the run failed, and close the file."""
        if self._has_settings:
            self._write_session_end(is_failed)
        self._writer.close()

    def _write_session_start(self, facts: RunFacts) -> None:
        """Write the settings for the HPARAMS tab, which takes the last value of each scalar as the
        metrics of this run.

        Only the start of the session is written and no list of hyper-parameters for all runs: the
        viewer takes such a list from the first run that it finds, and would not show what
        other runs set.
        """
        from tensorboard.plugins.hparams import metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

        start = SessionStartInfo(start_time_secs=time.time())
        for key, value in facts.settings.items():
            field = {bool: "bool_value", str: "string_value"}.get(type(value), "number_value")
            setattr(start.hparams[key], field, value)
        self._write_session_summary(
            metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=start)
        )
        lines = "".join(f"| `{key}` | `{value}` |\n" for key, value in facts.settings.items())
        self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{lines}", 0)

    def _write_session_end(self, is_failed: bool) -> None:
        """Write the end of the session for the HPARAMS tab."""
        from tensorboard.plugins.hparams import metadata
        from tensorboard.plugins.hparams.api_pb2 import Status
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

        status = Status.Value("STATUS_FAILURE" if is_failed else "STATUS_SUCCESS")
        end = SessionEndInfo(status=status, end_time_secs=time.time())
        self._write_session_summary(
            metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=end)
        )

    def _write_session_summary(self, tag: str, plugin_data: HParamsPluginData) -> None:
        """Write a session as tensorboard.plugins.hparams.summary does, which cannot be imported
        without tensorflow.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import metadata

        summary_metadata = metadata.create_summary_metadata(plugin_data)
        value = Summary.Value(tag=tag, metadata=summary_metadata, tensor=metadata.NULL_TENSOR)
        assert self._writer.file_writer is not None
        self._writer.file_writer.add_summary(Summary(value=[value]))


def format_sample_as_markdown(sample: LoggedSample) -> str:
    """Return a sample as Markdown. Its texts are code blocks, so that nothing in them is taken for
    markup.
    """
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:g}"
    heading = (
        f"**{sample.kind}**: {reward} ({sample.status}), {sample.num_tokens}"
        f" tokens, {sample.finish_reason}"
    )
    return _format_texts_as_markdown(heading, sample)


def format_held_out_as_markdown(sample: HeldOutSample) -> str:
    """Return a held-out sample as Markdown. Its texts are code blocks, so that nothing in them is
    taken for markup.
    """
    score = "no score" if sample.score is None else f"score {sample.score:g}"
    heading = (
        f"**item {sample.item}**: {score} ({sample.status}), {sample.num_tokens} tokens; set\n\n"
        f"{_format_code_block(sample.source)}"
    )
    return _format_texts_as_markdown(heading, sample)


def _format_texts_as_markdown(heading: str, sample: LoggedSample | HeldOutSample) -> str:
    """Return the heading, and prompt, response and label as code blocks."""
    texts = (("prompt", sample.prompt), ("response", sample.response), ("label", sample.label))
    return "\n\n".join(
        [heading, *(f"{name}\n\n{_format_code_block(text)}" for name, text in texts)]
    )


def _format_code_block(text: str) -> str:
    """Return the text as an indented code block, cut after MAX_TEXT_CHARACTERS."""
    shown = (
        text
        if len(text) <= MAX_TEXT_CHARACTERS
        else f"{text[:MAX_TEXT_CHARACTERS]} … ({len(text)} characters)"
    )
    return "\n".join(f"    {line}" for line in shown.splitlines()) or "    "
