"""Which root a chunk goes to: the rule by itself, over roots that are a few numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf

import pytest

from kvxfer.errors import ConfigError
from kvxfer.placement import LAG_S, Outlook, Placement

NOTHING_IN_THE_WAY = Outlook(inf, True, 0.0)


@dataclass
class Drive:
    has: set[bytes] = field(default_factory=set)
    answers_loads: bool = True
    takes_stores: bool = True
    outlook: Outlook = NOTHING_IN_THE_WAY

    def contains(self, key: bytes) -> bool:
        return key in self.has


def store(placement: Placement, drives: list[Drive], n: int, first: int = 0) -> list[int]:
    """Places n chunks of one store, each of which is there from then on."""
    found, homes = placement.look(), []
    for number in range(first, first + n):
        key = b"%d" % number
        home, _ = placement.place(key, found, None)
        drives[home].has.add(key)
        homes.append(home)
    return homes


@pytest.mark.parametrize(("weights", "shares"), [((1, 1), (12, 12)), ((3, 1), (18, 6)), ((2, 1, 1), (12, 6, 6))])
def test_in_turn_by_weight(weights: tuple[float, ...], shares: tuple[int, ...]) -> None:
    drives = [Drive() for _ in weights]
    counts = Counter(store(Placement(drives, weights), drives, 24))
    assert tuple(counts[root] for root in range(len(weights))) == shares


def test_it_is_where_it_is() -> None:
    drives = [Drive(), Drive({b"a"})]
    placement = Placement(drives, [1, 1])
    assert placement.home(b"a") == 1 and placement.home(b"nowhere") == 0
    assert placement.place(b"a", placement.look(), None) == (1, False)
    assert placement.place(b"b", placement.look(), under_way=1) == (1, True)
    drives[0].has.add(b"a")
    assert placement.home(b"a") == 0
    assert placement.home(b"a", lambda root: root == 1) == 1  # such as for a request of which it failed on the first
    assert placement.home(b"a", lambda root: False) == 0


def test_what_no_load_can_reach_goes_to_another_and_nowhere_if_there_is_none() -> None:
    drives = [Drive({b"a"}, answers_loads=False), Drive()]
    placement = Placement(drives, [1, 1])
    assert placement.place(b"a", placement.look(), None) == (1, True)
    drives[1].takes_stores = False
    assert placement.place(b"a", placement.look(), None) == (0, False)
    assert placement.place(b"b", placement.look(), under_way=1) == (0, True)  # not where it does not go on
    drives[0].takes_stores = False
    home, given = placement.place(b"c", placement.look(), None)  # refused there, which is counted
    assert given and home in (0, 1)


def test_who_comes_back_gets_its_share_and_no_more() -> None:
    drives = [Drive(), Drive(takes_stores=False)]
    placement = Placement(drives, [1, 1])
    assert store(placement, drives, 12) == [0] * 12
    drives[1].takes_stores = True
    assert abs(store(placement, drives, 12, 12).count(1) - 6) <= 1


def test_quick_drives_first_and_of_these_such_that_evict_nothing() -> None:
    drives = [Drive(outlook=Outlook(inf, True, 2 * LAG_S)), Drive()]
    placement = Placement(drives, [5, 1])
    assert store(placement, drives, 8) == [1] * 8
    drives[0].outlook, drives[1].outlook = Outlook(inf, False, 0.0), Outlook(inf, True, LAG_S)
    assert store(placement, drives, 4, 8) == [1] * 4
    drives[1].outlook = Outlook(inf, False, 0.0)
    assert set(store(placement, drives, 12, 12)) == {0, 1}


def test_what_is_afforded_is_the_head() -> None:
    """Beyond what all afford it is refused where its turn is; nothing that comes later is stored before it."""
    drives = [Drive(outlook=Outlook(2, True, 0.0)), Drive(outlook=Outlook(5, True, 0.0))]
    homes = store(Placement(drives, [9, 1]), drives, 9)
    assert Counter(homes[:7]) == {0: 2, 1: 5}


@pytest.mark.parametrize("weights", [(), (1.0,), (1.0, 0.0), (1.0, -1.0)], ids=str)
def test_weights_are_one_a_root_and_positive(weights: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="positive weights"):
        Placement([Drive(), Drive()], weights)
