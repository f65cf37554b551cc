#!/usr/bin/env python3
"""Measures the Rust engine against its PyTorch twin on this machine; prints a Markdown report.

    python3 benches/peers/run.py

Prepares all it needs: a Python environment outside the repository and the release binary. Then
each round runs every program once, one after the other (A B C, A B C, ...), so that whatever else
the machine does falls on all of them, and ratios are taken within a round.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
# ISA extensions that decide what either side can run; the full list of flags would fill a page.
ISA = ("avx avx2 fma f16c avx_vnni avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16 "
       "amx_tile amx_bf16 asimd asimddp bf16 i8mm sve sve2").split()


def arguments():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="nano", help="a model name that the Rust program knows")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE",
                        help="changes fields of the model: drop_path=0.1 trains with the published stochastic depth")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--mode", nargs="+", choices=["train", "infer"], default=["train", "infer"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each run")
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=["eager", "compile", "published"],
                        help="forms of the twin to run beside the Rust engine")
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32", help="that of the Rust engine")
    parser.add_argument("--venv", type=Path, default=cache / "biformer-peers")
    parser.add_argument("--no-build", action="store_true", help="measure the Rust binary as it is")
    return parser.parse_args()


SIDES = {
    "eager": ("PyTorch, eager", []),
    "compile": ("PyTorch, torch.compile", ["--compile"]),
    "bf16": ("PyTorch, torch.compile, bf16", ["--compile", "--dtype", "bf16"]),
    "bf16-eager": ("PyTorch, eager, bf16", ["--dtype", "bf16"]),
    "published": ("PyTorch, eager, gather as published", ["--gather", "published"]),
    "published-compile": ("PyTorch, torch.compile, gather as published", ["--gather", "published", "--compile"]),
}


def note(text):
    print(text, file=sys.stderr, flush=True)


def call(command, **options):
    """Standard output of a command; a failure ends the program with the command's own words."""
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    except FileNotFoundError:
        sys.exit(f"there is no {command[0]}")
    if done.returncode != 0:
        line = shlex.join(str(part) for part in command)
        sys.exit(f"failed (status {done.returncode}): {line}\n{done.stderr.strip()[-4000:]}")
    return done.stdout


def call_json(command, **options):
    """The JSON object that a command prints, on the last line or over all of them."""
    text = call(command, **options).strip()
    for candidate in (text, text.split("\n")[-1]):
        try:
            return json.loads(candidate)
        except json.JSONDecodeError:
            continue
    sys.exit(f"no JSON from: {shlex.join(str(part) for part in command)}\n{text[-2000:]}")


def prepare_python(folder):
    """The environment's interpreter, with PyTorch in it: the CPU build where it can be had."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    probe = [str(python), "-c", "import torch, numpy, safetensors"]
    if python.exists() and subprocess.run(probe, capture_output=True).returncode == 0:
        return python
    note(f"installing PyTorch into {folder} (once)")
    if not python.exists():
        venv.create(folder, with_pip=True)
    install = [str(python), "-m", "pip", "install", "--quiet"]
    if subprocess.run([*install, "torch", "--index-url", CPU_WHEELS]).returncode != 0:
        note("the index of CPU builds did not answer: taking the default build")
        call([*install, "torch"])
    call([*install, "numpy", "safetensors"])
    return python


def prepare_rust(build):
    if build:
        note("building the release binary")
        if subprocess.run(["cargo", "build", "--release"], cwd=ROOT).returncode != 0:
            sys.exit("cargo build --release failed")
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return ROOT / target / "release" / ("biformer.exe" if os.name == "nt" else "biformer")


def machine():
    """(processor, ISA extensions) as the system describes them."""
    fields = {}
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().split("\n"):
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, " ".join(flag for flag in ISA if flag in flags) or "unknown"


def torch_environment():
    """Keeps freed memory in the process. By default glibc returns every large buffer to the system
    and takes it again at the next step; the page faults cost PyTorch up to a third of its speed,
    and we measure it at its best."""
    keep = str(2**34)
    return {**os.environ, "MALLOC_MMAP_THRESHOLD_": keep, "MALLOC_TRIM_THRESHOLD_": keep}


def spread(values, form):
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def disturbed(results):
    """Whether something else used the cores. PyTorch's threads wait for each other in a spin, so
    that a neighbour makes it several times slower: such a ratio would flatter the Rust engine."""
    medians = [result["median_step_ms"] for result in results]
    uneven = max(medians) > 1.2 * min(medians)
    uneven |= any(result["median_step_ms"] > 1.2 * result.get("min_step_ms", 1e9) for result in results)
    # Quiet steps show some 40 a second, disturbed ones hundreds.
    per_second = [r.get("involuntary_switches_per_step", 0) / r["median_step_ms"] * 1e3 for r in results]
    return uneven or statistics.median(per_second) > 150


def table(mode, args, runs):
    """Markdown rows: medians over the rounds, and the Rust engine's ratio to each side."""
    rust = runs["rust"]
    lines = [
        f"### {mode}, {' '.join([args.model, *args.set])}, {args.image_size}x{args.image_size}, batch {args.batch_size}, "
        f"{args.threads} threads",
        "",
        "| | images/s | median step, ms | peak memory, MiB | speed-up |",
        "|---|---|---|---|---|",
    ]
    for side, results in runs.items():
        rates = [args.batch_size / result["median_step_ms"] * 1e3 for result in results]
        ratio = "-"
        if side != "rust":
            pairs = [b["median_step_ms"] / a["median_step_ms"] for a, b in zip(rust, results)]
            ratio = spread(pairs, ".2f")
        name = "Rust" + ", bf16" * (args.precision == "bf16") if side == "rust" else SIDES[side][0]
        name += " **(disturbed)**" if disturbed(results) else ""
        step = statistics.median(result["median_step_ms"] for result in results)
        memory = statistics.median(result["peak_rss_bytes"] for result in results) / 2**20
        lines.append(f"| {name} | {spread(rates, '.0f')} | {step:.1f} | {memory:.0f} | {ratio} |")
    return "\n".join(lines) + "\n"


def main():
    args = arguments()
    python, binary = prepare_python(args.venv), prepare_rust(not args.no_build)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / f"{args.model}.json"
        model = ["--model", args.model, *(["--set", *args.set] if args.set else [])]
        info = call_json([binary, "info", *model, "--json"])
        config.write_text(json.dumps(info["config"]))
        shape = ["--image-size", args.image_size, "--batch-size", args.batch_size,
                 "--steps", args.steps, "--threads", args.threads, "--json"]
        environment = torch_environment()
        twin = None
        tables = []
        for mode in args.mode:
            runs = {side: [] for side in ["rust", *args.sides]}
            for i in range(args.rounds):
                for side in runs:
                    note(f"{mode}: round {i + 1} of {args.rounds}, {side}")
                    if side == "rust":
                        result = call_json([binary, "bench", *model, "--mode", mode,
                                            "--precision", args.precision, *shape])
                    else:
                        command = [python, HERE / "bench_torch.py", "--model-json", config, "--mode", mode]
                        result = twin = call_json([*command, *shape, *SIDES[side][1]], env=environment)
                    if result["threads"] != args.threads:
                        sys.exit(f"{side} ran with {result['threads']} threads instead of {args.threads}")
                    runs[side].append(result)
            isa = runs["rust"][0].get("isa", "unknown")
            tables.append(table(mode, args, runs))

    name, flags = machine()
    print(f"{name}, {os.cpu_count()} cores ({flags}), {platform.system()} {platform.release()}, "
          f"{datetime.date.today()}. Rust kernels: {isa}. PyTorch {twin['torch']}, kernels: "
          f"{twin['cpu_capability']}. {args.rounds} rounds of {args.steps} steps; median (least to most). "
          f"Model: {twin['parameters'] / 1e6:.2f} M parameters, {twin['macs_per_image'] / 1e6:.1f} M "
          "multiply-adds an image.\n")
    text = "\n".join(tables)
    print(text)
    if "(disturbed)" in text:
        print("Rows marked as disturbed were measured while something else used the cores, or varied by "
              "more than a fifth. Their ratios mean nothing: repeat on a quiet machine.")


if __name__ == "__main__":
    main()
