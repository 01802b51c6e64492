"""Calls with mistakes, written once for torch's names and ours: which error each library raises.

A call gets a `Library`, the names of one of the two, and meshes of it. What a library does not
refuse counts as None.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

Names = SimpleNamespace
Call = Callable[[Names], Any]

CALLS: dict[str, Call] = {}


def bad(name: str) -> Callable[[Call], Call]:
    """Put a call into the table."""

    def put(call: Call) -> Call:
        CALLS[name] = call
        return call

    return put


def _add(subject: str, **calls: Call) -> None:
    for name, call in calls.items():
        CALLS[f"{subject}: {name.replace('_', ' ')}"] = call


X = torch.arange(16.0).reshape(4, 4)


def split(t: Names) -> Any:
    return t.distribute_tensor(X, t.mesh, [t.Shard(0)])


_add(
    "mesh",
    unknown_axis=lambda t: t.grid["unknown"],
    axis_by_number=lambda t: t.grid[7.5],
    axis_twice=lambda t: t.grid["dp", "dp"],
    unnamed=lambda t: t.DeviceMesh("cpu", [0, 1, 2, 3])["tp"],
    wrong_product=lambda t: t.init_device_mesh("cpu", (3,)),
    too_many_names=lambda t: t.init_device_mesh("cpu", (4,), mesh_dim_names=("a", "b")),
    same_names=lambda t: t.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "a")),
    unknown_device=lambda t: t.init_device_mesh("nonsense", (4,)),
    device_with_index=lambda t: t.init_device_mesh("cuda:0", (4,)),
    device_is_no_text=lambda t: t.init_device_mesh(3, (4,)),
    ragged=lambda t: t.DeviceMesh("cpu", [[0, 1], [2]]),
    group_of_which_axis=lambda t: t.grid.get_group(),
    group_of_unknown_axis=lambda t: t.grid.get_group("unknown"),
    local_rank_of_which_axis=lambda t: t.grid.get_local_rank(),
    local_rank_of_unknown_axis=lambda t: t.grid.get_local_rank("unknown"),
    size_of_unknown_axis=lambda t: t.grid.size(5),
    unknown_attribute=lambda t: t.grid.nonsense,
    call=lambda t: t.grid(),
)
_add(
    "placement",
    shard_of_text=lambda t: t.Shard("rows"),
    shard_of_nothing=lambda t: t.Shard(),
    shard_of_none=lambda t: t.Shard(None),
    replicate_with_an_argument=lambda t: t.Replicate(1),
    unknown_attribute=lambda t: t.Shard(0).nonsense,
    attribute_of_another=lambda t: t.Replicate().dim,
    is_shard_of_too_much=lambda t: t.Shard(0).is_shard(0, 1),
    changed=lambda t: setattr(t.Shard(0), "dim", 1),
)
_add(
    "distribute_tensor",
    history=lambda t: t.distribute_tensor(X.clone().requires_grad_() * 2, t.mesh, [t.Shard(0)]),
    no_tensor=lambda t: t.distribute_tensor([1, 2], t.mesh, [t.Shard(0)]),
    too_few_placements=lambda t: t.distribute_tensor(X, t.grid, [t.Shard(0)]),
    too_many_placements=lambda t: t.distribute_tensor(X, t.mesh, [t.Shard(0), t.Shard(1)]),
    no_placement=lambda t: t.distribute_tensor(X, t.mesh, [3]),
    placements_are_no_list=lambda t: t.distribute_tensor(X, t.mesh, 3),
    one_placement_without_list=lambda t: t.distribute_tensor(X, t.mesh, t.Shard(0)),
    no_such_dim=lambda t: t.distribute_tensor(X, t.mesh, [t.Shard(2)]),
    no_such_negative_dim=lambda t: t.distribute_tensor(X, t.mesh, [t.Shard(-3)]),
    no_mesh=lambda t: t.distribute_tensor(X, "cpu", [t.Shard(0)]),
    no_mesh_at_all=lambda t: t.distribute_tensor(X),
    other_placements=lambda t: t.distribute_tensor(split(t), t.mesh, [t.Shard(1)]),
    other_mesh=lambda t: t.distribute_tensor(split(t), t.grid, [t.Shard(0), t.Replicate()]),
    mixed_reductions=lambda t: t.distribute_tensor(X, t.grid, [t.Partial("sum"), t.Partial("max")]),
    unknown_keyword=lambda t: t.distribute_tensor(X, t.mesh, [t.Shard(0)], nonsense=1),
)
_add(
    "from_local",
    dtensor=lambda t: t.DTensor.from_local(split(t), t.mesh, [t.Shard(0)]),
    no_tensor=lambda t: t.DTensor.from_local([1, 2], t.mesh, [t.Shard(0)]),
    no_placement=lambda t: t.DTensor.from_local(X, t.mesh, [3]),
    too_many_placements=lambda t: t.DTensor.from_local(X, t.mesh, [t.Shard(0), t.Shard(1)]),
    no_such_dim=lambda t: t.DTensor.from_local(X, t.mesh, [t.Shard(2)]),
    no_mesh=lambda t: t.DTensor.from_local(X, "cpu", [t.Shard(0)]),
    no_mesh_at_all=lambda t: t.DTensor.from_local(X),
    placements_are_no_list=lambda t: t.DTensor.from_local(X, t.mesh, 3),
    other_shape_of_gradient=lambda t: (
        t.DTensor.from_local(
            X.clone().requires_grad_(), t.mesh, [t.Replicate()], grad_placements=[t.Shard(0)]
        )
        .to_local()
        .sum()
        .backward()
    ),
    unknown_keyword=lambda t: t.DTensor.from_local(X, t.mesh, [t.Shard(0)], nonsense=1),
    constructor_without_spec=lambda t: t.DTensor(X),
    constructor_with_a_wrong_spec=lambda t: t.DTensor(X, 3, requires_grad=False),
)
_add(
    "redistribute",
    too_many_placements=lambda t: split(t).redistribute(placements=[t.Shard(0), t.Shard(1)]),
    no_placement=lambda t: split(t).redistribute(placements=[3]),
    no_such_dim=lambda t: split(t).redistribute(placements=[t.Shard(2)]),
    placements_are_no_list=lambda t: split(t).redistribute(placements=3),
    mesh_is_no_mesh=lambda t: split(t).redistribute("cpu", [t.Shard(1)]),
    unknown_keyword=lambda t: split(t).redistribute(nonsense=1),
    placements_first=lambda t: split(t).redistribute([t.Shard(1)]),
)
_add(
    "tensor",
    unknown_attribute=lambda t: split(t).nonsense,
    unknown_method=lambda t: split(t).nonsense(),
    placements_are_read_only=lambda t: setattr(split(t), "placements", ()),
    mesh_is_read_only=lambda t: setattr(split(t), "device_mesh", None),
    size_of_no_dim=lambda t: split(t).size(7),
    index_out_of_range=lambda t: split(t)[100],
    too_many_indices=lambda t: split(t)[0, 0, 0],
    sum_of_no_dim=lambda t: split(t).sum(dim=5),
    item_of_many=lambda t: split(t).item(),
    bool_of_many=lambda t: bool(split(t)),
    length_of_a_number=lambda t: len(split(t).sum()),
    iterate_a_number=lambda t: list(iter(split(t).sum())),
    shapes_do_not_fit=lambda t: split(t) + t.distribute_tensor(torch.ones(3), t.mesh),
    inner_sizes_do_not_fit=lambda t: split(t) @ t.distribute_tensor(torch.ones(3, 3), t.mesh),
    view_of_wrong_size=lambda t: split(t).view(3, 3),
    two_meshes=lambda t: split(t) + t.distribute_tensor(X, t.grid, [t.Shard(0), t.Shard(1)]),
    text_as_operand=lambda t: split(t) + "text",
    none_as_operand=lambda t: torch.add(split(t), None),
    unknown_keyword=lambda t: split(t).sum(nonsense=1),
    backward_of_many=lambda t: (split(t).requires_grad_() * 2).backward(),
    backward_without_graph=lambda t: split(t).sum().backward(),
    write_to_a_leaf=lambda t: split(t).requires_grad_().add_(1),
    integers_with_gradients=lambda t: t.distribute_tensor(
        torch.arange(4), t.mesh, [t.Shard(0)]
    ).requires_grad_(),
    dtype_by_text=lambda t: split(t).to("nonsense"),
    to_local_unknown_keyword=lambda t: split(t).to_local(nonsense=1),
    full_tensor_unknown_keyword=lambda t: split(t).full_tensor(nonsense=1),
)
_add(
    "factory",
    text=lambda t: t.zeros("a", device_mesh=t.mesh, placements=[t.Shard(0)]),
    no_mesh=lambda t: t.zeros(4, device_mesh="cpu", placements=[t.Shard(0)]),
    no_placement=lambda t: t.ones(4, device_mesh=t.mesh, placements=[3]),
    too_many_placements=lambda t: t.ones(4, device_mesh=t.mesh, placements=[t.Shard(0)] * 2),
    sparse=lambda t: t.zeros(4, layout=torch.sparse_coo, device_mesh=t.mesh),
    negative=lambda t: t.zeros(-4, device_mesh=t.mesh, placements=[t.Shard(0)]),
    full_without_value=lambda t: t.full((4,), device_mesh=t.mesh),
    unknown_keyword=lambda t: t.zeros(4, device_mesh=t.mesh, nonsense=1),
)
_add(
    "distribute_module",
    no_module=lambda t: t.distribute_module(3, t.mesh),
    no_mesh=lambda t: t.distribute_module(nn.Linear(4, 4), "cpu"),
    partition_fn_is_none=lambda t: t.distribute_module(nn.Linear(4, 4), t.mesh, 3),
    input_fn_of_wrong_arguments=lambda t: t.distribute_module(
        nn.Linear(4, 4), t.mesh, input_fn=lambda: None
    )(X),
)


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


_add(
    "local_map",
    other_placements=lambda t: t.local_map(
        _doubled, [t.Shard(0)], ([t.Shard(1)],), device_mesh=t.mesh
    )(split(t)),
    too_many_in_placements=lambda t: t.local_map(
        _doubled, [t.Shard(0)], ([t.Shard(0)], [t.Shard(0)]), device_mesh=t.mesh
    )(split(t)),
    none_for_a_tensor=lambda t: t.local_map(_doubled, [t.Shard(0)], (None,), device_mesh=t.mesh)(
        split(t)
    ),
    too_many_out_placements=lambda t: t.local_map(
        _doubled, ([t.Shard(0)], [t.Shard(0)]), ([t.Shard(0)],), device_mesh=t.mesh
    )(split(t)),
    placements_for_no_tensor=lambda t: t.local_map(lambda x: 3, [t.Shard(0)], device_mesh=t.mesh)(
        split(t)
    ),
    in_placements_for_a_number=lambda t: t.local_map(
        lambda x, n: x, [t.Shard(0)], ([t.Shard(0)], [t.Shard(0)]), device_mesh=t.mesh
    )(split(t), 3),
)


class _TwoInputs(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


_add(
    "parallelize_module",
    colwise_of_a_norm=lambda t: t.parallelize_module(_model(), t.mesh, {"1": t.ColwiseParallel()}),
    rowwise_of_a_norm=lambda t: t.parallelize_module(_model(), t.mesh, {"1": t.RowwiseParallel()}),
    plan_is_a_number=lambda t: t.parallelize_module(_model(), t.mesh, 3),
    plan_is_a_list=lambda t: t.parallelize_module(_model(), t.mesh, [t.ColwiseParallel()]),
    no_style=lambda t: t.parallelize_module(_model(), t.mesh, {"0": 3}),
    key_is_no_text=lambda t: t.parallelize_module(_model(), t.mesh, {3: t.ColwiseParallel()}),
    no_mesh=lambda t: t.parallelize_module(_model(), "cpu", {"0": t.ColwiseParallel()}),
    no_module=lambda t: t.parallelize_module(3, t.mesh, {"0": t.ColwiseParallel()}),
    style_of_unknown_keyword=lambda t: t.ColwiseParallel(nonsense=1),
    prepare_input_of_nothing=lambda t: t.PrepareModuleInput(),
    prepare_input_without_wish=lambda t: t.PrepareModuleInput(input_layouts=(t.Shard(0),)),
    prepare_input_of_other_length=lambda t: t.PrepareModuleInput(
        input_layouts=(t.Shard(0),), desired_input_layouts=(t.Shard(0), t.Shard(1))
    ),
    prepare_input_keywords=lambda t: t.PrepareModuleInput(
        input_kwarg_layouts={"x": t.Shard(0)}, desired_input_kwarg_layouts={}
    ),
    prepare_output_of_nothing=lambda t: t.PrepareModuleOutput(),
    prepare_output_of_other_length=lambda t: t.PrepareModuleOutput(
        output_layouts=(t.Shard(0),), desired_output_layouts=(t.Shard(0), t.Shard(1))
    ),
    prepare_input_of_too_few=lambda t: t.parallelize_module(
        _TwoInputs(),
        t.mesh,
        t.PrepareModuleInput(input_layouts=(t.Shard(0),), desired_input_layouts=(t.Replicate(),)),
    )(X, X),
    prepare_output_of_too_few=lambda t: t.parallelize_module(
        nn.Identity(),
        t.mesh,
        t.PrepareModuleOutput(
            output_layouts=(t.Shard(0), t.Shard(0)),
            desired_output_layouts=(t.Replicate(), t.Replicate()),
        ),
    )(X),
)
_add(
    "fully_shard",
    no_module=lambda t: t.fully_shard(3, mesh=t.mesh),
    a_container=lambda t: t.fully_shard(nn.ModuleList([nn.Linear(4, 4)]), mesh=t.mesh),
    a_dict_of_modules=lambda t: t.fully_shard(nn.ModuleDict({"a": nn.Linear(4, 4)}), mesh=t.mesh),
    no_mesh=lambda t: t.fully_shard(_model(), mesh="cpu"),
    too_many_axes=lambda t: t.fully_shard(
        _model(), mesh=t.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
    ),
    reshard_after_forward_as_text=lambda t: t.fully_shard(
        _model(), mesh=t.mesh, reshard_after_forward="yes"
    ),
    reshard_after_forward_of_no_divisor=lambda t: t.fully_shard(
        _model(), mesh=t.mesh, reshard_after_forward=3
    ),
    twice=lambda t: t.fully_shard(t.fully_shard(_model(), mesh=t.mesh), mesh=t.mesh),
    shard_along_no_dim=lambda t: t.fully_shard(
        _model(), mesh=t.mesh, shard_placement_fn=lambda parameter: t.Shard(3)
    ),
    unknown_keyword=lambda t: t.fully_shard(_model(), mesh=t.mesh, nonsense=1),
    policy_of_unknown_keyword=lambda t: t.MixedPrecisionPolicy(nonsense=1),
    changed_policy=lambda t: setattr(t.MixedPrecisionPolicy(), "param_dtype", torch.bfloat16),
    prefetch_no_module=lambda t: t.fully_shard(
        _model(), mesh=t.mesh
    ).set_modules_to_forward_prefetch([3]),
    prefetch_a_plain_module=lambda t: t.fully_shard(
        _model(), mesh=t.mesh
    ).set_modules_to_backward_prefetch([nn.Linear(4, 4)]),
    method_of_no_module=lambda t: t.register_fsdp_forward_method(3, "forward"),
    unknown_method=lambda t: t.register_fsdp_forward_method(
        t.fully_shard(_model(), mesh=t.mesh), "nonsense"
    ),
)


def _rows(t: Names) -> Any:
    places = [f"rank:{rank}/cpu" for rank in range(4)]
    return t.sharded.zeros(t.ChunkShardingSpec(dim=0, placements=places), 8, 4)


_add(
    "ShardedTensor",
    spec_of_a_list_as_dim=lambda t: t.ChunkShardingSpec(dim=[0], placements=["rank:0/cpu"]),
    spec_of_a_named_dim=lambda t: t.ChunkShardingSpec(dim="H", placements=["rank:0/cpu"]),
    spec_of_an_odd_place=lambda t: t.ChunkShardingSpec(dim=0, placements=["nonsense"]),
    spec_of_shards_that_overlap=lambda t: t.EnumerableShardingSpec(
        [t.ShardMetadata([0], [2], "rank:0/cpu"), t.ShardMetadata([1], [2], "rank:1/cpu")]
    ),
    spec_of_no_shards=lambda t: t.EnumerableShardingSpec([]),
    negative_offset=lambda t: t.ShardMetadata([-1], [2], "rank:0/cpu"),
    offsets_and_sizes_differ=lambda t: t.ShardMetadata([0], [2, 2], "rank:0/cpu"),
    no_spec=lambda t: t.sharded.zeros(3, 8, 4),
    no_such_dim=lambda t: t.sharded.zeros(
        t.ChunkShardingSpec(dim=5, placements=[f"rank:{rank}/cpu" for rank in range(4)]), 8, 4
    ),
    sparse=lambda t: t.sharded.zeros(
        t.ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(4)]),
        8,
        4,
        layout=torch.sparse_coo,
    ),
    unknown_attribute=lambda t: _rows(t).nonsense,
    is_pinned_is_read_only=lambda t: setattr(_rows(t), "layout", 3),
    reshard_by_no_spec=lambda t: _rows(t).reshard(3),
    shard_of_other_size=lambda t: t.Shard_(torch.ones(3), t.ShardMetadata([0], [2], "rank:0/cpu")),
    to_without_arguments=lambda t: _rows(t).to(),
    size_of_no_dim=lambda t: _rows(t).size(5),
    init_from_no_shards=lambda t: t.ShardedTensor._init_from_local_shards(3, 8, 4),
)


def errors_of(t: Names) -> dict[str, type[BaseException] | None]:
    """Return the type of the error of each call; None for a call that is not refused."""
    found: dict[str, type[BaseException] | None] = {}
    for name, call in CALLS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                call(t)
            except Exception as error:
                found[name] = type(error)
            else:
                found[name] = None
    return found


def our_names() -> Names:
    """Return shardwise's names and meshes of the four ranks."""
    import shardwise as sw
    from shardwise import fsdp, parallel, sharded

    names = Names(**{name: getattr(sw, name) for name in (*_TENSOR, *_FACTORIES)})
    vars(names).update({name: getattr(parallel, name) for name in _PARALLEL})
    vars(names).update({name: getattr(fsdp, name) for name in _FSDP})
    vars(names).update({name: getattr(sharded, name) for name in _SHARDED})
    return _with_meshes(names, sharded, sharded.Shard)


def torchs_names() -> Names:
    """Return torch's names and meshes of the four ranks."""
    import torch.distributed.tensor as tensor
    from torch.distributed import device_mesh, fsdp
    from torch.distributed._shard import sharded_tensor, sharding_spec
    from torch.distributed.tensor import experimental, parallel

    rooms: tuple[Any, ...] = (tensor, device_mesh, experimental, parallel, fsdp)
    rooms += (sharding_spec, sharded_tensor)
    wanted = (*_TENSOR, *_FACTORIES, *_PARALLEL, *_FSDP, *_SHARDED)
    names = Names(
        **{name: next(vars(room)[name] for room in rooms if name in vars(room)) for name in wanted}
    )
    return _with_meshes(names, sharded_tensor, sharded_tensor.Shard)


_TENSOR = ("DTensor", "DeviceMesh", "init_device_mesh", "Shard", "Replicate", "Partial")
_TENSOR += ("distribute_tensor", "distribute_module", "local_map")
_FACTORIES = ("zeros", "ones", "full")
_PARALLEL = ("parallelize_module", "ColwiseParallel", "RowwiseParallel", "PrepareModuleInput")
_PARALLEL += ("PrepareModuleOutput",)
_FSDP = ("fully_shard", "MixedPrecisionPolicy", "register_fsdp_forward_method")
_SHARDED = ("ChunkShardingSpec", "EnumerableShardingSpec", "ShardMetadata", "ShardedTensor")


def _with_meshes(names: Names, sharded: Any, shard: Any) -> Names:
    names.sharded, names.Shard_ = sharded, shard
    names.mesh = names.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    names.grid = names.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return names
