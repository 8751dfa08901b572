#!/usr/bin/env bash
# The steps of the Dockerfile, which CI runs without a GPU: install.sh SOURCE [EXTRAS].
# The Python that is first in PATH gets torch, and then this package from SOURCE, with what its
# extras need.
set -euo pipefail
source=$1 extras=${2:-train,serve}
python3 -m pip install -q --no-cache-dir torch==2.13.0
python3 -m pip install -q --no-cache-dir "$source[$extras]"
glm4v-patched --version
