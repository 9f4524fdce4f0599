"""Commands that know samples of one answer only refuse runs with episodes."""

from __future__ import annotations

import pytest
from places import ROOT

from rlhf_megatron.cli.main import main

GAME = ROOT / "configs" / "quickstart_game.yaml"


def test_simulate_knows_no_environments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(GAME), "--gpu", "h100-80g"]) == 1
    assert "simulate knows samples of one answer" in capsys.readouterr().err
