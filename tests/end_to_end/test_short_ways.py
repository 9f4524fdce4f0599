"""How many calls lie between the loop and what it is all about: read off the stack of a real run
in one process.
"""

from __future__ import annotations

import json
import re
import sys

import pytest
from end_to_end_tools import ONE_RANK, train, write_config
from places import ROOT

pytestmark = pytest.mark.dist
PROGRAM = (sys.executable, str(ROOT / "tests" / "support" / "stacks_of_a_run.py"), "train")
# calls after the loop, files with the loop's own
BARS = {"clip formula": (14, 10), "bytes of a bucket": (11, 11)}


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    directory = tmp_path_factory.mktemp("ways")
    settings = ONE_RANK | {"warmup.max_steps": 0, "trainer.total_training_steps": 1}
    found = directory / "ways.json"
    run = train(write_config(directory), settings, launcher=PROGRAM, env={"STACKS": str(found)})
    assert run.exit_code == 0, run.console
    return json.loads(found.read_text())


@pytest.mark.parametrize("what", BARS)
def test_the_way_from_the_loop_is_short(ways: dict[str, list[str]], what: str) -> None:
    calls, files = BARS[what]
    way = ways[what]
    assert len(way) <= calls, "\n".join(way)
    assert len({call.split()[0] for call in way} | {"controller/scheduler/loop.py"}) <= files, (
        "\n".join(way)
    )


@pytest.mark.parametrize("what", BARS)
def test_the_document_prints_what_was_measured(ways: dict[str, list[str]], what: str) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition(f"\n## From the loop to the {what}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \d+ \| `([\w./]+)` \| `(\w+)` \|", section, re.MULTILINE)
    assert [" ".join(row) for row in rows] == ways[what]
