"""Every private name of torch that shardwise uses, in one place.

No other module reads an underscored name of torch: `tests/project/test_torch_internals.py` checks
it.
Three kinds of names need not be listed here: aten's underscored operators (`torch._foreach_add_`),
methods of torch's classes that ours override, and torch's own DTensor in `interop`.

The names are in `tensors`, `operators`, `distributed` and `patched`; all are imported from here.
Each name is taken by its path, with its purpose, when shardwise is imported. If any is missing or
has other parameters than expected, the import fails with all of them in one ImportError, before
anything in torch is changed. `report()` lists them for `shardwise doctor --self-test`. All look
alike in torch 2.13, 2.14 and 2.15 unless the purpose says otherwise.
"""

from __future__ import annotations

from shardwise.torch_internals.distributed import *  # noqa: F403
from shardwise.torch_internals.lookup import Internal as Internal
from shardwise.torch_internals.lookup import check_internals
from shardwise.torch_internals.lookup import report as report
from shardwise.torch_internals.operators import *  # noqa: F403
from shardwise.torch_internals.patched import *  # noqa: F403
from shardwise.torch_internals.tensors import *  # noqa: F403

check_internals()
