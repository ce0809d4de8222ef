#!/bin/sh
# Runs a test with a temporary folder of its own, and fails if the test leaves something in it.
#
# usage: own_tmp.sh PARENT COMMAND...
#
# The folder is PARENT/PID. What a test that was killed has left goes away with the next one.
set -u
parent=$1
shift

for old in "$parent"/*; do
  case ${old##*/} in *[!0-9]*) continue ;; esac # not ours
  kill -0 "${old##*/}" 2>/dev/null || rm -rf "$old"
done

folder=$parent/$$
rm -rf "$folder"
mkdir -p "$folder"
status=0
# When Python forks to start a process, grpcio waits for its threads, which may wait for Python: now and then for ever.
export GRPC_ENABLE_FORK_SUPPORT=0
TMPDIR=$folder TEST_TMPDIR=$folder "$@" || status=$?
# PyTorch leaves its compiler's cache there, and, where a process was killed, a module of its own.
rm -rf "$folder"/torchinductor_*
for module in "$folder"/*/_remote_module_non_scriptable.py; do
  if [ -e "$module" ]; then rm -rf "${module%/*}"; fi
done
rmdir "$folder" 2>/dev/null && exit "$status"

echo "left behind in the temporary folder:" >&2
find "$folder" -mindepth 1 -printf '  %P\n' >&2
rm -rf "$folder"
exit 1
