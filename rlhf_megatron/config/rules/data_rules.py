"""Rules on the sections `data` and `reward`.

An entry of data.sources is named by its index; a value that nobody wrote into it is reported at the
place of the list.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rlhf_megatron.config.errors import ConfigProblem
from rlhf_megatron.config.rules import (
    NAME_RULE,
    IdleSettings,
    OptionalProblems,
    drop_none,
    is_valid_name,
    make_problem_if,
    register_idle_rule,
    register_rl_rule,
    register_rule,
)
from rlhf_megatron.config.rules.part_rules import find_registered_part, try_build_params
from rlhf_megatron.config.schema import DataConfig, DataSourceConfig, FewShotConfig, RunConfig
from rlhf_megatron.config.yaml_nodes import LoadedConfig

SOURCES = "data.sources"
CHAT = "data.apply_chat_template"
OF_ROWS = ("data.prompt_key", "data.label_key", "data.extra_columns", "data.skip_bad_rows")
OF_CHAT = ("data.system_prompt", "data.apply_chat_template_kwargs")

BY_SOURCE = "reward.by_source"
TERMS = "reward.terms"
LONGEST = "data.max_response_length"
OWN_PROCESS = "own_process"  # a need of rewards that run in processes of their own
OF_PROCESSES = ("reward.num_workers", "reward.timeout_s")


@register_idle_rule
def list_idle_data_settings(config: RunConfig) -> Iterable[IdleSettings]:
    """Return an entry for each group of settings of the section `data`; the first value of an entry
    says whether the configuration ignores that group.
    """
    d = config.data

    def is_set_in_all_sources(setting: str) -> bool:
        """Return whether there are data sources and each of them sets this setting, so that the
        section's own value has no effect.
        """
        return bool(d.sources) and all(getattr(source, setting) is not None for source in d.sources)

    details = ("data.few_shot.template", "data.few_shot.seed")
    return (
        (not d.apply_chat_template, OF_CHAT, CHAT, "set {switch} to true"),
        (
            d.filter_overlong_prompts,
            ("data.truncation",),
            "data.filter_overlong_prompts",
            "set {switch} to false",
        ),
        (is_set_in_all_sources("task"), OF_ROWS, SOURCES, "give a source files"),
        (
            is_set_in_all_sources("prompt_template"),
            ("data.prompt_template",),
            SOURCES,
            "leave prompt_template out of a source",
        ),
        (
            is_set_in_all_sources("few_shot"),
            ("data.few_shot",),
            SOURCES,
            "leave few_shot out of a source",
        ),
        (
            d.few_shot.num_shots == 0,
            details,
            "data.few_shot.num_shots",
            "give {switch} a number of rows",
        ),
    )


@register_rule
def check_data_sources(loaded: LoadedConfig) -> OptionalProblems:
    """Yield problems of data.sources: the list excludes data.task, train_files and val_files, and
    each entry needs a valid unique name and consistent content.
    """
    d = loaded.config.data
    for name, value in (
        ("task", d.task),
        ("train_files", d.train_files),
        ("val_files", d.val_files),
    ):
        if d.sources and value:
            key = f"data.{name}"
            shown = list(value) if isinstance(value, tuple) else value
            yield ConfigProblem(
                (
                    f"{key} ({shown}) and {SOURCES} ({len(d.sources)} entries) exclude each other;"
                    f" make it an entry of {SOURCES}, or set"
                    f" {name}: {'null' if name == 'task' else '[]'}."
                ),
                (key, SOURCES),
            )
    yield from (
        _point_to_source_list(loaded, problem) for problem in drop_none(_check_source_entries(d))
    )


def _check_source_entries(data: DataConfig) -> OptionalProblems:
    """Yield problems of the entries of data.sources: an invalid name, a name that an earlier entry
    has, or inconsistent content.
    """
    names = [source.name for source in data.sources]
    for index, source in enumerate(data.sources):
        where = f"{SOURCES}[{index}]"
        yield make_problem_if(
            not is_valid_name(source.name) or "/" in source.name,
            (
                f"{where}.name ({source.name[:40]!r}) must be a name without '/', as metrics are"
                f" val/<name>/mean@1, and {NAME_RULE}."
            ),
            (f"{where}.name",),
        )
        yield make_problem_if(
            source.name in names[:index],
            (
                f"{where}.name ({source.name}) is that of {SOURCES}[{names.index(source.name)}]"
                " too; give each its own."
            ),
            (f"{where}.name",),
        )
        yield from _check_source_content(where, source)


def _check_source_content(entry_key: str, source: DataSourceConfig) -> OptionalProblems:
    """Yield problems of the content of one entry of data.sources: a task together with files,
    neither a task nor training files, or task parameters without a task.
    """
    files = [*source.train_files, *source.val_files]
    name = f"{entry_key} ({source.name})"
    yield make_problem_if(
        source.task is not None and files,
        f"{name}: task ({source.task}) and files ({files}) exclude each other; keep one of them.",
        (f"{entry_key}.task",),
    )
    yield make_problem_if(
        source.task is None and not source.train_files,
        f"{name}: train_files ([]) must name a JSONL or parquet file; give one, or name a task.",
        (f"{entry_key}.train_files",),
    )
    yield make_problem_if(
        source.task is None and source.task_params,
        (
            f"{name}: task_params ({source.task_params}) would be ignored because task is null;"
            " remove task_params."
        ),
        (f"{entry_key}.task_params",),
    )


@register_rule
def check_templates(loaded: LoadedConfig) -> OptionalProblems:
    """Yield problems of the prompt templates and few-shot settings of the section `data` and of
    each of its sources.
    """
    d = loaded.config.data
    yield from _check_prompt_template("data.prompt_template", d.prompt_template)
    yield from _check_few_shot_template("data.few_shot", d.few_shot)
    yield from _refuse_few_shot_beside_own_shots("data.few_shot", d.few_shot, d.task, d.task_params)
    for index, source in enumerate(d.sources):
        where = f"{SOURCES}[{index}]"
        found = list(
            _check_prompt_template(f"{where}.prompt_template", source.prompt_template or "{prompt}")
        )
        if source.few_shot is not None:
            found += _check_few_shot_template(f"{where}.few_shot", source.few_shot)
        shots = source.few_shot or d.few_shot
        found += _refuse_few_shot_beside_own_shots(
            f"{where}.few_shot", shots, source.task, source.task_params
        )
        yield from (_point_to_source_list(loaded, problem) for problem in drop_none(iter(found)))


def _check_prompt_template(key: str, value: str) -> OptionalProblems:
    """Yield a problem if the template does not contain {prompt} exactly once."""
    yield make_problem_if(
        value.count("{prompt}") != 1,
        (
            f"{key} ({value!r}) must contain {{prompt}} once, where the prompt goes; '{{prompt}}'"
            " is the bare prompt."
        ),
        (key,),
    )


def _check_few_shot_template(key: str, shots: FewShotConfig) -> OptionalProblems:
    """Yield a problem if few-shot rows are wanted and their template lacks {prompt} or {label}."""
    missing = [field for field in ("{prompt}", "{label}") if field not in shots.template]
    yield make_problem_if(
        shots.num_shots > 0 and missing,
        (
            f"{key}.template ({shots.template!r}) must contain {' and '.join(missing)}, or the row"
            " is not a solved one; the default is '{prompt}{label}\\n'."
        ),
        (f"{key}.template",),
    )


def _refuse_few_shot_beside_own_shots(
    key: str, shots: FewShotConfig, task: str | None, params: Mapping[str, object]
) -> OptionalProblems:
    """Yield a problem if num_shots is above 0 and the task with these parameters already puts
    solved examples of its own into the prompt. Other combinations of a task and few-shot rows are
    accepted.
    """
    yield make_problem_if(
        task is not None
        and shots.num_shots > 0
        and getattr(try_build_params("task", task, params), "has_own_shots", False),
        (
            f"{key}.num_shots ({shots.num_shots}) and task {task} exclude each other: the task has"
            " solved problems of its own; set task_params: {num_shots: 0}, or num_shots here to 0."
        ),
        (f"{key}.num_shots",),
    )


@register_rl_rule
def check_chat_truncation(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem if prompts of a chat template are truncated on the right, which would cut off
    the end of the chat, where the answer begins.
    """
    d = loaded.config.data
    yield make_problem_if(
        d.apply_chat_template and d.truncation == "right" and not d.filter_overlong_prompts,
        (
            f"data.truncation (right) cannot be used with {CHAT}: it would cut the place where the"
            " answer begins; use left, error with filter_overlong_prompts: true, or a"
            " larger max_prompt_length."
        ),
        ("data.truncation", CHAT),
    )


@register_rule
def check_row_keys(loaded: LoadedConfig) -> OptionalProblems:
    """Yield problems if data.prompt_key or data.label_key is empty, or if both are the same key."""
    d = loaded.config.data
    for name, value in (("prompt_key", d.prompt_key), ("label_key", d.label_key)):
        yield make_problem_if(
            not value, f"data.{name} ('') must be a key of the rows; name it.", (f"data.{name}",)
        )
    yield make_problem_if(
        d.prompt_key and d.prompt_key == d.label_key,
        (
            f"data.prompt_key ({d.prompt_key}) must differ from data.label_key; name the key of the"
            " answer in that."
        ),
        ("data.prompt_key", "data.label_key"),
    )


def _point_to_source_list(loaded: LoadedConfig, problem: ConfigProblem) -> ConfigProblem:
    """Return the problem with its keys replaced by data.sources if nobody wrote one of its keys
    into the configuration; else return the problem unchanged.
    """
    if all(key in loaded.provenance for key in problem.keys):
        return problem
    return replace(problem, keys=(SOURCES,))


@register_idle_rule
def list_idle_reward_settings(config: RunConfig) -> Iterator[IdleSettings]:
    """Yield two entries. The first says whether the settings of reward processes are ignored,
    because no reward of the run needs a process; the second says whether reward.name and its
    parameters are ignored, because each data source has a reward of its own.
    """
    r = config.reward
    named = [
        (r.name, r.params),
        *((one.name, one.params) for one in (*r.by_source.values(), *r.terms)),
    ]
    fix = "name a reward that runs in a process of its own, such as math_verify or function"
    entries = [
        (find_registered_part("reward", name), try_build_params("reward", name, params))
        for name, params in named
    ]
    has_process = any(
        entry is None or OWN_PROCESS in entry.needs or getattr(params, "needs_process", False)
        for entry, params in entries
    )
    yield not has_process, (*OF_PROCESSES, "ray.reward_actors"), "reward.name", fix
    all_have_their_own = bool(config.data.sources) and {s.name for s in config.data.sources} <= set(
        r.by_source
    )
    yield (
        all_have_their_own,
        ("reward.name", "reward.params"),
        BY_SOURCE,
        "leave a source out of {switch}",
    )


@register_rl_rule
def check_reward_actors(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem if there are more Ray reward actors than reward workers to share
    among them.
    """
    num_actors = loaded.config.ray.reward_actors
    num_workers = loaded.config.reward.num_workers
    yield make_problem_if(
        num_actors > num_workers,
        (
            f"ray.reward_actors ({num_actors}) must be at most reward.num_workers ({num_workers}),"
            " which they share; lower the first, or raise the second."
        ),
        ("ray.reward_actors", "reward.num_workers"),
    )


@register_rl_rule
def check_reward_source_names(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem for each entry of reward.by_source that names no entry of data.sources.
    Without data.sources yield nothing: source names that are in files and tasks are known only when
    those are read.
    """
    names = [source.name for source in loaded.config.data.sources]
    if names:
        yield from find_unknown_reward_sources(loaded.config.reward.by_source, names)


def find_unknown_reward_sources(
    source_rewards: dict[str, Any], known_sources: list[str]
) -> Iterator[ConfigProblem]:
    """Yield a problem, with the nearest name, for each key of `source_rewards` (reward.by_source)
    that is not in `known_sources`, the names of all data sources of the run.
    """
    for name in source_rewards:
        if name not in known_sources:
            near = difflib.get_close_matches(name, known_sources, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield ConfigProblem(
                f"{BY_SOURCE} has a reward for {name!r}, but the data sources of this run are"
                f" {', '.join(map(repr, known_sources))}{hint or f'; rename or remove {name!r}.'}",
                (BY_SOURCE, "data.sources"),
            )


@register_rl_rule
def check_reward_timeouts(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem for each reward whose own time limit for a test (`needs_s`, in seconds) is
    longer than reward.timeout_s, which would end the sample first.
    """
    r = loaded.config.reward
    named = [
        (r.name, r.params),
        *((one.name, one.params) for one in (*r.by_source.values(), *r.terms)),
    ]
    for name, params in named:
        needs_s = getattr(try_build_params("reward", name, params), "needs_s", 0.0)
        yield make_problem_if(
            needs_s > r.timeout_s,
            (
                f"reward.timeout_s ({r.timeout_s:g}) ends a sample before {name} ends a test of"
                f" {needs_s:g} s; raise it to what all tests of a sample may take, 60 for instance."
            ),
            ("reward.timeout_s", "reward.name"),
        )


@register_rl_rule
def check_reward_lengths(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem for each reward term that acts only on responses from a length on that no
    response of the run can exceed.
    """
    longest = loaded.config.data.max_response_length
    for i, term in enumerate(loaded.config.reward.terms):
        acts_from = getattr(try_build_params("reward", term.name, term.params), "acts_from", 0)
        yield make_problem_if(
            acts_from >= longest,
            (
                f"{TERMS}[{i}]: {term.name} acts on responses from {acts_from} tokens on, but none"
                f" has more than {LONGEST} ({longest}); lower its parameters."
            ),
            (TERMS, LONGEST),
        )
