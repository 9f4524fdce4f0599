"""Routes by handle (runtime/route_store.py): a real store process, asked as ranks of another machine ask it."""

import shutil
import signal
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from rlhf_megatron.data import routes
from rlhf_megatron.recovery.route_files import RouteFiles
from rlhf_megatron.runtime import route_store
from rlhf_megatron.runtime.route_store import RouteStore, reach_stores

SECRET = b"s" * 64
LAYERS, TOP_K = 6, 8
WANTED = {LAYERS: np.array([4, 5])}
AFAR = "/another/machine"


def ids_of(num_tokens: int, seed: int = 0) -> routes.Ids:
    return np.random.default_rng(seed).integers(0, 200, (num_tokens, LAYERS, TOP_K), dtype=np.uint8)


def from_afar(handle: str) -> str:
    """The same handle with a path that this machine does not see; a store looks for a name in its own directory."""
    address, path = routes.place_of(handle)
    return f"{address}{AFAR}/{Path(path).name}"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RouteStore]:
    monkeypatch.setattr(routes, "elsewhere", None)
    reach_stores(SECRET)
    store = RouteStore(tmp_path / "routes", "127.0.0.1", SECRET)
    yield store
    store.close()


def test_tokens_and_layers_that_are_wanted_are_fetched_and_no_others(store: RouteStore, tmp_path: Path) -> None:
    ids = ids_of(50)
    handle = routes.write_routes(str(tmp_path / "routes"), ids)
    assert handle.startswith(f"{store.address}/")
    positions = np.array([3, 4, 40, 60])  # the last one was never read
    near = routes.select_routes(handle, positions, WANTED, TOP_K)
    far = routes.select_routes(from_afar(handle), positions, WANTED, TOP_K)
    assert far.num_tokens == near.num_tokens == 50
    assert np.array_equal(far.ids, ids[[3, 4, 40], 4:]) and np.array_equal(near.ids, far.ids)
    assert (near.num_fetched, far.num_fetched) == (0, 3 * 2 * TOP_K)
    with pytest.raises(ValueError, match=r"ids of shape \(50, 48\), not \[tokens, 7 layers x 8\]"):
        routes.select_routes(from_afar(handle), positions, {7: np.array([0])}, TOP_K)
    assert routes.elsewhere is not None
    with pytest.raises(ValueError, match=r"routes/passwd, where an engine .* is not there"):
        routes.elsewhere.select(store.address, "/etc/passwd", positions, WANTED, TOP_K)  # its directory only


def test_a_store_that_is_gone_has_lost_its_files_until_it_is_back(
    store: RouteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = [from_afar(routes.write_routes(str(tmp_path / "routes"), ids_of(9, seed))) for seed in range(3)]
    assert routes.are_there(handles)
    store.close()
    assert not routes.are_there(handles), "their groups are generated again"
    routes.remove_routes(handles[:1])  # no error: its machine is gone
    with pytest.raises(ValueError, match="generates again what is lost"):
        routes.select_routes(handles[0], np.array([0]), WANTED, TOP_K)
    again = RouteStore(tmp_path / "routes", "127.0.0.1", SECRET)
    assert again.address == store.address, "handles of the journal lead to it"
    assert routes.are_there(handles[:2])
    assert routes.select_routes(handles[0], np.array([0]), WANTED, TOP_K).num_tokens == 9
    routes.remove_routes(handles[:1], are_trained=True)
    left = {path.name for path in (tmp_path / "routes").iterdir()}
    assert left == {Path(handles[1]).name}, "what a former process has left and nobody has asked for is gone, too"
    reach_stores(b"t" * 64)
    assert not routes.are_there(handles[1:2]), "another secret"
    again.close()


def test_a_store_that_hangs_holds_nobody_up(store: RouteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = from_afar(routes.write_routes(str(tmp_path / "routes"), ids_of(9)))
    assert routes.elsewhere is not None and routes.elsewhere.held(store.address).num_bytes > 0
    for limit in ("CONNECT_S", "ANSWER_S", "HELD_S"):
        monkeypatch.setattr(route_store, limit, 0.2)
    store._process.send_signal(signal.SIGSTOP)
    assert routes.elsewhere.held(store.address) == routes.Held()
    with pytest.raises(ValueError, match=r"timed out.*or hangs"):
        routes.select_routes(handle, np.array([0]), WANTED, TOP_K)
    store._process.send_signal(signal.SIGCONT)
    for limit in ("CONNECT_S", "ANSWER_S"):
        monkeypatch.setattr(route_store, limit, 30.0)
    monkeypatch.setattr(route_store, "HELD_S", 1e-9)
    assert routes.elsewhere.held(store.address) == routes.Held(), "the answer comes, but late"
    assert routes.select_routes(handle, np.array([0]), WANTED, TOP_K).num_tokens == 9


def test_a_file_that_a_machines_end_has_cut_off_or_changed_is_not_there(tmp_path: Path) -> None:
    handle = routes.write_routes(str(tmp_path), ids_of(20))
    path = Path(handle)
    whole = path.read_bytes()
    assert routes.are_there([handle])
    for damaged in (b"", whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damaged)
        assert not routes.are_there([handle])
    path.write_bytes(whole)
    other = path.with_name(path.name[:-5] + f"{int(path.name[-5], 16) ^ 1:x}.npy")  # a digit of its digest
    path.rename(other)
    assert not routes.are_there([handle]) and not routes.are_there([str(other)])


def test_a_file_that_is_cut_off_in_mid_run_is_named(store: RouteStore, tmp_path: Path) -> None:
    handle = routes.write_routes(str(tmp_path / "routes"), ids_of(20))
    path = Path(routes.place_of(handle)[1])
    for length, each in product((200, 60, 0), (handle, from_afar(handle))):
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(ValueError, match=rf"{path.name} does not hold any more .* generates again what is lost"):
            routes.select_routes(each, np.array([0]), WANTED, TOP_K)
    assert routes.are_there([routes.write_routes(str(tmp_path / "routes"), ids_of(2))]), "the store goes on"


def test_a_machine_has_no_more_files_than_it_may_and_tells_what_it_has(
    store: RouteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    each = ids_of(1000).nbytes + 128
    folder, most = str(tmp_path / "routes"), 2 * each
    files = RouteFiles(tmp_path / "routes", True, False, most, told.append)
    files.begin(())
    assert told == [f"files of routes: at most {most / 1e9:.3g} GB in {folder} (rollout.routes_gb)"]
    handles = [from_afar(routes.write_routes(folder, ids_of(1000, seed), most)) for seed in range(2)]
    assert sum(path.stat().st_size for path in (tmp_path / "routes").iterdir()) == most
    with pytest.raises(OSError, match=r"9\.63e-05 GB stand there, of 9\.63e-05 that may \(rollout\.routes_gb\)"):
        routes.write_routes(folder, ids_of(1), most)
    assert len(list((tmp_path / "routes").iterdir())) == 2, "what could not be written left nothing"
    near, far = RouteFiles(tmp_path / "routes", True), RouteFiles(tmp_path / "none", True, False, most, told.append)
    for found in (near.metrics(()), far.metrics(handles), far.metrics(handles)):
        assert found["rollout/routes_memory_gb"] + found["rollout/routes_spilled_gb"] == pytest.approx(most / 1e9)
        assert found["rollout/routes_memory_gb"] > 0, "what was just written is in memory"
    assert len(told) == 2 and f"files of routes at {store.address} have" in told[1], "once"
    files.trained(1, handles[:1])
    files.saved(1)
    routes.write_routes(folder, ids_of(1000), most)
    store.close()
    assert sum(far.metrics(()).values()) == 0.0, "it is gone, with what it has"


@pytest.mark.parametrize(("total", "least"), [(100 << 30, 1 << 30), (10 << 30, (10 << 30) // 20)])
def test_files_leave_a_part_of_the_disk_to_the_journal_and_checkpoints(
    total: int, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.arange(24, dtype=np.int32).reshape(3, 2, 4)  # of one byte each
    disk = shutil.disk_usage(tmp_path)._replace(total=total, free=least + ids.size)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    assert routes.are_there([routes.write_routes(str(tmp_path), ids)])
    before = set(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=disk.free - 1))
    with pytest.raises(OSError, match=rf"{least >> 20} MiB are free, .*make room there"):
        routes.write_routes(str(tmp_path), ids)
    assert set(tmp_path.iterdir()) == before
