"""Parts whose arguments are not what a run passes are refused when they are registered."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from config_samples import VALID
from places import ROOT

from rlhf_megatron import extend
from rlhf_megatron.part_hooks import list_hooks
from rlhf_megatron.part_signatures import list_method_problems
from rlhf_megatron.registry import PACKAGES, load_registry


@pytest.fixture(autouse=True)
def forget_planted_parts() -> Iterator[None]:
    """Remove the parts that a test registers."""
    names = {kind: set(load_registry(kind)) for kind in PACKAGES}
    yield
    for kind, former_names in names.items():
        registry = load_registry(kind)
        for name in set(registry) - former_names:
            del registry._entries[name]


def refuse(register: Callable[[Any], Any], part: Any) -> str:
    """Return the error of registering the part."""
    with pytest.raises(ValueError) as error:
        register(part)
    return str(error.value)


def needs_one_more(sample: Any, params: Any, threshold: Any) -> None: ...


def takes_the_sample_alone(sample: Any) -> None: ...


def takes_fields(response: Any, label: Any) -> None: ...


def takes_verl_fields(data_source: Any, solution_str: Any) -> None: ...


def needs_keyword(sample: Any, params: Any, *, scale: Any) -> None: ...


async def waits(sample: Any, params: Any) -> None: ...


def yields(sample: Any, params: Any) -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (
            needs_one_more,
            "needs_one_more(sample, params, threshold) is called as needs_one_more(sample, params):"
            " missing a required argument: 'threshold'; it must take these arguments and need no"
            " others.",
        ),
        (
            takes_the_sample_alone,
            "takes_the_sample_alone(sample) is called as takes_the_sample_alone(sample, params):"
            " too many positional arguments; it must take these arguments and need no others.",
        ),
        (
            takes_fields,
            "takes_fields(response, label) is called as takes_fields(sample, params), so that"
            " response, label would not be what the name says; write"
            " `takes_fields(sample, params)`, and read sample.response.",
        ),
        (
            takes_verl_fields,
            "takes_verl_fields(data_source, solution_str) is called as takes_verl_fields(sample,"
            " params), so that data_source, solution_str would not be what the name says; write"
            " `takes_verl_fields(sample, params)`, and read sample.source.",
        ),
        (
            needs_keyword,
            "needs_keyword(sample, params, *, scale) is called as needs_keyword(sample, params):"
            " missing a required argument: 'scale'; it must take these arguments and need no"
            " others.",
        ),
        (
            waits,
            "waits(sample, params) is async, and is called as waits(sample, params) for its result;"
            " write a function.",
        ),
        (
            yields,
            "yields(sample, params) is a generator, and is called as yields(sample, params) for its"
            " result; return that.",
        ),
    ],
)
def test_a_reward_with_a_wrong_signature(part: Any, problem: str) -> None:
    assert refuse(extend.REWARDS.register("planted"), part) == f"reward 'planted': {problem}"
    assert "planted" not in extend.REWARDS


def test_other_forms_of_a_right_reward_are_taken() -> None:
    def score(sample: Any, params: Any, scale: float = 1.0) -> None: ...

    @functools.wraps(takes_the_sample_alone)
    def wrapped(*args: Any) -> None: ...

    class Score:
        def __call__(self, one: Any, other: Any) -> None: ...

    parts = (
        score,
        wrapped,
        Score(),
        functools.partial(needs_one_more, threshold=1),
        lambda s, p: s,
    )
    for number, part in enumerate(parts):
        extend.REWARDS.register(f"planted{number}")(part)


def takes_nothing() -> None: ...


@pytest.mark.parametrize(
    ("register", "call"),
    [
        (extend.ADV_ESTIMATORS.register, "takes_nothing(inputs, params)"),
        (extend.register_group_estimator, "takes_nothing(rewards_B, groups, inputs, params)"),
        (extend.POLICY_LOSSES.register, "takes_nothing(inputs, params)"),
        (extend.PREFERENCE_LOSSES.register, "takes_nothing(pairs, params)"),
        (extend.DISTILLATION_LOSSES.register, "takes_nothing(student, teacher)"),
        (extend.AGGREGATIONS.register, "takes_nothing(inputs)"),
        (extend.TASKS.register, "takes_nothing(params)"),
    ],
)
def test_functions_of_the_other_kinds(register: Callable[..., Any], call: str) -> None:
    message = refuse(register("planted"), takes_nothing)
    assert f"'planted': takes_nothing() is called as {call}: too many positional" in message


def test_columns_as_arguments_of_an_estimator() -> None:
    def estimate(rewards: Any, group_ids_B: Any) -> None: ...

    message = refuse(extend.ADV_ESTIMATORS.register("planted"), estimate)
    assert "so that rewards, group_ids_B would not be what the name says" in message
    assert message.endswith("write `estimate(inputs, params)`, and read inputs.rewards_B.")


def test_classes_that_a_run_cannot_make() -> None:
    class Lines(extend.RunLogger):
        def __init__(self, run_dir: Path) -> None: ...

    assert "Lines(run_dir) is called as Lines(run_dir, total_steps, facts)" in refuse(
        extend.LOGGERS.register("planted"), Lines
    )

    class Engine(extend.LocalEngineKind):
        def __init__(self, port: int) -> None: ...

    assert "Engine(port) is called as Engine()" in refuse(
        extend.ENGINES.register("planted"), Engine
    )


def test_functions_of_a_model_family() -> None:
    right = extend.FAMILIES.get("llama").build
    with pytest.raises(ValueError) as error:
        replace(right, name="mine", make_table=takes_nothing)
    assert str(error.value).startswith(
        "model family 'mine', make_table: takes_nothing() is called as"
        " takes_nothing(hf_config, padded_vocab_size): too many positional arguments"
    )


def test_methods_of_our_own_parts() -> None:
    interfaces = {
        extend.LOGGERS: extend.RunLogger,
        extend.SCHEDULES: extend.Schedule,
        extend.ENGINES: extend.EngineKind,
        extend.BALANCERS: extend.BalancerKind,
    }
    for registry, interface in interfaces.items():
        for name in registry:
            part = registry.get(name).build
            assert list_method_problems(part, interface, list_hooks(interface)) == []


def test_methods_that_a_run_cannot_call() -> None:
    class Lines(extend.RunLogger):
        def log_metrics(self, step: int, metrics: dict[str, float]) -> None: ...

        def show_note(self, *texts: str) -> None: ...

        def close(self) -> None: ...

    place = "test_methods_that_a_run_cannot_call.<locals>.Lines"
    assert refuse(extend.LOGGERS.register("planted"), Lines) == (
        f"logger 'planted': {place}.close(self) is called as close(is_failed): too many positional"
        f" arguments; take these arguments. {place}.log_metrics(self, step, metrics) is called as"
        " log_metrics(row_kind, step, run_seconds, metrics): too many positional arguments; take"
        " these arguments."
    )


def test_methods_of_parameters() -> None:
    @dataclass(frozen=True)
    class Labelled(extend.AnswerParams):
        def find_label_problem(self, label: str) -> str:
            return ""

    message = refuse(extend.REWARDS.register("planted", Labelled), lambda sample, params: None)
    assert "find_label_problem(self, label) is called as find_label_problem(label, is_json)" in (
        message
    )
    assert message.count("find_label_problem(self") == 1


PLUGIN = """
from rlhf_megatron.extend import REWARDS, RewardResult

@REWARDS.register("mine")
def mine(response, label):
    return RewardResult(float(response == label))
"""


def test_config_check_refuses_a_registered_reward(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    (tmp_path / "run.yaml").write_text(VALID + "plugins: [mine.py]\nreward: {name: mine}\n")
    checked = subprocess.run(
        [sys.executable, "-m", "rlhf_megatron", "config", "check", "--no-files", "run.yaml"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 2
    assert (
        "mine.py:4: reward 'mine': mine(response, label) is called as mine(sample, params), so"
        " that response, label would not be what the name says; write `mine(sample, params)`, and"
        " read sample.response."
    ) in checked.stderr
