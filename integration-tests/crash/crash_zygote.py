"""Forks workers from a process that has imported everything and opened no log: a worker in milliseconds.

`python crash_zygote.py FD`: on the socket FD comes a job with three descriptors; back go the pid and, later, the status
of each.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys

import crash_worker


def serve(connection: socket.socket) -> None:
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    alive: set[int] = set()
    while True:
        ready, _, _ = select.select([connection, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 65536)
            for pid in list(alive):
                if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    alive.discard(pid)
                    connection.send(json.dumps([pid, os.waitstatus_to_exitcode(ended[1])]).encode())
        if connection in ready:
            message, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 3)
            if not message:
                break
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for place, descriptor in enumerate(descriptors):
                    os.dup2(descriptor, place)
                for descriptor in (*descriptors, wake_read, wake_write):
                    os.close(descriptor)
                connection.close()
                crash_worker.run_and_exit(*json.loads(message))
            alive.add(pid)
            for descriptor in descriptors:
                os.close(descriptor)
            connection.send(json.dumps([pid, None]).encode())
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
