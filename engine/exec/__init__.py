"""The engine's tensors: weights, tokenizer, sampler, executor, and the `LLM` that people call.

May import `engine.core`, `engine.models` and `kernels`. Only errors are imported here, so `import engine.exec` loads no
torch:

    gguf, weights, smollm2, tiny    where a model comes from
    tokenizer, detokenizer          text to ids, ids to text
    sampler                         logits to ids
    runner, executor                a plan of the scheduler becomes one forward pass
    engine, llm                     scheduler and executor joined: in real time, and for a batch of prompts
    profiler                        what a step takes
"""

import os
import sys

from engine.models.errors import DownloadError, EngineError, ModelError, OptionError, ProfileError, SamplingError

__all__ = ["DownloadError", "EngineError", "ModelError", "OptionError", "ProfileError", "SamplingError"]

if "torch" not in sys.modules:
    # Read by OpenMP when torch is loaded. Idle threads that spin take the cores from everything else on the machine:
    # with two busy neighbours decoding was four times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
