"""The command `shardwise`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwise import (
    Costs,
    CostsError,
    DeviceMesh,
    ShardwiseError,
    __version__,
    calibrate,
    init_device_mesh,
    launch,
    world,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except ShardwiseError as error:
        print(f"shardwise: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardwise", description="Distributed tensors for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"shardwise {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser("demo", help="place a tensor on four processes and check the result")
    demo.set_defaults(run=_demo)

    measure = commands.add_parser(
        "calibrate",
        help="measure what communication costs along each axis of a mesh",
        description="Measures latency and bandwidth along each axis and writes the file that "
        "plan_redistribute(costs=...) reads, for meshes with these axis names. Under torchrun it "
        "measures the ranks that are there, and rank 0 writes the file, which must then be the "
        "same on every host; otherwise it starts local processes.",
    )
    measure.add_argument("--mesh", type=_shape, required=True, help="sizes of the axes: 2x4")
    measure.add_argument("--names", type=_names, help="names of the axes: dp,tp")
    measure.add_argument("--device", default="cpu", help="device type of the mesh (cpu)")
    measure.add_argument("--output", default="costs.json", help="the file to write (costs.json)")
    measure.set_defaults(run=_calibrate)
    return parser


def _demo(options: argparse.Namespace) -> bool:
    from shardwise import demo

    return not demo.run()


def _calibrate(options: argparse.Namespace) -> int:
    DeviceMesh.abstract(options.mesh, options.names)  # refuses bad names before anything starts
    if not os.access(Path(options.output).absolute().parent, os.W_OK):
        raise CostsError(f"--output: cannot write {options.output!r}")
    here = world.current()
    if here.size > 1:
        costs = _measure(options.device, options.mesh, options.names)
    else:
        size = math.prod(options.mesh)
        costs = launch(_measure, size, options.device, options.mesh, options.names)[0]
    if here.rank == 0:
        costs.save(options.output)
        for name, cost in costs.axes.items():
            rate = 1e-9 / cost.beta if cost.beta else math.inf
            print(f"{name}: {cost.alpha * 1e6:.1f} us a message, {rate:.2f} GB/s")
        print(f"start of a collective: {costs.start * 1e6:.1f} us; written to {options.output}")
    return 0


def _measure(device: str, shape: tuple[int, ...], names: tuple[str, ...] | None) -> Costs:
    return calibrate(init_device_mesh(device, shape, names))


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.lower().split("x")
    if not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"expected sizes such as 2x4, got {text!r}")
    return tuple(map(int, sizes))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))
