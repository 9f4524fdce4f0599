"""Where the rehearsal's interpreter is, and why its tests are left out."""

from __future__ import annotations

import pytest
from places import ROOT

from tools.cuda_rehearsal.build import missing_tools

PYTHON = ROOT / ".venv-cuda" / "bin" / "python"
WHY_NOT = missing_tools() if PYTHON.is_file() else "`make cuda-rehearsal` has not made .venv-cuda"
NEEDS_CUDA_BUILD = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
