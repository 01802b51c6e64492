"""Random small models, sharded and trained in random ways, end up as in one process."""

from dataclasses import replace

from fsdp_random import Case, cases, check_case
from hypothesis import example, given, settings

SIMPLE = Case(
    width=3,
    kinds=(("linear", 3), ("linear", 2)),
    calls=(1, 1),
    checkpointed=(None, None),
    ties=(),
    frozen=frozenset(),
    placements=(0,) * 5,
    groups=(),
    root=None,
    mesh=(2,),
    is_replicated=False,
    microbatches=1,
    reduces_once=False,
    evaluates=False,
)
TWICE = replace(SIMPLE, calls=(2, 1), checkpointed=(True, None))
LAST_TWICE = replace(
    SIMPLE,
    kinds=(("linear", 3), ("linear", 3)),
    calls=(1, 2),
    checkpointed=(None, True),
    groups=(((0,), None),),
)
TIED_APART = replace(
    SIMPLE,
    kinds=(("linear", 3), ("linear", 3)),
    ties=((0, 1),),
    groups=(((0,), None), ((1,), None)),
    root="none",
    passes=2,
)


@settings(max_examples=60)
@example(replace(TWICE, groups=(((0,), None),)))  # computed anew after its backward
@example(replace(TWICE, is_replicated=True))  # ... after all gradients have come
@example(LAST_TWICE)  # gradients come a second time before they were sent
@example(replace(LAST_TWICE, limits=(1 << 20, 64, 8)))  # ... and travel by themselves
@example(TIED_APART)  # groups that only a parameter connects
@example(replace(SIMPLE, kinds=(("transposed", 4), ("linear", 2))))  # not contiguous, but even
@given(cases())
def test_a_random_model_sharded_at_random_trains_as_in_one_process(case):
    check_case(case)
