#!/usr/bin/env bash
# Put ONNX Runtime's C++ headers into a folder: examples/cpp/get_headers.sh FOLDER
#
# The wheel from PyPI has the library without headers. Those of Debian 13 are of version 1.21; every later library accepts
# programs that were compiled with them. They are unpacked, not installed. This needs apt and Debian's keys (on
# Ubuntu: the package debian-archive-keyring). A release of ONNX Runtime on GitHub has headers and library in one archive.
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: get_headers.sh FOLDER" >&2; exit 1; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r "$keys" ] || { echo "no file $keys: install the package debian-archive-keyring" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists,cache/archives}/partial
echo "deb [signed-by=$keys] http://deb.debian.org/debian trixie main" >"$work/sources.list"
options=(-qq -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/lists"
  -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root -o APT::Architecture=amd64)
cd "$work"
apt-get "${options[@]}" update
apt-get "${options[@]}" download libonnxruntime-dev
dpkg-deb -x ./*.deb unpacked
cp unpacked/usr/include/onnxruntime/*.h "$folder"
