"""Every operator of op_db on DTensors, beside torch's; what is found makes docs/op-coverage.md."""

import pytest
from support.op_db.entries import entries
from support.op_db.expected import check
from support.op_db.outcomes import SWEEP, row_of
from support.op_db.page import store


@pytest.mark.parametrize("name", entries())
def test_on_dtensors_it_gives_what_it_gives_in_one_process(name):
    row = row_of(name, SWEEP, beside_torch=True)
    store(row)
    check(row)
