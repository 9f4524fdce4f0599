"""What a sync asks of engines, and what it remembers. Engines and senders are stand-ins."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_megatron.controller.sync.weight_sync import WeightSync
from rlhf_megatron.ranks.resharding.weight_sender import SendReport
from rlhf_megatron.rollout.engine_interface import EngineError

SENT = {"w": "00000000000000aa"}


class Engine:
    def __init__(self, digests: dict[str, str] | None, serves: int | None = None) -> None:
        self.address = SimpleNamespace(name="engine0")
        self.digests = digests
        self.serves = serves
        self.committed: int | None = None

    def begin_weight_update(self, version: int, is_full_resync: bool = False) -> None:
        assert is_full_resync

    def get_weight_digests(self) -> dict[str, str] | None:
        return self.digests

    def commit_weight_update(self, version: int) -> None:
        self.committed = version

    def get_served_version(self) -> int | None:
        return self.committed if self.serves is None else self.serves


class Fleet:
    def __init__(self, *engines: Engine) -> None:
        self.live_engines = list(engines)
        self.is_whole: list[bool] = []

    def begin_weight_update(self, version: int, is_full_resync: bool) -> None: ...

    def get_weight_digests(self) -> dict[str, dict[str, str] | None]:
        return {f"engine{i}": engine.digests for i, engine in enumerate(self.live_engines)}

    def commit_weight_update(self, version: int, waits_for_all: bool) -> None:
        self.is_whole.append(waits_for_all)


def sync_of(fleet: Fleet, sent: dict[str, str], version: int = 0) -> WeightSync:
    def send_weights(**_: Any) -> Future[list[SendReport]]:
        future: Future[list[SendReport]] = Future()
        future.set_result([SendReport(8, 0.1, dict(sent))])
        return future

    host = SimpleNamespace(send_weights=send_weights)
    return WeightSync(host, fleet, Path(), 1 << 20, "float32", version)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("second", "is_whole"), [(SENT, False), (None, True)], ids=["digests", "none"]
)
def test_a_sync_waits_for_all_commits_only_where_an_engine_is_probed(
    second: dict[str, str] | None, is_whole: bool
) -> None:
    fleet = Fleet(Engine(SENT), Engine(second))
    assert sync_of(fleet, SENT)()["policy/version"] == 1.0
    assert fleet.is_whole == [is_whole]


def test_a_resync_remembers_what_it_sent() -> None:
    """A run that goes on sends its version again: what it sends after that must be the same."""
    sent = dict(SENT)
    engine = Engine(sent)
    sync = sync_of(Fleet(engine), sent, version=3)
    sync.resync_engines([engine])  # type: ignore[list-item]
    assert engine.committed == 3
    sent["w"] = "00000000000000bb"
    with pytest.raises(AssertionError, match="the weights have changed since version 3 was sent"):
        sync.resync_engines([engine])  # type: ignore[list-item]


@pytest.mark.parametrize("serves", [2, 4])
def test_an_engine_that_serves_another_version_after_its_commit_has_failed(serves: int) -> None:
    engine = Engine(SENT, serves)
    with pytest.raises(EngineError, match=f"engine0 serves version {serves} after the sync of 3"):
        sync_of(Fleet(engine), SENT, version=3).resync_engines([engine])  # type: ignore[list-item]
