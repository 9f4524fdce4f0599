"""Weights of files to engines, over the same buckets,
receipts and checks as a trainer's weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.controller.sync.weight_sync import WeightSync
from rlhf_megatron.ranks.resharding.weight_sender import SendReport, SingleRankWorld
from rlhf_megatron.rollout.engine_interface import WeightTransport
from rlhf_megatron.rollout.transports.process_group_transport import EngineProcessGroups
from rlhf_megatron.rollout.transports.weight_delivery import deliver_weights
from rlhf_megatron.weights.conversion.stored_model import StoredModel
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.families.model_family import HFConfig
from rlhf_megatron.weights.weight_source import WeightSource
from rlhf_megatron.weights.weight_table import WeightRule


class FileWeightSender(SingleRankWorld):
    """The sender of a `WeightSync` where no trainer runs.
    Implements `controller.sync.weight_sync.WeightSender`.

    One tensor of Megatron's layout is made at a time, but all are held while they are sent: the
    host needs memory for the whole model in the engines' type.
    """

    def __init__(self, source: WeightSource, hf_config: HFConfig) -> None:
        """Prepare to send the tensors of a source; `hf_config` is the config of its model."""
        super().__init__(torch.device("cpu"))
        self._source = source
        self._table = make_weight_table(hf_config)

    def send_weights(
        self, *, dtype: str, transport: WeightTransport, **delivery_options: Any
    ) -> Future[list[SendReport]]:
        """Send all tensors as `dtype`, in this thread, and return a future that is done. The other
        arguments of `HostWorker.send_weights` are those of `deliver_weights`. Raise ValueError for
        a broken tensor.
        """
        sent: Future[list[SendReport]] = Future()
        with closing(EngineProcessGroups()) as groups:
            sent.set_result(
                [
                    deliver_weights(
                        self._iterate_megatron_tensors(getattr(torch, dtype)),
                        self,
                        groups,
                        engine_dtype=dtype,
                        transport_kind=transport,
                        **delivery_options,
                    )
                ]
            )
        return sent

    def _iterate_megatron_tensors(self, dtype: torch.dtype) -> Iterator[tuple[WeightRule, Tensor]]:
        """Yield each rule with its tensor in Megatron's layout, one at a time, as `dtype` except
        for buffers.
        """
        for rule in self._table:
            full = rule.to_megatron(*self._source.read_hf_tensors(rule))
            # a buffer keeps its type
            yield (rule, full if rule.dtype is not None else full.to(dtype))


def sync_file_weights(sync: WeightSync, model: StoredModel, version: int) -> float:
    """Send the weights of a model to the engines of `sync`, under a version above their present
    one. Return the seconds.

    Raise EngineError, ValueError or OSError; the fleet then brings the engines back to the weights
    that they served.
    """
    before = sync.weight_sender, sync.policy_version
    with sync.fleet.hold_exclusively():
        sync.weight_sender = FileWeightSender(model.source, model.hf_config)
        sync.policy_version = version - 1
        try:
            return sync()["sync/seconds"]
        except BaseException as error:
            sync.weight_sender, sync.policy_version = before
            sync.fleet.abandon_weight_update(str(error))
            raise
