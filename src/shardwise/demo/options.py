"""The options of the demo, their checks, and the modes of parallelism."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from shardwise.core.errors import ShardwiseError
from shardwise.examples.llama import Config
from shardwise.examples.train_llama import VOCABULARY


class UsageError(ShardwiseError, ValueError):
    """An option with a wrong value."""


class Splits(Enum):
    """What is split over the ranks along a mesh axis."""

    BATCH = "parts of the batch"
    MODEL = "parts of the model"
    PARAMETERS = "parts of the batch and, at rest, of the parameters"


@dataclass(frozen=True)
class Mode:
    """A mode of parallelism.

    Arguments:
        axes: the axes of the mesh, and what each splits.
    """

    axes: dict[str, Splits]

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether ranks compute with parts of the model."""
        return Splits.MODEL in self.axes.values()

    @property
    def fed_axes(self) -> tuple[str, ...]:
        """The axes along which each rank feeds the model its own part of a batch. If there are
        none, all ranks feed the whole batch, which the plan splits."""
        if Splits.PARAMETERS not in self.axes.values():
            return ()
        return tuple(name for name, splits in self.axes.items() if splits is not Splits.MODEL)

    @property
    def holding_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold different parts of the parameters."""
        return tuple(name for name, splits in self.axes.items() if splits is not Splits.BATCH)


MODES = {
    "dp+tp": Mode({"dp": Splits.BATCH, "tp": Splits.MODEL}),
    "fsdp": Mode({"dp": Splits.PARAMETERS}),
    "hsdp": Mode({"replicate": Splits.BATCH, "shard": Splits.PARAMETERS}),
    "tp": Mode({"tp": Splits.MODEL}),
    "fsdp+tp": Mode({"dp": Splits.PARAMETERS, "tp": Splits.MODEL}),
}


@dataclass(frozen=True)
class ModelSize:
    """A model and the size of its batches."""

    model: Config
    batch: int
    length: int
    learning_rate: float = 1e-3

    @property
    def tokens(self) -> int:
        """The number of tokens of a step."""
        return self.batch * self.length


def _size(width: int, layers: int, heads: int, kv_heads: int, batch: int, length: int) -> ModelSize:
    """Return a size with the hidden width that follows from the model's width."""
    hidden = width * 8 // 3 | 1  # odd, as splits need not be even
    return ModelSize(
        Config(VOCABULARY, width, layers, heads, kv_heads, hidden, longest=length), batch, length
    )


MODELS = {
    "tiny": _size(64, 2, heads=4, kv_heads=2, batch=4, length=64),
    "small": _size(128, 3, heads=4, kv_heads=2, batch=8, length=128),
    "medium": _size(256, 6, heads=8, kv_heads=4, batch=8, length=256),
}


@dataclass(frozen=True)
class Options:
    """The options of a run of the demo.

    Arguments:
        mode: one of `MODES`: how the model is distributed over the mesh.
        mesh: the number of ranks along each of the mode's axes.
        steps: the number of training steps.
        model: one of `MODELS`.
        output: the folder for the plot and the weights.
        seed: the seed of the weights and of the choice of text.
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
        """The number of processes."""
        return math.prod(self.mesh)

    @property
    def parallelism(self) -> Mode:
        """The mode that `mode` names."""
        return MODES[self.mode]

    @property
    def size(self) -> ModelSize:
        """The model and its batches."""
        return MODELS[self.model]

    @property
    def label(self) -> str:
        """The mesh, and the mode unless it is the default: `2x2` or `hsdp 2x2`."""
        mesh = "x".join(map(str, self.mesh))
        return mesh if self.mode == Options.mode else f"{self.mode} {mesh}"


def check_options(
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
    """Return options that can run, or raise an error that says which is wrong, and why.

    Arguments:
        ranks: the number of processes; by default that of the mesh, or 4.
        mesh: sizes of the mode's axes; by default chosen by `ranks`.
    """
    if mode not in MODES:
        raise UsageError(f"--mode: expected one of {', '.join(MODES)}; got {mode!r}")
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks: expected 1 or more, got {ranks}")
    mesh = _default_mesh(mode, ranks) if mesh is None else _check_mesh(mesh, mode, ranks)
    if sequence_parallel and not MODES[mode].is_tensor_parallel:
        raise UsageError(
            f"--sequence-parallel: expected a mode with tensor parallelism, whose ranks split the "
            f"sequence; got --mode {mode}"
        )
    if steps < 1:
        raise UsageError(f"--steps: expected 1 or more, got {steps}")
    if model not in MODELS:
        raise UsageError(f"--model: expected one of {', '.join(MODELS)}; got {model!r}")
    _check_batch(mode, mesh, MODELS[model].batch)
    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed: expected a number from 0 to 2**63 - 1, got {seed}")
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(f"--output: cannot write to {str(folder)!r}: {error.strerror}") from error
    return Options(mode, mesh, steps, model, folder, seed, sequence_parallel)


def _default_mesh(mode: str, ranks: int | None) -> tuple[int, ...]:
    """Return the mesh of a mode for a number of ranks."""
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


def _check_mesh(mesh: tuple[int, ...], mode: str, ranks: int | None) -> tuple[int, ...]:
    """Return a mesh that fits the mode and the number of ranks."""
    text = "x".join(map(str, mesh))
    axes = tuple(MODES[mode].axes)
    if len(mesh) != len(axes):
        example = "x".join(str(2 if len(axes) > 1 else 4) for _ in axes)
        count = "one size" if len(axes) == 1 else "two sizes"
        raise UsageError(
            f"--mesh: expected {count}, {' x '.join(axes)}, such as {example}, for --mode {mode}; "
            f"got {text}"
        )
    if ranks is not None and math.prod(mesh) != ranks:
        raise UsageError(
            f"--mesh: {text} has {math.prod(mesh)} ranks, but --ranks is {ranks}; "
            "leave one of the two out"
        )
    return mesh


def _check_batch(mode: str, mesh: tuple[int, ...], batch: int) -> None:
    """Refuse a batch that data-parallel ranks cannot split equally: gradients are averaged over
    them."""
    sizes = dict(zip(MODES[mode].axes, mesh, strict=True))
    parts = math.prod(sizes[axis] for axis in MODES[mode].fed_axes)
    if batch % parts:
        raise UsageError(
            f"--mode {mode}: the {batch} sequences of a batch cannot be shared out equally among "
            f"{parts} data-parallel ranks; expected a number of them that divides {batch}"
        )


def _squarest(ranks: int) -> tuple[int, int]:
    """Return the two factors of a number of ranks that are nearest to each other, the larger
    first."""
    tensor = next(size for size in range(math.isqrt(ranks), 0, -1) if ranks % size == 0)
    return ranks // tensor, tensor
