"""Documents say what is there: links, paths, make targets, sizes, quoted messages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from docs_tools import BLOCK, anchors, is_said
from places import ROOT

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import load_run_config
from tools.file_map import file_map

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
TOP_FOLDERS = (
    "rlhf_megatron",
    "configs",
    "docs",
    "benchmarks",
    "launch",
    "tests",
    "tools",
    "examples",
)
PATH = re.compile(
    rf"(?<![\w/.-])(?:{'|'.join(TOP_FOLDERS)})/[\w./-]*\w\.(?:py|yaml|md|sh|json|png|txt)\b"
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    links = [
        link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link
    ]
    missing = [link for link, _, _ in links if link and not (document.parent / link).exists()]
    pages = [
        (document.parent / link if link else document, anchor)
        for link, _, anchor in links
        if anchor
    ]
    missing += [
        f"{page}#{anchor}"
        for page, anchor in pages
        if page.exists() and anchor not in anchors(page)
    ]
    missing += [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    assert not missing, f"{document.name} names what is not there: {missing}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = "\n".join(
        re.findall(r"`([^`\n]+)`", document.read_text())
        + [b for _, b in BLOCK.findall(document.read_text())]
    )
    named = set(re.findall(r"(?:^|\s)make ([a-z][a-z0-9-]*)", code, re.MULTILINE))
    assert named <= targets, f"{document.name}: no make target {named - targets}"


def test_make_map_says_what_each_module_is_for() -> None:
    silent = [
        line
        for line in file_map()
        if len(line.split(None, 1)) < 2 and line.split()[0].endswith(".py")
    ]
    assert not silent, f"give each a docstring: {silent}"


def test_the_index_leads_to_every_document() -> None:
    named = set(re.findall(r"\]\(([^)#\s]+\.md)", (ROOT / "docs" / "index.md").read_text()))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert not pages - named, f"docs/index.md does not name {sorted(pages - named)}"


YAML = [
    (document.name, text)
    for document in DOCUMENTS
    for language, text in BLOCK.findall(document.read_text())
    if language == "yaml"
]
LONG = """\
data: {task: null, max_response_length: 4096%s}
actor: {use_kl_loss: true, ppo_max_token_len_per_gpu: 8192, megatron: \
{pipeline_model_parallel_size: 1}}
"""
AROUND = (
    LONG % ", train_files: [a.jsonl], val_files: [b.jsonl]",
    "",
    LONG % "",
    "algorithm: {adv_estimator: gae}",
)
"""What a reader has beside the settings that a page prints: files of data, the quickstart,
sources, or a critic.
"""


@pytest.mark.parametrize(("name", "text"), YAML)
def test_settings_that_a_page_prints_pass_all_rules(name: str, text: str, tmp_path: Path) -> None:
    """In one of these surroundings: a page prints the settings that it is about."""
    (tmp_path / "printed.yaml").write_text(text)
    problems: list[list[str]] = []
    for number, more in enumerate(AROUND):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {ROOT}/configs/quickstart.yaml\n{more}")
        (tmp_path / "run.yaml").write_text(f"extends: [{number}.yaml, printed.yaml]\n")
        try:
            load_run_config(tmp_path / "run.yaml", with_files=False, with_plugins=False)
        except ConfigError as error:
            problems.append(error.problems)
        else:
            return
    raise AssertionError(f"{name}: {problems}")


def test_pages_print_settings() -> None:
    assert len(YAML) > 15


STARTS = re.compile(
    r"(?:train|sft|torchrun\.sh|sbatch|check) ((?:configs|examples)/[\w/]+\.yaml)((?: +[^\s#`]+)*)"
)
COMMANDS = [
    (document.name, config, tuple(word for word in shlex.split(words) if "=" in word))
    for document in DOCUMENTS
    for config, words in STARTS.findall(document.read_text().replace("\\\n", " "))
]


def test_runs_that_pages_start_pass_all_rules() -> None:
    """With a shipped configuration."""
    assert len(COMMANDS) > 10
    refused = {}
    for name, config, overrides in COMMANDS:
        try:
            load_run_config(ROOT / config, overrides, with_files=False)
        except ConfigError as error:
            refused[name, config, *overrides] = error.problems
    assert not refused


def test_quoted_messages_are_in_the_sources() -> None:
    quoted = re.findall(r"^\| `([^`]+)` \|", TROUBLESHOOTING.read_text(), re.MULTILINE)
    assert len(quoted) > 20
    gone = [message for message in quoted if not is_said(message.replace(r"\|", "|"))]
    assert not gone, f"no source says {gone}"
