#!/usr/bin/env bash
# Installs what is missing of groups of packages.txt: see there.
#
# usage: install_packages.sh GROUP...
set -euo pipefail
list=$(dirname "${BASH_SOURCE[0]}")/packages.txt

say() { echo "==> $*" >&2; }

as_root() {
  if ((EUID == 0)); then "$@"; else sudo "$@"; fi
}

# quietly COMMAND...: says something only if it fails.
quietly() {
  local log status=0
  log=$(mktemp)
  # What it leaves running must not have this script's turn.
  (exec {turn}>&- && "$@") >"$log" 2>&1 </dev/null || status=$?
  if ((status != 0)); then
    say "$* failed (status $status); the last lines of its output:"
    tail -n 30 "$log" >&2
  fi
  rm -f "$log"
  return "$status"
}

# missing GROUP...: the lines of these groups of which nothing is installed.
missing() {
  local installed line name
  installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' 2>/dev/null | sed -n 's/^installed //p')
  awk -v groups=" $* " '{ sub(/#.*/, ""); sub(/[ \t]+$/, "") }
    /^\[/ { gsub(/[][]/, ""); wanted = index(groups, " " $0 " "); next }
    NF && wanted && !said[$0]++' "$list" |
    while read -r line; do
      for name in ${line//|/ }; do
        if grep -qxF -- "$name" <<<"$installed"; then continue 2; fi
      done
      echo "$line"
    done
}

# names LINE...: of each line the first package that apt knows. Where it knows none, apt-get shall say so, but for a line
# that ends in `|`.
names() {
  local line name
  for line in "$@"; do
    for name in ${line//|/ }; do
      # Not by `| grep -q`: it may end before apt-cache has written all, which then fails, and pipefail says so.
      if [[ -n $(apt-cache show "$name" 2>/dev/null) ]]; then
        echo "$name"
        continue 2
      fi
    done
    if [[ $line != *'|' ]]; then echo "${line%% *}"; fi
  done
}

# Some packages bring a service (prometheus), which their installation starts; tests start their own. Debian asks this
# file before; where there is one already, it decides.
service_policy=/usr/sbin/policy-rc.d

refuse_services() {
  [[ ! -e $service_policy ]] || return 0
  trap allow_services EXIT
  printf '#!/bin/sh\n# by the ./run of emberd, during an installation\nexit 101\n' |
    as_root tee "$service_policy" >/dev/null
  as_root chmod 755 "$service_policy"
}

allow_services() {
  trap - EXIT
  if grep -qs 'by the ./run of emberd' "$service_policy"; then as_root rm -f "$service_policy"; fi
}

dpkg_folder=/var/lib/dpkg

# One run at a time: the policy is that of all, and `apt-get update` waits for nobody.
take_turn() {
  exec {turn}<"$dpkg_folder" # until the end of this script
  if flock -n "$turn"; then return; fi
  say "waiting until another installation has ended"
  flock "$turn"
}

main() {
  local -a lines packages
  if ! command -v dpkg-query >/dev/null; then
    say "not a Debian system: the packages of $list are taken to be there"
    return
  fi
  take_turn
  allow_services # what a run that was killed left
  mapfile -t lines < <(missing "$@")
  mapfile -t packages < <(names "${lines[@]}")
  ((${#packages[@]})) || return 0
  say "installing ${#packages[@]} packages for $*: ${packages[*]}"
  quietly as_root apt-get update -q
  mapfile -t packages < <(names "${lines[@]}") # now apt knows what there is
  refuse_services
  quietly as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y \
    --no-install-recommends -o DPkg::Lock::Timeout=300 "${packages[@]}"
  allow_services
  if [[ " ${packages[*]} " == *" prometheus "* && -d /run/systemd/system ]]; then
    quietly as_root systemctl disable prometheus # nor at the next boot
  fi
}

main "$@"
