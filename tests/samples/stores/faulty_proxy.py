"""A proxy of one TCP server that can drop its connections, answer nobody, or answer late."""

import contextlib
import socket
import threading
import time


class FaultyProxy:
    """Listens on `port` of 127.0.0.1 and passes bytes to `target`. `hung`, `slow_s` may change at any time."""

    def __init__(self, target: int):
        self._target = target
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.hung, self.slow_s = threading.Event(), 0.0
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def drop(self) -> None:
        """Cut every connection, in whatever it is."""
        for wire in list(self._open):
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
        self.drop()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._connect(self._socket.accept()[0])

    def _connect(self, caller: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._target), 1)
        except OSError:
            caller.close()
            return
        self._open |= {caller, server}
        for here, there in ((caller, server), (server, caller)):
            threading.Thread(target=self._pass, args=(here, there), daemon=True).start()

    def _pass(self, here: socket.socket, there: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := here.recv(1 << 16):
                while self.hung.is_set():
                    time.sleep(0.01)
                if self.slow_s:
                    time.sleep(self.slow_s)
                there.sendall(data)
        for wire in (here, there):
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
            wire.close()
            self._open.discard(wire)
