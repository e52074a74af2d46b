"""AutoGen without a network and without a model: `ReplayChatCompletionClient`-like clients that play a script."""

from __future__ import annotations

import os

# Spans go nowhere, and nothing looks for a place to send them.
os.environ["OTEL_SDK_DISABLED"] = "true"
