"""Python stubs of emberd's services, generated from the .proto files when a test runs."""

import os
import shutil
import subprocess
import sys

MESSAGES = ["types", "model", "plan", "statistics", "shared_memory", "batch", "train", "cluster"]
SERVICES = ["embedding_service", "admin_service", "checkpoint_service", "program_service"]


def generate_stubs(protos, folder, others=None):
    """Compiles the public .proto files below `protos` into `folder`, and `others`, texts by file name. From then on,
    `import emberd.v1.…_pb2` works."""
    files = [os.path.join("emberd/v1", name + ".proto") for name in MESSAGES + SERVICES]
    for name, text in (others or {}).items():
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)
        files.append(name)
    # Not grpc_tools: the compiler in Debian's package is too old for `optional` fields.
    plugin = f"--plugin=protoc-gen-grpc_python={shutil.which('grpc_python_plugin')}"
    subprocess.run(["protoc", f"-I{protos}", f"-I{folder}", f"--python_out={folder}",
                    f"--grpc_python_out={folder}", plugin] + files, check=True)
    sys.path.insert(0, str(folder))
