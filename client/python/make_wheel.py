#!/usr/bin/env python3
"""Makes the wheel of emberd: the package, the client library, `emberd`, `emberctl`, and the libraries that they need; examples, tutorials, .proto
files and documents in emberd/_docs.

usage: make_wheel.py BUILD_FOLDER OUTPUT_FOLDER    (other wheels of emberd in OUTPUT_FOLDER are removed)

Libraries that every system of the wheel's tag has are left out. The others get names of their own, so that they never meet
those that another package brings under the same name.
"""

import base64
import functools
import glob
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")
# What is linked here may need all that the glibc of this system has: 2.36 on Debian 12, 2.41 on 13.
TAG = "py3-none-manylinux_{}_{}_x86_64".format(*os.confstr("CS_GNU_LIBC_VERSION").removeprefix("glibc ").split("."))
# Of the policy of manylinux, what is needed here: these come with every system.
SYSTEM = re.compile(r"^(ld-linux-x86-64|libc|libm|libdl|librt|libpthread|libresolv|libgcc_s|libstdc\+\+)\.so")
PROGRAMS = ("emberd", "emberctl")

METADATA = """Metadata-Version: 2.1
Name: emberd
Version: {version}
Summary: Embedding tables of any size for PyTorch, JAX, Keras or NumPy, on a cluster of emberd
License: Apache-2.0
Requires-Python: >=3.10
Requires-Dist: numpy >=1.22
Provides-Extra: torch
Requires-Dist: torch >=1.13 ; extra == "torch"
Provides-Extra: jax
Requires-Dist: jax >=0.5 ; extra == "jax"
Provides-Extra: flax
Requires-Dist: flax >=0.11 ; extra == "flax"
Provides-Extra: keras
Requires-Dist: keras >=3.5 ; extra == "keras"
Provides-Extra: tensorflow
Requires-Dist: tensorflow >=2.16 ; extra == "tensorflow"
Description-Content-Type: text/markdown

{description}"""
WHEEL = f"Wheel-Version: 1.0\nGenerator: emberd\nRoot-Is-Purelib: false\nTag: {TAG}\n"
ENTRY_POINTS = "[console_scripts]\n" + "".join(f"{name} = emberd._programs:{name}\n" for name in PROGRAMS)


def output(*argv):
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def read(*path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return file.read()


def version():
    return re.search(r"^project\(emberd VERSION (\S+)", read(ROOT, "CMakeLists.txt"), re.MULTILINE)[1]


def needed(path):
    """Name and place of each library that a program or library is linked with, and those are linked with."""
    found = {}
    for line in output("ldd", path).splitlines():
        match = re.match(r"\s*(\S+) => (\S+)", line)
        if not match:
            continue
        if match[2] == "not":
            raise SystemExit(f"make_wheel: {path} needs {match[1]}, which is not here")
        if not SYSTEM.match(match[1]):
            found[match[1]] = os.path.realpath(match[2])
    return found


def own_name(name, path):
    """libssl.so.3 -> libssl-1a2b3c4d.so.3"""
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()[:8]
    stem, dot, rest = name.partition(".so")
    return f"{stem}-{digest}{dot}{rest}"


def adapt(path, names, rpath):
    """Links a copy with the libraries of the wheel, and drops what only a debugger reads."""
    subprocess.run(["strip", "--strip-unneeded", path], check=True)
    others = [name for name in output("patchelf", "--print-needed", path).split() if name in names]
    replacements = [word for name in others for word in ("--replace-needed", name, names[name])]
    # One after the other: together, patchelf 0.14 writes only one of them.
    if replacements:
        subprocess.run(["patchelf", *replacements, path], check=True)
    subprocess.run(["patchelf", "--set-rpath", rpath, path], check=True)


def copyright_of(path):
    """The notice of the Debian package that a library comes from."""
    for candidate in (path, path.removeprefix("/usr")):
        done = subprocess.run(["dpkg-query", "-S", candidate], capture_output=True, text=True)
        if done.returncode == 0:
            package = done.stdout.split(":")[0]
            notice = f"/usr/share/doc/{package}/copyright"
            return (package, notice) if os.path.exists(notice) else None
    return None


# Of the README, and where the wheel has it.
LINKS = ((r"docs/tutorials/(\w+)\.md", r"tutorials/\1.py"), (r"docs/tutorial\.(md|py)", "tutorials/tutorial.py"), ("docs/", ""), (r"\.\./\.\./proto/", "proto/"),
         (r"\.\./", ""))


def stage(build, folder):
    """Lays the tree of the wheel out in `folder`."""
    package = os.path.join(folder, "emberd")
    shutil.copytree(os.path.join(HERE, "emberd"), package, ignore=shutil.ignore_patterns("__pycache__", "_bin", "_lib"))
    documents = os.path.join(package, "_docs")
    shutil.copytree(os.path.join(HERE, "examples"), os.path.join(documents, "examples"), ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(os.path.join(HERE, "docs", "tutorials"), os.path.join(documents, "tutorials"), ignore=shutil.ignore_patterns("__pycache__", "*.md", "*.png"))
    shutil.copytree(os.path.join(ROOT, "proto", "emberd"), os.path.join(documents, "proto", "emberd"),
                    ignore=lambda _, names: [name for name in names if "." in name and not name.endswith(".proto")])
    shutil.copy(os.path.join(HERE, "docs", "tutorial.py"), os.path.join(documents, "tutorials"))
    shutil.copytree(os.path.join(HERE, "docs", "click_model"), os.path.join(documents, "click_model"), ignore=shutil.ignore_patterns("__pycache__"))
    with open(os.path.join(HERE, "README.md"), encoding="utf-8") as file, open(os.path.join(documents, "README.md"), "w", encoding="utf-8") as copied:
        copied.write(functools.reduce(lambda text, link: re.sub(rf"\]\({link[0]}", f"]({link[1]}", text), LINKS, file.read()))
    for path in (*(os.path.join(ROOT, "client", name) for name in ("COMING_FROM.md", "PROGRAMS.md")),
                 *(os.path.join(HERE, "docs", name) for name in ("compared.md", "followed.md", "issues.md"))):
        shutil.copy(path, documents)
    binaries, libraries = os.path.join(package, "_bin"), os.path.join(package, "_lib")
    os.mkdir(binaries)
    os.mkdir(libraries)
    own = [shutil.copy(os.path.join(build, "bin", name), binaries) for name in PROGRAMS]
    client = shutil.copy(os.path.join(build, "lib", "libemberd_client.so.1"), libraries)

    places = {}
    for path in [*own, client]:
        places.update(needed(path))
    names = {name: own_name(name, path) for name, path in places.items()}
    licenses = os.path.join(folder, f"emberd-{version()}.dist-info", "licenses")
    os.makedirs(licenses)
    shutil.copy(os.path.join(ROOT, "LICENSE"), licenses)
    for name, path in sorted(places.items()):
        copy = os.path.join(libraries, names[name])
        shutil.copy(path, copy)
        os.chmod(copy, 0o755)
        adapt(copy, names, "$ORIGIN")
        subprocess.run(["patchelf", "--set-soname", names[name], copy], check=True)
        notice = copyright_of(path)
        if notice is not None:
            shutil.copy(notice[1], os.path.join(licenses, notice[0]))
    adapt(client, names, "$ORIGIN")
    for path in own:
        adapt(path, names, "$ORIGIN/../_lib")


def write_metadata(folder):
    info = os.path.join(folder, f"emberd-{version()}.dist-info")
    for name, text in (("METADATA", METADATA.format(version=version(), description=read(HERE, "README.md"))),
                       ("WHEEL", WHEEL), ("entry_points.txt", ENTRY_POINTS)):
        with open(os.path.join(info, name), "w", encoding="utf-8") as file:
            file.write(text)


def pack(folder, wheel):
    """The same tree gives the same bytes."""
    record = f"emberd-{version()}.dist-info/RECORD"
    rows = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        def add(name, data, mode):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = (stat.S_IFREG | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)

        paths = sorted(os.path.join(where, name) for where, _, names in os.walk(folder) for name in names)
        for path in paths:
            name = os.path.relpath(path, folder)
            with open(path, "rb") as file:
                data = file.read()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{name},sha256={digest},{len(data)}\n")
            add(name, data, 0o755 if "/_bin/" in name or "/_lib/" in name else 0o644)
        add(record, "".join(rows) + f"{record},,\n", 0o644)


def main():
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    build, target = sys.argv[1:]
    os.makedirs(target, exist_ok=True)
    wheel = os.path.join(target, f"emberd-{version()}-{TAG}.whl")
    with tempfile.TemporaryDirectory() as folder:
        stage(build, folder)
        write_metadata(folder)
        pack(folder, wheel + ".new")
    os.replace(wheel + ".new", wheel)
    # One of another version, or for another glibc, would meet this one where pip is given emberd-*.whl.
    for old in glob.glob(os.path.join(glob.escape(target), "emberd-*.whl")):
        if os.path.basename(old) != os.path.basename(wheel):
            os.remove(old)
    print(wheel)


if __name__ == "__main__":
    main()
