#!/bin/sh
# Stands in front of the compiler in the `lint` preset: instead of compiling a source, clang-tidy-14 judges it, with the
# compiler's own warnings (-Wthread-safety) and those of .clang-tidy. Ninja judges again what has changed since.
#
# usage: tidy.sh COMPILER FLAG...
set -eu
before=
compiler=$1
shift
for word in "$@"; do
  case $before in -o) object=$word ;; -c) source=$word ;; esac
  before=$word
done
case $source in
*/generated/* | *.pb.cc | */page_files.cc) ;; # not ours
*) clang-tidy-14 --quiet --warnings-as-errors='*' "$source" -- "$@" ;;
esac
"$compiler" "$@" -M # what the source includes, for ninja
: >"$object"
