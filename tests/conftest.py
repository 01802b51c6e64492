"""Make test runs reproducible: a fixed environment and fixed examples of hypothesis."""

import os
import signal
import sys

from hypothesis import settings

# Jobs of clusters describe ranks that the tests are not, and some shells and CI systems set how
# text looks or what torch says.
for name in (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GLOO_SOCKET_IFNAME"),
    *("TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_LOGS"),
    *("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"),
    *("PYTHONWARNINGS", "PYTHONDEVMODE", "SHARDWISE_TORCH_VERSION_CHECK"),
):
    os.environ.pop(name, None)
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # every test is of the CPU
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it warns on hosts that cannot resolve their own name
# Sums are rounded differently by other numbers of threads. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a process compiles of shardwise and of the tests is there for the next: tests start many.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell starts what runs in its background with interrupts ignored, and so would every process
# that tests start; some of them are about Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every machine, in CI or not (hypothesis has a CI profile of its own).
settings.register_profile(
    "default",
    settings.get_profile("default"),
    deadline=None,
    max_examples=100,
    derandomize=True,
    print_blob=True,
)
settings.load_profile("default")

pytest_plugins = ["support.missing_packages", "support.ranks", "support.slow"]
