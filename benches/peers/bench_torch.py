"""Throughput of the PyTorch twin on synthetic data; prints one JSON object with --json.

Its arguments mirror those of `biformer bench`, so that both programs can be given the same line.
"""

import argparse
import json
import resource
import statistics
import sys
import time

import torch
import torch.nn.functional as F

from biformer_torch import GATHERS, BiFormer, BiLevelRoutingAttention, count_macs, load_config, parameter_groups


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model-json", default="tiny", metavar="FILE|tiny|small|nano", help="configuration")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--mode", choices=["train", "infer"], default="train")
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them, compilation included")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--gather", choices=sorted(GATHERS), default="index")
    parser.add_argument("--attention", choices=["matmul", "sdpa"], default="matmul",
                        help="matmul has measured faster on CPUs at BiFormer's few keys per query")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32", help="bf16: weights and images for inference, autocast for training")
    parser.add_argument("--memory-format", choices=["channels_last", "contiguous"], default="channels_last")
    parser.add_argument("--only-bra", action="store_true", help="of the model only its routed attention, stage by stage")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a line of text")
    return parser.parse_args()


def seconds_each(work, args):
    """The time of one of `args.steps` runs, which are asked for one behind the other."""
    def wait():
        if args.device == "cuda":
            torch.cuda.synchronize()

    for _ in range(args.warmup):
        work()
    wait()
    start = time.perf_counter()
    for _ in range(args.steps):
        work()
    wait()
    return (time.perf_counter() - start) / args.steps


def bench_stages(args):
    """Routed attention from queries, keys and values to mixed values, local context included: the work of
    `biformer bench --only-bra`."""
    config, side, stages = load_config(args.model_json), args.image_size, []
    for index, (dim, n_win, topk) in enumerate(zip(config["embed_dim"], config["n_win"], config["topks"])):
        strides = config["stem_strides"] if index == 0 else [2]
        for stride in strides:
            side = (side - 1) // stride + 1
        if topk < 0:
            continue
        attention = BiLevelRoutingAttention(dim, dim // config["head_dim"], n_win, topk, False, args.gather,
                                            args.attention == "sdpa").to(args.device)
        dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
        shape = (args.batch_size, n_win**2, (side // n_win) ** 2, 3 * dim)
        qkv = torch.randn(shape, device=args.device, dtype=dtype, requires_grad=True)
        upstream = torch.randn(args.batch_size, side, side, dim, device=args.device, dtype=dtype)
        mix = torch.compile(attention.mix) if args.compile else attention.mix

        def forward():
            with torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bf16"):
                return mix(qkv, side, side)

        def forward_backward():
            qkv.grad = attention.lepe.weight.grad = attention.lepe.bias.grad = None
            forward().backward(upstream)

        with torch.inference_mode():
            forward_ms = 1e3 * seconds_each(forward, args)
        stages.append({"stage": index + 1, "forward_ms": forward_ms,
                       "forward_backward_ms": 1e3 * seconds_each(forward_backward, args)})
    for stage in [] if args.json else stages:
        print(f"stage {stage['stage']}: forward {stage['forward_ms']:.3f} ms, "
              f"forward + backward {stage['forward_backward_ms']:.3f} ms")
    if args.json:
        print(json.dumps({"stages": stages, "gather": args.gather, "compile": args.compile, "dtype": args.dtype}))


def main():
    args = arguments()
    cuda = args.device == "cuda"
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    if args.only_bra:
        bench_stages(args)
        return
    config = load_config(args.model_json)
    memory_format = torch.channels_last if args.memory_format == "channels_last" else torch.contiguous_format
    model = BiFormer(config, args.gather, args.attention == "sdpa").to(args.device, memory_format=memory_format)
    parameters = sum(p.numel() for p in model.parameters())
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size).to(args.device, memory_format=memory_format)
    labels = torch.randint(config["num_classes"], (args.batch_size,), device=args.device)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.05), lr=1e-3, fused=True)
    model.train(args.mode == "train")
    if args.dtype == "bf16" and args.mode == "infer":
        model, images = model.to(torch.bfloat16), images.to(torch.bfloat16)
    forward = torch.compile(model) if args.compile else model

    def train_step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bf16"):
            loss = F.cross_entropy(forward(images), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        return loss

    @torch.inference_mode()
    def infer_step():
        return forward(images)

    step = train_step if args.mode == "train" else infer_step
    milliseconds, switches = [], []
    for i in range(args.warmup + args.steps):
        switches_before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        start = time.perf_counter()
        result = step()
        if cuda:
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        if i >= args.warmup:
            milliseconds.append(elapsed * 1e3)
            switches.append(resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches_before)
    if not torch.isfinite(result).all():
        sys.exit("the last step gave values that are not finite: not a measurement")

    median = statistics.median(milliseconds)
    report = {
        "images_per_second": args.batch_size / median * 1e3,
        "median_step_ms": median,
        "min_step_ms": min(milliseconds),
        # Some dozens: quiet. Hundreds: other programs took the cores away, measure again.
        "involuntary_switches_per_step": statistics.median(switches),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "compile": args.compile,
        "gather": args.gather,
        "attention": args.attention,
        "memory_format": args.memory_format,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mode": args.mode,
        "dtype": args.dtype,
        "batch_size": args.batch_size,
        "image_size": args.image_size,
        "steps": args.steps,
        "parameters": parameters,
        "macs_per_image": count_macs(config, args.image_size),
    }
    if args.json:
        print(json.dumps(report))
    else:
        print(f"{report['images_per_second']:.1f} images/s, {median:.1f} ms a step, "
              f"{(report['peak_gpu_bytes'] or report['peak_rss_bytes']) / 2**20:.0f} MiB, {parameters / 1e6:.2f} M parameters, "
              f"{report['macs_per_image'] / 1e6:.1f} M multiply-adds an image")


if __name__ == "__main__":
    main()
