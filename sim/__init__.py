"""The simulator: a clock around the decisions of `engine.core`.

Nothing heavy is imported here: `sim.simulate` brings simpy, `sim.calibration` brings pandas and pyarrow.
"""

from __future__ import annotations

from sim.errors import CalibrationError, HardwareError, ModelError, SimError, StalledError

__all__ = ["CalibrationError", "HardwareError", "ModelError", "SimError", "StalledError"]
