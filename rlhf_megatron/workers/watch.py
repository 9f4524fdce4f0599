"""Finds the first tensor of a forward and backward pass that is not finite. Waits for the device at every module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from rlhf_megatron.checkpoint.load_model import global_name, unwrap


class Watch:
    """Context manager: while it is on, `first` becomes the name of the first tensor that was not finite, "" till then.

    Modules are seen when they return, the inner ones first, and the gradients of what they returned when these are
    known: in the order of the pass, over all micro-batches.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.first = ""
        self._chunks = chunks
        self._hooks: list[Any] = []

    def __enter__(self) -> Watch:
        for chunk in self._chunks:
            model = unwrap(chunk)
            for name, module in model.named_modules():
                hook = self._on_output(global_name(model, name) if name else "the model")
                self._hooks.append(module.register_forward_hook(hook))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def see(self, tensor: Tensor, name: str) -> None:
        """`tensor` is next in the order of the pass."""
        if not self.first and not bool(tensor.detach().isfinite().all()):
            self.first = name

    def _on_output(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
            for output in _floating(outputs):
                self.see(output, f"output of {name}")
                if output.requires_grad:
                    output.register_hook(lambda grad: self.see(grad, f"gradient of the output of {name}"))

        return hook


def _floating(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _floating(item)
