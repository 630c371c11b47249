"""What every test shares: one thread a process, hypothesis profiles, and the folder of shared data."""

from __future__ import annotations

import os
from pathlib import Path

# Before anything imports torch: two cores run two test processes, and idle OpenMP threads must not spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("MPLBACKEND", "Agg")
# The reference is what is tested in this process, and what the seeded bugs are planted in; test_compiled.py holds the
# compiled build against it.
os.environ.setdefault("KVTWIN_PURE", "1")

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# `dev` is what everybody and CI run: the same cases every time, so that a failure can be had again. `explore` looks
# for new ones.
settings.register_profile(
    "dev", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def shared_folder() -> Path:
    """The folder of shared data: KVTWIN_SHARED, or `shared` beside the checkout (it may be absent)."""
    return Path(os.environ.get("KVTWIN_SHARED") or ROOT.parent / "shared")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """`data` of the shared folder; a test that asks for it is skipped, with the reason, where there is none."""
    folder = shared_folder() / "data"
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder} (name the shared folder in KVTWIN_SHARED)")
    return folder
