import signal

from hypothesis import settings

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
