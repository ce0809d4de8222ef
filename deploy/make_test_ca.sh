#!/usr/bin/env bash
# Makes certificates for trying TLS out. See --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: make_test_ca.sh DIR [HOST...]

Makes a certificate authority in DIR (a new or empty directory) and, signed by it:
  server.pem, server-key.pem    for servers that are reached as HOST; default: localhost and 127.0.0.1.
                                HOST is a DNS name, also *.example.com, or an IP address
  client.pem, client-key.pem    for clients, where mutual TLS asks for a certificate
  client.p12                    the same for a browser, without a password: import it to see the status page
  expired.pem, expired-key.pem  as server.pem, but its time is over, to see that it is refused
The authority itself is ca.pem, ca-key.pem. All but the expired one hold for 30 days.

For tests and trials only: whoever reads ca-key.pem can make certificates that your processes trust.

Example:
  deploy/make_test_ca.sh build/ca localhost 127.0.0.1
TEXT
}

if [[ ${1:-} == -h || ${1:-} == --help ]]; then usage; exit 0; fi
if [[ $# -lt 1 || $1 == -* ]]; then usage >&2; exit 2; fi
dir=$1
shift
if [[ $# -eq 0 ]]; then set -- localhost 127.0.0.1; fi
if [[ -n $(ls -A "$dir" 2>/dev/null) ]]; then
  echo "make_test_ca.sh: $dir is not empty" >&2
  exit 1
fi
command -v openssl >/dev/null || { echo "make_test_ca.sh: openssl is not installed" >&2; exit 1; }

names=""
for host in "$@"; do
  if [[ ! $host =~ ^[A-Za-z0-9*.:_-]+$ ]]; then
    echo "make_test_ca.sh: \"$host\" is neither a DNS name nor an IP address" >&2
    exit 2
  fi
  if [[ $host =~ ^[0-9.]+$ || $host == *:* ]]; then kind=IP; else kind=DNS; fi
  names+="${names:+,}$kind:$host"
done

mkdir -p "$dir"
cd "$dir"
days=30

# new_key NAME: readable for nobody else
new_key() { (umask 077 && openssl ecparam -name prime256v1 -genkey -noout -out "$1-key.pem"); }

# sign NAME COMMON_NAME EXTENSIONS TIME...: a certificate for NAME-key.pem; TIME is what openssl takes
sign() {
  openssl req -new -key "$1-key.pem" -subj "/CN=$2" |
    openssl x509 -req -CA ca.pem -CAkey ca-key.pem -set_serial "0x$(openssl rand -hex 16)" "${@:4}" -sha256 \
      -extfile <(printf '%s\n' basicConstraints=critical,CA:FALSE keyUsage=critical,digitalSignature \
        subjectKeyIdentifier=hash authorityKeyIdentifier=keyid "$3") \
      -out "$1.pem" 2>/dev/null
}

new_key ca
openssl req -new -x509 -key ca-key.pem -subj "/CN=emberd test authority $(openssl rand -hex 4)" -days "$days" -sha256 \
  -addext keyUsage=critical,keyCertSign,cRLSign -out ca.pem
# Coordinators show the server's certificate to shards, so it serves both ends.
both="extendedKeyUsage=serverAuth,clientAuth"
for name in server client expired; do new_key "$name"; done
sign server "emberd test server" "$both
subjectAltName=$names" -days "$days"
sign client "emberd test client" "extendedKeyUsage=clientAuth" -days "$days"
(umask 077 && openssl pkcs12 -export -in client.pem -inkey client-key.pem -certfile ca.pem -name "emberd test client" \
  -passout pass: -out client.p12)
# OpenSSL 3.5 takes no negative days, but dates, which 3.0 does not know.
over=(-days -1)
if openssl x509 -help 2>&1 | grep -e -not_after >/dev/null; then
  over=(-not_before 20200101000000Z -not_after 20200102000000Z)
fi
sign expired "emberd test server, expired" "$both
subjectAltName=$names" "${over[@]}"

cat <<TEXT
made in $PWD, for $*:
  ca.pem                          the authority: clients trust it
  server.pem  server-key.pem      for processes
  client.pem  client-key.pem      for clients
  client.p12                      for browsers; no password
  expired.pem expired-key.pem     to be refused
In the cluster's description:
  security {
    tls {
      certificate_file: "$PWD/server.pem"
      key_file: "$PWD/server-key.pem"
      ca_file: "$PWD/ca.pem"
      require_client_certificate: true  # mutual TLS
    }
  }
and for clients:
  emberctl --ca $PWD/ca.pem --cert $PWD/client.pem --key $PWD/client-key.pem status
TEXT
