"""The catalogue of metrics: whole, free of contradictions, and the document that is made from it."""

import re
from pathlib import Path

import pytest
from places import ROOT

from rlhf_megatron.algorithms.metric import PLACEHOLDERS
from rlhf_megatron.observe.metrics import reference as metrics_reference
from rlhf_megatron.observe.metrics.names import CATALOGUE, find
from rlhf_megatron.observe.metrics.reference import COMMAND, SECTIONS, VERL_NAMES, reference

DOCUMENT = ROOT / "docs" / "metrics.md"


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == reference(), f"the catalogue has changed; run `{COMMAND}`"


def test_the_document_is_printed_or_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["metrics_reference"])
    metrics_reference.main()
    assert capsys.readouterr().out == reference()
    monkeypatch.setattr("sys.argv", ["metrics_reference", "--write", str(tmp_path / "metrics.md")])
    metrics_reference.main()
    assert (tmp_path / "metrics.md").read_text() == reference() and capsys.readouterr().out == ""


def test_every_metric_stands_in_one_section_only() -> None:
    names = [name for _, metrics in SECTIONS for name in metrics]
    assert len(names) == len(set(names)) == len(CATALOGUE) and set(names) == set(CATALOGUE)


def test_every_line_says_everything() -> None:
    for name, metric in CATALOGUE.items():
        assert re.fullmatch(r"[\w<>]+(/[\w<>@]+)+", name), name
        assert metric.unit and metric.meaning and metric.over, name
        assert set(re.findall(r"<(\w+)>", name)) <= set(PLACEHOLDERS), name


def test_verls_names_lead_to_ours() -> None:
    assert [ours for ours, _ in VERL_NAMES.values() if find(ours) is None] == []


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("actor/lr", "<role>/lr"),
        ("val/gsm8k/test/mean@16", "val/<source>/mean@<N>"),
        ("val/gsm8k/best@4/low", "val/<source>/best@<k>/low"),
        ("val/gsm8k/low", "val/<source>/low"),
        ("memory/sync_used_bytes", "memory/<phase>_used_bytes"),
        ("health/entropy_collapse", "health/<verdict>"),
        ("reward/status/masked:server down", "reward/status/<status>"),
    ],
)
def test_a_pattern_stands_for_its_keys(key: str, name: str) -> None:
    assert find(key) is CATALOGUE[name]


@pytest.mark.parametrize(
    "key", ["reference/lr", "val/gsm8k/mean@", "val/gsm8k/best@x", "timing_s/a/b", "health/", "timing_s", "lr", ""]
)
def test_a_key_that_no_pattern_allows_is_not_listed(key: str) -> None:
    assert find(key) is None
