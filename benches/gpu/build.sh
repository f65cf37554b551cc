#!/usr/bin/env bash
# Packs, on a machine with Rust, what run.sh runs on a GPU host, as target/gpu.tar.xz: see README.md, beside this file.
#
#     [CAPABILITY=9.0] [LATER=1] benches/gpu/build.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
target=${CARGO_TARGET_DIR:-target}
out=target/gpu
rm -rf "$out"
mkdir -p "$out"
cargo build --release
cp "$target/release/biformer" "$out/"

# take NAME PACKAGE [--test NAME | --lib]: builds a package's test binary, and copies it from where cargo puts it
take() {
    local name=$1 path
    shift
    path=$(cargo test --release --no-run --message-format=json-render-diagnostics -p "$@" | python3 -c 'import json, sys
for message in map(json.loads, sys.stdin):
    if message.get("executable") and message["profile"]["test"]:
        print(message["executable"])')
    cp "$path" "$out/$name"
}
take tensor biformer-tensor --test cuda
take products biformer-tensor --test products
take recording biformer-tensor --test recording
take prefetch biformer-tensor --test prefetch
take aside biformer-tensor --test aside
take ops biformer-ops --test cuda
take extremes biformer-ops --test cuda_extremes
take forms biformer-ops --lib
take optim biformer-optim --test cuda
take steps biformer --test device
take golden biformer --test golden
strip "$out"/*

# The names of all operations: each is tested in a process of its own.
sed -n '/^registry!\[/,/^\]/s/^ *\([a-z0-9_]*\),$/\1/p' ops/src/registry.rs >"$out/operations"
[[ -s $out/operations ]] || { echo "ops/src/registry.rs: no operations found" >&2; exit 1; }
# Test binaries look for their fixtures where they were built.
pwd -P >"$out/root"
benches/gpu/sources.sh >"$out/sources"
# So that a GPU host need not compile them. It does so nevertheless if its NVRTC is another release; the stage `look`
# reports that.
if [[ -z ${LATER-} ]]; then
    cargo test --release --no-run --test kernels
    BIFORMER_CACHE=$PWD/$out/kernels CAPABILITY=${CAPABILITY:-9.0} \
        cargo test --release --test kernels -- --ignored --exact --nocapture the_cache_is_filled || {
        echo "no machine code: in a virtual environment, pip install nvidia-cuda-nvrtc==13.0.88; or set LATER=1" >&2
        exit 1
    }
fi

# The program and the test of steps carry the same pictures, 13 MB that do not shrink: xz looks back far enough to find them.
tar -C target -c gpu | xz -9 -T1 >target/gpu.tar.xz
du -sh "$out"/* target/gpu.tar.xz
