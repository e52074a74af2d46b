"""Semantic Kernel without a network: spans go nowhere, and nothing looks for a place to send them."""

import os

os.environ["OTEL_SDK_DISABLED"] = "true"
