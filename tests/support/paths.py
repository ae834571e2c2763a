"""Where the repository is, whatever folder a test lies in."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEAN = str(ROOT / "tests/support/lean")
"""On PYTHONPATH, it lets a training process leave parts of torch out."""
