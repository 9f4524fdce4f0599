"""`rlhf-megatron generate`: prompts in, a file of answers out, from engines that this job starts
or attaches to.

The engines get the model over a verified weight sync, as in training, so that a server that was
started again, or holds other bytes, answers nothing. A prompt is answered once, whatever fails on
the way; a job that was stopped or killed goes on where it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from rlhf_megatron.config.schema import DataConfig, SFTConfig
from rlhf_megatron.controller.sync.weight_sync import WeightSync
from rlhf_megatron.data.assistant_turns import THINK_END
from rlhf_megatron.data.document_samples import SampleSource
from rlhf_megatron.data.document_sets import first_row_has_label, load_documents
from rlhf_megatron.data.extra_columns import (
    ExtraColumnWriter,
    LeftOutColumn,
    describe_left_out_columns,
)
from rlhf_megatron.data.opening_tokens import describe_opening_tokens
from rlhf_megatron.data.prompt_items import PromptItem, make_prompt_batch
from rlhf_megatron.data.prompts import load_prompt_sets
from rlhf_megatron.data.response_texts import ResponseReader
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.jobs.generation.answer_file import (
    AnswerFile,
    digest_texts,
    make_sampling_fingerprint,
)
from rlhf_megatron.jobs.generation.answer_progress import ProgressReporter
from rlhf_megatron.jobs.generation.context_limit import (
    RESPONSE_LENGTH_OPTION,
    find_context_limit,
    fit_response_length,
)
from rlhf_megatron.jobs.generation.file_weights import FileWeightSender, sync_file_weights
from rlhf_megatron.jobs.generation.model_source import ServedWeights, load_job_tokenizer
from rlhf_megatron.rollout.engine_interface import GeneratedSample, GenerateRequest
from rlhf_megatron.rollout.fleet.engine_setup import MIB, EngineSetup
from rlhf_megatron.rollout.fleet.server_process import make_throttled_progress
from rlhf_megatron.rollout.rollout_requests import build_generate_requests, make_sampling_params
from rlhf_megatron.rollout.transports.transfer_dir import make_transfer_directory
from rlhf_megatron.stop import StopRequest

WINDOW_PROMPTS = 4096  # prompts that are asked at once, and whose answers are in memory
STEP = -1  # of the seeds: those of an evaluation
ONLY_VERSION = 1  # of weights that are the only ones of a job
ServeEngines = Callable[
    [Path, StopRequest, Callable[[str], None]], AbstractContextManager[WeightSync]
]


@dataclass(frozen=True)
class AnswerGenerationJob:
    """A checked job that answers prompts with engines; `run` does the work."""

    keeps_messages: ClassVar[bool] = False  # prompts are read with their messages, for episodes

    setup: EngineSetup  # of the engines that it starts
    max_response_length: int
    items: tuple[PromptItem, ...]
    tokenizer: Tokenizer
    served_weights: ServedWeights
    output_path: Path
    writes_tokens: bool = False  # also write token ids and log-probs
    overwrite: bool = False
    opening_note: str = ""  # what the prompts begin with, in words
    length_note: str = ""  # why responses are shorter than the default, in words
    template_prefix: str = ""  # what the chat template writes of each answer
    left_out_columns: tuple[LeftOutColumn, ...] = ()  # what rewards cannot read of the rows

    @classmethod
    def from_config(
        cls,
        setup: EngineSetup,
        data: DataConfig,
        sft: SFTConfig | None,
        is_pairs: bool,
        served_weights: ServedWeights,
        split: str,
        output_path: Path,
        writes_tokens: bool = False,
        overwrite: bool = False,
        is_default_length: bool = False,
    ) -> AnswerGenerationJob:
        """Return a job with the prompts of a configuration, read as by `load_questions`, and the
        tokenizer. `split` is "val", "train" or "all". Nothing is started.

        `is_default_length`: nobody has set the length of responses, so that responses may be
        shorter where the model's context asks for it. Raise ValueError for errors that a user can
        fix, such as a split without prompts, or responses for which the context has no room.
        """
        setup.check_servers()
        tokenizer = load_job_tokenizer(setup.model, served_weights)
        extra_writer = ExtraColumnWriter(data.extra_columns)
        train, held_out, template_prefix = load_questions(
            data, sft, is_pairs, tokenizer, extra_writer, cls.keeps_messages
        )
        by_split = {"val": held_out, "train": train, "all": (*train, *held_out)}
        if not by_split[split]:
            raise ValueError(
                f"there are no prompts: data has no {split} rows; name a file of prompts, or"
                " --split train."
            )
        items = by_split[split]
        limit = find_context_limit(served_weights.model.hf_config, setup.rollout)
        max_response_length = fit_response_length(
            limit,
            [len(item.prompt_ids) for item in items],
            data.max_response_length,
            is_default_length,
        )
        length_note = ""
        if max_response_length < data.max_response_length:
            length_note = (
                f"responses have at most {max_response_length} tokens, which {limit} leaves behind"
                f" the longest prompt; set less with {RESPONSE_LENGTH_OPTION}"
            )
        return cls(
            setup,
            max_response_length,
            items,
            tokenizer,
            served_weights,
            output_path,
            writes_tokens,
            overwrite,
            describe_opening_tokens(tokenizer, data, items[0].prompt_ids, "prompts"),
            length_note,
            template_prefix,
            extra_writer.list_left_out_columns(),
        )

    def list_labels(self) -> list[tuple[str, str, str]]:
        """Return (source, label, extra) of each prompt."""
        return [(item.source, item.label, item.extra) for item in self.items]

    def make_fingerprint(self) -> dict[str, Any]:
        """Return everything that the answers depend on, besides the bytes of the weights."""
        sampling = self.setup.rollout.val_kwargs
        seed = self.setup.trainer.seed
        fingerprint = (
            make_sampling_fingerprint(sampling, self.max_response_length, seed)
            | self.make_weights_fingerprint()
        ) | {
            "prompts": digest_texts([item.prompt for item in self.items]),
            "stop": list(self.setup.rollout.stop),
            "with_tokens": self.writes_tokens,
        }
        # only where the tokenizer wrote ids before the text, so that jobs which were begun without
        # such ids can continue
        opening_ids = self.tokenizer.opening_ids
        first = self.items[0]
        if opening_ids and first.prompt_ids == (
            *opening_ids,
            *self.tokenizer.encode(first.prompt),
        ):
            fingerprint["opening_ids"] = list(opening_ids)
        return fingerprint

    def make_weights_fingerprint(self) -> dict[str, Any]:
        """Return the values that distinguish the job's weights from others: path, identity of the
        files, and dtype.
        """
        return {
            "model": os.path.abspath(self.served_weights.path_name),
            "weights": self.served_weights.identity,
            "dtype": self.setup.dtype,
        }

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the complete file: one for each prompt, whatever the number
        of samples a prompt.
        """
        return len(self.items)

    def make_requests(self, start: int, num_rows: int) -> list[GenerateRequest]:
        """Return the engines' requests for the prompts from number `start` on, at most
        `num_rows`.
        """
        sampling = self.setup.rollout.val_kwargs
        stops = self.tokenizer.make_stop_token_ids(self.setup.rollout.stop)
        params = make_sampling_params(sampling, self.max_response_length, stops)
        prompts = make_prompt_batch(self.items[start : start + num_rows], start)
        return build_generate_requests(prompts, sampling.n, params, self.setup.trainer.seed, STEP)

    def run(
        self,
        stop: StopRequest,
        report: Callable[[str], None],
        serve_engines: ServeEngines | None = None,
    ) -> dict[str, float]:
        """Answer all prompts that have no answer yet; the file is in order when this returns.
        `serve_engines` opens engines that serve the job's weights; None starts some for this call.

        Return the figures of this call: prompts, samples, tokens and seconds. Raise EngineError
        when retries or engines run out, and RunStopped when `stop` is requested; a call with the
        same arguments then continues.
        """
        if note := describe_left_out_columns(self.left_out_columns):
            report(note)
        with AnswerFile(
            self.output_path, self.make_fingerprint(), self.num_rows, self.overwrite
        ) as answers:
            if answers.answered_indices:
                report(
                    f"{len(answers.answered_indices)} of {self.num_rows} prompts have an"
                    " answer already"
                )
            for note in (self.opening_note, self.length_note):
                if note:
                    report(note)
            figures = {"prompts": 0.0, "samples": 0.0, "tokens": 0.0, "seconds": 0.0}
            if not answers.is_complete:
                with (serve_engines or self._serve_own_engines)(
                    answers.job_folder, stop, report
                ) as sync:
                    figures = self._generate_missing_answers(sync, answers, report)
            answers.write_ordered_rows()
        return figures

    def _serve_own_engines(
        self, folder: Path, stop: StopRequest, report: Callable[[str], None]
    ) -> AbstractContextManager[WeightSync]:
        """Return a context manager that starts engines for the job's weights, as `serve_weights`
        does.
        """
        return serve_weights(self.setup, self.served_weights, folder, stop, report)

    def _generate_missing_answers(
        self, sync: WeightSync, answers: AnswerFile, report: Callable[[str], None]
    ) -> dict[str, float]:
        """Generate the answers that the file lacks, window by window, and append each as it comes.
        Return the figures of this call.
        """
        # stands for a sample that is in the file
        there = GeneratedSample((), (), "stop", sync.policy_version)
        pace = ProgressReporter(self.num_rows - len(answers.answered_indices), report)
        # Windows are of all prompts: where answers are to be repeatable, engines decode the same
        # pieces every time.
        for start in range(0, self.num_rows, WINDOW_PROMPTS):
            window = self.make_requests(start, WINDOW_PROMPTS)
            known = {
                i: [there] * len(asked.seeds)
                for i, asked in enumerate(window)
                if start + i in answers.answered_indices
            }

            def append_groups(
                first_row: int, groups: Sequence[Sequence[GeneratedSample]], start: int = start
            ) -> None:
                """Append the rows of answered prompts, which begin at `first_row` of the window,
                and count them.
                """
                for number, group in enumerate(groups, start + first_row):
                    answers.append(self.make_answer_row(number, group))
                    pace.count_prompt([len(sample.token_ids) for sample in group])

            if len(known) < len(window):
                sync.fleet.generate(window, append_groups, known)
        return pace.collect_figures()

    def make_answer_row(
        self, prompt_number: int, group: Sequence[GeneratedSample]
    ) -> dict[str, Any]:
        """Return the row of the file for a prompt and its samples, with what a reward may read of
        the responses beyond their texts.
        """
        item = self.items[prompt_number]
        reader = ResponseReader(self.tokenizer, self.template_prefix)
        responses = [self.tokenizer.decode(sample.token_ids) for sample in group]
        special_tokens = [
            reader.locate_special_tokens(sample.token_ids, text)
            for sample, text in zip(group, responses, strict=True)
        ]
        row: dict[str, Any] = {
            "index": prompt_number,
            "source": item.source,
            "prompt": item.prompt,
            "answer": item.label,
            "responses": responses,
            "finish_reasons": [sample.finish_reason for sample in group],
            "num_tokens": [len(sample.token_ids) for sample in group],
        }
        if item.extra:
            row["extra"] = item.extra
        if prefix := reader.find_prefix(item.prompt):
            row["response_prefix"] = prefix
        if any(special_tokens):
            row["special_tokens"] = [
                [{"position": position, "token": name} for position, name in places]
                for places in special_tokens
            ]
        if self.writes_tokens:
            row["prompt_ids"] = list(item.prompt_ids)
            row["token_ids"] = [list(sample.token_ids) for sample in group]
            row["log_probs"] = [list(sample.log_probs) for sample in group]
        return row


def load_questions(
    data: DataConfig,
    sft: SFTConfig | None,
    is_pairs: bool,
    tokenizer: Tokenizer,
    extra_writer: ExtraColumnWriter | None = None,
    keeps_messages: bool = False,
) -> tuple[tuple[PromptItem, ...], tuple[PromptItem, ...], str]:
    """Return (training prompts, held-out prompts, what the chat template writes of each answer).
    `extra_writer` chooses and counts the other columns, and `keeps_messages` keeps the messages of
    prompts, as in `load_prompt_sets`.

    Rows of a supervised job that are no prompts with labels become prompts for the texts that they
    train: every turn of a conversation, the better answer of a pair. That text, without thoughts,
    is the label; what the template writes of it is not told then. `sft` is the section of such a
    job, or None for other jobs. Raise ValueError as `load_prompt_sets` and `load_documents` do.
    """
    reads_other_rows = sft is not None and (
        is_pairs or sft.messages_key is not None or sft.text_key is not None
    )
    if sft is None or not reads_other_rows or first_row_has_label(data):
        sets = load_prompt_sets(
            data, tokenizer, extra_writer=extra_writer, keeps_messages=keeps_messages
        )
        return sets.train_items, sets.held_out_items, sets.template_prefix
    if sft.text_key is not None and not is_pairs:
        raise ValueError(
            f"the run trains on plain texts (sft.text_key is {sft.text_key}), which ask nothing;"
            " name a file of prompts."
        )
    document_sets = load_documents(data, replace(sft, teacher_key=None), tokenizer, is_pairs)

    def iterate_items(sources: Sequence[SampleSource]) -> Iterator[PromptItem]:
        """Yield a prompt for each stretch of a document that trains, with the text of the stretch
        as its label.
        """
        for sample in (
            source.items[index] for source in sources for index in range(len(source.items))
        ):
            document = sample.documents[0]
            for begin, end in document.trained_spans:
                prompt_ids = document.token_ids[:begin]
                answer = (
                    tokenizer.decode(document.token_ids[begin:end]).rpartition(THINK_END)[2].strip()
                )
                yield PromptItem(
                    prompt_ids,
                    tokenizer.decode_with_special_tokens(prompt_ids),
                    answer,
                    sample.source,
                )

    train_items = tuple(iterate_items(document_sets.sources))
    return train_items, tuple(iterate_items(document_sets.held_out_sources)), ""


def answer_with_checkpoints(
    jobs: Sequence[AnswerGenerationJob], stop: StopRequest, report: Callable[[str], None]
) -> None:
    """Run the jobs of several checkpoints, in the order of their steps, with engines that are
    started once and get the weights of each. Raise the errors of `AnswerGenerationJob.run`.
    """
    with ExitStack() as stack:
        started: list[WeightSync] = []
        for job in sorted(jobs, key=lambda job: job.served_weights.step or 0):
            served = job.served_weights
            step = job.served_weights.step or 0

            @contextmanager
            def reuse_engines(
                folder: Path,
                *engine_arguments: Any,
                served_weights: ServedWeights = served,
                step: int = step,
                job: AnswerGenerationJob = job,
            ) -> Iterator[WeightSync]:
                """Yield the engines with the weights of this job's checkpoint: start them for the
                first job, and sync the weights for later ones.
                """
                if started:
                    sync_file_weights(started[0], served_weights.model, step)
                else:
                    started.append(
                        stack.enter_context(
                            serve_weights(job.setup, served_weights, folder, stop, report, step)
                        )
                    )
                yield started[0]

            job.run(stop, report, reuse_engines)


def make_standalone_engine_setup(setup: EngineSetup) -> EngineSetup:
    """Return the engine setup of a run for a job that trains nothing: the engines have all GPUs of
    the machine.
    """
    rollout = replace(setup.rollout, colocated=False)
    trainer = replace(setup.trainer, n_gpus_per_node=0)
    return replace(setup, rollout=rollout, trainer=trainer, num_senders=1)


@contextmanager
def serve_weights(
    setup: EngineSetup,
    served_weights: ServedWeights,
    folder: Path,
    stop: StopRequest,
    report: Callable[[str], None],
    version: int = ONLY_VERSION,
) -> Iterator[WeightSync]:
    """Start engines that serve these weights, verified, under this version, and yield their weight
    sync; stop the engines at the end of the block. Logs go to `folder`/engines.
    """
    with ExitStack() as stack:
        transfer = stack.enter_context(
            make_transfer_directory(
                setup.get_transfer_parent(folder), setup.compute_transfer_bytes()
            )
        )
        servers = setup.start_servers(
            folder, transfer.path, make_throttled_progress(report, stop.raise_if_requested)
        )
        stack.enter_context(servers)
        fleet = setup.make_fleet(servers, folder, transfer.path, stop.raise_if_requested)
        stack.callback(fleet.close)
        sync = WeightSync(
            FileWeightSender(served_weights.model.source, served_weights.model.hf_config),
            fleet,
            transfer.path,
            setup.rollout.update_weights_bucket_megabytes * MIB,
            setup.dtype,
            version - 1,
            transport=setup.rollout.weight_transport,
            model_path=Path(setup.model.path),
        )
        sent = sync()
        report(
            f"{len(fleet.live_engines)} engine(s) serve {served_weights.path_name}:"
            f" {sent['sync/num_bytes'] / 1e6:.1f} MB, verified, in {sent['sync/seconds']:.1f} s"
        )
        yield sync
