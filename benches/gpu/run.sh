#!/usr/bin/env bash
# Runs on a machine with an NVIDIA GPU, from this repository's root, with target/gpu.tar.xz of build.sh there. It needs
# the driver, NVRTC and cuBLASLt (a CUDA toolkit, or PyTorch's wheels), and for the comparison PyTorch; no Rust.
# Results go to $OUT, or target/gpu/results.
#
#     benches/gpu/run.sh [check] [sanitize] [bench] [peers]     # all of them, in this order, unless some are named
set -uo pipefail
cd "$(dirname "$0")/../.."
[[ -x target/gpu/biformer ]] || tar -C target -xJf target/gpu.tar.xz
out=${OUT:-target/gpu/results}
mkdir -p "$out"
stages=("$@")
[[ ${#stages[@]} -gt 0 ]] || stages=(check sanitize bench peers)
export BIFORMER_CACHE=${BIFORMER_CACHE:-$out/kernels}
# PyTorch brings both libraries.
if [[ -z ${BIFORMER_CUDA:-} ]]; then
    wheels=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null || true)
    [[ -d $wheels/cu13/lib ]] && export BIFORMER_CUDA=$wheels/cu13/lib
fi
failed=0

# Runs a command, keeps what it says, and goes on whatever comes of it.
try() {
    local name=$1
    shift
    local started=$SECONDS
    "$@" >"$out/$name.log" 2>&1
    local status=$?
    [[ $status -eq 0 ]] || { failed=1; tail -n 25 "$out/$name.log"; }
    printf '%-28s %s (%d s)\n' "$name" "$([[ $status -eq 0 ]] && echo ok || echo "FAILED, $status")" $((SECONDS - started))
}

check() {
    try devices target/gpu/biformer devices
    cat "$out/devices.log"
    export BIFORMER_TEST_GPU=1
    # Emulated threads that wait for what never comes can be noticed; a GPU's cannot.
    try tensor target/gpu/tensor --test-threads 1 --skip the_emulated --skip arguments_are --skip sanitizers
    try prefetch target/gpu/prefetch --test-threads 1 --skip the_emulated
    try ops target/gpu/ops --exact every_operation_runs_on_the_emulated_device --nocapture
    try ops-extremes target/gpu/ops-extremes --test-threads 1
    try ops-forms target/gpu/ops-lib --test-threads 1 cuda maps_inside_wider
    try optim target/gpu/optim
    # That test there runs the program from where it was built.
    try steps target/gpu/steps --test-threads 1 --skip a_run_goes_on --nocapture
    try golden target/gpu/golden on_a_gpu --nocapture
    unset BIFORMER_TEST_GPU
}

sanitize() {
    for tool in memcheck racecheck initcheck synccheck; do
        ONLY=bra,attention,dwconv,layer_norm,batch_norm,softmax,cross_entropy BIFORMER_TEST_GPU=1 \
            try "sanitizer-$tool" timeout 240 compute-sanitizer --tool "$tool" --error-exitcode 9 \
            target/gpu/ops --exact every_operation_runs_on_the_emulated_device
    done
}

bench() {
    local model mode precision
    for model in small tiny stl; do
        for mode in train infer; do
            try "bench-$model-$mode-bf16" target/gpu/biformer bench --device cuda --precision bf16 \
                --model "$model" --image-size 224 --batch-size 128 --mode "$mode" --steps 20
            cat "$out/bench-$model-$mode-bf16.log"
        done
    done
    try bench-small-latency target/gpu/biformer bench --device cuda --precision bf16 --model small --image-size 224 \
        --batch-size 1 --mode infer --steps 50
    cat "$out/bench-small-latency.log"
    try bench-small-only-bra target/gpu/biformer bench --device cuda --precision bf16 --model small --image-size 224 \
        --batch-size 128 --only-bra --steps 50
    cat "$out/bench-small-only-bra.log"
    for mode in train infer; do
        try "profile-small-$mode" target/gpu/biformer bench --device cuda --precision bf16 --model small \
            --image-size 224 --batch-size 128 --mode "$mode" --steps 5 --profile
        cat "$out/profile-small-$mode.log"
    done
    for precision in tf32 f32; do
        try "bench-small-train-$precision" target/gpu/biformer bench --device cuda --precision "$precision" \
            --model small --image-size 224 --batch-size 128 --mode train --steps 10
        cat "$out/bench-small-train-$precision.log"
    done
}

peers() {
    local form
    for form in "" "--compile"; do
        for mode in train infer; do
            # shellcheck disable=SC2086 # no form is no argument
            try "torch-small-$mode${form#-}" python3 benches/peers/bench_torch.py --device cuda --dtype bf16 \
                --gather published --model-json small --image-size 224 --batch-size 128 --mode "$mode" --steps 20 $form
            cat "$out/torch-small-$mode${form#-}.log"
        done
        # shellcheck disable=SC2086 # as above
        try "torch-small-only-bra${form#-}" python3 benches/peers/bench_torch.py --device cuda --dtype bf16 \
            --gather published --model-json small --image-size 224 --batch-size 128 --only-bra --steps 20 $form
        cat "$out/torch-small-only-bra${form#-}.log"
    done
}

for stage in "${stages[@]}"; do
    echo "== $stage"
    "$stage"
done
exit $failed
