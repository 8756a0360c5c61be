"""Packages that are not in the environment: `make setup` leaves them in a folder beside it (constraints/beside.txt)."""

import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "beside"


def find_them() -> None:
    """Let this process find them. It is meant for a rank of a test."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
