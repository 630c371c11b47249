"""LLMServingSim's workloads: JSON Lines with input_toks, output_toks, arrival_time_ns and perhaps the token ids.

Where rows have input_tok_ids, prompts that begin with the same tokens share exactly these; where a prompt repeats
another row's prompt and its whole output_tok_ids, it repeats that output. Other keys are left alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from traces.files import TraceFile, is_integer
from traces.readers.base import Format, Rows
from traces.schema import NO_ID, Trace

__all__ = ["FORMATS", "PrefixTree"]

_KEYS = {"input_toks", "output_toks", "arrival_time_ns"}


def _is_llmservingsim(file: TraceFile) -> bool:
    row = file.first_object()
    first = (file.head(1) or [""])[0]
    return len(_KEYS - row.keys()) <= 1 if row else first.startswith("{") and '"input_toks"' in first[:100]


def _read(file: TraceFile) -> Trace:
    rows, tree = Rows(file), PrefixTree()
    prompts: list[int | None] = []
    wholes: list[int | None] = []
    for number, row in file.json_rows():
        ns = file.whole(number, row, "arrival_time_ns", 0)
        prompt, output = (file.whole(number, row, key, 1, 2**31 - 1) for key in ("input_toks", "output_toks"))
        tokens = _token_ids(file, number, row, "input_tok_ids", prompt)
        generated = _token_ids(file, number, row, "output_tok_ids", output)
        prompts.append(None if tokens is None else tree.add(tokens))
        wholes.append(None if tokens is None or generated is None else tree.add(tokens + generated))
        rows.add(number, ns, prompt, output)
    if not tree:
        return rows.trace()
    tree.build()
    brought: set[int] = set()
    for at, entry in enumerate(prompts):
        nodes, tokens_of = tree.path(entry) if entry is not None else ([], [])
        brought.update(nodes)
        rows.set_spans(at, nodes, tokens_of)
    output_ids = np.full(len(rows), NO_ID, dtype=np.int64)
    for at, (entry, whole) in enumerate(zip(prompts, wholes, strict=True)):
        if entry is not None and whole is not None:
            node = tree.terminal[whole]
            if node in brought and tree.parent[node] == tree.terminal[entry]:
                output_ids[at] = node
    return rows.trace(output_ids=output_ids)


def _token_ids(file: TraceFile, number: int, row: dict[str, Any], key: str, length: int) -> bytes | None:
    """The ids as big-endian 32-bit words, whose order is that of the lists; None where there are none."""
    ids = row.get(key)
    if ids is None or ids == []:
        return None
    if not isinstance(ids, list) or not all(is_integer(i) and 0 <= i < 2**32 for i in ids):
        raise file.error(number, f"{key} must be a list of whole numbers of 0 or more")
    if len(ids) != length:
        raise file.error(
            number, f"has {len(ids)} {key} for a length of {length}; make them equal, or leave the ids out"
        )
    return np.array(ids, dtype=">u4").tobytes()


class PrefixTree:
    """Finds what lists of tokens have in common: the tree of their prefixes, with a node where two part or one ends.

    Lists go in with `add`; after `build`, `path` gives the nodes on the way to each. A node's number names the prefix
    up to it.
    """

    def __init__(self) -> None:
        self._lists: list[bytes] = []
        self.depth = [0]
        self.parent = [-1]
        self.terminal: list[int] = []
        """The node at the end of each list."""

    def __bool__(self) -> bool:
        return bool(self._lists)

    def add(self, tokens: bytes) -> int:
        """Adds a list of big-endian 32-bit words; returns its number."""
        self._lists.append(tokens)
        return len(self._lists) - 1

    def build(self) -> None:
        """Makes the tree in the lists' alphabetical order, in which a node is left once for good."""
        self.terminal = [0] * len(self._lists)
        stack, last = [0], b""
        for entry in sorted(range(len(self._lists)), key=self._lists.__getitem__):
            tokens = self._lists[entry]
            common = _common(last, tokens)
            left = -1
            while self.depth[stack[-1]] > common:
                left = stack.pop()
            if self.depth[stack[-1]] < common:  # the two part within an edge: a node goes in between
                between = self._node(common, stack[-1])
                self.parent[left] = between
                stack.append(between)
            if len(tokens) // 4 > self.depth[stack[-1]]:
                stack.append(self._node(len(tokens) // 4, stack[-1]))
            self.terminal[entry] = stack[-1]
            last = tokens
        self._lists = []

    def path(self, entry: int) -> tuple[list[int], list[int]]:
        """(nodes, tokens up to each from the one before) on the way to the end of a list."""
        nodes: list[int] = []
        node = self.terminal[entry]
        while node:
            nodes.append(node)
            node = self.parent[node]
        nodes.reverse()
        return nodes, [self.depth[node] - self.depth[self.parent[node]] for node in nodes]

    def _node(self, depth: int, parent: int) -> int:
        self.depth.append(depth)
        self.parent.append(parent)
        return len(self.depth) - 1


def _common(first: bytes, second: bytes) -> int:
    """How many leading words two lists share."""
    n = min(len(first), len(second)) // 4
    differ = np.frombuffer(first, dtype=">u4", count=n) != np.frombuffer(second, dtype=">u4", count=n)
    at = np.flatnonzero(differ)
    return int(at[0]) if len(at) else n


FORMATS = (
    Format(
        "llmservingsim",
        "JSON Lines with input_toks, output_toks, arrival_time_ns and perhaps token ids",
        _is_llmservingsim,
        _read,
        options={},
    ),
)
