"""`rlhf-megatron evaluate SOURCE --loss FILE`: the loss of a model over a file, from the engines
that also generate.

A document's loss is the negative log-prob of what would train in the job `sft`: answers, an
assistant's turns, or of plain texts every token but the first. A mean counts tokens, as the
held-out loss of that job does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, inf
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_megatron.config.schema import DataConfig, SFTConfig
from rlhf_megatron.config.token_ids import is_count, shorten_value
from rlhf_megatron.controller.evaluation.sample_figures import SEED, bootstrap_intervals
from rlhf_megatron.data.document_samples import DocumentSample
from rlhf_megatron.data.document_sets import load_held_out_samples
from rlhf_megatron.data.opening_tokens import describe_opening_tokens
from rlhf_megatron.jobs.generation.answer_file import digest_texts, read_answer_rows
from rlhf_megatron.jobs.generation.answer_generation_job import AnswerGenerationJob
from rlhf_megatron.jobs.generation.context_limit import (
    check_document_lengths,
    find_context_limit,
)
from rlhf_megatron.jobs.generation.model_source import ServedWeights, load_job_tokenizer
from rlhf_megatron.rollout.engine_interface import GeneratedSample, GenerateRequest, SamplingParams
from rlhf_megatron.rollout.fleet.engine_setup import EngineSetup

LARGEST_LOSS = 1e30  # nats, of a document
LARGEST_EXPONENT = 700.0  # whose power of e a float can be


@dataclass(frozen=True)
class LossJob(AnswerGenerationJob):
    """A checked job that scores documents: `run` writes a row for each document, and continues
    after a stop as for answers.
    """

    documents: tuple[DocumentSample, ...] = ()

    @classmethod
    def from_files(
        cls,
        setup: EngineSetup,
        data: DataConfig,
        sft: SFTConfig,
        is_pairs: bool,
        served_weights: ServedWeights,
        output_path: Path,
        overwrite: bool = False,
    ) -> LossJob:
        """Return a job with the held-out documents of a configuration. Nothing is started. Raise
        ValueError for errors that a user can fix, such as no documents.
        """
        setup.check_servers()
        tokenizer = load_job_tokenizer(setup.model, served_weights)
        documents = load_held_out_samples(data, sft, tokenizer, is_pairs)
        if not documents:
            raise ValueError(
                "there are no documents: name files behind --loss, or a run that holds some out."
            )
        check_document_lengths(
            find_context_limit(served_weights.model.hf_config, setup.rollout),
            [len(sample.documents[0].token_ids) for sample in documents],
        )
        # Each document is scored once, as it is: no setting of the sampling counts.
        once = replace(setup.rollout, val_kwargs=replace(setup.rollout.val_kwargs, n=1))
        setup = replace(setup, rollout=once)
        return cls(
            setup,
            data.max_response_length,
            (),
            tokenizer,
            served_weights,
            output_path,
            writes_tokens=False,
            overwrite=overwrite,
            opening_note=describe_opening_tokens(
                tokenizer, data, documents[0].documents[0].token_ids, "documents"
            ),
            documents=documents,
        )

    def make_fingerprint(self) -> dict[str, Any]:
        """Return everything that the losses depend on, besides the bytes of the weights."""
        documents = digest_texts(map(_format_sample, self.documents))
        return self.make_weights_fingerprint() | {"documents": documents}

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the complete file: one for each document."""
        return len(self.documents)

    def make_requests(self, start: int, num_rows: int) -> list[GenerateRequest]:
        """Return a request for each document from number `start` on, at most `num_rows`. The engine
        generates nothing, and scores the tokens from the first one that counts.
        """
        params = SamplingParams(0)
        found = []
        for sample in self.documents[start : start + num_rows]:
            ids = sample.documents[0].token_ids
            first = sample.documents[0].trained_spans[0][0]
            found.append(GenerateRequest(ids, (0,), params, len(ids) - first))
        return found

    def make_answer_row(
        self, prompt_number: int, group: Sequence[GeneratedSample]
    ) -> dict[str, Any]:
        """Return the row of a document: the sum of its losses in nats, and the number of tokens in
        the sum.
        """
        sample = self.documents[prompt_number]
        log_probs = group[0].log_probs
        spans = sample.documents[0].trained_spans
        first = spans[0][0]
        values = [log_probs[place - first] for begin, end in spans for place in range(begin, end)]
        return {
            "index": prompt_number,
            "source": sample.source,
            "responses": [],
            "num_tokens": [len(values)],
            "loss": -float(np.sum(np.asarray(values, np.float64))),
        }


@dataclass(frozen=True)
class SourceLoss:
    """The loss of the documents of one source, or of all."""

    name: str
    num_documents: int
    num_tokens: int
    loss: float  # nats a token, over all tokens
    # 95 % interval: the 2.5 and 97.5 % quantiles over resampled documents; None for a single one
    low: float | None
    high: float | None
    perplexity: float  # exp(loss)


def _format_sample(sample: DocumentSample) -> str:
    """Return the text of a sample from which the fingerprint of a file of losses is made. It keeps
    the class names that it began with, so that a job which was stopped can continue.
    """
    documents = ", ".join(
        f"Document(token_ids={document.token_ids!r}, trained={document.trained_spans!r})"
        for document in sample.documents
    )
    comma = "," if len(sample.documents) == 1 else ""
    return f"({sample.source!r}, ({documents}{comma}))"


def compute_source_losses(path: Path) -> list[SourceLoss]:
    """Return the figures of a file that `LossJob` wrote: one for each source, and then "all" if
    there are several. Raise ValueError for a file without losses.
    """
    rows = list(read_answer_rows(path))
    if not rows or any("loss" not in row for row in rows):
        raise ValueError(
            f"{path} has no losses; `rlhf-megatron evaluate MODEL --loss FILE` writes them."
        )
    by_source: dict[str, list[tuple[float, int]]] = {}
    for row in rows:
        source = row.get("source")
        loss: Any = row.get("loss")
        num_tokens: Any = row.get("num_tokens")
        has_tokens = (
            isinstance(num_tokens, list)
            and len(num_tokens) > 0
            and is_count(num_tokens[0])
            and num_tokens[0] > 0
        )
        if not has_tokens or not isinstance(source, str) or not _is_possible_loss(loss):
            raise ValueError(
                f"{path}: the row with index {row['index']} must have a text as 'source', a finite"
                f" number as 'loss' and a list of a count as 'num_tokens', not"
                f" {shorten_value(source)}, {shorten_value(loss)} and"
                f" {shorten_value(num_tokens)}; compute the losses again."
            )
        by_source.setdefault(source, []).append((loss, num_tokens[0]))
    if len(by_source) > 1:
        by_source["all"] = [pair for pairs in by_source.values() for pair in pairs]
    return [_compute_source_loss(name, np.array(pairs)) for name, pairs in by_source.items()]


def _is_possible_loss(value: Any) -> bool:
    """Return whether a value is a number that can be a document's sum of losses."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= LARGEST_LOSS


def _compute_source_loss(name: str, pairs_N2: np.ndarray) -> SourceLoss:
    """Return the figures of a source from (sum of losses, number of tokens) of each document; the
    interval is over resampled documents.
    """
    sums_N, counts_N = pairs_N2.T
    drawn = bootstrap_intervals(
        (sums_N / counts_N)[:, None], np.random.default_rng(SEED), weights_IK=counts_N[:, None]
    )
    ((loss, low, high),) = drawn
    perplexity = exp(loss) if loss <= LARGEST_EXPONENT else inf
    return SourceLoss(name, len(pairs_N2), int(counts_N.sum()), loss, low, high, perplexity)


def format_loss_table(sets: Sequence[SourceLoss]) -> list[str]:
    """Return the lines of a table for a terminal, one for each source."""
    width = max(3, *(len(s.name) for s in sets))
    lines = [f"{'set':<{width}}  documents     tokens      loss  95 % interval       perplexity"]
    for s in sets:
        interval = (
            f"[{s.low:.5f}, {s.high:.5f}]" if s.low is not None and s.high is not None else "-"
        )
        lines.append(
            f"{s.name:<{width}}  {s.num_documents:9d} {s.num_tokens:10d}  {s.loss:8.5f}"
            f"  {interval:18} {s.perplexity:11.4f}"
        )
    return lines


def convert_losses_to_json(sets: Sequence[SourceLoss]) -> dict[str, Any]:
    """Return all figures: those of all documents at the top, and those of each source
    under "sets".
    """
    return {name: value for name, value in asdict(sets[-1]).items() if name != "name"} | {
        "sets": [*map(asdict, sets)]
    }
