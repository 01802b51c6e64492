"""Random specs: chunks in any order, and any boxes that make up a tensor."""

from hypothesis import strategies as st

from shardwise.sharded import EnumerableShardingSpec
from support.sharded_tensors import chunks, shard_at


@st.composite
def tilings(draw, size, ranks):
    """Draw boxes that tile a tensor: some empty, several on a rank, none on another."""
    boxes = [((0,) * len(size), tuple(size))]
    for _ in range(draw(st.integers(0, 6))):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(size) - 1))
        at = draw(st.integers(0, sizes[dim]))
        for start, length in ((0, at), (at, sizes[dim] - at)):
            place, extent = list(offsets), list(sizes)
            place[dim], extent[dim] = place[dim] + start, length
            boxes.append((tuple(place), tuple(extent)))
    owners = st.integers(0, ranks - 1)
    return EnumerableShardingSpec([shard_at(*box, draw(owners)) for box in boxes])


@st.composite
def specs(draw, size, ranks):
    """Draw chunks in any order, or any boxes."""
    if draw(st.booleans()):
        owners = st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks + 1)
        return chunks(draw(st.integers(-len(size), len(size) - 1)), *draw(owners))
    return draw(tilings(size, ranks))


@st.composite
def journeys(draw):
    """Draw a size, a number of ranks, and specs to reshard through."""
    ranks = draw(st.integers(2, 4))
    size = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    return ranks, size, draw(st.lists(specs(size, ranks), min_size=2, max_size=4))
