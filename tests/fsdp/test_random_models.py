"""Random small models, sharded and trained in random ways, end up as in one process."""

from dataclasses import replace

from hypothesis import example, given, settings
from support.fsdp_random import Case, cases, check_case

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
UNUSED = replace(
    SIMPLE,
    kinds=(("linear", 3), ("two matrices", 3), ("linear", 5), ("gain", 5)),
    calls=(1, 0, 1, 0),
    checkpointed=(None,) * 4,
    groups=(((2, 3), None),),
    mesh=(2, 2),
    limits=(1 << 20, 1 << 20, 64),
)
TIED_APART = replace(
    SIMPLE,
    kinds=(("linear", 3), ("linear", 3)),
    ties=((0, 1),),
    groups=(((0,), None), ((1,), None)),
    root="none",
    passes=2,
)
ALONE = replace(
    SIMPLE, kinds=(("linear", 4), ("linear", 6)), groups=(((0,), True),), limits=(8, 64, 8)
)


@settings(max_examples=60)
@example(replace(TWICE, groups=(((0,), None),)))  # computed anew after its backward
@example(replace(TWICE, is_replicated=True))  # ... after all gradients have come
@example(LAST_TWICE)  # gradients come a second time before they were sent
@example(replace(LAST_TWICE, limits=(1 << 20, 64, 8)))  # ... and travel by themselves
@example(ALONE)  # every parameter travels by itself
@example(replace(ALONE, width=6, kinds=(("linear", 6), ("linear", 3)), mesh=(3,)))
@example(UNUSED)  # ... in an order of their own
@example(TIED_APART)  # groups that only a parameter connects
@example(replace(SIMPLE, kinds=(("transposed", 4), ("linear", 2))))  # not contiguous, but even
@given(cases())
def test_a_random_model_sharded_at_random_trains_as_in_one_process(case):
    check_case(case)
