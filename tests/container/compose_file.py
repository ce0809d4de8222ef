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


def fill_in(text, variables):
    """${NAME:-default} by the variable, or its default."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: variables.get(found[1], found[2]), text)


def merge(base, over):
    """As Compose does it: volumes by where they are mounted, other fields replaced."""
    volumes = {volume.split(":")[1]: volume for volume in base.get("volumes", []) + over.get("volumes", [])}
    return {**base, **over, "volumes": list(volumes.values())}


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
            if source.startswith((".", "/")):
                mounted[target] = os.path.normpath(os.path.join(self.folder, source))
        return mounted

    def volumes(self):
        """Paths in the container -> volumes of the engine."""
        return {volume.split(":")[1]: volume.split(":")[0] for volume in self.fields.get("volumes", [])
                if not volume.startswith((".", "/"))}

    def memory(self):
        return bytes_of(self.fields["mem_limit"])


class ComposeFile:
    """Several files are laid over each other; paths in all of them begin at the folder of the first."""

    def __init__(self, *paths, variables=None):
        folder = os.path.dirname(os.path.abspath(paths[0]))
        services = {}
        for path in paths:
            with open(path) as file:
                fields = yaml.safe_load(fill_in(file.read(), variables or {}))
            for name, own in fields["services"].items():
                services[name] = merge(services.get(name, {}), own)
        self.services = {name: Service(name, fields, folder) for name, fields in services.items()}

    def emberd(self):
        """The services that run emberd, those that others depend on first."""
        own = [service for service in self.services.values() if service.fields["image"] == "emberd"]
        return sorted(own, key=lambda service: len(service.fields.get("depends_on", ())))
