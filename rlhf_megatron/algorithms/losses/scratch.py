"""Memory that a loss with an explicit gradient writes into, block of rows after block of rows."""

# T tokens of a block

from __future__ import annotations

from rlhf_megatron.lazy import Tensor


class Scratch:
    """[T] tensors of `like`'s type and device, made once and handed out again for every block of up to `length`."""

    def __init__(self, like: Tensor, length: int) -> None:
        self._like = like
        self.length = length
        self._num_tokens = length
        self._buffers: list[Tensor] = []
        self._num_taken = 0

    def start(self, num_tokens: int) -> None:
        """A new block begins: whatever was taken before may be overwritten."""
        assert num_tokens <= self.length, f"a block of {num_tokens} tokens, in scratch memory for {self.length}"
        self._num_tokens = num_tokens
        self._num_taken = 0

    def take(self) -> Tensor:
        """[T], not yet taken in this block. What stands in it is left over from another one."""
        if self._num_taken == len(self._buffers):
            self._buffers.append(self._like.new_empty(self.length))
        buffer = self._buffers[self._num_taken]
        self._num_taken += 1
        return buffer if self._num_tokens == self.length else buffer[: self._num_tokens]
