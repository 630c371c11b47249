"""The decisions: where every KV block goes, and what runs in the next step. Standard library and numpy only.

types, errors      what crosses the border
identity           what makes two blocks the same
pool, index        blocks by reference; blocks by content
manager            block tables of requests
policies, asking   kinds of choices, and how they are asked; orders, victims, batching: the built-in ones
presets            the options, and the engines that they stand for
cohort, waiting    the running decodes as one object; the queue
scheduler          one step at a time, or many at once; its parts are intake, placing (running requests), admitting
                   (waiting ones), leaving, completing, views, groups (several sequences), tiers (the host's memory)
records            what happened, in columns
glide              decode steps with nobody waiting, in one go
drive              the loop that joins scheduler and executor
"""

# ruff: noqa: E402
from engine.compiled import prefer_compiled

prefer_compiled(__name__, __path__)

from engine.core.cost import CostModel, LinearCost
from engine.core.errors import ConfigError, CoreError, InvalidRequest, InvariantError, NoFreeBlocks, PolicyError
from engine.core.identity import SpanIdentity, TokenIdentity
from engine.core.policies import (
    MIXED,
    Admission,
    Batch,
    Batching,
    DynamicOrder,
    Order,
    Policy,
    RequestView,
    StepView,
    Victim,
    load_policy,
)
from engine.core.presets import PRESETS, SchedulerConfig, preset
from engine.core.scheduler import Scheduler
from engine.core.types import (
    NO_LIMIT,
    BlockCopy,
    BlockIdentity,
    Executor,
    FastExecutor,
    Finish,
    PlanItem,
    RequestSpec,
    StepEvents,
    StepOutcome,
    StepPlan,
    Transfer,
    TransferEnd,
    Usage,
)

__all__ = [
    "MIXED",
    "NO_LIMIT",
    "PRESETS",
    "Admission",
    "Batch",
    "Batching",
    "BlockCopy",
    "BlockIdentity",
    "ConfigError",
    "CoreError",
    "CostModel",
    "DynamicOrder",
    "Executor",
    "FastExecutor",
    "Finish",
    "InvalidRequest",
    "InvariantError",
    "LinearCost",
    "NoFreeBlocks",
    "Order",
    "PlanItem",
    "Policy",
    "PolicyError",
    "RequestSpec",
    "RequestView",
    "Scheduler",
    "SchedulerConfig",
    "SpanIdentity",
    "StepEvents",
    "StepOutcome",
    "StepPlan",
    "StepView",
    "TokenIdentity",
    "Transfer",
    "TransferEnd",
    "Usage",
    "Victim",
    "load_policy",
    "preset",
]
