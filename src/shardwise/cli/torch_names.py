"""Judgements on torch's names: which have no counterpart, which differ, which do more.

A name that is in none of these tables has a counterpart under the same name and behaves alike. A
key is the dotted name of a module, a class, a function or a member; what is said of a module or a
class holds for all in it. `shardwise migrate` and docs/moving-over.md read them, and
tests/moving_over/test_torch_names.py compares them with the installed torch.
"""

from __future__ import annotations

_TENSOR = "torch.distributed.tensor"
_FSDP = "torch.distributed.fsdp"
_COMPOSABLE = "torch.distributed._composable"
_SHARD = "torch.distributed._shard"


def _all(prefix: str, names: str, text: str) -> dict[str, str]:
    return {f"{prefix}.{name}": text for name in names.split()}


# ---- absent: what to write instead

_FSDP1 = (
    "this is FSDP1: call fully_shard(layer) of shardwise.fsdp for each layer, then "
    "fully_shard(model); "
)
_RULES = (
    "rules replace strategies: sw.register_rule(op, 'm k, k n -> m n'), or torch's "
    "experimental.register_sharding"
)
_OPERATOR_RULES = "rules of torch's operators are built in (docs/op-coverage.md); " + _RULES
_PLANNER = "sw.plan_redistribute(source, target) returns a plan, and plan.explain() describes it"
_INTERNAL = "shardwise.fsdp has other internals; "
_METHODS = _INTERNAL + "methods of FSDPModule change how a module is sharded"

INSTEAD: dict[str, str] = {
    # DTensor's internals
    **_all(
        _TENSOR,
        "_ops _op_schema _sharding_prop _decompositions _nonlinear_redux _tp_conv",
        _OPERATOR_RULES,
    ),
    f"{_TENSOR}._dispatch": "a torch function mode, or sw.listen for collectives, sees calls; "
    + _RULES,
    f"{_TENSOR}._collective_utils": "sw.communicator(mesh, axes) has all collectives; "
    "sw.plan_redistribute(source, target).seconds is the cost of a move",
    f"{_TENSOR}._shards_wrapper": "shardwise.sharded.ShardedTensor has several shards per rank",
    f"{_TENSOR}._random.OffsetBasedRNGTracker": "nothing is needed: random numbers do not depend "
    "on the layout; sw.seed(n, mesh) seeds",
    **_all(
        f"{_TENSOR}._redistribute",
        "DTensorRedistributePlanner get_redistribute_planner clear_redistribute_planner_cache",
        _PLANNER,
    ),
    **_all(
        f"{_TENSOR}._redistribute",
        "Redistribute NestedRedistribute",
        "x.redistribute(mesh, placements), which can be differentiated twice",
    ),
    f"{_TENSOR}._utils.assert_no_mixed_partial_types": "nothing is needed: layouts check it",
    f"{_TENSOR}._dtensor_spec.DTensorSpec.format_shard_order_str": "repr(x.mesh_layout)",
    f"{_TENSOR}._dtensor_spec.DTensorSpec.use_strided_shard_as_shard_order": "nothing is needed: "
    "shard_order says it",
    f"{_TENSOR}.debug._op_coverage": "sw.fallback_counts() names operators without a rule",
    **_all(
        f"{_TENSOR}.parallel",
        "ddp _data_parallel_utils",
        "DistributedDataParallel(model, process_group=mesh['dp'].get_group()) takes a "
        "tensor-parallel model as it is; replicate(model, mesh=mesh['dp']) is quicker",
    ),
    f"{_TENSOR}.parallel.fsdp": "fully_shard(module, mesh=mesh['dp']) of shardwise.fsdp, after "
    "parallelize_module",
    # FSDP1
    **_all(
        _FSDP,
        "FullyShardedDataParallel BackwardPrefetch fully_sharded_data_parallel "
        "_flat_param _exec_order_utils _limiter_utils _runtime_utils _unshard_param_utils "
        "_wrap_utils _init_utils _traversal_utils _trace_utils _dynamo_utils _debug_utils "
        "_common_utils _shard_utils _fsdp_extensions",
        _FSDP1 + "prefetching is automatic",
    ),
    f"{_FSDP}.CPUOffload": _FSDP1 + "offload_policy=CPUOffloadPolicy()",
    f"{_FSDP}.MixedPrecision": _FSDP1 + "mp_policy=MixedPrecisionPolicy(param_dtype=...)",
    f"{_FSDP}.ShardingStrategy": _FSDP1 + "FULL_SHARD is the default, SHARD_GRAD_OP is "
    "reshard_after_forward=False, HYBRID_SHARD a mesh of two axes, NO_SHARD is replicate(module)",
    **_all(
        _FSDP,
        "FullOptimStateDictConfig FullStateDictConfig LocalOptimStateDictConfig "
        "LocalStateDictConfig OptimStateDictConfig OptimStateKeyType ShardedOptimStateDictConfig "
        "ShardedStateDictConfig StateDictConfig StateDictSettings StateDictType _optim_utils "
        "_state_dict_utils",
        _FSDP1 + "model.state_dict() has DTensors, and torch.distributed.checkpoint.state_dict "
        "gathers and loads them",
    ),
    f"{_FSDP}.api": _FSDP1 + "its policies are arguments of fully_shard",
    f"{_FSDP}.wrap": _FSDP1 + "for module in model.modules(): if isinstance(module, Block)",
    f"{_FSDP}.sharded_grad_scaler": "torch.amp.GradScaler, which works with sharded parameters",
    # FSDP2's internals
    f"{_FSDP}._fully_shard._fsdp_collectives": _INTERNAL + "set_custom_all_gather and "
    "set_custom_reduce_scatter take one's own collectives",
    **_all(
        f"{_FSDP}._fully_shard._fsdp_param",
        "ExtensionsData ParamModuleInfo alloc_storage copy_ copy__functionalize free_storage "
        "set_requires_grad_if_needed unsafe_setattr_param",
        _METHODS,
    ),
    **_all(
        f"{_FSDP}._fully_shard._fsdp_param_group",
        "AllGatherState AllReduceState FSDPCommContext ReduceScatterState "
        "RegisterPostBackwardFunction",
        _METHODS,
    ),
    **_all(
        f"{_FSDP}._fully_shard._fsdp_state",
        "FSDPStateContext RegisterPreBackwardFunction",
        _METHODS,
    ),
    f"{_FSDP}._fully_shard._fsdp_common.is_bw": _METHODS,
    # composable
    f"{_COMPOSABLE}.replicate.DDP": "isinstance(module, FSDPModule) of shardwise.fsdp",
    f"{_COMPOSABLE}.replicate.unimplemented_deepcopy": "copy.deepcopy(module) works",
    f"{_COMPOSABLE}.replicate_with_fsdp.is_composable_with_replicate": "nothing is needed: "
    "replicate(module) says what it cannot take",
    # context parallelism
    **{
        f"{_TENSOR}.experimental.{module}.{name}": "attention over a split sequence is one rule, "
        "with no ring of its own; context_parallel and _ContextParallel apply it"
        for module in ("_attention", "_context_parallel", "_context_parallel._attention")
        for name in ("_CausalBehavior", "_is_causal_behavior", "_templated_ring_attention")
        if not (module != "_attention" and name == "_templated_ring_attention")
    },
    f"{_TENSOR}.experimental._context_parallel.flex_cp_allgather": "x.redistribute(placements="
    "[Replicate()]) of keys and values, which is differentiable",
    f"{_TENSOR}.experimental._context_parallel._sharding_rules": "the rules of attention are "
    "built in",
    # ShardedTensor's internals
    f"{_SHARD}.sharded_tensor._ops": "torch's own functions take ShardedTensors: torch.equal, "
    "torch.allclose, torch.nn.init.uniform_, x.clone(), x.detach(), ...",
    f"{_SHARD}.sharding_spec.chunk_sharding_spec_ops": "torch.nn.functional.embedding and "
    "embedding_bag take a ShardedTensor as weight",
    **_all(
        _SHARD,
        "common_op_utils op_registry_utils",
        "shardwise.sharded.custom_sharded_op_impl(func) registers an operator",
    ),
    f"{_SHARD}.sharding_spec.ChunkShardingSpec.ShardingDim": "int | str",
}

# ---- present, and different

DIFFERENT: dict[str, str] = {
    f"{_TENSOR}.experimental.implicit_replication": "plain tensors are taken as replicated without "
    "it, too; sw.plain_tensors('error') refuses them, sw.plain_tensors('check') compares the ranks",
    f"{_TENSOR}.experimental.context_parallel": "uneven lengths, too; the backward runs within the "
    "context; flex_attention is refused",
    f"{_TENSOR}.experimental.register_sharding": "gradients need no registration, as autograd runs "
    "on shards; for an operator of aten it changes torch's function of the same name only",
    f"{_TENSOR}.debug.CommDebugMode": "Shard(i) to Shard(j) counts as "
    "c10d_functional.all_to_all_single, not _dtensor.shard_dim_alltoall; on gloo Partial to Shard "
    "of a few kilobytes is an all_reduce, which is faster there, not a reduce_scatter_tensor",
    f"{_TENSOR}._redistribute.redistribute_local_tensor": "waits also with async_op=True; "
    "x.redistribute(async_op=True) does not",
    f"{_TENSOR}._redistribute.use_min_cost_redistribution_plan": "accepted; every plan has the "
    "least cost, with or without it",
    f"{_TENSOR}._redistribute.disable_redistribute_transform_optimization": "accepted; collectives "
    "of several axes are merged where that is faster",
    f"{_TENSOR}._dtensor_spec.DTensorSpec": (
        "immutable, and made when x._spec is read: tensors have a Layout, x.mesh_layout"
    ),
    f"{_TENSOR}._dtensor_spec.DTensorSpec.shard_order": "None where placements say it "
    "(_StridedShard)",
    f"{_TENSOR}.parallel.parallelize_module": "a key of the plan that matches nothing is an error; "
    "with strict=False a warning, as in torch",
    f"{_TENSOR}.DTensor.redistribute": (
        "async_op=True returns a DTensor that waits when it is used; "
        "it moves to Partial and between meshes, too, by the plan of least cost"
    ),
}

_FLEX = "refused: flex_attention is not made parallel; scaled_dot_product_attention is"
DIFFERENT |= {
    f"{_TENSOR}.experimental._attention.set_rotate_method": "accepted; keys and values are "
    "gathered with 'alltoall', too, and a warning says so",
    f"{_TENSOR}.experimental._attention._PerDocumentHeadTailLoadBalancer": _FLEX,
    f"{_TENSOR}.experimental._attention._PTRRLoadBalancer": _FLEX,
}
_OWN_CLASS = "shardwise's own class: for isinstance, and for what users of torch's read of it"
DIFFERENT |= {
    f"{_FSDP}._fully_shard._fsdp_param.FSDPParam": _OWN_CLASS,
    f"{_FSDP}._fully_shard._fsdp_param_group.FSDPParamGroup": _OWN_CLASS,
    f"{_FSDP}._fully_shard._fsdp_state.FSDPState": _OWN_CLASS,
}

# ---- present, and more

BETTER: dict[str, str] = {
    f"{_TENSOR}.DTensor.from_local": "uneven shards get the right global shape; run_check compares "
    "replicas and never overwrites them",
    f"{_TENSOR}.DTensor.full_tensor": "uneven, empty and nested shards, in the fewest bytes",
    f"{_TENSOR}.rand": "the same numbers on every layout, mesh and device, one rank included",
    f"{_TENSOR}.randn": "the same numbers on every layout, mesh and device, one rank included",
    f"{_TENSOR}._random.is_rng_supported_mesh": "True for every device",
    f"{_TENSOR}._utils.compute_global_tensor_shape": "meshes of any number of axes",
    f"{_TENSOR}._utils.compute_local_tensor_info": "uneven shards, too",
    f"{_TENSOR}._utils.ExplicitRedistributionContext": "the error names the move, its cost and the "
    "call to write; sw.explicit() is short for it",
    f"{_TENSOR}.debug.visualize_sharding": (
        "any number of dims, empty shards, pending sums; needs no package"
    ),
    f"{_TENSOR}.experimental.local_map": (
        "the gradient of an input that is replicated beside a split "
        "one is summed by default; uneven shards; pickled; checked with spmd_types"
    ),
    f"{_TENSOR}.experimental._tp_transform.tensor_parallel_transformation": "attention, views of "
    "local size, dynamic batch sizes, non-persistent buffers; patterns for names",
    f"{_TENSOR}.parallel.loss_parallel": (
        "weights, ignore_index, every reduction, meshes of several axes; it is left on exceptions"
    ),
    f"{_TENSOR}.parallel.SequenceParallel": "frozen parameters stay frozen",
    f"{_TENSOR}.parallel.input_reshard.input_reshard": (
        "only what is the same on every rank is split, of any size"
    ),
    f"{_FSDP}.fully_shard": "gathers and reductions overlap on gloo, too; tied weights, mixed "
    "dtypes, scalars, uneven Shard(1); deepcopy and load_state_dict work",
    f"{_COMPOSABLE}.replicate.replicate": (
        "parameters are DTensors, and checkpoints fit other meshes"
    ),
    f"{_SHARD}.sharded_tensor.ShardedTensor.gather": "exact for every dtype; any group",
    f"{_SHARD}.sharded_tensor.ShardedTensor.reshard": "between any two specs, also uneven ones",
}

# ---- names of newer versions

SINCE: dict[str, str] = {
    **dict.fromkeys(
        (f"{_TENSOR}{path}.{name}" for path in ("", "._api") for name in ("linspace", "logspace")),
        "2.14",
    ),
    **dict.fromkeys(
        (
            f"{_FSDP}.GradientReductionHandle",
            f"{_FSDP}._fully_shard.GradientReductionHandle",
            f"{_FSDP}._fully_shard._fully_shard.GradientReductionHandle",
            f"{_FSDP}.FSDPModule.finalize_backward",
            f"{_FSDP}.FSDPModule.set_keep_unsharded_storage",
            f"{_FSDP}.FSDPModule.set_manual_backward_finalization",
            f"{_FSDP}.MixedPrecisionPolicy.param_dtype_override_fn",
            "torch.distributed.device_mesh.DeviceMesh.abort",
            f"{_SHARD}.sharded_tensor.TensorProperties.strides",
        ),
        "2.15",
    ),
}
"""The version of torch that a name came with, if that is not 2.13."""
