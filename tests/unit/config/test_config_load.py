"""YAML, extends, overrides and provenance: how a run's configuration is put together."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from places import ROOT

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.key_paths import get_config_value, list_leaf_keys
from rlhf_megatron.config.load import load_run_config, read_run_config
from rlhf_megatron.config.schema import OptimConfig, RunConfig, SamplingConfig
from rlhf_megatron.config.show import format_settings_table, format_yaml_value, render_config_yaml

SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_run_config(path, overrides)
    return caught.value.problems


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_shipped_configuration_is_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    loaded = load_run_config(path, with_files=False)
    model = Path(loaded.config.model.path)
    # A model that is fetched or trained first may be absent, and one of many ranks is a shape only;
    # one that the repository holds must fit its configuration.
    is_held = loaded.config.model.init_seed is not None or any(model.glob("*.safetensors"))
    if is_held and not model.is_relative_to(".cache"):
        load_run_config(path)


def test_types_follow_the_schema_not_the_spelling(tmp_path: Path) -> None:
    text = """
actor:
  optim: {lr: 1e-4, eps: 1, betas: [0, 9.5e-1]}
trainer:
  experiment_name: 2024
  logger: [console]
data: {prompt_key: yes, train_files: ["a.jsonl", b.jsonl]}
rollout: {dtype: null, sglang: {env: {OMP_NUM_THREADS: 08}, args: {mem-fraction-static: 5e-1, \
"on": on}}}
"""
    config = read_run_config(write(tmp_path / "run.yaml", text)).config
    assert config.actor.optim == OptimConfig(lr=0.0001, eps=1.0, betas=(0.0, 0.95))
    assert type(config.actor.optim.eps) is float
    assert config.trainer.experiment_name == "2024"
    assert config.data.prompt_key == "yes"
    assert config.data.train_files == (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    assert config.rollout.dtype is None
    assert config.rollout.sglang.env == {"OMP_NUM_THREADS": "08"}
    assert config.rollout.sglang.args == {"mem-fraction-static": 0.5, "on": "on"}


def test_a_section_given_in_part_keeps_its_own_defaults(tmp_path: Path) -> None:
    config = read_run_config(write(tmp_path / "run.yaml", "rollout: {val_kwargs: {n: 4}}")).config
    # SamplingConfig() alone has 1.0
    assert config.rollout.val_kwargs == SamplingConfig(temperature=0.0, n=4)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("actor: {mini_batch_size: 1e3}",
         (
             "actor.mini_batch_size (1e3) must be a whole number; write it without point and"
             " exponent, such as 1000."
         )),
        ("actor: {mini_batch_size: true}",
         "actor.mini_batch_size (true) must be a whole number; write digits only, such as 8."),
        ("actor: {mini_batch_size: 010}",
         "actor.mini_batch_size (010) must be a whole number; write digits only, such as 8."),
        ('actor: {optim: {lr: "1e-4"}}',
         "actor.optim.lr ('1e-4') must be a number; remove the quotes and write it plainly."),
        ("actor: {optim: {lr: .nan}}",
         "actor.optim.lr (.nan) must be a number; write one such as 1e-6."),
        ("actor: {optim: {betas: [0.9]}}",
         "actor.optim.betas ([0.9]) must have 2 entries; write 2, between brackets."),
        ("actor: {shuffle: yes}",
         "actor.shuffle (yes) must be true or false; write true or false."),
        ("actor: {optim: 3}",
         "actor.optim (3) is not a section; give it keys with values or remove it."),
        ("actor:", "actor is empty; give it keys with values or remove it."),
        ("data: {train_files: a.jsonl}",
         "data.train_files (a.jsonl) must be a list; write [a.jsonl] with brackets."),
        ("data: {train_files: [1, [2]]}",
         "data.train_files[1] ([2]) must be text; write a single value."),
        ("reward: {name: null}",
         "reward.name (null) must be text; give a value, or remove the key for the default."),
        ("reward: {params: 3}", "reward.params (3) must be a mapping; write {name: value}."),
        ("model: {init_seed: x}",
         "model.init_seed (x) must be a whole number; write digits only, such as 8."),
        ("model: {dtype: bfloat}",
         "model.dtype (bfloat) must be one of float32, bfloat16; did you mean bfloat16?"),
        ("model: {path: !!python/name:os.system x}",
         "tag 'tag:yaml.org,2002:python/name:os.system' is not supported; write a plain value."),
        ("model: {path: a, path: b}", "key 'path' is written twice in one section; keep one."),
        ("model: &m {path: *m}", "an anchor contains itself; remove the alias."),
        ("model: {<<: {path: a}}",
         "a merge key '<<' is not supported; use extends or write the keys out."),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_rule_fix_and_place(
    tmp_path: Path, line: str, expected: str
) -> None:
    path = write(tmp_path / "run.yaml", f"# first line\n{line}\n")
    assert problems(path) == [f"{expected} [{path}:2]"]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("actor.mini_batch_sise", "Did you mean actor.mini_batch_size?"),
        ("rollout.train_batch_size", "A key of that name exists as data.train_batch_size."),
        ("actr.mini_batch_size", "Did you mean actor?"),
        ("lr", (
            "A key of that name exists as actor.optim.lr and warmup.optim.lr and critic.optim.lr."
        )),
        ("trainer.zzz", "Remove it; `rlhf-megatron config reference` lists all keys."),
        ("actor.ppo_mini_batch_size",
         (
             "Here it is actor.mini_batch_size (it counts samples (prompts x rollout.n), where verl"
             " counts prompts: multiply by rollout.n)."
         )),
        ("actor_rollout_ref.actor.optim.lr", "Here it is actor.optim.lr."),
        ("actor_rollout_ref.actor.clip_ratio_high",
         "Here it is actor.policy_loss.params.clip_ratio_high."),
        ("actor_rollout_ref.rollout.mode", "Engines are always servers; remove it."),
        ("trainer.max_actor_ckpt_to_keep", "Here it is trainer.max_ckpt_to_keep."),
        ("critic.model.path", "Here it is critic.path."),
        ("algorithm.norm_adv_by_std_in_grpo",
         "Here it is algorithm.params.norm_adv_by_std_in_grpo."),
    ],
)  # fmt: skip
def test_an_unknown_key_gets_the_nearest_or_the_name_it_has_here(
    tmp_path: Path, key: str, hint: str
) -> None:
    (problem,) = problems(write(tmp_path / "run.yaml", ""), f"{key}=1")
    assert problem.startswith("unknown ") and problem.endswith(" [command line]")
    assert hint in problem


def test_all_problems_of_all_kinds_come_at_once_without_echoes(tmp_path: Path) -> None:
    text = """
model: {path: nowhere, dtype: bf16}
data: {task: addition, train_files: [x.jsonl]}
actor: {mini_batch_sise: 7, optim: {lr: fast}}
actor_rollout_ref: {rollout: {n: 4, name: vllm}}
"""
    path = write(tmp_path / "run.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_run_config(path, ["rollout.top_p=0.9", "trainer.nnodes=0"])
    found = [
        problem.split(" ")[0]
        for problem in caught.value.problems
        if not problem.startswith("unknown")
    ]
    assert found[:5] == [
        "model.dtype",
        "actor.optim.lr",
        "rollout.top_p",
        "trainer.nnodes",
        "data.train_files",
    ]
    assert found[5:] == ["model.path", "data.train_files"]  # both do not exist
    unknown = [
        problem.split(" ")[2] for problem in caught.value.problems if problem.startswith("unknown")
    ]
    assert unknown == [
        "actor.mini_batch_sise",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.rollout.name",
    ]
    assert str(caught.value).count("\n") == len(caught.value.problems) - 1


def test_later_wins_and_every_value_knows_its_place(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    root = write(
        tmp_path / "base" / "root.yaml",
        "actor:\n  ppo_epochs: 2\n  mini_batch_size: 8\n  optim: {lr: 1e-3}\n",
    )
    left = write(tmp_path / "base" / "left.yaml", "extends: root.yaml\nactor: {ppo_epochs: 3}\n")
    right = write(
        tmp_path / "right.yaml", "extends: base/root.yaml\nreward:\n  params: {a: 1, b: 2}\n"
    )
    run = write(
        tmp_path / "run.yaml",
        (
            "extends: [base/left.yaml, right.yaml]\nreward:\n  params: {b: 3}\ndata:\n"
            "  train_files: [a, b]\n"
        ),
    )
    loaded = read_run_config(
        run, ["actor.optim.lr=1e-5", "actor.optim.lr=1e-6", "data.train_files=[/c]"]
    )
    # root is read once: right's copy of it does not undo left
    assert loaded.config.actor.ppo_epochs == 3
    assert loaded.config.actor.mini_batch_size == 8
    assert loaded.config.actor.optim.lr == 1e-6
    assert loaded.config.reward.params == {"a": 1, "b": 3}
    assert loaded.config.data.train_files == ("/c",)
    places = {
        "actor.ppo_epochs": f"{left}:2",
        "actor.mini_batch_size": f"{root}:3",
        "actor.optim.lr": "command line",
        "actor.optim.eps": "default",
        "reward.params.a": f"{right}:3",
        "reward.params.b": f"{run}:3",
    }
    assert {key: str(loaded.find_origin(key)) for key in places} == places
    assert loaded.is_set("actor.optim") and not loaded.is_set("actor.policy_loss")


def test_an_empty_mapping_clears_what_a_base_set(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "algorithm: {params: {a: 1}}")
    run = write(tmp_path / "run.yaml", "extends: base.yaml\n")
    assert read_run_config(run, ["algorithm.params.b=2"]).config.algorithm.params == {
        "a": 1,
        "b": 2,
    }
    assert read_run_config(
        run, ["algorithm.params={}", "algorithm.params.b=2"]
    ).config.algorithm.params == {"b": 2}


def test_extends_that_cannot_be_followed(tmp_path: Path) -> None:
    a = write(tmp_path / "a.yaml", "extends: b.yaml")
    b = write(tmp_path / "b.yaml", "model: {}\nextends: a.yaml")
    assert problems(a) == [
        f"extends goes in a circle (a.yaml -> b.yaml -> a.yaml); remove one of them. [{b}:2]"
    ]
    c = write(tmp_path / "c.yaml", "extends: [gone.yaml, 3]")
    assert problems(c) == [
        f"extends must be a file name, relative to this file, or a list of them. [{c}:1]",
        (
            f"cannot read {tmp_path / 'gone.yaml'}: No such file or directory; correct the"
            f" path. [{c}:1]"
        ),
    ]
    assert problems(write(tmp_path / "d.yaml", "- 1")) == [
        f"{tmp_path / 'd.yaml'} must be a mapping of sections (model:, data:, ...)."
    ]
    (broken,) = problems(write(tmp_path / "e.yaml", "model:\n  path: [a\n"))
    assert broken.startswith("not valid YAML: ") and broken.endswith("e.yaml:3]")


@pytest.mark.parametrize(
    "override", ["+actor.ppo_epochs=1", "--record", "actor.ppo_epochs", "a..b=1", "=1"]
)
def test_malformed_override(tmp_path: Path, override: str) -> None:
    (problem,) = problems(write(tmp_path / "run.yaml", ""), override)
    assert problem.startswith(f"override {override!r} must have the form section.key=value.")
    assert ("no '+' or '--'" in problem) == (override[0] in "+-")


def test_a_path_counts_from_the_file_that_it_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is read; not of what is written, of programs on the PATH, of modules, of
    absolute paths.
    """
    base = tmp_path / "base"
    run = tmp_path / "run"
    there = tmp_path / "there"
    for folder in (base, run, there):
        folder.mkdir()
    write(
        base / "base.yaml",
        "model: {path: ../m, tokenizer_path: /t}\nrollout: {sglang: {python: python3}}\n",
    )
    text = """
extends: ../base/base.yaml
plugins: [parts.py, some.module]
data: {sources: [{name: a, train_files: [a.jsonl]}]}
reward: {name: function, params: {path: "score.py:f"}, terms: [{name: function, params: {path: \
"package.module:f"}}]}
trainer: {default_local_dir: out}
"""
    monkeypatch.chdir(there)
    config = read_run_config(write(run / "run.yaml", text), ["data.val_files=[b.jsonl]"]).config
    assert (config.model.path, config.model.tokenizer_path) == (str(tmp_path / "m"), "/t")
    assert config.rollout.sglang.python == "python3" and config.trainer.default_local_dir == "out"
    assert config.plugins == (str(run / "parts.py"), "some.module")
    assert config.data.sources[0].train_files == (str(run / "a.jsonl"),)
    assert config.data.val_files == (str(there / "b.jsonl"),)
    assert config.reward.params["path"] == f"{run}/score.py:f"
    assert config.reward.terms[0].params["path"] == "package.module:f"


def test_the_resolved_yaml_loads_as_the_same_run(tmp_path: Path) -> None:
    text = (
        "data: {task: addition}\nmodel: {path: m, tokenizer_path: 'no'}\n"
        "actor: {use_kl_loss: true, kl_loss_coef: 0.3}\n"
    )
    run = write(tmp_path / "run.yaml", text)
    overrides = [
        "actor.optim.lr=3.3e-7",
        (
            "reward={name: function, params: {path: a:b, kwargs: {a: [1e-9, null], b:"
            " '1e-4', c: 'no'}}}"
        ),
        "rollout.sglang.args.tp-size=2",
    ]
    config = load_run_config(run, overrides, with_files=False).config
    again = load_run_config(
        write(tmp_path / "again.yaml", render_config_yaml(config)), with_files=False
    ).config
    assert again == config
    assert again.model.tokenizer_path == str(tmp_path / "no") and again.reward.params["kwargs"] == {
        "a": [1e-9, None],
        "b": "1e-4",
        "c": "no",
    }
    # What a switch has put out of use is left out: written down beside the switch, it
    # would be an error.
    config = load_run_config(run, [*overrides, "actor.use_kl_loss=false"], with_files=False).config
    assert config.actor.kl_loss_coef == 0.3 and "kl_loss_coef" not in render_config_yaml(config)
    again = load_run_config(
        write(tmp_path / "again.yaml", render_config_yaml(config)), with_files=False
    ).config
    assert again == replace(config, actor=replace(config.actor, kl_loss_coef=0.001))


def test_the_table_shows_every_setting_aligned_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "trainer:\n  seed: 3\n")
    loaded = read_run_config(path, ["reward.params.x=1e-5"])
    lines = format_settings_table(loaded).splitlines()
    assert len(lines) == len(list_leaf_keys(RunConfig))
    split = {line.split()[0]: line.split()[1:] for line in lines if len(line.split()) == 3}
    assert split["trainer.seed"] == ["3", f"{path}:2"]
    assert any(
        line.startswith("reward.params.x ") and line.endswith(" command line") for line in lines
    )
    assert "\x1b" not in format_settings_table(loaded) and "\x1b" in format_settings_table(
        loaded, use_colours=True
    )


def test_every_default_has_the_type_it_is_annotated_with(tmp_path: Path) -> None:
    defaults = [
        f"{key}={format_yaml_value(get_config_value(RunConfig(), key))}"
        for key in list_leaf_keys(RunConfig)
    ]
    config = read_run_config(write(tmp_path / "run.yaml", ""), defaults).config
    assert config == RunConfig()
    for key in list_leaf_keys(RunConfig):
        assert type(get_config_value(config, key)) is type(get_config_value(RunConfig(), key)), key


def test_importing_the_configuration_imports_no_torch() -> None:
    code = (
        "import sys, rlhf_megatron.config.load, rlhf_megatron.config.type_conversion,"
        " rlhf_megatron.cli.main;"
        "rlhf_megatron.cli.main.build_parser();"
        "sys.exit(', '.join(n for n in ('torch', 'numpy', 'transformers', 'megatron', 'rich') if n"
        " in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_relative_paths_of_a_run_of_an_older_version_count_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "old"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(
        "model: {path: models/a/tiny}\ndata: {train_files: [data/a.jsonl]}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert read_run_config(run / "config.yaml").config.model.path == str(
        run / "models" / "a" / "tiny"
    )
    (run / "run.lock").touch()
    config = read_run_config(run / "config.yaml").config
    assert (config.model.path, config.data.train_files) == (
        str(tmp_path / "models" / "a" / "tiny"),
        (str(tmp_path / "data" / "a.jsonl"),),
    )
