"""A batching: prompts may join the decodes only every so often.

A step that computes a chunk of a prompt takes longer than one that only decodes, and everybody who decodes waits for
it. Mixing prefills into every step (vLLM V1) gives new requests their first token soon and stretches the time between
the tokens of all others; pausing decodes for prefills (vLLM V0) does so even more. This policy takes the other end: of
every four steps one may hold prefills and admissions, unless less than half of what runs is decoding anyway.
"""

from engine.core import MIXED, Batch, Batching, StepView


class GentlePrefill(Batching):
    """Prefills and admissions in every fourth step; in all of them while few requests decode."""

    look_at_head = False
    EVERY = 4

    def __init__(self) -> None:
        self.steps = 0

    def step(self, state: StepView) -> Batch:
        self.steps += 1
        few = 2 * state.num_decoding < state.num_running
        if few or self.steps % self.EVERY == 0:
            return MIXED
        return Batch(admit=False, prefills=False)
