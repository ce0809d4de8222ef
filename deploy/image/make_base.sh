#!/usr/bin/env bash
# Makes a Debian base image where no image registry can be reached: see --help.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: make_base.sh [--force] [IMAGE]

Makes IMAGE (default emberd-base), a small image of this machine's Debian release with its security updates, by
debootstrap and `docker import`. Packages come from the mirrors that this machine's apt uses. Does nothing if the image
is there already, unless --force is given. Needs root (or sudo), debootstrap and a running Docker Engine.

example: deploy/image/make_base.sh
         docker build -f deploy/image/Dockerfile --build-arg BASE=emberd-base -t emberd .
TEXT
}

say() { echo "make_base: $*" >&2; }
die() { say "$@"; exit 1; }

# What apt does not know whether it is there; the copyright notices stay.
no_documents() {
  echo 'path-exclude=/usr/share/doc/*'
  echo 'path-include=/usr/share/doc/*/copyright'
  printf 'path-exclude=/usr/share/%s/*\n' man info locale lintian groff
}

# "URI SUITE COMPONENT" of each of Debian's own sources of this machine, whatever else it installs from.
debian_sources() {
  # Another origin may begin with the same word: Debian Backports.
  apt-get indextargets --format '$(ORIGIN)|$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
    sed -n 's/^Debian|//p' | sort -u
}

# What apt must know of the way to the mirrors: proxies, and whether a mirror may stand still.
apt_settings() {
  apt-config dump | grep -E '^Acquire::(Check-Valid-Until|Check-Date|https?::Proxy|Retries) ' || true
}

make_tree() {
  local tree=$1 codename=$2 sources=$3 mirror
  mirror=$(awk -v suite="$codename" '$2 == suite && $3 == "main" {print $1; exit}' <<<"$sources")
  [[ -n $mirror ]] || die "apt has no source for $codename main; see /etc/apt, and run apt-get update"
  say "debootstrap $codename"
  debootstrap --variant=minbase --include=ca-certificates "$codename" "$tree" "$mirror" >"$tree.log" 2>&1 ||
    { tail -n 20 "$tree.log" >&2; die "debootstrap failed"; }
  sed 's|^|deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] |' <<<"$sources" >"$tree/etc/apt/sources.list"
  apt_settings >"$tree/etc/apt/apt.conf.d/90mirrors"
  echo 'APT::Install-Recommends "false";' >"$tree/etc/apt/apt.conf.d/90small"
  no_documents >"$tree/etc/dpkg/dpkg.cfg.d/90small"
  say "security updates"
  # The caller's folder for temporary files is not there inside.
  { TMPDIR=/tmp chroot "$tree" apt-get -q update &&
      TMPDIR=/tmp DEBIAN_FRONTEND=noninteractive chroot "$tree" apt-get -q -y dist-upgrade; } \
    >"$tree.log" 2>&1 || { tail -n 20 "$tree.log" >&2; die "apt-get failed"; }
}

# Leaves out what a container never reads, and what belongs to this machine.
trim_tree() {
  local tree=$1
  chroot "$tree" apt-get clean
  find "$tree/usr/share/doc" -type f ! -name copyright -delete
  find "$tree/usr/share/doc" -type l -delete
  find "$tree/usr/share/doc" -type d -empty -delete
  rm -rf "$tree"/usr/share/{man,info,locale,lintian,groff}/* "$tree"/var/lib/apt/lists/* "$tree"/var/cache/apt/*.bin \
    "$tree"/var/cache/{ldconfig,debconf}/* "$tree"/var/log/* "$tree"/tmp/* "$tree"/etc/{resolv.conf,hostname,machine-id}
}

main() {
  local image="" force=0 argument
  for argument in "$@"; do
    case $argument in
      -h | --help) usage; return ;;
      --force) force=1 ;;
      -*) usage >&2; exit 2 ;;
      *) [[ -z $image ]] || { usage >&2; exit 2; }; image=$argument ;;
    esac
  done
  image=${image:-emberd-base}
  docker info >/dev/null 2>&1 || die "no Docker Engine answers; is it running, and may you use it?"
  if ((!force)) && docker image inspect "$image" >/dev/null 2>&1; then
    say "$image is there already; --force makes it anew"
    return
  fi
  if ((EUID != 0)); then
    command -v sudo >/dev/null || die "needs root or sudo"
    exec sudo -- "${BASH_SOURCE[0]}" "$@"
  fi
  command -v debootstrap >/dev/null || die "debootstrap is missing: apt-get install debootstrap"

  local codename sources
  codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
  sources=$(debian_sources)
  if [[ -z $sources ]]; then
    apt-get -q update >/dev/null
    sources=$(debian_sources)
  fi
  work=$(mktemp -d)
  trap 'rm -rf --one-file-system "$work"' EXIT
  make_tree "$work/tree" "$codename" "$sources"
  trim_tree "$work/tree"
  tar -C "$work/tree" --one-file-system --numeric-owner -c . |
    docker import --change 'CMD ["/bin/bash"]' --message "Debian $codename by debootstrap" - "$image" >/dev/null
  say "$image: $(($(docker image inspect --format '{{.Size}}' "$image") / 1000000)) MB"
}

main "$@"
