#!/bin/sh
# Stands in front of the compiler in the `lint` preset: instead of compiling a source, clang-tidy judges it, by the
# compiler's own warnings (-Wthread-safety) and by .clang-tidy. Ninja judges again what has changed since. A test runs, so
# that the warnings are enough; .clang-tidy would take as long again.
#
# usage: tidy.sh COMPILER FLAG... -MF INCLUDES -o OBJECT -c SOURCE
set -eu
compiler=$1
tidy=clang-tidy-${compiler##*-} # of the same version
shift
before=
for word in "$@"; do
  case $before in -o) object=$word ;; -c) source=$word ;; -MF) includes=$word ;; esac
  before=$word
done
case $object in
proto/* | */page_files.cc.o) ;; # generated
tests/* | *_test.dir/*)
  "$compiler" "$@" -Werror -fsyntax-only
  : >"$object"
  exit
  ;;
*)
  if ! said=$("$tidy" --quiet --warnings-as-errors='*' "$source" -- "$@" 2>&1); then
    echo "$said"
    exit 1
  fi
  ;;
esac
"$compiler" "$@" -M
sed -i "1s|:|: $(realpath "$(dirname "$0")/../..")/.clang-tidy|" "$includes" # judge again when the rules change
: >"$object"
