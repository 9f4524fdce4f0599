"""Files of the experts that samples met: ids come back as they were, in one byte each
where they fit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlhf_megatron.data.expert_route_files import map_route_file, write_route_file


@pytest.mark.parametrize(("largest", "bytes_an_id"), [(255, 1), (256, 2), (1023, 2)])
def test_ids_come_back_as_they_were(tmp_path: Path, largest: int, bytes_an_id: int) -> None:
    # two tokens, two layers, two experts each
    ids = np.array([[[0, largest], [1, 2]], [[largest, 3], [4, 0]]])
    handle = write_route_file(str(tmp_path / "routes"), ids)
    found = map_route_file(handle, (2, 5), 2)
    assert found.tolist() == ids.tolist() and found.dtype.itemsize == bytes_an_id
    write_route_file(str(tmp_path / "routes"), ids)
    assert len(list((tmp_path / "routes").glob("*.npy"))) == 2, (
        "another sample's, in the same folder"
    )


@pytest.mark.parametrize(("num_layers", "top_k"), [((3,), 2), ((2,), 3)])
def test_a_file_of_another_model_is_refused(
    tmp_path: Path, num_layers: tuple[int, ...], top_k: int
) -> None:
    handle = write_route_file(str(tmp_path), np.zeros((1, 2, 2), np.int64))
    with pytest.raises(
        ValueError,
        match=rf"has ids of shape \(1, 4\), not \[tokens, {num_layers[0]} layers x {top_k}",
    ):
        map_route_file(handle, num_layers, top_k)
