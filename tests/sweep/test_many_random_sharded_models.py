"""As tests/fsdp/test_random_models.py, many more. For `make sweep`."""

from hypothesis import given, settings
from support.fsdp_random import cases, check_case


@settings(max_examples=2000)
@given(cases())
def test_a_random_model_sharded_at_random_trains_as_in_one_process(case):
    check_case(case)
