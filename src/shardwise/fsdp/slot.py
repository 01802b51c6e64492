"""Slots: where modules keep the parameters of groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.fsdp.extension import Extension
from shardwise.fsdp.grad_dtype import GradDtype
from shardwise.fsdp.policies import MixedPrecisionPolicy
from shardwise.layout import Layout
from shardwise.torch_internals import own_parameters


class Slot:
    """Where a module keeps a parameter."""

    __slots__ = (
        "extension",
        "grad_dtype",
        "key",
        "layout",
        "module",
        "name",
        "own_setter",
        "policy",
        "strides",
    )

    def __init__(
        self,
        module: nn.Module,
        key: str,
        name: str,
        layout: Layout,
        strides: tuple[int, ...] | None,
        extension: Extension | None,
        policy: MixedPrecisionPolicy,
        grad_dtype: GradDtype | None = None,
    ) -> None:
        self.module = module
        self.key = key
        self.name = name
        self.layout = layout
        """Of the parameter at rest."""
        self.strides = strides
        """Of the gathered one, if its dims are not stored in their order."""
        self.extension = extension
        """What it says about its gathering, if anything."""
        self.policy = policy
        """The policy of this parameter."""
        self.grad_dtype = grad_dtype
        """What users have set as the dtype of its gradient, if anything."""
        # Some modules, such as torch's LSTM, keep their parameters in a list too.
        self.own_setter = type(module).__setattr__ is not nn.Module.__setattr__

    def of(self, module: nn.Module) -> Slot:
        """The same of a copy of the module."""
        return Slot(
            module,
            self.key,
            self.name,
            self.layout,
            self.strides,
            self.extension,
            self.policy,
            self.grad_dtype,
        )

    @property
    def tensor(self) -> nn.Parameter:
        """What is there now."""
        found = own_parameters(self.module)[self.key]
        assert found is not None, "only slots that hold something are listed"
        return found

    @property
    def is_filled(self) -> bool:
        """Whether there is anything; users may have taken it out."""
        return self.module._parameters.get(self.key) is not None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is there now."""
        return own_parameters(self.module).get(self.key) is tensor

    def note_grad_dtype(self) -> None:
        """Remember what users have set on the parameter that is there now. One that is put in its
        place, by a conversion or from a state dict, inherits it."""
        if self.is_filled:
            self.grad_dtype = GradDtype.set_on(self.tensor) or self.grad_dtype

    def restore_grad_dtype(self) -> None:
        """Set it on the parameter that is there now."""
        if self.grad_dtype is not None and self.is_filled:
            self.grad_dtype.put_on(self.tensor)

    def take(self) -> None:
        """Note on the module that a group has it."""
        vars(self.module).setdefault("_fsdp_keys", set()).add(self.key)

    def put(self, tensor: Any) -> None:
        """Replace it."""
        if self.own_setter:
            setattr(self.module, self.key, tensor)
        else:
            own_parameters(self.module)[self.key] = tensor


def is_taken(module: nn.Module, key: str) -> bool:
    """Whether a group has this parameter of a module."""
    return key in vars(module).get("_fsdp_keys", ())
