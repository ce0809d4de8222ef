#!/bin/sh
# promtool.sh config|syntax|rules|test FILE: has Prometheus' own tool look at a file of deploy/; `syntax` is a config that
# names files of a container. Status 77: it is not installed.
if ! command -v promtool >/dev/null; then
  echo "there is no promtool: apt-get install prometheus"
  exit 77
fi
case $1 in
  config | rules) exec promtool check "$1" "$2" ;;
  syntax) exec promtool check config --syntax-only "$2" ;;
  test) exec promtool test rules "$2" ;;
esac
echo "usage: promtool.sh config|syntax|rules|test FILE" >&2
exit 2
