"""What code that knows nothing of shardwise may do with a DTensor: the list of calls.

`CALLS` is the list; docs/other-code.md shows it, and tests/dtensor/test_other_code.py runs it. To
add a call, add an entry and paste what `PYTHONPATH=tests python -m support.other_code` prints into
the page.

The outcome of a call on a DTensor is one of:
- "right": what one process gets for the global tensor, on every rank.
- "refused: ...": a ShardwiseError whose message contains these words, on every rank.
- "as torch": the error that torch raises for a plain tensor.
- "layout and piece": text that shows the layout and this rank's piece.
- "the piece": what one process gets for this rank's piece, silently. Torch has no hook there.
"""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import io
import json
import logging
import math
import multiprocessing.reduction
import operator
import pickle
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as helpers
from torch.utils import data, dlpack

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.core.errors import ShardwiseError

NAMES = {
    "copy": copy.copy,
    "ctypes": ctypes,
    "data": data,
    "deepcopy": copy.deepcopy,
    "dlpack": dlpack,
    "json": json,
    "math": math,
    "multiprocessing": multiprocessing,
    "nn": nn,
    "np": np,
    "operator": operator,
    "pickle": pickle,
    "struct": struct,
    "torch": torch,
}
"""What the code of an entry may use."""

RIGHT = "right"
AS_TORCH = "as torch"
TEXT = "layout and piece"
PIECE = "the piece"
REFUSED = "refused: this rank's piece"
"""The words of the refusal that `shardwise.dtensor.properties` raises."""


@dataclass(frozen=True)
class Call:
    """One call of other code, and what becomes of it."""

    code: str
    """The call as the page shows it. Python code in `x`, if there is no `run`."""
    group: str
    """The heading of the page under which it stands."""
    whole: str = RIGHT
    split: str = RIGHT
    pending: str = RIGHT
    run: Callable[[torch.Tensor], Any] | None = None
    """Makes the call and returns what it gave, if `code` alone does not."""
    needs: str = "torch"
    """The package that it is about."""
    is_real_only: bool = False
    """Whether it needs process groups, which simulated ranks do not have."""

    def __call__(self, x: torch.Tensor) -> Any:
        return eval(self.code, {**NAMES, "x": x}) if self.run is None else self.run(x)

    def outcome(self, kind: str) -> str:
        """Return what happens to a tensor of this kind: whole, split or pending."""
        return str(getattr(self, kind))

    @property
    def row(self) -> str:
        """The row of the page's table."""
        return f"| `{self.code}` | {self.whole} | {self.split} | {self.pending} |"


# ---- helpers of the entries


def memory_at(address: int, x: torch.Tensor) -> list[float]:
    """Read as many floats as the tensor says to have."""
    return list((ctypes.c_float * x.numel()).from_address(address)) if address else []


def with_file(write: Callable[[str], Any], read: Callable[[str], Any]) -> Any:
    """Write a file and return what is read from it."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "file.npy")
        write(path)
        return read(path)


def with_buffer(write: Callable[[Any], Any], read: Callable[[Any], Any]) -> Any:
    """Write to memory and return what is read from it."""
    buffer = io.BytesIO()
    write(buffer)
    buffer.seek(0)
    return read(buffer)


def logged(x: object, text: str) -> str:
    """Return what a log handler writes."""
    record = logging.LogRecord("name", logging.INFO, "", 0, text, (x,), None)
    return logging.Formatter().format(record)


def printed(x: object) -> str:
    out = io.StringIO()
    print(x, file=out)
    return out.getvalue()


def safetensors_file(x: torch.Tensor) -> Any:
    from safetensors.torch import load_file, save_file

    return with_file(lambda path: save_file({"w": x}, path), load_file)


def safetensors_bytes(x: torch.Tensor) -> Any:
    from safetensors.torch import load, save

    return load(save({"w": x}))


def safetensors_model(x: torch.Tensor) -> Any:
    from safetensors.torch import load_file, save_model

    return with_file(lambda path: save_model(Holder(x), path), load_file)


def loaded_model(x: torch.Tensor) -> Any:
    from safetensors.torch import load_model, save_file

    model = Holder(x.clone())

    def load(path: str) -> torch.Tensor:
        load_model(model, path)
        return model.weight

    return with_file(lambda path: save_file({"weight": torch.ones(3, 2)}, path), load)


def loaded_file(x: torch.Tensor) -> Any:
    from safetensors.torch import load_file, save_file

    model = Holder(x.clone())

    def load(path: str) -> torch.Tensor:
        model.load_state_dict(load_file(path))
        return model.weight

    return with_file(lambda path: save_file({"weight": torch.ones(3, 2)}, path), load)


FULL = helpers.StateDictOptions(full_state_dict=True)


def gathered_state(x: torch.Tensor) -> Any:
    found = helpers.get_model_state_dict(Holder(x), options=FULL)["weight"]
    assert type(found) is torch.Tensor
    return found


def offloaded_state(x: torch.Tensor) -> Any:
    options = helpers.StateDictOptions(cpu_offload=True)
    return helpers.get_model_state_dict(Holder(x), options=options)


def distributed_state(x: torch.Tensor) -> Any:
    model = Holder(x.clone())
    helpers.set_model_state_dict(model, {"weight": VALUES + 1}, options=FULL)
    assert type(model.weight) is type(x)
    return model.weight


def trained(x: torch.Tensor) -> Any:
    """Return a parameter, whose gradient is x, and its optimizer after a step."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros_like(x))})
    optimizer = torch.optim.Adam(model.parameters())
    model.w.grad = x
    optimizer.step()
    return model, optimizer


def gathered_optimizer_state(x: torch.Tensor) -> Any:
    found = helpers.get_optimizer_state_dict(*trained(x), options=FULL)["state"]["w"]
    assert all(type(each) is torch.Tensor for each in found.values())
    return found


def distributed_optimizer_state(x: torch.Tensor) -> Any:
    model, optimizer = trained(x)
    state = helpers.get_optimizer_state_dict(model, optimizer, options=FULL)
    state["state"]["w"]["exp_avg"] = VALUES + 1
    helpers.set_optimizer_state_dict(model, optimizer, state, options=FULL)
    return optimizer.state_dict()["state"]


def assigned_data(x: torch.Tensor) -> torch.Tensor:
    plain = torch.ones(3, 2)
    plain.data = x
    return plain


def world() -> Any:
    return torch.distributed.group.WORLD


def outs(count: int = 4) -> list[torch.Tensor]:
    return [torch.zeros(3, 2) for _ in range(count)]


def after(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    """Make a call that writes to a tensor; return the tensor."""
    work = call(x)
    if work is not None:
        work.wait()
    return x


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    found = outs()
    dist.all_gather(found, x)
    return found


def gathered_like(x: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.zeros_like(x) for _ in range(4)]
    dist.all_gather(found, x)
    return found


def gathered_into(x: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(12, 2)
    dist.all_gather_into_tensor(found, x)
    return found


def gathered_objects(x: torch.Tensor) -> list[Any]:
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, {"x": x})
    return found


def reduced_and_scattered(x: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(3, 2)
    dist.reduce_scatter(found, [x] * 4)
    return found


def exchanged(x: torch.Tensor) -> list[torch.Tensor]:
    found = outs()
    dist.all_to_all(found, [x] * 4)
    return found


def exchanged_with_neighbour(x: torch.Tensor) -> torch.Tensor:
    found, peer = torch.zeros(3, 2), dist.get_rank() ^ 1
    operations = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, found, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return found


def functionally_reduced(x: torch.Tensor) -> torch.Tensor:
    from torch.distributed._functional_collectives import all_reduce

    return all_reduce(x, "sum", world()) + 0


def differentiably_gathered(x: torch.Tensor) -> Any:
    from torch.distributed.nn.functional import all_gather

    return all_gather(x)


def with_parameter(x: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 3, bias=False)
    model.weight = nn.Parameter(x)
    return model


def forward_of(wrap: Callable[[nn.Module], Any], x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = wrap(with_parameter(x))(torch.ones(1, 2))
    return result


def in_torchs_fsdp(x: torch.Tensor) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    device = torch.device("cpu")
    return forward_of(lambda model: FullyShardedDataParallel(model, device_id=device), x)


def torchs_mesh() -> Any:
    return torch.distributed.device_mesh.init_device_mesh("cpu", (4,))


def in_torchs_fully_shard(x: torch.Tensor) -> Any:
    from torch.distributed.fsdp import fully_shard

    return forward_of(lambda model: fully_shard(model, mesh=torchs_mesh()), x)


def as_torchs_dtensor(x: torch.Tensor) -> Any:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, torchs_mesh()).full_tensor()


def in_zero(x: torch.Tensor) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parameters = [nn.Parameter(x)]
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.5)
    parameters[0].sum().backward()
    optimizer.step()
    return parameters[0]


def vector_and_back(x: torch.Tensor) -> list[torch.Tensor]:
    parameters = [x, x.clone()]
    vector = nn.utils.parameters_to_vector(parameters)
    nn.utils.vector_to_parameters(2 * vector, parameters)
    return parameters


class Scripted(nn.Module):
    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return (a * a).sum()


def sum_of_squares(a: torch.Tensor) -> torch.Tensor:
    return (a * a).sum()


def scripted(x: torch.Tensor) -> Any:
    return torch.jit.script(sum_of_squares)(x)


def traced(x: torch.Tensor) -> Any:
    return torch.jit.trace(sum_of_squares, torch.ones(3, 2))(x)


def scripted_module(x: torch.Tensor) -> Any:
    return torch.jit.script(Scripted())(x)


def sum_of_list(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0].sum() + tensors[1].max()


class Holder(nn.Module):
    """A module with one buffer."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Buffer(x)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return a @ self.weight.t()


# ---- the list


def _calls() -> Iterator[Call]:
    group = "Pointers and storages"
    memory = {"split": REFUSED, "pending": REFUSED}
    for name in ("data_ptr", "const_data_ptr"):
        yield Call(
            f"x.{name}()",
            group,
            **memory,
            run=lambda x, name=name: memory_at(getattr(x, name)(), x),
        )
    yield Call(
        "x.untyped_storage()",
        group,
        **memory,
        run=lambda x: x.untyped_storage().tolist(),
    )
    yield Call("x.storage()", group, **memory, run=lambda x: x.storage().tolist())
    yield Call("x.untyped_storage().nbytes()", group, **memory)
    yield Call("torch.Tensor.untyped_storage(x).tolist()", group, **memory)
    yield Call("ctypes.c_float.from_address(x.data_ptr()).value", group, **memory)
    yield Call("torch.multiprocessing.reductions.reduce_tensor(x)[1][2][1]", group, **memory)
    yield Call("x.share_memory_()", group)
    yield Call("x.storage_offset()", group)
    yield Call("x.is_contiguous()", group)
    yield Call("x.element_size() * x.nelement()", group)

    group = "Array protocols"
    yield Call("x.numpy()", group)
    yield Call("np.asarray(x)", group)
    yield Call("np.array(x, dtype=np.float64)", group)
    yield Call("np.add(x, 1)", group)
    yield Call("np.stack([x, x])", group)
    yield Call("np.from_dlpack(x)", group)
    yield Call("torch.from_dlpack(x)", group)
    yield Call("dlpack.from_dlpack(dlpack.to_dlpack(x))", group)
    yield Call("torch.from_dlpack(torch.to_dlpack(x))", group)
    yield Call("getattr(x, '__cuda_array_interface__', None)", group)
    yield Call("x.__array_interface__", group, AS_TORCH, AS_TORCH, AS_TORCH)
    for code in ("memoryview(x)", "np.frombuffer(x)", "torch.frombuffer(x, dtype=torch.uint8)"):
        yield Call(code, group, AS_TORCH, AS_TORCH, AS_TORCH)

    group = "Constructors"
    for code in (
        "torch.tensor(x)",
        "torch.tensor(x, dtype=torch.float64)",
        "torch.tensor([x.sum(), 1.0])",
        "torch.as_tensor(x)",
        "torch.as_tensor(x, dtype=torch.float64)",
        "torch.asarray(x, copy=True)",
        "x.new_tensor(x)",
        "torch.ones(1).new_tensor(x)",
        "x.new(x)",
        "torch.full((2,), x.sum())",
        "torch.ones(2).new_full((2,), x.sum())",
        "torch.ones(2).fill_(x.sum())",
        "torch.arange(x.sum())",
        "torch.scalar_tensor(x.sum())",
        "torch.linspace(0, x.sum(), 3)",
        "torch.zeros(x.sum().long())",
        "torch.empty_like(x).shape",
        "nn.Buffer(x)",
    ):
        yield Call(code, group)
    for code in (
        "torch.Tensor(x)",
        "torch.ones(1).new(x)",
        "torch.ones(1).set_(x)",
        "x.as_subclass(torch.Tensor)",
        "torch.Tensor._make_subclass(torch.Tensor, x)",
        "torch.sparse_coo_tensor(torch.arange(3)[None], x)",
        "torch.sparse_bsr_tensor(torch.tensor([0, 3]), torch.arange(3), x[:, None])",
        "torch.nested.nested_tensor([x])",
        "torch.nested.as_nested_tensor([x, x])",
        "torch.nested.nested_tensor([x], layout=torch.jagged)",
    ):
        yield Call(code, group, split=REFUSED, pending=REFUSED)
    yield Call("torch.FloatTensor(x)", group, split=PIECE, pending=PIECE)
    yield Call("plain.data = x", group, split=PIECE, pending=PIECE, run=assigned_data)
    yield Call("torch.full_like(torch.ones(2), x.sum())", group, split=PIECE, pending=PIECE)
    yield Call("torch.ones(2).add(1, alpha=x.sum())", group, split=PIECE, pending=PIECE)

    group = "Python values"
    for code in (
        "x.tolist()",
        "x.sum().item()",
        "float(x.sum())",
        "int(x.sum())",
        "complex(x.sum())",
        "bool(x.sum())",
        "operator.index(x.sum().long())",
        "list(range(x.sum().long()))",
        "math.sqrt(x.sum())",
        "struct.pack('f', x.sum())",
        "1.0 in x",
        "[each.tolist() for each in x]",
        "len(x), x.shape, x.numel(), x.nbytes",
        "torch.equal(x, x)",
    ):
        yield Call(code, group)
    yield Call("bytes(x)", group, AS_TORCH, AS_TORCH, AS_TORCH)
    yield Call("hash(x)", group, run=lambda x: {x: 1}[x])

    group = "Text and logs"
    yield Call("f'{x.sum():.2f}'", group)
    yield Call("'%.1f' % x.sum()", group)
    yield Call("logging.info('loss %.2f', x.sum())", group, run=lambda x: logged(x.sum(), "%.2f"))
    yield Call("json.dumps(x.tolist())", group)
    yield Call("json.dumps(x)", group, AS_TORCH, AS_TORCH, AS_TORCH)
    text = {"whole": TEXT, "split": TEXT, "pending": TEXT}
    yield Call("repr(x)", group, **text)
    yield Call("str(x)", group, **text)
    yield Call("f'{x}'", group, **text)
    yield Call("print(x)", group, **text, run=printed)
    yield Call("logging.info('%s', x)", group, **text, run=lambda x: logged(x, "%s"))

    group = "Copies and pickles"
    for code in (
        "copy(x)",
        "deepcopy(x)",
        "pickle.loads(pickle.dumps(x))",
        "pickle.loads(multiprocessing.reduction.ForkingPickler.dumps(x))",
        "torch.ones(3, 2).to(x)",
        "torch.ones(3, 2).type_as(x)",
    ):
        yield Call(code, group)
    written = "refused: cannot write a DTensor's values into a plain tensor"
    yield Call("torch.ones(3, 2).copy_(x)", group, split=written)

    group = "Files"
    yield Call(
        "torch.save(x, f)", group, run=lambda x: with_buffer(lambda f: torch.save(x, f), torch.load)
    )
    yield Call("np.save(f, x)", group, run=lambda x: with_file(lambda f: np.save(f, x), np.load))
    yield Call(
        "np.savez(f, x=x)",
        group,
        run=lambda x: with_buffer(lambda f: np.savez(f, x=x), lambda f: np.load(f)["x"]),
    )
    yield Call(
        "np.savetxt(f, x)",
        group,
        run=lambda x: with_file(lambda f: np.savetxt(f, x), np.loadtxt),
    )
    yield Call("x.numpy().tobytes()", group)
    yield Call(
        "torch.save(model, f)",
        group,
        run=lambda x: with_buffer(
            lambda f: torch.save(Holder(x), f), lambda f: torch.load(f, weights_only=False).weight
        ),
    )
    yield Call(
        "torch.save(model.half().state_dict(), f)",
        group,
        run=lambda x: with_buffer(
            lambda f: torch.save(Holder(x).half().state_dict(), f), torch.load
        ),
    )
    yield Call(
        "model.load_state_dict(safetensors.torch.load_file(f))",
        group,
        run=loaded_file,
        needs="safetensors",
    )
    yield Call(
        "safetensors.torch.load_model(model, f)",
        group,
        split=REFUSED,
        pending=REFUSED,
        run=loaded_model,
        needs="safetensors",
    )
    for code, run in (
        ("safetensors.torch.save_file({'w': x}, f)", safetensors_file),
        ("safetensors.torch.save({'w': x})", safetensors_bytes),
        ("safetensors.torch.save_model(model, f)", safetensors_model),
    ):
        yield Call(code, group, split=REFUSED, pending=REFUSED, run=run, needs="safetensors")

    group = "State dicts"
    yield Call(
        "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))",
        group,
        run=gathered_state,
    )
    yield Call(
        "get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))",
        group,
        run=offloaded_state,
    )
    yield Call(
        "set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))",
        group,
        run=distributed_state,
    )
    yield Call(
        "get_optimizer_state_dict(model, optimizer, "
        "options=StateDictOptions(full_state_dict=True))",
        group,
        run=gathered_optimizer_state,
    )
    yield Call(
        "set_optimizer_state_dict(model, optimizer, whole, "
        "options=StateDictOptions(full_state_dict=True))",
        group,
        run=distributed_optimizer_state,
    )
    yield Call(
        "deepcopy(model.state_dict())", group, run=lambda x: copy.deepcopy(Holder(x).state_dict())
    )

    group = "Data and samplers"
    for code in (
        "data.TensorDataset(x)[2]",
        "data.Subset(x, [2, 0])[1]",
        "data.default_collate([x, x])",
        "list(data.DataLoader(data.TensorDataset(x), batch_size=2))",
        "sorted(data.RandomSampler(x))",
        "list(data.SequentialSampler(x))",
        "sorted(data.WeightedRandomSampler(x[:, 0], 3, replacement=False))",
        "list(data.DistributedSampler(x, num_replicas=2, rank=1, shuffle=False))",
    ):
        yield Call(code, group)

    group = "TorchScript"
    yield Call("torch.jit.script(function)(x)", group, run=scripted)
    yield Call(
        "torch.jit.script(function)([x, x])",
        group,
        run=lambda x: torch.jit.script(sum_of_list)([x, x]),
    )
    yield Call(
        "torch.jit.trace(function, plain)(x)",
        group,
        run=traced,
    )
    yield Call("torch.jit.script(module)(x)", group, run=scripted_module)
    yield Call(
        "torch.jit.trace(function, x)",
        group,
        split=REFUSED,
        pending=REFUSED,
        run=lambda x: torch.jit.trace(sum_of_squares, x)(torch.ones(3, 2)),
    )
    yield Call(
        "torch.jit.script(module with x)",
        group,
        split=REFUSED,
        pending=REFUSED,
        run=lambda x: torch.jit.script(Holder(x))(torch.ones(1, 2)),
    )
    yield Call(
        "torch.jit.trace(module with x, plain)",
        group,
        split=REFUSED,
        pending=REFUSED,
        run=lambda x: torch.jit.trace(Holder(x), torch.ones(1, 2))(torch.ones(1, 2)),
    )

    group = "Collectives of torch.distributed"
    part = "refused: of which this rank holds a part"
    real = {"is_real_only": True, "split": part, "pending": part}
    for code, run in (
        ("dist.all_reduce(x)", lambda x: after(dist.all_reduce, x)),
        ("dist.broadcast(x, 0)", lambda x: after(lambda x: dist.broadcast(x, 0), x)),
        ("group.allreduce([x])", lambda x: after(lambda x: world().allreduce([x]), x)),
        ("dist.all_gather(plain, x)", gathered),
        ("dist.all_gather([torch.zeros_like(x), ...], x)", gathered_like),
        ("dist.all_gather_into_tensor(plain, x)", gathered_into),
        ("dist.reduce_scatter(plain, [x, ...])", reduced_and_scattered),
        ("dist.all_to_all(plain, [x, ...])", exchanged),
        ("dist.batch_isend_irecv([P2POp(isend, x, rank), ...])", exchanged_with_neighbour),
        ("_functional_collectives.all_reduce(x, 'sum', group)", functionally_reduced),
        ("torch.distributed.nn.functional.all_gather(x)", differentiably_gathered),
    ):
        yield Call(code, group, run=run, **real)
    other = "refused: give each rank other values"
    for code, run in (
        ("dist.reduce(x, 0)", lambda x: after(lambda x: dist.reduce(x, 0), x)),
        (
            "dist.all_to_all([x, ...], plain)",
            lambda x: after(lambda x: dist.all_to_all([x] * 4, outs()), x),
        ),
    ):
        yield Call(code, group, run=run, **{**real, "whole": other})
    pickled = "refused: pickle: expected to be the rank at"
    yield Call(
        "dist.all_gather_object(plain, {'x': x})",
        group,
        run=gathered_objects,
        is_real_only=True,
        split=pickled,
        pending=pickled,
    )

    group = "Wrappers of modules"
    parts = "refused: hold different parts"
    yield Call(
        "DistributedDataParallel(module with x)",
        group,
        split=parts,
        pending=parts,
        run=lambda x: forward_of(nn.parallel.DistributedDataParallel, x),
        is_real_only=True,
    )
    ours = "refused: is a DTensor of shardwise"
    for code, run in (
        ("DataParallel(module with x)", lambda x: forward_of(nn.DataParallel, x)),
        ("FullyShardedDataParallel(module with x)", in_torchs_fsdp),
        ("torch.distributed.fsdp.fully_shard(module with x)", in_torchs_fully_shard),
        ("torch.distributed.tensor.distribute_tensor(x, mesh)", as_torchs_dtensor),
    ):
        yield Call(code, group, ours, ours, ours, run=run, is_real_only=True)
    yield Call(
        "ZeroRedundancyOptimizer([x], SGD)",
        group,
        split=ours,
        pending=ours,
        run=in_zero,
        is_real_only=True,
    )
    yield Call("parameters_to_vector, vector_to_parameters", group, run=vector_and_back)


CALLS = [call for call in _calls() if importlib.util.find_spec(call.needs)]
GROUPS = list(dict.fromkeys(call.group for call in CALLS))


# ---- layouts

VALUES = torch.arange(1.0, 7.0).reshape(3, 2)
"""The global tensor: its sums are exact."""

LAYOUTS: list[tuple[str, tuple[int, ...], tuple[sw.Placement, ...]]] = [
    ("whole", (4,), (Replicate(),)),
    ("whole", (4, 1), (Replicate(), Shard(0))),
    ("whole", (4, 1), (Replicate(), Partial())),
    ("split", (4,), (Shard(0),)),  # the last rank's shard is empty
    ("split", (2, 2), (Shard(0), Shard(1))),
    ("split", (2, 2), (Replicate(), Shard(1))),
    ("split", (2, 2), (Shard(0), Partial())),
    ("pending", (4,), (Partial(),)),
    ("pending", (2, 2), (Replicate(), Partial())),
]
"""Kinds of layouts on four ranks: the kind, the mesh, and the placements."""


def make(mesh: sw.DeviceMesh, placements: tuple[sw.Placement, ...]) -> DTensor:
    """Return a DTensor with the values; no contribution to a pending sum equals the sum."""
    whole = [each if isinstance(each, Shard) else Replicate() for each in placements]
    local = sw.distribute_tensor(VALUES, mesh, whole, src_data_rank=None).to_local()
    for axis, each in enumerate(placements):
        if isinstance(each, Partial) and mesh.size(axis) > 1:
            others = mesh.size(axis) - 1
            local = torch.full_like(local, -1) if mesh.get_local_rank(axis) else local + others
    return DTensor.from_local(local.clone(), mesh, placements, shape=VALUES.shape)


# ---- running a call


def outcome(call: Call, x: DTensor, expected: Any) -> str:
    """Run a call on a DTensor; return the outcome that fits, or what came instead.

    Arguments:
        expected: the values that one process gets, or its error.
    """
    try:
        found = values(call(x))
    except ShardwiseError as error:
        return f"refused: {error}"
    except Exception as error:
        if isinstance(expected, Exception) and type(error) is type(expected):
            return AS_TORCH
        return f"{type(error).__name__}: {error}"
    if is_equal(found, expected):
        return RIGHT
    local = x.to_local()
    if isinstance(found, str) and repr(x._layout) in found and repr(local) in found:
        return TEXT
    if is_equal(found, values(call(local))):
        return PIECE
    return f"{found!r}, expected {expected!r}"


def fits(found: str, wanted: str) -> bool:
    """Tell whether what came is the outcome that was wanted."""
    if wanted.startswith("refused: "):
        return found.startswith("refused: ") and wanted.removeprefix("refused: ") in found
    return found == wanted


def expected_of(call: Call) -> Any:
    """Return what one process gets for a plain tensor."""
    try:
        return values(call(VALUES.clone()))
    except Exception as error:
        return error


def values(result: Any) -> Any:
    """Return the global values of a result: tensors, numbers, text, in lists and dicts."""
    if isinstance(result, DTensor):
        result = result.full_tensor()
    if isinstance(result, torch.Tensor):
        result = result.detach()
        if result.is_nested:
            return [values(each) for each in result.unbind()]
        result = result.to_dense() if result.layout is not torch.strided else result
        return result.as_subclass(torch.Tensor).clone()
    if isinstance(result, np.ndarray):
        return torch.from_numpy(result.copy())
    if isinstance(result, list | tuple):
        return [values(each) for each in result]
    if isinstance(result, dict):
        return {key: values(each) for key, each in result.items()}
    return result


def is_equal(one: Any, other: Any) -> bool:
    """Compare values; of tensors also dtype and shape."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


def waiting(mesh: sw.DeviceMesh, placements: tuple[sw.Placement, ...]) -> DTensor:
    """Return a DTensor with the values, whose data are under way."""
    source = [Shard(1 - each.dim if isinstance(each, Shard) else 0) for each in placements]
    result = make(mesh, tuple(source)).redistribute(placements=placements, async_op=True)
    assert type(result) is not DTensor, "it is on its way"
    return result


def failures(
    calls: list[Call],
    layouts: list[Any] = LAYOUTS,
    make: Callable[[sw.DeviceMesh, tuple[sw.Placement, ...]], DTensor] = make,
) -> list[str]:
    """Run calls on this rank for some layouts; return those whose outcome is another."""
    wrong = []
    expected = [expected_of(call) for call in calls]
    for kind, mesh_shape, placements in layouts:
        mesh = sw.init_device_mesh("cpu", mesh_shape)
        for call, want in zip(calls, expected, strict=True):
            x = make(mesh, placements)
            found = outcome(call, x, want)
            if not fits(found, call.outcome(kind)):
                wrong.append(f"{call.code} of {x._layout!r}: {call.outcome(kind)}, got {found}")
    return wrong


def failures_on_real_ranks() -> list[str]:
    """Run all calls on a real rank, for a layout of each kind on a mesh of two axes."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return failures(CALLS, [LAYOUTS[1], LAYOUTS[4], LAYOUTS[8]])


# ---- the page


def table(group: str) -> str:
    """Return the table of a group as the page has it."""
    head = ["| call | whole | split | pending |", "|---|---|---|---|"]
    return "\n".join([*head, *(call.row for call in CALLS if call.group == group)])


if __name__ == "__main__":
    for each in GROUPS:
        print(f"## {each}\n\n{table(each)}\n")
