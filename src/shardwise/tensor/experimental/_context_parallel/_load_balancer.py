"""`torch.distributed.tensor.experimental._context_parallel._load_balancer`."""

from shardwise.parallel.sequence_split import HeadTailLoadBalancer as _HeadTailLoadBalancer
from shardwise.parallel.sequence_split import LoadBalancer as _LoadBalancer
from shardwise.parallel.sequence_split import (
    PerDocumentHeadTailLoadBalancer as _PerDocumentHeadTailLoadBalancer,
)
from shardwise.parallel.sequence_split import PTRRLoadBalancer as _PTRRLoadBalancer

__all__ = [
    "_HeadTailLoadBalancer",
    "_LoadBalancer",
    "_PTRRLoadBalancer",
    "_PerDocumentHeadTailLoadBalancer",
]
