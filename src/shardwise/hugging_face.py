"""`Trainer` of transformers for models that shardwise has sharded. Needs `shardwise[hf]`.

The original wraps the model in DistributedDataParallel, which shardwise refuses, hands each rank
other rows of the data, and saves what rank 0 holds. This one leaves the model as it is, gives the
ranks that share rows the same ones, and saves whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
import transformers
from torch import nn

from shardwise.core.errors import ShardwiseError
from shardwise.dtensor.tensor import DTensor
from shardwise.fsdp import FSDPModule
from shardwise.torch_internals import pytree


class TrainerError(ShardwiseError, ValueError):
    """A model that Trainer cannot train as it was sharded."""


class Trainer(transformers.Trainer):
    """`transformers.Trainer` for a model sharded by `shard_module`, `fully_shard` or both.

    It takes the same arguments. A model of `shard_module` gets the whole batch on every rank
    (`per_device_train_batch_size` rows in all) and takes its part by its `Activations`; of a model
    of `fully_shard` or `replicate`, each data-parallel rank gets its own rows. Checkpoints hold
    whole tensors, of the optimizer too, and can be loaded on any number of ranks.

    Example:
        >>> shard_module(model, mesh, plans.llama(names=plans.HUGGING_FACE, data_axis="dp"))
        >>> Trainer(model, TrainingArguments("out"), train_dataset=dataset).train()
    """

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        self._ranks_per_row = _ranks_that_share_rows(model)
        # What accelerate sets on a model that it has wrapped, and so does not wrap again.
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        super().__init__(model, *args, **kwargs)

    def get_tp_size(self) -> int:
        """Return how many ranks get the same rows, which the original counts once."""
        return self._ranks_per_row

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super()._get_dataloader(*args, **kwargs)
        if self._ranks_per_row > 1:
            sampler: Any = getattr(loader, "batch_sampler", None)
            if not hasattr(sampler, "process_index"):  # accelerate chooses a rank's rows there
                raise TrainerError(
                    "dataset: expected one with a length, of which each rank loads its rows, got "
                    f"{type(loader).__name__} of {type(loader.dataset).__name__}; a model of "
                    "shard_module takes no iterable dataset, and no dispatch_batches=True"
                )
            sampler.num_processes = self.args.world_size // self._ranks_per_row
            sampler.process_index = self.args.process_index // self._ranks_per_row
            if sampler.num_processes == 1:
                sampler.even_batches = False  # nothing to make even: the last batch stays short
        return loader

    def compute_loss(self, *args: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Return the loss of the whole batch as a plain tensor, on every rank."""
        compute: Any = super().compute_loss
        loss, outputs = compute(*args, return_outputs=True, **kwargs)
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return loss, logits and labels as whole tensors."""
        return _gathered(super().prediction_step(*args, **kwargs))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; if all ranks share their rows they have all results and exchange nothing."""
        if 1 < self._ranks_per_row < self.args.world_size:
            raise TrainerError(
                f"evaluate: expected a model on which all ranks get the same rows, or each its "
                f"own; got one on which {self._ranks_per_row} of {self.args.world_size} share "
                "them. Evaluate with a loop of your own"
            )
        if self._ranks_per_row > 1:
            self.gather_function = self._without_exchange
        return super().evaluation_loop(*args, **kwargs)

    def _without_exchange(self, value: Any) -> Any:
        """Return the rows that all ranks have, cut as the original cuts what it gathers."""
        with _replaced(self.accelerator, "gather", lambda value: value):
            return self.accelerator.gather_for_metrics(value)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Gather the weights, on all ranks, and save them on the first."""
        model: Any = self.model
        weights = _gathered(model.state_dict())
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=weights)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer: Any = self.optimizer
        state = _gathered(optimizer.state_dict())
        with _replaced(self, "optimizer", SimpleNamespace(state_dict=lambda: state)):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load random states on all ranks, or on none: a checkpoint of fewer ranks has too few."""
        if checkpoint is not None and self.args.world_size > 1:
            found = [False] * self.args.world_size
            path = Path(checkpoint, f"rng_state_{self.args.process_index}.pth")
            dist.all_gather_object(found, path.is_file())
            if not all(found):
                return
        super()._load_rng_state(checkpoint)


def _gathered(values: Any) -> Any:
    """Return nested values with whole plain tensors in place of DTensors; collective."""

    def whole(value: Any) -> Any:
        return value.full_tensor().detach() if isinstance(value, DTensor) else value

    return pytree.tree_map(whole, values)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object another attribute for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _ranks_that_share_rows(model: nn.Module) -> int:
    """Return how many neighbouring ranks get the same rows of the data."""
    if not any(isinstance(each, DTensor) for each in model.parameters()):
        raise TrainerError(
            "model: expected one that was sharded (shard_module, fully_shard, replicate), got "
            f"{type(model).__name__} with plain parameters; transformers.Trainer is for those"
        )
    world = dist.get_world_size() if dist.is_initialized() else 1
    meshes = {
        each._fsdp_group.info.mesh for each in model.modules() if isinstance(each, FSDPModule)
    }
    if not meshes:
        return world
    if len(meshes) > 1:
        raise TrainerError(
            f"model: expected modules that are data-parallel on one mesh, got {len(meshes)} meshes"
        )
    ranks = next(iter(meshes)).mesh.flatten().tolist()
    share = world // len(ranks)
    first = dist.get_rank() % share if world > 1 else 0
    if ranks != list(range(first, world, share)):
        raise TrainerError(
            f"model: expected data-parallel ranks {list(range(first, world, share))}, so that "
            f"neighbours share rows, got {ranks}; make the mesh with the data axis first, such as "
            "('dp', 'tp')"
        )
    return share
