"""Continuous batching over a `LocalModel`: a group's prompt is read once, finished samples leave,
waiting ones join.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_megatron.rollout.engine_interface import (
    SCORING_RULE,
    UNSYNCED,
    FinishReason,
    GeneratedSample,
    GenerateRequest,
)
from rlhf_megatron.rollout.local.cache_slots import (
    CacheSlots,
    PendingSample,
    PrefilledBatch,
    WaitingGroup,
    round_up_columns,
)
from rlhf_megatron.rollout.local.local_model import DecodeAttention, LocalModel, count_storage_bytes
from rlhf_megatron.rollout.local.token_sampling import RowSampling, check_sampling_params

# whose logits over the whole vocabulary are in memory while given tokens are scored
_LOGITS_TOKENS = 512
# padded prompt tokens of one forward pass, unless one prompt alone is longer
_PREFILL_TOKENS = 8192
# prompts are read ahead of free rows, so that passes are not tiny: so many tokens ...
_LOOKAHEAD_TOKENS = 1024
_LOOKAHEAD_GROUPS = 64  # ... and groups, whose logits are kept


class BatchGenerator:
    """The decoding loop, for one thread. Rows times columns of the key-value cache never exceed
    `max_num_batched_tokens`.
    """

    def __init__(self, model: LocalModel, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.model = model
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.policy_version = UNSYNCED  # of the weights that stand; `set_policy_version` changes it
        self.is_cache_released = False  # the cache is not there, and nothing can run
        self._waiting_groups: deque[WaitingGroup] = deque()
        self._prefilled_batches: deque[PrefilledBatch] = deque()
        self._running_samples: list[PendingSample] = []
        self._cache_slots = CacheSlots(model, 0, 0)
        self._row_sampling = RowSampling(None, None, None, None)  # of the running rows

    def check_request(self, request: GenerateRequest) -> None:
        """Raise ValueError, with the value and the rule, for a request that this engine cannot
        serve.
        """
        params = request.params
        num_prompt = len(request.prompt_ids)
        if num_prompt == 0 or not request.seeds or params.max_new_tokens < 0:
            raise ValueError(
                "a request needs at least one prompt token, one seed and max_new_tokens >= 0."
            )
        if params.max_new_tokens == 0 and (
            request.num_given < 1 or params.temperature != 1 or request.routes_dir
        ):
            raise ValueError(SCORING_RULE)
        total = num_prompt + params.max_new_tokens
        room = min(self.model.max_positions, self.max_num_batched_tokens)
        if total > room:
            name = (
                "max_position_embeddings"
                if room == self.model.max_positions
                else "max_num_batched_tokens"
            )
            raise ValueError(
                f"a prompt of {num_prompt} tokens and max_new_tokens {params.max_new_tokens} make"
                f" {total}, but {name} is {room}; shorten the prompt or the response."
            )
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= self.model.vocab_size:
            raise ValueError(
                f"prompt_ids must lie in [0, {self.model.vocab_size}), the model's vocabulary."
            )
        if not 0 <= request.num_given < num_prompt:
            raise ValueError(
                f"num_given ({request.num_given}) must be below the number of prompt"
                f" tokens, {num_prompt}."
            )
        if min(request.seeds) < 0 or max(request.seeds) >= 1 << 63:
            raise ValueError("seeds must lie in [0, 2^63).")
        if request.routes_dir and not self.model.num_expert_layers:
            raise ValueError("routes_dir asks which experts tokens meet, and the model has none.")
        check_sampling_params(params, self.model.vocab_size)

    def add_request(self, request: GenerateRequest) -> list[PendingSample]:
        """Check the request and queue its samples, and return one pending sample for each seed.
        `decode_step` returns each of them when it has finished. Raise ValueError as `check_request`
        does.
        """
        self.check_request(request)
        members = [
            PendingSample(
                request.prompt_ids,
                seed,
                request.params,
                request.num_given,
                request.routes_dir,
                request.routes_bytes,
            )
            for seed in request.seeds
        ]
        self._waiting_groups.append(WaitingGroup(list(request.prompt_ids), deque(members)))
        return members

    @property
    def has_work(self) -> bool:
        """Return whether any sample waits or runs."""
        return bool(self._running_samples or self._waiting_groups or self._prefilled_batches)

    @torch.inference_mode()
    def decode_step(self) -> list[PendingSample]:
        """Score waiting groups, let waiting samples join, draw one token for each running sample,
        and return the samples that finished.
        """
        assert not self.is_cache_released, "the cache is released"
        finished = self._score_waiting_groups() + self._admit_waiting_samples()
        if self._running_samples:
            finished += self._decode_rows()
        return finished

    @torch.inference_mode()
    def abort_samples(self, samples: Sequence[PendingSample] | None = None) -> list[PendingSample]:
        """End these unfinished samples, or all where `samples` is None, with reason "abort" and the
        tokens that they have. Return the samples that were ended.
        """
        chosen = None if samples is None else set(map(id, samples))
        rows = [
            row
            for row, member in enumerate(self._running_samples)
            if chosen is None or id(member) in chosen
        ]
        aborted = self._remove_rows(rows, ["abort"] * len(rows))
        for group in self._list_queued_groups():
            ended = [
                member for member in group.waiting_samples if chosen is None or id(member) in chosen
            ]
            group.waiting_samples = deque(
                member for member in group.waiting_samples if member not in ended
            )
            aborted += ended
        for member in aborted:
            member.finish_reason = "abort"
        self._drop_empty_groups()
        return aborted

    @torch.inference_mode()
    def retract_samples(self) -> None:
        """Put all running samples back to the front of the queue with the tokens that they have,
        and forget the prompts that were read; keys and values are computed again when they go on.
        """
        running = self._remove_rows(
            list(range(len(self._running_samples))), [None] * len(self._running_samples)
        )
        for member in running:
            member.num_retractions += 1
        self._requeue_prefilled_groups()
        self._waiting_groups.extendleft(
            WaitingGroup(member.context_ids, deque([member])) for member in reversed(running)
        )

    def set_policy_version(self, version: int) -> None:
        """Note that the weights were replaced by those of `version`. Running samples go on with
        their keys and values; prompts that were read for samples that have not joined are read
        again.
        """
        self.policy_version = version
        for row, member in enumerate(self._running_samples):
            member.record_version(
                version, int(self._cache_slots.host_ages[row]) + 1 - len(member.prompt_ids)
            )
        self._requeue_prefilled_groups()

    def release_cache(self) -> None:
        """Retract all samples and free the key-value cache. Nothing may run until
        `resume_cache`.
        """
        self.retract_samples()
        self._cache_slots = CacheSlots(self.model, 0, 0)
        self.is_cache_released = True

    def resume_cache(self) -> None:
        """Allow decoding again after `release_cache`; memory is allocated as samples join."""
        self.is_cache_released = False

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of keys and values, of running rows and of prompts read ahead. Any
        thread may call it: copying a deque is one step of the interpreter.
        """
        return count_storage_bytes(
            [
                self._cache_slots.cache,
                *(batch.keys_values for batch in self._prefilled_batches.copy()),
            ]
        )

    def reset_cache_size(self) -> None:
        """Shrink the cache to nothing, so that earlier samples leave no trace in its size. There
        must be no work.
        """
        assert not self.has_work, "samples are on their way"
        self._cache_slots = CacheSlots(self.model, 0, 0)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[GeneratedSample]]:
        """Generate and return the samples of each request, in order. For use without a server."""
        groups = [self.add_request(request) for request in requests]
        while self.has_work:
            self.decode_step()
        return [[member.make_generated_sample() for member in group] for group in groups]

    def _list_queued_groups(self) -> list[WaitingGroup]:
        """Return all groups with waiting samples, those whose prompts were read first."""
        return [group for batch in self._prefilled_batches for _, group in batch.groups] + list(
            self._waiting_groups
        )

    def _requeue_prefilled_groups(self) -> None:
        """Drop the keys and values of prompts that were read ahead, and put their groups to the
        front of the queue.
        """
        self._waiting_groups = deque(self._list_queued_groups())
        self._prefilled_batches.clear()
        for group in self._waiting_groups:
            group.is_context_used = False

    def _drop_empty_groups(self) -> None:
        """Remove the groups whose samples have all joined or ended, and batches without groups."""
        self._waiting_groups = deque(
            group for group in self._waiting_groups if group.waiting_samples
        )
        for batch in self._prefilled_batches:
            batch.groups = deque(
                (row, group) for row, group in batch.groups if group.waiting_samples
            )
        self._prefilled_batches = deque(batch for batch in self._prefilled_batches if batch.groups)

    def _admit_waiting_samples(self) -> list[PendingSample]:
        """Fill free rows with waiting samples, reading prompts as needed, and draw the first token
        of each. Return the samples that this token already ends.
        """
        finished: list[PendingSample] = []
        while len(self._running_samples) < self.max_num_seqs and (
            self._prefilled_batches or self._has_waiting_prompts
        ):
            if not self._prefilled_batches:
                self._prefill_waiting_groups()
            batch = self._prefilled_batches[0]
            picked = self._pick_samples(batch)
            if not picked:
                break
            self._join_rows(batch, picked)
            first = len(self._running_samples) - len(picked)
            sources = torch.tensor([source for source, _ in picked], device=self.model.device)
            finished += self._draw_tokens(first, batch.logits[sources])
            self._drop_empty_groups()
        return finished

    def _score_waiting_groups(self) -> list[PendingSample]:
        """Compute the log-probs of the given tokens of the groups at the front of the queue that
        only need scores, about one pass's worth, and return their samples, finished.
        """
        finished: list[PendingSample] = []
        num_tokens = 0
        while (
            self._waiting_groups
            and self._waiting_groups[0].is_scored
            and num_tokens < _PREFILL_TOKENS
        ):
            group = self._waiting_groups.popleft()
            num_tokens += len(group.context_ids)
            first = group.waiting_samples[0]
            ids = torch.tensor(group.context_ids, device=self.model.device)
            log_probs = self.model.score_tokens(ids, first.num_given, _LOGITS_TOKENS).tolist()
            for member in group.waiting_samples:
                member.record_version(self.policy_version, 0)
                member.token_ids = group.context_ids[-first.num_given :]
                member.log_probs = list(log_probs)
                member.finish_reason = "length"
                finished.append(member)
        return finished

    @property
    def _has_waiting_prompts(self) -> bool:
        """Return whether the first waiting group is to be decoded, not scored."""
        return bool(self._waiting_groups) and not self._waiting_groups[0].is_scored

    def _prefill_waiting_groups(self) -> None:
        """Read the contexts of the next waiting groups in one forward pass, enough for the free
        rows and some ahead, and append them as a batch.
        """
        free = self.max_num_seqs - len(self._running_samples)
        chosen: list[WaitingGroup] = []
        longest = num_samples = num_tokens = 0
        while self._has_waiting_prompts and len(chosen) < self.max_num_seqs:
            group = self._waiting_groups[0]
            length = len(group.context_ids)
            is_lookahead = num_samples >= free
            if chosen and (len(chosen) + 1) * max(longest, length) > _PREFILL_TOKENS:
                break
            if is_lookahead and (
                num_tokens + length > _LOOKAHEAD_TOKENS or len(chosen) >= _LOOKAHEAD_GROUPS
            ):
                break
            chosen.append(self._waiting_groups.popleft())
            longest = max(longest, length)
            num_tokens = num_tokens + length
            num_samples += len(group.waiting_samples)
        device = self.model.device
        padded = [group.context_ids + [0] * (longest - len(group.context_ids)) for group in chosen]
        lengths = torch.tensor([len(group.context_ids) for group in chosen], device=device)
        logits, keys_values, routes = self.model.prefill_prompts(
            torch.tensor(padded, device=device), lengths
        )
        self._prefilled_batches.append(
            PrefilledBatch(deque(enumerate(chosen)), keys_values, logits, routes)
        )

    def _pick_samples(self, batch: PrefilledBatch) -> list[tuple[int, PendingSample]]:
        """Take waiting samples out of the batch, as many as rows and the token budget allow, and
        return each with its row in the batch's tensors.
        """
        num_running = len(self._running_samples)
        columns = int(self._cache_slots.host_limits[:num_running].max()) if num_running else 0
        held = sum(other.num_tokens for other in self._prefilled_batches)
        picked: list[tuple[int, PendingSample]] = []
        for source, group in batch.groups:
            while group.waiting_samples and num_running + len(picked) < self.max_num_seqs:
                columns = max(columns, group.waiting_samples[0].max_length)
                num_rows = num_running + len(picked) + 1
                if num_rows > 1 and num_rows * columns + held > self.max_num_batched_tokens:
                    return picked
                picked.append((source, group.pop_next_sample()))
        return picked

    def _join_rows(
        self, batch: PrefilledBatch, picked_samples: list[tuple[int, PendingSample]]
    ) -> None:
        """Let these samples join behind the running rows, with the keys and values of the batch."""
        members = [member for _, member in picked_samples]
        first = len(self._running_samples)
        ages = [len(member.context_ids) for member in members]
        num_stop_ids = max(len(member.params.stop_token_ids) for member in members)
        self._reserve_slots(first + len(members), max(ages) + 1, num_stop_ids)
        self._cache_slots.fill_rows(
            first,
            batch.keys_values,
            batch.routes,
            sources=[source for source, _ in picked_samples],
            ages=[age - 1 for age in ages],  # `_draw_tokens` counts the last context token in
            prompt_lengths=[len(member.prompt_ids) - member.num_given for member in members],
            limits=[member.max_length for member in members],
            seeds=[member.seed for member in members],
            stop_ids=[member.params.stop_token_ids for member in members],
        )
        for member in members:
            member.record_version(self.policy_version, len(member.token_ids))
        self._running_samples += members
        self._rebuild_row_sampling()

    def _reserve_slots(self, num_rows: int, num_columns: int, num_stop_ids: int = 0) -> None:
        """Grow the cache, where it is too small, to these sizes or by half, within the token
        budget.
        """
        slots = self._cache_slots
        if (
            num_rows <= slots.num_rows
            and num_columns <= slots.num_columns
            and num_stop_ids <= slots.num_stop_ids
        ):
            return
        if num_columns > slots.num_columns:
            num_columns = round_up_columns(max(num_columns, slots.num_columns * 3 // 2))
        num_columns = max(num_columns, slots.num_columns)
        if num_rows > slots.num_rows:
            num_rows = min(self.max_num_seqs, max(num_rows, slots.num_rows * 3 // 2))
        num_rows = max(num_rows, slots.num_rows)
        used = len(self._running_samples)
        num_rows = max(used, min(num_rows, max(1, self.max_num_batched_tokens // num_columns)))
        self._cache_slots = slots.make_resized_copy(
            used, num_rows, num_columns, max(num_stop_ids, slots.num_stop_ids)
        )

    def _rebuild_row_sampling(self) -> None:
        """Collect the sampling parameters of the running rows into tensors again."""
        self._row_sampling = RowSampling.from_params(
            [member.params for member in self._running_samples], self.model.device
        )

    def _decode_rows(self) -> list[PendingSample]:
        """Run one forward pass over the newest token of every running row, draw the next tokens,
        and return the samples that finished.
        """
        num_rows = len(self._running_samples)
        columns = int(self._cache_slots.host_ages[:num_rows].max()) + 1
        self._reserve_slots(num_rows, columns)
        slots = self._cache_slots
        columns = min(round_up_columns(columns), slots.num_columns)
        rows = slots.row_numbers[:num_rows]
        ages = slots.ages[:num_rows]
        is_hidden = slots.column_numbers[:columns] > ages.unsqueeze(1)
        mask = torch.zeros(
            num_rows, 1, 1, columns, dtype=self.model.dtype, device=self.model.device
        )
        mask.masked_fill_(is_hidden.view(mask.shape), float("-inf"))
        state = DecodeAttention(slots.cache[:, :, :num_rows, :columns], rows, ages, mask)
        logits, slots.routes[rows, ages] = self.model.decode_tokens(slots.tokens[rows, ages], state)
        return self._draw_tokens(0, logits)

    def _draw_tokens(self, first_row: int, logits: Tensor) -> list[PendingSample]:
        """Draw and store the next token of the rows from `first_row` on, from `logits` [rows, V].
        Remove the rows that end, and return their samples.
        """
        slots = self._cache_slots
        last = len(self._running_samples)
        span = slice(first_row, last)
        slots.ages[span] += 1
        slots.host_ages[span] += 1
        rows = slots.row_numbers[span]
        ages = slots.ages[span]
        num_drawn = ages - slots.prompt_lengths[span]
        tokens, log_probs = self._row_sampling.sample_rows(
            span, logits, slots.stop_ids[span], slots.seeds[span], num_drawn
        )
        slots.tokens[rows, ages] = tokens
        slots.log_probs[rows, ages] = log_probs
        is_full = slots.host_ages[span] + 1 >= slots.host_limits[span]
        # the step's one transfer
        is_stop = (tokens.unsqueeze(1) == slots.stop_ids[span]).any(1).cpu().numpy()
        ended = (is_full | is_stop).nonzero()[0]
        if len(ended) == 0:
            return []
        reasons: list[FinishReason] = ["stop" if is_stop[row] else "length" for row in ended]
        return self._remove_rows([first_row + int(row) for row in ended], reasons)

    def _remove_rows(
        self, rows: list[int], reasons: Sequence[FinishReason | None]
    ) -> list[PendingSample]:
        """Take rows out and return their samples, with their tokens, log-probs and finish reasons
        filled in (None: unfinished). The last running rows move into the gaps.
        """
        if not rows:
            return []
        slots = self._cache_slots
        columns = int(slots.host_ages[: len(self._running_samples)].max()) + 1
        index = torch.tensor(rows, device=self.model.device)
        tokens = slots.tokens[index, :columns].tolist()
        log_probs = slots.log_probs[index, :columns].tolist()
        left = [self._running_samples[row] for row in rows]
        for k, (row, member, reason) in enumerate(zip(rows, left, reasons, strict=True)):
            new = slice(int(slots.host_join_ages[row]) + 1, int(slots.host_ages[row]) + 1)
            member.token_ids += tokens[k][new]
            member.log_probs += log_probs[k][new]
            member.finish_reason = reason
            member.record_routes(slots.routes[row, : int(slots.host_ages[row])])
        gone = set(rows)
        num_left = len(self._running_samples) - len(rows)
        sources = [row for row in range(num_left, len(self._running_samples)) if row not in gone]
        targets = [row for row in rows if row < num_left]
        if sources:
            slots.move_rows(sources, targets, min(columns, slots.num_columns))
            for source, target in zip(sources, targets, strict=True):
                self._running_samples[target] = self._running_samples[source]
        del self._running_samples[num_left:]
        self._rebuild_row_sampling()
        return left
