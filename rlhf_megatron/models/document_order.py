"""Orders of packed documents' tokens: by length, and shared out to context-parallel ranks. Pure index arithmetic.

Zigzag: each document is cut into 2 cp chunks of one size. Rank r has the chunks r and 2 cp - 1 - r of every document,
documents in order: so every rank has an early and a late part of each, and as much causal attention to compute as any
other. Joining the shares in rank order gives all tokens, but not in document order; the tables say where they are.

    borders [0, 8, 12], cp 2: rank 0 has tokens 0 1 6 7 | 8 11, rank 1 has tokens 2 3 4 5 | 9 10

Legend: D documents, T tokens of all ranks, share = T / cp tokens of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """Consecutive documents of one length."""

    start: int  # first token
    stop: int  # after the last token
    length: int  # tokens of each document
    prompt: Run | None = None  # where the shared prompts of these documents are
    prompts: Tensor | None = None  # [documents] which document of that run is the prompt of each

    def times(self, parts: int) -> Run:
        """The same documents whole, where this has one of `parts` equal parts of each."""
        return Run(self.start * parts, self.stop * parts, self.length * parts)


@dataclass(frozen=True)
class Order:
    """A permutation of tokens."""

    tokens: Tensor  # [n] the token at each place
    places: Tensor  # [n] the place of each token: undoes it

    @staticmethod
    def of(tokens: Tensor, device: torch.device) -> Order:
        tokens = tokens.to(device)
        return Order(tokens, tokens.argsort())


@dataclass(frozen=True)
class ByLength:
    """Brings a rank's tokens, and the keys that it gathered, together by the length of their documents."""

    runs: tuple[Run, ...]  # of this rank's parts of documents, once `queries` is applied
    queries: Order | None  # [share]; None: equal lengths lie together already
    keys: Order | None  # [T] of the gathered keys, to whole documents; None: they lie so already


def group_by_length(borders: Tensor, cp: int = 1, prompts: Tensor | None = None) -> ByLength:
    """`borders` [D + 1] of whole documents; under cp each is a multiple of 2 cp long. The orders are on its device.

    `prompts` [D]: the document that each goes on from, -1 of none; then documents of a run have prompts of one length.
    """
    host = borders.to(device="cpu", dtype=torch.int64)
    lengths = host.diff()
    assert cp == 1 or not (lengths % (2 * cp)).any(), f"document lengths {lengths.tolist()} at cp {cp}"
    if prompts is not None:
        return _group_behind_prompts(lengths, prompts.cpu(), borders.device)
    by_length = None
    if len(_runs(lengths)) != lengths.unique().numel():
        by_length = lengths.argsort(stable=True)
    runs = _runs((lengths if by_length is None else lengths[by_length]) // cp)
    queries = None if by_length is None else Order.of(_tokens(lengths // cp, by_length), borders.device)
    if cp == 1:
        return ByLength(runs, queries, queries)
    keys = gathered_tokens(host, int(host[-1]), cp).argsort()
    if by_length is not None:
        keys = keys[_tokens(lengths, by_length)]
    return ByLength(runs, queries, Order.of(keys, borders.device))


def _group_behind_prompts(lengths: Tensor, prompts: Tensor, device: torch.device) -> ByLength:
    is_behind, base = prompts >= 0, int(lengths.max()) + 1
    kinds = lengths + base * lengths[prompts.clamp(min=0)].where(is_behind, 0)  # both lengths in one number
    order = kinds.argsort(stable=True)
    places = order.argsort()  # of each document, once they are in that order
    is_in_order = bool((order.diff() > 0).all())
    tokens = None if is_in_order else Order.of(_tokens(lengths, order), device)
    runs: dict[int, Run] = {}
    start = first = 0  # token and document
    firsts: dict[int, int] = {}  # of each run, the first document
    values, counts = kinds[order].unique_consecutive(return_counts=True)
    for kind, count in zip(values.tolist(), counts.tolist(), strict=True):
        length, before = kind % base, kind // base
        run = Run(start, start + length * count, length)
        if before:
            own = prompts[order[first : first + count]]
            run = replace(run, prompt=runs[before], prompts=(places[own] - firsts[before]).to(device))
        runs[kind], firsts[kind] = run, first
        start, first = run.stop, first + count
    return ByLength(tuple(run for run in runs.values() if run.length), tokens, tokens)


def prompt_keys(borders: Tensor, prompts: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Return what documents behind shared prompts attend to: the borders of their key sequences [D + 1] int32, each the
    document's prompt and then itself, and the place of each key among the tokens [num_keys]. `prompts` [D] as above.
    """
    lengths, starts = borders.diff().long(), borders[:-1].long()
    before = lengths[prompts.clamp(min=0)].where(prompts >= 0, 0)
    key_borders = _borders(before + lengths)
    document = torch.repeat_interleave(before + lengths, output_size=num_keys)
    place = torch.arange(num_keys, device=borders.device) - key_borders[document]
    own = starts[document] + place - before[document]
    of_prompt = starts[prompts.clamp(min=0)][document] + place
    return key_borders.int(), of_prompt.where(place < before[document], own)


def gathered_tokens(borders: Tensor, num_tokens: int, cp: int) -> Tensor:
    """[T] the token (in document order) at each place once the ranks' shares are joined in rank order.

    `borders` [D + 1] integers from 0 to `num_tokens`, every length a multiple of 2 cp. `[cp, share]` is a view of it.
    """
    lengths = borders.diff().long()
    starts = torch.repeat_interleave(borders[:-1].long(), lengths, output_size=num_tokens)
    chunk_sizes = torch.repeat_interleave(lengths // (2 * cp), lengths, output_size=num_tokens)
    chunks = (torch.arange(num_tokens, device=borders.device) - starts) // chunk_sizes
    ranks = torch.minimum(chunks, 2 * cp - 1 - chunks)
    return ranks.argsort(stable=True)


def prefix_keys(borders: Tensor, num_tokens: int, cp: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a rank's chunks attend to, for attention over pairs of one query and one key sequence.

    Its share is 2 D query sequences as it stands: each document's chunk `rank`, then its chunk 2 cp - 1 - `rank`. The
    keys of a chunk are the document up to the chunk's end, so that its last query sees its last key. Returns the
    borders of the query sequences [2 D + 1] and of the key sequences [2 D + 1], both int32, and the place of each key
    among the gathered ones [T (2 cp + 1) / (2 cp)].
    """
    chunk_sizes = (borders.diff().long() // (2 * cp)).repeat_interleave(2)
    # Where a document's two chunks end, rank + 1 and 2 cp - rank; a tensor of host numbers would wait for the device.
    is_second = torch.arange(chunk_sizes.numel(), device=borders.device) % 2
    key_lengths = chunk_sizes * (rank + 1 + is_second * (2 * (cp - rank) - 1))
    query_borders, key_borders = _borders(chunk_sizes), _borders(key_lengths)
    num_keys = num_tokens * (2 * cp + 1) // (2 * cp)
    shifts = borders[:-1].long().repeat_interleave(2) - key_borders[:-1]
    tokens = torch.arange(num_keys, device=borders.device)
    tokens += torch.repeat_interleave(shifts, key_lengths, output_size=num_keys)
    places = gathered_tokens(borders, num_tokens, cp).argsort()
    return query_borders.int(), key_borders.int(), places.index_select(0, tokens)


def chunk_positions(length: int, cp: int, rank: int) -> Tensor:
    """[length / cp] positions, in a document of `length` tokens, of the tokens that `rank` has of it."""
    size = length // (2 * cp)
    first = torch.arange(size)
    return torch.cat([first + rank * size, first + (2 * cp - 1 - rank) * size])


def _borders(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _runs(lengths: Tensor) -> tuple[Run, ...]:
    """Maximal runs of equal lengths. Documents without tokens are left out."""
    values, counts = lengths.unique_consecutive(return_counts=True)
    runs, start = [], 0
    for length, count in zip(values.tolist(), counts.tolist(), strict=True):
        if length:
            runs.append(Run(start, start + length * count, length))
        start += length * count
    return tuple(runs)


def _tokens(lengths: Tensor, order: Tensor) -> Tensor:
    """The token at each place once documents of these lengths are put in `order`."""
    sizes = lengths[order]
    shifts = _borders(lengths)[order] - _borders(sizes)[:-1]
    return torch.repeat_interleave(shifts, sizes) + torch.arange(int(sizes.sum()))
