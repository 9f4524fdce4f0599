"""Router replay: tokens meet the experts that they met at another time; gates come from the
logits of now.

megatron-core asks the object in `router.router_replay` which experts a token meets. Its own object
knows one micro-batch, and its caller must say when a backward pass computes a layer again; this
object finds that out itself.

A row of ids is a route when its first two differ: the experts of a token are distinct. Other rows,
such as zeros, are tokens without a route, which meet the experts that the router picks now.

Legend: T tokens of this rank, L layers with experts on this rank, K experts of a token, E
experts of a layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from rlhf_megatron.ranks.parallel.world import World

TokenRoutes = tuple[Tensor, Tensor]
"""The routes of the tokens of a micro-batch that a rank routes: (ids_TLK, uint8 or int16;
is_real_T, whether a token belongs to a sample and is neither padding nor filler).
"""


def choose_expert_ids_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest type that holds the ids of this many experts: uint8 or int16."""
    return torch.uint8 if num_experts <= 256 else torch.int16


@dataclass
class RouterReplay:
    """The replay of all routers of a rank. Call `enter_forward_pass` before every forward pass of a
    chunk, and `finish_pass` after a pass with gradients.
    """

    world: World
    num_experts: int  # E
    top_k: int  # K
    layer_has_experts: tuple[bool, ...]  # of each layer of the whole model
    # of this rank's layers with experts, in the whole model, from 0
    layer_numbers: tuple[int, ...] = ()
    layer_replays: tuple[LayerReplay, ...] = ()
    current_routes: TokenRoutes | None = None
    has_gradients: bool = False  # the pass has gradients
    is_recording: bool = False
    num_fetched_bytes: int = 0  # bytes of routes from other machines, since the last `finish_pass`

    def enter_forward_pass(self, routes: TokenRoutes | None, has_gradients: bool) -> None:
        """Set the experts of the tokens of the next forward pass; with None the routers pick."""
        self.current_routes = routes
        self.has_gradients = has_gradients

    def start_recording(self) -> None:
        """Record the experts that the routers pick from now on, until `finish_recording`."""
        self.is_recording = True
        for layer in self.layer_replays:
            layer.recorded_ids.clear()

    def finish_recording(self) -> list[Tensor]:
        """Stop recording and return the experts of each micro-batch since `start_recording`: [T, L,
        K] on the CPU.
        """
        self.is_recording = False
        micro_batches = zip(*(layer.recorded_ids for layer in self.layer_replays), strict=True)
        found = [torch.stack(layers, 1).cpu() for layers in micro_batches]
        for layer in self.layer_replays:
            layer.recorded_ids.clear()
        return found

    def finish_pass(self) -> dict[str, float]:
        """End a pass: return the replica's share of the figures of a replayed pass with gradients
        (shares of changed and unrouted tokens, load, fetched MB), and reset the counts; {} where
        nothing was replayed. All ranks must call it.
        """
        is_replayed = self.current_routes is not None
        self.current_routes = None
        assert not any(layer.pending_ids for layer in self.layer_replays), (
            "layers wait to be computed again"
        )
        if not is_replayed:
            return {}
        device = self.world.device
        counts = torch.zeros(3, device=device)
        peak = torch.zeros(1, device=device)
        fetched = torch.tensor([self.num_fetched_bytes / 1e6], device=device)
        self.num_fetched_bytes = 0
        dist.all_reduce(fetched, group=self.world.pg_collection.tp_dp_cp)
        if self.layer_replays:
            sums = torch.stack(
                [torch.cat([layer.token_counts, layer.loads_E]) for layer in self.layer_replays]
            )
            dist.all_reduce(sums, group=self.world.pg_collection.tp_dp_cp)
            loads_LE = sums[:, 3:]
            counts = sums[:, :3].sum(0)
            peak = (loads_LE.amax(1) / loads_LE.mean(1).clamp(min=1e-9)).amax(keepdim=True)
            for layer in self.layer_replays:
                layer.reset_counts()
        counts = torch.cat([counts, fetched])
        dist.all_reduce(counts, group=self.world.pp_group)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=self.world.pp_group)
        num_tokens, num_routed, num_changed, fetched_mb = counts.tolist()
        found = {
            "router_changed_share": num_changed / max(num_routed, 1),
            "router_unrouted_share": 1 - num_routed / max(num_tokens, 1),
            "router_load_max_over_mean": peak.item(),
            "router_fetched_mb": fetched_mb,
        }
        return {name: value / self.world.layout.dp for name, value in found.items()}


@dataclass
class LayerReplay:
    """The replay of one router. `pending_ids` holds the experts of micro-batches that a backward
    pass will compute again.
    """

    router_replay: RouterReplay
    layer_index: int  # among this rank's layers with experts
    pending_ids: deque[Tensor] = field(default_factory=deque)
    recorded_ids: list[Tensor] = field(default_factory=list)
    # tokens, with a route, that now pick others
    token_counts: Tensor = field(default_factory=lambda: torch.zeros(3))
    loads_E: Tensor = field(default_factory=lambda: torch.zeros(0))

    def reset_counts(self) -> None:
        """Set the counts of tokens and the experts' loads to zero."""
        device = self.router_replay.world.device
        self.token_counts = torch.zeros(3, device=device)
        self.loads_E = torch.zeros(self.router_replay.num_experts, device=device)

    def get_replay_topk(
        self,
        scores_TE: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (the scores of the experts of each token, with gradient; the experts' ids):
        replayed ids where the token has a route, else those that `default` picks. megatron-core
        prescribes name and arguments.
        """
        replay = self.router_replay
        if torch.is_grad_enabled() and self.pending_ids:  # a backward pass computes the layer again
            ids_TK = self.pending_ids.popleft().long()
            return scores_TE.gather(1, ids_TK), ids_TK
        assert default is not None
        found, ids_TK = default(scores_TE, topk, num_groups=num_groups, group_topk=group_topk)
        if replay.is_recording:
            self.recorded_ids.append(ids_TK.to(choose_expert_ids_dtype(replay.num_experts)))
        if replay.current_routes is None:
            return found, ids_TK
        ids_TK = self._replay_ids(ids_TK, replay.current_routes)
        if replay.has_gradients and not torch.is_grad_enabled():
            self.pending_ids.append(ids_TK.to(choose_expert_ids_dtype(replay.num_experts)))
        return scores_TE.gather(1, ids_TK), ids_TK

    def _replay_ids(self, live_TK: Tensor, routes: TokenRoutes) -> Tensor:
        """Return the ids [T, K] of this layer's routes, or the live ids of tokens without a route;
        in a pass with gradients also count tokens, changes and loads.
        """
        ids_TLK, is_real_T = routes
        ids_TK = ids_TLK[:, self.layer_index].long()
        is_routed_T = ids_TK[:, 0] != ids_TK[:, 1]
        ids_TK = torch.where(is_routed_T[:, None], ids_TK, live_TK)
        if self.router_replay.has_gradients:
            is_changed_T = (ids_TK.sort(1).values != live_TK.sort(1).values).any(1)
            parts = (is_real_T, is_real_T & is_routed_T, is_real_T & is_changed_T)
            self.token_counts = self.token_counts + torch.stack([part.sum() for part in parts])
            met = is_real_T[:, None].expand_as(ids_TK).flatten().float()
            self.loads_E = self.loads_E.index_add(0, ids_TK.flatten(), met)
        return ids_TK


def make_router_replay(chunks: Sequence[nn.Module], config: Any, world: World) -> RouterReplay:
    """Return the RouterReplay of a model's unwrapped chunks, and make their routers use it.

    Raise ValueError for a model without experts, or with one expert a token.
    """
    top_k = config.moe_router_topk
    if not config.num_moe_experts or top_k < 2:
        raise ValueError(
            f"router_replay needs a model whose tokens meet two experts or more; this one has"
            f" {config.num_moe_experts or 0} experts, {top_k} a token. Remove it."
        )
    replay = RouterReplay(
        world, config.num_moe_experts, top_k, tuple(map(bool, config.moe_layer_freq))
    )
    routers: list[Any] = [
        module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)
    ]
    replay.layer_replays = tuple(LayerReplay(replay, index) for index in range(len(routers)))
    replay.layer_numbers = tuple(router.layer_number - 1 for router in routers)
    for router, layer in zip(routers, replay.layer_replays, strict=True):
        layer.reset_counts()
        router.router_replay = layer
    return replay
