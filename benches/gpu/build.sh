#!/usr/bin/env bash
# Builds, on a machine with Rust, what run.sh runs on a machine with a GPU: the program and the tests that open a device.
# Leaves target/gpu.tar.xz.
set -euo pipefail
cd "$(dirname "$0")/../.."
target=${CARGO_TARGET_DIR:-target}
out=target/gpu
rm -rf "$out"
mkdir -p "$out"
cargo build --release
cp "$target/release/biformer" "$out/"

# Where cargo put the test binary of a package: test_binary PACKAGE [--test NAME | --lib]
test_binary() {
    cargo test --release --no-run --message-format=json -p "$@" 2>/dev/null |
        python3 -c 'import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message.get("profile", {}).get("test"):
        path = message["executable"]
print(path)'
}
cp "$(test_binary biformer-tensor --test cuda)" "$out/tensor"
cp "$(test_binary biformer-tensor --test prefetch)" "$out/prefetch"
cp "$(test_binary biformer-ops --lib)" "$out/ops-lib"
cp "$(test_binary biformer-ops --test cuda)" "$out/ops"
cp "$(test_binary biformer-ops --test cuda_extremes)" "$out/ops-extremes"
cp "$(test_binary biformer-optim --test cuda)" "$out/optim"
cp "$(test_binary biformer --test device)" "$out/steps"
cp "$(test_binary biformer --test golden)" "$out/golden"
strip "$out"/*
tar -C target -cJf target/gpu.tar.xz gpu
ls -l "$out" target/gpu.tar.xz
