"""Rules on how the samples of a run are cut: into mini-batches, replicas, and micro-batches with
a token budget.
"""

from __future__ import annotations

from math import isqrt

from rlhf_megatron.config.errors import ConfigProblem
from rlhf_megatron.config.rules import (
    OptionalProblems,
    make_problem_if,
    register_rl_rule,
    register_rule,
)
from rlhf_megatron.config.rules.part_rules import has_engine_setting
from rlhf_megatron.config.rules.run_rules import (
    CP,
    GPUS,
    LENGTHS,
    NODES,
    PP,
    TP,
    compute_model_parallel_size,
    count_actor_ranks,
    count_reference_ranks,
    needs_reference,
)
from rlhf_megatron.config.schema import DataConfig, EnvironmentConfig, MegatronConfig, RunConfig
from rlhf_megatron.config.yaml_nodes import LoadedConfig


@register_rl_rule
def check_actor_batches(loaded: LoadedConfig) -> OptionalProblems:
    """Yield problems if the actor's mini-batch does not divide the samples of a step, or if a
    mini-batch or a warmup batch has fewer samples than there are replicas. Yield nothing for sizes
    below 1, which other rules report.
    """
    c = loaded.config
    mini = c.actor.mini_batch_size
    samples = c.data.train_batch_size * c.rollout.n
    if (
        mini < 1
        or samples < 1
        or count_actor_ranks(c) < 1
        or compute_model_parallel_size(c.actor.megatron) < 1
    ):
        return
    yield from check_divides_samples(c, "actor.mini_batch_size", mini)
    replicas = count_actor_ranks(c) // compute_model_parallel_size(c.actor.megatron)
    sizes = [("actor.mini_batch_size", mini)]
    if c.warmup.max_steps > 0:
        sizes.append(("warmup.batch_size", c.warmup.batch_size))
    for key, size in sizes:
        yield from check_occupies_all_replicas(key, size, replicas, (GPUS, NODES, TP, PP, CP))


def check_divides_samples(config: RunConfig, key: str, batch_size: int) -> OptionalProblems:
    """Yield a problem, with the nearest divisors, if `batch_size` samples do not divide the samples
    of a step (train_batch_size x n). `key` is the setting of the batch size. Yield nothing for
    sizes below 1, which other rules report.
    """
    samples = config.data.train_batch_size * config.rollout.n
    if batch_size < 1 or samples < 1 or samples % batch_size == 0:
        return
    divisors = list_divisors(samples)
    below = [d for d in divisors if d < batch_size]
    above = [d for d in divisors if d > batch_size]
    near = " or ".join(str(d) for d in below[-1:] + above[:1])
    yield ConfigProblem(
        (
            f"{key} ({batch_size} samples) must divide data.train_batch_size x rollout.n"
            f" ({config.data.train_batch_size} x {config.rollout.n} = {samples} samples a step);"
            f" use {near}."
        ),
        (key, "data.train_batch_size", "rollout.n"),
    )


def list_divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in ascending order; the time grows with the number's
    square root.
    """
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def check_occupies_all_replicas(
    key: str, batch_size: int, num_replicas: int, replica_keys: tuple[str, ...]
) -> OptionalProblems:
    """Yield a problem if a batch of `batch_size` samples has fewer samples than there are
    data-parallel replicas. `key` is the setting of the batch size; `replica_keys` are the settings
    that determine `num_replicas`.
    """
    yield make_problem_if(
        1 <= batch_size < num_replicas,
        (
            f"{key} ({batch_size} samples) must be at least the data-parallel size"
            f" ({num_replicas}), or replicas have no work in any optimizer step; use {num_replicas}"
            " or more, or fewer ranks."
        ),
        (key, *replica_keys),
    )


@register_rule
def check_token_budgets(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem for each token budget (engine, actor, reference) that cannot hold the longest
    sample, padded as the layout demands: a sample is never cut over micro-batches.
    """
    c = loaded.config
    m = loaded.config.actor.megatron
    if c.job == "train" and has_engine_setting(c.rollout, "rollout.max_num_batched_tokens"):
        budget = c.rollout.max_num_batched_tokens
        yield from check_holds_longest_sample(
            c, "rollout.max_num_batched_tokens", budget, "", MegatronConfig()
        )
    budget = c.actor.ppo_max_token_len_per_gpu
    yield from check_holds_longest_sample(
        c, "actor.ppo_max_token_len_per_gpu", budget, "actor.megatron", m
    )
    has_pool = count_reference_ranks(c) > 0
    of_reference = c.reference.max_token_len_per_gpu
    if needs_reference(c) and (has_pool or of_reference is not None):
        section, m = (
            ("reference.megatron", c.reference.megatron) if has_pool else ("actor.megatron", m)
        )
        yield from check_holds_longest_sample(
            c, "reference.max_token_len_per_gpu", of_reference or budget, section, m
        )


def compute_packing_multiple(megatron: MegatronConfig) -> int:
    """Return the number whose multiple the tokens of a micro-batch are padded to in this layout, as
    `ParallelLayout.packed_multiple` does.
    """
    cp = megatron.context_parallel_size
    return (2 * cp if cp > 1 else 1) * (
        megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1
    )


def check_holds_longest_sample(
    config: RunConfig,
    key: str,
    budget: int,
    section: str,
    megatron: MegatronConfig,
    num_trailing_places: int = 0,
) -> OptionalProblems:
    """Yield a problem if a token budget cannot hold the longest sample, padded for the layout.

    `budget` is the number of tokens of one rank, set by `key`, in the layout `megatron` of the
    section `section`; context-parallel ranks add up their budgets. `num_trailing_places` is the
    number of places that are forwarded behind a sample.
    """
    cp = megatron.context_parallel_size
    multiple = compute_packing_multiple(megatron)
    if cp < 1 or multiple < 1 or budget < 1:
        return
    longest, settings, of_settings = describe_longest_sample(config)
    if num_trailing_places:
        longest = longest + num_trailing_places
        settings = f"{settings}, and {num_trailing_places} place behind it"
    padded = -(-longest // multiple) * multiple
    if budget * cp >= padded:
        return
    pool = f" x context_parallel_size {cp} = {budget * cp}" if cp > 1 else ""
    padding = f", padded to a multiple of {multiple}: {padded}" if padded != longest else ""
    switches = [f"{section}.context_parallel_size"] if cp > 1 else []
    if padded != longest:
        switches += [f"{section}.tensor_model_parallel_size", f"{section}.sequence_parallel"]
    yield ConfigProblem(
        (
            f"{key} ({budget}{pool}) must hold the longest sample, {settings}{padding}); use"
            f" {padded // cp} or more."
        ),
        (key, *of_settings, *switches),
    )


def describe_longest_sample(config: RunConfig) -> tuple[int, str, tuple[str, ...]]:
    """Return the number of tokens of the longest sample that the job trains on, a text that says
    how the number adds up (its bracket still open), and the keys of the settings behind the number.
    """
    if config.job == "reward-model":  # a document and the place behind it
        return (
            config.sft.max_length + 1,
            f"sft.max_length + 1 ({config.sft.max_length} + 1",
            ("sft.max_length",),
        )
    if config.job == "sft":
        return (
            config.sft.max_length,
            f"sft.max_length ({config.sft.max_length}",
            ("sft.max_length",),
        )
    d = config.data
    longest = compute_longest_rollout(config)
    if config.rollout.environment.name is not None:
        max_tokens = compute_episode_tokens(config.rollout.environment, d)
        text = (
            "data.max_prompt_length + rollout.environment.max_tokens"
            f" ({d.max_prompt_length} + {max_tokens} = {longest}"
        )
        return longest, text, ("data.max_prompt_length", "rollout.environment.max_tokens")
    text = (
        f"data.max_prompt_length + max_response_length ({d.max_prompt_length} +"
        f" {d.max_response_length} = {longest}"
    )
    return longest, text, LENGTHS


def compute_episode_tokens(environment: EnvironmentConfig, data: DataConfig) -> int:
    """Return the number of tokens that an episode may have behind its first prompt."""
    if environment.max_tokens is not None:
        return environment.max_tokens
    return environment.max_turns * data.max_response_length


def compute_longest_rollout(config: RunConfig) -> int:
    """Return the number of tokens of the longest sample of a rollout, prompt included: of one
    answer, or of a whole episode.
    """
    if config.rollout.environment.name is not None:
        max_tokens = compute_episode_tokens(config.rollout.environment, config.data)
        return config.data.max_prompt_length + max_tokens
    return config.data.max_prompt_length + config.data.max_response_length
