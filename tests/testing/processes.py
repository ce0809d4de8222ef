"""Programs on loopback for tests: started, waited for and ended by their ids."""

import re
import socket
import subprocess
import threading
import time

# Before a command: it is killed when this process ends. A function between fork and exec (preexec_fn) would do it as well,
# until it waits for a lock that another thread, of grpcio perhaps, held when this process was copied.
WITH_PARENT = ["setpriv", "--pdeathsig", "KILL", "--"]


HELD = []  # sockets that keep ports


def free_ports(count):
    """Ports of 127.0.0.1 that nobody listens on. While this process lives, the system gives them to nobody else: a bound
    socket keeps each, beside which a server may listen (base/testing/held_port.h)."""
    for _ in range(count):
        HELD.append(socket.socket())
        HELD[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        HELD[-1].bind(("127.0.0.1", 0))
    return [held.getsockname()[1] for held in HELD[-count:]]


def wait_until(what, condition, seconds=120):
    """The first true value of condition()."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.2)


class Program:
    """A running program; its output goes to the file `log`."""

    def __init__(self, argv, log):
        self.argv, self.log = argv, log
        with open(log, "a") as output:
            self.process = subprocess.Popen([*WITH_PARENT, *argv], stdin=subprocess.DEVNULL, stdout=output,
                                            stderr=output)

    def output(self):
        with open(self.log, errors="replace") as file:
            return file.read()

    def wait_for_line(self, pattern, seconds=120):
        def found():
            match = re.search(pattern, self.output(), re.MULTILINE)
            if not match and self.process.poll() is not None:
                raise AssertionError(f"{self.argv} ended with status {self.process.returncode}:\n{self.output()}")
            return match
        return wait_until(f"{pattern} from {self.argv}", found, seconds)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self, seconds=120):
        """By SIGTERM; gives the exit status."""
        self.process.terminate()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


class Relay:
    """Passes connections to port `to` of 127.0.0.1 on. `cut` is what a broken link does: nothing passes any more, and
    nobody is told. After `rejoin`, new connections pass; the old ones stay silent for ever."""

    def __init__(self, to):
        self.to = to
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.epoch = 0
        self.is_cut = False
        self.sockets = []
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            self.sockets.append(client)
            if self.is_cut:
                continue  # connected, as far as the kernel knows; no byte passes
            try:
                server = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                client.close()
                continue
            self.sockets.append(server)
            for pair in ((client, server), (server, client)):
                threading.Thread(target=self.pump, args=(*pair, self.epoch), daemon=True).start()

    def pump(self, source, target, epoch):
        try:
            while data := source.recv(1 << 16):
                if epoch != self.epoch:
                    return
                target.sendall(data)
            if epoch == self.epoch:
                target.shutdown(socket.SHUT_WR)
        except OSError:
            if epoch == self.epoch:
                target.close()

    def cut(self):
        self.epoch += 1
        self.is_cut = True

    def rejoin(self):
        self.is_cut = False

    def close(self):
        self.listener.close()
        for one in self.sockets:
            one.close()
