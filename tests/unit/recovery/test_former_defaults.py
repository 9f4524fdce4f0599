"""A run that is resumed, repeated or exported keeps the defaults with which it began."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import yaml
from older_checkpoints import remove_settings
from places import MODEL

from rlhf_megatron.api import Run
from rlhf_megatron.config.former_defaults import (
    FORMER_DEFAULTS,
    FormerDefault,
    add_implied_defaults,
    is_setting_in_use,
    keep_former_defaults,
    list_implied_defaults,
)
from rlhf_megatron.config.key_paths import get_config_value
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.resume_changes import compute_settings_digest, flatten_config_yaml
from rlhf_megatron.config.schema import OptimConfig, RunConfig
from rlhf_megatron.config.show import render_config_yaml
from rlhf_megatron.config.yaml_nodes import LoadedConfig, ValueOrigin
from rlhf_megatron.controller.recovery.checkpoint_store import CheckpointStore
from rlhf_megatron.jobs.train_job import CHECKED_ENV, TrainJob
from rlhf_megatron.weights.checkpoint_manifest import make_file_record

KEY = "actor.optim.lr_decay_ends"
FORMER = "at_last_step"
NEW = "after_last_step"


def write_user_config(directory: Path, decay_ends: str = "") -> Path:
    path = directory / "run.yaml"
    rows = directory / "rows.jsonl"
    path.write_text(
        f"model: {{path: {MODEL}, init_seed: 1}}\n"
        f"actor: {{optim: {{lr_decay_style: cosine{decay_ends}}}}}\n"
        f"data: {{train_files: [{rows}], val_files: [{rows}], max_prompt_length: 8,"
        " max_response_length: 8}\n"
        f"trainer: {{experiment_name: tiny, default_local_dir: {directory / 'runs'},"
        f" device: cpu, runtime: inline, n_gpus_per_node: 1}}\n"
    )
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return path


def make_checkpoint(run_dir: Path, step: int, *missing: str, **settings: str) -> Path:
    """A checkpoint of a step, without the settings `missing`, and with `settings` (a key's dots are
    two underscores).
    """
    config_path = run_dir.parent.parent / "run.yaml"
    loaded = read_run_config(
        config_path, [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    )
    store = CheckpointStore(run_dir / "checkpoints")
    partial = store.begin_checkpoint(step)
    (partial / "config.yaml").write_text(render_config_yaml(loaded.config))
    record = make_file_record(partial, partial / "config.yaml")
    path = store.commit_checkpoint(step, step, {}, {}, [record]).path
    remove_settings(path, *missing)
    return path


@pytest.fixture(autouse=True)
def job_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """These jobs look at no files of models: they are as a rank makes them."""
    monkeypatch.setenv(CHECKED_ENV, "1")


def read_value(config: RunConfig) -> str:
    return config.actor.optim.lr_decay_ends


def test_a_new_run_has_the_new_default(tmp_path: Path) -> None:
    assert read_value(TrainJob(write_user_config(tmp_path)).config) == NEW


def test_a_resumed_run_keeps_the_former_default_for_life(tmp_path: Path) -> None:
    config_path = write_user_config(tmp_path)
    run_dir = tmp_path / "runs" / "tiny"
    make_checkpoint(run_dir, 1, KEY)
    resumed = TrainJob(config_path).config
    assert read_value(resumed) == FORMER
    # the run's next checkpoint has the value in writing
    make_checkpoint(run_dir, 2, **{KEY.replace(".", "__"): FORMER})
    assert read_value(TrainJob(config_path).config) == FORMER
    started_anew = TrainJob(config_path, ("trainer.resume_mode=disable",)).config
    assert read_value(started_anew) == NEW


def test_a_checkpoint_with_the_new_value_changes_nothing(tmp_path: Path) -> None:
    config_path = write_user_config(tmp_path)
    make_checkpoint(tmp_path / "runs" / "tiny", 1)
    assert read_value(TrainJob(config_path).config) == NEW


def test_the_newest_whole_checkpoint_counts(tmp_path: Path) -> None:
    config_path = write_user_config(tmp_path)
    run_dir = tmp_path / "runs" / "tiny"
    make_checkpoint(run_dir, 1, KEY)
    (make_checkpoint(run_dir, 2) / "config.yaml").write_text("cut")
    assert read_value(TrainJob(config_path).config) == FORMER


@pytest.mark.parametrize("place", ["file", "command line"])
def test_what_the_user_set_stays(tmp_path: Path, place: str) -> None:
    written = f", lr_decay_ends: {NEW}" if place == "file" else ""
    overrides = () if place == "file" else (f"{KEY}={NEW}",)
    config_path = write_user_config(tmp_path, written)
    make_checkpoint(tmp_path / "runs" / "tiny", 1, KEY)
    assert read_value(TrainJob(config_path, overrides).config) == NEW


def test_a_run_from_the_checkpoint_of_another_run_keeps_its_default(tmp_path: Path) -> None:
    config_path = write_user_config(tmp_path)
    checkpoint = make_checkpoint(tmp_path / "runs" / "tiny", 1, KEY)
    overrides = (
        "trainer.experiment_name=other",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={checkpoint}",
    )
    assert read_value(TrainJob(config_path, overrides).config) == FORMER


def test_the_line_says_what_stays_and_how_to_change_it(tmp_path: Path) -> None:
    (former, *_) = FORMER_DEFAULTS
    assert former.describe(NEW) == (
        "actor.optim.lr_decay_ends stays at_last_step because the run began when the decay of the"
        " learning rate ended at the last optimizer step; set"
        " actor.optim.lr_decay_ends=after_last_step for what a new run does"
    )


@pytest.mark.parametrize("sign", ["run.lock", "attempts.jsonl", "manifest.json", "capsule.json"])
def test_the_configuration_of_an_older_run_means_the_former_default(
    tmp_path: Path, sign: str
) -> None:
    """Jobs that read a run without training it, and replays, read this file."""
    config_path = write_user_config(tmp_path)
    checkpoint = make_checkpoint(tmp_path / "runs" / "tiny", 1, KEY)
    run_dir = tmp_path / "older"
    run_dir.mkdir()
    shutil.copy(checkpoint / "config.yaml", run_dir / "config.yaml")
    assert read_value(read_run_config(run_dir / "config.yaml").config) == NEW, "of no run"
    (run_dir / sign).write_text("")
    assert read_value(read_run_config(run_dir / "config.yaml").config) == FORMER
    assert read_value(Run(run_dir).config) == FORMER
    changed = read_run_config(run_dir / "config.yaml", [f"{KEY}={NEW}"])
    assert read_value(changed.config) == NEW
    assert read_value(read_run_config(config_path).config) == NEW


def test_a_lock_file_of_an_older_run_means_the_former_default(tmp_path: Path) -> None:
    write_user_config(tmp_path)
    checkpoint = make_checkpoint(tmp_path / "runs" / "tiny", 1, KEY)
    tree = yaml.safe_load((checkpoint / "config.yaml").read_text())
    path = tmp_path / "config.lock.yaml"
    path.write_text(yaml.safe_dump({"lock": {"packages": {}, "digests": {}}} | tree))
    assert read_value(read_run_config(path).config) == FORMER


def test_a_replay_reads_what_the_recorded_run_had(tmp_path: Path) -> None:
    config_path = write_user_config(tmp_path)
    checkpoint = make_checkpoint(tmp_path / "runs" / "tiny", 1, KEY)
    job = TrainJob(config_path, replay=1, replay_from=checkpoint)
    assert read_value(job.config) == FORMER
    assert read_value(TrainJob(config_path, replay=checkpoint).config) == FORMER


def test_a_setting_that_was_not_in_use_implies_nothing() -> None:
    settings = {"actor.optim.lr_decay_style": "linear", "critic.optim.lr_decay_style": "constant"}
    assert add_implied_defaults(settings) == {**settings, KEY: FORMER}
    loaded, kept = keep_former_defaults(LoadedConfig.from_defaults(), settings)
    assert [former.key for former in kept] == [KEY]
    assert loaded.config.critic.optim.lr_decay_ends == NEW
    without_section = FormerDefault("data.shuffle", False, True, "")
    assert not is_setting_in_use(without_section, settings)
    assert is_setting_in_use(without_section, {"data.seed": "1"})
    assert keep_former_defaults(LoadedConfig.from_defaults(), {})[1] == []


def test_a_journal_of_the_former_default_stays_usable() -> None:
    before = {"actor.optim.lr": "1e-3"}
    assert compute_settings_digest(before) == compute_settings_digest({**before, KEY: FORMER})
    assert compute_settings_digest(before) != compute_settings_digest({**before, KEY: NEW})


@pytest.mark.parametrize("former", FORMER_DEFAULTS, ids=lambda former: former.key)
def test_each_entry_of_the_table_is_a_setting_with_another_default(
    former: FormerDefault,
) -> None:
    default = get_config_value(RunConfig(), former.key)
    assert type(default) is type(former.value) and default != former.value


@pytest.mark.parametrize("job", ["train", "sft", "reward-model"])
@pytest.mark.parametrize("style", ["linear", "cosine", "constant", "inverse-square-root"])
def test_a_new_setting_is_written_wherever_it_is_in_use(
    job: Literal["train", "sft", "reward-model"],
    style: Literal["linear", "cosine", "constant", "inverse-square-root"],
) -> None:
    """Else its absence would say nothing about the version that wrote the file."""
    optim = OptimConfig(lr_decay_style=style)
    default = RunConfig()
    config = replace(
        default,
        job=job,
        actor=replace(default.actor, optim=optim),
        critic=replace(default.critic, optim=optim),
        warmup=replace(default.warmup, optim=optim, max_steps=1),
        algorithm=replace(default.algorithm, adv_estimator="gae"),
    )
    assert list_implied_defaults(flatten_config_yaml(render_config_yaml(config))) == []


@pytest.mark.parametrize(
    ("written", "expected"),
    [("reward", "reward"), ("exact_match", "main_reward"), (None, "main_reward")],
)
def test_a_filter_keeps_the_default_with_which_it_began(written: str | None, expected: str) -> None:
    """A run without a filter has no metric in writing; another metric was the user's choice."""
    metric = "algorithm.filter_groups.metric"
    settings = {"algorithm.filter_groups.enable": "true"}
    if written is not None:
        settings[metric] = written
    loaded, kept = keep_former_defaults(LoadedConfig.from_defaults(), settings)
    assert loaded.config.algorithm.filter_groups.metric == expected
    assert [former.key for former in kept] == ([metric] if expected == "reward" else [])
    chosen = LoadedConfig(RunConfig(), {metric: ValueOrigin("run.yaml", 3, layer=0)})
    assert keep_former_defaults(chosen, settings)[1] == []
