"""Proves that the PyTorch twin is BiFormer: compares it, in f64, with golden vectors.

    python check.py PATH_TO_GOLDEN_VECTORS

The vectors are outputs of the published model on weights and inputs that a few lines of integer
arithmetic generate (`generate` below), so that nothing but numbers is needed here. Every way of
gathering and attending is checked: the logits, and the first steps of training from generated weights.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from biformer_torch import BiFormer, count_macs, load_config, parameter_groups

WAYS = [("published", False), ("published", True), ("index", False), ("index", True)]


def generate(key, shape, rule=None):
    """Values of the tensor `key`: splitmix64, started from the key's FNV-1a hash."""
    state = 0xCBF29CE484222325
    for byte in key.encode():
        state = ((state ^ byte) * 0x100000001B3) % 2**64
    count = math.prod(shape)
    z = np.uint64(state) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    u = (z >> np.uint64(40)).astype(np.float64) * 2.0**-24
    a, b = rule or spread(key, shape)
    values = (b + a * (2 * u - 1)).astype(np.float32)
    return torch.from_numpy(values.reshape(shape)).double()


def spread(key, shape):
    """(a, b): the values of a weight lie in b - a .. b + a."""
    if key.endswith(".running_mean") or key.endswith(".bias"):
        return 0.1, 0.0
    if key.endswith(".running_var"):
        return 0.5, 1.0
    if len(shape) == 1:
        return 0.25, 1.0
    a = math.sqrt(3 / math.prod(shape[1:]))
    return (a / 4 if key.endswith("pos_embed.weight") else a), 0.0


def build(config, gather, sdpa):
    model = BiFormer(config, gather, sdpa).double().to(memory_format=torch.channels_last)
    state = {}
    for key, value in model.state_dict().items():
        counter = key.endswith("num_batches_tracked")
        state[key] = torch.zeros_like(value) if counter else generate(key, tuple(value.shape))
    model.load_state_dict(state)
    return model


def image(key, shape):
    return generate(key, shape, (2.0, 0.0)).to(memory_format=torch.channels_last)


failures = 0


def report(what, error, tolerance):
    global failures
    good = error <= tolerance  # false for NaN
    failures += not good
    print(f"{'ok  ' if good else 'FAIL'} {what}: {error:.2e} (tolerance {tolerance:.0e})", flush=True)


def relative(value, wanted):
    # The dtype is spelled out: a list of Python floats would otherwise be rounded to f32 first.
    value = torch.as_tensor(value, dtype=torch.float64)
    wanted = torch.as_tensor(wanted, dtype=torch.float64).reshape(value.shape)
    return float((value - wanted).norm() / wanted.norm())


def check_names(golden):
    lines = (golden / "keys_biformer_tiny.txt").read_text().split("\n")
    wanted = [line.rsplit(" ", 1)[0] for line in lines if line]
    found = [f"{key} {list(value.shape)}" for key, value in BiFormer("tiny").state_dict().items()]
    report("tiny: state_dict names and shapes, in order, that differ", float(wanted != found), 0.0)
    parameters = sum(p.numel() for p in BiFormer("tiny").parameters())
    report("tiny: parameters against 13,142,760", abs(parameters - 13_142_760), 0.0)
    report("tiny: multiply-adds against 2.216 G", abs(count_macs("tiny", 224) / 2.216e9 - 1), 1e-3)


def check_generator(golden):
    for key, wanted in json.loads((golden / "generator_check.json").read_text()).items():
        if key == "input":
            values = generate(key, (4,), (2.0, 0.0))
        else:
            values = generate(key, tuple(BiFormer("tiny").state_dict()[key].shape)).flatten()[:4]
        report(f"generator: {key}", relative(values, wanted["first4"]), 1e-15)


def check_forward(golden, name):
    case = json.loads((golden / f"forward_{name}.json").read_text())
    wanted = load_file(golden / f"{name}.f64.safetensors")["logits"]
    config = {key: case["model"][key] for key in load_config({}) if key in case["model"]}
    for way in WAYS:
        model = build(config, *way).eval()
        with torch.no_grad():
            logits = model(image("input", case["input"]["shape"]))
        report(f"{name}: logits, gather {way[0]}, sdpa {way[1]}", relative(logits, wanted), 1e-9)


def check_training(golden, name):
    case = json.loads((golden / f"train_{name}.json").read_text())
    classes, shape = case["num_classes"], case["shape"]
    config = {key: case["model"][key] for key in load_config({}) if key in case["model"]}
    for way in WAYS:
        model = build(config, *way).train()
        optimizer = torch.optim.AdamW(parameter_groups(model), lr=1e-3)
        losses, norms, gradients = [], [], {}
        for step in range(len(case["losses"])):
            labels = torch.tensor([(7 * i + 3 * step + 1) % classes for i in range(shape[0])])
            loss = F.cross_entropy(model(image(f"input.{step}", shape)), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            if step == 0:
                gradients = {key: p.grad.clone() for key, p in model.named_parameters()}
            norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))
            losses.append(loss.item())
            optimizer.step()
        with torch.no_grad():
            logits = model.eval()(image("input.eval", shape))
        how = f"{name}: training, gather {way[0]}, sdpa {way[1]}"
        # Against the global norm: a bias before a BatchNorm has gradient zero, up to rounding.
        worst = max(differs(gradients[key], wanted) for key, wanted in case["grads_step0"].items())
        report(f"{how}: worst gradient of the first step", worst / case["grad_global_norm"][0], 1e-9)
        report(f"{how}: {len(losses)} losses", relative(losses, case["losses"]), 1e-9)
        # AdamW divides that rounding by its own size, so the error grows from step to step.
        report(f"{how}: gradient norms", relative(norms, case["grad_global_norm"]), 1e-6)
        report(f"{how}: logits after it", relative(logits, case["eval_logits_after"]), 1e-6)


def differs(gradient, wanted):
    """How far a gradient's norm, sum and first elements are from what they should be."""
    found = [gradient.norm(), gradient.sum(), *gradient.flatten()[: len(wanted["first4"])]]
    expected = [wanted["l2"], wanted["sum"], *wanted["first4"]]
    return max(abs(float(f) - e) for f, e in zip(found, expected, strict=True))


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    golden = Path(sys.argv[1])
    check_generator(golden)
    check_names(golden)
    for name in ("tiny_224", "tiny_autopad_200x304"):
        check_forward(golden, name)
    for name in ("tiny_112", "small4_64_autopad"):
        check_training(golden, name)
    sys.exit(f"{failures} checks failed" if failures else 0)


if __name__ == "__main__":
    main()
