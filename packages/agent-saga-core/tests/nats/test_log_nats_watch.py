"""`recover --watch` as a user who may look into a log on NATS and not write to it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agent_saga_core import read_saga
from agent_saga_core.log.nats import NatsLog, init

from ..servers.addresses import SECRET
from ..servers.store import BOUND, wait_for
from .server import fresh, server_of_its_own

SHOP = """
import os, sys
from agent_saga_core import ActionSemantics, compensator, saga_scope, undo

@compensator("watched.undo")
def undo_it():
    pass

if __name__ == "__main__":
    saga_scope("left", log=sys.argv[1]).__enter__().execute(
        "act", lambda: 1, semantics=ActionSemantics.COMPENSABLE, compensate=undo("watched.undo")
    )
    os._exit(9)
"""


def test_it_says_one_error_until_there_is_nothing_left_to_write(tmp_path: Path) -> None:
    may_look = '{ publish: { allow: ["$JS.API.>", "_INBOX.>"], deny: ["$JS.API.STREAM.CREATE.>"] } }'
    users = (
        f'{{ user: "scott", password: "{SECRET}" }}, '
        f'{{ user: "looker", password: "{SECRET}", permissions: {may_look} }}'
    )
    with server_of_its_own(more=f"authorization {{ users: [ {users} ] }}") as server:
        plain = fresh(server.uri, lease=1, timeout=1)

        def as_user(name: str) -> str:
            return plain.replace("nats://", f"nats://{name}:{quote(SECRET)}@")

        init(as_user("scott"))
        (tmp_path / "shop.py").write_text(SHOP, "utf-8")
        died = subprocess.run([sys.executable, "shop.py", as_user("scott")], cwd=tmp_path, timeout=BOUND, check=False)
        assert died.returncode == 9
        watch = [sys.executable, "-m", "agent_saga_core", "recover", "--watch", "--json", "--interval", "0.05"]
        with subprocess.Popen(
            [*watch, "--import", "shop", "--metrics", "0"],
            cwd=tmp_path,
            env={**os.environ, "AGENT_SAGA_LOG": as_user("looker")},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            heard: queue.Queue[dict[str, Any]] = queue.Queue()

            def listen() -> None:
                for event in map(json.loads, process.stdout or ()):
                    if event["event"] != "log":  # what is to be known of the server
                        heard.put(event)

            reader = threading.Thread(target=listen, daemon=True)
            reader.start()
            try:
                events = [heard.get(timeout=BOUND) for _ in range(4)]
                assert [event["event"] for event in events] == ["serving", "watching", "looked", "unavailable"]
                assert "ermission" in events[-1]["message"] and SECRET not in events[-1]["message"]

                def numbers() -> dict[str, float]:
                    with urllib.request.urlopen(events[0]["metrics"], timeout=BOUND) as answer:
                        text = answer.read().decode().splitlines()
                    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in text)
                            if not name.startswith("#")}  # fmt: skip

                rounds = numbers()["agent_saga_recovery_rounds_total"]
                # Each of them has read what is unfinished, and calls the owner live for a lease.
                wait_for(lambda: numbers()["agent_saga_recovery_rounds_total"] >= rounds + 3)
                assert numbers()["agent_saga_log_up"] == 0
                assert heard.empty()
                code = [sys.executable, "-m", "agent_saga_core", "recover", "--import", "shop", "--log"]
                other = subprocess.run([*code, as_user("scott")], cwd=tmp_path, timeout=BOUND, check=False)
                assert other.returncode == 0
                assert heard.get(timeout=BOUND)["event"] == "available"
                assert numbers()["agent_saga_log_up"] == 1
                process.terminate()
                assert process.wait(BOUND) == 0
                assert heard.get(timeout=BOUND)["event"] == "stopped"
            finally:
                process.kill()
                process.wait(BOUND)
                reader.join(BOUND)
        log = NatsLog(as_user("scott"))
        assert read_saga(log, "left").status == "ROLLED_BACK"
        log.close()
