"""Settings for all tests."""

from hypothesis import settings

# Always the same examples: a failure is one for everybody.
settings.register_profile("oasis", max_examples=40, derandomize=True, deadline=None)
settings.load_profile("oasis")
