"""The same program under torchrun, on one host and on two, as under `simulate` and `launch`."""

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw

PATIENCE = 180.0
"""Seconds that the agents of a test may take on a busy machine."""

# Rank r stands at (r // 2, r % 2) and brings r, so that each answer can be checked by hand.
PROGRAM = """
import atexit
import sys
import torch
import torch.distributed as dist
import shardwise as sw


def program():
    mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    rank = torch.tensor([mesh.get_rank()])
    return (
        mesh.get_coordinate(),
        sw.communicator(mesh, "dp").all_reduce(rank).item(),
        sw.communicator(mesh, "tp").all_reduce(rank).item(),
        sw.communicator(mesh, ("tp", "dp")).all_gather(rank).tolist(),
        sw.communicator(mesh).broadcast(rank, source=3).item(),
    )


def look_back():
    if dist.is_initialized():
        sys.stdout.write("the process group is still there\\n")


if __name__ == "__main__":
    atexit.register(look_back)  # runs after what is registered later
    if "join-first" in sys.argv:
        dist.init_process_group("gloo")
    sys.stdout.write(f"{program()}\\n")
    if "join-first" in sys.argv:
        dist.destroy_process_group()
"""
ANSWERS = [
    ((0, 0), 2, 1, [0, 2, 1, 3], 3),
    ((0, 1), 4, 1, [0, 2, 1, 3], 3),
    ((1, 0), 2, 5, [0, 2, 1, 3], 3),
    ((1, 1), 4, 5, [0, 2, 1, 3], 3),
]


def program() -> object:
    """What the program returns, here."""
    names: dict[str, Any] = {"__name__": "torchrun_program"}
    exec(PROGRAM, names)
    return names["program"]()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "torchrun_program.py"
    path.write_text(PROGRAM)
    return path


@dataclass(frozen=True)
class Host:
    """Where an agent runs: what to put before a command, and the variables to set."""

    within: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """What agents and their ranks have done."""

    stdout: str
    stderr: str
    """What the ranks wrote."""
    returncode: int
    agents: str
    """What the agents wrote to their own stderr. Those of several hosts may complain at the end of
    a good run: the one that holds their store may leave before another has read that all are
    done."""


def torchrun(*arguments: object, hosts: Sequence[Host] = (Host(),)) -> Done:
    """Run an agent on each host."""
    deadline = time.monotonic() + PATIENCE
    agents: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as logs:
        try:
            for at, host in enumerate(hosts):
                options = [f"--nnodes={len(hosts)}", f"--node-rank={at}"] if len(hosts) > 1 else []
                options += [f"--log-dir={logs}/{at}", "--redirects=2"]
                agents.append(
                    subprocess.Popen(
                        [*host.within, sys.executable, "-m", "torch.distributed.run", *options]
                        + [str(argument) for argument in arguments],
                        # Without a number of threads torchrun has something to say.
                        env=os.environ | {"OMP_NUM_THREADS": "1"} | host.variables,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )
            said = [agent.communicate(timeout=deadline - time.monotonic()) for agent in agents]
        finally:
            for agent in agents:
                end(agent)
        ranks = sorted(Path(logs).rglob("stderr.log"))
        err = "".join(log.read_text() for log in ranks)
    code = max((agent.returncode for agent in agents), key=abs)
    return Done("".join(out for out, _ in said), err, code, "".join(text for _, text in said))


def end(agent: subprocess.Popen[str]) -> None:
    with agent:
        agent.terminate()  # it then ends its ranks
        try:
            agent.wait(20)
        except subprocess.TimeoutExpired:
            agent.kill()


def assert_answered(done: Done) -> None:
    """Each rank wrote its answer, and none anything else."""
    assert done.returncode == 0, done.agents
    assert sorted(done.stdout.splitlines()) == list(map(str, ANSWERS)), done.agents
    assert done.stderr == ""


# ---- one host


def test_simulated_and_launched_ranks_run_the_program(workers4: sw.Workers) -> None:
    assert sw.simulate(program, 4) == ANSWERS
    assert workers4.run(program) == ANSWERS


@pytest.mark.slow
def test_torchrun_needs_no_set_up(script: Path) -> None:
    assert_answered(torchrun("--standalone", "--nproc-per-node=4", script))


MISTAKES = """
import sys
import shardwise as sw

for mistake in (
    lambda: sw.launch(print, 2),
    lambda: sw.init_device_mesh("cpu", (3, 2), ("dp", "tp")),
):
    try:
        mistake()
    except sw.ShardwiseError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\\n")

ranks = sw.communicator(sw.init_device_mesh("cpu", (2,)))
ranks.barrier()
if ranks.index == 1:
    raise ValueError("one has failed")
ranks.barrier()
"""


@pytest.mark.slow
def test_mistakes_are_refused_and_a_rank_that_raises_does_not_hang_at_exit(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MISTAKES)
    done = torchrun("--standalone", "--nproc-per-node=2", script)
    assert done.returncode == 1
    for rank in range(2):
        assert (
            f"LaunchError: torchrun started this process as rank {rank} of 2: call the function "
            "itself, without launch\n"
        ) in done.stdout
        assert (
            "MeshError: mesh_shape: expected a product of 2, the number of ranks; got (3, 2) = 6; "
            "torch.distributed was started with 2 ranks. DeviceMesh(...) takes some of them "
            f"[rank {rank} of 2]\n"
        ) in done.stdout
    assert "ValueError: one has failed\n" in done.stderr


# ---- two hosts


@dataclass(frozen=True)
class Network:
    hosts: list[Host]
    address: str
    port: int


def agents(network: Network, *arguments: object) -> Done:
    where = [f"--master-addr={network.address}", f"--master-port={network.port}"]
    return torchrun(*where, "--nproc-per-node=2", *arguments, hosts=network.hosts)


@pytest.mark.slow
def test_two_agents_on_a_host_are_two_hosts_and_a_script_may_join_the_ranks_itself(
    script: Path,
) -> None:
    network = Network([Host(), Host()], "127.0.0.1", unused_port())
    assert_answered(agents(network, script, "join-first"))


def unused_port() -> int:
    """Below those that the system gives out by itself, as another test might get it in between;
    and not the same each time, as another run of the tests may look for one too."""
    for port in random.SystemRandom().sample(range(10_000, 32_768), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


@pytest.fixture
def network() -> Iterator[Network]:
    """Two hosts: network namespaces joined by a cable."""
    names = [f"sw{os.getpid()}{letter}" for letter in "ab"]
    with namespaces(names):
        try:
            lay_cable(names)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no cable between network namespaces: {error.stderr.strip()}")
        # torch warns that these hosts have no name.
        hosts = [
            Host(
                ["ip", "netns", "exec", name],
                {"GLOO_SOCKET_IFNAME": name, "TORCH_CPP_LOG_LEVEL": "ERROR"},
            )
            for name in names
        ]
        yield Network(hosts, "10.77.0.1", 29400)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


@contextmanager
def namespaces(names: list[str]) -> Iterator[None]:
    if shutil.which("ip") is None:
        pytest.skip("no network namespaces: there is no command `ip` (iproute2)")
    made = []
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces: {error.stderr.strip()}")
            made.append(name)
        yield
    finally:
        for name in made:
            ip("netns", "delete", name)  # and the end of the cable in it


def lay_cable(names: list[str]) -> None:
    """Join two namespaces; each end is named like its namespace."""
    first, second = names
    ip("-n", first, "link", "add", first, "type", "veth", "peer", second, "netns", second)
    for at, name in enumerate(names, start=1):
        ip("-n", name, "address", "add", f"10.77.0.{at}/24", "dev", name)
        ip("-n", name, "link", "set", name, "up")
        ip("-n", name, "link", "set", "lo", "up")


@pytest.mark.slow
def test_two_agents_on_a_network_need_no_set_up(script: Path, network: Network) -> None:
    assert_answered(agents(network, script))
