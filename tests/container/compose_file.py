"""What deploy/docker-compose.yml says, for tests that run its commands without containers."""

import os
import re
import shlex

import yaml

UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def bytes_of(text):
    """1200m as bytes."""
    number, unit = re.fullmatch(r"(\d+)([kmg])b?", str(text).lower()).groups()
    return int(number) * UNITS[unit]


def fill_in(text):
    """Variables by their defaults: ${NAME:-default}."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


class Service:
    """One service. `folder` is where the file's paths begin."""

    def __init__(self, name, fields, folder):
        self.name, self.fields, self.folder = name, fields, folder

    def command(self):
        """Arguments of the image's program."""
        command = self.fields["command"]
        return shlex.split(command) if isinstance(command, str) else list(command)

    def health_command(self):
        kind, *command = self.fields["healthcheck"]["test"]
        assert kind == "CMD", kind
        return command

    def files(self):
        """Paths in the container -> files and folders of the repository."""
        mounted = {}
        for volume in self.fields.get("volumes", []):
            source, target = volume.split(":")[:2]
            if source.startswith("."):
                mounted[target] = os.path.normpath(os.path.join(self.folder, source))
        return mounted

    def memory(self):
        return bytes_of(self.fields["mem_limit"])


class ComposeFile:
    def __init__(self, path):
        with open(path) as file:
            self.fields = yaml.safe_load(fill_in(file.read()))
        folder = os.path.dirname(os.path.abspath(path))
        self.services = {name: Service(name, fields, folder) for name, fields in self.fields["services"].items()}

    def emberd(self):
        """The services that run emberd, those that others depend on first."""
        own = [service for service in self.services.values() if service.fields["image"] == "emberd"]
        return sorted(own, key=lambda service: len(service.fields.get("depends_on", ())))
