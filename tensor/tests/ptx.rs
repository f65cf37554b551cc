//! What running PTX finds out: kernels that make the mistakes for which NVIDIA has its sanitizers, each in a process of
//! its own, as a GPU does nothing more after a fault.

use standin::Standin;
use std::sync::Arc;
use tensor::cuda::nvidia::compiler::version;
use tensor::cuda::{Gpu, Module};
use tensor::{DType, Device, Tensor};

/// Names the kernel that is to run.
const FAULT: &str = "FAULT";

/// Kernels, and what is said of their mistakes: nothing of the first ones.
const MISTAKES: [(&str, &str); 28] = [
    ("none", ""),
    ("fused", ""),
    ("first_group", ""),
    ("no_barrier", " what another "),
    ("too_late_a_barrier", " what another "),
    ("no_meeting_of_the_warp", "reads what another writes: thread "),
    ("never_written", "reads shared memory that nobody has written"),
    ("far_beyond", "is at global memory that is nobody's"),
    ("beyond_shared_memory", "is beyond the end of memory"),
    ("not_aligned", "is not aligned to 8 bytes"),
    ("two_blocks_at_one_place", "writes what another writes: thread "),
    ("no_ticket", " what another "),
    ("no_fence", "takes a ticket without a fence"),
    ("no_barrier_before_the_ticket", "reads what another writes: thread "),
    ("no_barrier_after_the_ticket", " what another "),
    ("written_after_the_ticket", " what another "),
    ("written_after_the_fence", "takes a ticket without a fence"),
    ("a_block_without_a_ticket", "reads what another writes: thread "),
    ("tickets_are_set_back", "has what tickets are taken from"),
    ("an_old_line", "reads what another block wrote, through the first-level cache"),
    ("a_copy_of_an_old_line", "reads what another block wrote, through the first-level cache"),
    ("a_constant_that_changes", "writes what is read as constant"),
    ("half_a_warp", "waits for lanes of its warp that have ended"),
    ("lanes_at_two_places", "waits for lanes of its warp that wait at another place"),
    ("a_copy_is_not_awaited", "has what a copy is on its way to"),
    ("others_copies_are_not_awaited", " what another "),
    ("the_last_group_is_not_awaited", "has what a copy is on its way to"),
    ("a_copy_comes_when_all_is_over", "ends before its copies have come"),
];

/// Their names.
const KERNELS: [&str; MISTAKES.len()] = {
    let mut names = [""; MISTAKES.len()];
    let mut place = 0;
    while place < names.len() {
        names[place] = MISTAKES[place].0;
        place += 1;
    }
    names
};

static FAULTS: Module = Module {
    name: "faults",
    source: r#"
        #include "instructions.cuh"
        #include "sums.cuh"

        __global__ void none(u32* out) {
            __shared__ u32 shared[128];
            shared[threadIdx.x] = threadIdx.x;
            __syncthreads();
            out[thread_number()] = shared[127 - threadIdx.x];
        }
        // A product that is subtracted may stay unrounded.
        __global__ void fused(u32* out) {
            float x = 1 + (2 * thread_number() + 1) * 0x1p-12f, rounded = rounded_product(x, x);
            out[thread_number()] = rounded - x * x != 0;
        }
        __global__ void no_barrier(u32* out) {
            __shared__ u32 shared[128];
            shared[127 - threadIdx.x] = 0;
            __syncthreads();
            shared[threadIdx.x] = threadIdx.x;
            out[thread_number()] = shared[127 - threadIdx.x];
        }
        __global__ void too_late_a_barrier(u32* out) {
            __shared__ u32 shared[128];
            shared[threadIdx.x] = threadIdx.x;
            __syncthreads();
            u32 other = shared[127 - threadIdx.x];
            shared[threadIdx.x] = other + 1;
            __syncthreads();
            out[thread_number()] = shared[127 - threadIdx.x];
        }
        __global__ void no_meeting_of_the_warp(u32* out) {
            __shared__ u32 shared[128];
            shared[127 - threadIdx.x] = 0;
            __syncthreads();
            shared[threadIdx.x] = threadIdx.x;
            out[thread_number()] = shared[threadIdx.x ^ 1];
        }
        __global__ void never_written(u32* out) {
            __shared__ u32 shared[128];
            if (threadIdx.x < 100) shared[threadIdx.x] = 1;
            __syncthreads();
            out[thread_number()] = shared[threadIdx.x];
        }
        __global__ void far_beyond(u32* out) { out[thread_number() << 24] = 1; }
        __global__ void beyond_shared_memory(u32* out) {
            __shared__ u32 shared[128];
            shared[threadIdx.x + gridDim.x * 64] = 1;
            __syncthreads();
            out[thread_number()] = shared[threadIdx.x];
        }
        __global__ void not_aligned(u32* out) { reinterpret_cast<u64*>(out + 1)[thread_number()] = 1; }
        __global__ void two_blocks_at_one_place(u32* out) { out[threadIdx.x] = blockIdx.x; }
        __global__ void no_ticket(u32* out) {
            out[thread_number()] = 1;
            __syncthreads();
            if (blockIdx.x == 1) out[thread_number()] = out[threadIdx.x] + 1;
            else out[thread_number()] = out[threadIdx.x + 128] + 1;
        }
        __global__ void no_fence(u32* out) {
            out[thread_number()] = 1;
            __syncthreads();
            if (threadIdx.x == 0) atomicInc(counters, 1);
        }
        __device__ bool last_ticket() { return atomicInc(counters, 1) == 1; }
        __global__ void no_barrier_before_the_ticket(u32* out) {
            __shared__ bool last;
            out[thread_number()] = 1;
            if (threadIdx.x == 0) {
                fence();
                last = last_ticket();
                fence();
            }
            __syncthreads();
            if (last) out[thread_number()] = load_fresh(out + 4 * lane() % 256).at[0];
        }
        __global__ void no_barrier_after_the_ticket(u32* out) {
            __shared__ bool last;
            out[thread_number()] = 1;
            __syncthreads();
            if (threadIdx.x == 0) {
                fence();
                last = last_ticket();
                fence();
            }
            out[thread_number()] = load_fresh(out + (thread_number() / 4 * 4 + 128) % 256).at[0];
        }
        __global__ void written_after_the_ticket(u32* out) {
            bool last = last_block(0, 2);
            if (!last) out[thread_number()] = 1;
            else out[thread_number()] = load_fresh(out + (thread_number() / 4 * 4 + 128) % 256).at[0];
        }
        __global__ void written_after_the_fence(u32* out) {
            __shared__ bool last;
            if (threadIdx.x == 0) {
                fence();
                out[thread_number()] = 1;
                last = last_ticket();
                fence();
            }
        }
        __global__ void a_block_without_a_ticket(u32* out) {
            out[thread_number()] = 1;
            if (blockIdx.x == 0) return;
            if (!last_block(0, 2)) fence();
            out[thread_number()] = load_fresh(out + (thread_number() / 4 * 4 + 128) % 256).at[0];
        }
        __global__ void tickets_are_set_back(u32* out) {
            out[thread_number()] = last_block(0, 2);
            counters[0] = 0;
        }
        __global__ void an_old_line(u32* out) {
            out[thread_number()] = 1;
            if (last_block(0, 2)) out[thread_number()] = out[(thread_number() + 128) % 256] + 1;
        }
        __global__ void a_copy_of_an_old_line(u32* out) {
            __shared__ __align__(16) u32 shared[128 * 4];
            out[thread_number()] = 1;
            if (!last_block(0, 2)) return;
            copy_async_cached(shared + threadIdx.x * 4, out + (thread_number() / 4 * 4 + 128) % 256, true);
            wait_for_copies();
        }
        __global__ void a_constant_that_changes(u32* out) { out[thread_number()] = __ldg(out + thread_number()) + 1; }
        __global__ void half_a_warp(u32* out) {
            if (lane() < 7) return;
            out[thread_number()] = __shfl_xor_sync(~0u, lane(), 1);
        }
        __global__ void lanes_at_two_places(u32* out) {
            u32 other = lane() < 7 ? __shfl_xor_sync(~0u, lane(), 1) : __shfl_xor_sync(~0u, lane() * 3, 2) / 5;
            out[thread_number()] = other;
        }
        __global__ void a_copy_is_not_awaited(u32* out) {
            __shared__ __align__(16) u32 shared[128 * 4];
            copy_async(shared + threadIdx.x * 4, out, true);
            out[thread_number()] = shared[threadIdx.x * 4];
            wait_for_copies();
        }
        __global__ void others_copies_are_not_awaited(u32* out) {
            __shared__ __align__(16) u32 shared[128 * 4];
            shared[(127 - threadIdx.x) * 4] = 0;
            __syncthreads();
            copy_async(shared + threadIdx.x * 4, out, false);
            wait_for_copies();
            out[thread_number()] = shared[(127 - threadIdx.x) * 4];
        }
        __device__ void copy_two_groups(u32* shared, const u32* out) {
            for (int group = 0; group < 2; group++) {
                copy_async(shared + (group * 128 + threadIdx.x) * 4, out, false);
                group_copies();
            }
            wait_for_groups_but<1>();
        }
        __global__ void first_group(u32* out) {
            __shared__ __align__(16) u32 shared[256 * 4];
            copy_two_groups(shared, out);
            out[thread_number()] = shared[threadIdx.x * 4];
            wait_for_copies();
        }
        __global__ void the_last_group_is_not_awaited(u32* out) {
            __shared__ __align__(16) u32 shared[256 * 4];
            copy_two_groups(shared, out);
            out[thread_number()] = shared[(128 + threadIdx.x) * 4];
            wait_for_copies();
        }
        __global__ void a_copy_comes_when_all_is_over(u32* out) {
            __shared__ __align__(16) u32 shared[128 * 4];
            copy_async(shared + threadIdx.x * 4, out, true);
        }
    "#,
    headers: &[],
    kernels: &KERNELS,
};

/// Two blocks of 128 threads, on 256 numbers.
#[test]
fn a_kernel_of_these() {
    let Ok(kernel) = std::env::var(FAULT) else { return };
    let gpu = Gpu::for_tests(1).expect("whoever names a kernel has one");
    let mut out = Tensor::zeros_on(&Device::Cuda(Arc::clone(&gpu)), [256], DType::Index).unwrap();
    let launch = FAULTS.launch(&gpu, &kernel, DType::F32).unwrap().grid([2, 1, 1]).threads(128);
    // SAFETY: it is not safe, which is what is looked at.
    let outcome = unsafe { launch.output(&mut out).unwrap().run() }.and_then(|()| out.to_vec::<u32>());
    match outcome {
        Ok(numbers) => match kernel.as_str() {
            "none" => assert!(numbers[..128].iter().copied().eq((0..128).rev())),
            "fused" => assert_eq!(numbers, [1; 256]),
            "first_group" => assert_eq!(numbers, [0; 256]),
            _ => panic!("{kernel} makes no mistake"),
        },
        Err(error) => {
            let is_right = MISTAKES.contains(&(&kernel, ""));
            assert!(!is_right && error.to_string().contains("launch failure"), "{error}");
        }
    }
}

#[test]
fn mistakes_are_found() {
    let Some(standin) = Standin::in_ptx(version()) else { return };
    for (kernel, words) in MISTAKES {
        let said = standin.repeat(&["a_kernel_of_these"], &[(FAULT, kernel)]);
        assert!(said.contains(words), "{kernel}: expected \"{words}\" in: {said}");
        assert_eq!(said.contains("the stand-in GPU"), !words.is_empty(), "{said}");
    }
}
