"""The instructions of kernels' machine code, without a GPU: block by block, how many and which.

    cargo test --release --no-run --test kernels
    BIFORMER_CACHE=$PWD/target/kernels CAPABILITY=9.0 cargo test --release --test kernels -- --ignored --exact the_cache_is_filled
    python3 benches/gpu/sass.py target/kernels/bra-*.code 'attend_backward_queries_gathered<32, true>'

A block is what runs from one label to the next; `->` names the labels that it may jump to. It needs NVIDIA's
disassembler, of CUDA or of a virtual environment that is active (pip install nvidia-cuda-nvdisasm).
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

LABEL = re.compile(r"\.(L_x_\d+):")
INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)(.*)")
SHOWN = 10


def disassembler():
    """Where nvdisasm is."""
    of_environment = Path(os.environ.get("VIRTUAL_ENV", "")).glob("lib/python*/site-packages/nvidia/*/bin/nvdisasm")
    found = shutil.which("nvdisasm") or next(map(str, of_environment), None)
    return found or sys.exit("no nvdisasm: in a virtual environment, pip install nvidia-cuda-nvdisasm")


def readable(symbols):
    """C++'s names of these symbols, without their parameters."""
    if not shutil.which("c++filt"):
        return symbols
    names = subprocess.run(["c++filt", *symbols], capture_output=True, text=True, check=True).stdout.splitlines()
    names = [re.sub(r"\((int|bool)\)", "", name.removeprefix("void ")) for name in names]
    return [re.sub(r"\(.*", "", name) for name in names]


def blocks(listing):
    """Of each kernel's symbol: its blocks, each a label, the labels that it may jump to, and counts of instructions."""
    kernels, found = {}, None
    for line in listing.splitlines():
        if line.startswith(".text."):
            found = kernels.setdefault(line[len(".text.") :].rstrip(":"), [("begin", [], Counter())])
        elif found is None:
            continue
        elif label := LABEL.match(line):
            found.append((label[1], [], Counter()))
        elif instruction := INSTRUCTION.match(line):
            _, jumps, counts = found[-1]
            counts[instruction[1].split(".")[0]] += 1
            jumps.extend(re.findall(r"L_x_\d+", instruction[2]))
    return kernels


def main(code, wanted):
    symbols, machine_code = Path(code).read_bytes().split(b"\n", 1)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        listing = subprocess.run([disassembler(), "-c", file.name], capture_output=True, text=True, check=True).stdout
    kernels = blocks(listing)
    symbols = symbols.decode().split()
    chosen = [(name, symbol) for name, symbol in zip(readable(symbols), symbols) if wanted in name]
    if not chosen:
        sys.exit(f"no kernel {wanted}; there are:\n" + "\n".join(readable(symbols)))
    for name, symbol in chosen:
        print(f"{name}: {sum(counts.total() for _, _, counts in kernels[symbol])} instructions")
        for label, jumps, counts in kernels[symbol]:
            if counts.total() > 1:
                often = " ".join(f"{name} {count}" for name, count in counts.most_common(SHOWN))
                print(f"  {label:10} {counts.total():5}  {' '.join(f'-> {jump}' for jump in jumps):28}  {often}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
