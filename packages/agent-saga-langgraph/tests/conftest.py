"""Nothing of these tests phones home."""

import os
import sys
from pathlib import Path

os.environ["LANGSMITH_TRACING"] = "false"
os.environ["LANGCHAIN_TRACING_V2"] = "false"

sys.path.insert(0, str(Path(__file__).parent))  # for langgraph_fakes, which child processes import as well
