"""Another process: goes on from an envelope whose call a person has approved. Prints what the run came to."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

from openai_agents_fakes import Till, approving, own_loop, traveller

from agent_saga_core import FileLog, SagaError
from agent_saga_openai_agents import load_state, saga_run


def main(directory: Path) -> None:
    till = Till(directory / "till")
    till.register()
    agent = traveller(till)
    envelope = json.loads((directory / "envelope").read_text("utf-8"))
    log = FileLog(directory / "log", create=False)
    with own_loop():
        try:
            result = saga_run(agent, approving(load_state(agent, envelope)), log=log)
        except SagaError as error:
            print(type(error).__name__)
        else:
            print(result.final_output, agent.model.heard)
    log.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
