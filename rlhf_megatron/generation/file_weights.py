"""Weights of files to engines, over the same buckets, receipts and checks as a trainer's weights."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.checkpoint.source import WeightSource
from rlhf_megatron.conversion.model import Model
from rlhf_megatron.models.families.base import HFConfig, table_for
from rlhf_megatron.models.table import Rule
from rlhf_megatron.resharding.sender import Alone, SendReport
from rlhf_megatron.rollout.transports.delivery import deliver_weights
from rlhf_megatron.rollout.transports.process_group import Groups
from rlhf_megatron.sync.weight_sync import WeightSync


class FileWeights(Alone):
    """The sender of a `WeightSync` where no trainer runs. Implements `sync.weight_sync.Sender`.

    One tensor of Megatron's layout is made at a time, but all are held while they are sent: the host needs memory for
    the whole model in the engines' type.
    """

    def __init__(self, source: WeightSource, hf_config: HFConfig) -> None:
        super().__init__(torch.device("cpu"))
        self._source = source
        self._table = table_for(hf_config)

    def send_weights(self, *, dtype: str, **how: Any) -> Future[list[SendReport]]:
        """Send all tensors, in this thread; `how`: as of `deliver_weights`. Raises ValueError for a broken one."""
        sent: Future[list[SendReport]] = Future()
        with closing(Groups()) as groups:
            sent.set_result([deliver_weights(self._tensors(getattr(torch, dtype)), self, groups, dtype=dtype, **how)])
        return sent

    def _tensors(self, dtype: torch.dtype) -> Iterator[tuple[Rule, Tensor]]:
        for rule in self._table:
            full = rule.to_megatron(*self._source.hf_tensors(rule))
            yield rule, full if rule.dtype is not None else full.to(dtype)  # a buffer keeps its type


def bring(sync: WeightSync, model: Model, version: int) -> float:
    """Other weights to the engines of `sync`, under a version above that of theirs; returns the seconds.

    Raises EngineError, ValueError and OSError: the engines are then brought back to what they served, by their fleet.
    """
    before = sync.host, sync.version
    with sync.fleet.exclusive():
        sync.host, sync.version = FileWeights(model.source, model.hf_config), version - 1
        try:
            return sync()["sync/seconds"]
        except BaseException as error:
            sync.host, sync.version = before
            sync.fleet.abandon_update(str(error))
            raise
