"""The experts that the tokens of a call met before: recorded on the ranks (R2), or written to files
by the engine (R3).

The controller never sees an id. With R2 every rank sends what its routers picked to the token's
home, and an update asks the homes for the tokens that a rank then has: whatever was planned anew in
between, ids follow their token. The home of a sample is one of the ranks of a pipeline stage, which
holds the ids of its layers in host memory: all ranks together hold each id once. With R3 a rank
reads its tokens and layers of its samples' files, or fetches just these.

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
from rlhf_megatron.data.expert_route_files import check_expert_ids, select_routes
from rlhf_megatron.device import copy_tensors_to_device
from rlhf_megatron.ranks.models.router_replay import RouterReplay, choose_expert_ids_dtype
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.sequence_packing import MicroBatch, PackedBatch

ReplayMode = Literal["none", "r2", "r3"]
POSITION_BITS = 24  # of a token's key; the rest is the id of its sample


@dataclass(frozen=True)
class _RoutedTokenIndex:
    """The tokens that this rank routes in a call, all micro-batches one after the other."""

    micro_batch_sizes: list[int]  # of the micro-batches
    samples_N: Tensor  # of the shard; -1 of none
    positions_N: Tensor

    def make_token_keys(self, sample_ids: Tensor) -> Tensor:
        """Return a number for each token of a sample, unique over the run: the sample's id and the
        token's position. Tokens of no sample get -1.
        """
        keys_N = (sample_ids[self.samples_N.clamp(min=0)] << POSITION_BITS) | self.positions_N
        return keys_N.where(self.samples_N >= 0, -1)


class ExpertRoutes:
    """The routes of one model, on one rank. Call all methods on all ranks of the pool at once."""

    def __init__(self, router_replay: RouterReplay, replay_mode: ReplayMode, world: World) -> None:
        self.router_replay = router_replay
        self.replay_mode = replay_mode
        self.world = world
        self._route_homes = _RouteHomes(
            world,
            (len(router_replay.layer_replays), router_replay.top_k),
            choose_expert_ids_dtype(router_replay.num_experts),
        )

    def prepare_log_probs_pass(self, batch: TokenBatch, packed_batch: PackedBatch) -> PackedBatch:
        """Prepare the log-prob pass that follows and return its batch: with R2 begin to record the
        routes of `packed_batch`; with R3 attach the engine's routes for replay.
        """
        if self.replay_mode == "r2" and batch.sample_ids is not None:
            self.router_replay.start_recording()
        return (
            self._attach_routes(batch, packed_batch) if self.replay_mode == "r3" else packed_batch
        )

    def store_recorded_routes(self, batch: TokenBatch, packed_batch: PackedBatch) -> None:
        """End the recording that `prepare_log_probs_pass` began, and store the recorded routes on
        their home ranks. Do nothing where nothing is recorded.
        """
        if not self.router_replay.is_recording:
            return
        assert batch.sample_ids is not None
        recorded = self.router_replay.finish_recording()
        if self.router_replay.layer_replays:
            self._route_homes.store_routes(
                self._index_routed_tokens(batch, packed_batch).make_token_keys(batch.sample_ids),
                torch.cat(recorded),
            )

    def prepare_update_pass(self, batch: TokenBatch, packed_batch: PackedBatch) -> PackedBatch:
        """Return `packed_batch` with the routes that the update pass replays. The next recorded
        log-prob pass then begins another step, and discards the stored routes.
        """
        self._route_homes.is_from_earlier_step = True
        return self._attach_routes(batch, packed_batch)

    def _attach_routes(self, batch: TokenBatch, packed_batch: PackedBatch) -> PackedBatch:
        """Return `packed_batch` with the expert ids of the tokens that this rank routes, on the
        device. A batch without sample ids (R2) or route files (R3) is returned as it is.
        """
        if (batch.sample_ids if self.replay_mode == "r2" else batch.routes) is None:
            return packed_batch
        tokens = self._index_routed_tokens(batch, packed_batch)
        if self.replay_mode == "r2":
            assert batch.sample_ids is not None
            rows_NLK = self._route_homes.fetch_routes(tokens.make_token_keys(batch.sample_ids))
        else:
            assert batch.routes is not None
            rows_NLK = self._read_route_files(batch.routes, tokens)
        is_real_N = tokens.samples_N >= 0
        parts = zip(
            rows_NLK.split(tokens.micro_batch_sizes),
            is_real_N.split(tokens.micro_batch_sizes),
            strict=True,
        )
        there = iter(
            copy_tensors_to_device([tensor for part in parts for tensor in part], self.world.device)
        )
        return replace(
            packed_batch,
            micro_batches=tuple(
                replace(micro, routes=(next(there), next(there)))
                for micro in packed_batch.micro_batches
            ),
        )

    def _index_routed_tokens(
        self, batch: TokenBatch, packed_batch: PackedBatch
    ) -> _RoutedTokenIndex:
        """Return the sample and the position of each token that this rank routes, over all
        micro-batches.
        """
        shares = [self._select_tp_share(micro) for micro in packed_batch.micro_batches]
        sources_N = torch.cat(shares)
        samples_N = torch.searchsorted(batch.offsets, sources_N, right=True) - 1
        positions_N = sources_N - batch.offsets[samples_N.clamp(min=0)]
        return _RoutedTokenIndex(
            [share.numel() for share in shares], samples_N.where(sources_N >= 0, -1), positions_N
        )

    def _select_tp_share(self, micro_batch: MicroBatch) -> Tensor:
        """Return the source tokens of this rank's part of the sequence."""
        assert micro_batch.source_tokens is not None, "packed without the sources of tokens"
        if not self.world.layout.sequence_parallel:
            return micro_batch.source_tokens
        return micro_batch.source_tokens.chunk(self.world.layout.tp)[self.world.coordinates.tp]

    def _read_route_files(
        self, route_files: Sequence[str], token_index: _RoutedTokenIndex
    ) -> Tensor:
        """Return the ids [N, L, K] of the indexed tokens from the files of their samples, for this
        rank's layers; zeros where a file has no such token. Raise where a file's layers or ids do
        not fit the model.
        """
        replay = self.router_replay
        num_layers = len(self.router_replay.layer_has_experts)
        ordinals = [sum(replay.layer_has_experts[:number]) for number in replay.layer_numbers]
        # where files lack the other layers
        layers_of = {sum(replay.layer_has_experts): np.array(ordinals, dtype=np.int64)}
        layers_of[num_layers] = np.array(replay.layer_numbers, dtype=np.int64)
        rows_NLK = torch.zeros(
            (token_index.samples_N.numel(), len(ordinals), replay.top_k),
            dtype=choose_expert_ids_dtype(replay.num_experts),
        )
        by_sample = token_index.samples_N.argsort(stable=True)
        # the first: of no sample
        counts = torch.bincount(token_index.samples_N + 1, minlength=len(route_files) + 1)
        for name, mine in zip(route_files, by_sample.split(counts.tolist())[1:], strict=True):
            if name and mine.numel():
                positions = token_index.positions_N[mine]
                found = select_routes(name, positions.numpy(), layers_of, replay.top_k)
                replay.num_fetched_bytes += found.num_fetched
                check_expert_ids(name, found.ids, replay.num_experts)
                places = mine[positions < found.num_tokens]
                rows_NLK[places] = torch.from_numpy(found.ids.astype(np.int64)).to(rows_NLK.dtype)
        return rows_NLK


class _RouteHomes:
    """The store of tokens' expert ids, each on one rank of this stage: the sample's id modulo the
    number of ranks.
    """

    def __init__(self, world: World, routes_shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.process_group = world.pg_collection.tp_dp_cp
        self.device = world.device
        self.is_from_earlier_step = False
        self._keys_N = torch.empty(0, dtype=torch.int64)  # ascending
        self._routes_NLK = torch.empty((0, *routes_shape), dtype=dtype)

    def store_routes(self, keys_N: Tensor, routes_NLK: Tensor) -> None:
        """Send the routes of these tokens to their home ranks, and store the routes received;
        discard stored routes of an earlier step first. All ranks must call it.
        """
        if self.is_from_earlier_step:
            self._keys_N = self._keys_N[:0]
            self._routes_NLK = self._routes_NLK[:0]
            self.is_from_earlier_step = False
        order, sent, taken = self._plan_exchange(keys_N)
        keys_N = torch.cat([self._keys_N, self._exchange_bytes(keys_N[order], sent, taken)])
        routes_NLK = torch.cat(
            [self._routes_NLK, self._exchange_bytes(routes_NLK[order], sent, taken)]
        )
        order = keys_N.argsort()
        self._keys_N = keys_N[order]
        self._routes_NLK = routes_NLK[order]

    def fetch_routes(self, keys_N: Tensor) -> Tensor:
        """Return the routes of these tokens from their home ranks, zeros where the key is -1. All
        ranks must call it; raise AssertionError for a token without recorded routes.
        """
        rows_NLK = self._routes_NLK.new_zeros((keys_N.numel(), *self._routes_NLK.shape[1:]))
        if rows_NLK.shape[1] == 0:  # a stage without experts
            return rows_NLK
        order, sent, taken = self._plan_exchange(keys_N)
        wanted_N = self._exchange_bytes(keys_N[order], sent, taken)
        places_N = torch.searchsorted(self._keys_N, wanted_N).clamp(
            max=max(self._keys_N.numel() - 1, 0)
        )
        lost_N = wanted_N[self._keys_N[places_N] != wanted_N] if self._keys_N.numel() else wanted_N
        assert not lost_N.numel(), (
            f"no ids were recorded of sample {int(lost_N[0]) >> POSITION_BITS}"
        )
        rows_NLK[order] = self._exchange_bytes(self._routes_NLK[places_N], taken, sent)
        return rows_NLK

    def _plan_exchange(self, keys_N: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Return (the indices of the tokens of samples, sorted by home rank; how many tokens go to
        each rank; how many come from each rank).
        """
        num_homes = self.process_group.size()
        homes_N = ((keys_N >> POSITION_BITS) % num_homes).where(keys_N >= 0, num_homes)
        sent = torch.bincount(homes_N, minlength=num_homes + 1)[:num_homes]
        order = homes_N.argsort(stable=True)[: int(sent.sum())]
        taken = self._exchange_bytes(sent, [1] * num_homes, [1] * num_homes)
        return order, sent.tolist(), taken.tolist()

    def _exchange_bytes(
        self, column: Tensor, send_counts: list[int], receive_counts: list[int]
    ) -> Tensor:
        """Send `send_counts` rows of the column to each rank and return the received rows on the
        CPU; the exchange is in bytes, because gloo does not support all types.
        """
        sendable = column.unsqueeze(-1).flatten(1).contiguous().view(torch.uint8).to(self.device)
        found = sendable.new_empty((sum(receive_counts), sendable.shape[1]))
        dist.all_to_all_single(
            found, sendable, receive_counts, send_counts, group=self.process_group
        )
        return found.cpu().view(column.dtype).view(sum(receive_counts), *column.shape[1:])
