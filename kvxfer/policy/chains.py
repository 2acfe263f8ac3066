"""Which entry follows which. Evicting one would hide all that follow it from lookups, which end at the first gap."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
LEAST_MISSING = 1024  # that are remembered however few entries there are


class Node(Generic[T]):
    """One chunk of a chain: known, or missing while others that follow it are known."""

    __slots__ = ("before", "child", "cut", "item", "kids", "name", "next", "parent")

    def __init__(self, name: Hashable, item: T | None) -> None:
        self.name = name
        self.item = item  # None: missing
        self.parent: Node[T] | None = None
        self.child: Node[T] | None = None  # the first of those that follow it; the others by `next`
        self.next: Node[T] | None = None
        self.before: Node[T] | None = None
        self.kids = 0  # of them, those through which something is known that is not about to go (`leave`)
        self.cut = False  # something before it is missing: no lookup gets here

    def children(self) -> Iterator[Node[T]]:
        """Those that follow it directly."""
        child = self.child
        while child is not None:
            yield child
            child = child.next


class Chains(Generic[T]):
    """A forest of the entries that were said to follow one another, by their names.

    An entry that leaves while others follow it stays as a missing one, so that it takes its place again when it is
    stored again. At most as many of them are remembered as there are entries that follow something, or LEAST_MISSING;
    past that those that followed are taken for beginnings of chains. What is told wrongly costs order, no more: a chain
    that would bite its tail is not believed.

    Args:
        sheltered: called for a known entry when a first one follows it.
        exposed: called for a known entry when none does any more.
    """

    def __init__(self, sheltered: Callable[[T], None], exposed: Callable[[T], None]) -> None:
        self.unreachable = 0  # known ones with a missing one before them
        self.missing = 0
        self.nodes: dict[Hashable, Node[T]] = {}  # what is known of a chunk, by its name; theirs alone to change
        self._sheltered, self._exposed = sheltered, exposed

    def __len__(self) -> int:
        """Nodes, the missing ones too."""
        return len(self.nodes)

    # ---- what is told --------------------------------------------------------------------------------------

    def learn(self, names: Sequence[Hashable], items: Sequence[T | None]) -> bool:
        """Each of these follows the one before it, perhaps not directly. None: it is not known at present.

        Returns:
            Whether the last is known to follow the one before it.
        """
        unclear: list[tuple[Node[T], Hashable]] = []
        for i in range(len(names) - 1, 0, -1):  # from the end: what is missing counts where something known follows it
            name, item = names[i], items[i]
            child = self.nodes.get(name)
            if child is None:
                if item is None:
                    continue
                child = self.nodes[name] = Node(name, item)
            if child.parent is not None:
                if child.parent.name != names[i - 1]:
                    unclear.append((child, names[i - 1]))
                continue
            self._begin(child, names[i - 1], items[i - 1])
        for child, name in unclear:
            self._nearer(child, name)
        if len(names) < 2:
            return True
        last = self.nodes.get(names[-1])
        return last is not None and last.parent is not None and last.parent.name == names[-2]

    def _begin(self, child: Node[T], name: Hashable, item: T | None) -> None:
        """`child` has followed nothing so far."""
        parent = self.nodes.get(name)
        if parent is None:
            if item is None:
                if self._is_full:
                    return
                self.missing += 1
            parent = self.nodes[name] = Node(name, item)
        above: Node[T] | None = parent
        while above is not None and above is not child:
            # What nothing follows is above nobody.
            above = above.parent if child.child is not None else None
        if above is None and parent is not child:
            self._attach(child, parent)

    def _nearer(self, child: Node[T], name: Hashable) -> None:
        """`child` follows another one already. The one that is nearer stays; the first, where that is not known."""
        old, parent = child.parent, self.nodes.get(name)
        if old is not None and parent is not None and parent is not child and parent.parent is old:
            old.kids -= 1  # and not to 0: `parent` follows it
            self._unlist(child)
            self._attach(child, parent)

    def _attach(self, child: Node[T], parent: Node[T]) -> None:
        child.parent, child.next = parent, parent.child
        if parent.child is not None:
            parent.child.before = child
        parent.child = child
        self.stay(child)
        self._mark(child, parent.cut or parent.item is None)

    def _unlist(self, child: Node[T]) -> None:
        if child.before is not None:
            child.before.next = child.next
        elif child.parent is not None:
            child.parent.child = child.next
        if child.next is not None:
            child.next.before = child.before
        child.parent = child.next = child.before = None

    @property
    def _is_full(self) -> bool:
        return self.missing >= max(LEAST_MISSING, len(self.nodes) - self.missing)

    # ---- entries come and go -------------------------------------------------------------------------------

    def followers(self, name: Hashable) -> list[T]:
        """The known ones that follow it, each directly or behind missing ones."""
        found, below = [], [node] if (node := self.nodes.get(name)) is not None else []
        while below:
            for child in below.pop().children():
                if child.item is None:
                    below.append(child)
                else:
                    found.append(child.item)
        return found

    def enter(self, name: Hashable, item: T) -> bool:
        """An entry is known from now on; whether others follow it."""
        if not self.missing or (node := self.nodes.get(name)) is None:
            return False
        node.item = item
        self.missing -= 1
        if node.cut:
            self.unreachable += 1
        else:
            for child in node.children():
                self._mark(child, False)
        return node.kids > 0

    def leave(self, node: Node[T]) -> None:
        """It is about to go: whatever it follows may go after it, unless others follow that."""
        parent = node.parent
        while parent is not None:
            parent.kids -= 1
            if parent.kids:
                return
            if parent.item is not None:
                self._exposed(parent.item)
                return
            parent = parent.parent

    def stay(self, node: Node[T]) -> None:
        """Undoes `leave`."""
        parent = node.parent
        while parent is not None:
            parent.kids += 1
            if parent.kids > 1:
                return
            if parent.item is not None:
                self._sheltered(parent.item)
                return
            parent = parent.parent

    def remove(self, node: Node[T]) -> None:
        """An entry is gone. Pre: `leave`, or others follow it that do not go."""
        node.item = None
        if node.cut:
            self.unreachable -= 1
        self.missing += 1
        if node.child is None:
            self._prune(node)
        elif self._is_full:
            for child in list(node.children()):
                self._unlist(child)
                self._mark(child, False)
            if node.kids:
                node.kids = 0
                self.leave(node)
            self._prune(node)
        else:
            for child in node.children():
                self._mark(child, True)

    def _prune(self, node: Node[T]) -> None:
        """Forgets a missing one that nothing follows, and those before it for which the same is then true."""
        at: Node[T] | None = node
        while at is not None and at.item is None and at.child is None:
            parent = at.parent
            self._unlist(at)
            del self.nodes[at.name]
            self.missing -= 1
            at = parent

    def _mark(self, node: Node[T], cut: bool) -> None:
        """Says of a node, and so of all that follow it, whether something before it is missing."""
        changed = [(node, cut)]
        while changed:
            at, cut = changed.pop()
            if at.cut is cut:
                continue
            at.cut = cut
            if at.item is not None:
                self.unreachable += 1 if cut else -1
            below = cut or at.item is None
            changed += [(child, below) for child in at.children()]
