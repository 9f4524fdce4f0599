"""Toy models that score what a run has sampled, and whether the run has the scores that
transformers gives.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from places import MODEL
from sglang_tools import CPU_ARGUMENTS, CPU_ENV, STARTUP_S, sglang_python
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_megatron.controller.recovery.rollout_recorder import RolloutRecorder
from rlhf_megatron.data.tokenizer import load_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{{ '=' if"
    " add_generation_prompt }}"
)
VERDICT = {
    "template": "{prompt}{response}",
    "pattern": r"(\d)",
    "lowest": 0.0,
    "highest": 9.0,
    "max_tokens": 1,
}


class Scored:
    """A classifier, or a judge whose verdict is the digit that it writes, behind one SGLang
    server of a run.
    """

    def __init__(self, folder: Path, is_judge: bool = False) -> None:
        torch.manual_seed(0)
        kind = AutoModelForCausalLM if is_judge else AutoModelForSequenceClassification
        changes = {"initializer_range": 0.1} if is_judge else {"num_labels": 1}
        self.model = kind.from_config(AutoConfig.from_pretrained(MODEL, **changes)).eval()
        self.model.save_pretrained(folder)
        self.folder = folder
        self.is_judge = is_judge
        self.tokenizer = load_tokenizer(MODEL)
        spelling = json.loads((MODEL / "tokenizer.json").read_text())
        spelling["model"]["unk_token"] = "<pad>" if is_judge else spelling["model"].get("unk_token")
        # SGLang fails a text that its tokenizer cannot spell
        (folder / "tokenizer.json").write_text(json.dumps(spelling))
        settings = json.loads((MODEL / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(
            json.dumps(settings | {"chat_template": TEMPLATE})
        )

    def settings(self) -> dict[str, Any]:
        arguments = {**CPU_ARGUMENTS, "context_length": 64}
        # by a text that the toy cannot spell
        arguments |= {"skip_server_warmup": True} if self.is_judge else {}
        served = {
            "num_servers": 1,
            "python": str(sglang_python()),
            "args": arguments,
            "env": CPU_ENV,
        }
        served |= {"judge": VERDICT} if self.is_judge else {"ending": "="}
        return {
            "reward_model.path": str(self.folder),
            "reward_model.weight": 0.5,
            "rollout.startup_timeout_s": STARTUP_S,
            "trainer.record": True,
            "trainer.deterministic": False,
            # the tokenizer cannot spell <unused20>, which a raw policy samples
            "reward.max_error_rate": 1.0,
            **{f"reward_model.served.{name}": value for name, value in served.items()},
        }

    def score(self, text: str) -> float | None:
        """The score by transformers; None where the judge writes no verdict."""
        with torch.no_grad():
            logits = self.model(torch.tensor([self.tokenizer.encode(f"{text}=")])).logits
        if not self.is_judge:
            return logits.item()
        written = self.tokenizer.decode([int(logits[0, -1].argmax())])
        digits = [letter for letter in written if letter.isdigit()]  # <unused20> has some, too
        return int(digits[-1]) / 9 if digits else None

    def assert_scored(self, run_dir: Path, step: int) -> int:
        """Look at each reward of a step. Return how many samples have one."""
        batch = RolloutRecorder(run_dir / "record").read_step(step)
        texts = [
            f"{prompt}{text}" for prompt, text in zip(batch.prompts, batch.responses, strict=True)
        ]
        statuses = [status.startswith("masked") for status in batch.reward_statuses]
        wanted: list[float | None] = []
        for text, status in zip(texts, batch.reward_statuses, strict=True):
            is_spelled = "<unused" not in text
            wanted.append(self.score(text) if is_spelled else None)
            if not self.is_judge or is_spelled:  # a server spells what it can
                assert (wanted[-1] is None) == status.startswith("masked"), (text, status)
        scored = [i for i, score in enumerate(wanted) if score is not None and not statuses[i]]
        found, own = (
            batch.reward_parts[name][torch.tensor(scored, dtype=torch.long)]
            for name in ("reward_model", "exact_match")
        )
        assert found.tolist() == pytest.approx([wanted[i] for i in scored], abs=1e-5)
        assert batch.rewards[torch.tensor(scored, dtype=torch.long)].tolist() == pytest.approx(
            (own + 0.5 * found).tolist(), abs=1e-5
        )
        return len(scored)
