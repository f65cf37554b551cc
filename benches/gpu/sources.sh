#!/usr/bin/env bash
# Prints a checksum of what the program and its tests are built from, by which run.sh knows whether build.sh packed
# these sources.
set -euo pipefail
cd "$(dirname "$0")/../.."
find Cargo.toml Cargo.lock autograd data model ops optim src tensor tests \
    -regex '.*\.\(rs\|cu\|cuh\|h\|toml\|lock\)' -print0 | LC_ALL=C sort -z | xargs -0 cat | sha256sum
