"""Router replay: tokens meet the experts that they met at another time; gates come from the logits of now.

megatron-core asks the object in `router.router_replay` which experts a token meets. Its own object knows one
micro-batch, and needs to be told when a backward pass computes a layer again; this one knows by itself.

A row of ids is a route when its first two differ: the experts of a token are distinct. Other rows, such as zeros, are
tokens without a route, which meet the experts that the router picks now.

Legend: T tokens of this rank, L layers with experts on this rank, K experts of a token, E experts of a layer.
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

from rlhf_megatron.parallel.world import World

RoutedTokens = tuple[Tensor, Tensor]
"""What a rank is told of the tokens of a micro-batch that it routes: (ids_TLK, uint8 or int16; is_real_T, of a sample,
neither padding nor filler)."""


def ids_dtype(num_experts: int) -> torch.dtype:
    """The smallest type that holds the ids of so many experts."""
    return torch.uint8 if num_experts <= 256 else torch.int16


@dataclass
class RouterReplay:
    """All routers of a rank. Before every forward pass of a chunk `enter`; after a pass with gradients `end`."""

    world: World
    num_experts: int  # E
    top_k: int  # K
    has_experts: tuple[bool, ...]  # of each layer of the whole model
    numbers: tuple[int, ...] = ()  # of this rank's layers with experts, in the whole model, from 0
    layers: tuple[LayerReplay, ...] = ()
    given: RoutedTokens | None = None
    is_trained: bool = False  # the pass has gradients
    is_recording: bool = False
    num_fetched: int = 0  # bytes of routes from other machines, since the last `end`

    def enter(self, given: RoutedTokens | None, is_trained: bool) -> None:
        """Say which experts the tokens of the next forward pass meet; None: those that the routers pick."""
        self.given, self.is_trained = given, is_trained

    def record(self) -> None:
        """Keep what the routers pick from now on, until `recorded`."""
        self.is_recording = True
        for layer in self.layers:
            layer.recorded.clear()

    def recorded(self) -> list[Tensor]:
        """Return the experts of each micro-batch since `record`: [T, L, K] on the CPU."""
        self.is_recording = False
        micro_batches = zip(*(layer.recorded for layer in self.layers), strict=True)
        found = [torch.stack(layers, 1).cpu() for layers in micro_batches]
        for layer in self.layers:
            layer.recorded.clear()
        return found

    def end(self) -> dict[str, float]:
        """The replica's share of the figures of a pass with gradients; {} where nothing was replayed. All ranks."""
        is_replayed = self.given is not None
        self.given = None
        assert not any(layer.waiting for layer in self.layers), "layers wait to be computed again"
        if not is_replayed:
            return {}
        device = self.world.device
        counts, peak = torch.zeros(3, device=device), torch.zeros(1, device=device)
        fetched = torch.tensor([self.num_fetched / 1e6], device=device)
        self.num_fetched = 0
        dist.all_reduce(fetched, group=self.world.pg_collection.tp_dp_cp)
        if self.layers:
            sums = torch.stack([torch.cat([layer.counts, layer.loads_E]) for layer in self.layers])
            dist.all_reduce(sums, group=self.world.pg_collection.tp_dp_cp)
            loads_LE = sums[:, 3:]
            counts = sums[:, :3].sum(0)
            peak = (loads_LE.amax(1) / loads_LE.mean(1).clamp(min=1e-9)).amax(keepdim=True)
            for layer in self.layers:
                layer.forget()
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
    """The replay of one router. `waiting`: the experts of micro-batches that a backward pass will compute again."""

    replay: RouterReplay
    index: int  # among this rank's layers with experts
    waiting: deque[Tensor] = field(default_factory=deque)
    recorded: list[Tensor] = field(default_factory=list)
    counts: Tensor = field(default_factory=lambda: torch.zeros(3))  # tokens, with a route, that now pick others
    loads_E: Tensor = field(default_factory=lambda: torch.zeros(0))

    def forget(self) -> None:
        device = self.replay.world.device
        self.counts, self.loads_E = torch.zeros(3, device=device), torch.zeros(self.replay.num_experts, device=device)

    def get_replay_topk(
        self,
        scores_TE: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(scores of the experts that tokens meet, with gradient; their ids). Named and called by megatron-core."""
        replay = self.replay
        if torch.is_grad_enabled() and self.waiting:  # a backward pass computes the layer again
            ids_TK = self.waiting.popleft().long()
            return scores_TE.gather(1, ids_TK), ids_TK
        assert default is not None
        found, ids_TK = default(scores_TE, topk, num_groups=num_groups, group_topk=group_topk)
        if replay.is_recording:
            self.recorded.append(ids_TK.to(ids_dtype(replay.num_experts)))
        if replay.given is None:
            return found, ids_TK
        ids_TK = self._replayed(ids_TK, replay.given)
        if replay.is_trained and not torch.is_grad_enabled():
            self.waiting.append(ids_TK.to(ids_dtype(replay.num_experts)))
        return scores_TE.gather(1, ids_TK), ids_TK

    def _replayed(self, live_TK: Tensor, given: RoutedTokens) -> Tensor:
        ids_TLK, is_real_T = given
        ids_TK = ids_TLK[:, self.index].long()
        is_routed_T = ids_TK[:, 0] != ids_TK[:, 1]
        ids_TK = torch.where(is_routed_T[:, None], ids_TK, live_TK)
        if self.replay.is_trained:
            is_changed_T = (ids_TK.sort(1).values != live_TK.sort(1).values).any(1)
            parts = (is_real_T, is_real_T & is_routed_T, is_real_T & is_changed_T)
            self.counts = self.counts + torch.stack([part.sum() for part in parts])
            met = is_real_T[:, None].expand_as(ids_TK).flatten().float()
            self.loads_E = self.loads_E.index_add(0, ids_TK.flatten(), met)
        return ids_TK


def make_router_replay(chunks: Sequence[nn.Module], config: Any, world: World) -> RouterReplay:
    """The RouterReplay of a model's unwrapped chunks, whose routers ask it from now on.

    Raises ValueError for a model without experts, or whose tokens meet one expert each.
    """
    top_k = config.moe_router_topk
    if not config.num_moe_experts or top_k < 2:
        raise ValueError(
            f"router_replay needs a model whose tokens meet two experts or more; this one has"
            f" {config.num_moe_experts or 0} experts, {top_k} a token. Remove it."
        )
    replay = RouterReplay(world, config.num_moe_experts, top_k, tuple(map(bool, config.moe_layer_freq)))
    routers: list[Any] = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
    replay.layers = tuple(LayerReplay(replay, index) for index in range(len(routers)))
    replay.numbers = tuple(router.layer_number - 1 for router in routers)
    for router, layer in zip(routers, replay.layers, strict=True):
        layer.forget()
        router.router_replay = layer
    return replay
