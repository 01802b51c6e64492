"""What other code may do with a DTensor: right, or refused, as docs/other-code.md says."""

import warnings
from pathlib import Path

import pytest
from support.other_code import CALLS, GROUPS, LAYOUTS, failures, table, waiting

import shardwise as sw

PAGE = Path(__file__).resolve().parents[2] / "docs" / "other-code.md"


UNSEEN = {"torch.FloatTensor(x)", "plain.data = x"}
"""Calls of which nobody is told. They get NaN for data that are under way."""


@pytest.mark.parametrize("group", GROUPS)
def test_every_call_is_right_or_refused_as_the_list_says(group: str) -> None:
    calls = [call for call in CALLS if call.group == group and not call.is_real_only]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch for plain tensors, and of fallbacks
        wrong = sw.simulate(lambda: failures(calls), 4)
    assert wrong == [[]] * 4, "\n".join(line for lines in wrong for line in lines)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("group", GROUPS)
def test_a_tensor_whose_data_are_under_way_is_waited_for_by_every_call(group: str) -> None:
    calls = [
        call
        for call in CALLS
        if call.group == group and not call.is_real_only and call.code not in UNSEEN
    ]
    moved = [LAYOUTS[0], LAYOUTS[3], LAYOUTS[4]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrong = sw.simulate(lambda: failures(calls, moved, waiting), 4)
    assert wrong == [[]] * 4, "\n".join(line for lines in wrong for line in lines)


@pytest.mark.parametrize("group", GROUPS)
def test_the_page_says_what_happens(group: str) -> None:
    expected = f"## {group}\n\n{table(group)}\n"
    assert expected in PAGE.read_text("utf-8"), f"docs/other-code.md must contain:\n{expected}"
