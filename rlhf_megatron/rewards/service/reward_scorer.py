"""Samples to rewards: each is scored by the main reward of its source and by all terms, in
one weighted sum.

Also: A run stops when too many of its rewards fail: what is left out trains nothing,
and silently so.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.rules.data_rules import find_unknown_reward_sources
from rlhf_megatron.config.schema import RewardConfig, RewardTermConfig
from rlhf_megatron.data.data_rows import has_json_label
from rlhf_megatron.rewards.scorers.reward_types import (
    MASKED,
    LabelCheckingParams,
    PartialReadingParams,
    ResultKeyParams,
    RewardResult,
    RewardSample,
    ServerWaitingParams,
    is_masked,
    make_masked_result,
)
from rlhf_megatron.rewards.service.reward_components import (
    RewardComponent,
    RewardComponents,
    load_reward_components,
)
from rlhf_megatron.rewards.service.reward_worker import call_reward
from rlhf_megatron.rewards.service.run_placement import RewardPool, RewardPoolFactory
from rlhf_megatron.rewards.service.worker_messages import RewardTask
from rlhf_megatron.rewards.service.worker_pool import RewardWorkerPool

logger = logging.getLogger(__name__)
ABORTED = MASKED + "aborted"
RESPONSE_CHARS = 200  # of the sample that the message shows
MAX_HINTS = 20  # that a scorer logs: a policy can make a new one with each response
MAX_READ_LABELS = 2000  # different labels of a source that are read before a run
NUM_EXAMPLES = 3  # of labels that are not read whole

REWARD_LOG = "rewards.log"  # in the run directory: what rewards in worker processes print


class RewardErrorRateError(ValueError):
    """Too many rewards failed for reasons other than the policy."""


def check_reward_error_rate(
    samples: Sequence[RewardSample],
    results: Sequence[RewardResult],
    max_error_rate: float,
    log_name: str,
) -> None:
    """Raise RewardErrorRateError when more than `max_error_rate` of the results are masked. Aborted
    samples do not count. `log_name` is the file with the rewards' output, for the message.
    """
    scored = [(s, r) for s, r in zip(samples, results, strict=True) if r.status != ABORTED]
    failed = [(s, r) for s, r in scored if is_masked(r.status)]
    if not failed or len(failed) / len(scored) <= max_error_rate:
        return
    [(status, count)] = Counter(result.status for _, result in failed).most_common(1)
    sample, result = next((s, r) for s, r in failed if r.status == status)
    raise RewardErrorRateError(
        f"{len(failed)} of {len(scored)} rewards failed ({len(failed) / len(scored):.1%}), more"
        f" than reward.max_error_rate ({max_error_rate:g}), and the policy is not to blame. Most"
        f" of them: {status} ({count}). One sample, of the source {sample.source!r}: label"
        f" {_shorten_text(sample.label)}, response {_shorten_text(sample.response)}.\n"
        f"{result.error or '(it left no traceback)'}\n"
        f"Correct the reward; {log_name} has what it printed. To train on with such samples left"
        " out, raise reward.max_error_rate."
    )


def _shorten_text(text: str) -> str:
    """Return the text quoted, cut after RESPONSE_CHARS characters."""
    return repr(text if len(text) <= RESPONSE_CHARS else f"{text[:RESPONSE_CHARS]}…")


class RewardScorer:
    """A callable that scores samples with the rewards of a run. Enter it on the controller's main
    thread, since rewards may have processes of their own; any thread may call it then.
    """

    def __init__(
        self,
        components: RewardComponents,
        config: RewardConfig,
        log_path: Path,
        make_pool: RewardPoolFactory = RewardWorkerPool,
    ) -> None:
        """Make the pool of worker processes where a component needs processes; nothing starts
        before the `with` block.
        """
        self.components = components
        self.config = config
        self.log_path = log_path
        self._lock = threading.Lock()
        self._logged_hints: set[str] = set()
        self._process_components = _select_process_components(components)
        self._worker_pool = (
            _make_worker_pool(self._process_components, config, log_path, make_pool)
            if self._process_components
            else None
        )

    def __enter__(self) -> RewardScorer:
        """Start the processes without waiting: they import while the engines start."""
        if self._worker_pool:
            self._worker_pool.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the worker processes."""
        if self._worker_pool:
            self._worker_pool.close()

    def wait_until_ready(self) -> None:
        """Wait until the processes have loaded the rewards. Raise ConfigError with the problems of
        the rewards, ValueError where the processes end or take too long.
        """
        if self._worker_pool:
            self._worker_pool.wait_until_ready()

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Score the samples and return one result for each, in order. Raise RewardErrorRateError if
        more than `reward.max_error_rate` of them failed.
        """
        results = self.score_without_limit(samples)
        check_reward_error_rate(samples, results, self.config.max_error_rate, str(self.log_path))
        return results

    def score_without_limit(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Score the samples, however many rewards fail, and return one result for each, in order.
        Aborted samples are masked. One thread scores at a time; others wait.
        """
        aborted = make_masked_result("aborted")
        scored = [sample for sample in samples if sample.finish_reason != "abort"]
        with self._lock:
            results = self._score_samples(scored)
            self._log_hints(results)
        remaining = iter(results)
        return [
            aborted if sample.finish_reason == "abort" else next(remaining) for sample in samples
        ]

    def _log_hints(self, results: Sequence[RewardResult]) -> None:
        """Log a warning for each hint of the scored results, once each."""
        for result in results:
            is_new = bool(result.error) and result.error not in self._logged_hints
            if is_new and not is_masked(result.status) and len(self._logged_hints) < MAX_HINTS:
                self._logged_hints.add(result.error)
                logger.warning("%s (score %g)", result.error, result.score)

    def _score_samples(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Score the samples by their components, in worker processes and here, and combine the
        results of each sample.
        """
        tasks = make_process_tasks(self.components, self._process_components, samples)
        results = self._worker_pool.score_tasks(list(tasks.values())) if self._worker_pool else []
        remote = dict(zip(tasks, results, strict=True))

        def find_result(component: RewardComponent, sample: RewardSample) -> RewardResult:
            """Return the result of the component: from the worker processes, or computed here."""
            if component.needs_process:
                return remote[
                    self._process_components.index(component), _make_task_key(component, sample)
                ]
            return call_reward(component.entry.build, sample, component.params)

        of_samples = [
            (self.components.select_for_source(sample.source), sample) for sample in samples
        ]
        return [
            self.components.combine_results(
                sample.source, [find_result(component, sample) for component in components]
            )
            for components, sample in of_samples
        ]


TaskKey = tuple[int, object]  # position among the rewards in processes, key of the sample


def make_process_tasks(
    components: RewardComponents,
    process_components: Sequence[RewardComponent],
    samples: Sequence[RewardSample],
) -> dict[TaskKey, RewardTask]:
    """Return the tasks for the worker processes by (component index, key of the sample). Samples of
    one key share a task.
    """
    tasks: dict[TaskKey, RewardTask] = {}
    for sample in samples:
        for component in components.select_for_source(sample.source):
            if component.needs_process:
                number = process_components.index(component)
                tasks.setdefault(
                    (number, _make_task_key(component, sample)), RewardTask(number, sample)
                )
    return tasks


def _make_task_key(component: RewardComponent, sample: RewardSample) -> object:
    """Return the key under which samples share a result of the component; the sample's id where
    none do.
    """
    return (
        component.params.make_result_key(sample)
        if isinstance(component.params, ResultKeyParams)
        else id(sample)
    )


def _select_process_components(components: RewardComponents) -> list[RewardComponent]:
    """Return the components that need worker processes. A task's component_index counts in this
    list.
    """
    return [component for component in components if component.needs_process]


def _make_worker_pool(
    process_components: Sequence[RewardComponent],
    config: RewardConfig,
    log_path: Path | None,
    make_pool: RewardPoolFactory = RewardWorkerPool,
) -> RewardPool:
    """Make the pool of worker processes for these components, without starting it."""
    named = [
        {"name": c.entry.name, "params": c.written_params, "key": c.config_key}
        for c in process_components
    ]
    waits_s = [
        c.params.waits_s if isinstance(c.params, ServerWaitingParams) else None
        for c in process_components
    ]
    return make_pool(named, config.num_workers, config.timeout_s, log_path, waits_s)


def make_reward_scorer(
    config: RewardConfig,
    log_path: Path,
    model_term: RewardTermConfig | None = None,
    make_pool: RewardPoolFactory = RewardWorkerPool,
    has_later_scores: bool = False,
) -> RewardScorer:
    """Return the scorer of the rewards that the configuration names. `log_path` takes the output of
    worker processes; `model_term` and `has_later_scores` are of the run's own reward model (see
    `load_reward_components`); `make_pool` makes the pool of worker processes. Raise ConfigError
    with all unknown names and wrong parameters.
    """
    components = load_reward_components(config, model_term, has_later_scores)
    return RewardScorer(components, config, log_path, make_pool)


def check_sources_exist(config: RewardConfig, known_sources: Iterable[str]) -> None:
    """Raise ConfigError where reward.by_source names sources that are not in `known_sources`."""
    problems = list(find_unknown_reward_sources(config.by_source, sorted(set(known_sources))))
    if problems:
        raise ConfigError(problems)


def check_reward_labels(config: RewardConfig, labels: Iterable[tuple[str, str, str]]) -> None:
    """Check the labels of a run's data; `labels` has (source, label, extra) of each row. Log a
    warning for labels that are JSON within text, and for labels that are not read whole. Raise
    ConfigError where more than `reward.max_error_rate` of a source's labels could score with no
    answer, or such a label is a list or an object.

    Return without a check where the rewards cannot be loaded; `check_rewards_load` reports that.
    """
    try:
        components = load_reward_components(config)
    except ConfigError:
        return
    by_source = _group_labels_by_source(labels)
    problems = []
    for source, source_labels in by_source.items():
        for component in components.select_for_source(source):
            if not isinstance(component.params, LabelCheckingParams):
                continue
            if component.params.find_label_problem("1", is_json=True) and all(
                _is_json_text(label) for label, _ in source_labels
            ):
                logger.warning(
                    (
                        "all labels of the source %r are JSON within text, such as %s; %s (%s)"
                        " compares them as they are"
                    ),
                    *(
                        source,
                        _shorten_text(source_labels[0][0]),
                        component.config_key,
                        component.entry.name,
                    ),
                )
            bad = [
                (label, is_json, why)
                for label, is_json in source_labels
                if (why := component.params.find_label_problem(label, is_json))
            ]
            if len(bad) > config.max_error_rate * len(source_labels) or any(
                is_json for _, is_json, _ in bad
            ):
                label, _, why = bad[0]
                problems.append(
                    f"{component.config_key} ({component.entry.name}): {len(bad)} of"
                    f" {len(source_labels)} labels of the source {source!r} could score with no"
                    f" answer. The label {_shorten_text(label)} {why}."
                )
    if problems:
        raise ConfigError(problems)
    for line in _describe_partial_labels(components, by_source):
        logger.warning("%s", line)


def describe_partial_labels(
    config: RewardConfig, labels: Iterable[tuple[str, str, str]]
) -> list[str]:
    """Return a line for each source and reward with labels that the reward does not read whole: how
    many there are, and how three of them count. `labels` has (source, label, extra) of each row.
    Return [] where the rewards cannot be loaded.
    """
    try:
        components = load_reward_components(config)
    except ConfigError:
        return []
    return list(_describe_partial_labels(components, _group_labels_by_source(labels)))


def _group_labels_by_source(
    labels: Iterable[tuple[str, str, str]],
) -> dict[str, list[tuple[str, bool]]]:
    """Return the labels of each source, and of each whether it is the JSON of a list or object."""
    by_source: dict[str, list[tuple[str, bool]]] = {}
    for source, label, extra in labels:
        by_source.setdefault(source, []).append((label, has_json_label(label, extra)))
    return by_source


def _describe_partial_labels(
    components: RewardComponents, by_source: Mapping[str, Sequence[tuple[str, bool]]]
) -> Iterator[str]:
    """Yield the lines that `describe_partial_labels` returns. Of more than MAX_READ_LABELS
    different labels, as many are read, evenly spaced, since some rewards take milliseconds for one.
    """
    for source, source_labels in by_source.items():
        counts = Counter(label for label, is_json in source_labels if not is_json)
        step = max(1, -(-len(counts) // MAX_READ_LABELS))
        read_labels = list(counts)[::step]
        for component in components.select_for_source(source):
            if not isinstance(component.params, PartialReadingParams):
                continue
            readings = {
                label: reading
                for label in read_labels
                if (reading := component.params.describe_partial_reading(label))
            }
            if not readings:
                continue
            examples = "; ".join(
                f"{_shorten_text(label)} {reading}"
                for label, reading in islice(readings.items(), NUM_EXAMPLES)
            )
            num_partial = sum(counts[label] for label in readings)
            num_read = sum(counts[label] for label in read_labels)
            looked_at = f", of {len(source_labels)} in all" if step > 1 else ""
            yield (
                f"{component.config_key} ({component.entry.name}) does not read {num_partial} of"
                f" {num_read} labels{looked_at} of the source {source!r} whole: {examples}. Answers"
                " are compared with what it reads; write the answer alone into such rows."
            )


def _is_json_text(label: str) -> bool:
    """Return whether the label is a JSON text, list or object."""
    try:
        return label[:1] in tuple('"[{') and json.loads(label) is not None
    except (ValueError, RecursionError):
        return False


def check_rewards_load(config: RewardConfig) -> None:
    """Load the rewards once, in a process of its own, before a run starts. Raise ConfigError with
    all problems of the rewards, those of the code that they import included.
    """
    remote = _select_process_components(load_reward_components(config))
    if not remote:
        return
    pool = _make_worker_pool(remote, config, log_path=None)
    pool.start()
    try:
        pool.wait_until_ready()
    finally:
        pool.close()
