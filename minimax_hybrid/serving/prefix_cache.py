"""Prompts computed once: snapshots of the cache in a radix tree of their tokens, with a byte limit.

    "You are" -+- " a cook. ..."  snapshot
               +- " a guide. ..." snapshot

A hybrid model's cache cannot be cut back to any earlier position as keys can, so a snapshot serves those
prompts that contain all of it. Where the tree branches, prompts have something in common: `lookup` returns
how much, and the engine takes one more snapshot at the last block border before.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..cache import HybridCache
from .caches import cache_bytes


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A cache of one sequence after `length` tokens; not to be written into.

    logits: (1, V) after the last one, None if they are not known.
    routed_experts: (length, L, A) int16, if they were asked for.
    """

    length: int
    cache: HybridCache
    logits: Tensor | None = None
    routed_experts: Tensor | None = None

    @property
    def nbytes(self) -> int:
        others = (x.nbytes for x in (self.logits, self.routed_experts) if x is not None)
        return cache_bytes(self.cache) + sum(others)


@dataclass(eq=False)
class _Node:
    """The tokens that lead here from its parent, and what is kept here."""

    tokens: tuple[int, ...] = ()
    parent: "_Node | None" = None
    children: dict[int, "_Node"] = field(default_factory=dict)
    snapshot: Snapshot | None = None


class PrefixCache:
    """Snapshots of `max_bytes` in all; the least recently used ones are dropped first."""

    def __init__(self, max_bytes: int):
        if max_bytes < 0:
            raise ValueError(f"prefix_cache_bytes is {max_bytes}; it must be at least 0 (0 keeps nothing)")
        self.max_bytes = max_bytes
        self.clear()

    def __len__(self) -> int:
        return len(self._recent)

    def clear(self) -> None:
        self.nbytes = 0
        self._root = _Node()
        self._recent: OrderedDict[_Node, int] = OrderedDict()  # bytes of each; the last one was used last

    def lookup(self, tokens: Sequence[int], *, routed_experts: bool = False) -> tuple[Snapshot | None, int]:
        """The longest snapshot that `tokens` begin with, and how many tokens they share with any prompt here.

        Args:
            routed_experts: only snapshots that have them.
        """
        node, depth, best = self._root, 0, None
        while True:
            found, whole = node.snapshot, depth == len(tokens)
            if found is not None:
                lacks_experts = routed_experts and found.routed_experts is None
                lacks_logits = whole and found.logits is None
                best = best if lacks_experts or lacks_logits else node
            child = None if whole else node.children.get(tokens[depth])
            if child is None:
                break
            common = _common(child.tokens, tokens, depth)
            depth += common
            if common < len(child.tokens):
                break
            node = child
        if best is None:
            return None, depth
        self._recent.move_to_end(best)
        return best.snapshot, depth

    def insert(self, tokens: Sequence[int], snapshot: Snapshot) -> None:
        """Keep a snapshot after these tokens, unless it alone is above the limit."""
        size = snapshot.nbytes
        if size > self.max_bytes:
            return
        node = self._node_for(tuple(tokens))
        if node in self._recent:
            self.nbytes -= self._recent.pop(node)
        node.snapshot = snapshot
        self._recent[node] = size
        self.nbytes += size
        while self.nbytes > self.max_bytes:
            oldest, freed = self._recent.popitem(last=False)
            self.nbytes -= freed
            oldest.snapshot = None
            _prune(oldest)

    def _node_for(self, tokens: tuple[int, ...]) -> _Node:
        """The node of these tokens, made where there is none."""
        node, depth = self._root, 0
        while depth < len(tokens):
            child = node.children.get(tokens[depth])
            if child is None:
                child = node.children[tokens[depth]] = _Node(tokens[depth:], node)
                return child
            common = _common(child.tokens, tokens, depth)
            if common < len(child.tokens):  # split the edge
                middle = _Node(child.tokens[:common], node)
                node.children[tokens[depth]] = middle
                child.tokens, child.parent = child.tokens[common:], middle
                middle.children[child.tokens[0]] = child
                child = middle
            node, depth = child, depth + common
        return node


def _common(edge: tuple[int, ...], tokens: Sequence[int], start: int) -> int:
    """How many tokens from `start` on follow the edge."""
    length = min(len(edge), len(tokens) - start)
    return next((i for i in range(length) if edge[i] != tokens[start + i]), length)


def _prune(node: _Node) -> None:
    """Remove nodes that lead to no snapshot any more."""
    while node.parent is not None and node.snapshot is None and not node.children:
        del node.parent.children[node.tokens[0]]
        node = node.parent
