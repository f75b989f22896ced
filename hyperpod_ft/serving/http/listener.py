"""A listening HTTP server with a thread for each connection."""

import socket
import sys
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hyperpod_ft.errors import UserError


class Listener(ThreadingHTTPServer):
    """Listens from the start."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        """Port 0 takes a free one. Raises UserError when it cannot listen there."""
        try:
            self.address_family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            super().__init__((str(address[0]), int(address[1])), handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"cannot listen on {host}, port {port}: {reason}", "choose another --port") from error

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of a connection's error unless the client caused it; requests handle their own errors."""
        del request, client_address
        if not isinstance(sys.exc_info()[1], OSError):
            traceback.print_exc()
