"""`rlhf-megatron generate`: prompts in, a file of answers out, from engines that this job starts or attaches to.

The engines get the model over a verified weight sync, as in training, so that a server that was started again, or holds
other bytes, answers nothing. A prompt is answered once, whatever fails on the way; a job that was stopped or killed
goes on where it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_megatron.config.schema import DataConfig, SFTConfig
from rlhf_megatron.data.documents import has_labels, load_documents
from rlhf_megatron.data.items import PromptItem, prompt_batch
from rlhf_megatron.data.prompts import load_prompts
from rlhf_megatron.data.samples import DocumentSource
from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer
from rlhf_megatron.data.turns import THINK_END
from rlhf_megatron.generation.answer_file import AnswerFile, asked_of, digest_of
from rlhf_megatron.generation.file_weights import FileWeights, bring
from rlhf_megatron.generation.pace import Pace
from rlhf_megatron.generation.source import Served
from rlhf_megatron.resharding.transfer_dir import make_transfer_dir
from rlhf_megatron.rollout.engine import GeneratedSample, GenerateRequest
from rlhf_megatron.rollout.fleet.process import now_and_then
from rlhf_megatron.rollout.fleet.start import MIB, EngineSetup
from rlhf_megatron.rollout.requests import build_requests, sampling_params
from rlhf_megatron.stop import StopRequest
from rlhf_megatron.sync.weight_sync import WeightSync

WINDOW = 4096  # prompts that are asked at once, and whose answers are in memory
STEP = -1  # of the seeds: those of an evaluation
VERSION = 1  # of weights that are the only ones of a job
Engines = Callable[[Path, StopRequest, Callable[[str], None]], AbstractContextManager[WeightSync]]


@dataclass(frozen=True)
class GenerateJob:
    """A checked job: `run` does it."""

    setup: EngineSetup  # of the engines that it starts
    max_response_length: int
    items: tuple[PromptItem, ...]
    tokenizer: Tokenizer
    served: Served
    out: Path
    with_tokens: bool = False  # also write token ids and log-probs
    overwrite: bool = False

    @classmethod
    def of(
        cls,
        setup: EngineSetup,
        data: DataConfig,
        sft: SFTConfig | None,
        is_pairs: bool,
        served: Served,
        split: str,
        out: Path,
        with_tokens: bool = False,
        overwrite: bool = False,
    ) -> GenerateJob:
        """Read prompts, as `questions_of` does, and tokenizer. `split`: val, train or all.

        Raises ValueError for what a user can fix; starts nothing.
        """
        setup.check()
        tokenizer = load_tokenizer(setup.model.tokenizer_path or setup.model.path, setup.model.path)
        train, held_out = questions_of(data, sft, is_pairs, tokenizer)
        by_split = {"val": held_out, "train": train, "all": (*train, *held_out)}
        if not by_split[split]:
            raise ValueError(
                f"there are no prompts: data has no {split} rows; name a file of prompts, or --split train."
            )
        return cls(setup, data.max_response_length, by_split[split], tokenizer, served, out, with_tokens, overwrite)

    def asked(self) -> dict[str, Any]:
        """Return what the answers depend on, beside the weights' own bytes."""
        sampling, seed = self.setup.rollout.val_kwargs, self.setup.trainer.seed
        return (asked_of(sampling, self.max_response_length, seed) | self.of_weights()) | {
            "prompts": digest_of([item.prompt for item in self.items]),
            "stop": list(self.setup.rollout.stop),
            "with_tokens": self.with_tokens,
        }

    def of_weights(self) -> dict[str, Any]:
        """Return what tells the job's weights from others."""
        return {
            "model": os.path.abspath(self.served.name),
            "weights": self.served.identity,
            "dtype": self.setup.dtype,
        }

    @property
    def num_rows(self) -> int:
        """The rows of the file when it is done."""
        return len(self.items)

    def requests(self, start: int, count: int) -> list[GenerateRequest]:
        """Make the engines' requests for these rows."""
        sampling = self.setup.rollout.val_kwargs
        stops = self.tokenizer.stop_ids(self.setup.rollout.stop)
        params = sampling_params(sampling, self.max_response_length, stops)
        prompts = prompt_batch(self.items[start : start + count], start)
        return build_requests(prompts, sampling.n, params, self.setup.trainer.seed, STEP)

    def run(self, stop: StopRequest, report: Callable[[str], None], engines: Engines | None = None) -> dict[str, float]:
        """Answer what has no answer yet; the file is in order when this returns. `engines`: that serve its weights;
        None: it starts some.

        Returns figures: prompts, samples and tokens of this call, and its seconds. Raises EngineError when retries or
        engines run out, and RunStopped where `stop` asks for it: a call with the same arguments then goes on.
        """
        with AnswerFile(self.out, self.asked(), self.num_rows, self.overwrite) as answers:
            if answers.done:
                report(f"{len(answers.done)} of {self.num_rows} prompts have an answer already")
            figures = {"prompts": 0.0, "samples": 0.0, "tokens": 0.0, "seconds": 0.0}
            if not answers.is_complete:
                with (engines or self._engines)(answers.folder, stop, report) as sync:
                    figures = self._ask(sync, answers, report)
            answers.finish()
        return figures

    def _engines(
        self, folder: Path, stop: StopRequest, report: Callable[[str], None]
    ) -> AbstractContextManager[WeightSync]:
        return serving(self.setup, self.served, folder, stop, report)

    def _ask(self, sync: WeightSync, answers: AnswerFile, report: Callable[[str], None]) -> dict[str, float]:
        there = GeneratedSample((), (), "stop", sync.version)  # stands for a sample that is in the file
        pace = Pace(self.num_rows - len(answers.done), report)
        # Windows are of all prompts: where answers are to be repeatable, engines decode the same pieces every time.
        for start in range(0, self.num_rows, WINDOW):
            window = self.requests(start, WINDOW)
            known = {i: [there] * len(asked.seeds) for i, asked in enumerate(window) if start + i in answers.done}

            def write(first: int, groups: Sequence[Sequence[GeneratedSample]], start: int = start) -> None:
                for number, group in enumerate(groups, start + first):
                    answers.append(self.row(number, group))
                    pace.add([len(sample.token_ids) for sample in group])

            if len(known) < len(window):
                sync.fleet.generate(window, write, known)
        return pace.figures()

    def row(self, number: int, group: Sequence[GeneratedSample]) -> dict[str, Any]:
        """The file's row of a prompt."""
        item = self.items[number]
        row: dict[str, Any] = {
            "index": number,
            "source": item.source,
            "prompt": item.prompt,
            "answer": item.label,
            "responses": [self.tokenizer.decode(sample.token_ids) for sample in group],
            "finish_reasons": [sample.finish_reason for sample in group],
            "num_tokens": [len(sample.token_ids) for sample in group],
        }
        if item.extra:
            row["extra"] = item.extra
        if self.with_tokens:
            row["prompt_ids"] = list(item.prompt_ids)
            row["token_ids"] = [list(sample.token_ids) for sample in group]
            row["log_probs"] = [list(sample.log_probs) for sample in group]
        return row


def questions_of(
    data: DataConfig, sft: SFTConfig | None, is_pairs: bool, tokenizer: Tokenizer
) -> tuple[tuple[PromptItem, ...], tuple[PromptItem, ...]]:
    """Return the training and the held-out prompts. Rows of a supervised job that are no prompts with labels are asked
    for what they train: every turn of a conversation, the better answer of a pair. Its text, without thoughts, is the
    label. `sft`: of such a job; None: of another. Raises ValueError as `load_prompts` and `load_documents`.
    """
    if sft is None or not (is_pairs or sft.messages_key is not None) or has_labels(data):
        sets = load_prompts(data, tokenizer)
        return sets.train, sets.held_out
    found = load_documents(data, replace(sft, teacher_key=None), tokenizer, is_pairs)

    def items(sources: Sequence[DocumentSource]) -> Iterator[PromptItem]:
        for sample in (one.items[index] for one in sources for index in range(len(one.items))):
            document = sample.documents[0]
            for begin, end in document.trained:
                prompt_ids = document.token_ids[:begin]
                answer = tokenizer.decode(document.token_ids[begin:end]).rpartition(THINK_END)[2].strip()
                yield PromptItem(prompt_ids, tokenizer.spell(prompt_ids), answer, sample.source)

    return tuple(items(found.sources)), tuple(items(found.held_out))


def answer_along(jobs: Sequence[GenerateJob], stop: StopRequest, report: Callable[[str], None]) -> None:
    """Do the jobs of several checkpoints, in the order of their steps, with engines that are started once. Raises as
    `GenerateJob.run`."""
    with ExitStack() as stack:
        started: list[WeightSync] = []
        for job in sorted(jobs, key=lambda job: job.served.step or 0):
            served, step = job.served, job.served.step or 0

            @contextmanager
            def engines(
                folder: Path, *how: Any, served: Served = served, step: int = step, job: GenerateJob = job
            ) -> Iterator[WeightSync]:
                if started:
                    bring(started[0], served.model, step)
                else:
                    started.append(stack.enter_context(serving(job.setup, served, folder, stop, report, step)))
                yield started[0]

            job.run(stop, report, engines)


def engine_setup(setup: EngineSetup) -> EngineSetup:
    """Return the engines of a run as those of a job that trains nothing: all GPUs of the machine are theirs."""
    rollout, trainer = replace(setup.rollout, colocated=False), replace(setup.trainer, n_gpus_per_node=0)
    return replace(setup, rollout=rollout, trainer=trainer, num_senders=1)


@contextmanager
def serving(
    setup: EngineSetup,
    served: Served,
    folder: Path,
    stop: StopRequest,
    report: Callable[[str], None],
    version: int = VERSION,
) -> Iterator[WeightSync]:
    """Engines that serve those weights, verified, under that version; they end with the block. Logs are in
    `folder`/engines."""
    with ExitStack() as stack:
        transfer = stack.enter_context(make_transfer_dir(setup.transfer_parent(folder), setup.transfer_bytes()))
        servers = setup.start(folder, transfer.path, now_and_then(report, stop.check))
        stack.enter_context(servers)
        fleet = setup.fleet(servers, folder, transfer.path, stop.check)
        stack.callback(fleet.close)
        sync = WeightSync(
            FileWeights(served.model.source, served.model.hf_config),
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
            f"{len(fleet.live)} engine(s) serve {served.name}: {sent['sync/num_bytes'] / 1e6:.1f} MB, verified, in"
            f" {sent['sync/seconds']:.1f} s"
        )
        yield sync
