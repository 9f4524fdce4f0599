"""`rlhf-megatron generate`: prompts in, a file of answers out, from engines that this job starts or attaches to.

The engines get the model over a verified weight sync, as in training, so that a server that was started again, or holds
other bytes, answers nothing. A prompt is answered once, whatever fails on the way; a job that was stopped or killed
goes on where it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_megatron.config.schema import RunConfig, SamplingConfig
from rlhf_megatron.data.items import PromptItem, prompt_batch
from rlhf_megatron.data.prompts import load_prompts
from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer
from rlhf_megatron.generation.answer_file import AnswerFile, digest_of
from rlhf_megatron.generation.file_weights import FileWeights
from rlhf_megatron.generation.source import Served
from rlhf_megatron.resharding.transfer_dir import make_transfer_dir
from rlhf_megatron.rollout.engine import GeneratedSample
from rlhf_megatron.rollout.fleet.fleet import EngineFleet
from rlhf_megatron.rollout.fleet.process import now_and_then
from rlhf_megatron.rollout.fleet.start import MIB, EngineSetup
from rlhf_megatron.rollout.requests import build_requests, sampling_params
from rlhf_megatron.stop import StopRequest
from rlhf_megatron.sync.weight_sync import WeightSync

WINDOW = 4096  # prompts that are asked at once, and whose answers are in memory
STEP = -1  # of the seeds: those of an evaluation
VERSION = 1  # of the weights: the first sync of a job is its only one
_ANSWERED = GeneratedSample((), (), "stop", VERSION)  # stands for a sample that is in the file


@dataclass(frozen=True)
class GenerateJob:
    """A checked job: `run` does it."""

    config: RunConfig
    items: tuple[PromptItem, ...]
    tokenizer: Tokenizer
    served: Served
    out: Path
    with_tokens: bool = False  # also write token ids and log-probs
    overwrite: bool = False

    @classmethod
    def of(
        cls,
        config: RunConfig,
        served: Served,
        split: str,
        out: Path,
        with_tokens: bool = False,
        overwrite: bool = False,
    ) -> GenerateJob:
        """Read prompts and tokenizer. `split`: val, train or all.

        Raises ValueError for what a user can fix; starts nothing.
        """
        engine_setup(EngineSetup.of(config)).check()
        tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path, config.model.path)
        sets = load_prompts(config.data, tokenizer)
        by_split = {"val": sets.held_out, "train": sets.train, "all": (*sets.train, *sets.held_out)}
        if not by_split[split]:
            raise ValueError(
                f"there are no prompts: data has no {split} rows; name a file of prompts, or --split train."
            )
        return cls(config, by_split[split], tokenizer, served, out, with_tokens, overwrite)

    def asked(self) -> dict[str, Any]:
        """What the answers depend on, beside the weights' own bytes."""
        config, sampling = self.config, self.config.rollout.val_kwargs
        return {
            "model": os.path.abspath(self.served.name),
            "weights": self.served.identity,
            "prompts": digest_of([item.prompt for item in self.items]),
            "sampling": {name: getattr(sampling, name) for name in SamplingConfig.__dataclass_fields__},
            "max_response_length": config.data.max_response_length,
            "stop": list(config.rollout.stop),
            "seed": config.trainer.seed,
            "dtype": config.rollout.dtype or config.model.dtype,
            "with_tokens": self.with_tokens,
        }

    def run(self, stop: StopRequest, report: Callable[[str], None]) -> dict[str, float]:
        """Answer what has no answer yet; the file is in order when this returns.

        Returns figures: prompts, samples and tokens of this call, and its seconds. Raises EngineError when retries or
        engines run out, and RunStopped where `stop` asks for it: a call with the same arguments then goes on.
        """
        with AnswerFile(self.out, self.asked(), len(self.items), self.overwrite) as answers:
            if answers.done:
                report(f"{len(answers.done)} of {len(self.items)} prompts have an answer already")
            figures = {"prompts": 0.0, "samples": 0.0, "tokens": 0.0, "seconds": 0.0}
            if not answers.is_complete:
                with serving(
                    engine_setup(EngineSetup.of(self.config)), self.served, answers.folder, stop, report
                ) as fleet:
                    figures = self._ask(fleet, answers, report)
            answers.finish()
        return figures

    def _ask(self, fleet: EngineFleet, answers: AnswerFile, report: Callable[[str], None]) -> dict[str, float]:
        pace = Pace(len(self.items) - len(answers.done), report)
        sampling, seed = self.config.rollout.val_kwargs, self.config.trainer.seed
        stops = self.tokenizer.stop_ids(self.config.rollout.stop)
        params = sampling_params(sampling, self.config.data.max_response_length, stops)
        # Windows are of all prompts: where answers are to be repeatable, engines decode the same pieces every time.
        for start in range(0, len(self.items), WINDOW):
            window = prompt_batch(self.items[start : start + WINDOW], start)
            requests = build_requests(window, sampling.n, params, seed, STEP)
            known = {i: [_ANSWERED] * sampling.n for i in range(len(window)) if start + i in answers.done}

            def write(first: int, groups: Sequence[Sequence[GeneratedSample]], start: int = start) -> None:
                for number, group in enumerate(groups, start + first):
                    answers.append(self._row(number, group))
                    pace.add(group)

            if len(known) < len(window):
                fleet.generate(requests, write, known)
        return pace.figures()

    def _row(self, number: int, group: Sequence[GeneratedSample]) -> dict[str, Any]:
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


def engine_setup(setup: EngineSetup) -> EngineSetup:
    """The engines of a run as those of a job that trains nothing: all GPUs of the machine are theirs."""
    rollout, trainer = replace(setup.rollout, colocated=False), replace(setup.trainer, n_gpus_per_node=0)
    return replace(setup, rollout=rollout, trainer=trainer, num_senders=1)


@contextmanager
def serving(
    setup: EngineSetup, served: Served, folder: Path, stop: StopRequest, report: Callable[[str], None]
) -> Iterator[EngineFleet]:
    """Engines that serve those weights, verified; they end with the block. Logs are in `folder`/engines."""
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
            transport=setup.rollout.weight_transport,
            model_path=Path(setup.model.path),
        )
        sent = sync()
        report(
            f"{len(fleet.live)} engine(s) serve {served.name}: {sent['sync/num_bytes'] / 1e6:.1f} MB, verified, in"
            f" {sent['sync/seconds']:.1f} s"
        )
        yield fleet


class Pace:
    """Tells every ten seconds how far the job is, how fast, and when it will be done."""

    EVERY_S = 10.0

    def __init__(self, num_prompts: int, report: Callable[[str], None]) -> None:
        self._report, self._num_prompts = report, num_prompts
        self._start = self._told = time.monotonic()
        self._done = self._samples = self._tokens = 0

    def add(self, group: Sequence[GeneratedSample]) -> None:
        """Count one answered prompt."""
        self._done += 1
        self._samples += len(group)
        self._tokens += sum(len(sample.token_ids) for sample in group)
        now = time.monotonic()
        if now - self._told >= self.EVERY_S or self._done == self._num_prompts:
            self._told = now
            seconds = max(now - self._start, 1e-9)
            left = seconds / self._done * (self._num_prompts - self._done)
            self._report(
                f"{self._done} of {self._num_prompts} prompts, {self._tokens / seconds:.0f} tokens/s,"
                f" {_clock(seconds)} gone, {_clock(left)} left"
            )

    def figures(self) -> dict[str, float]:
        """Prompts, samples and tokens so far, and seconds."""
        counts = {"prompts": self._done, "samples": self._samples, "tokens": self._tokens}
        return {name: float(count) for name, count in counts.items()} | {"seconds": time.monotonic() - self._start}


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
