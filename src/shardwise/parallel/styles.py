"""The styles of tensor parallelism, with torch's names and arguments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import nn

from shardwise.mesh import DeviceMesh
from shardwise.parallel.containers import on_tensors
from shardwise.parallel.names import PlanError
from shardwise.parallel.placing import slots
from shardwise.parallel.style import WHOLE, ModuleStyle, entrance, leaving, one_placement
from shardwise.placement import Placement, Replicate, Shard
from shardwise.tensor import DTensor

Pieces = int | Sequence[int] | None


def kind_of(module: nn.Module) -> str | None:
    """What its weight means: (out, in) of a linear map, (in, out), or rows of an embedding."""
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # GPT-2's, of transformers
        return "transposed"
    return None


# Which dim of the weight has the outputs, and which the inputs.
_OUT_DIM: dict[str | None, int] = {"linear": 0, "transposed": 1, "embedding": 1}
_IN_DIM: dict[str | None, int] = {"linear": 1, "transposed": 0, "embedding": 0}


def _features(module: nn.Module) -> int | None:
    """The size of the last dim of its input, where the weight tells it."""
    kind = kind_of(module)
    weight: Any = module.weight
    return None if kind == "embedding" else int(weight.shape[_IN_DIM[kind]])


def _given(**split: Any) -> dict[str, Any]:
    """What is asked for beside the usual split; refused at once if it cannot be."""
    asked = {name: each for name, each in split.items() if each not in (None, 1)}
    Shard(0, **asked)
    return asked


class Projection(ModuleStyle):
    """What column- and row-wise parallelism have in common."""

    input_layouts: tuple[Placement | None]
    output_layouts: tuple[Placement | None]
    use_local_output: bool
    _split: dict[str, Any]

    def check(self, path: str, module: nn.Module) -> None:
        if kind_of(module) is None:
            raise PlanError(
                f"{path or 'the module'}: {type(self).__name__} fits nn.Linear, nn.Embedding and "
                f"transformers' Conv1D, and this is {type(module).__name__}; name the projections "
                "in it, or use shard_module, which lays out any parameter"
            )

    @abstractmethod
    def of_kind(self, kind: str | None) -> dict[str, Placement]:
        """How weight and bias of such a module lie (see `kind_of`)."""

    @abstractmethod
    def wanted(self, kind: str | None) -> Placement:
        """How such a module needs its input."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        # Parameters that a subclass may have added are whole.
        own: dict[str, Placement] = {slot.path: WHOLE for slot in slots(module)}
        known = self.of_kind(kind_of(module))
        return own | {name: each for name, each in known.items() if name in own}

    def hooks(self, path: str, module: nn.Module, mesh: DeviceMesh) -> None:
        what, wanted = self.shown(path), self.wanted(kind_of(module))
        given = self.input_layouts[0] or wanted
        enter = entrance(f"input of {what}", module, mesh, given, wanted, _features(module))
        leave = leaving(f"output of {what}", self.output_layouts[0], self.use_local_output)
        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(lambda module, args, output: leave(output))

    def __repr__(self) -> str:
        extra = "".join(f", {name}={each}" for name, each in self._split.items())
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, output_layouts="
            f"{self.output_layouts}, use_local_output={self.use_local_output}{extra})"
        )


class ColwiseParallel(Projection):
    """Split the outputs of a Linear or Embedding over the ranks.

    Every rank gets the whole input and makes its columns of the output. Backward, the gradient of
    the input is summed over the ranks: one all-reduce, shared by modules with the same input.

    Arguments:
        input_layouts: how a plain input lies: `Replicate()` by default.
        output_layouts: how the output should lie: split along its last dim by default.
        use_local_output: whether to return this rank's piece, rather than a DTensor.
        pieces: of a fused projection, as of queries, keys and values: how many equal pieces, or
            pieces of which lengths, the outputs consist of; each is split by itself.
        unit: what is not to be torn, such as the size of a head; one for all pieces, or for each.

    Example:
        >>> plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        >>> parallelize_module(mlp, mesh["tp"], plan)
        >>> qkv = ColwiseParallel(pieces=(512, 128, 128), unit=64)  # heads of 64: 8, 2 and 2
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        pieces: Pieces = None,
        unit: int | Sequence[int] = 1,
    ) -> None:
        self.input_layouts = (one_placement(input_layouts, "input_layouts") or Replicate(),)
        self.output_layouts = (one_placement(output_layouts, "output_layouts"),)
        self.use_local_output = use_local_output
        self._split = _given(pieces=pieces, unit=unit)

    def of_kind(self, kind: str | None) -> dict[str, Placement]:
        weight = Shard(_OUT_DIM[kind], **self._split)
        return {"weight": weight, "bias": Shard(0, **self._split)}

    def wanted(self, kind: str | None) -> Placement:
        return WHOLE


class RowwiseParallel(Projection):
    """Split the inputs of a Linear, or the rows of an Embedding, over the ranks.

    Every rank has its columns of the input and makes a contribution to the output, which an
    all-reduce sums (a reduce-scatter, if it is to be split). Backward: nothing (an all-gather).

    Arguments:
        input_layouts: how a plain input lies: split along its last dim by default; the indices for
            an Embedding are whole by default.
        output_layouts: how the output should lie: `Replicate()` by default.
        use_local_output: whether to return this rank's piece, rather than a DTensor.
        unit: what is not to be torn, such as the size of a head; as in the `ColwiseParallel`
            that makes the input.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        unit: int = 1,
    ) -> None:
        self.input_layouts = (one_placement(input_layouts, "input_layouts"),)
        self.output_layouts = (one_placement(output_layouts, "output_layouts") or Replicate(),)
        self.use_local_output = use_local_output
        self._split = _given(unit=unit)

    def of_kind(self, kind: str | None) -> dict[str, Placement]:
        return {"weight": Shard(_IN_DIM[kind], **self._split), "bias": WHOLE}

    def wanted(self, kind: str | None) -> Placement:
        return WHOLE if kind == "embedding" else Shard(-1, **self._split)


class SequenceParallel(ModuleStyle):
    """Run a module that works on each position by itself, as norms do, on split sequences.

    Its parameters are whole on every rank and get the sum of the ranks' gradients; frozen ones stay
    frozen. Nothing travels forward, if the input is split along the sequence already.

    Arguments:
        sequence_dim: the dim of the input that is split.
        use_local_output: whether to return this rank's piece, rather than a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        return {slot.path: WHOLE for slot in slots(module)}

    def hooks(self, path: str, module: nn.Module, mesh: DeviceMesh) -> None:
        what = self.shown(path)
        (split,) = self.sequence_sharding
        enter = entrance(f"input of {what}", module, mesh, split, split)
        leave = leaving(f"output of {what}", None, self.use_local_output)
        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(
            lambda module, args, output: on_tensors(
                output, lambda each: leave(each) if isinstance(each, DTensor) else each
            )
        )

    def __repr__(self) -> str:
        (split,) = self.sequence_sharding
        return (
            f"SequenceParallel(sequence_dim={split.dim}, use_local_output={self.use_local_output})"
        )
