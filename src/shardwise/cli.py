"""The command `shardwise`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from shardwise import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="shardwise", description="Distributed tensors for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"shardwise {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("demo", help="place a tensor on four processes and check the result")
    options = parser.parse_args(arguments)
    if options.command == "demo":
        from shardwise import demo

        return 0 if demo.run() else 1
    raise AssertionError(f"unhandled command {options.command}")
