"""Every exception of the core.

CoreError
├── InvalidRequest     the caller's request can never be served; only that request is refused
├── ConfigError        an option is out of range, or two options contradict each other
├── PolicyError        a user's policy could not be loaded, or raised
└── InvariantError     a broken promise of ours: the run stops and carries the state that broke it
    └── NoFreeBlocks   somebody took blocks without asking `need` first
"""

__all__ = ["ConfigError", "CoreError", "InvalidRequest", "InvariantError", "NoFreeBlocks", "PolicyError"]


class CoreError(Exception):
    """Base of all errors that the core raises."""


class InvalidRequest(CoreError):
    """The request can never be served; the message says why. Nothing else is affected."""


class ConfigError(CoreError):
    """An option is out of range or contradicts another; the message names it and the fix."""


class PolicyError(CoreError):
    """A user's policy could not be loaded or raised; the message names the policy and the file."""


class InvariantError(CoreError):
    """A promise of the core is broken. `state` describes the core at that moment."""

    def __init__(self, message: str, state: str = "") -> None:
        super().__init__(message if not state else f"{message}\n{state}")
        self.state = state


class NoFreeBlocks(InvariantError):
    """More blocks were taken than are free."""
