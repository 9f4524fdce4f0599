"""What a sync asks of engines, and what it remembers. Engines and senders are stand-ins."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_megatron.controller.sync.lost_update_warning import LostAdapterWarning
from rlhf_megatron.controller.sync.weight_sync import WeightSync
from rlhf_megatron.ranks.resharding.weight_sender import SendReport
from rlhf_megatron.rollout.engine_interface import EngineError
from rlhf_megatron.weights.update_rounding import LostUpdateSums

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


def sync_of_reports(
    reports: list[SendReport], watch: Any = None, dtype: str = "bfloat16"
) -> WeightSync:
    def send_weights(**_: Any) -> Future[list[SendReport]]:
        future: Future[list[SendReport]] = Future()
        future.set_result(list(reports))
        return future

    host = SimpleNamespace(send_weights=send_weights)
    fleet = Fleet(Engine(SENT))
    return WeightSync(
        host,  # type: ignore[arg-type]
        fleet,  # type: ignore[arg-type]
        Path(),
        1 << 20,
        dtype,
        watch_lost_update=watch,
    )


def report_of(lost_squares: float, change_squares: float) -> SendReport:
    return SendReport(8, 0.1, dict(SENT), lost_update=LostUpdateSums(lost_squares, change_squares))


def test_a_sync_reports_the_share_of_all_ranks() -> None:
    """sqrt((1 + 3) / (10 + 6)) = 0.5; a rank that has nothing of the sample says nothing."""
    shares: list[float] = []
    of_second = SendReport(0, 0.0, {}, lost_update=LostUpdateSums(3.0, 6.0))
    parts = [report_of(1.0, 10.0), SendReport(0, 0.0, {}), of_second]
    assert sync_of_reports(parts, shares.append)()["policy/lost_update_share"] == 0.5
    assert shares == [0.5]


def test_a_sync_without_a_measure_and_one_of_a_version_that_was_sent_report_nothing() -> None:
    shares: list[float] = []
    without = sync_of_reports([SendReport(8, 0.1, dict(SENT))], shares.append)
    assert "policy/lost_update_share" not in without()
    again = sync_of_reports([report_of(1.0, 4.0)], shares.append)
    assert "policy/lost_update_share" not in again(is_full_resync=True)
    assert shares == []


def test_the_warning_is_shown_once_and_names_what_can_be_done() -> None:
    notes: list[str] = []
    warning = LostAdapterWarning("bfloat16", notes.append)
    warning(0.1)
    assert notes == [], "a tenth is not above a tenth"
    warning(0.914)
    warning(0.95)
    (note,) = notes
    assert "lack 91% of the adapter's change (policy/lost_update_share 0.914, above 0.1)" in note
    for remedy in ("actor.optim.lr", "algorithm.rollout_correction", "rollout.dtype to float32"):
        assert remedy in note
    float32_notes: list[str] = []
    LostAdapterWarning("float32", float32_notes.append)(0.5)
    assert "rollout.dtype" not in float32_notes[0], "it is float32 already"
