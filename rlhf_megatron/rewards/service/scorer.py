"""Samples to rewards: each is scored by the main reward of its source and by all terms, in one weighted sum.

Also: A run stops when too many of its rewards fail: what is left out trains nothing, and silently so.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.rules.data import unknown_sources
from rlhf_megatron.config.schema import RewardConfig, RewardTermConfig
from rlhf_megatron.data.rows import has_json_label
from rlhf_megatron.rewards.scorers.base import (
    MASKED,
    Keyed,
    Labelled,
    RewardResult,
    RewardSample,
    Waiting,
    is_masked,
    masked,
)
from rlhf_megatron.rewards.service.components import Component, Components, combine, load_components
from rlhf_megatron.rewards.service.places import MakePool, Pool
from rlhf_megatron.rewards.service.pool import WorkerPool
from rlhf_megatron.rewards.service.wire import Task
from rlhf_megatron.rewards.service.worker import outcome

logger = logging.getLogger(__name__)
ABORTED = MASKED + "aborted"
RESPONSE_CHARS = 200  # of the sample that the message shows


class RewardError(ValueError):
    """Too many rewards failed for reasons other than the policy."""


def check_error_rate(
    samples: Sequence[RewardSample], results: Sequence[RewardResult], max_error_rate: float, log: str
) -> None:
    """Raises RewardError when more than `max_error_rate` of the results are masked. Aborted samples do not count.

    `log`: the file of what rewards print.
    """
    scored = [(s, r) for s, r in zip(samples, results, strict=True) if r.status != ABORTED]
    failed = [(s, r) for s, r in scored if is_masked(r.status)]
    if not failed or len(failed) / len(scored) <= max_error_rate:
        return
    [(status, count)] = Counter(result.status for _, result in failed).most_common(1)
    sample, result = next((s, r) for s, r in failed if r.status == status)
    raise RewardError(
        f"{len(failed)} of {len(scored)} rewards failed ({len(failed) / len(scored):.1%}), more than"
        f" reward.max_error_rate ({max_error_rate:g}), and the policy is not to blame. Most of them: {status}"
        f" ({count}). One sample, of the source {sample.source!r}: label {_short(sample.label)}, response"
        f" {_short(sample.response)}.\n{result.error or '(it left no traceback)'}\n"
        f"Correct the reward; {log} has what it printed. To train on with such samples left out, raise"
        " reward.max_error_rate."
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= RESPONSE_CHARS else f"{text[:RESPONSE_CHARS]}…")


REWARD_LOG = "rewards.log"  # in the run directory: what rewards in worker processes print


class Scorer:
    """Used in a `with` block, on the controller's main thread: rewards may have processes of their own. Any thread may
    call it."""

    def __init__(
        self, components: Components, config: RewardConfig, log: Path, make_pool: MakePool = WorkerPool
    ) -> None:
        self.components = components
        self.config = config
        self.log = log
        self._lock = threading.Lock()
        self._remote = _in_processes(components)
        self._pool = _worker_pool(self._remote, config, log, make_pool) if self._remote else None

    def __enter__(self) -> Scorer:
        """Start the processes without waiting: they import while the engines start."""
        if self._pool:
            self._pool.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool:
            self._pool.close()

    def await_ready(self) -> None:
        """Wait until the processes have loaded the rewards. Raises as `check_reward`."""
        if self._pool:
            self._pool.await_ready()

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Return one result a sample, in order. Raises RewardError if more than `reward.max_error_rate` failed."""
        results = self.unbounded(samples)
        check_error_rate(samples, results, self.config.max_error_rate, str(self.log))
        return results

    def unbounded(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Score samples however many rewards fail. One thread at a time: others wait."""
        aborted = masked("aborted")
        scored = [sample for sample in samples if sample.finish_reason != "abort"]
        with self._lock:
            found = iter(self._score(scored))
        return [aborted if sample.finish_reason == "abort" else next(found) for sample in samples]

    def _score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        tasks = remote_tasks(self.components, self._remote, samples)
        results = self._pool.run(list(tasks.values())) if self._pool else []
        remote = dict(zip(tasks, results, strict=True))

        def result(component: Component, sample: RewardSample) -> RewardResult:
            if component.needs_process:
                return remote[self._remote.index(component), _key(component, sample)]
            return outcome(component.entry.build, sample, component.params)

        of_samples = [(self.components.of(sample.source), sample) for sample in samples]
        return [combine(components, [result(c, sample) for c in components]) for components, sample in of_samples]


TaskKey = tuple[int, object]  # position among the rewards in processes, key of the sample


def remote_tasks(
    components: Components, remote: Sequence[Component], samples: Sequence[RewardSample]
) -> dict[TaskKey, Task]:
    """Return the calls that need a process. Samples of one key share one."""
    tasks: dict[TaskKey, Task] = {}
    for sample in samples:
        for component in components.of(sample.source):
            if component.needs_process:
                number = remote.index(component)
                tasks.setdefault((number, _key(component, sample)), Task(number, sample))
    return tasks


def _key(component: Component, sample: RewardSample) -> object:
    return component.params.key(sample) if isinstance(component.params, Keyed) else id(sample)


def _in_processes(components: Components) -> list[Component]:
    return [component for component in components if component.needs_process]


def _worker_pool(
    remote: Sequence[Component], config: RewardConfig, log: Path | None, make_pool: MakePool = WorkerPool
) -> Pool:
    named = [{"name": c.entry.name, "params": c.written, "key": c.key} for c in remote]
    waits_s = [c.params.waits_s if isinstance(c.params, Waiting) else None for c in remote]
    return make_pool(named, config.num_workers, config.timeout_s, log, waits_s)


def make_scorer(
    config: RewardConfig, log: Path, model: RewardTermConfig | None = None, make_pool: MakePool = WorkerPool
) -> Scorer:
    """`log`: takes what worker processes print; `model`: see `load_components`; `make_pool`: of worker processes.
    Raises ConfigError with all unknown names and wrong parameters."""
    return Scorer(load_components(config, model), config, log, make_pool)


def check_sources(config: RewardConfig, known: Iterable[str]) -> None:
    """Raises ConfigError for rewards of sources that the run's data does not have."""
    problems = list(unknown_sources(config.by_source, sorted(set(known))))
    if problems:
        raise ConfigError(problems)


def check_labels(config: RewardConfig, labels: Iterable[tuple[str, str, str]]) -> None:
    """Look at the labels of a run's data: (source, label, extra) of each row. Warns of labels that are JSON within
    text. Raises ConfigError for those that no answer could score with: more than `reward.max_error_rate` of a source's,
    or lists and objects. `check_reward` tells of rewards that cannot be loaded.
    """
    try:
        components = load_components(config)
    except ConfigError:
        return
    by_source: dict[str, list[tuple[str, bool]]] = {}
    for source, label, extra in labels:
        by_source.setdefault(source, []).append((label, has_json_label(label, extra)))
    problems = []
    for source, found in by_source.items():
        for component in components.of(source):
            if not isinstance(component.params, Labelled):
                continue
            if component.params.label_problem("1", is_json=True) and all(_is_json_text(one) for one, _ in found):
                logger.warning(
                    "all labels of the source %r are JSON within text, such as %s; %s (%s) compares them as they are",
                    *(source, _short(found[0][0]), component.key, component.entry.name),
                )
            bad = [
                (one, is_json, why) for one, is_json in found if (why := component.params.label_problem(one, is_json))
            ]
            if len(bad) > config.max_error_rate * len(found) or any(is_json for _, is_json, _ in bad):
                label, _, why = bad[0]
                problems.append(
                    f"{component.key} ({component.entry.name}): {len(bad)} of {len(found)} labels of the source"
                    f" {source!r} could score with no answer. The label {_short(label)} {why}."
                )
    if problems:
        raise ConfigError(problems)


def _is_json_text(label: str) -> bool:
    try:
        return label[:1] in tuple('"[{') and json.loads(label) is not None
    except (ValueError, RecursionError):
        return False


def check_reward(config: RewardConfig) -> None:
    """Raises ConfigError with all that is wrong with the rewards, the code that they import included.

    That is imported in a process of its own, for a moment. Looked at before a run is started.
    """
    remote = _in_processes(load_components(config))
    if not remote:
        return
    pool = _worker_pool(remote, config, log=None)
    pool.start()
    try:
        pool.await_ready()
    finally:
        pool.close()
