"""From the configuration to the scheduler's options, policies among them, and to service level objectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from experiments.config import Config
from experiments.errors import UsageError
from experiments.metrics import Slo

if TYPE_CHECKING:
    from engine.core.cost import CostModel
    from engine.core.presets import SchedulerConfig
    from experiments.terminal import Terminal

__all__ = ["cost_of", "mind_rejected", "scheduler_config", "scheduler_options", "slo_of"]


def scheduler_options(
    config: Config, block_bytes: int = 0, cost_model: CostModel | None = None, num_host_blocks: int | None = None
) -> dict[str, Any]:
    """The options of engine.core's SchedulerConfig, but for the number of blocks and the longest request.

    Args:
        block_bytes: of a KV block; makes host blocks of --swap-space and --kv-offloading-size.
        cost_model: for --preemption-mode auto.
        num_host_blocks: instead, where the number is known.

    Raises:
        PolicyError: a policy cannot be loaded.
    """
    from engine.core.policies import load_policy
    from engine.core.presets import SchedulerConfig, host_blocks, preset

    options = dict(preset(config.preset)) if config.preset else {}
    names = {field.name for field in fields(SchedulerConfig)}
    options |= {field.name: getattr(config, field.name) for field in fields(Config) if field.name in names}
    options["steps_in_flight"] = 2 if config.async_scheduling else 1
    options["policies"] = tuple(load_policy(name) for name in config.policy)
    if num_host_blocks is None:
        sizes = (config.swap_space, config.kv_offloading_size)
        num_host_blocks = host_blocks(*sizes, config.preemption_mode, block_bytes) if block_bytes else 0
    options["num_host_blocks"] = num_host_blocks
    options["host_tier"] = config.kv_offloading_size > 0
    options["cost_model"] = cost_model
    options.pop("num_blocks", None)
    options.pop("max_model_len", None)
    return options


def scheduler_config(
    config: Config, num_blocks: int, longest: int, block_bytes: int = 0, cost_model: CostModel | None = None
) -> SchedulerConfig:
    """The scheduler's options.

    Args:
        longest: the model's own limit, in tokens.
        block_bytes: of a KV block, where host memory is to count.
        cost_model: for --preemption-mode auto.

    Raises:
        UsageError: --max-model-len is above it.
        CoreError: the options contradict each other, or a policy cannot be loaded.
    """
    from engine.core.presets import SchedulerConfig

    if config.max_model_len is not None and config.max_model_len > longest:
        raise UsageError(f"--max-model-len is {config.max_model_len}, but {config.model} ends at {longest} tokens.")
    return SchedulerConfig(
        num_blocks=num_blocks,
        max_model_len=config.max_model_len or longest,
        **scheduler_options(config, block_bytes, cost_model),
    )


def cost_of(config: Config) -> CostModel | None:
    """What --preemption-mode auto goes by, from --calibration; None where another mode is asked for.

    Raises:
        UsageError: there is no calibration, or it has no block moves.
        SimError: it cannot be read.
    """
    if config.preemption_mode != "auto":
        return None
    if config.calibration is None:
        raise UsageError("--preemption-mode auto compares fitted costs: give --calibration FILE.")
    from sim.calibration import load_calibration
    from sim.moves import cost_model

    calibration = load_calibration(config.calibration)
    moves = calibration.move_time(config.block_size)
    if moves is None:
        raise UsageError(f"{config.calibration} has no block moves; run kvtwin profile and calibrate again.")
    return cost_model(calibration.step_time(), moves)


def mind_rejected(requests: Mapping[str, Any], terminal: Terminal) -> None:
    """Says which requests could never be served, as far as the first of them.

    Raises:
        UsageError: no request at all could.
    """
    refused = [i for i, outcome in enumerate(requests["outcome"]) if outcome == "rejected"]
    if not refused:
        return
    first = f"request {requests['row'][refused[0]]} of the trace was rejected: {requests['reason'][refused[0]]}"
    if len(refused) == len(requests["outcome"]):
        raise UsageError(f"No request can be served; {first}.")
    count = len(refused)
    terminal.warn(f"{count:,} request{'s' if count > 1 else ''} can never be served; {first}.")


def slo_of(config: Config) -> Slo:
    """The limits that --slo-* name."""
    return Slo(config.slo_ttft_s, config.slo_tpot_s, config.slo_e2e_s)
