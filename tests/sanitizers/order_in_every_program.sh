#!/bin/sh
# usage: order_in_every_program.sh FOLDER...
# Names each program in these folders that uses gRPC's batches and does not define them itself, as grpc_batches.cc does.
found=0
for program in $(find "$@" -maxdepth 1 -type f -perm -u+x); do
  symbols=$(readelf --wide --dyn-syms "$program" 2>/dev/null | grep -w 'grpc_call_start_batch')
  [ -n "$symbols" ] || continue
  found=$((found + 1))
  if echo "$symbols" | grep -qw UND; then
    echo "$program: takes grpc_call_start_batch from the package; link it with emberd_order"
    status=1
  fi
done
echo "$found programs use gRPC's batches"
[ "$found" -gt 0 ] && exit "${status:-0}"
echo "none: were they built?"
exit 1
