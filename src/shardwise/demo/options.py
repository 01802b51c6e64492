"""What can be varied in the demo, and what is wrong with it."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.examples.llama import Config
from shardwise.examples.text import VOCABULARY


class UsageError(ShardwiseError, ValueError):
    """An option that cannot be."""


@dataclass(frozen=True)
class Size:
    """A model and the batches it is trained on."""

    model: Config
    batch: int
    length: int
    learning_rate: float = 1e-3

    @property
    def tokens(self) -> int:
        """How many tokens a step sees."""
        return self.batch * self.length


def _size(width: int, layers: int, heads: int, kv_heads: int, batch: int, length: int) -> Size:
    hidden = width * 8 // 3 | 1  # odd: two ranks cannot halve it, and need not
    return Size(
        Config(VOCABULARY, width, layers, heads, kv_heads, hidden, longest=length), batch, length
    )


MODELS = {
    "tiny": _size(64, 2, heads=4, kv_heads=2, batch=4, length=64),
    "small": _size(128, 3, heads=4, kv_heads=2, batch=8, length=128),
    "medium": _size(256, 6, heads=8, kv_heads=4, batch=8, length=256),
}


@dataclass(frozen=True)
class Options:
    """How the demo runs.

    Arguments:
        mesh: how many ranks along the axes dp and tp.
        steps: of training.
        model: one of `MODELS`.
        output: the folder for the plot and the weights.
        seed: of the weights and of the choice of text.
        sequence_parallel: whether the sequence is split over tp between the blocks.
    """

    mesh: tuple[int, int] = (2, 2)
    steps: int = 180
    model: str = "small"
    output: Path = Path("demo-output")
    seed: int = 0
    sequence_parallel: bool = False

    @property
    def ranks(self) -> int:
        """How many processes."""
        return math.prod(self.mesh)

    @property
    def size(self) -> Size:
        """The model and its batches."""
        return MODELS[self.model]

    @property
    def mesh_shown(self) -> str:
        """Such as `2x2`."""
        return "x".join(map(str, self.mesh))


def checked(
    *,
    ranks: int | None = None,
    mesh: tuple[int, ...] | None = None,
    steps: int = Options.steps,
    model: str = Options.model,
    output: str | Path = Options.output,
    seed: int = Options.seed,
    sequence_parallel: bool = False,
) -> Options:
    """Options that can run, or an error that says which cannot, and why.

    Arguments:
        ranks: how many processes; by default as many as the mesh has, or 4.
        mesh: sizes of the axes dp and tp; by default as square as `ranks` allows.
    """
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks: expected 1 or more, got {ranks}")
    if mesh is None:
        mesh = Options.mesh if ranks is None else _squarest(ranks)
    if len(mesh) != 2:
        shown = "x".join(map(str, mesh))
        raise UsageError(
            f"--mesh: expected two sizes, data x tensor parallel, such as 2x2; got {shown}"
        )
    data, tensor = mesh
    if ranks is not None and data * tensor != ranks:
        raise UsageError(
            f"--mesh: {data}x{tensor} has {data * tensor} ranks, but --ranks is {ranks}; "
            "leave one of the two out"
        )
    if steps < 1:
        raise UsageError(f"--steps: expected 1 or more, got {steps}")
    if model not in MODELS:
        raise UsageError(f"--model: expected one of {', '.join(MODELS)}; got {model!r}")
    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed: expected a number from 0 to 2**63 - 1, got {seed}")
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(f"--output: cannot write to {str(folder)!r}: {error.strerror}") from error
    return Options((data, tensor), steps, model, folder, seed, sequence_parallel)


def _squarest(ranks: int) -> tuple[int, int]:
    tensor = next(size for size in range(math.isqrt(ranks), 0, -1) if ranks % size == 0)
    return ranks // tensor, tensor
