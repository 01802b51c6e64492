"""Expectations of torch's bugs go by the installed version: strict before, none afterwards."""

import pytest
from support import torch_versions
from support.torch_versions import since, torch_bug, torch_bugs


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(torch_versions, "INSTALLED", (2, 14, 1))


def test_a_version_counts_from_its_first_release():
    assert since("2.13") and since("2.14") and since("2.14.1")
    assert not since("2.14.2") and not since("2.15") and not since("3.0")


@pytest.mark.parametrize("version", ["2.13", "2.14"])
def test_a_bug_that_is_mended_is_expected_no_longer(version):
    mark = torch_bug("it fails", fixed_in=version).mark
    assert mark.name == "xfail" and mark.args == (False,)


@pytest.mark.parametrize("version", ["2.15", None])
def test_a_bug_that_is_there_must_show(version):
    mark = torch_bug("it fails", fixed_in=version).mark
    assert mark.args == (True,) and mark.kwargs["strict"]
    assert "it fails" in mark.kwargs["reason"]


def test_each_of_several_programs_has_its_own_version():
    def one(): ...

    def other(): ...

    first, second = torch_bugs("wrong", [one, other], {one: "2.14"})
    assert (first.id, first.values) == ("one", (one,))
    assert [each.marks[0].args for each in (first, second)] == [(False,), (True,)]
