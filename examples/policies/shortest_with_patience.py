"""An order: the shortest job first, but nobody waits for ever.

Shortest job first by what is known, the prompt and max_tokens, gives the best mean latency and starves long requests.
Here each token that a request asks for counts as some milliseconds of arriving later, so a long request is overtaken
only by those that come within a bounded time after it: its rank improves as it waits. With no cost a token it is first
come, first served; with an endless one, shortest job first.
"""

from engine.core import NO_LIMIT, Order, RequestView


class ShortestWithPatience(Order):
    """Arrival plus 5 ms for every prompt and output token asked for."""

    NS_PER_TOKEN = 5_000_000

    def key(self, request: RequestView) -> tuple[int, ...]:
        tokens = request.num_prompt_tokens + request.max_tokens
        return (request.arrival + self.NS_PER_TOKEN * tokens,)

    def stable_until(self, now: int) -> int:
        """A key never changes, so runs of equal steps may be skipped however long they are."""
        return NO_LIMIT
