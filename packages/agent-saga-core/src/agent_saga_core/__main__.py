"""`python -m agent_saga_core` is `agent-saga`."""

import sys

from agent_saga_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
