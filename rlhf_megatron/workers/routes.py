"""Which experts the tokens of a call met before: recorded on the ranks (R2), or told by the engine in files (R3).

The controller never sees an id. With R2 every rank sends what its routers picked to the token's home, and an update
asks the homes for the tokens that a rank then has: whatever was planned anew in between, ids follow their token. The
home of a sample is one of the ranks of a pipeline stage, which holds the ids of its layers in host memory: all ranks
together hold each id once. With R3 a rank reads its tokens and layers of its samples' files, or fetches just these.

Legend: N tokens, L layers with experts of this rank, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.data.routes import check_ids, select_routes
from rlhf_megatron.models.replay import RouterReplay, ids_dtype
from rlhf_megatron.parallel.device import moved
from rlhf_megatron.parallel.world import World
from rlhf_megatron.workers.pack import MicroBatch, Packed

ReplayMode = Literal["none", "r2", "r3"]
POSITION_BITS = 24  # of a token's key; the rest is the id of its sample


@dataclass(frozen=True)
class _Tokens:
    """The tokens that this rank routes in a call, all micro-batches one after the other."""

    sizes: list[int]  # of the micro-batches
    samples_N: Tensor  # of the shard; -1 of none
    positions_N: Tensor

    def keys_N(self, sample_ids: Tensor) -> Tensor:
        """A number for each token that is of a sample, unique over the run; -1 for others."""
        keys_N = (sample_ids[self.samples_N.clamp(min=0)] << POSITION_BITS) | self.positions_N
        return keys_N.where(self.samples_N >= 0, -1)


class Routes:
    """The routes of one model, on one rank. Call all methods on all ranks of the pool at once."""

    def __init__(self, replay: RouterReplay, mode: ReplayMode, world: World) -> None:
        self.replay = replay
        self.mode = mode
        self.world = world
        self._homes = _Homes(world, (len(replay.layers), replay.top_k), ids_dtype(replay.num_experts))

    def before_log_probs(self, batch: TokenBatch, packed: Packed) -> Packed:
        """Prepare the pass that follows: with R2 it is recorded, with R3 it replays what the engine did."""
        if self.mode == "r2" and batch.sample_ids is not None:
            self.replay.record()
        return self._given(batch, packed) if self.mode == "r3" else packed

    def after_log_probs(self, batch: TokenBatch, packed: Packed) -> None:
        """End what `before_log_probs` began."""
        if not self.replay.is_recording:
            return
        assert batch.sample_ids is not None
        recorded = self.replay.recorded()
        if self.replay.layers:
            self._homes.add(self._tokens(batch, packed).keys_N(batch.sample_ids), torch.cat(recorded))

    def before_update(self, batch: TokenBatch, packed: Packed) -> Packed:
        """The pass that follows replays. A later `before_log_probs` begins another step: what stands is forgotten."""
        self._homes.is_old = True
        return self._given(batch, packed)

    def _given(self, batch: TokenBatch, packed: Packed) -> Packed:
        """`packed` with the ids of the tokens that this rank routes. A batch without them is left as it is."""
        if (batch.sample_ids if self.mode == "r2" else batch.routes) is None:
            return packed
        tokens = self._tokens(batch, packed)
        if self.mode == "r2":
            assert batch.sample_ids is not None
            rows_NLK = self._homes.find(tokens.keys_N(batch.sample_ids))
        else:
            assert batch.routes is not None
            rows_NLK = self._read(batch.routes, tokens)
        is_real_N = tokens.samples_N >= 0
        parts = zip(rows_NLK.split(tokens.sizes), is_real_N.split(tokens.sizes), strict=True)
        there = iter(moved([tensor for part in parts for tensor in part], self.world.device))
        return replace(
            packed,
            micro_batches=tuple(replace(micro, routes=(next(there), next(there))) for micro in packed.micro_batches),
        )

    def _tokens(self, batch: TokenBatch, packed: Packed) -> _Tokens:
        shares = [self._share(micro) for micro in packed.micro_batches]
        sources_N = torch.cat(shares)
        samples_N = torch.searchsorted(batch.offsets, sources_N, right=True) - 1
        positions_N = sources_N - batch.offsets[samples_N.clamp(min=0)]
        return _Tokens([share.numel() for share in shares], samples_N.where(sources_N >= 0, -1), positions_N)

    def _share(self, micro: MicroBatch) -> Tensor:
        assert micro.sources is not None, "packed without the sources of tokens"
        if not self.world.layout.sequence_parallel:
            return micro.sources
        return micro.sources.chunk(self.world.layout.tp)[self.world.coordinates.tp]

    def _read(self, files: Sequence[str], tokens: _Tokens) -> Tensor:
        replay, num_layers = self.replay, len(self.replay.has_experts)
        ordinals = [sum(replay.has_experts[:number]) for number in replay.numbers]
        layers_of = {sum(replay.has_experts): np.array(ordinals, dtype=np.int64)}  # where files lack the other layers
        layers_of[num_layers] = np.array(replay.numbers, dtype=np.int64)
        rows_NLK = torch.zeros(
            (tokens.samples_N.numel(), len(ordinals), replay.top_k), dtype=ids_dtype(replay.num_experts)
        )
        by_sample = tokens.samples_N.argsort(stable=True)
        counts = torch.bincount(tokens.samples_N + 1, minlength=len(files) + 1)  # the first: of no sample
        for name, mine in zip(files, by_sample.split(counts.tolist())[1:], strict=True):
            if name and mine.numel():
                positions = tokens.positions_N[mine]
                found = select_routes(name, positions.numpy(), layers_of, replay.top_k)
                replay.num_fetched += found.num_fetched
                check_ids(name, found.ids, replay.num_experts)
                places = mine[positions < found.num_tokens]
                rows_NLK[places] = torch.from_numpy(found.ids.astype(np.int64)).to(rows_NLK.dtype)
        return rows_NLK


class _Homes:
    """Ids of tokens, each with one of the ranks of this stage: the sample's id modulo their number."""

    def __init__(self, world: World, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.group = world.pg_collection.tp_dp_cp
        self.device = world.device
        self.is_old = False
        self._keys_N = torch.empty(0, dtype=torch.int64)  # ascending
        self._rows_NLK = torch.empty((0, *shape), dtype=dtype)

    def add(self, keys_N: Tensor, rows_NLK: Tensor) -> None:
        """Bring the ids of tokens home."""
        if self.is_old:
            self._keys_N, self._rows_NLK, self.is_old = self._keys_N[:0], self._rows_NLK[:0], False
        order, sent, taken = self._by_home(keys_N)
        keys_N = torch.cat([self._keys_N, self._exchange(keys_N[order], sent, taken)])
        rows_NLK = torch.cat([self._rows_NLK, self._exchange(rows_NLK[order], sent, taken)])
        order = keys_N.argsort()
        self._keys_N, self._rows_NLK = keys_N[order], rows_NLK[order]

    def find(self, keys_N: Tensor) -> Tensor:
        """The ids of these tokens; zeros where the key is -1."""
        rows_NLK = self._rows_NLK.new_zeros((keys_N.numel(), *self._rows_NLK.shape[1:]))
        if rows_NLK.shape[1] == 0:  # a stage without experts
            return rows_NLK
        order, sent, taken = self._by_home(keys_N)
        wanted_N = self._exchange(keys_N[order], sent, taken)
        places_N = torch.searchsorted(self._keys_N, wanted_N).clamp(max=max(self._keys_N.numel() - 1, 0))
        lost_N = wanted_N[self._keys_N[places_N] != wanted_N] if self._keys_N.numel() else wanted_N
        assert not lost_N.numel(), f"no ids were recorded of sample {int(lost_N[0]) >> POSITION_BITS}"
        rows_NLK[order] = self._exchange(self._rows_NLK[places_N], taken, sent)
        return rows_NLK

    def _by_home(self, keys_N: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """(the tokens of samples, by their homes; how many go to each rank; how many come from each)."""
        num_homes = self.group.size()
        homes_N = ((keys_N >> POSITION_BITS) % num_homes).where(keys_N >= 0, num_homes)
        sent = torch.bincount(homes_N, minlength=num_homes + 1)[:num_homes]
        order = homes_N.argsort(stable=True)[: int(sent.sum())]
        taken = self._exchange(sent, [1] * num_homes, [1] * num_homes)
        return order, sent.tolist(), taken.tolist()

    def _exchange(self, column: Tensor, sent: list[int], taken: list[int]) -> Tensor:
        """Exchange a column as bytes, since gloo does not know all types."""
        sendable = column.unsqueeze(-1).flatten(1).contiguous().view(torch.uint8).to(self.device)
        found = sendable.new_empty((sum(taken), sendable.shape[1]))
        dist.all_to_all_single(found, sendable, taken, sent, group=self.group)
        return found.cpu().view(column.dtype).view(sum(taken), *column.shape[1:])
