"""The waiting requests, in the order of the policy."""

from __future__ import annotations

import heapq

from engine.core.request import WAITING, Request

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """A heap by `Request.key`. A preempted request has kept its key, and so its place.

    Requests that leave from the middle are skipped when they come up: an entry counts only while its ticket is the
    request's newest.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, ...], int, Request]] = []
        self._num = 0
        self.changes = 0
        """Grows whenever a request comes or leaves."""

    def __len__(self) -> int:
        return self._num

    def push(self, request: Request) -> None:
        request.ticket += 1
        self._num += 1
        self.changes += 1
        heapq.heappush(self._heap, (request.key, request.ticket, request))

    def peek(self) -> Request:
        """The first request; there must be one."""
        heap = self._heap
        while True:
            _, ticket, request = heap[0]
            if request.ticket == ticket and request.state == WAITING:
                return request
            heapq.heappop(heap)

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        request.ticket += 1
        self._num -= 1
        self.changes += 1
        return request

    def first(self, num: int) -> list[Request]:
        """The first `num` requests in order, or all if there are fewer. They stay where they are."""
        heap = self._heap
        found: list[tuple[tuple[int, ...], int, Request]] = []
        while heap and len(found) < num:
            entry = heapq.heappop(heap)
            if entry[2].ticket == entry[1] and entry[2].state == WAITING:
                found.append(entry)
        for entry in found:
            heapq.heappush(heap, entry)
        return [request for _, _, request in found]

    def remove(self, request: Request) -> None:
        """Take a waiting request out, wherever it is."""
        request.ticket += 1
        self._num -= 1
        self.changes += 1

    def ordered(self) -> list[Request]:
        """All waiting requests in order (for checks and views; sorts)."""
        live = [entry for entry in self._heap if entry[2].ticket == entry[1] and entry[2].state == WAITING]
        return [request for _, _, request in sorted(live, key=lambda entry: entry[0])]
