"""Certificates for mutual TLS, by deploy/make_test_ca.sh."""

import os
import subprocess

import grpc


def make_certificates(root, folder, shards):
    """For the services of docker-compose.yml, as they reach each other and are reached from this machine."""
    subprocess.run([os.path.join(root, "deploy", "make_test_ca.sh"), folder, "coordinator", *shards, "localhost",
                    "127.0.0.1"], check=True, stdout=subprocess.DEVNULL)


def credentials_of(folder, client=True):
    """What a trainer connects with; without `client` it shows no certificate of its own."""
    def read(name):
        with open(os.path.join(folder, name), "rb") as file:
            return file.read()
    own = {"private_key": read("client-key.pem"), "certificate_chain": read("client.pem")} if client else {}
    return grpc.ssl_channel_credentials(root_certificates=read("ca.pem"), **own)
