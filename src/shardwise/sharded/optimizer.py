"""ShardedOptimizer: on each rank one of torch's optimizers, for the local shards of parameters.

Its state dict describes whole parameters: it is keyed by their names and has sharded tensors, cut
as the parameters are. So it can be loaded where the parameters are cut differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn, optim

from shardwise.core.errors import ShardedStateError, ShardedTensorError
from shardwise.sharded import optimizer_state
from shardwise.sharded.group import ShardOwnership
from shardwise.sharded.optimizer_state import NamedParameters
from shardwise.sharded.plan import tensors_of
from shardwise.sharded.specs import format_spec
from shardwise.sharded.tensor import ShardedTensor
from shardwise.torch_internals import hooks_of_optimizer, own_parameters

Named = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

_NOT_POINTWISE = (optim.LBFGS, optim.Adafactor, optim.Muon)
"""Optimizers whose steps use a parameter as a whole; on shards they would silently compute other
steps."""


class ShardedOptimizer(optim.Optimizer):
    """One of torch's optimizers for parameters of which some are ShardedTensors.

    Its `param_groups` and `state` are those of the optimizer of this rank's shards. Hooks and
    learning rate schedulers work on it as on any other optimizer.

    Arguments:
        named_params: the parameters by name, as `named_params_with_sharded_tensor` gives them.
        optimizer_class: such as `torch.optim.Adam`; its step must be pointwise.
        optimizer_args, optimizer_kwargs: the arguments of the class besides parameters.

    Example:
        >>> named = dict(named_params_with_sharded_tensor(model))
        >>> ShardedOptimizer(named, torch.optim.SGD, lr=0.1)
    """

    def __init__(
        self,
        named_params: Named,
        optimizer_class: Callable[..., optim.Optimizer],
        *optimizer_args: Any,
        **optimizer_kwargs: Any,
    ) -> None:
        self.named_params = _checked_names(named_params, {})
        self._class = optimizer_class
        _check_class(optimizer_class, self.named_params)
        self._groups = [list(self.named_params)]
        self._local = _local_shards(self.named_params)
        tensors = _optimized_tensors(self.named_params, self._local)
        self._optim = optimizer_class(tensors, *optimizer_args, **optimizer_kwargs)
        # Set what torch's constructor sets besides groups and state: those are the inner one's.
        super().__setstate__({})

    # ---- the optimizer of this rank's shards

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of this rank's shards."""
        return self._optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of each of this rank's shards."""
        return self._optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default options of parameter groups."""
        return self._optim.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients of the parameters, or set them to zero."""
        for parameter in self.named_params.values():
            if set_to_none and isinstance(parameter, ShardedTensor):
                parameter.grad = None  # also of the placeholder of a rank without shards
        self._optim.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters by their gradients; returns the loss that `closure` returns."""
        self._check_current("step")
        return self._optim.step(closure)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own.

        Arguments:
            param_group: "params" by name, or as pairs of names and parameters; and options.
        """
        options = dict(param_group)
        named = _checked_names(options.pop("params", ()), self.named_params)
        _check_class(self._class, named)
        local = _local_shards(named)
        self._optim.add_param_group({"params": _optimized_tensors(named, local), **options})
        self.named_params = {**self.named_params, **named}
        self._groups.append(list(named))
        self._local.update(local)

    # ---- saved and loaded

    def init_state(self) -> None:
        """Create the state that optimizers create in their first step; existing state is kept.

        `torch.distributed.checkpoint` reads into existing tensors: with this, it finds them in the
        `state_dict()` of a new optimizer. This is a step with zero gradients and a learning rate of
        zero, which counts as a step until other state is loaded.
        """
        self._check_current("init_state")
        rates = [group.get("lr") for group in self.param_groups]
        gradients = {}
        for group in self.param_groups:
            if "lr" in group:
                group["lr"] = 0.0 * group["lr"]
            for tensor in group["params"]:
                gradients[tensor] = tensor.grad
                is_new = tensor.requires_grad and not self.state.get(tensor)
                tensor.grad = torch.zeros_like(tensor) if is_new else None
        try:
            self._optim.step()
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                if rate is not None:
                    group["lr"] = rate
            for tensor, gradient in gradients.items():
                tensor.grad = gradient

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters by name, and the parameter groups; all ranks call it.

        State of a ShardedTensor's shape is a ShardedTensor, cut as the parameter is; counters are
        as they are.
        """
        self._check_current("state_dict")
        for hook in hooks_of_optimizer(self, "state_dict_pre"):
            hook(self)
        saved = optimizer_state.gather_state(self._parameters())
        for after in hooks_of_optimizer(self, "state_dict_post"):
            replaced = after(self, saved)
            saved = saved if replaced is None else replaced
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict()`; all ranks call it.

        State may be cut differently from the parameters here, or be whole. Names and sizes are
        checked on all ranks before anything is changed.
        """
        self._check_current("load_state_dict")
        for hook in hooks_of_optimizer(self, "load_state_dict_pre"):
            replaced = hook(self, dict(state_dict))
            state_dict = state_dict if replaced is None else replaced
        self._optim.load_state_dict(
            optimizer_state.local_state_dict(self._parameters(), state_dict)
        )
        for after in hooks_of_optimizer(self, "load_state_dict_post"):
            after(self)

    def __getstate__(self) -> NoReturn:
        raise ShardedStateError(
            "ShardedOptimizer: cannot be pickled or copied, as it works on the shards of the "
            "parameters it was made with; save its state_dict(), and load that into another one"
        )

    def _parameters(self) -> NamedParameters:
        return NamedParameters(self.named_params, self._groups, self._optim)

    def _check_current(self, method: str) -> None:
        """Refuse to use shards that the parameters no longer have."""
        for name, (ownership, tensors) in self._local.items():
            parameter: Any = self.named_params[name]
            now = map(id, parameter._local_tensors())
            if parameter._ownership != ownership or list(now) != list(map(id, tensors)):
                raise ShardedStateError(
                    f"{method}: the shards of {name!r} are not those that this optimizer was made "
                    f"with ({format_spec(parameter._sharding_spec)} now); make another one "
                    "after reshard(), and load into it the state_dict() of this one from before"
                )


LocalShardsByName = dict[str, tuple[ShardOwnership, list[torch.Tensor]]]
"""By the name of a sharded parameter: its ownership, and this rank's tensors."""


def _local_shards(named: Mapping[str, torch.Tensor]) -> LocalShardsByName:
    """Return the local tensors of all sharded parameters, by name."""
    return {
        name: (parameter._ownership, parameter._local_tensors())
        for name, parameter in named.items()
        if isinstance(parameter, ShardedTensor)
    }


def _optimized_tensors(
    named: Mapping[str, torch.Tensor], local: LocalShardsByName
) -> list[torch.Tensor]:
    """Return the tensors that the optimizer of this rank updates."""
    found = [
        tensor
        for name, parameter in named.items()
        for tensor in (local[name][1] if name in local else [parameter])
    ]
    # Optimizers refuse an empty list, and this rank may hold no shards.
    return found or [torch.empty(0, requires_grad=True)]


def _checked_names(named: Named, before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return parameters by name; refuse other types, and parameters or names that occur twice."""
    try:
        found = dict(named.items() if isinstance(named, Mapping) else named)
    except (TypeError, ValueError):
        raise ShardedTensorError(
            "named_params: expected parameters by name, such as "
            f"dict(named_params_with_sharded_tensor(model)); got {type(named).__name__}"
        ) from None
    if not found:
        raise ShardedTensorError("named_params: expected at least one parameter, got none")
    seen = {id(parameter): name for name, parameter in before.items()}
    for name, parameter in found.items():
        if not isinstance(name, str) or not isinstance(parameter, torch.Tensor):
            raise ShardedTensorError(
                f"named_params: expected tensors by name, got {type(parameter).__name__} for "
                f"{name!r}"
            )
        if name in before:
            raise ShardedTensorError(f"named_params: {name!r} is in another group already")
        if id(parameter) in seen:
            raise ShardedTensorError(
                f"named_params: {name!r} is the same parameter as {seen[id(parameter)]!r}; "
                "give it once"
            )
        seen[id(parameter)] = name
    return found


def _check_class(optimizer_class: Any, named: Mapping[str, torch.Tensor]) -> None:
    """Refuse an optimizer of sharded parameters whose step is not pointwise."""
    sharded = [name for name, each in named.items() if isinstance(each, ShardedTensor)]
    is_class = isinstance(optimizer_class, type)
    if sharded and is_class and issubclass(optimizer_class, _NOT_POINTWISE):
        raise ShardedTensorError(
            f"optimizer_class: expected one whose step is pointwise, such as torch.optim.Adam; "
            f"{optimizer_class.__name__} looks at a parameter as a whole, and of {sharded[0]!r} "
            "this rank has shards"
        )


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a module with their names, and the ShardedTensors that are
    attributes.

    Each is yielded once, under the first of its names.

    Arguments:
        prefix: put before all names.
        recurse: include those of submodules.
    """
    seen: set[int] = set()
    for name, (owner, attribute), value in tensors_of(module):
        if not recurse and owner is not module:
            continue
        is_attribute = isinstance(value, ShardedTensor) and attribute in vars(owner)
        if id(value) not in seen and (attribute in own_parameters(owner) or is_attribute):
            seen.add(id(value))
            yield f"{prefix}.{name}" if prefix else name, value
