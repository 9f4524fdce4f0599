"""Orders of packed documents' tokens: by length, and shared out to context-parallel ranks. Pure
index arithmetic.

Zigzag: each document is cut into 2 cp chunks of one size. Rank r has the chunks r and 2 cp - 1 - r
of every document, documents in order: so every rank has an early and a late part of each, and as
much causal attention to compute as any other. Joining the shares in rank order gives all tokens,
but not in document order; the tables say where they are.

    borders [0, 8, 12], cp 2: rank 0 has tokens 0 1 6 7 | 8 11, rank 1 has tokens 2 3 4 5 | 9 10

Legend: D documents, T tokens of all ranks, share = T / cp tokens of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class DocumentRun:
    """Consecutive documents of one length."""

    start: int  # first token
    stop: int  # after the last token
    length: int  # tokens of each document
    prompt_run: DocumentRun | None = None  # where the shared prompts of these documents are
    # [documents] which document of that run is the prompt of each
    prompt_indices: Tensor | None = None

    def multiply_parts(self, num_parts: int) -> DocumentRun:
        """Return the run of the whole documents, where this run holds one of `num_parts` equal
        parts of each document.
        """
        return DocumentRun(self.start * num_parts, self.stop * num_parts, self.length * num_parts)


@dataclass(frozen=True)
class TokenOrder:
    """A permutation of tokens."""

    tokens: Tensor  # [n] the token at each place
    inverse: Tensor  # [n] the place of each token: undoes it

    @staticmethod
    def from_tokens(tokens: Tensor, device: torch.device) -> TokenOrder:
        """Return the order that puts these tokens at their places, and its inverse."""
        tokens = tokens.to(device)
        return TokenOrder(tokens, tokens.argsort())


@dataclass(frozen=True)
class LengthGroups:
    """The runs and orders that bring a rank's tokens, and the keys that it gathered, together by
    the length of their documents.
    """

    # of this rank's parts of documents, once `query_order` is applied
    document_runs: tuple[DocumentRun, ...]
    query_order: TokenOrder | None  # [share]; None: equal lengths lie together already
    # [T] of the gathered keys, to whole documents; None: they lie so already
    key_order: TokenOrder | None


def group_documents_by_length(
    borders: Tensor, cp: int = 1, prompt_documents: Tensor | None = None
) -> LengthGroups:
    """Return runs of documents of equal length, and the orders of queries and keys that bring them
    together, on the device of `borders`. `borders` [D + 1] are those of whole documents; under cp
    each document is a multiple of 2 cp tokens long.

    `prompt_documents` [D] names the document that each document continues, -1 for none; then the
    documents of a run also have prompts of one length.
    """
    host = borders.to(device="cpu", dtype=torch.int64)
    lengths = host.diff()
    assert cp == 1 or not (lengths % (2 * cp)).any(), (
        f"document lengths {lengths.tolist()} at cp {cp}"
    )
    if prompt_documents is not None:
        return _group_documents_with_prompts(lengths, prompt_documents.cpu(), borders.device)
    by_length = None
    if len(_find_equal_length_runs(lengths)) != lengths.unique().numel():
        by_length = lengths.argsort(stable=True)
    runs = _find_equal_length_runs((lengths if by_length is None else lengths[by_length]) // cp)
    queries = (
        None
        if by_length is None
        else TokenOrder.from_tokens(
            _order_document_tokens(lengths // cp, by_length), borders.device
        )
    )
    if cp == 1:
        return LengthGroups(runs, queries, queries)
    keys = order_gathered_tokens(host, int(host[-1]), cp).argsort()
    if by_length is not None:
        keys = keys[_order_document_tokens(lengths, by_length)]
    return LengthGroups(runs, queries, TokenOrder.from_tokens(keys, borders.device))


def _group_documents_with_prompts(
    lengths: Tensor, prompt_documents: Tensor, device: torch.device
) -> LengthGroups:
    """Return the groups of documents by their own length and the length of their prompt."""
    is_behind = prompt_documents >= 0
    base = int(lengths.max()) + 1
    # both lengths in one number
    kinds = lengths + base * lengths[prompt_documents.clamp(min=0)].where(is_behind, 0)
    order = kinds.argsort(stable=True)
    places = order.argsort()  # of each document, once they are in that order
    is_in_order = bool((order.diff() > 0).all())
    tokens = (
        None
        if is_in_order
        else TokenOrder.from_tokens(_order_document_tokens(lengths, order), device)
    )
    runs: dict[int, DocumentRun] = {}
    start = first = 0  # token and document
    firsts: dict[int, int] = {}  # of each run, the first document
    values, counts = kinds[order].unique_consecutive(return_counts=True)
    for kind, count in zip(values.tolist(), counts.tolist(), strict=True):
        length = kind % base
        before = kind // base
        run = DocumentRun(start, start + length * count, length)
        if before:
            own = prompt_documents[order[first : first + count]]
            run = replace(
                run,
                prompt_run=runs[before],
                prompt_indices=(places[own] - firsts[before]).to(device),
            )
        runs[kind] = run
        firsts[kind] = first
        start = run.stop
        first = first + count
    return LengthGroups(tuple(run for run in runs.values() if run.length), tokens, tokens)


def locate_prompt_keys(
    borders: Tensor, prompt_documents: Tensor, num_keys: int
) -> tuple[Tensor, Tensor]:
    """Return (the borders [D + 1] int32 of the documents' key sequences, each the document's prompt
    followed by the document itself; the token of each key [num_keys]). `prompt_documents` [D] holds
    the document that each document continues, -1 for none.
    """
    lengths = borders.diff().long()
    starts = borders[:-1].long()
    before = lengths[prompt_documents.clamp(min=0)].where(prompt_documents >= 0, 0)
    key_borders = _compute_borders(before + lengths)
    document = torch.repeat_interleave(before + lengths, output_size=num_keys)
    place = torch.arange(num_keys, device=borders.device) - key_borders[document]
    own = starts[document] + place - before[document]
    of_prompt = starts[prompt_documents.clamp(min=0)][document] + place
    return key_borders.int(), of_prompt.where(place < before[document], own)


def order_gathered_tokens(borders: Tensor, num_tokens: int, cp: int) -> Tensor:
    """Return [T]: the token (in document order) at each place, once the ranks' shares are joined in
    rank order; `[cp, share]` is a view of it.

    `borders` [D + 1] are integers from 0 to `num_tokens`, and every length is a multiple of 2 cp.
    """
    lengths = borders.diff().long()
    starts = torch.repeat_interleave(borders[:-1].long(), lengths, output_size=num_tokens)
    chunk_sizes = torch.repeat_interleave(lengths // (2 * cp), lengths, output_size=num_tokens)
    chunks = (torch.arange(num_tokens, device=borders.device) - starts) // chunk_sizes
    ranks = torch.minimum(chunks, 2 * cp - 1 - chunks)
    return ranks.argsort(stable=True)


def locate_prefix_keys(
    borders: Tensor, num_tokens: int, cp: int, cp_rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys that a rank's chunks attend to, for attention over pairs of one query and one
    key sequence: (the borders of the query sequences [2 D + 1] int32, the borders of the key
    sequences [2 D + 1] int32, the place of each key among the gathered keys [T (2 cp + 1) / (2
    cp)]).

    The rank's share is 2 D query sequences as it stands: each document's chunk `cp_rank`, then its
    chunk 2 cp - 1 - `cp_rank`. The keys of a chunk are the document up to the chunk's end, so that
    its last query sees its last key.
    """
    chunk_sizes = (borders.diff().long() // (2 * cp)).repeat_interleave(2)
    # Where a document's two chunks end, rank + 1 and 2 cp - rank; a tensor of host numbers would
    # wait for the device.
    is_second = torch.arange(chunk_sizes.numel(), device=borders.device) % 2
    key_lengths = chunk_sizes * (cp_rank + 1 + is_second * (2 * (cp - cp_rank) - 1))
    query_borders = _compute_borders(chunk_sizes)
    key_borders = _compute_borders(key_lengths)
    num_keys = num_tokens * (2 * cp + 1) // (2 * cp)
    shifts = borders[:-1].long().repeat_interleave(2) - key_borders[:-1]
    tokens = torch.arange(num_keys, device=borders.device)
    tokens += torch.repeat_interleave(shifts, key_lengths, output_size=num_keys)
    places = order_gathered_tokens(borders, num_tokens, cp).argsort()
    return query_borders.int(), key_borders.int(), places.index_select(0, tokens)


def compute_chunk_positions(length: int, cp: int, cp_rank: int) -> Tensor:
    """Return the positions [length / cp] of the tokens that `cp_rank` holds of a document of
    `length` tokens.
    """
    size = length // (2 * cp)
    first = torch.arange(size)
    return torch.cat([first + cp_rank * size, first + (2 * cp - 1 - cp_rank) * size])


def _compute_borders(lengths: Tensor) -> Tensor:
    """Return [n + 1]: the sums of the lengths before each document, from 0."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _find_equal_length_runs(lengths: Tensor) -> tuple[DocumentRun, ...]:
    """Return the maximal runs of consecutive documents of equal length; documents without tokens
    are left out.
    """
    values, counts = lengths.unique_consecutive(return_counts=True)
    runs = []
    start = 0
    for length, count in zip(values.tolist(), counts.tolist(), strict=True):
        if length:
            runs.append(DocumentRun(start, start + length * count, length))
        start += length * count
    return tuple(runs)


def _order_document_tokens(lengths: Tensor, document_order: Tensor) -> Tensor:
    """Return the token at each place once the documents are put in `document_order`."""
    sizes = lengths[document_order]
    shifts = _compute_borders(lengths)[document_order] - _compute_borders(sizes)[:-1]
    return torch.repeat_interleave(shifts, sizes) + torch.arange(int(sizes.sum()))
