"""Where the repository and the tests' own programs are, for tests at any depth."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
MODEL = ROOT / "examples" / "quickstart" / "model"
