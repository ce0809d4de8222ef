"""`emberctl top` on a terminal: a real one, as far as a program can tell.

What this would catch: a view that scrolls instead of redrawing, that does not follow the window's
size, that ignores keys or NO_COLOR, and, worst, one that leaves the terminal without echo, without
cursor or on the other screen.

Usage: top_terminal_test.py PATH_OF_EMBERD PATH_OF_EMBERCTL
"""

import fcntl
import os
import pathlib
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "testing"))
import processes

EMBERD, EMBERCTL = sys.argv[1:3]
del sys.argv[1:3]

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
HOME = b"\x1b[H"


class Terminal:
    """emberctl with a terminal of its own."""

    def __init__(self, arguments, columns=100, rows=40, environment=()):
        self.master, self.slave = pty.openpty()
        self.resize(columns, rows)
        self.attributes = termios.tcgetattr(self.slave)
        env = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
        env.update({"TERM": "xterm"}, **dict(environment))

        self.process = subprocess.Popen([*processes.WITH_PARENT, "setsid", "--ctty", EMBERCTL, "top", "--interval", "0.2",
                                         *arguments], env=env, stdin=self.slave, stdout=self.slave, stderr=self.slave)
        self.output = b""

    def resize(self, columns, rows):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, seconds):
        """What is written within that time, or before nothing more can be."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self.master], [], [], left)[0]:
                self.output += os.read(self.master, 1 << 16)

    def read_until(self, condition, seconds=120):
        end = time.monotonic() + seconds
        while not condition(self.output):
            if time.monotonic() > end or self.process.poll() is not None:
                self.read(0.2)
                if condition(self.output):
                    return
                raise AssertionError(f"it did not come: {self.output[-3000:]!r}")
            self.read(0.05)

    def frames(self):
        return self.output.split(HOME)[1:]

    def end(self):
        """The exit status, within a time in which nothing but a hang would last."""
        try:
            status = self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        self.read(0.2)
        return status

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)


def lines_of(frame):
    text = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", frame)
    # The terminal puts a carriage return of its own before each line feed.
    return re.split(r"\r+\n", text.decode())


class TopTerminalTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        port, http = processes.free_ports(2)
        cls.address = f"127.0.0.1:{port}"
        cls.cluster = processes.Program(
            [EMBERD, "up", "--shards", "2", "--listen", cls.address, "--http", f"127.0.0.1:{http}"],
            os.path.join(cls.folder.name, "up.log"))
        cls.cluster.wait_for_line(r"ready")

    @classmethod
    def tearDownClass(cls):
        cls.cluster.stop()
        cls.folder.cleanup()

    def start(self, **options):
        terminal = Terminal(["-a", self.address, "--timeout", "60"], **options)
        self.addCleanup(terminal.close)
        terminal.read_until(lambda output: output.count(HOME) >= 2)
        return terminal

    def check_restored(self, terminal):
        output = terminal.output
        self.assertEqual(output.count(ENTER), 1)
        self.assertEqual(output.count(LEAVE), 1)
        self.assertGreater(output.rindex(LEAVE), output.rindex(HOME))
        self.assertGreater(output.rindex(SHOW), output.rindex(HIDE))
        self.assertEqual(termios.tcgetattr(terminal.slave), terminal.attributes)

    def test_redraws_in_place_until_q(self):
        terminal = self.start()
        terminal.read_until(lambda output: output.count(HOME) >= 5)
        self.assertNotIn(b"\n\n", terminal.output.replace(b"\r\n\x1b[K", b""))
        for frame in terminal.frames()[:4]:
            lines = lines_of(frame)
            self.assertLessEqual(len(lines), 40)
            self.assertIn("coordinator " + self.address, lines[0])
            self.assertTrue(any(line.startswith("SHARD") for line in lines), lines)
            self.assertIn("q: quit", lines[-1])
        self.assertFalse(termios.tcgetattr(terminal.slave)[3] & termios.ECHO)
        os.write(terminal.master, b"q")
        self.assertEqual(terminal.end(), 0)
        self.check_restored(terminal)

    def test_sorts_on_s(self):
        terminal = self.start()
        self.assertIn(b"busy first", terminal.output)
        os.write(terminal.master, b"s")
        terminal.read_until(lambda output: b"slow first" in output)
        os.write(terminal.master, b"s")
        terminal.read_until(lambda output: b"as listed" in output)
        os.write(terminal.master, b"q")
        self.assertEqual(terminal.end(), 0)

    def test_follows_the_window(self):
        terminal = self.start()
        terminal.resize(30, 6)
        before = len(terminal.frames())
        terminal.read_until(lambda output: output.count(HOME) >= before + 3)
        lines = lines_of(terminal.frames()[-2])
        self.assertLessEqual(len(lines), 6)
        self.assertLessEqual(max(map(len, lines)), 30)
        self.assertIn("more lines", "".join(lines))
        os.write(terminal.master, b"q")
        self.assertEqual(terminal.end(), 0)

    def test_restores_the_terminal_on_signals(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.subTest(signal=number.name):
                terminal = self.start()
                if number == signal.SIGINT:
                    os.write(terminal.master, b"\x03")  # as the key does it
                else:
                    terminal.process.send_signal(number)
                self.assertEqual(terminal.end(), 0)
                self.check_restored(terminal)

    def test_colours_only_where_they_are_wanted(self):
        self.assertIn(b"\x1b[1m", self.start().output)
        self.assertNotRegex(self.start(environment={"NO_COLOR": "1"}).output, rb"\x1b\[[0-9;]*m")
        plain = subprocess.run([EMBERCTL, "top", "-a", self.address, "--interval", "0.2", "--count", "1"],
                               capture_output=True, timeout=120, check=True)
        self.assertNotIn(b"\x1b", plain.stdout)

    def test_says_that_nobody_answers_and_goes_on(self):
        port, http = processes.free_ports(2)
        address = f"127.0.0.1:{port}"
        argv = [EMBERD, "up", "--shards", "1", "--listen", address, "--http", f"127.0.0.1:{http}"]
        cluster = processes.Program(argv, os.path.join(self.folder.name, "short.log"))
        cluster.wait_for_line(r"ready")
        terminal = Terminal(["-a", address])
        self.addCleanup(terminal.close)
        terminal.read_until(lambda output: output.count(HOME) >= 2)
        cluster.kill()
        terminal.read_until(lambda output: b"NO ANSWER" in output)
        cluster = processes.Program(argv, os.path.join(self.folder.name, "again.log"))
        self.addCleanup(cluster.kill)
        cluster.wait_for_line(r"ready")
        seen = len(terminal.output)
        terminal.read_until(lambda output: b"of the last" in output[seen:])
        os.write(terminal.master, b"q")
        self.assertEqual(terminal.end(), 0)
        self.check_restored(terminal)

    def test_an_error_at_the_start_stays_off_the_screen(self):
        terminal = Terminal(["-a", f"127.0.0.1:{processes.free_ports(1)[0]}", "--timeout", "0.3"])
        self.addCleanup(terminal.close)
        terminal.read(0.1)
        self.assertEqual(terminal.end(), 3)
        self.assertNotIn(ENTER, terminal.output)
        self.assertIn(b"UNAVAILABLE", terminal.output)


if __name__ == "__main__":
    unittest.main()
