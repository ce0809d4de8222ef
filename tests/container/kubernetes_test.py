"""deploy/kubernetes: its manifests against the schemas of Kubernetes, against each other and against the cluster description,
and the commands of its pods as processes on loopback, with TLS and tokens. No cluster is needed.

What this would catch: a field that the API does not have or that stands in the wrong place, a volume, port or Secret that
nobody makes, a shard of the description that is no pod, limits below what budgets allow, and a command, probe or description
that emberd refuses.

Usage: kubernetes_test.py ROOT_OF_REPOSITORY FOLDER_OF_EMBERD    (needs the packages kubernetes-validate and PyYAML)
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT, BINARIES = sys.argv[1:3]
del sys.argv[1:3]
sys.path[:0] = [os.path.join(ROOT, "tests", "testing"), os.path.dirname(os.path.abspath(__file__))]

import kubernetes_validate  # noqa: E402
import yaml  # noqa: E402
from kustomization import containers_of, key, resolve  # noqa: E402
from processes import Program, free_ports, wait_until  # noqa: E402

EMBERD, EMBERCTL = (os.path.join(BINARIES, name) for name in ("emberd", "emberctl"))
VERSIONS = ("1.27", "1.30", "1.34")
OLD = {("Job", "trainer"): ("1.27",)}  # where a document cannot be used
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
MODEL = 'name: "m" tables { name: "t" vocabulary_size: 1000 embedding_dim: 8 } features { name: "f" table: "t" }'


def bytes_of(text):
    return int(text[:-2]) * UNITS[text[-2:]]


def make_secrets(folder):
    """As README.md does it."""
    secrets, scrape, train = (os.path.join(folder, *part, "secrets") for part in ((), ("monitoring",), ("trainer",)))
    subprocess.run([os.path.join(ROOT, "deploy", "make_test_ca.sh"), secrets, "*.shard.emberd.svc", "coordinator.emberd.svc",
                    "localhost", "127.0.0.1"], check=True, stdout=subprocess.DEVNULL)
    for folder in (scrape, train):
        os.mkdir(folder)
        shutil.copy(os.path.join(secrets, "ca.pem"), folder)
    for name, where in (("cluster", secrets), ("reader", scrape), ("admin", secrets), ("trainer", train)):
        with open(os.path.join(where, name + ".token"), "w") as file:
            subprocess.run([EMBERD, "token", name, name, "--file", os.path.join(secrets, "tokens.textproto")], check=True,
                           stdout=file)


def make_folder(temporary):
    """deploy/kubernetes with secrets, in the temporary folder."""
    folder = os.path.join(temporary, "kubernetes")
    shutil.copytree(os.path.join(ROOT, "deploy", "kubernetes"), folder, ignore=shutil.ignore_patterns("secrets"))
    make_secrets(folder)
    return folder


def documents_of(*folder):
    return {key(document): document for document in resolve(os.path.join(*folder))}


class Manifests(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = make_folder(temporary.name)
        cls.documents = documents_of(cls.folder)
        cls.monitoring = documents_of(cls.folder, "monitoring")
        cls.training = documents_of(cls.folder, "trainer")
        cls.description = cls.documents["ConfigMap", "cluster"]["data"]["cluster.textproto"]

    def budget(self, name):
        return int(re.search(rf"\b{name}: (\d+)", self.description)[1])

    def assert_names_are_mounted(self, container, secrets):
        """Every file that the container's command and the description name."""
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        for path in re.findall(r'_file: "(.*?)"', self.description):
            self.assertIn(os.path.basename(path), secrets["Secret", mounts[os.path.dirname(path)]]["data"])
        self.assertEqual(mounts[re.search(r'checkpoints: "(.*?)"', self.description)[1]], "checkpoints")
        config = re.search(r"--config,? (\S+)", " ".join(container["args"]))[1]
        self.assertIn(os.path.basename(config), self.documents["ConfigMap", mounts[os.path.dirname(config)]]["data"])

    def assert_has_no_rights(self, pod):
        self.assertTrue(pod["securityContext"]["runAsNonRoot"])
        self.assertEqual(pod["securityContext"]["seccompProfile"], {"type": "RuntimeDefault"})
        self.assertFalse(pod["automountServiceAccountToken"])
        for container in pod.get("initContainers", []) + pod["containers"]:
            self.assertEqual(container["securityContext"], {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                                                            "capabilities": {"drop": ["ALL"]}})


class KubernetesTest(Manifests):

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.shards = cls.documents["StatefulSet", "shard"]
        cls.coordinators = cls.documents["Deployment", "coordinator"]

    def workloads(self):
        return (self.shards, self.coordinators)

    def test_every_document_fits_the_schema_of_kubernetes(self):
        wrong = yaml.safe_load(yaml.safe_dump(self.shards))
        wrong["spec"]["template"]["spec"]["containers"][0]["imagePullPolice"] = "Always"
        for version in VERSIONS:
            with self.assertRaises(kubernetes_validate.ValidationError):
                kubernetes_validate.validate(wrong, version, strict=True)
            for document in (*self.documents.values(), *self.monitoring.values(), *self.training.values()):
                if document["kind"] == "ServiceMonitor" or version in OLD.get(key(document), ()):
                    continue  # the former is the operator's own kind
                with self.subTest(document=key(document), version=version):
                    kubernetes_validate.validate(document, version, strict=True)

    @unittest.skipUnless(shutil.which("kubectl"), "kubectl is not installed")
    def test_kubectl_makes_the_same_documents(self):
        for folder, documents in ((self.folder, self.documents), (os.path.join(self.folder, "monitoring"), self.monitoring),
                                  (os.path.join(self.folder, "trainer"), self.training)):
            made = subprocess.run(["kubectl", "kustomize", folder], check=True, capture_output=True, text=True).stdout
            theirs = {key(document): document for document in yaml.safe_load_all(made)}
            for document in theirs.values():
                if document["kind"] == "Secret":  # in lines of 70 characters
                    document["data"] = {name: text.replace("\n", "") for name, text in document["data"].items()}
            self.assertEqual(set(theirs), set(documents))
            for name, document in theirs.items():
                self.assertEqual(document, documents[name])

    def test_all_that_was_asked_for_is_there(self):
        self.assertEqual(set(self.documents), {
            ("Namespace", "emberd"), ("ConfigMap", "cluster"), ("Secret", "tls"), ("Secret", "tokens"),
            ("PersistentVolumeClaim", "checkpoints"), ("Service", "shard"), ("Service", "coordinator"),
            ("StatefulSet", "shard"), ("Deployment", "coordinator"), ("PodDisruptionBudget", "shard"),
            ("PodDisruptionBudget", "coordinator")})
        self.assertEqual(self.documents["Service", "shard"]["spec"]["clusterIP"], "None")
        self.assertEqual(self.documents["PersistentVolumeClaim", "checkpoints"]["spec"]["accessModes"], ["ReadWriteMany"])

    def test_names_meet(self):
        for workload in self.workloads():
            spec = workload["spec"]
            pod = spec["template"]
            labels = pod["metadata"]["labels"]
            name = workload["metadata"]["name"]
            for selector in (spec["selector"]["matchLabels"], self.documents["Service", name]["spec"]["selector"],
                             self.documents["PodDisruptionBudget", name]["spec"]["selector"]["matchLabels"],
                             pod["spec"]["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"]):
                self.assertEqual(selector, labels, name)
            self.assertIn("app.kubernetes.io/component", labels)
            made = {volume["name"] for volume in pod["spec"]["volumes"]}
            made |= {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
            container, = containers_of(workload)
            self.assertEqual({mount["name"] for mount in container["volumeMounts"]}, made, name)
            for volume in pod["spec"]["volumes"]:
                source = [("ConfigMap", volume.get("configMap", {}).get("name")),
                          ("Secret", volume.get("secret", {}).get("secretName")),
                          ("PersistentVolumeClaim", volume.get("persistentVolumeClaim", {}).get("claimName"))]
                self.assertTrue(set(source) & set(self.documents), volume)
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            self.assertEqual(ports, {port["name"]: port["port"] for port in self.documents["Service", name]["spec"]["ports"]})
            for probe in ("startupProbe", "livenessProbe"):
                self.assertIn(container[probe]["tcpSocket"]["port"], ports)

    def test_the_description_is_of_these_pods(self):
        replicas, service = self.shards["spec"]["replicas"], self.shards["spec"]["serviceName"]
        self.assertIn(("Service", service), self.documents)
        namespace = self.shards["metadata"]["namespace"]
        hosts = re.findall(r'shards \{ address: "(.*?):7400" http_address: "(.*?):7401" \}', self.description)
        name = self.shards["metadata"]["name"]
        self.assertEqual(hosts, [(f"{name}-{i}.{service}.{namespace}.svc",) * 2 for i in range(replicas)])
        self.assertIn(f'coordinators {{ address: "coordinator.{namespace}.svc:7400"', self.description)

    def test_paths_of_the_description_are_mounted(self):
        for workload in self.workloads():
            container, = containers_of(workload)
            self.assert_names_are_mounted(container, self.documents)
        data = containers_of(self.shards)[0]["volumeMounts"]
        self.assertIn({"name": "data", "mountPath": re.search(r'directory: "(.*?)"', self.description)[1]}, data)

    def test_pods_have_the_memory_and_the_time_that_the_description_allows(self):
        process = 192 << 20
        requests = self.budget("batch_bytes") + self.budget("in_flight_bytes")
        tables = self.budget("bytes_per_sparsecore") * self.budget("sparsecores_per_shard") + self.budget("copy_bytes")
        for workload, need in ((self.shards, process + requests + tables), (self.coordinators, process + requests)):
            container, = containers_of(workload)
            self.assertGreaterEqual(bytes_of(container["resources"]["limits"]["memory"]), need)
            grace = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
            drain = self.budget("drain_ms") / 1000
            self.assertGreater(grace, drain + 5)

    def test_a_pod_that_is_killed_loses_nothing(self):
        self.assertIn("durability: LOG", self.description)

    def test_pods_have_no_rights(self):
        for workload in self.workloads():
            self.assert_has_no_rights(workload["spec"]["template"]["spec"])

    def test_the_monitor_finds_all_services(self):
        spec = self.monitoring["ServiceMonitor", "emberd"]["spec"]
        scrape = self.monitoring["Secret", "scrape"]["data"]
        endpoint, = spec["endpoints"]
        for used in (endpoint["tlsConfig"]["ca"]["secret"], endpoint["authorization"]["credentials"]):
            self.assertEqual(used["name"], "scrape")
            self.assertIn(used["key"], scrape)
        for service in (*(self.documents["Service", name] for name in ("shard", "coordinator")),
                        self.training["Service", "trainer"]):
            self.assertLessEqual(spec["selector"]["matchLabels"].items(), service["metadata"]["labels"].items())
            self.assertIn(endpoint["port"], [port["name"] for port in service["spec"]["ports"]])
        # A pod that is deleted comes back under another address. Alerts compare series with what they were before.
        named = {rule["targetLabel"]: rule["sourceLabels"] for rule in endpoint["relabelings"]}
        self.assertEqual(named, dict.fromkeys(("process", "instance"), ["__meta_kubernetes_pod_name"]))


class TrainersTest(Manifests):
    """A coordinator beside each trainer."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.job = cls.training["Job", "trainer"]
        cls.pod = cls.job["spec"]["template"]
        cls.coordinator, = cls.pod["spec"]["initContainers"]
        cls.trainer, = cls.pod["spec"]["containers"]
        cls.environment = {one["name"]: one.get("value") for one in cls.trainer["env"]}

    def test_all_that_was_asked_for_is_there(self):
        self.assertEqual(set(self.training), {("Service", "trainer"), ("Job", "trainer"), ("Secret", "trainer")})
        self.assertEqual(self.training["Service", "trainer"]["spec"]["selector"], self.pod["metadata"]["labels"])
        # No Service or budget of the cluster takes these pods for its own.
        for (kind, name), document in self.documents.items():
            if kind in ("Service", "PodDisruptionBudget"):
                selector = document["spec"]["selector"]
                self.assertFalse(selector.get("matchLabels", selector).items() <= self.pod["metadata"]["labels"].items(), name)

    def test_trainer_and_coordinator_can_share_memory(self):
        self.assertIn("runAsUser", self.pod["spec"]["securityContext"])
        for container in (self.coordinator, self.trainer):
            self.assertFalse({"runAsUser", "runAsGroup"} & set(container["securityContext"]), container["name"])
        self.assertNotIn("hostNetwork", self.pod["spec"])
        self.assertNotRegex(self.description, r"transport:\s*TCP")

    def test_the_coordinator_outlives_its_trainer_and_ends_with_the_run(self):
        self.assertEqual(self.coordinator["restartPolicy"], "Always")
        self.assertEqual(self.pod["spec"]["restartPolicy"], "OnFailure")
        self.assertGreater(self.pod["spec"]["terminationGracePeriodSeconds"], self.budget("drain_ms") / 1000 + 5)

    def test_addresses_meet(self):
        command = dict(zip(self.coordinator["args"][1::2], self.coordinator["args"][2::2]))
        self.assertEqual(self.environment["EMBERD_ADDRESS"], command["--address"])
        self.assertTrue(command["--address"].startswith("127.0.0.1:"), "nobody else is to reach it")
        self.assertEqual(command["--threads"], self.coordinator["resources"]["requests"]["cpu"])
        port, = self.coordinator["ports"]
        self.assertEqual(command["--http-address"], f"0.0.0.0:{port['containerPort']}")
        service, = self.training["Service", "trainer"]["spec"]["ports"]
        self.assertEqual((service["name"], service["port"]), (port["name"], port["containerPort"]))
        self.assertEqual(self.coordinator["livenessProbe"]["tcpSocket"]["port"], port["name"])
        for probe in ("startupProbe", "readinessProbe"):
            health = self.coordinator[probe]["exec"]["command"]
            self.assertEqual(health[health.index("--address") + 1], command["--address"], probe)

    def test_ranks_are_as_many_as_the_group_has(self):
        self.assertEqual(self.job["spec"]["completionMode"], "Indexed")
        for field in ("completions", "parallelism"):
            self.assertEqual(self.job["spec"][field], int(self.environment["WORLD_SIZE"]), field)

    def test_names_are_mounted(self):
        self.assert_names_are_mounted(self.coordinator, self.documents)
        mounts = {mount["mountPath"]: mount["name"] for mount in self.trainer["volumeMounts"]}
        for name in ("EMBERD_CA", "EMBERD_TOKEN_FILE"):
            path = self.environment[name]
            self.assertEqual(mounts[os.path.dirname(path)], "trainer")
            self.assertIn(os.path.basename(path), self.training["Secret", "trainer"]["data"])
        # The keys of the cluster are not the trainer's business.
        self.assertFalse({"tls", "tokens"} & set(mounts.values()))
        there = {**self.documents, **self.training}
        for volume in self.pod["spec"]["volumes"]:
            source = [("ConfigMap", volume.get("configMap", {}).get("name")),
                      ("Secret", volume.get("secret", {}).get("secretName")),
                      ("PersistentVolumeClaim", volume.get("persistentVolumeClaim", {}).get("claimName"))]
            self.assertTrue("emptyDir" in volume or set(source) & set(there), volume)

    def test_there_is_memory_for_what_is_shared(self):
        process, shared = 192 << 20, self.budget("shared_memory_bytes")
        requests = self.budget("batch_bytes") + self.budget("in_flight_bytes")
        for container, need in ((self.coordinator, process + requests + shared), (self.trainer, process + shared)):
            self.assertGreaterEqual(bytes_of(container["resources"]["limits"]["memory"]), need, container["name"])

    def test_pods_have_no_rights(self):
        self.assert_has_no_rights(self.pod["spec"])


class Pods:
    """The pods as processes: each path of a pod is a folder, each port another one of 127.0.0.1."""

    def __init__(self, folder, documents, secrets):
        self.folder = folder
        self.ports = {}
        self.programs = []
        self.volumes = {"/etc/emberd/tls": secrets, "/etc/emberd/tokens": secrets,
                        "/etc/emberd/trainer": os.path.join(os.path.dirname(secrets), "trainer", "secrets"),
                        "/etc/emberd/cluster": os.path.join(folder, "cluster"),
                        "/var/lib/emberd": os.path.join(folder, "data")}
        os.mkdir(self.volumes["/etc/emberd/cluster"])
        text = documents["ConfigMap", "cluster"]["data"]["cluster.textproto"]
        for host, inner in re.findall(r'"([a-z0-9.-]+\.svc):(\d+)"', text):
            self.ports[host, inner], = free_ports(1)
            text = text.replace(f"{host}:{inner}", f"127.0.0.1:{self.ports[host, inner]}")
        self.ports["trainer-0", "7400"], self.ports["trainer-0", "7401"] = free_ports(2)
        self.config = os.path.join(self.volumes["/etc/emberd/cluster"], "cluster.textproto")
        with open(self.config, "w") as file:
            file.write(self.here(text))

    def here(self, text, host=None):
        for inside, outside in self.volumes.items():
            text = text.replace(inside, outside)
        return re.sub(r"(?:0\.0\.0\.0|127\.0\.0\.1):(740[01])\b",
                      lambda at: f"127.0.0.1:{self.ports[host, at[1]]}" if host else at[0], text)

    def environment(self, pod):
        return {**os.environ, "HOSTNAME": pod, "PATH": f"{os.path.abspath(BINARIES)}:{os.environ['PATH']}"}

    def start(self, pod, host, container):
        argv = [self.here(word, host) for word in container.get("command", ["emberd"]) + container["args"]]
        program = Program(["env", *(f"{name}={value}" for name, value in self.environment(pod).items()), *argv],
                          os.path.join(self.folder, pod + ".log"))
        self.programs.append(program)
        return program

    def probe(self, host, container, probe="readinessProbe"):
        argv = [self.here(word, host) for word in container[probe]["exec"]["command"]]
        return subprocess.run([*argv, "--timeout", "30"], stdin=subprocess.DEVNULL, capture_output=True,
                              env=self.environment("probe")).returncode


class PodsTest(unittest.TestCase):

    def test_the_commands_of_the_pods_make_a_cluster(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        source = make_folder(folder.name)
        secrets = os.path.join(source, "secrets")
        documents = documents_of(source)
        pods = Pods(folder.name, documents, secrets)
        shard, = containers_of(documents["StatefulSet", "shard"])
        coordinator, = containers_of(documents["Deployment", "coordinator"])
        hosts = {f"shard-{i}": (f"shard-{i}.shard.emberd.svc", shard)
                 for i in range(documents["StatefulSet", "shard"]["spec"]["replicas"])}
        hosts["coordinator-7d9f8-x2x"] = "coordinator.emberd.svc", coordinator
        beside, trainer = containers_of(documents_of(source, "trainer")["Job", "trainer"])
        hosts["trainer-0-k4b7z"] = "trainer-0", beside
        for pod, (host, container) in hosts.items():
            program = pods.start(pod, host, container)
            self.addCleanup(program.kill)
        for program in pods.programs:
            program.wait_for_line("^emberd: ready ")
        for pod, (host, container) in hosts.items():
            # A shard listens, and says so, while it still reads its log.
            wait_until(f"{pod} is ready", lambda: pods.probe(host, container) == 0)

        def emberctl(*arguments, token="admin"):
            return subprocess.run(
                [EMBERCTL, "--address", f"127.0.0.1:{pods.ports['coordinator.emberd.svc', '7400']}", "--ca",
                 os.path.join(secrets, "ca.pem"), "--token-file", os.path.join(secrets, token + ".token"), *arguments],
                stdin=subprocess.DEVNULL, capture_output=True, text=True)

        def all_are_ok(call):
            """A shard that does not answer the coordinator within a second is not."""
            status = call("status")
            return status.returncode == 0 and len(re.findall(r"\bok\b", status.stdout)) == 4
        wait_until("all shards are ok", lambda: all_are_ok(emberctl))
        self.assertIn("PERMISSION_DENIED", emberctl("status", token="cluster").stderr)
        self.assertEqual(pods.probe("trainer-0", beside, "startupProbe"), 0)
        given = {one["name"]: pods.here(one["value"], "trainer-0") for one in trainer["env"] if "value" in one}

        def from_trainer(*arguments):
            return subprocess.run([EMBERCTL, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  env={**os.environ, **given})
        wait_until("all shards are ok for the trainer", lambda: all_are_ok(from_trainer))
        self.assertIn("PERMISSION_DENIED", from_trainer("model", "drop", "m").stderr)
        model = os.path.join(folder.name, "model.textproto")
        with open(model, "w") as file:
            file.write(MODEL)
        declared = from_trainer("declare", model)
        self.assertEqual(declared.returncode, 0, declared.stderr)
        for arguments in (["checkpoint", "save", "m", "a"], ["checkpoint", "verify", "m", "a"],
                          ["checkpoint", "restore", "m", "a"]):
            done = emberctl(*arguments)
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(os.path.exists(os.path.join(folder.name, "data", "checkpoints", "m", "a", "manifest.json")))
        for program in reversed(pods.programs):
            self.assertEqual(program.stop(), 0, program.output())


if __name__ == "__main__":
    unittest.main(verbosity=2)
