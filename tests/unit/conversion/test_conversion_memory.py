"""Memory of a conversion: a process holds two units, however large the model is."""

from pathlib import Path

import pytest

from benchmarks.bench_convert import GB, memory


@pytest.mark.long
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Sparse files, which take no room until the target is written."""
    small, large = (memory(tmp_path, gigabytes, 2) for gigabytes in (0.5, 4))
    for found in (small, large):
        assert found["peak"] <= 2 * found["largest_unit"] + GB, found
    assert abs(large["peak"] - small["peak"]) < 0.3 * GB
