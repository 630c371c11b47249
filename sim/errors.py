"""Every exception of the simulator.

SimError
├── ModelError         an unknown model, or a model configuration that cannot be read
├── HardwareError      an unknown device, or a device description that is wrong
├── CalibrationError   a profile or a calibration file that cannot be used
└── StalledError       the simulation stopped making progress while requests were left
"""

from __future__ import annotations

__all__ = ["CalibrationError", "HardwareError", "ModelError", "SimError", "StalledError"]


class SimError(Exception):
    """Base of the simulator's errors: one sentence that names the thing and the fix."""


class ModelError(SimError):
    """The model is unknown or its configuration is not one we can read."""


class HardwareError(SimError):
    """The device is unknown or its description is wrong."""


class CalibrationError(SimError):
    """The profile or the calibration file cannot be used."""


class StalledError(SimError):
    """Nothing is left to happen although requests have not finished; carries a bug of ours, not of the input."""
