"""An optimizer of sharded parameters: torch's own, on each rank, of the shards there.

Its state dict is one of the whole: keyed by the names of parameters, with sharded tensors cut as
the parameters are. So it can be loaded where they are cut otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn, optim

from shardwise.sharded import optimizer_state
from shardwise.sharded.errors import ShardedStateError, ShardedTensorError
from shardwise.sharded.held import Held
from shardwise.sharded.optimizer_state import Parameters
from shardwise.sharded.plan import tensors_of
from shardwise.sharded.specs import summary
from shardwise.sharded.tensor import ShardedTensor
from shardwise.torch_internals import hooks_of_optimizer, own_parameters

Named = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

_OF_WHOLE_TENSORS = (optim.LBFGS, optim.Adafactor, optim.Muon)
"""Their steps look at a parameter as a whole, and would silently be others on its shards."""


class ShardedOptimizer(optim.Optimizer):
    """One of torch's optimizers for parameters of which some are ShardedTensors.

    Its `param_groups` and `state` are those of the optimizer of this rank's shards. Hooks and
    learning rate schedulers work on it as on any other.

    Arguments:
        named_params: the parameters by name, as `named_params_with_sharded_tensor` gives them.
        optimizer_class: such as `torch.optim.Adam`; its step must be pointwise.
        optimizer_args, optimizer_kwargs: what it is made with, besides parameters.

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
        self.named_params = _checked(named_params, {})
        self._class = optimizer_class
        _check_class(optimizer_class, self.named_params)
        self._groups = [list(self.named_params)]
        self._known = _local(self.named_params)
        tensors = _tensors(self.named_params, self._known)
        self._optim = optimizer_class(tensors, *optimizer_args, **optimizer_kwargs)
        # What torch's constructor prepares besides groups and state, which are the inner one's.
        super().__setstate__({})

    # ---- the optimizer of this rank's shards

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of this rank's shards."""
        return self._optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of each of this rank's shards."""
        return self._optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The options of groups that do not say otherwise."""
        return self._optim.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let the parameters have no gradients, or zeros."""
        for parameter in self.named_params.values():
            if set_to_none and isinstance(parameter, ShardedTensor):
                parameter.grad = None  # on a rank without shards too, which notes others' gradients
        self._optim.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change the parameters by their gradients; returns the loss that `closure` returns."""
        self._check_current("step")
        return self._optim.step(closure)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own.

        Arguments:
            param_group: "params" by name, or as pairs of names and parameters; and options.
        """
        options = dict(param_group)
        named = _checked(options.pop("params", ()), self.named_params)
        _check_class(self._class, named)
        known = _local(named)
        self._optim.add_param_group({"params": _tensors(named, known), **options})
        self.named_params = {**self.named_params, **named}
        self._groups.append(list(named))
        self._known.update(known)

    # ---- saved and loaded

    def init_state(self) -> None:
        """Make the state that optimizers make in their first step; what there is stays as it is.

        So that `torch.distributed.checkpoint`, which reads into tensors that are there, finds the
        state of a new optimizer in its `state_dict()`. It is a step with gradients of zero and a
        learning rate of zero, which counts as a step until other state is loaded.
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
        """The state of all parameters by name, and the groups; all ranks call it.

        State of a ShardedTensor's shape is a ShardedTensor, cut alike; counters are as they are.
        """
        self._check_current("state_dict")
        for hook in hooks_of_optimizer(self, "state_dict_pre"):
            hook(self)
        saved = optimizer_state.saved(self._parameters())
        for after in hooks_of_optimizer(self, "state_dict_post"):
            replaced = after(self, saved)
            saved = saved if replaced is None else replaced
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the optimizer was whose `state_dict()` it is; all ranks call it.

        State may be cut otherwise than the parameters are here, or be whole. Names and sizes are
        checked on all ranks before anything is changed.
        """
        self._check_current("load_state_dict")
        for hook in hooks_of_optimizer(self, "load_state_dict_pre"):
            replaced = hook(self, dict(state_dict))
            state_dict = state_dict if replaced is None else replaced
        self._optim.load_state_dict(optimizer_state.loaded(self._parameters(), state_dict))
        for after in hooks_of_optimizer(self, "load_state_dict_post"):
            after(self)

    def __getstate__(self) -> NoReturn:
        raise ShardedStateError(
            "ShardedOptimizer: it is neither pickled nor copied, as its shards are those of the "
            "parameters it was made with; save its state_dict(), and load that into another"
        )

    def _parameters(self) -> Parameters:
        return Parameters(self.named_params, self._groups, self._optim)

    def _check_current(self, what: str) -> None:
        """Refuse to go on with shards that the parameters no longer have."""
        for name, (held, tensors) in self._known.items():
            parameter: Any = self.named_params[name]
            now = map(id, parameter._tensors())
            if parameter._held != held or list(now) != list(map(id, tensors)):
                raise ShardedStateError(
                    f"{what}: the shards of {name!r} are not those that this optimizer was made "
                    f"with ({summary(parameter._sharding_spec)} now); make another after "
                    "reshard(), and load what state_dict() of this one gave before it"
                )


Known = dict[str, tuple[Held, list[torch.Tensor]]]
"""By name of a sharded parameter: all shards, and the tensors of this rank's."""


def _local(named: Mapping[str, torch.Tensor]) -> Known:
    return {
        name: (parameter._held, parameter._tensors())
        for name, parameter in named.items()
        if isinstance(parameter, ShardedTensor)
    }


def _tensors(named: Mapping[str, torch.Tensor], known: Known) -> list[torch.Tensor]:
    """What the optimizer of this rank is given."""
    found = [
        tensor
        for name, parameter in named.items()
        for tensor in (known[name][1] if name in known else [parameter])
    ]
    # Optimizers refuse to have nothing to do, which this rank may have.
    return found or [torch.empty(0, requires_grad=True)]


def _checked(named: Named, before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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
                f"named_params: {name!r} is {seen[id(parameter)]!r} once more; give it once"
            )
        seen[id(parameter)] = name
    return found


def _check_class(optimizer_class: Any, named: Mapping[str, torch.Tensor]) -> None:
    sharded = [name for name, each in named.items() if isinstance(each, ShardedTensor)]
    is_class = isinstance(optimizer_class, type)
    if sharded and is_class and issubclass(optimizer_class, _OF_WHOLE_TENSORS):
        raise ShardedTensorError(
            f"optimizer_class: expected one whose step is pointwise, such as torch.optim.Adam; "
            f"{optimizer_class.__name__} looks at a parameter as a whole, and of {sharded[0]!r} "
            "this rank has shards"
        )


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a module with their names, and the ShardedTensors that are attributes.

    Each comes once, under the first of its names.

    Arguments:
        prefix: what all names begin with.
        recurse: those of submodules too.
    """
    seen: set[int] = set()
    for name, (owner, attribute), value in tensors_of(module):
        if not recurse and owner is not module:
            continue
        is_attribute = isinstance(value, ShardedTensor) and attribute in vars(owner)
        if id(value) not in seen and (attribute in own_parameters(owner) or is_attribute):
            seen.add(id(value))
            yield f"{prefix}.{name}" if prefix else name, value
