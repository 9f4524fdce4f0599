"""What the loop asks of a supply of samples, and what a supply in the background asks of the rest of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from rlhf_megatron.data.batch import PromptBatch, RolloutBatch, ScoredBatch
from rlhf_megatron.recovery.keeper import Stage
from rlhf_megatron.rollout.engine import GeneratedSample, GenerateRequest

Samples = Sequence[Sequence[GeneratedSample]]  # a list for each request of a group


@dataclass(frozen=True)
class Progress:
    """Which prompts of the stream are done with: those at the first `num_drawn` positions, but for `untrained`."""

    num_drawn: int
    untrained: tuple[int, ...] = ()  # ascending


class Supply(Protocol):
    """A context manager around the whole loop: what works in the background begins and ends with it."""

    def __enter__(self) -> Supply: ...

    def __exit__(self, *error: object) -> None: ...

    def take(self, step: int, stage: Stage) -> ScoredBatch:
        """The samples that the step trains on; with log-probs and values where these were made early.

        `stage`: around each part of the work, by its name.

        Raises RunStopped, and whatever went wrong in the background.
        """

    def syncing(self) -> AbstractContextManager[None]:
        """Around the weight sync that ends a step, also where that leaves the policy as it is."""

    def progress(self) -> Progress:
        """As it stands between two steps: what a checkpoint keeps."""

    def take_metrics(self) -> dict[str, float]:
        """Of the batch that was taken last. They leave with the call."""


class Session(Protocol):
    """An open-ended generation of a fleet. A key is the number of a group; it is free again once its samples were
    returned or it was aborted. All but `mend` are called by one thread."""

    @property
    def num_running(self) -> int:
        """Keys that were submitted and neither returned nor aborted."""

    def submit(self, key: int, requests: Sequence[GenerateRequest]) -> None: ...

    def poll(self) -> list[tuple[int, list[list[GeneratedSample]]]]:
        """Groups that are whole: per request its samples. Waits a moment where there is none."""

    def abort(self, keys: Sequence[int]) -> None:
        """These are not wanted any more."""

    def mend(self) -> None:
        """By the main thread, while nothing runs on the hosts: engines that were started again get their weights.
        Nothing once it is closed."""

    def close(self) -> None:
        """Ends what runs. After it nothing else but `mend` is called."""


@dataclass(frozen=True)
class Finished:
    """A group whose samples have come."""

    number: int
    prompts: PromptBatch  # of its one prompt
    samples: Samples

    @property
    def versions(self) -> set[int]:
        """Of all tokens that may train: those of the first request."""
        versions = {sample.policy_version for sample in self.samples[0]}
        return versions | {span.version for sample in self.samples[0] for span in sample.version_spans}


@dataclass(frozen=True)
class Scored:
    """A group with its rewards."""

    number: int
    batch: ScoredBatch
    greedy: RolloutBatch | None = None  # its greedy sample, which trains nothing
    has_signal: bool = True  # False: `algorithm.filter_groups` leaves it out


Draw = Callable[[Sequence[int]], PromptBatch]  # positions of the prompt stream -> the prompts there
MakeRequests = Callable[[PromptBatch, int], list[list[GenerateRequest]]]  # prompts, version -> requests of each
Score = Callable[[Sequence[Finished]], list[Scored]]  # called by one thread, with all groups that have come
