"""The rules on engines: how they are got, how weights come to them, who spreads requests over them."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.provenance import Loaded
from rlhf_megatron.config.rules import actor_ranks
from rlhf_megatron.config.schema import RunConfig


def engines(loaded: Loaded) -> Iterator[Problem]:
    c = loaded.config
    yield from _senders(c)
    yield from _of_sglang_only(c)
    yield from _draws(c)
    if (
        c.rollout.endpoints
        and loaded.is_set("rollout.num_engines")
        and c.rollout.num_engines != len(c.rollout.endpoints)
    ):
        yield Problem(
            f"rollout.num_engines ({c.rollout.num_engines}) must be the number of rollout.endpoints"
            f" ({len(c.rollout.endpoints)}); remove it.",
            ("rollout.num_engines", "rollout.endpoints"),
        )
    for name in c.rollout.sglang.args:
        if name.startswith("-"):
            plain = name.lstrip("-")
            key = f"rollout.sglang.args.{name}"
            yield Problem(f"{key} must be written without leading dashes; use {plain}.", (key,))
    if c.rollout.dtype == "float32" and c.model.dtype == "bfloat16":
        yield Problem(
            "rollout.dtype (float32) must not be wider than model.dtype (bfloat16): the engine would spend twice the"
            " memory on the same values; remove it or set model.dtype: float32.",
            ("rollout.dtype", "model.dtype"),
        )


def _of_sglang_only(c: RunConfig) -> Iterator[Problem]:
    if c.rollout.engine == "sglang":
        return
    for name, value, is_used in (
        ("endpoints", list(c.rollout.endpoints), bool(c.rollout.endpoints)),
        ("router", c.rollout.router, c.rollout.router == "sglang"),
        ("weight_transport", c.rollout.weight_transport, c.rollout.weight_transport == "process_group"),
    ):
        if is_used:
            yield Problem(
                f"rollout.{name} ({value}) needs rollout.engine sglang, which is {c.rollout.engine}; set that, or"
                " remove it.",
                (f"rollout.{name}", "rollout.engine"),
            )


def _draws(c: RunConfig) -> Iterator[Problem]:
    """A server that has not this draw would end in the first evaluation."""
    min_p, argument = c.rollout.val_kwargs.min_p, "enable_deterministic_inference"
    if c.rollout.engine != "sglang" or min_p == 0 or c.rollout.val_kwargs.temperature == 0:
        return
    is_set = {name.replace("-", "_"): value for name, value in c.rollout.sglang.args.items()}.get(argument, False)
    if is_set or c.trainer.deterministic:
        key = f"rollout.sglang.args.{argument}" if is_set else "trainer.deterministic"
        yield Problem(
            f"rollout.val_kwargs.min_p ({min_p:g}) is a draw that SGLang has not where seeds count ({key}); use"
            " top_p and set min_p to 0, or give up the seeds.",
            ("rollout.val_kwargs.min_p", key),
        )


def _senders(c: RunConfig) -> Iterator[Problem]:
    """Of memory of the same host: the sender of each pipeline stage must be on the engines' machine."""
    pp, ranks = c.actor.megatron.pipeline_model_parallel_size, actor_ranks(c)
    last_sender = (pp - 1) * (ranks // max(pp, 1))  # the first rank of the last stage
    if c.rollout.weight_transport == "tensor" and c.trainer.nnodes > 1 and last_sender >= c.trainer.n_gpus_per_node:
        yield Problem(
            f"actor.megatron.pipeline_model_parallel_size ({pp}) over trainer.nnodes ({c.trainer.nnodes}) puts stages"
            " on machines without an engine, which rollout.weight_transport (tensor) does not reach; use process_group"
            " or disk, or 1 stage, or one machine.",
            ("actor.megatron.pipeline_model_parallel_size", "trainer.nnodes", "rollout.weight_transport"),
        )


RULES = (engines,)
