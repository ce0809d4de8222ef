#!/bin/sh
# promtool.sh config|rules|test FILE: has Prometheus' own tool look at a file of deploy/. Status 77: it is not installed.
if ! command -v promtool >/dev/null; then
  echo "there is no promtool: apt-get install prometheus"
  exit 77
fi
case $1 in
  config | rules) exec promtool check "$1" "$2" ;;
  test) exec promtool test rules "$2" ;;
esac
echo "usage: promtool.sh config|rules|test FILE" >&2
exit 2
