"""The rules of the section `data`: sources, templates, chats, files."""

import json
import sys
from pathlib import Path

import pytest
from config_samples import VALID

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import load_run_config, read_run_config
from rlhf_megatron.config.rules import file_rules
from rlhf_megatron.config.rules.validate import validate_config
from rlhf_megatron.config.show import render_config_yaml
from rlhf_megatron.install_hints import format_install_command

ADD = "{name: add, task: few_shot_addition}"
MUL = "{name: mul, task: few_shot_addition, weight: 2}"
SOURCES = VALID.replace("task: addition", f"sources: [{ADD}, {MUL}]")
CHAT = "data.apply_chat_template=true"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(VALID)
    return path


@pytest.fixture
def sources_file(tmp_path: Path) -> Path:
    path = tmp_path / "sources.yaml"
    path.write_text(SOURCES)
    return path


def test_the_bases_of_these_tests_are_valid(run_file: Path, sources_file: Path) -> None:
    assert (
        validate_config(read_run_config(run_file)) == []
        and validate_config(read_run_config(sources_file)) == []
    )
    config = read_run_config(sources_file).config
    assert [(source.name, source.weight) for source in config.data.sources] == [
        ("add", 1.0),
        ("mul", 2.0),
    ]
    assert validate_config(config) == [], "made in code, too"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([f"data.sources=[{ADD}]"],
         (
             "data.task (addition) and data.sources (1 entries) exclude each other; make it an"
             " entry of data.sources, or set task: null."
         )),
        (["data.task=null", f"data.sources=[{ADD}]", "data.train_files=[/a]"],
         (
             "data.train_files (['/a']) and data.sources (1 entries) exclude each other; make it an"
             " entry of data.sources, or set train_files: []."
         )),
        (["data.prompt_template=solve"],
         (
             "data.prompt_template ('solve') must contain {prompt} once, where the prompt goes;"
             " '{prompt}' is the bare prompt."
         )),
        (["data.prompt_template='{prompt}{prompt}'"], "must contain {prompt} once"),
        (["data.few_shot={num_shots: 2, template: '{prompt}'}"],
         (
             "data.few_shot.template ('{prompt}') must contain {label}, or the row is not"
             " a solved one"
         )),
        (["data.few_shot={num_shots: 2, template: x}"],
         "must contain {prompt} and {label}, or the row is not"),
        (["data.task=few_shot_addition", "data.few_shot.num_shots=2"],
         (
             "data.few_shot.num_shots (2) and task few_shot_addition exclude each other: the task"
             " has solved problems of its own; set task_params: {num_shots: 0}, or"
             " num_shots here to 0."
         )),
        ([CHAT, "data.truncation=right"],
         (
             "data.truncation (right) cannot be used with data.apply_chat_template: it would cut"
             " the place where the answer begins"
         )),
        (["data.task=null", "data.train_files=[a]", "data.val_files=[a]", "data.prompt_key=''"],
         "data.prompt_key ('') must be a key of the rows; name it."),
        (["data.task=null", "data.train_files=[a]", "data.val_files=[a]", "data.label_key=prompt"],
         "data.prompt_key (prompt) must differ from data.label_key"),
        (["data.few_shot.num_shots=-1"], "data.few_shot.num_shots (-1) must be at least 0"),
    ],
)  # fmt: skip
def test_a_contradiction_is_told(run_file: Path, overrides: list[str], expected: str) -> None:
    found = validate_config(read_run_config(run_file, overrides))
    assert any(expected in problem and "command line" in problem for problem in found), found
    assert len(found) <= 2  # a range may say the same in other words


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("{name: add, task: addition}",
         "data.sources[1].name (add) is that of data.sources[0] too; give each its own."),
        ("{name: a/b, task: addition}", "data.sources[1].name ('a/b') must be a name without '/'"),
        ("{name: '', task: addition}", "data.sources[1].name ('') must be a name"),
        ("{name: x, task: addition, weight: 0}",
         "data.sources[1].weight (0.0) must be at least 1e-06: leave the source out instead"),
        ("{name: x, task: addition, weight: .inf}",
         "data.sources[1].weight (inf) must be at most 1000000.0"),
        ("{name: x, task: addition, train_files: [a]}",
         "data.sources[1] (x): task (addition) and files (['a']) exclude each other"),
        ("{name: x}", "data.sources[1] (x): train_files ([]) must name a JSONL or parquet file"),
        ("{name: x, train_files: [a], task_params: {num_val: 1}}",
         "data.sources[1] (x): task_params ({'num_val': 1}) would be ignored because task is null"),
        ("{name: x, task: addition, prompt_template: solve}",
         "data.sources[1].prompt_template ('solve') must contain {prompt} once"),
        ("{name: x, task: addition, few_shot: {num_shots: 1, template: x}}",
         "data.sources[1].few_shot.template ('x') must contain {prompt} and {label}"),
        ("{name: x, task: addition, few_shot: {num_shots: -1}}",
         "data.sources[1].few_shot.num_shots (-1) must be at least 0; correct it."),
        ("{name: x, task: few_shot_addition, few_shot: {num_shots: 1}}",
         "data.sources[1].few_shot.num_shots (1) and task few_shot_addition exclude each other"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_entry_is_told_where_it_stands(
    tmp_path: Path, entry: str, expected: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(SOURCES.replace(f"sources: [{ADD}, {MUL}]", f"sources: [{ADD},\n    {entry}]"))
    (problem,) = validate_config(read_run_config(path))
    assert expected in problem.replace(f"{tmp_path}/", "")
    line = int(problem.rpartition(":")[2].rstrip("]"))
    written = "train_files" not in expected  # what nobody wrote is told where the list stands
    assert line == (4 if written else 3), problem


@pytest.mark.parametrize(
    ("overrides", "key", "switch"),
    [
        (["data.system_prompt=be short"], "data.system_prompt",
         "data.apply_chat_template is false"),
        (["data.apply_chat_template_kwargs.enable_thinking=false"],
         "data.apply_chat_template_kwargs.enable_thinking", "data.apply_chat_template is false"),
        (["data.filter_overlong_prompts=true", "data.truncation=left"], "data.truncation",
         "data.filter_overlong_prompts is true"),
        (["data.few_shot.seed=3"], "data.few_shot.seed", "data.few_shot.num_shots is 0"),
    ],
)  # fmt: skip
def test_a_setting_that_would_be_ignored(
    run_file: Path, overrides: list[str], key: str, switch: str
) -> None:
    (problem,) = validate_config(read_run_config(run_file, overrides))
    assert (
        problem.startswith(f"{key} (")
        and f"would be ignored because {switch}; remove {key}, or" in problem
    )


@pytest.mark.parametrize(
    ("entries", "override"),
    [
        (f"[{ADD}]", "data.prompt_key=q"),
        (
            "[{name: a, task: addition, prompt_template: '{prompt}'}]",
            "data.prompt_template='{prompt} '",
        ),
        ("[{name: a, task: addition, few_shot: {num_shots: 1}}]", "data.few_shot.num_shots=2"),
    ],
)
def test_what_no_source_reads(sources_file: Path, entries: str, override: str) -> None:
    (problem,) = validate_config(
        read_run_config(sources_file, [f"data.sources={entries}", override])
    )
    assert (
        problem.startswith(override.split("=")[0])
        and "would be ignored because data.sources is a list of 1" in problem
    )
    one_more = entries[:-1] + ", {name: b, train_files: [x], val_files: [x]}]"
    assert (
        validate_config(read_run_config(sources_file, [f"data.sources={one_more}", override])) == []
    )


def test_sources_survive_being_written(sources_file: Path, tmp_path: Path) -> None:
    overrides = [
        "data.sources=[{name: a, task: addition, weight: 0.5}, {name: b, train_files: [x],"
        " few_shot: {num_shots: 1}}]"
    ]
    config = read_run_config(sources_file, overrides).config
    (tmp_path / "resolved.yaml").write_text(render_config_yaml(config))
    assert load_run_config(tmp_path / "resolved.yaml", with_files=False).config == config


# files


def problems(path: Path, *overrides: str) -> list[str]:
    try:
        load_run_config(path, overrides)
    except ConfigError as error:
        found = [p.rpartition(" [")[0].replace(f"{path.parent}/", "") for p in error.problems]
        return [
            p
            for p in found
            if not p.startswith(("model.path (model) has no *", "model.path (model) has no config"))
        ]
    return []


def test_files_of_sources(
    sources_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "here.parquet").write_bytes(b"")
    entries = "[{name: a, train_files: [here.parquet, gone.jsonl], val_files: [gone.parquet]}]"
    assert problems(sources_file, f"data.sources={entries}") == [
        "data.sources[0].train_files (gone.jsonl) does not exist; correct the path.",
        "data.sources[0].val_files (gone.parquet) does not exist; correct the path.",
    ]
    monkeypatch.setattr(file_rules, "find_spec", lambda name: None)
    assert problems(sources_file, "data.sources=[{name: a, train_files: [here.parquet]}]") == [
        (
            "data.sources[0].train_files (here.parquet) needs pyarrow, which is not installed;"
            f" install the extra ({format_install_command('parquet')}), or convert the file to"
            " JSONL."
        ),
    ]


def test_a_chat_needs_a_template(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    text = (
        "model.path (model) has no chat template, neither chat_template.jinja nor chat_template"
        " in tokenizer_config.json"
    )
    (problem,) = problems(run_file, CHAT)
    assert problem.startswith(text) and "or data.apply_chat_template to false" in problem
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert problems(run_file, CHAT) == []
    (model / "tokenizer_config.json").write_text("{")
    (problem,) = problems(run_file, CHAT)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert problems(run_file, CHAT) == []


def test_rules_need_no_pyarrow_or_jinja() -> None:
    """Configurations are checked on machines that have neither torch nor what reads the data."""
    import subprocess

    code = (
        "import sys; import rlhf_megatron.config.rules.validate; print({'pyarrow', 'jinja2',"
        " 'torch'} & set(sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        == "set()"
    )
