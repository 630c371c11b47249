"""The simulator: a clock around the decisions of `engine.core`.

Nothing heavy is imported here: `sim.simulate` brings simpy, `sim.calibration` brings pandas and pyarrow.
"""

# ruff: noqa: E402
from __future__ import annotations

from engine.compiled import prefer_compiled

prefer_compiled(__name__, __path__)

from sim.errors import CalibrationError, HardwareError, ModelError, SimError, StalledError

__all__ = ["CalibrationError", "HardwareError", "ModelError", "SimError", "StalledError"]
