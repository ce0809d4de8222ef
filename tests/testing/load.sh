#!/usr/bin/env bash
# Runs a command beside loops that take every core, as on a machine that is busy with something else, and gives its
# status: tests/testing/load.sh COMMAND...
set -euo pipefail
loops=()
trap 'kill "${loops[@]}"' EXIT
for ((core = 0; core < $(nproc); ++core)); do
  setpriv --pdeathsig KILL sh -c 'while :; do :; done' & # also ends where this script is killed
  loops+=($!)
done
status=0
"$@" || status=$?
exit "$status"
