"""Parts in files of a user's own: found, run once a process, shipped, and what is wrong
with them told.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from config_samples import VALID

from rlhf_megatron import plugins
from rlhf_megatron.cli.main import main
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import load_run_config, read_run_config
from rlhf_megatron.config.show import render_config_yaml
from rlhf_megatron.registry import PACKAGES, load_registry

ESTIMATOR = """
from rlhf_megatron.extend import ADV_ESTIMATORS, AdvantageOutputs

@ADV_ESTIMATORS.register("mine", needs=("token_rewards", "values"), scope="sample")
def mine(inputs, params):
    return AdvantageOutputs(inputs.token_rewards_T - inputs.values_T)
"""
NAMED = VALID + "plugins: [mine.py]\nalgorithm: {adv_estimator: mine}\n"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No plugin of another test is there, and none is left."""
    monkeypatch.setattr(plugins, "_loaded_plugins", {})
    before = {kind: set(load_registry(kind)) for kind in PACKAGES}
    yield
    for kind, names in before.items():
        for name in set(load_registry(kind)) - names:
            del load_registry(kind)._entries[name]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(ESTIMATOR)
    path = tmp_path / "run.yaml"
    path.write_text(NAMED)
    return path


def test_a_file_counts_from_the_one_that_names_it(run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    child = tmp_path / "below" / "child.yaml"
    child.write_text("extends: ../run.yaml\n")
    config = load_run_config(child, with_files=False).config
    assert config.plugins == (str(tmp_path / "mine.py"),)
    again = tmp_path / "again.yaml"
    again.write_text(render_config_yaml(config))
    # an absolute path: it is found from anywhere
    assert load_run_config(again, with_files=False).config == config


def test_on_the_command_line_it_counts_from_the_working_directory(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.py").write_text(ESTIMATOR)
    assert read_run_config(run_file, ["plugins=[other.py]"]).config.plugins == (
        str(tmp_path / "other.py"),
    )
    assert read_run_config(run_file, ["plugins=[some.module]"]).config.plugins == ("some.module",)


def test_a_module_is_found_from_the_working_directory(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plugin_module_of_a_test.py").write_text(ESTIMATOR)
    load_run_config(run_file, ["plugins=[plugin_module_of_a_test]"], with_files=False)


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (None, ["plugins=[gone.py]"],
         (
             "gone.py is not a file; correct the path, which counts from the file that names it."
             " [command line]"
         )),
        (None, ["plugins=[gone.module]"], "plugins: gone.module is no module in"),
        ("import gone_module", [], "cannot be run: ModuleNotFoundError in "),
        ("x = 1\n1 / 0", [], "mine.py:2: division by zero"),
        (ESTIMATOR.replace('"mine"', '"grpo"'), [],
         "advantage estimator 'grpo' is registered already; choose another name."),
        (ESTIMATOR.replace('"values"', '"dreams"'), [],
         "algorithm.adv_estimator='mine' needs dreams, which this run does not compute"),
        (ESTIMATOR.replace('"mine"', '"mein"'), [],
         "algorithm: unknown advantage estimator 'mine'. Did you mean 'mein'?"),
        (ESTIMATOR.replace('"sample"', '"group"'), ["rollout.n=1", "actor.mini_batch_size=32"],
         "rollout.n (1) must be at least 2 for algorithm.adv_estimator mine"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(
    run_file: Path, text: str | None, overrides: list[str], expected: str
) -> None:
    if text is not None:
        run_file.with_name("mine.py").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_run_config(run_file, overrides, with_files=False)
    (problem,) = error.value.problems
    assert expected in problem


def test_one_that_registers_nothing_is_warned_of(
    run_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_file.write_text(VALID + "plugins: [mine.py]\n")
    run_file.with_name("mine.py").write_text("x = 1\n")
    with caplog.at_level(logging.WARNING):
        load_run_config(run_file, with_files=False)
    assert "mine.py registers nothing; remove it, or register a part in it." in caplog.text


def test_check_says_what_it_runs_and_show_runs_nothing(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file.with_name("mine.py").write_text(f"print('it runs')\n{ESTIMATOR}")
    # its own problem, and none of the estimator
    assert main(["config", "show", str(run_file), "model.path=''"]) == 2
    shown = capsys.readouterr()
    assert "it runs" not in shown.out and "adv_estimator" in shown.out and "1 problem" in shown.err
    assert main(["config", "check", str(run_file), "--no-files", "--no-plugins"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "not checked: advantage estimator 'mine' (algorithm.adv_estimator), which a plugin may have"
    )
    assert main(["config", "check", str(run_file), "--no-files"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"runs {run_file.with_name('mine.py')}",
        "it runs",
    ]
