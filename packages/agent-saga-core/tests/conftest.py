"""What holds for every test of the core."""

import os
import signal

import pytest
from hypothesis import settings

# What the suites of the stores have in common says what it found, as a test file does.
pytest.register_assert_rewrite(f"{__package__}.servers")

# A log named in the developer's shell is never read or written by a test.
os.environ.pop("AGENT_SAGA_LOG", None)

# Whoever started the tests in the background may have had them ignore Ctrl-C, and with them every process they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No wall-time assertions: a slow machine is not a failing test. Under CI the examples are the same every
# time, so that a red run is about the change; at the desk each run looks somewhere else.
settings.register_profile("desk", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "desk")
