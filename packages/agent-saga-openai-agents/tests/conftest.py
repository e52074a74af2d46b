"""Nothing of these tests phones home: tracing would export to the provider."""

import os

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"

from agents import set_tracing_disabled

set_tracing_disabled(True)
