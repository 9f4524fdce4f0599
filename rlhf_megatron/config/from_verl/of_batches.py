"""Mini-batches (prompts there, samples here), passes, and token budgets made of micro-batch sizes."""

from __future__ import annotations

from rlhf_megatron.config.from_verl.draft import Draft
from rlhf_megatron.config.from_verl.given import Given

SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def actor_batches(draft: Draft) -> None:
    _mini_batch(draft, "actor")
    draft.copy("actor.ppo_epochs")
    draft.copy("actor.shuffle")
    _budget(draft, "actor", "ppo", "actor.ppo_max_token_len_per_gpu")
    g, tokens = draft.given, "rollout.log_prob_max_token_len_per_gpu"
    if g.look(tokens) not in (None, g.look("actor.ppo_max_token_len_per_gpu")):
        draft.leave(tokens, "the pass for old log-probs has the actor's budget")
    g.ignore(tokens)
    g.ignore(*(f"rollout.log_prob_{name}" for name in ("micro_batch_size_per_gpu", "micro_batch_size")))
    g.ignore("rollout.log_prob_use_dynamic_bsz")


def critic_batches(draft: Draft) -> None:
    """What is not given is the actor's, in verl as here."""
    g = draft.given
    if g.has("critic.ppo_mini_batch_size") and g.look("critic.ppo_mini_batch_size") is not None:
        _mini_batch(draft, "critic")
    if g.has("critic.ppo_epochs") and g.look("critic.ppo_epochs") is not None:
        draft.copy("critic.ppo_epochs")
    _budget(draft, "critic", "ppo", "critic.ppo_max_token_len_per_gpu")
    g.ignore("critic.forward_micro_batch_size_per_gpu", "critic.forward_micro_batch_size")
    if g.look("critic.forward_max_token_len_per_gpu") in (None, g.look("critic.ppo_max_token_len_per_gpu")):
        g.ignore("critic.forward_max_token_len_per_gpu")


def reference_batches(draft: Draft) -> None:
    _budget(draft, "reference", "log_prob", "reference.max_token_len_per_gpu")


def optimizer_steps_a_step(given: Given, role: str) -> int | None:
    """mini-batches x passes of a step of verl's loop; None where the batches do not say it."""
    size = given.look("data.train_batch_size")
    mini = given.look(f"{role}.ppo_mini_batch_size") or given.look("actor.ppo_mini_batch_size")
    epochs = given.look(f"{role}.ppo_epochs") or given.look("actor.ppo_epochs")
    is_whole = all(isinstance(value, int) and value > 0 for value in (size, mini, epochs))
    return max(1, size // mini) * epochs if is_whole else None


def replicas(given: Given) -> int | None:
    """Data-parallel size of the actor."""
    ranks = [given.look(key) for key in ("trainer.nnodes", "trainer.n_gpus_per_node")]
    sizes = [given.look(f"actor.megatron.{name}") for name in SIZES]
    if not all(isinstance(value, int) and value > 0 for value in (*ranks, *sizes)):
        return None
    return max(1, ranks[0] * ranks[1] // (sizes[0] * sizes[1] * sizes[2]))


def _mini_batch(draft: Draft, role: str) -> None:
    source = f"{role}.ppo_mini_batch_size"
    size, n = draft.given.whole(source), draft.given.whole("rollout.n")
    if size is not None and n is not None:
        note = f"samples here, prompts there: {size} x rollout.n {n}"
        draft.put(f"{role}.mini_batch_size", size * n, (source, "rollout.n"), note)


def _budget(draft: Draft, role: str, kind: str, key: str) -> None:
    """Tokens of a micro-batch on one rank. Sizes in samples are for the longest ones, which pack to fewer."""
    g = draft.given
    is_actor = kind == "ppo"
    tokens, dynamic = f"{role}.{kind}_max_token_len_per_gpu", f"{role}.{'' if is_actor else 'log_prob_'}use_dynamic_bsz"
    per_gpu, of_all = f"{role}.{kind}_micro_batch_size_per_gpu", f"{role}.{kind}_micro_batch_size"
    g.ignore(tokens, dynamic, per_gpu, of_all)
    is_dynamic = g.flag(dynamic) if g.look(dynamic) is not None else g.flag("actor.use_dynamic_bsz")
    source = next((one for one in (per_gpu, of_all) if g.look(one) is not None), None)
    if is_dynamic or source is None:
        if g.has(tokens) and g.look(tokens) is not None:
            draft.put(key, g.whole(tokens), (tokens,))
        return
    lengths = [g.whole(f"data.max_{one}_length") for one in ("prompt", "response")]
    size, cp, num_replicas = g.whole(source), g.whole("actor.megatron.context_parallel_size"), replicas(g)
    if size is None or cp is None or num_replicas is None or lengths[0] is None or lengths[1] is None:
        return
    of_rank = size if source == per_gpu else max(1, size // num_replicas)
    longest = lengths[0] + lengths[1]
    shared = f" / context_parallel_size {cp}" if cp > 1 else ""
    share = f" (of {size} over {num_replicas} replicas)" if source == of_all else ""
    note = f"micro-batches are cut by tokens: {of_rank}{share} x longest sample {longest}{shared}"
    draft.put(key, -(-of_rank * longest // cp), (source,), note)
