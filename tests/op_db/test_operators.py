"""Every operator of op_db on DTensors: a part of each. `make sweep` runs much more of the same."""

import pytest
from support.op_db.entries import entries
from support.op_db.expected import check
from support.op_db.outcomes import PART, row_of


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", entries())
def test_on_dtensors_it_gives_what_it_gives_in_one_process(name):
    check(row_of(name, PART))
