"""Every operator of op_db on DTensors, beside torch's; what is found makes docs/op-coverage.md."""

import pytest
from support.op_db import second_order, variations
from support.op_db.entries import entries
from support.op_db.expected import check
from support.op_db.outcomes import SWEEP, row_of
from support.op_db.page import store


@pytest.mark.parametrize("name", entries())
def test_on_dtensors_it_gives_what_it_gives_in_one_process(name):
    row = row_of(name, SWEEP, beside_torch=True)
    store(row)
    check(row)


@pytest.mark.parametrize("name", second_order.names())
def test_its_second_gradients_are_those_of_one_process_where_pieces_are_empty(name):
    assert not list(second_order.problems(entries()[name], samples=6, most=6))


@pytest.mark.parametrize("name", entries())
def test_it_takes_inputs_that_are_not_contiguous(name):
    assert not list(variations.in_other_memory(entries()[name], samples=4, most=4))


@pytest.mark.parametrize("name", entries())
def test_it_takes_plain_tensors_at_any_position_beside_dtensors(name):
    assert not list(variations.with_plain_tensors(entries()[name], samples=4, most=4))
