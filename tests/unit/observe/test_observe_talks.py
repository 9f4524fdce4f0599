"""Samples of episodes show their turns, with the rewards of turns, and which tokens trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from places import MODEL
from report_samples import sample, step_row, write_run_dir

from rlhf_megatron import api
from rlhf_megatron.controller.observe.metrics.batch_metrics import (
    make_logged_samples,
    make_talk_pieces,
)
from rlhf_megatron.controller.observe.report.run_files import LoggedSample, TalkPiece
from rlhf_megatron.data.batch import ScoredBatch, compute_offsets
from rlhf_megatron.data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(str(MODEL), str(MODEL))


def make_batch() -> ScoredBatch:
    """Two episodes: "?04<eos>+06<eos>" with rewards of turns, and one that ended before a turn."""
    first = TOKENIZER.encode("?04<eos>+06<eos>")
    second = TOKENIZER.encode("?")
    mask = [False, True, True, True, False, True, True, True, False]
    return ScoredBatch(
        offsets=compute_offsets(torch.tensor([len(first), len(second)])),
        token_ids=torch.tensor([*first, *second], dtype=torch.int32),
        response_mask=torch.tensor(mask),
        rollout_log_probs=torch.zeros(9),
        group_ids=torch.tensor([0, 0]),
        sample_ids=torch.tensor([0, 1]),
        policy_versions=torch.tensor([1, 1]),
        finish_reasons=("stop", "abort"),
        prompts=("?", "?"),
        responses=("06", ""),
        labels=("06", "06"),
        sources=("games", "games"),
        extras=("", ""),
        episode_ids=torch.tensor([0, 1]),
        turn_spans=(((1, 4), (5, 8)), ()),
        episode_ends=("done", "environment_failed"),
        episode_rewards=torch.tensor([0.0, float("nan")]),
        turn_rewards=((0.0, 1.0), ()),
        conversations=("[]", "[]"),
        rewards=torch.tensor([1.0, 0.0]),
        reward_statuses=("ok", "masked:environment_failed"),
    )


PIECES = (
    TalkPiece("04<eos>", True, 0.0),
    TalkPiece("+", False),
    TalkPiece("06<eos>", True, 1.0),
)


def test_turns_stand_beside_what_the_environment_said() -> None:
    batch = make_batch()
    spell = TOKENIZER.decode_with_special_tokens
    assert make_talk_pieces(batch, 0, spell) == PIECES
    assert make_talk_pieces(batch, 1, spell) == ()
    without_rewards = replace(batch, turn_rewards=((), ()))
    assert [piece.reward for piece in make_talk_pieces(without_rewards, 0, spell)] == [None] * 3
    logged = {one.episode_end: one for one in make_logged_samples(1, batch, 2, 1, spell)}
    assert logged["done"].talk == PIECES and logged["environment_failed"].talk == ()
    assert logged["environment_failed"].reward is None
    # the line of samples.jsonl is read back as it was
    line = msgspec.to_builtins(logged["done"])
    assert msgspec.convert(json.loads(json.dumps(line)), LoggedSample) == logged["done"]


def test_the_page_has_the_talks(tmp_path: Path) -> None:
    talk = [{"text": "04</script>", "is_sampled": True, "reward": 0.5}]
    rows = [sample(1) | {"episode_end": "max_turns", "talk": talk}, sample(1)]
    run_dir = write_run_dir(tmp_path / "run", [step_row(1, 0.5)], samples=rows)
    text = api.report([run_dir]).page_path.read_text()
    assert '"episode_end":"max_turns"' in text and '"is_sampled":true' in text
    assert "04</script>" not in text, "text of a run cannot end the page's script"
    assert '"talk":[]' in text
