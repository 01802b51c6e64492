"""As tests/models/test_random_programs.py, many more and longer ones."""

import warnings

from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_programs import MESHES, check_program, programs


@settings(max_examples=2000)
@given(programs(12), st.sampled_from(MESHES), st.lists(st.integers(0, 60), min_size=1, max_size=12))
def test_a_random_program_is_that_of_one_process(program, mesh_shape, choices):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_program(program, mesh_shape, choices)
