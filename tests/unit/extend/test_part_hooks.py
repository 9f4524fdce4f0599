"""Hooks of users' classes: former names are refused, missing ones named, near ones warned of."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from rlhf_megatron import extend, plugins
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.extend.door_names import BASE_CLASSES
from rlhf_megatron.part_hooks import (
    FORMER_HOOKS_FILE,
    _is_one_letter_away,
    check_part_class,
    list_hooks,
    required_hook,
)
from rlhf_megatron.plugins import load_plugins
from rlhf_megatron.registry import PACKAGES, load_registry

FORMER_HOOKS = [tuple(line.split("\t")) for line in FORMER_HOOKS_FILE.read_text().splitlines()[1:]]


@pytest.fixture(autouse=True)
def fresh_registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No plugin of another test is there, and none is left."""
    monkeypatch.setattr(plugins, "_loaded_plugins", {})
    before = {kind: set(load_registry(kind)) for kind in PACKAGES}
    yield
    for kind, names in before.items():
        for name in set(load_registry(kind)) - names:
            del load_registry(kind)._entries[name]


def hook(self: Any, *args: Any) -> None:
    """Stands for a method of a user's class."""


SCHEDULE_HOOKS = {
    "max_lag": 0,
    "sync_policy": None,
    "stale_policy": None,
    "annotates_early": False,
    "count_groups_to_start": hook,
    "select_groups_to_annotate": hook,
    "select_batch": hook,
    "select_groups_to_give_up": hook,
    "find_stale_groups": hook,
}


def test_a_logger_with_a_former_hook_is_refused() -> None:
    with pytest.raises(ValueError) as error:

        @extend.LOGGERS.register("planted")
        class Lines(extend.RunLogger):
            def row(self, kind: str, step: int, seconds: float, metrics: dict[str, float]) -> None:
                pass

    assert str(error.value) == (
        "logger 'planted': test_a_logger_with_a_former_hook_is_refused.<locals>.Lines.row is"
        " log_metrics now and would never be called; rename it."
    )
    assert "planted" not in extend.LOGGERS


def test_a_logger_with_other_methods_is_fine(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):

        @extend.LOGGERS.register("planted")
        class Lines(extend.RunLogger):
            rows = 3
            table: dict[str, float]

            def log_metrics(self, *args: Any) -> None:
                pass

            def write_row(self) -> None:
                pass

            def _row(self) -> None:
                pass

    assert "planted" in extend.LOGGERS and not caplog.text


def test_all_former_hooks_of_a_class_are_told_at_once() -> None:
    kind = type("Kind", (extend.BalancerKind,), {"build": hook, "check": hook, "settings": ()})
    with pytest.raises(ValueError) as error:
        extend.BALANCERS.register("planted")(kind)
    for former, current in (
        ("build", "build_balancer"),
        ("check", "check_rollout"),
        ("settings", "setting_keys"),
    ):
        assert f"Kind.{former} is {current} now" in str(error.value)
    assert "lacks" not in str(error.value), "build_balancer is there, under its former name"


def test_a_duck_typed_schedule_is_checked_against_the_protocol() -> None:
    complete = type("Complete", (), SCHEDULE_HOOKS)
    extend.SCHEDULES.register("planted")(complete)
    cut = {name: value for name, value in SCHEDULE_HOOKS.items() if name != "select_batch"}
    with pytest.raises(ValueError, match=r"'cut': Cut lacks select_batch; define them, or derive"):
        extend.SCHEDULES.register("cut")(type("Cut", (), cut))
    with pytest.raises(ValueError) as error:
        extend.SCHEDULES.register("old")(type("Old", (), {**cut, "batch": hook}))
    assert "Old.batch is select_batch now" in str(error.value)
    assert "lacks" not in str(error.value)


def test_a_derived_schedule_needs_only_what_has_no_default() -> None:
    own = {"max_lag": 0, "count_groups_to_start": hook, "select_batch": hook}
    extend.SCHEDULES.register("planted")(type("Derived", (extend.Schedule,), own))
    with pytest.raises(ValueError, match=r"Lacking lacks count_groups_to_start, max_lag;"):
        lacking = type("Lacking", (extend.Schedule,), {"select_batch": hook})
        extend.SCHEDULES.register("lacking")(lacking)


def test_fields_and_attributes_set_at_creation_count() -> None:
    without_lag = {name: value for name, value in SCHEDULE_HOOKS.items() if name != "max_lag"}

    class SetsItself:
        def __init__(self) -> None:
            self.max_lag = 1

    @dataclass(frozen=True)
    class HasField:
        max_lag: int

    extend.SCHEDULES.register("planted0")(type("Own", (SetsItself,), without_lag))
    with_field = type("Own", (HasField,), without_lag)
    extend.SCHEDULES.register("planted1", with_field)(with_field)
    with pytest.raises(ValueError, match="lacks max_lag"):
        extend.SCHEDULES.register("bare")(type("Bare", (), without_lag))


def test_a_kind_of_engine_must_make_a_client() -> None:
    with pytest.raises(ValueError, match="Bare lacks make_client"):
        extend.ENGINES.register("planted")(type("Bare", (extend.EngineKind,), {}))
    extend.ENGINES.register("planted")(type("Whole", (extend.LocalEngineKind,), {}))


def test_hooks_of_a_base_between_are_checked() -> None:
    """A user's class may derive from another one of the user."""
    between = type("Between", (extend.LocalEngineKind,), {"connect": hook})
    with pytest.raises(ValueError, match=r"Between\.connect is make_client now"):
        extend.ENGINES.register("planted")(type("Outer", (between,), {}))


def test_parameters_of_a_reward_are_checked() -> None:
    @dataclass(frozen=True)
    class Labelled(extend.AnswerParams):  # which has the same former hook as a protocol
        size: int = 1

        def label_problem(self, label: str) -> str:
            return ""

    with pytest.raises(ValueError) as error:
        extend.REWARDS.register("planted", Labelled)(lambda sample, params: None)
    assert "Labelled.label_problem is find_label_problem now" in str(error.value)
    assert str(error.value).count("label_problem now") == 1
    assert "lacks" not in str(error.value), "hooks of parameters are optional"


CLIENT = """
from rlhf_megatron.extend import LocalEngine, REWARDS

class Client(LocalEngine):
    def pause(self, mode="retract"):
        pass

    def {near}(self):
        pass

REWARDS.register("{name}")(lambda sample, params: None)
"""


def test_a_class_that_no_registry_sees_is_checked_after_the_plugin_ran(tmp_path: Path) -> None:
    plugin = tmp_path / "client.py"
    plugin.write_text(CLIENT.format(near="probe_twice", name="planted"))
    for _ in range(2):  # it is run once a process, and refused each time
        with pytest.raises(ConfigError) as error:
            load_plugins([str(plugin)])
        (problem,) = error.value.problems
        assert problem == (
            f"plugins: {plugin} Client.pause is pause_decoding now and would never be called;"
            " rename it."
        )


def test_a_hook_that_is_refused_at_registration_names_the_line(tmp_path: Path) -> None:
    plugin = tmp_path / "lines.py"
    plugin.write_text(
        "from rlhf_megatron.extend import LOGGERS, RunLogger\n"
        "class Lines(RunLogger):\n"
        "    def row(self, *values): ...\n"
        "LOGGERS.register('lines')(Lines)\n"
    )
    with pytest.raises(ConfigError) as error:
        load_plugins([str(plugin)])
    (problem,) = error.value.problems
    assert f"ValueError in {plugin}:4: logger 'lines': Lines.row is log_metrics now" in problem


def test_a_name_one_letter_away_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        near = type("Near", (extend.RunLogger,), {"log_metric": hook, "flsuh": hook})
        extend.LOGGERS.register("planted")(near)
    assert (
        "logger 'planted': Near.log_metric is one letter away from the hook log_metrics"
        in caplog.text
    )
    assert "Near.flsuh is one letter away from the hook flush" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        both = type("Both", (extend.RunLogger,), {"log_metric": hook, "log_metrics": hook})
        extend.LOGGERS.register("planted_too")(both)
    assert not caplog.text, "the hook is there as well: the other name is no mistake"

    plugin = tmp_path / "client.py"
    text = CLIENT.replace("def pause(", "def hold(").format(near="check_healt", name="far")
    plugin.write_text(text)
    with caplog.at_level(logging.WARNING):
        load_plugins([str(plugin)])
    assert (
        "class Client: Client.check_healt is one letter away from the hook check_health"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("name", "other", "expected"),
    [
        ("flush", "flush", False),
        ("flus", "flush", True),
        ("fflush", "flush", True),
        ("flash", "flush", True),
        ("flsuh", "flush", True),
        ("flashy", "flush", False),
        ("hsulf", "flush", False),
        ("a", "b", True),
        ("", "b", True),
        ("ab", "ba", True),
        ("abc", "cba", False),
    ],
)
def test_one_letter_away(name: str, other: str, expected: bool) -> None:
    assert _is_one_letter_away(name, other) is expected
    assert _is_one_letter_away(other, name) is expected


@pytest.mark.parametrize("row", FORMER_HOOKS, ids=lambda row: f"{row[1]}.{row[2]}")
def test_every_former_hook_leads_to_one_of_today(row: tuple[str, str, str, str]) -> None:
    module, class_name, former, current = row
    (base,) = (
        getattr(extend, name)
        for name in BASE_CLASSES
        if (getattr(extend, name).__module__, getattr(extend, name).__qualname__)
        == (module, class_name)
    )
    hooks = list_hooks(base)
    assert current in hooks and former not in hooks
    planted = type("Planted", (base,), {former: hook})
    with pytest.raises(ValueError, match=rf"Planted\.{former} is \w+ now"):
        check_part_class(planted, base, "a part")


def test_our_own_parts_have_no_former_hooks() -> None:
    """They are not checked at run time."""
    by_class = {(module, name): [] for module, name, _, _ in FORMER_HOOKS}
    for module, name, former, _ in FORMER_HOOKS:
        by_class[module, name].append(former)
    bases = [getattr(extend, name) for name in BASE_CLASSES]
    classes = {subclass for base in bases for subclass in base.__subclasses__()} | set(bases)
    ours = [one for one in classes if one.__module__.startswith("rlhf_megatron.")]
    assert len(ours) > 30
    for one in ours:
        for base in one.__mro__:
            for former in by_class.get((base.__module__, base.__qualname__), ()):
                assert not hasattr(one, former), f"{one.__qualname__}.{former}"


def test_required_hooks_of_properties_and_methods() -> None:
    class Base(Protocol):
        @property
        @required_hook
        def size(self) -> int: ...

        @required_hook
        def grow(self) -> None: ...

        def shrink(self) -> None: ...

    with pytest.raises(ValueError, match="Bare lacks grow, size;"):
        check_part_class(type("Bare", (Base,), {}), Base, "a part")
    check_part_class(type("Whole", (Base,), {"grow": hook, "size": 3}), Base, "a part")
