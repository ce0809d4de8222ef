"""The container engine and Compose, by their command lines."""

import json
import os
import re
import shutil
import subprocess
import threading
import time

# Names that stay between runs: images, as a cache.
BASE, PROMETHEUS, EMBERD = "emberd-base", "emberd-prometheus", "emberd-container-test"

DOCKERFILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "deploy", "image", "Dockerfile")
RELEASE = "/etc/os-release"


def image_release():
    """The release of Debian that the image is made of."""
    with open(DOCKERFILE) as file:
        return re.search(r"^ARG BASE=debian:(\w+)", file.read(), re.MULTILINE)[1]


def is_of_the_image():
    """Whether this machine runs that release: others name packages otherwise."""
    with open(RELEASE) as release:
        return re.search(rf"^VERSION_CODENAME={image_release()}$", release.read(), re.MULTILINE) is not None


def why_not():
    """Why the containers cannot be run here; None if they can."""
    if not is_of_the_image():  # make_base.sh makes a base of this machine's
        return f"the image is made of Debian {image_release()}, which this machine does not run"
    if not shutil.which("docker"):
        return "there is no docker command"
    answered = subprocess.run(["docker", "info"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if answered.returncode != 0:
        return "no Docker Engine answers"
    if not compose_commands():
        return "there is no Compose"
    if not (os.geteuid() == 0 or image_exists(BASE) or may_sudo()):
        return f"there is no image {BASE}, and making it needs root"
    return None


def compose_commands():
    """Those that are installed: Compose 1 by itself, Compose 2 as a plugin or by itself."""
    def works(command):
        return shutil.which(command[0]) and subprocess.run([*command, "version"], stdin=subprocess.DEVNULL,
                                                           capture_output=True).returncode == 0
    return [command for command in (["docker-compose"], ["docker", "compose"]) if works(command)]


def may_sudo():
    return shutil.which("sudo") and subprocess.run(["sudo", "-n", "true"], stdin=subprocess.DEVNULL,
                                                   capture_output=True).returncode == 0


def run(argv, environment=None):
    """Standard output; an exception with all output if it fails."""
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, **(environment or {})})
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(argv)}: status {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout.strip()


def docker(*arguments):
    return run(["docker", *arguments])


def remove_container(container):
    """What has just died may be refused until the engine has heard of it."""
    for last in (False,) * 30 + (True,):
        try:
            return docker("rm", "-f", container)
        except AssertionError:
            if last:
                raise
            time.sleep(1)


def image_exists(name):
    return subprocess.run(["docker", "image", "inspect", name], stdin=subprocess.DEVNULL,
                          capture_output=True).returncode == 0


def make_images(root, from_source):
    """Base, emberd and Prometheus. Only what changed since the last run is made."""
    run([os.path.join(root, "deploy", "image", "make_base.sh"), BASE])
    target = [] if from_source else ["--target", "prebuilt"]
    dockerfiles = os.path.join(root, "deploy", "image")
    # The builder of every engine, whether or not it has BuildKit.
    builds = [["docker", "build", "-q", "--build-arg", f"BASE={BASE}", *rest] for rest in (
        ["-f", os.path.join(dockerfiles, "Dockerfile"), *target, "-t", EMBERD, root],
        ["-f", os.path.join(dockerfiles, "Dockerfile.prometheus"), "-t", PROMETHEUS, dockerfiles])]
    faults = []

    def build(argv):
        try:
            run(argv, {"DOCKER_BUILDKIT": "0"})
        except AssertionError as fault:
            faults.append(fault)
    threads = [threading.Thread(target=build, args=(argv,)) for argv in builds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for fault in faults:
        raise fault


def left_of(project):
    """What there is of a project: pairs of kind and id."""
    left = []
    for kind, list_ids in (("container", ["ps", "-aq"]), ("network", ["network", "ls", "-q"]),
                           ("volume", ["volume", "ls", "-q"])):
        ids = docker(*list_ids, "--filter", f"label=com.docker.compose.project={project}").split()
        left += [(kind, one) for one in ids]
    return left


def remove_orphans(prefix):
    """What tests left that were killed: projects named after processes that are gone. Their containers would be started
    again whenever the engine is."""
    projects = docker("ps", "-a", "--format", '{{.Label "com.docker.compose.project"}}').split()
    for project in {name for name in projects if name.startswith(prefix)}:
        if os.path.exists(f"/proc/{project.removeprefix(prefix).split('-')[0]}"):
            continue
        for kind, one in left_of(project):
            docker(kind, "rm", *(["--force"] if kind != "network" else []), one)


class Project:
    """A Compose project of its own name. `variables` are those that the files take."""

    def __init__(self, name, files, variables):
        self.name, self.variables = name, {**variables, "COMPOSE_PROJECT_NAME": name}
        self.compose = compose_commands()[0] + [part for file in files for part in ("-f", file)]

    def __call__(self, *arguments):
        return run([*self.compose, *arguments], self.variables)

    def container(self, service):
        """The id of a service's container, running or not."""
        return run(["docker", "ps", "-aq", "--no-trunc", "--filter", f"label=com.docker.compose.project={self.name}",
                    "--filter", f"label=com.docker.compose.service={service}"])

    def inspect(self, service):
        return json.loads(docker("inspect", self.container(service)))[0]

    def health(self, service):
        return self.inspect(service)["State"]["Health"]["Status"]

    def take_down(self):
        """Containers, networks and volumes of this project; gives what is left of it."""
        self("down", "--volumes", "--timeout", "1")
        return left_of(self.name)
