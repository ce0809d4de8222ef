"""A relay between clients and a server of which all connections can be cut at once, as by a network that fails."""

import selectors
import socket
import threading


class Proxy:
    """Listens on a free port of the loopback. A context manager; `address` is what clients connect to."""

    def __init__(self, target):
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._waker, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._peers = {}
        self._orders = []
        for one in (self._listener, self._waker):
            self._selector.register(one, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self):
        """Ends all connections. New ones are taken as before."""
        self._order("cut")

    def close(self):
        self._order("stop")
        self._thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _order(self, what):
        self._orders.append(what)
        self._wake.send(b"!")

    def _run(self):
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._waker:
                    self._waker.recv(64)
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._peers:
                    self._relay(key.fileobj)
            orders, self._orders = self._orders, []
            if orders:
                for one in list(self._peers):
                    self._end(one)
            if "stop" in orders:
                for one in (self._listener, self._waker, self._wake, self._selector):
                    one.close()
                return

    def _accept(self):
        here, _ = self._listener.accept()
        try:
            there = socket.create_connection(self._target, timeout=10)
        except OSError:  # the server is not there just now
            here.close()
            return
        there.settimeout(None)
        for one, other in ((here, there), (there, here)):
            self._peers[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _relay(self, one):
        try:
            data = one.recv(1 << 16)
            if data:
                self._peers[one].sendall(data)
                return
        except OSError:
            pass
        self._end(one)

    def _end(self, one):
        """A connection, from both sides."""
        other = self._peers.pop(one, None)
        if other is None:
            return
        del self._peers[other]
        for end in (one, other):
            self._selector.unregister(end)
            end.close()
