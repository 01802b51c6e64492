"""What the demo leaves behind: weights that any process can load, and a plot of the losses."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import safetensors
import safetensors.torch

from shardwise import DTensor
from shardwise.demo.options import Options
from shardwise.examples.llama import Config, Llama

WEIGHTS, PLOT = "model.safetensors", "losses.png"


def save_weights(model: Llama, options: Options, is_first: bool) -> None:
    """Put every weight together, which all ranks take part in, and let the first rank write them.

    A weight under two names is written once, under the first.
    """
    whole = {
        name: each.full_tensor() if isinstance(each, DTensor) else each.detach()
        for name, each in model.named_parameters()
    }
    if is_first:
        contents = {name: each.contiguous() for name, each in whole.items()}
        metadata = {"config": json.dumps(asdict(model.config))}
        safetensors.torch.save_file(contents, options.output / WEIGHTS, metadata)


def load_weights(path: Path) -> Llama:
    """The plain model of one process that was saved."""
    with safetensors.safe_open(path, "pt") as file:
        config = Config(**json.loads(file.metadata()["config"]))
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    model = Llama(config)
    model.load_state_dict(weights, strict=not config.tied)
    return model


def save_plot(path: Path, on_mesh: Sequence[float], alone: Sequence[float], label: str) -> bool:
    """Draw both loss curves; False if there is no matplotlib."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        return False
    figure = figures.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(alone) + 1), alone, color="tab:orange", linewidth=5, alpha=0.5)
    axes.plot(range(1, len(on_mesh) + 1), on_mesh, color="tab:blue", linewidth=1.2)
    axes.legend(["one process", label])
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="The same training twice")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    return True
