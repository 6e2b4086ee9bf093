"""The clients are tested against the fake front of the daemon's tests."""

from __future__ import annotations

import sys
from pathlib import Path

# The import mode of the suite puts no test directory on the path, and the helpers are no package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "daemon"))
