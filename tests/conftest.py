from hypothesis import settings

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
