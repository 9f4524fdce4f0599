"""The trainer backend on FSDP2: any causal language model of transformers, its parameters cut over all ranks.

Documents are packed, or have rows of their own where they would see each other. That they do not, and that the head's
kernel gives what the model's own head gives, is measured when a model is made.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp, all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from rlhf_megatron.checkpoint.adapter import read_adapter
from rlhf_megatron.checkpoint.dist_checkpoint import StagedState, load_tensors, stage_tensors
from rlhf_megatron.checkpoint.source import WeightSource
from rlhf_megatron.config.schema import FSDPConfig, KernelsConfig, LoRAConfig, OptimConfig
from rlhf_megatron.kernels.log_prob import HeadOutputs
from rlhf_megatron.kernels.other_tokens import capped
from rlhf_megatron.models.causal_lm import build_causal_lm, causal_lm_table
from rlhf_megatron.models.families.base import HFConfig, require_int
from rlhf_megatron.models.lora import DOWN, UP, adapt, first_matrix, is_adapter, merged, scale_of, stem_of
from rlhf_megatron.models.table import Head, Rule, piece
from rlhf_megatron.parallel.layout import Coordinates, Layout
from rlhf_megatron.parallel.world import World
from rlhf_megatron.workers.backend import Head as RowHead
from rlhf_megatron.workers.backend import RowsFunction
from rlhf_megatron.workers.findings import HeadReport, ReplicaReport
from rlhf_megatron.workers.fsdp_optimizer import ShardedOptimizer
from rlhf_megatron.workers.log_prob_head import LogProbHead
from rlhf_megatron.workers.nonfinite import bad_tensors
from rlhf_megatron.workers.offload import TrainerPart
from rlhf_megatron.workers.pack import MicroBatch, Packed
from rlhf_megatron.workers.routes import Routes

LENGTHS = (7, 5)  # tokens of the documents that are packed, to see whether they see each other
BAR = {torch.float32: 1e-3, torch.bfloat16: 6e-2}  # relative errors; of a leak they are of order 1
HEAD_BAR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # the same products; a weak cap is off by 1e-4
logger = logging.getLogger(__name__)


class FSDPBackend:
    """A `TrainedBackend`; with `is_frozen` a `Backend`. A rank is a replica, and holds a piece of each parameter.

    Parameters are float32 where they learn; activations and gathered parameters have `dtype`, gradients are summed in
    float32. `lora` of a rank above 0: only its matrices learn, which begin with `seed`, and the weights keep `dtype`.

    Raises ValueError for a model that transformers cannot build, or whose packed documents leak.
    """

    def __init__(
        self,
        hf_config: HFConfig,
        weights: WeightSource,
        world: World,
        dtype: torch.dtype,
        settings: FSDPConfig,
        head: Head = "vocabulary",
        is_frozen: bool = False,
        lora: LoRAConfig | None = None,
        seed: int = 0,
    ) -> None:
        self.lora = lora if lora is not None and lora.rank and not is_frozen else None
        self.seed = seed
        self.hf_config = hf_config
        self.world = world
        self.dtype = dtype
        self.settings = settings
        self.is_frozen = is_frozen
        kind, own = hf_config.get("model_type"), dtype if is_frozen or self.lora else torch.float32
        if settings.attn_implementation == "sdpa" and hf_config.get("attn_logit_softcapping") is not None:
            raise ValueError(f"{kind}: sdpa drops attn_logit_softcapping; set actor.fsdp.attn_implementation to eager.")
        self.model = build_causal_lm(hf_config, settings.attn_implementation, head, own)
        self.table: Sequence[Rule] = causal_lm_table(self.model, hf_config, head)
        self.model.requires_grad_(not is_frozen)
        if self.lora is not None:
            adapt(self.model.decoder, self.lora)
        if settings.activation_checkpointing and not is_frozen:
            _recompute_layers(self.model.layers, str(kind))
        self._shard()
        device = torch.device("cpu") if settings.cpu_offload else world.device
        self.model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(world.device))
        self.load(weights)
        self.optimizer: ShardedOptimizer  # since `begin_phase`
        with torch.no_grad():
            self._prove_packing(str(kind))
            self.model.is_plain = head == "vocabulary" and self._is_head_unlike()

    @property
    def exporting(self) -> World:
        """The same ranks as those that hold one copy together: what a weight sync or an export gathers from."""
        world, num_ranks = self.world, self.world.layout.world_size
        layout, here = Layout(num_ranks, tp=num_ranks), Coordinates(dp=0, pp=0, tp=self.world.rank)
        return replace(world, layout=layout, coordinates=here, copy_group=world.dp_group, leader=0, is_in_pieces=True)

    @property
    def run(self) -> Callable[[Packed, RowsFunction, bool], list[Tensor]]:
        return self._run

    has_router_terms = False
    routes: Routes | None = None

    @property
    def train(self) -> Callable[[Packed, RowsFunction], list[Tensor]]:
        return partial(self._run, forward_only=False)

    def begin_pass(self, packed: Packed) -> None:
        self.optimizer.zero_grad()

    def end_pass(self) -> dict[str, float]:
        return {}

    def after_step(self) -> None:
        """Do nothing: nothing moves beside the optimizer."""

    def _run(self, packed: Packed, on_rows: RowsFunction, forward_only: bool) -> list[Tensor]:
        collected = []
        for micro in packed.micro_batches:  # as many on every rank: `data.plan` fills up with no-op samples
            lengths: dict[str, Any] = {}
            if self.settings.attn_implementation.startswith("flash"):  # else each layer waits for the device
                lengths = {f"cu_seq_lens_{side}": micro.cu_seqlens for side in "qk"}
                lengths |= {f"max_length_{side}": micro.max_seqlen for side in "qk"}

            def with_hidden(hidden: Tensor, micro: MicroBatch = micro) -> Any:
                return on_rows(micro, hidden)

            value, _, kept = self.model(micro.token_ids, micro.position_ids, with_hidden, micro.rows, **lengths)
            if not forward_only:
                value.backward()
            collected.append(kept)
        if forward_only:
            self._reshard()
        return collected

    def make_head(self, role: str, chunk_size: int, kernels: KernelsConfig) -> RowHead:
        if self.model.is_plain:
            return PlainHead(role, self.world)
        vocab_size = require_int(self.hf_config, "vocab_size")
        return LogProbHead(
            role,
            lambda: self.model.head.weight,
            0,
            vocab_size,
            self.world,
            self.dtype,
            chunk_size,
            kernels,
            self.model.softcap,
        )

    def values(self, hidden_SH: Tensor, rows_R: Tensor) -> Tensor:
        return self.model.values(hidden_SH, rows_R)

    @property
    def watched(self) -> Sequence[nn.Module]:
        return [self.model]

    def tensors(self, part: TrainerPart) -> Iterable[Tensor]:
        if part == "optimizer":
            return self.optimizer.state_tensors()
        return (self.named_weights() if part == "parameters" else self.named_gradients()).values()

    def begin_phase(self, optim: OptimConfig, num_steps: int, is_model_kept: bool = False) -> None:
        named: dict[str, Any] = self.model.tensors()
        parameters = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
        self.optimizer = ShardedOptimizer(parameters, optim, num_steps, self.world)

    def sync(self) -> None:
        """Shards are always as the last step left them."""

    def export(self) -> Iterator[tuple[Rule, Tensor | None]]:
        held, named = self.named_weights(), dict[str, Any](self.model.tensors())
        with torch.no_grad():  # of each pair of matrices the first is wanted whole, of the second the weight's rows
            downs = {name: named[name].full_tensor() for name in held if name.endswith(DOWN)}

        def full(rule: Rule) -> Tensor:
            own = held[rule.megatron_name].detach()  # copied only where it is kept in host memory
            stem = stem_of(rule.megatron_name)
            if self.lora is not None and stem + DOWN in downs:
                own = merged(own, downs[stem + DOWN].to(own.device), held[stem + UP].detach(), scale_of(self.lora))
            return own.to(self.world.device)

        return ((rule, full(rule)) for rule in self.table)

    @torch.no_grad()
    def load(self, source: WeightSource) -> None:
        held, (rank, num_ranks) = self.named_weights(), (self.world.rank, self.world.layout.world_size)
        for rule in self.table:
            full = rule.to_megatron(*source.hf_tensors(rule))
            target = held[rule.megatron_name]
            target.copy_(full[piece(len(full), rank, num_ranks)] if rule.split == "pieces" else full)
        shapes = {name: tensor.shape for name, tensor in self.model.tensors().items() if is_adapter(name)}
        lora = self.lora
        given = read_adapter(Path(lora.path), lora, shapes) if lora is not None and lora.path is not None else {}
        for name, shape in shapes.items():
            matrix = given[name] if given else first_matrix(name, shape, self.seed)
            held[name].copy_(matrix[piece(len(matrix), rank, num_ranks)])

    @torch.no_grad()
    def copy_from(self, other: FSDPBackend) -> None:
        held = self.named_weights()
        for rule, tensor in other.export():
            assert tensor is not None, "every rank has a piece of every tensor"
            held[rule.megatron_name].copy_(tensor)

    def named_parameters(self) -> Mapping[str, Tensor]:
        return {name: local(tensor) for name, tensor in self.model.tensors().items() if tensor.requires_grad}

    def named_gradients(self) -> Mapping[str, Tensor]:
        return self.optimizer.gradients()

    def named_weights(self) -> Mapping[str, Tensor]:
        return {name: local(tensor) for name, tensor in self.model.tensors().items()}

    def check_replicas(self) -> ReplicaReport:
        """Look for numbers that are not finite. No tensor is on two ranks, so there is nothing to compare."""
        return ReplicaReport(str(self.world), 0, 0, 0.0, (), bad_tensors(self.named_weights()))

    def num_save_bytes(self) -> int:
        learning = self.named_parameters().values()
        return sum(tensor.nbytes for tensor in (*self.named_weights().values(), *learning, *learning))

    def stage(self, plain: dict[str, Any] | None) -> StagedState:
        if plain is None:
            return stage_tensors(self.model.tensors(), {})
        scheduler = self.optimizer.scheduler.state_dict()
        return stage_tensors({**self.model.tensors(), **self.optimizer.state()}, {**plain, "scheduler": scheduler})

    @torch.no_grad()
    def restore(self, directory: Path, plain: dict[str, Any] | None) -> None:
        moments = {} if plain is None else self.optimizer.state()
        load_tensors(directory, {**{k: t.detach() for k, t in self.model.tensors().items()}, **moments})
        if plain is not None:
            self.optimizer.load_scheduler(plain["scheduler"])

    def _shard(self) -> None:
        is_on_cpu, dtype = self.world.device.type == "cpu", self.dtype
        policy: dict[str, Any] = {
            "mesh": DeviceMesh.from_group(self.world.dp_group, self.world.device.type),
            "reshard_after_forward": self.settings.reshard_after_forward,
            "offload_policy": CPUOffloadPolicy(pin_memory=not is_on_cpu)
            if self.settings.cpu_offload
            else OffloadPolicy(),
        }
        if dtype != torch.float32:
            policy["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in self.model.layers:
            fully_shard(layer, **policy)
        fully_shard(self.model, **policy)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):  # losses arrive divided by a global count: gradients are only summed
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no multiplied sum

    def _reshard(self) -> None:
        """Let go of what stays whole without a backward pass: embedding and head, and layers that are kept."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _hidden(self, *documents: Tensor) -> list[Tensor]:
        """Return the model's hidden states of packed documents, apart again, float32."""
        tokens = torch.cat(documents)[None].to(self.world.device)
        positions = torch.cat([torch.arange(len(document)) for document in documents])[None].to(self.world.device)
        rows = torch.arange(tokens.shape[1], device=self.world.device)
        found: Tensor = self.model(tokens, positions, lambda hidden: hidden[0].float().clone(), rows)
        self._reshard()
        return list(found.split([len(document) for document in documents]))

    def _prove_packing(self, kind: str) -> None:
        """Give each document a row of its own where it would depend on the one before it. Raises ValueError where it
        does even so. All ranks see the same tokens."""
        error = self._leak()
        if error <= BAR.get(self.dtype, 1e-3):
            return
        self.model.agree = self._largest
        if self.world.rank == 0:
            logger.warning(
                "%s with attn_implementation %r lets packed documents see each other (one changes by %.1e with the one"
                " before it): each has a row of its own in padded batches, which takes more memory and time",
                *(kind, self.settings.attn_implementation, error),
            )
        if not (error := self._leak()) <= BAR.get(self.dtype, 1e-3):
            raise ValueError(
                f"{kind} with attn_implementation {self.settings.attn_implementation!r} lets documents of a batch see"
                f" each other: one changes by {error:.1e} with the others. Use another"
                " actor.fsdp.attn_implementation, or actor.backend megatron where it has the family."
            )

    def _largest(self, number: int) -> int:
        """Return the largest of the numbers of all ranks."""
        largest = torch.tensor([number], device=self.world.device)
        all_reduce(largest, ReduceOp.MAX, group=self.world.dp_group)
        return int(largest.item())

    def _leak(self) -> float:
        """Return by how much a document depends on the one before it, relative."""
        vocab_size, generator = require_int(self.hf_config, "vocab_size"), torch.Generator().manual_seed(0)
        first, other, second = (
            torch.randint(0, vocab_size, (n,), generator=generator) for n in (LENGTHS[0], LENGTHS[0], LENGTHS[1])
        )
        behind, behind_other = self._hidden(first, second)[1], self._hidden(other, second)[1]
        (alone,) = self._hidden(second)
        errors = _distance(behind, alone), _distance(behind, behind_other)
        return max(errors) if all(map(math.isfinite, errors)) else math.inf

    def _is_head_unlike(self) -> bool:
        """Whether the head has more than a weight (a bias, which must learn), or hidden states times the weight,
        capped, are not the model's logits, at nine tokens."""
        tokens = torch.arange(9) % require_int(self.hf_config, "vocab_size")
        positions, rows = torch.arange(9)[None].to(self.world.device), torch.arange(9, device=self.world.device)
        tokens = tokens[None].to(self.world.device)

        def product(hidden: Tensor) -> Tensor:
            weight: Tensor = self.model.head.weight
            return capped((hidden[0] @ weight.T).float(), self.model.softcap)

        mine: Tensor = self.model(tokens, positions, product, rows)
        self.model.is_plain = True
        real: Tensor = self.model(tokens, positions, lambda logits: logits[0].float().clone(), rows)
        self.model.is_plain = False
        self._reshard()
        error = _distance(mine, real)
        has_more = len(list(self.model.head.parameters())) > 1
        is_unlike = has_more or not error <= HEAD_BAR.get(self.dtype, 1e-5)
        if is_unlike and self.world.rank == 0:
            logger.warning(
                "the head of %s is more than a product with its weight (%s): all logits of the rows are made",
                self.hf_config.get("model_type"),
                "it has a bias" if has_more else f"off by {error:.1e}",
            )
        return is_unlike


class PlainHead:
    """A `backend.Head` for models whose logits are more than a product: they come from the model's own head."""

    def __init__(self, role: str, world: World) -> None:
        self._report = HeadReport(f"{role} {world}", "plain (the model's own head, all logits)", "reference", 0, ())

    def outputs(
        self, hidden_SH: Tensor, micro: MicroBatch, temperature: float, with_entropy: bool, with_sum_squares: bool
    ) -> HeadOutputs:
        """`hidden_SH`: logits [R, V] of the rows."""
        log_p_RV = (hidden_SH.float() / temperature).log_softmax(-1)
        return HeadOutputs(
            log_p_RV.gather(1, micro.targets[:, None])[:, 0],
            -(log_p_RV.exp() * log_p_RV).sum(-1) if with_entropy else None,
            log_p_RV.detach().exp().square().sum(-1) if with_sum_squares else None,
        )

    def log_probs_at(
        self, hidden_SH: Tensor, micro: MicroBatch, temperature: float, log_probs_R: Tensor, ids_RK: Tensor
    ) -> Tensor:
        return (hidden_SH.float() / temperature).log_softmax(-1).gather(1, ids_RK.long())

    @torch.no_grad()
    def top(self, hidden_SH: Tensor, micro: MicroBatch, temperature: float, count: int) -> tuple[Tensor, Tensor]:
        return _top(hidden_SH, temperature, count)

    def report(self) -> HeadReport:
        return self._report


def _top(logits_RV: Tensor, temperature: float, count: int) -> tuple[Tensor, Tensor]:
    log_probs_RK, ids_RK = (logits_RV.float() / temperature).log_softmax(-1).topk(count, -1)
    return ids_RK, log_probs_RK


def local(tensor: Any) -> Tensor:
    """This rank's piece of a DTensor; another tensor as it is. The memory is the tensor's own."""
    held: Tensor = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
    return held


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def _recompute_layers(layers: Sequence[nn.Module], kind: str) -> None:
    """Keep only the inputs of each layer. The layer alone is told that it trains: what is in it has no dropout.
    Raises ValueError where transformers' layers cannot."""
    if not layers or not all(hasattr(layer, "gradient_checkpointing") for layer in layers):
        raise ValueError(f"{kind}: its layers are not recomputed; set actor.fsdp.activation_checkpointing to false.")
    for layer in layers:
        marked: Any = layer
        marked.gradient_checkpointing = marked.training = True
        marked._gradient_checkpointing_func = _checkpoint


def _checkpoint(function: Any, *args: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
