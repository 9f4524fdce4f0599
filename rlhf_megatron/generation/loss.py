"""`rlhf-megatron evaluate SOURCE --loss FILE`: the loss of a model over a file, from the engines that also generate.

A document's loss is the negative log-prob of what would train in the job `sft`: answers, an assistant's turns, or of
plain texts every token but the first. A mean counts tokens, as the held-out loss of that job does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import exp
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_megatron.config.schema import DataConfig, SFTConfig
from rlhf_megatron.data.documents import load_held_out
from rlhf_megatron.data.samples import Sample
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.evaluation.sample_figures import SEED, bootstrap
from rlhf_megatron.generation.answer_file import digest_of, read_answers
from rlhf_megatron.generation.job import GenerateJob
from rlhf_megatron.generation.source import Served
from rlhf_megatron.rollout.engine import GeneratedSample, GenerateRequest, SamplingParams
from rlhf_megatron.rollout.fleet.start import EngineSetup


@dataclass(frozen=True)
class LossJob(GenerateJob):
    """A checked job: `run` writes a row a document, with the same promises as for answers."""

    documents: tuple[Sample, ...] = ()

    @classmethod
    def of_files(
        cls,
        setup: EngineSetup,
        data: DataConfig,
        sft: SFTConfig,
        is_pairs: bool,
        served: Served,
        out: Path,
        overwrite: bool = False,
    ) -> LossJob:
        """Read the held-out documents of a configuration. Raises ValueError for what a user can fix."""
        setup.check()
        tokenizer = load_tokenizer(setup.model.tokenizer_path or setup.model.path, setup.model.path)
        documents = load_held_out(data, sft, tokenizer, is_pairs)
        if not documents:
            raise ValueError("there are no documents: name files behind --loss, or a run that holds some out.")
        # Each is asked for once, as it stands: no setting of the sampling counts.
        once = replace(setup.rollout, val_kwargs=replace(setup.rollout.val_kwargs, n=1))
        setup = replace(setup, rollout=once)
        return cls(setup, data.max_response_length, (), tokenizer, served, out, False, overwrite, documents)

    def asked(self) -> dict[str, Any]:
        """Return what the losses depend on, beside the weights' own bytes."""
        documents = digest_of([repr((sample.source, sample.documents)) for sample in self.documents])
        return self.of_weights() | {"documents": documents}

    @property
    def num_rows(self) -> int:
        return len(self.documents)

    def requests(self, start: int, count: int) -> list[GenerateRequest]:
        """One a document: the tokens from the first one that counts are scored."""
        params, found = SamplingParams(0), []
        for sample in self.documents[start : start + count]:
            ids, first = sample.documents[0].token_ids, sample.documents[0].trained[0][0]
            found.append(GenerateRequest(ids, (0,), params, len(ids) - first))
        return found

    def row(self, number: int, group: Sequence[GeneratedSample]) -> dict[str, Any]:
        """The sum of a document's losses, nats, and the tokens that it is of."""
        sample, log_probs = self.documents[number], group[0].log_probs
        spans = sample.documents[0].trained
        first = spans[0][0]
        values = [log_probs[place - first] for begin, end in spans for place in range(begin, end)]
        return {
            "index": number,
            "source": sample.source,
            "responses": [],
            "num_tokens": [len(values)],
            "loss": -float(np.sum(np.asarray(values, np.float64))),
        }


@dataclass(frozen=True)
class SetLoss:
    """The loss of the documents of one source, or of all."""

    name: str
    num_documents: int
    num_tokens: int
    loss: float  # nats a token, over all tokens
    low: float | None  # 95 % interval: the 2.5 and 97.5 % quantiles over resampled documents; None for a single one
    high: float | None
    perplexity: float  # exp(loss)


def losses_of(path: Path) -> list[SetLoss]:
    """Figures of a file that `LossJob` wrote, a source each, then "all" where there are several. Raises ValueError."""
    rows = list(read_answers(path))
    if not rows or any("loss" not in row for row in rows):
        raise ValueError(f"{path} has no losses; `rlhf-megatron evaluate MODEL --loss FILE` writes them.")
    by_source: dict[str, list[tuple[float, int]]] = {}
    for row in rows:
        by_source.setdefault(row["source"], []).append((row["loss"], row["num_tokens"][0]))
    if len(by_source) > 1:
        by_source["all"] = [pair for pairs in by_source.values() for pair in pairs]
    return [_set_loss(name, np.array(pairs)) for name, pairs in by_source.items()]


def _set_loss(name: str, pairs_N2: np.ndarray) -> SetLoss:
    sums_N, counts_N = pairs_N2.T
    drawn = bootstrap((sums_N / counts_N)[:, None], np.random.default_rng(SEED), weights_IK=counts_N[:, None])
    ((loss, low, high),) = drawn
    return SetLoss(name, len(pairs_N2), int(counts_N.sum()), loss, low, high, exp(loss))


def loss_table(sets: Sequence[SetLoss]) -> list[str]:
    """Lines for a terminal: one a set."""
    width = max(3, *(len(s.name) for s in sets))
    lines = [f"{'set':<{width}}  documents     tokens      loss  95 % interval       perplexity"]
    for s in sets:
        interval = f"[{s.low:.5f}, {s.high:.5f}]" if s.low is not None and s.high is not None else "-"
        lines.append(
            f"{s.name:<{width}}  {s.num_documents:9d} {s.num_tokens:10d}  {s.loss:8.5f}  {interval:18}"
            f" {s.perplexity:11.4f}"
        )
    return lines


def losses_as_json(sets: Sequence[SetLoss]) -> dict[str, Any]:
    """All figures; those of all documents at the top."""
    return {name: value for name, value in asdict(sets[-1]).items() if name != "name"} | {"sets": [*map(asdict, sets)]}
