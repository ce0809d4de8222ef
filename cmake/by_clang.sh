#!/bin/sh
# by_clang.sh CLANG GXX FLAG...: compiles by CLANG what CMake has written for GXX, see emberd_optimise_not.
clang=$1
shift 2
# Clang would read a precompiled header that stands where it is to write one.
for flag; do
  case $flag in *.gch) rm -f "$flag" ;; esac
done
exec ccache "$clang" -Wno-unknown-warning-option -Xclang -fno-pch-timestamp "$@"
