"""Whether the ranks of a mesh have the same of what should be alike: they compare digests."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from typing import Any

import torch

from shardwise.comm import communicator
from shardwise.mesh import DeviceMesh


def disagreeing(mesh: DeviceMesh, content: Any) -> tuple[list[int], list[int]]:
    """The ranks whose bytes differ from those that most have, and the others.

    Costs a gather of 8 bytes for each rank; all ranks of the mesh must call it.

    Arguments:
        content: this rank's bytes, or anything with a buffer of them.
    """
    ranks = mesh.mesh.flatten().tolist()
    if mesh.size() == 1 or mesh.is_abstract or mesh.device_type == "meta":
        return [], ranks
    digest = blake2b(content, digest_size=8).digest()
    mine = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=mesh.device_type)
    digests = communicator(mesh).all_gather(mine).tolist()
    common, _ = Counter(digests).most_common(1)[0]
    others = [rank for rank, each in zip(ranks, digests, strict=True) if each != common]
    return others, [rank for rank in ranks if rank not in others]
