#!/usr/bin/env bash
# Compile the example against the library of the onnxruntime wheel: examples/cpp/build.sh HEADERS FOLDER
#
# PYTHON is the interpreter that has onnxruntime installed, python by default.
set -euo pipefail
[ $# -eq 2 ] || { echo "usage: build.sh HEADERS FOLDER" >&2; exit 1; }
source=$(dirname "$0")/train.cpp
package=$("${PYTHON:-python}" -c 'import onnxruntime, os; print(os.path.dirname(onnxruntime.__file__))')
library=$(ls "$package"/capi/libonnxruntime.so.*)
mkdir -p "$2"
ln -sf "$library" "$2/libonnxruntime.so.1" # the name that a program looks for
"${CXX:-g++}" -std=c++17 -O2 -Wall -Wextra -Werror -I "$1" "$source" "$2/libonnxruntime.so.1" -Wl,-rpath,'$ORIGIN' -o "$2/train"
