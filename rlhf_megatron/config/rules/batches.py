"""Rules on how the samples of a run are cut: into mini-batches, replicas, and micro-batches with a token budget."""

from __future__ import annotations

from math import isqrt

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.rules import Findings, rule, rule_of_rl, wrong
from rlhf_megatron.config.rules.parts import reads
from rlhf_megatron.config.rules.run import (
    CP,
    GPUS,
    LENGTHS,
    NODES,
    PP,
    TP,
    actor_ranks,
    model_parallel_size,
    needs_reference,
    reference_ranks,
)
from rlhf_megatron.config.schema import MegatronConfig, RunConfig
from rlhf_megatron.config.source import Loaded


@rule_of_rl
def batches(loaded: Loaded) -> Findings:
    c = loaded.config
    mini, samples = c.actor.mini_batch_size, c.data.train_batch_size * c.rollout.n
    if mini < 1 or samples < 1 or actor_ranks(c) < 1 or model_parallel_size(c.actor.megatron) < 1:
        return
    yield from divides_the_samples(c, "actor.mini_batch_size", mini)
    replicas = actor_ranks(c) // model_parallel_size(c.actor.megatron)
    sizes = [("actor.mini_batch_size", mini)]
    if c.warmup.max_steps > 0:
        sizes.append(("warmup.batch_size", c.warmup.batch_size))
    for key, size in sizes:
        yield from gives_all_work(key, size, replicas, (GPUS, NODES, TP, PP, CP))


def divides_the_samples(c: RunConfig, key: str, size: int) -> Findings:
    """`size`: samples of a mini-batch."""
    samples = c.data.train_batch_size * c.rollout.n
    if size < 1 or samples < 1 or samples % size == 0:
        return
    divisors = divisors_of(samples)
    below, above = [d for d in divisors if d < size], [d for d in divisors if d > size]
    near = " or ".join(str(d) for d in below[-1:] + above[:1])
    yield Problem(
        f"{key} ({size} samples) must divide data.train_batch_size x rollout.n"
        f" ({c.data.train_batch_size} x {c.rollout.n} = {samples} samples a step); use {near}.",
        (key, "data.train_batch_size", "rollout.n"),
    )


def divisors_of(number: int) -> list[int]:
    """Ascending, in the time of the number's root."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def gives_all_work(key: str, size: int, replicas: int, switches: tuple[str, ...]) -> Findings:
    """`size`: samples of a batch; `switches`: settings that make so many `replicas`."""
    yield wrong(
        1 <= size < replicas,
        f"{key} ({size} samples) must be at least the data-parallel size ({replicas}), or replicas have no work"
        f" in any optimizer step; use {replicas} or more, or fewer ranks.",
        (key, *switches),
    )


@rule
def token_budgets(loaded: Loaded) -> Findings:
    """A sample is never cut over micro-batches, and is padded as the layout demands."""
    c, m = loaded.config, loaded.config.actor.megatron
    if c.job == "train" and reads(c.rollout, "rollout.max_num_batched_tokens"):
        budget = c.rollout.max_num_batched_tokens
        yield from holds_the_longest(c, "rollout.max_num_batched_tokens", budget, "", MegatronConfig())
    budget = c.actor.ppo_max_token_len_per_gpu
    yield from holds_the_longest(c, "actor.ppo_max_token_len_per_gpu", budget, "actor.megatron", m)
    has_pool, of_reference = reference_ranks(c) > 0, c.reference.max_token_len_per_gpu
    if needs_reference(c) and (has_pool or of_reference is not None):
        section, m = ("reference.megatron", c.reference.megatron) if has_pool else ("actor.megatron", m)
        yield from holds_the_longest(c, "reference.max_token_len_per_gpu", of_reference or budget, section, m)


def packed_multiple(megatron: MegatronConfig) -> int:
    """`Layout.packed_multiple`: what the tokens of a micro-batch are padded to a multiple of."""
    cp = megatron.context_parallel_size
    return (2 * cp if cp > 1 else 1) * (megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1)


def holds_the_longest(
    c: RunConfig, key: str, budget: int, section: str, m: MegatronConfig, num_behind: int = 0
) -> Findings:
    """`budget`: tokens of one rank in the layout `m` of `section`; context-parallel ranks pool theirs. `num_behind`:
    places behind a sample, which are forwarded with it."""
    cp, multiple = m.context_parallel_size, packed_multiple(m)
    if cp < 1 or multiple < 1 or budget < 1:
        return
    longest, settings, of_settings = longest_sample(c)
    if num_behind:
        longest, settings = longest + num_behind, f"{settings}, and {num_behind} place behind it"
    padded = -(-longest // multiple) * multiple
    if budget * cp >= padded:
        return
    pool = f" x context_parallel_size {cp} = {budget * cp}" if cp > 1 else ""
    padding = f", padded to a multiple of {multiple}: {padded}" if padded != longest else ""
    switches = [f"{section}.context_parallel_size"] if cp > 1 else []
    if padded != longest:
        switches += [f"{section}.tensor_model_parallel_size", f"{section}.sequence_parallel"]
    yield Problem(
        f"{key} ({budget}{pool}) must hold the longest sample, {settings}{padding}); use {padded // cp} or more.",
        (key, *of_settings, *switches),
    )


def longest_sample(c: RunConfig) -> tuple[int, str, tuple[str, ...]]:
    """Return the tokens of the longest sample, a text that says how they add up (its bracket still open), and the
    settings behind them.
    """
    if c.job == "reward-model":  # a document and the place behind it
        return c.sft.max_length + 1, f"sft.max_length + 1 ({c.sft.max_length} + 1", ("sft.max_length",)
    if c.job == "sft":
        return c.sft.max_length, f"sft.max_length ({c.sft.max_length}", ("sft.max_length",)
    d, longest = c.data, c.data.max_prompt_length + c.data.max_response_length
    text = f"data.max_prompt_length + max_response_length ({d.max_prompt_length} + {d.max_response_length} = {longest}"
    return longest, text, LENGTHS
