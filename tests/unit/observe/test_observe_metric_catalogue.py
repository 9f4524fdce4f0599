"""The catalogue of metrics: whole, free of contradictions,
and the reference that is printed of it.
"""

import re
from typing import get_args

import pytest

from rlhf_megatron.algorithms.metric_names import PLACEHOLDERS, Reduction
from rlhf_megatron.controller.observe.metrics.metric_catalogue import (
    METRIC_CATALOGUE,
    METRIC_SECTIONS,
    VERL_NAMES,
    find_metric,
    format_metric_reference,
)


def test_the_reference_has_a_line_for_every_metric() -> None:
    text = format_metric_reference()
    assert [
        name
        for name, metric in METRIC_CATALOGUE.items()
        if f"| `{name}` | {metric.unit} |" not in text
    ] == []


def test_every_metric_stands_in_one_section_only() -> None:
    names = [name for _, metrics in METRIC_SECTIONS for name in metrics]
    assert len(names) == len(set(names)) == len(METRIC_CATALOGUE) and set(names) == set(
        METRIC_CATALOGUE
    )


def test_every_line_says_everything() -> None:
    for name, metric in METRIC_CATALOGUE.items():
        assert re.fullmatch(r"[\w<>]+(/[\w<>@]+)+", name), name
        assert metric.unit and metric.meaning and metric.reduced_over, name
        assert metric.reduction in get_args(Reduction) and metric.reduced_over[-1] not in "+-", name
        assert set(re.findall(r"<(\w+)>", name)) <= set(PLACEHOLDERS), name


def test_verls_names_lead_to_ours() -> None:
    assert [ours for ours, _ in VERL_NAMES.values() if find_metric(ours) is None] == []


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("actor/lr", "<role>/lr"),
        ("val/gsm8k/test/mean@16", "val/<source>/mean@<N>"),
        ("val/gsm8k/best@4_low", "val/<source>/best@<k>_low"),
        ("val/gsm8k/low", "val/<source>/low"),
        ("memory/sync_used_bytes", "memory/<phase>_used_bytes"),
        ("health/entropy_collapse", "health/<verdict>"),
        ("reward/status/masked:server down", "reward/status/<status>"),
    ],
)
def test_a_pattern_stands_for_its_keys(key: str, name: str) -> None:
    assert find_metric(key) is METRIC_CATALOGUE[name]


@pytest.mark.parametrize(
    "key",
    [
        "reference/lr",
        "val/gsm8k/mean@",
        "val/gsm8k/best@x",
        "timing_s/a/b",
        "health/",
        "timing_s",
        "lr",
        "",
    ],
)
def test_a_key_that_no_pattern_allows_is_not_listed(key: str) -> None:
    assert find_metric(key) is None
