"""Routes by handle (runtime/route_store.py): a real store process, asked as ranks of another
machine ask it.
"""

import shutil
import signal
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from rlhf_megatron.controller.recovery.route_file_retention import RouteFileRetention
from rlhf_megatron.data import expert_route_files
from rlhf_megatron.runtime import route_store
from rlhf_megatron.runtime.route_store import RouteStoreProcess, enable_route_stores

SECRET = b"s" * 64
LAYERS = 6
TOP_K = 8
WANTED = {LAYERS: np.array([4, 5])}
AFAR = "/another/machine"


def ids_of(num_tokens: int, seed: int = 0) -> expert_route_files.ExpertIds:
    return np.random.default_rng(seed).integers(0, 200, (num_tokens, LAYERS, TOP_K), dtype=np.uint8)


def from_afar(handle: str) -> str:
    """The same handle with a path that this machine does not see; a store looks for a name in its
    own directory.
    """
    address, path = expert_route_files.split_route_handle(handle)
    return f"{address}{AFAR}/{Path(path).name}"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RouteStoreProcess]:
    monkeypatch.setattr(expert_route_files, "remote_route_stores", None)
    enable_route_stores(SECRET)
    store = RouteStoreProcess(tmp_path / "routes", "127.0.0.1", SECRET)
    yield store
    store.close()


def test_tokens_and_layers_that_are_wanted_are_fetched_and_no_others(
    store: RouteStoreProcess, tmp_path: Path
) -> None:
    ids = ids_of(50)
    handle = expert_route_files.write_route_file(str(tmp_path / "routes"), ids)
    assert handle.startswith(f"{store.address}/")
    positions = np.array([3, 4, 40, 60])  # the last one was never read
    near = expert_route_files.select_routes(handle, positions, WANTED, TOP_K)
    far = expert_route_files.select_routes(from_afar(handle), positions, WANTED, TOP_K)
    assert far.num_tokens == near.num_tokens == 50
    assert np.array_equal(far.ids, ids[[3, 4, 40], 4:]) and np.array_equal(near.ids, far.ids)
    assert (near.num_fetched, far.num_fetched) == (0, 3 * 2 * TOP_K)
    with pytest.raises(ValueError, match=r"ids of shape \(50, 48\), not \[tokens, 7 layers x 8\]"):
        expert_route_files.select_routes(from_afar(handle), positions, {7: np.array([0])}, TOP_K)
    assert expert_route_files.remote_route_stores is not None
    with pytest.raises(ValueError, match=r"routes/passwd, where an engine .* is not there"):
        expert_route_files.remote_route_stores.select_routes(
            store.address, "/etc/passwd", positions, WANTED, TOP_K
        )  # its directory only


def test_a_store_that_is_gone_has_lost_its_files_until_it_is_back(
    store: RouteStoreProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = [
        from_afar(expert_route_files.write_route_file(str(tmp_path / "routes"), ids_of(9, seed)))
        for seed in range(3)
    ]
    assert expert_route_files.has_intact_routes(handles)
    store.close()
    assert not expert_route_files.has_intact_routes(handles), "their groups are generated again"
    expert_route_files.remove_route_files(handles[:1])  # no error: its machine is gone
    with pytest.raises(ValueError, match="generates again what is lost"):
        expert_route_files.select_routes(handles[0], np.array([0]), WANTED, TOP_K)
    again = RouteStoreProcess(tmp_path / "routes", "127.0.0.1", SECRET)
    assert again.address == store.address, "handles of the journal lead to it"
    assert expert_route_files.has_intact_routes(handles[:2])
    assert (
        expert_route_files.select_routes(handles[0], np.array([0]), WANTED, TOP_K).num_tokens == 9
    )
    expert_route_files.remove_route_files(handles[:1], is_step_trained=True)
    left = {path.name for path in (tmp_path / "routes").iterdir()}
    assert left == {Path(handles[1]).name}, (
        "what a former process has left and nobody has asked for is gone, too"
    )
    enable_route_stores(b"t" * 64)
    assert not expert_route_files.has_intact_routes(handles[1:2]), "another secret"
    again.close()


def test_a_store_that_hangs_holds_nobody_up(
    store: RouteStoreProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = from_afar(expert_route_files.write_route_file(str(tmp_path / "routes"), ids_of(9)))
    assert (
        expert_route_files.remote_route_stores is not None
        and expert_route_files.remote_route_stores.measure_storage(store.address).num_bytes > 0
    )
    for limit in ("CONNECT_S", "ANSWER_S", "HELD_S"):
        monkeypatch.setattr(route_store, limit, 0.2)
    store._process.send_signal(signal.SIGSTOP)
    assert (
        expert_route_files.remote_route_stores.measure_storage(store.address)
        == expert_route_files.RouteStorageUsage()
    )
    with pytest.raises(ValueError, match=r"timed out.*or hangs"):
        expert_route_files.select_routes(handle, np.array([0]), WANTED, TOP_K)
    store._process.send_signal(signal.SIGCONT)
    for limit in ("CONNECT_S", "ANSWER_S"):
        monkeypatch.setattr(route_store, limit, 30.0)
    monkeypatch.setattr(route_store, "HELD_S", 1e-9)
    assert (
        expert_route_files.remote_route_stores.measure_storage(store.address)
        == expert_route_files.RouteStorageUsage()
    ), "the answer comes, but late"
    assert expert_route_files.select_routes(handle, np.array([0]), WANTED, TOP_K).num_tokens == 9


def test_a_file_that_a_machines_end_has_cut_off_or_changed_is_not_there(tmp_path: Path) -> None:
    handle = expert_route_files.write_route_file(str(tmp_path), ids_of(20))
    path = Path(handle)
    whole = path.read_bytes()
    assert expert_route_files.has_intact_routes([handle])
    for damaged in (b"", whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damaged)
        assert not expert_route_files.has_intact_routes([handle])
    path.write_bytes(whole)
    # a digit of its digest
    other = path.with_name(path.name[:-5] + f"{int(path.name[-5], 16) ^ 1:x}.npy")
    path.rename(other)
    assert not expert_route_files.has_intact_routes(
        [handle]
    ) and not expert_route_files.has_intact_routes([str(other)])


def test_a_file_that_is_cut_off_in_mid_run_is_named(
    store: RouteStoreProcess, tmp_path: Path
) -> None:
    handle = expert_route_files.write_route_file(str(tmp_path / "routes"), ids_of(20))
    path = Path(expert_route_files.split_route_handle(handle)[1])
    for length, each in product((200, 60, 0), (handle, from_afar(handle))):
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(
            ValueError, match=rf"{path.name} does not hold any more .* generates again what is lost"
        ):
            expert_route_files.select_routes(each, np.array([0]), WANTED, TOP_K)
    assert expert_route_files.has_intact_routes(
        [expert_route_files.write_route_file(str(tmp_path / "routes"), ids_of(2))]
    ), "the store goes on"


def test_a_machine_has_no_more_files_than_it_may_and_tells_what_it_has(
    store: RouteStoreProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    each = ids_of(1000).nbytes + 128
    folder = str(tmp_path / "routes")
    most = 2 * each
    files = RouteFileRetention(tmp_path / "routes", True, False, most, told.append)
    files.remove_unneeded_files(())
    assert told == [f"files of routes: at most {most / 1e9:.3g} GB in {folder} (rollout.routes_gb)"]
    handles = [
        from_afar(expert_route_files.write_route_file(folder, ids_of(1000, seed), most))
        for seed in range(2)
    ]
    assert sum(path.stat().st_size for path in (tmp_path / "routes").iterdir()) == most
    with pytest.raises(
        OSError, match=r"9\.63e-05 GB stand there, of 9\.63e-05 that may \(rollout\.routes_gb\)"
    ):
        expert_route_files.write_route_file(folder, ids_of(1), most)
    assert len(list((tmp_path / "routes").iterdir())) == 2, "what could not be written left nothing"
    near = RouteFileRetention(tmp_path / "routes", True)
    far = RouteFileRetention(tmp_path / "none", True, False, most, told.append)
    for found in (
        near.measure_storage(()),
        far.measure_storage(handles),
        far.measure_storage(handles),
    ):
        assert found["rollout/routes_memory_gb"] + found[
            "rollout/routes_spilled_gb"
        ] == pytest.approx(most / 1e9)
        assert found["rollout/routes_memory_gb"] > 0, "what was just written is in memory"
    assert len(told) == 2 and f"files of routes at {store.address} have" in told[1], "once"
    files.record_trained_step(1, handles[:1])
    files.remove_files_through_step(1)
    expert_route_files.write_route_file(folder, ids_of(1000), most)
    store.close()
    assert sum(far.measure_storage(()).values()) == 0.0, "it is gone, with what it has"


@pytest.mark.parametrize(("total", "least"), [(100 << 30, 1 << 30), (10 << 30, (10 << 30) // 20)])
def test_files_leave_a_part_of_the_disk_to_the_journal_and_checkpoints(
    total: int, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.arange(24, dtype=np.int32).reshape(3, 2, 4)  # of one byte each
    disk = shutil.disk_usage(tmp_path)._replace(total=total, free=least + ids.size)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    assert expert_route_files.has_intact_routes(
        [expert_route_files.write_route_file(str(tmp_path), ids)]
    )
    before = set(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=disk.free - 1))
    with pytest.raises(OSError, match=rf"{least >> 20} MiB are free, .*make room there"):
        expert_route_files.write_route_file(str(tmp_path), ids)
    assert set(tmp_path.iterdir()) == before
