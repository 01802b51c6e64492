"""Of a test marked `sampled`, some sets of parameters are quick and the others slow."""

from dataclasses import dataclass, field

import pytest
from support import slow


@dataclass
class Item:
    """As much of a pytest item as is asked for."""

    nodeid: str
    every: int | None
    added: list[str] = field(default_factory=list)

    def get_closest_marker(self, name):
        assert name == "sampled"
        return self.every and pytest.mark.sampled(every=self.every).mark

    def add_marker(self, marker):
        self.added.append(marker.name)


def test_each_so_many_th_set_of_parameters_of_each_test_is_quick():
    ones = [Item(f"a.py::test_one[{number}]", every=3) for number in range(5)]
    others = [Item(f"a.py::test_other[{number}]", every=2) for number in range(3)]
    plain = [Item(f"b.py::test_plain[{number}]", every=None) for number in range(3)]
    slow.pytest_collection_modifyitems([*ones, *plain, *others])
    assert [item.added for item in ones] == [[], ["slow"], ["slow"], [], ["slow"]]
    assert [item.added for item in others] == [[], ["slow"], []]
    assert [item.added for item in plain] == [[], [], []]
