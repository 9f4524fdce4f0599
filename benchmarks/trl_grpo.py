"""The baseline of bench_grpo_step: the quickstart's GRPO step by TRL's GRPOTrainer, tuned. \
Runs in .venv-trl.

    OMP_NUM_THREADS=1 .venv-trl/bin/python benchmarks/trl_grpo.py MODEL PROMPTS.json OUT.json
        --shape JSON --steps 6

PROMPTS.json: a list of {"prompt", "answer"}. OUT.json: seconds of each step and of its parts. A
step is one batch of rollouts (32 prompts x 16 samples) and four optimizer steps of 128 samples; it
lasts from the start of one batch's generation to the start of the next one's, so everything between
counts. The first step is a warm-up and is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def grpo_config(num_steps: int, seed: int, num_processes: int, shape: dict[str, Any]) -> GRPOConfig:
    """The same algorithmic work as ours in bench_grpo_step, and nothing beside it.
    `shape`: `bench_grpo_step.Shape`.
    """
    optimizer_steps = shape["num_prompts"] * shape["group_size"] // shape["mini_batch"]
    return GRPOConfig(
        output_dir="trl-output",  # nothing is saved, so it is never made
        # The same work: 512 samples a step in four optimizer steps, each one forward and backward
        # of all 128 samples. Generation runs on all 512 at once: the largest batch is the fastest
        # for four new tokens.
        per_device_train_batch_size=shape["mini_batch"] // num_processes,
        gradient_accumulation_steps=1,
        steps_per_generation=optimizer_steps,
        num_iterations=1,
        num_generations=shape["group_size"],
        max_completion_length=shape["response_tokens"],
        max_steps=(num_steps + 1)
        * optimizer_steps,  # one more: the start of its generation ends the last step
        temperature=1.0,
        # The same loss: token mean over the mini-batch, clip 0.2, dual clip 3 (delta), no KL term,
        # no reference model.
        loss_type="bnpo",
        epsilon=0.2,
        delta=3.0,
        beta=0.0,
        scale_rewards="group",
        # The same optimizer, in torch's fused form.
        optim="adamw_torch_fused",
        learning_rate=shape["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.01,
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        # Float32 on the CPU; recomputation would only cost time here.
        use_cpu=True,
        bf16=False,
        ddp_backend="gloo" if num_processes > 1 else None,
        ddp_find_unused_parameters=False,  # saves DDP a walk over the graph
        gradient_checkpointing=False,
        disable_dropout=True,
        pad_to_multiple_of=None,  # padding is work without use on a CPU
        # Nothing is evaluated, reported, saved or shown; no worker process competes for
        # the two cores.
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        log_completions=False,
        disable_tqdm=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        seed=seed,
    )


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer with a clock around its own stages; what they do is unchanged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.starts: list[float] = []
        self.parts: list[dict[str, float]] = []
        self._is_annotating = False

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        start = time.perf_counter()
        self.starts.append(start)
        self.parts.append(defaultdict(float))
        self._is_annotating = True
        output = super()._generate_and_score_completions(inputs)
        self._is_annotating = False
        self._add("rollout", start)
        self.parts[-1]["response_tokens"] = self._metrics["train"]["completions/mean_length"][-1]
        return output

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        output = super()._generate_single_turn(*args, **kwargs)
        self._add("generate", start)
        return output

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._is_annotating:
            self._add("log_probs", start)
        return output

    def _add(self, part: str, start: float) -> None:
        self.parts[-1][part] += time.perf_counter() - start


def exact_match(completions: list[str], answer: list[str], **unused: Any) -> list[float]:
    return [float(text == label) for text, label in zip(completions, answer, strict=True)]


def odd_length(completions: list[str], **unused: Any) -> list[float]:
    return [float(len(text) % 2) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shape", type=json.loads, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="sdpa"
    )
    trainer = TimedTrainer(
        model=model,
        reward_funcs=odd_length if args.shape["prompt_tokens"] else exact_match,
        args=grpo_config(args.steps + 1, args.seed, num_processes, args.shape),
        train_dataset=Dataset.from_list(json.loads(args.prompts.read_text())),
        processing_class=tokenizer,
    )
    trainer.train()
    steps = []
    for start, end, parts in zip(trainer.starts, trainer.starts[1:], trainer.parts, strict=False):
        seconds = end - start
        other = parts["rollout"] - parts["generate"] - parts["log_probs"]
        steps.append(
            {
                "step": seconds,
                "generate": parts["generate"],
                "log_probs": parts["log_probs"],
                "update": seconds
                - parts["rollout"],  # four optimizer steps, and fetching the next prompts
                "other": other,  # tokenizing, decoding, rewards, advantages, padding
                "response_tokens": parts["response_tokens"],
            }
        )
    if trainer.accelerator.is_main_process:
        args.output.write_text(json.dumps({"steps": steps[1:], "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
