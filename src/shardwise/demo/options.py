"""What can be varied in the demo, and what is wrong with it."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shardwise.demo.modes import MODES, Mode
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
        mode: one of `MODES`: how the model is spread over the mesh.
        mesh: how many ranks along each of the mode's axes.
        steps: of training.
        model: one of `MODELS`.
        output: the folder for the plot and the weights.
        seed: of the weights and of the choice of text.
        sequence_parallel: whether the sequence is split over tp between the blocks.
    """

    mode: str = "dp+tp"
    mesh: tuple[int, ...] = (2, 2)
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
    def way(self) -> Mode:
        """What the mode is."""
        return MODES[self.mode]

    @property
    def size(self) -> Size:
        """The model and its batches."""
        return MODELS[self.model]

    @property
    def shown(self) -> str:
        """Such as `2x2`, or `hsdp 2x2`."""
        mesh = "x".join(map(str, self.mesh))
        return mesh if self.mode == Options.mode else f"{self.mode} {mesh}"


def checked(
    *,
    mode: str = Options.mode,
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
        mesh: sizes of the mode's axes; by default what `ranks` allows.
    """
    if mode not in MODES:
        raise UsageError(f"--mode: expected one of {', '.join(MODES)}; got {mode!r}")
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks: expected 1 or more, got {ranks}")
    mesh = _usual_mesh(mode, ranks) if mesh is None else _checked_mesh(mesh, mode, ranks)
    if sequence_parallel and not MODES[mode].is_tensor_parallel:
        raise UsageError(
            f"--sequence-parallel: expected a mode with tensor parallelism, whose ranks split the "
            f"sequence; got --mode {mode}"
        )
    if steps < 1:
        raise UsageError(f"--steps: expected 1 or more, got {steps}")
    if model not in MODELS:
        raise UsageError(f"--model: expected one of {', '.join(MODELS)}; got {model!r}")
    _check_parts(mode, mesh, MODELS[model].batch)
    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed: expected a number from 0 to 2**63 - 1, got {seed}")
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(f"--output: cannot write to {str(folder)!r}: {error.strerror}") from error
    return Options(mode, mesh, steps, model, folder, seed, sequence_parallel)


def _usual_mesh(mode: str, ranks: int | None) -> tuple[int, ...]:
    """The mesh of a mode if none was asked for."""
    ranks = math.prod(Options.mesh) if ranks is None else ranks
    if len(MODES[mode].axes) == 1:
        return (ranks,)
    if mode != "hsdp":
        return _squarest(ranks)
    if ranks % 2:
        raise UsageError(
            f"--ranks: expected an even number for two replicas of --mode hsdp, got {ranks}; for "
            "other numbers of replicas give --mesh, replicas x shards"
        )
    return 2, ranks // 2


def _checked_mesh(mesh: tuple[int, ...], mode: str, ranks: int | None) -> tuple[int, ...]:
    shown = "x".join(map(str, mesh))
    axes = tuple(MODES[mode].axes)
    if len(mesh) != len(axes):
        example = "x".join(str(2 if len(axes) > 1 else 4) for _ in axes)
        count = "one size" if len(axes) == 1 else "two sizes"
        raise UsageError(
            f"--mesh: expected {count}, {' x '.join(axes)}, such as {example}, for --mode {mode}; "
            f"got {shown}"
        )
    if ranks is not None and math.prod(mesh) != ranks:
        raise UsageError(
            f"--mesh: {shown} has {math.prod(mesh)} ranks, but --ranks is {ranks}; "
            "leave one of the two out"
        )
    return mesh


def _check_parts(mode: str, mesh: tuple[int, ...], batch: int) -> None:
    """Ranks that feed parts of a batch must feed equal ones: gradients are averaged over them."""
    way = MODES[mode]
    sizes = dict(zip(way.axes, mesh, strict=True))
    parts = math.prod(sizes[axis] for axis in way.fed_axes)
    if batch % parts:
        raise UsageError(
            f"--mode {mode}: the {batch} sequences of a batch cannot be shared out equally among "
            f"{parts} data-parallel ranks; expected a number of them that divides {batch}"
        )


def _squarest(ranks: int) -> tuple[int, int]:
    tensor = next(size for size in range(math.isqrt(ranks), 0, -1) if ranks % size == 0)
    return ranks // tensor, tensor
