"""The test process reaches this machine and no other (the options stand in pyproject.toml)."""

import socket

import pytest
from pytest_socket import SocketConnectBlockedError


def test_loopback_is_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname(), timeout=5) as client:
            assert client.getpeername() == server.getsockname()


@pytest.mark.filterwarnings("ignore:A test tried to use socket")
def test_the_rest_of_the_world_is_closed() -> None:
    # 192.0.2.0/24 is set aside for documentation: nothing answers there, should the block ever fail.
    with pytest.raises(SocketConnectBlockedError):
        socket.create_connection(("192.0.2.1", 80), timeout=0.1)
