"""Every exception of the engine outside of its core.

EngineError
├── ModelError        a model's folder, file, configuration or weights cannot be used
├── DownloadError     the default model could not be fetched
├── SamplingError     a sampling parameter is out of range
├── OptionError       an engine option is out of range or does not fit the machine
├── OutOfMemoryError  a step of a single token does not fit the device's memory
└── ProfileError      a profile file cannot be written or continued
"""

__all__ = [
    "DownloadError",
    "EngineError",
    "ModelError",
    "OptionError",
    "OutOfMemoryError",
    "ProfileError",
    "SamplingError",
]


class EngineError(Exception):
    """Base of the engine's errors; the message is one sentence that names the thing and the fix."""


class ModelError(EngineError):
    """A model's folder, file, configuration or weights cannot be used."""


class DownloadError(EngineError):
    """The default model could not be fetched."""


class SamplingError(EngineError):
    """A sampling parameter is out of range."""


class OptionError(EngineError):
    """An engine option is out of range or does not fit the machine."""


class OutOfMemoryError(EngineError):
    """A step of a single token does not fit the device's memory."""


class ProfileError(EngineError):
    """A profile file cannot be written or continued."""
