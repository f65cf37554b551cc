#!/usr/bin/env bash
# Checks and measures on a GPU host what build.sh has packed. README.md, beside this file, has the prerequisites, the
# stages, the variables, and where results go.
#
#     [OUT=folder] [DEADLINE=560] benches/gpu/run.sh [STAGE...]   # all stages in the order below, unless some are named
set -uo pipefail
stages=(look streams quick profile bench kernels ahead tensor operations forms steps compiled peers precisions threads sanitize cifar10)
for stage in "$@"; do
    [[ " ${stages[*]} " == *" $stage "* ]] || { echo "no stage is called $stage: there are ${stages[*]}" >&2; exit 2; }
done
[[ $# -eq 0 ]] || stages=("$@")

cd "$(dirname "$0")/../.." || exit
deadline=${DEADLINE:-560}
out=${OUT:-target/gpu-results}
summary=$out/summary.txt
# A later call on the same host finds here what was compiled. The logs are those of one call.
kept=${TMPDIR:-/tmp}/biformer-gpu
logs=$kept/logs
# Start afresh: otherwise a host that was used before would run its old files.
rm -rf target/gpu "$logs" "$out"/{summary.txt,all.log,profiles.txt,kernels.txt,plans.txt,{infer,train}.csv.gz,cifar10.tar.xz}
mkdir -p "$out" "$logs" "$kept/kernels"
tar -C target -xJf target/gpu.tar.xz 2>/dev/null || python3 -m tarfile -e target/gpu.tar.xz target || exit
[[ ! -d target/gpu/kernels ]] || cp -r target/gpu/kernels "$kept/"
# Test binaries look for their fixtures where they were built.
root=$(<target/gpu/root)
[[ -e $root ]] || { mkdir -p "${root%/*}" && ln -sfn "$PWD" "$root"; }

export BIFORMER_CACHE=$kept/kernels TORCHINDUCTOR_CACHE_DIR=$kept/inductor BIFORMER_TEST_GPU=1
add_libraries() { [[ ! -d $1 ]] || export LD_LIBRARY_PATH="$1${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"; }
add_libraries /usr/local/nvidia/lib64
torch_libraries=${LD_LIBRARY_PATH-} # PyTorch has its own, and must not load the toolkit's
add_libraries /usr/local/cuda/lib64
PATH=$PATH:/usr/local/cuda/bin
for folder in /opt/nvidia/nsight-compute/*/; do PATH=$PATH:$folder; done
# The program looks for PyTorch's libraries in the active environment: here that of python3.
export VIRTUAL_ENV="${VIRTUAL_ENV:-$(python3 -c 'import sys; print(sys.prefix)' 2>/dev/null)}"

# note RESULT STATUS SECONDS NAME: a line of the summary
note() { printf '%-7s %3s %4s s  %s\n' "$@" | tee -a "$summary"; }

# skip NAME REASON: leaves out what this host cannot do
skip() { printf '%-18s  %s: %s\n' "left out" "$@" | tee -a "$summary"; }

# Some lines, as a remark on the part before.
remark() { sed 's/^/          /' | tee -a "$summary"; }

# Several processes write at once: each passes on its whole output in one write.
whole() { dd bs=128K iflag=fullblock status=none; }

late=75 # the status of a part that was not begun

# try CAP NAME COMMAND...: runs it for at most CAP seconds, notes the result, and returns its status
try() {
    local cap=$1 name=$2 log=$logs/$2.log left=$((deadline - SECONDS)) began=$SECONDS result status
    shift 2
    if [[ $left -lt 5 ]]; then
        note SKIPPED - 0 "$name"
        return $late
    fi
    timeout -k 5 $((left < cap ? left : cap)) "$@" >"$log" 2>&1 </dev/null
    status=$?
    case $status in
        0) result=ok ;;
        124 | 137) result=$([[ $left -lt $cap ]] && echo CUT || echo HUNG) ;;
        *) result=FAILED ;;
    esac
    { echo "== $name: $*"; tail -c 60000 "$log"; } | whole >>"$out/all.log"
    [[ $result == ok ]] || { echo "-- $name said last:"; tail -n 25 "$log" | tail -c 2500; } | whole
    note "$result" "$status" $((SECONDS - began)) "$name"
    return "$status"
}

# As try, with the figures in the summary.
measure() {
    local status
    try "$@"
    status=$?
    grep -sE 'images/s|^stage |^ +[0-9] ' "$logs/$2.log" | head -n 8 | remark
    return "$status"
}

# outcome NAME: the loss, or the output's size, that a part ended with
outcome() { sed -nE 's/.*, (loss|output \(root mean square\)) ([0-9.]+)$/\2/p' "$logs/$1.log" | head -n 1; }

# agree TOLERANCE NAME OTHER...: whether the outcome of each other is the first one's, within this relative tolerance
agree() {
    local tolerance=$1 first=$2 other result
    shift 2
    for other; do
        [[ -e $logs/$first.log && -e $logs/$other.log ]] || continue # one was not begun
        result=FAILED
        awk -v a="$(outcome "$first")" -v b="$(outcome "$other")" -v t="$tolerance" \
            'BEGIN { exit !(a > 0 && b > 0 && (a > b ? a - b : b - a) <= t * a) }' && result=ok
        note $result - 0 "$other is $first within $tolerance"
    done
}

# Messages of the driver and cuBLASLt about a kernel or a call that caused a fault.
fault='illegal|misaligned|invalid|launch failure|too many resources|hardware|waiting for the GPU|CUBLAS_STATUS|captur'

# Only the first three failures are run again: they show what many failures have in common.
a_rerun() {
    local place
    for place in 1 2 3; do
        mkdir "$logs/rerun-$place" 2>/dev/null && return
    done
    return 1
}

# As try; what fails is run again without cuBLASLt's epilogues, and what fails by a fault, not by a wrong
# number, also with synchronous launches, and under the memory checker.
check() {
    local name=$2 status
    try "$@"
    status=$?
    case $status in 0 | 124 | 137 | "$late") return ;; esac
    a_rerun || return
    shift 2
    BIFORMER_BARE_PRODUCTS=1 try 45 "$name-bare" "$@"
    [[ $status -ge 128 ]] || grep -qE "$fault" "$logs/$name.log" || return
    CUDA_LAUNCH_BLOCKING=1 try 45 "$name-blocking" "$@"
    [[ -n $(no_sanitizer) ]] || try 90 "$name-memcheck" compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 "$@"
}

# Prints why compute-sanitizer cannot be used; nothing if it can.
no_sanitizer() {
    if [[ $(uname -r) == 4.4.0 ]]; then
        echo "gVisor has no device for it"
    elif ! command -v compute-sanitizer >/dev/null; then
        echo "there is no compute-sanitizer"
    fi
}

# Waits until fewer than four run in the background.
a_place() { while [[ $(jobs -rp | wc -l) -ge 4 ]]; do wait -n; done; }

# Waits for all of them, but not for `ahead`.
no_more() {
    local job
    for job in $(jobs -rp); do [[ $job == "${compiling-}" ]] || wait "$job"; done
}

# [cap=SECONDS] each BINARY [FILTER...]: runs its tests, each in its own process: after a fault CUDA
# refuses all further work of a process
each() {
    local binary=$1 name cap=${cap:-45}
    shift
    for name in $("target/gpu/$binary" --list --format terse "$@" | sed -n 's/: test$//p'); do
        a_place
        check "$cap" "$binary-${name##*::}" "target/gpu/$binary" --exact "$name" --nocapture &
    done
    no_more
}

# An idle GPU is shut down, and takes seconds to start for each of the many processes here: so one stays. It
# is not a job of this shell, or `wait` would wait for it.
[[ $(type -t nvidia-smi) != file ]] || awake=$(nvidia-smi dmon -d 10 -c 100 >/dev/null 2>&1 & echo $!)
trap '[[ -z ${awake-} ]] || kill "$awake" 2>/dev/null' EXIT

parity=(target/gpu/ops --exact every_operation_is_that_of_the_cpu --nocapture)
ours=(target/gpu/biformer bench --device cuda)
bf16=("${ours[@]}" --precision bf16)
small=("${bf16[@]}" --model small --batch-size 128)

look() {
    [[ $(benches/gpu/sources.sh) == "$(<target/gpu/sources)" ]] || note FAILED - 0 "built from these sources: run build.sh again"
    try 20 nvidia-smi nvidia-smi
    try 20 host bash -c 'uname -a; nproc; free -m; ls -d /usr/local/{cuda,nvidia}*; python3 --version; env | grep PATH'
    try 60 devices target/gpu/biformer devices
    # The loader tells which of several libraries is used.
    try 60 libraries bash -c 'LD_DEBUG=libs target/gpu/biformer devices 2>&1 | sed -n "s/.*calling init: //p" |
        grep -E "libcuda|nvrtc|cublas"'
    cat "$logs"/{devices,libraries}.log 2>/dev/null | head -n 12 | remark
    local brought=("$kept"/kernels/*) there
    ONLY=gelu try 60 first-kernel "${parity[@]}"
    there=("$kept"/kernels/*)
    [[ ${#there[@]} -eq ${#brought[@]} ]] || echo "kernels are compiled here: build.sh used another NVRTC" | remark
}

# Whether several streams, and what is recorded of them, keep their order. Without the tests that need the emulated device.
streams() {
    each recording
    each prefetch
    each aside --skip emulated
}

tensor() {
    each tensor --skip emulated
    each products
    cap=90 each ops --exact a_parameter_rounded_to_bf16_gets_its_gradient
}

operations() {
    local name
    for name in $(<target/gpu/operations); do
        a_place
        ONLY=$name check 45 "op-$name" "${parity[@]}" &
    done
    no_more
}

forms() {
    each extremes
    each forms cuda::tests on_a_gpu a_map_beyond gradients_are_those_of_a_product_and_a_sum
    each optim
}

# A few figures, in case all else fails; whether a step of realistic size is correct, and repeatable; and a
# question: if something fails, is it the recording, or cuBLASLt's epilogues? (And are these worth their while?)
quick() {
    local mode full=("${ours[@]}" --precision f32 --model small --batch-size 128 --steps 1)
    local few=(target/gpu/biformer bench --model small --batch-size 8 --steps 1)
    for mode in train infer; do
        measure 60 "quick-small-$mode" "${small[@]}" --mode $mode --steps 10
        case $? in 124 | 137)
            echo "from here on with one stream" | remark
            export BIFORMER_ONE_STREAM=1 ;;
        esac
        # Only a training step does two things at once.
        [[ $mode == infer ]] ||
            BIFORMER_ONE_STREAM=1 measure 30 quick-small-train-one-stream "${small[@]}" --mode train --steps 10
        measure 30 "quick-small-$mode-again" "${small[@]}" --mode $mode --steps 10
        BIFORMER_UNRECORDED=1 measure 30 "quick-small-$mode-unrecorded" "${small[@]}" --mode $mode --steps 10
        BIFORMER_UNTRIED_PRODUCTS=1 measure 30 "quick-small-$mode-untried" "${small[@]}" --mode $mode --steps 10
        # What is rounded otherwise soon goes its own way: so these are compared after few steps.
        measure 30 "quick-small-$mode-early" "${small[@]}" --mode $mode --steps 1
        BIFORMER_BARE_PRODUCTS=1 measure 30 "quick-small-$mode-bare" "${small[@]}" --mode $mode --steps 1
        measure 30 "quick-small-$mode-f32" "${full[@]}" --mode $mode
        measure 30 "quick-few-$mode" "${few[@]}" --mode $mode --device cuda
        measure 120 "quick-few-$mode-cpu" "${few[@]}" --mode $mode
        agree 0 "quick-small-$mode" "quick-small-$mode"-{one-stream,again,unrecorded,untried}
        agree 1e-2 "quick-small-$mode-early" "quick-small-$mode"-{bare,f32}
        agree 1e-4 "quick-few-$mode" "quick-few-$mode-cpu"
    done
}

profile() {
    local mode
    for mode in train infer; do
        try 60 "profile-small-$mode" "${small[@]}" --mode $mode --steps 5 --profile || continue
        head -n 14 "$logs/profile-small-$mode.log" | remark
        cat "$logs/profile-small-$mode.log" >>"$out/profiles.txt"
    done
    # Which of the algorithms that cuBLASLt recommends for a product is the fastest, and which give other bits.
    BIFORMER_PLANS=1 try 60 plans "${small[@]}" --mode train --steps 1
    grep -s '^plan ' "$logs/plans.log" >"$out/plans.txt"
}

bench() {
    local model mode
    for model in small tiny stl; do
        for mode in train infer; do
            measure 30 "bench-$model-$mode" "${bf16[@]}" --model $model --batch-size 128 --mode $mode --steps 100
        done
        # What does a step gain from doing two things at once?
        BIFORMER_ONE_STREAM=1 measure 30 "bench-$model-train-one-stream" "${bf16[@]}" --model $model --batch-size 128 \
            --mode train --steps 100
    done
    measure 30 bench-small-only-bra "${small[@]}" --only-bra --steps 50
    measure 30 bench-small-one-image "${bf16[@]}" --model small --batch-size 1 --mode infer --steps 100
    # What do the recipes' dropped branches cost?
    measure 30 bench-small-train-drop-path "${small[@]}" --set drop_path=0.15 --steps 60
    # How much less memory, and how much more time?
    measure 30 bench-small-train-recompute "${small[@]}" --recompute block --steps 10
}

# The time of every kernel in a step, as the GPU tells it.
kernels() {
    local mode
    command -v ncu >/dev/null || { skip kernels "there is no ncu"; return; }
    for mode in infer train; do
        # A step that is profiled is not recorded. Not from the start, or cuBLASLt's algorithms would be tried under the
        # profiler, which takes longer than they do.
        try 90 "kernels-$mode" ncu --profile-from-start off --clock-control none --cache-control none \
            --metrics gpu__time_duration.sum --csv --print-units base --log-file "$logs/$mode.csv" \
            "${small[@]}" --mode $mode --steps 2 --profile || continue
        gzip -c "$logs/$mode.csv" >"$out/$mode.csv.gz"
        # To a file first: head would close a pipe before everything is written.
        if ! python3 benches/gpu/kernels.py <"$logs/$mode.csv" >"$logs/$mode.txt"; then
            note FAILED 1 0 "kernels-$mode-table"
            continue
        fi
        { echo "small, batch 128, $mode" && cat "$logs/$mode.txt"; } >>"$out/kernels.txt"
        head -n 26 "$logs/$mode.txt" | remark
    done
}

has_torch() { python3 -c 'import importlib.util as i, sys; sys.exit(i.find_spec("torch") is None)' 2>/dev/null; }

# twin COMMAND CAP NAME WORK GATHER OPTION...: the twin's speed, measured by `measure` or `try`
twin() {
    local command=$1 cap=$2 name=$3 work=$4 gather=$5 mode LD_LIBRARY_PATH=$torch_libraries
    shift 5
    mode=(--mode "$work")
    [[ $work != only-bra ]] || mode=(--only-bra)
    "$command" "$cap" "$name" python3 benches/peers/bench_torch.py --device cuda --dtype bf16 --gather "$gather" \
        --attention sdpa --model-json small --image-size 224 --batch-size 128 "${mode[@]}" "$@"
}

# The twin, with the published gather and with its own. What has not been measured yet comes first.
peers() {
    local work gather
    has_torch || { skip peers "there is no PyTorch"; return; }
    try 60 torch python3 -c 'import torch; print(torch.__version__)'
    tail -n 1 "$logs/torch.log" | remark
    while read -r work gather; do
        twin measure 150 "torch-small-$work-$gather-eager" "$work" "$gather" --steps 20
    done <<'RUNS'
infer published
infer index
train published
only-bra published
train index
only-bra index
RUNS
}

# The same with torch.compile, which takes about three minutes of a processor's time, unless `ahead` was there before.
compiled() {
    has_torch || { skip compiled "there is no PyTorch"; return; }
    [[ -z ${compiling-} ]] || wait "$compiling"
    twin measure 240 torch-small-train-published-compiled train published --steps 20 --compile
}

# Fills the cache of torch.compile, while the next stages check what is right.
ahead() {
    has_torch || return
    twin try 240 torch-small-train-ahead train published --steps 1 --warmup 1 --compile &
    compiling=$!
}

steps() {
    # Without the tests that run the program from where it was built.
    cap=120 each steps --skip a_run_goes_on --skip gradcheck_compares
    cap=120 each golden on_a_gpu
}

precisions() {
    local precision mode
    for precision in tf32 f32; do
        for mode in train infer; do
            measure 60 "bench-small-$mode-$precision" "${ours[@]}" --precision $precision --model small \
                --batch-size 128 --mode $mode --steps 10
        done
    done
}

# What training on the CPU gains from more threads, whose number must not change the bits.
threads() {
    local count cores nano=() tiny=()
    cores=$(nproc)
    for count in 1 2 4 8 16 32; do
        [[ $count -le $cores ]] || break
        measure 60 "cpu-nano-$count" target/gpu/biformer bench --model nano --threads $count --steps 8
        nano+=("cpu-nano-$count")
        [[ $count -ge 4 ]] || continue
        measure 60 "cpu-tiny-$count" target/gpu/biformer bench --model tiny --batch-size 32 --threads $count --steps 3
        tiny+=("cpu-tiny-$count")
    done
    agree 0 "${nano[@]}"
    [[ ${#tiny[@]} -eq 0 ]] || agree 0 "${tiny[@]}"
}

sanitize() {
    local reason precision tool name
    reason=$(no_sanitizer)
    [[ -z $reason ]] || { skip sanitize "$reason"; return; }
    # Not on tests, whose memory is initialised with NaN. And with single launches, about which it can report
    # more than about a recording.
    for precision in bf16 f32; do
        BIFORMER_UNRECORDED=1 try 90 "initcheck-$precision" \
            compute-sanitizer --tool initcheck --report-api-errors no --error-exitcode 9 \
            "${ours[@]}" --precision $precision --model nano --batch-size 8 --steps 2
    done
    for name in bra linear conv2d mlp attention dwconv layer_norm batch_norm softmax cross_entropy; do
        for tool in memcheck racecheck synccheck; do
            ONLY=$name try 90 "$tool-$name" compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 9 "${parity[@]}"
        done
    done
}

# From scratch, by the configuration that is kept for GPUs.
cifar10() {
    [[ -d ${DATA-} ]] || { skip cifar10 "DATA names no folder"; return; }
    rm -rf "$kept/cifar10"
    try 600 cifar10 target/gpu/biformer train --config configs/cifar10-gpu.toml --data "$DATA" --out "$kept/cifar10"
    tail -n 3 "$logs/cifar10.log" | remark
    cp "$logs/cifar10.log" "$kept/cifar10/log.txt" && tar -C "$kept" --exclude '*.safetensors' -cJf "$out/cifar10.tar.xz" cifar10
}

for stage in "${stages[@]}"; do
    if [[ $((deadline - SECONDS)) -ge 5 ]]; then
        "$stage"
    else
        note SKIPPED - 0 "$stage"
    fi
done
echo
echo "== in $SECONDS s:"
cat "$summary"
! grep -qE '^(FAILED|HUNG|CUT|SKIPPED) ' "$summary"
