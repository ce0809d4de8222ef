"""What a kustomization.yaml makes, for machines without kubectl: only what deploy/kubernetes uses, and nothing in silence."""

import base64
import os

import yaml

UNNAMESPACED = {"Namespace"}
KNOWN = {"apiVersion", "kind", "namespace", "resources", "images", "generatorOptions", "configMapGenerator",
         "secretGenerator"}


def read(path):
    with open(path, "rb") as file:
        return file.read()


def generated(folder, options, encode):
    """A ConfigMap or a Secret of files, by their names."""
    unknown = set(options) - {"name", "files"}
    assert not unknown, unknown
    return {"apiVersion": "v1", "metadata": {"name": options["name"]},
            "data": {os.path.basename(name): encode(read(os.path.join(folder, name))) for name in options["files"]}}


def containers_of(document):
    template = document.get("spec", {}).get("template", {}).get("spec", {})
    return template.get("initContainers", []) + template.get("containers", [])


def resolve(folder):
    """The documents that `kubectl kustomize` makes of the folder, in another order."""
    rules = yaml.safe_load(read(os.path.join(folder, "kustomization.yaml")))
    assert set(rules) <= KNOWN, set(rules) - KNOWN
    assert rules["generatorOptions"] == {"disableNameSuffixHash": True}, "names would depend on contents"
    documents = []
    for name in rules["resources"]:
        documents += [document for document in yaml.safe_load_all(read(os.path.join(folder, name))) if document]
    for options in rules.get("configMapGenerator", []):
        documents.append({"kind": "ConfigMap", **generated(folder, options, bytes.decode)})
    for options in rules.get("secretGenerator", []):
        documents.append({"kind": "Secret", "type": "Opaque",
                          **generated(folder, options, lambda data: base64.b64encode(data).decode())})
    images = {image["name"]: f"{image.get('newName', image['name'])}:{image['newTag']}" for image in rules.get("images", [])}
    for document in documents:
        if document["kind"] not in UNNAMESPACED:
            document["metadata"]["namespace"] = rules["namespace"]
        for container in containers_of(document):
            container["image"] = images.get(container["image"], container["image"])
    return documents


def key(document):
    return document["kind"], document["metadata"]["name"]
