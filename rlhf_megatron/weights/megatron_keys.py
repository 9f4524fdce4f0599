"""Keys of tensors in megatron-core's checkpoints: they follow the modules of the model
that wrote them.

A norm may be part of the matrix behind it; layers that are alike may be stacked in one tensor, and
the experts of a layer are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_megatron.weights.weight_table import FUSED_NORMS, LayerImpl, WeightRule

StackIndex = tuple[int, ...]
"""The number of the layer, the expert or both in a tensor that holds all of them; () in one
that does not.
"""

_INPUT, _MLP, _QUERY, _KEY = FUSED_NORMS


@dataclass(frozen=True)
class KeyNaming:
    """Spells the keys as the model does that shall load the directory."""

    impl: LayerImpl
    expert_layers: frozenset[int]  # layers
    has_latent_attention: bool
    num_stacked_layers: int  # 0: layers are not stacked

    @staticmethod
    def from_table(
        table: tuple[WeightRule, ...], impl: LayerImpl, use_stacked_layers: bool | None = None
    ) -> KeyNaming:
        """Return the naming of the model that `table` describes. `use_stacked_layers`: whether
        alike layers share one tensor; None: yes where either all layers or none have experts, as in
        Megatron-LM's defaults.
        """
        layers = {rule.layer for rule in table if rule.layer is not None}
        experts = frozenset(
            rule.layer for rule in table if rule.expert is not None and rule.layer is not None
        )
        stacked = (
            experts in (frozenset(), frozenset(layers))
            if use_stacked_layers is None
            else use_stacked_layers
        )
        is_latent = any(".linear_kv_down_proj." in rule.megatron_name for rule in table)
        return KeyNaming(impl, experts, is_latent, len(layers) if stacked else 0)

    def make_key_and_index(self, rule: WeightRule) -> tuple[str, StackIndex]:
        """Return the key of the stored tensor, and the index (layer, expert) of the rule's tensor
        in it.
        """
        name = rule.megatron_name
        index = StackIndex()
        for norm in self._list_fused_norms(rule.layer):
            if name.endswith(f".{norm}"):
                name = name.removesuffix(norm) + FUSED_NORMS[norm]
        if rule.expert is not None:
            name = _drop_expert_number(name, rule)
            index = (rule.expert,)
        if self.num_stacked_layers and rule.layer is not None:
            name = _drop_layer_number(name, rule)
            index = (rule.layer, *index)
        return name, index

    def get_stored_shape(self, rule: WeightRule) -> tuple[int, ...]:
        """Return the shape of the whole stored tensor that holds the rule's tensor."""
        experts = () if rule.expert is None else (rule.num_experts,)
        layers = (
            (self.num_stacked_layers,) if self.num_stacked_layers and rule.layer is not None else ()
        )
        return (*layers, *experts, *rule.megatron_shape)

    def _list_fused_norms(self, layer: int | None) -> tuple[str, ...]:
        """Return the names of the norms that this model fuses into the matrix behind them, in that
        layer.
        """
        mlp = () if layer in self.expert_layers else (_MLP,)
        if not self.has_latent_attention:
            return (_INPUT, *mlp)
        return (_QUERY, _KEY, *mlp) if self.impl == "transformer_engine" else ()


def list_possible_keys(rule: WeightRule) -> Iterator[tuple[str, StackIndex]]:
    """Yield every (key, index) under which a checkpoint may hold a rule's tensor, whatever model
    wrote it.
    """
    names = [rule.megatron_name]
    names[:0] = [
        rule.megatron_name.removesuffix(norm) + fused
        for norm, fused in FUSED_NORMS.items()
        if rule.megatron_name.endswith(f".{norm}")
    ]
    for name in names:
        forms: list[tuple[str, StackIndex]] = [(name, ())]
        if rule.expert is not None:
            forms.append((_drop_expert_number(name, rule), (rule.expert,)))
        for form, index in forms:
            yield form, index
            if rule.layer is not None:
                yield _drop_layer_number(form, rule), (rule.layer, *index)


def _drop_expert_number(name: str, rule: WeightRule) -> str:
    """Return the name of the tensor that stacks all experts of the layer."""
    return name.replace(f".experts.local_experts.{rule.expert}.", ".experts.experts.", 1)


def _drop_layer_number(name: str, rule: WeightRule) -> str:
    """Return the name of the tensor that stacks all layers."""
    return name.replace(f".layers.{rule.layer}.", ".layers.", 1)
