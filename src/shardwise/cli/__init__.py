"""The command `shardwise`."""

from __future__ import annotations

import argparse
import io
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from shardwise import (
    Costs,
    CostsError,
    DeviceMesh,
    ShardwiseError,
    __version__,
    calibrate,
    init_device_mesh,
    launch,
)
from shardwise.core import world


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale may not be able to encode bars
            stream.reconfigure(errors="replace")
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except ShardwiseError as error:
        print(f"shardwise: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # started processes have been ended by now
        print("shardwise: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="shardwise", description="Distributed tensors for PyTorch.")
    parser.add_argument("--version", action="version", version=f"shardwise {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser(
        "demo",
        argument_default=argparse.SUPPRESS,  # `Options` has the defaults
        help="train a language model on a mesh of local processes, and compare with one",
        description="Trains a small Llama-style language model on the text of Python's help, on "
        "local processes (gloo), data-parallel, tensor-parallel or both, and again in one "
        "process. Shows both loss curves, which must agree to 1e-4, what was communicated and "
        "why, and which rank holds what; saves a plot and the weights. By default a minute or so "
        "on two cores. Exit code 1 if the two runs differ, 2 for a wrong option.",
    )
    demo.add_argument(
        "--mode",
        help="dp+tp: a plan splits batch and model; tp: the model only; fsdp: parameters and batch "
        "are split over all ranks; hsdp: so, in several replicas; fsdp+tp: both (dp+tp)",
    )
    demo.add_argument("--ranks", type=int, metavar="N", help="how many processes (4)")
    demo.add_argument(
        "--mesh",
        type=_shape,
        help="sizes of the mode's axes: data x tensor parallel for dp+tp and fsdp+tp (2x2; as "
        "square as --ranks allows), replicas x shards for hsdp (2x2; two replicas), one for the "
        "others",
    )
    demo.add_argument("--steps", type=int, metavar="N", help="of training (180)")
    demo.add_argument("--model", help="tiny, small or medium (small)")
    demo.add_argument("--output", metavar="DIR", help="for the results (demo-output)")
    demo.add_argument("--seed", type=int, help="of weights and batches (0)")
    demo.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="also split the sequence over the tensor-parallel ranks between blocks (no)",
    )
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

    doctor = commands.add_parser(
        "doctor",
        help="show what is installed here, and check that shardwise works with it",
        description="Prints the versions of Python, torch and the other packages that shardwise "
        "uses, the CPU, and the backends of torch.distributed: what a bug report should say. With "
        "--self-test it also checks that shardwise works here. Exit code 1 if a check fails.",
    )
    doctor.add_argument(
        "--self-test",
        action="store_true",
        help="check the internals of torch that shardwise uses, operators, gradients, moves, FSDP "
        "and local processes: some ten seconds",
    )
    doctor.set_defaults(run=_doctor)

    migrate = commands.add_parser(
        "migrate",
        help="rewrite the imports of a program from torch's names to those of shardwise",
        description="Replaces torch.distributed.tensor, .fsdp, .device_mesh and ._shard in Python "
        "programs by shardwise: imports, and names such as torch.distributed.tensor.Shard through "
        "any alias. Comments and formatting stay. Shows the differences, and changes files only "
        "with --write. Lists the names that have no counterpart, with what to write instead. Exit "
        "code 0 if nothing is left to do by hand, 1 if something is, 2 if a file could not be "
        "read, parsed or written.",
    )
    migrate.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a file, or a folder: all .py and .pyi files in it, without hidden folders and "
        "virtual environments",
    )
    migrate.add_argument("--write", action="store_true", help="change the files (no)")
    migrate.set_defaults(run=_migrate)
    return parser


def _demo(options: argparse.Namespace) -> int:
    try:
        from shardwise import demo
        from shardwise.demo.options import check_options
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in ("rich", "safetensors"):
            raise
        raise ShardwiseError(
            f"the demo needs the package {package}, which is not installed: "
            'pip install "shardwise[demo]"'
        ) from None

    given = {name: value for name, value in vars(options).items() if name != "run"}
    try:
        chosen = check_options(**given)
    except demo.UsageError as error:
        print(f"shardwise demo: {error}", file=sys.stderr)
        return 2
    return 0 if demo.run(chosen) else 1


def _calibrate(options: argparse.Namespace) -> int:
    DeviceMesh.abstract(options.mesh, options.names)  # refuse bad names before any process starts
    if not os.access(Path(options.output).absolute().parent, os.W_OK):
        raise CostsError(f"--output: cannot write {options.output!r}")
    current = world.current()
    if current.size > 1:
        costs = _measure(options.device, options.mesh, options.names)
    else:
        size = math.prod(options.mesh)
        costs = launch(_measure, size, options.device, options.mesh, options.names)[0]
    if current.rank == 0:
        costs.save(options.output)
        for name, cost in costs.axes.items():
            rate = 1e-9 / cost.beta if cost.beta else math.inf
            print(f"{name}: {cost.alpha * 1e6:.1f} us a message, {rate:.2f} GB/s")
        print(f"start of a collective: {costs.start * 1e6:.1f} us; written to {options.output}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from shardwise.cli import doctor

    return 0 if doctor.run(self_test=options.self_test) else 1


def _migrate(options: argparse.Namespace) -> int:
    from shardwise.cli import migrate

    try:
        return migrate.run(options.paths, write=options.write)
    except migrate.MigrateError as error:
        print(f"shardwise migrate: {error}", file=sys.stderr)
        return migrate.FAILED


def _measure(device: str, shape: tuple[int, ...], names: tuple[str, ...] | None) -> Costs:
    return calibrate(init_device_mesh(device, shape, names))


def _shape(text: str) -> tuple[int, ...]:
    """Parse sizes of axes, such as `2x4`."""
    sizes = text.lower().split("x")
    if not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"expected sizes such as 2x4, got {text!r}")
    return tuple(map(int, sizes))


def _names(text: str) -> tuple[str, ...]:
    """Parse names of axes, such as `dp,tp`."""
    return tuple(text.split(","))
