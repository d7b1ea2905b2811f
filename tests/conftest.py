"""What holds for all tests."""

from hypothesis import settings

# A machine that is busy with other tests must not look like an example that takes too long.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
