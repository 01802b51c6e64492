"""As tests/test_fsdp_random.py, many more. For `make sweep`."""

from fsdp_random import cases, check_case
from hypothesis import given, settings


@settings(max_examples=2000)
@given(cases())
def test_a_random_model_sharded_at_random_trains_as_in_one_process(case):
    check_case(case)
