"""Keys of tensors in megatron-core's checkpoints: they follow the modules of the model that wrote them.

A norm may be part of the matrix behind it; layers that are alike may be stacked in one tensor, and the experts of a
layer are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_megatron.models.table import FUSED_NORMS, Impl, Rule

Index = tuple[int, ...]
"""The number of the layer, the expert or both in a tensor that holds all of them; () in one that does not."""

_INPUT, _MLP, _QUERY, _KEY = FUSED_NORMS


@dataclass(frozen=True)
class Naming:
    """Spells the keys as the model does that shall load the directory."""

    impl: Impl
    has_experts: frozenset[int]  # layers
    is_latent: bool
    num_layers: int  # 0: layers are not stacked

    @staticmethod
    def of(table: tuple[Rule, ...], impl: Impl, is_stacked: bool | None = None) -> Naming:
        """`is_stacked` None: as Megatron-LM's defaults have it, where all layers are alike."""
        layers = {rule.layer for rule in table if rule.layer is not None}
        experts = frozenset(rule.layer for rule in table if rule.expert is not None and rule.layer is not None)
        stacked = experts in (frozenset(), frozenset(layers)) if is_stacked is None else is_stacked
        is_latent = any(".linear_kv_down_proj." in rule.megatron_name for rule in table)
        return Naming(impl, experts, is_latent, len(layers) if stacked else 0)

    def key(self, rule: Rule) -> tuple[str, Index]:
        """Return the key of the stored tensor, and the place of the rule's own tensor in it."""
        name, index = rule.megatron_name, Index()
        for norm in self._fused_in(rule.layer):
            if name.endswith(f".{norm}"):
                name = name.removesuffix(norm) + FUSED_NORMS[norm]
        if rule.expert is not None:
            name, index = _of_experts(name, rule), (rule.expert,)
        if self.num_layers and rule.layer is not None:
            name, index = _of_layers(name, rule), (rule.layer, *index)
        return name, index

    def shape(self, rule: Rule) -> tuple[int, ...]:
        """Return the shape of the whole stored tensor."""
        experts = () if rule.expert is None else (rule.num_experts,)
        layers = (self.num_layers,) if self.num_layers and rule.layer is not None else ()
        return (*layers, *experts, *rule.megatron_shape)

    def _fused_in(self, layer: int | None) -> tuple[str, ...]:
        mlp = () if layer in self.has_experts else (_MLP,)
        if not self.is_latent:
            return (_INPUT, *mlp)
        return (_QUERY, _KEY, *mlp) if self.impl == "transformer_engine" else ()


def spellings(rule: Rule) -> Iterator[tuple[str, Index]]:
    """All keys under which a checkpoint may hold a tensor, as `Naming.key` gives one."""
    names = [rule.megatron_name]
    names[:0] = [
        rule.megatron_name.removesuffix(norm) + fused
        for norm, fused in FUSED_NORMS.items()
        if rule.megatron_name.endswith(f".{norm}")
    ]
    for name in names:
        forms: list[tuple[str, Index]] = [(name, ())]
        if rule.expert is not None:
            forms.append((_of_experts(name, rule), (rule.expert,)))
        for form, index in forms:
            yield form, index
            if rule.layer is not None:
                yield _of_layers(form, rule), (rule.layer, *index)


def _of_experts(name: str, rule: Rule) -> str:
    return name.replace(f".experts.local_experts.{rule.expert}.", ".experts.experts.", 1)


def _of_layers(name: str, rule: Rule) -> str:
    return name.replace(f".layers.{rule.layer}.", ".layers.", 1)
