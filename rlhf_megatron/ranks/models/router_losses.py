"""Loss terms of routers beside the policy's loss: load-balancing and z loss, and a bias that evens
loads out.

megatron-core computes these terms micro-batch by micro-batch and takes the mean, so that they
depend on how a mini-batch was packed, and counts tokens that only fill a micro-batch. Here both
terms are those of the mini-batch:
divided by its tokens or documents over all replicas, of tokens that belong to a sample.

Legend: T tokens of this rank, E experts, D documents of the micro-batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.ranks.parallel.world import World


@dataclass(frozen=True)
class DocumentTokens:
    """The tokens of a micro-batch that a rank routes."""

    documents_T: Tensor  # the document of each token, -1 where it belongs to none
    num_documents: int  # D


@dataclass
class RouterLossTerms:
    """The settings of the loss terms, the counts of the mini-batch that is trained, and this rank's
    routers.

    For each pass call `begin_pass`, then `enter_forward_pass` before every chunk's forward pass,
    then `finish_pass`.
    """

    world: World
    load_balancing_type: str  # moe_router_load_balancing_type
    aux_coeff: float
    z_coeff: float
    bias_update_rate: float
    num_layers: int  # with experts, of the whole model
    routers: tuple[LossTermsRouter, ...] = ()  # of this rank
    num_tokens: int = 0  # of the mini-batch, over all replicas
    num_documents: int = 0
    # a pass before the one that trains, for the loads of a global load-balancing loss
    is_counting: bool = False
    current_tokens: DocumentTokens | None = None
    # this rank's load-balancing and z loss
    term_sums: Tensor = field(default_factory=lambda: torch.zeros(2))

    @property
    def needs_counting_pass(self) -> bool:
        """Return whether a forward pass that only counts each expert's tokens over the mini-batch
        must run before the pass that trains, as the global load-balancing loss requires.
        """
        return self.load_balancing_type == "global_aux_loss"

    def begin_pass(self, num_tokens: int, num_documents: int, is_counting: bool = False) -> None:
        """Start a pass over this replica's tokens and documents: sum both counts over the replicas,
        and reset the sums of the terms and each router's loads and pending tokens. All ranks must
        call it.
        """
        device = self.world.device
        totals = torch.tensor([num_tokens, num_documents], dtype=torch.int64, device=device)
        dist.all_reduce(totals, group=self.world.dp_group)
        self.num_tokens, self.num_documents = totals.tolist()
        self.is_counting = is_counting
        self.term_sums = torch.zeros(2, device=device)
        for router in self.routers:
            router.pending_tokens.clear()
            router.loads_E = torch.zeros(router.num_experts, device=device)

    def enter_forward_pass(self, tokens: DocumentTokens | None) -> None:
        """Set the tokens that the next forward pass routes, cut to this rank's share under sequence
        parallelism; `tokens` is None outside of training.
        """
        self.current_tokens = None
        if tokens is not None:
            share = tokens.documents_T
            if self.world.layout.sequence_parallel:
                share = share.chunk(self.world.layout.tp)[self.world.coordinates.tp]
            self.current_tokens = DocumentTokens(share, tokens.num_documents)

    def finish_pass(self) -> dict[str, float]:
        """End a pass: sum each router's loads over the whole mini-batch, and return this replica's
        share of each term that is on (load_balancing_loss, z_loss), a mean over the layers. A
        counting pass stores the loads as the routers' `mini_batch_loads_E` and returns {}. All
        ranks must call it.
        """
        self.current_tokens = None
        if self.routers:
            loads = torch.stack([router.loads_E for router in self.routers])
            dist.all_reduce(loads, group=self.routers[0].tp_dp_cp_group)
            for router, loads_E in zip(self.routers, loads, strict=True):
                router.loads_E = loads_E
        if self.is_counting:
            for router in self.routers:
                router.mini_batch_loads_E = router.loads_E
            return {}
        for group in (self.world.model_parallel_group, self.world.cp_group):
            dist.all_reduce(self.term_sums, group=group)
        means = zip(
            ("load_balancing_loss", "z_loss"),
            (self.term_sums / self.num_layers).tolist(),
            strict=True,
        )
        is_on = {"load_balancing_loss": self.aux_coeff, "z_loss": self.z_coeff}
        return {name: mean for name, mean in means if is_on[name]}

    def update_expert_biases(self) -> None:
        """Move each expert's bias after an optimizer step: lower the bias by the rate where the
        expert received more tokens of the mini-batch than the mean expert, and raise the bias where
        the expert received fewer (2408.15664). Do nothing at rate 0.
        """
        if self.bias_update_rate > 0:
            for router in self.routers:
                router.expert_bias.add_(
                    self.bias_update_rate * torch.sign(router.loads_E.mean() - router.loads_E)
                )


class LossTermsRouter(TopKRouter):
    """megatron's router with the terms of RouterLossTerms. A module becomes one by a change of its
    class.
    """

    loss_terms: RouterLossTerms
    # of micro-batches that are to be computed again in the backward pass
    pending_tokens: deque[DocumentTokens]
    loads_E: Tensor  # tokens that met each expert
    mini_batch_loads_E: Tensor | None  # of the whole mini-batch, by the pass that counted

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        """Route the logits [s, b, E] and return (probabilities, routing map), as megatron does.

        In a training pass, also count each expert's tokens in `loads_E`, and add the gradients of
        the loss terms to the gradient of the logits; a counting pass counts tokens only. Outside of
        training, only route.
        """
        tokens = self._take_tokens_of_pass()
        if tokens is None:
            return super().routing(logits, padding_mask)
        flat_TE = logits.view(-1, self.num_experts)
        is_real_T = tokens.documents_T >= 0
        if not self.loss_terms.is_counting:
            flat_TE = MoEAuxLossAutoScaler.apply(
                flat_TE, self._compute_weighted_losses(flat_TE, tokens, is_real_T)
            )
        probs, routing_map = super().routing(flat_TE.view_as(logits), padding_mask)
        met_TE = (
            self._compute_routing_scores(flat_TE)[0] if self.loss_terms.is_counting else routing_map
        )
        self.loads_E = self.loads_E + (met_TE.bool() & is_real_T[:, None]).sum(0)
        return probs, routing_map

    def _take_tokens_of_pass(self) -> DocumentTokens | None:
        """Return the tokens that this call routes, or None where the call must only route. A
        recomputed forward pass in the backward pass takes the tokens that were queued in the first
        forward pass without grad, because other micro-batches have been entered since.
        """
        if self.loss_terms.is_counting:
            return self.loss_terms.current_tokens
        if torch.is_grad_enabled():
            return (
                self.pending_tokens.popleft()
                if self.pending_tokens
                else self.loss_terms.current_tokens
            )
        if self.loss_terms.current_tokens is not None:
            self.pending_tokens.append(self.loss_terms.current_tokens)
        return None

    def _compute_routing_scores(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return (met, scores), both [T, E]: met is 1.0 where the token would reach the expert by
        the scores alone, without a bias or groups; scores are the routing scores.
        """
        met_TE, scores_TE = compute_routing_scores_for_aux_loss(
            logits_TE, self.topk, self.score_function
        )
        return met_TE.float(), scores_TE

    def _compute_weighted_losses(
        self, logits_TE: Tensor, tokens: DocumentTokens, is_real_T: Tensor
    ) -> Tensor:
        """Return this rank's share of coefficient x term, summed over both terms, and add the bare
        terms to `loss_terms.term_sums`.
        """
        terms = self.loss_terms
        total = logits_TE.new_zeros(())
        if terms.z_coeff:
            squares_T = torch.logsumexp(logits_TE.float(), -1).square()
            z_loss = (squares_T * is_real_T).sum() / terms.num_tokens
            terms.term_sums[1] += z_loss.detach()
            total = total + terms.z_coeff * z_loss
        if terms.aux_coeff:
            met_TE, scores_TE = self._compute_routing_scores(logits_TE)
            weights_TE = self._compute_score_weights(met_TE.detach() * is_real_T[:, None], tokens)
            aux_loss = (scores_TE * weights_TE * is_real_T[:, None]).sum()
            terms.term_sums[0] += aux_loss.detach()
            total = total + terms.aux_coeff * aux_loss
        return total

    def _compute_score_weights(self, met_TE: Tensor, tokens: DocumentTokens) -> Tensor:
        """Return the weight of each score of a token: E x the expert's share of the picks / tokens,
        over the token's document, or over the mini-batch for the global loss. Over perfectly even
        loads the weighted sum is 1 (Switch Transformer, 2101.03961, equation 4).
        """
        terms = self.loss_terms
        scale = self.num_experts / self.topk
        if terms.needs_counting_pass:
            assert self.mini_batch_loads_E is not None, (
                "the loads of the mini-batch were not counted"
            )
            return scale * self.mini_batch_loads_E[None] / terms.num_tokens**2
        index_T = tokens.documents_T.clamp(min=0)
        loads_DE = met_TE.new_zeros((tokens.num_documents, self.num_experts)).index_add_(
            0, index_T, met_TE
        )
        if self.tp_cp_group.size() > 1:  # other ranks have other tokens of the same documents
            dist.all_reduce(loads_DE, group=self.tp_cp_group)
        lengths_D = loads_DE.sum(1, keepdim=True) / self.topk
        weights_DE = scale * loads_DE / lengths_D.clamp(min=1).square() / terms.num_documents
        return weights_DE[index_T]


def make_router_loss_terms(
    chunks: Sequence[nn.Module], megatron: MegatronConfig, config: Any, world: World
) -> RouterLossTerms | None:
    """Return the RouterLossTerms of a model's unwrapped chunks, and turn their routers into
    `LossTermsRouter`s. Return None, and change nothing, where no term and no bias update is on.

    Raise ValueError for a bias update rate where the model's routers have no bias.
    """
    kind = megatron.moe_router_load_balancing_type
    z_coeff = megatron.moe_z_loss_coeff or 0.0
    aux_coeff = megatron.moe_aux_loss_coeff
    rate = megatron.moe_router_bias_update_rate
    if not (aux_coeff or z_coeff or rate):
        return None
    terms = RouterLossTerms(world, kind, aux_coeff, z_coeff, rate, sum(config.moe_layer_freq))
    routers: list[Any] = [
        module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)
    ]
    if rate and any(router.expert_bias is None for router in routers):
        raise ValueError(
            f"moe_router_bias_update_rate ({rate}) is of routers that pick by a bias; remove it."
        )
    for router in routers:
        router.__class__ = LossTermsRouter  # what megatron set on it and on its weight stays
        router.loss_terms = terms
        router.pending_tokens = deque()
        router.mini_batch_loads_E = None
    terms.routers = tuple(routers)
    return terms
