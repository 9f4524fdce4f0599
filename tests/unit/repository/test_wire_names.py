"""Names under which things leave a process: files, servers and running jobs of older
versions know them.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

import pytest
from places import ROOT

from rlhf_megatron.controller.recovery import skip_capsule
from rlhf_megatron.data.assistant_turns import TokenDocument
from rlhf_megatron.data.document_samples import DocumentSample
from rlhf_megatron.data.prompt_items import PromptItem
from rlhf_megatron.data.streamed_samples import _update_digest
from rlhf_megatron.data.teacher_top_tokens import TeacherTopTokens
from rlhf_megatron.jobs.generation.loss_job import _format_sample
from rlhf_megatron.planning.check import certificate
from rlhf_megatron.ranks.kernels.head_memory import HeadMemoryBound
from rlhf_megatron.weights import checkpoint_manifest, megatron_dir
from rlhf_megatron.weights.bucket_plan import StageTraffic
from rlhf_megatron.weights.conversion import conversion_targets

FROZEN = [
    line.split(": ")
    for line in (Path(__file__).parent / "json_field_names.txt").read_text().splitlines()
]
"""Dotted name of a class -> its fields, which are written as JSON by their names."""


@pytest.mark.parametrize(("dotted", "names"), FROZEN, ids=[dotted for dotted, _ in FROZEN])
def test_fields_that_are_written_by_name_keep_it(dotted: str, names: str) -> None:
    """A class may move, and then its line does:
    the names of its fields stay, and others may join.
    """
    module, _, class_name = dotted.rpartition(".")
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
    (node,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == class_name
    ]
    fields = [
        field.target.id
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]
    missing = set(names.split()) - set(fields)
    assert not missing, f"{dotted}: files and servers of older versions name {sorted(missing)}"


SAMPLE = DocumentSample(
    (TokenDocument((1, 2, 3), ((1, 3),)),),
    "math",
    0.5,
    TeacherTopTokens((4, 5), (-0.5, -1.0), 1),
)


def test_digests_of_data_are_those_of_older_versions() -> None:
    """A cursor or fingerprint of a run that goes on was made of the names of then."""
    digest = hashlib.sha256()
    _update_digest(digest, SAMPLE)
    assert digest.hexdigest()[:16] == "2fc0551fe75dbbc6"
    pair = DocumentSample((SAMPLE.documents[0], TokenDocument((7,), ())), "math", 0.5)
    digest = hashlib.sha256()
    _update_digest(digest, pair)
    assert digest.hexdigest()[:16] == "7d09e0aef6f5e819"
    assert _format_sample(SAMPLE) == (
        "('math', (Document(token_ids=(1, 2, 3), trained=((1, 3),)),))"
    )
    assert _format_sample(pair) == (
        "('math', (Document(token_ids=(1, 2, 3), trained=((1, 3),)),"
        " Document(token_ids=(7,), trained=())))"
    )
    assert repr(PromptItem((1, 2), "a", "b", "c")) == (
        "PromptItem(prompt_ids=(1, 2), prompt='a', label='b', source='c', extra='')"
    )


def test_a_half_done_conversion_of_an_older_version_goes_on() -> None:
    names = {
        name: getattr(conversion_targets, name).wire_name
        for name in ("HFTarget", "RankFilesTarget", "TorchDistTarget")
    }
    assert names == {
        "HFTarget": "HFTarget",
        "RankFilesTarget": "RanksTarget",
        "TorchDistTarget": "TorchDistTarget",
    }


def test_running_sglang_servers_find_the_loader() -> None:
    """They look it up under the name that they were started with."""
    source = (ROOT / "rlhf_megatron/rollout/sglang/server/loader.py").read_text()
    assert 'LOAD_FORMAT = "rlhf_megatron.rollout.sglang.server.loader.load"' in source
    assert "\ndef load(" in source


def test_formats_keep_their_names() -> None:
    """They name no module, although one of them once was the name of one."""
    assert checkpoint_manifest.FORMAT == "rlhf_megatron.checkpoint"
    assert megatron_dir.FORMAT == "rlhf-megatron weights"
    assert skip_capsule.FORMAT == "rlhf_megatron capsule"


def test_a_certificate_keeps_its_keys() -> None:
    head = HeadMemoryBound(tile_bytes=1, hidden_gradient_bytes=2, stash_bytes=3, peak_bytes=4)
    assert certificate._head_to_json(head) == {
        "tile": 1,
        "hidden_gradient": 2,
        "stash": 3,
        "peak": 4,
    }
    traffic = StageTraffic(0, 1, 2, 3, 4)
    assert list(certificate._traffic_to_json(traffic)) == [
        "stage",
        "num_buckets",
        "gathered",
        "sent",
        "peak_buffer",
    ]
