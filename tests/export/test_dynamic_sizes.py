"""Numbers in a program that depend on dynamic sizes are right at all sizes."""

import pytest
import torch
from torch import fx, nn
from torch.export import Dim

import shardwise as sw
from shardwise.export import ExportError, shard_program
from shardwise.export.dynamic_sizes import (
    FEW_SAMPLES,
    PolynomialSolver,
    Symbol,
    record_at_samples,
    sample_sizes,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")

NUMBERS = {
    "a square": lambda a, b, c: a * a + 1,
    "a product": lambda a, b, c: 3 * a * c,
    "one size": lambda a, b, c: b + 7,
    "a sum": lambda a, b, c: 2 * a + b,
    "all": lambda a, b, c: a * a + a * b + 2 * b * c + c,
    "halves": lambda a, b, c: (a * a + a) // 2 + b,
}


class Counting(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x):
        return torch.arange(self.number(*x.shape))


def made(number):
    shapes = ({at: Dim(f"dim{at}", max=900) for at in range(3)},)
    program = torch.export.export(Counting(number), (torch.ones(4, 6, 5),), dynamic_shapes=shapes)
    return shard_program(program, sw.DeviceMesh.abstract((2,), ("tp",)), {}).module()


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_right_at_sizes_that_were_not_recorded(name):
    number = NUMBERS[name]
    program = made(number)
    for sizes in ((4, 6, 5), (9, 2, 31), (3, 50, 2)):
        assert len(program(torch.ones(sizes))) == number(*sizes)


@pytest.mark.parametrize("parts", [2, 3, 8, 32])
@pytest.mark.parametrize("example", range(64, 97, 8))
def test_a_part_of_a_size_is_no_polynomial(parts, example):
    symbols = [Symbol(name, name, example, 2, 900) for name in ("a", "b")]
    at = sample_sizes(symbols)
    for name in ("a", "b"):
        parted = tuple(-(-each[name] // parts) for each in at)
        assert len(set(parted[:FEW_SAMPLES])) > 1
        for count, is_short in ((FEW_SAMPLES, True), (len(at), False)):
            with pytest.raises(ExportError, match="is no polynomial in the dynamic sizes"):
                PolynomialSolver(symbols, at[:count], is_short).polynomial(
                    parted[:count], fx.Graph().output(None)
                )


def test_the_error_says_where_the_operators_begin_to_depend_on_a_size():
    def record(at):
        (size,) = at.values()
        first, second = (torch.neg, torch.exp) if size > 3 else (torch.exp, lambda x: x)
        return fx.symbolic_trace(lambda x: second(first(torch.relu(x))))

    with pytest.raises(ExportError, match=r"number of operators from exp.* on, which is .* or .*"):
        record_at_samples(record, [Symbol("s0", "s0", 3, 2, 64)])
